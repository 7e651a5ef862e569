"""Checkpoints in pieces under damage and malice: whole tensors exactly as saved, or an error that names the file."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint import tensors as tensor_files
from depthgate.errors import DepthgateError
from tests.checkpoint.samples import CONFIG, Evil, content, flip, forge, keeps_weights_or_refuses, refuses, same

MODEL = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
ALL_FILES = [*MODEL, "optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"]


def put(run: Path, value: int, groups: dict | None = None, parts: int = 2) -> Path:
    """What `parts` processes would save."""
    groups = content(value) if groups is None else groups
    with checkpoint.begun(run, value, 0) as temp:
        records = {}
        for group, named in groups.items():
            for part in range(parts):
                tensors, places = {}, {}
                for name, tensor in named.items():
                    rows = -(-len(tensor) // parts) if tensor.ndim else 0
                    if tensor.ndim or not part:
                        first = min(part * rows, len(tensor)) if tensor.ndim else 0
                        tensors[name] = tensor[first : first + rows] if tensor.ndim else tensor
                        offsets = ([first] + [0] * 9)[: tensor.ndim]
                        places[name] = {"saved_offsets": offsets, "shape": list(tensor.shape)}
                file = tensor_files.file_name(group, part, parts)
                tensor_files.write(temp / file, tensors, places)
                records |= checkpoint.seal([temp / file])
        plain = {
            "state.json": checkpoint.to_json({"value": value}, "state"),
            "config.json": checkpoint.to_json(CONFIG, "config"),
        }
        checkpoint.publish(temp, value, records, plain, 2)
    return run / f"step-{value}"


def parse(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def rewrite(path: Path, change) -> None:
    """Change a header and its places, and make the hashes fit."""
    header, data = parse(path)
    before = header["__metadata__"][tensor_files.PLACES]
    change(header, places := json.loads(before))
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and metadata[tensor_files.PLACES] == before:
        metadata[tensor_files.PLACES] = json.dumps(places)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    forge(path.parent)


@pytest.fixture
def two(tmp_path):
    """A run with the steps 1 and 2; returns the folder of 2, which tests then damage."""
    put(tmp_path / "run", 1)
    return put(tmp_path / "run", 2)


def test_pieces_come_back_whole(tmp_path):
    model = {str(dtype): torch.arange(24, dtype=torch.uint8).view(dtype) for dtype in tensor_files.DTYPES}
    model["torch.bool"] = torch.tensor([True, False, True])
    model |= {"number": torch.tensor(3), "one": torch.ones(1, 2), "none": torch.ones(0, 2), "wide": torch.ones(3, 0)}
    model |= {
        "deep": torch.randn(7, 2, 3),
        "tied": model["torch.float32"],
        "": torch.ones(2),
        '名 {,["\n': torch.ones(2),
    }
    for parts in (1, 2, 3, 10):
        folder = put(tmp_path / f"{parts}", parts, {"model": model, "empty": {}}, parts)
        assert same(checkpoint.read_folder(folder).tensors, {"model": model, "empty": {}})
        checkpoint.read_folder(folder)
        assert len(list(folder.iterdir())) == 2 * parts + 3


def test_the_reader_of_torch_knows_these_files(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    model = {"a": torch.randn(5, 2), "b": torch.tensor(3.0), "c": torch.arange(4)}
    folder = put(tmp_path, 1, {"model": model})
    found = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert same({"model": found}, {"model": model})


def test_only_reads_and_checks_what_is_asked_for(two):
    flip(two / ALL_FILES[-1], -1)
    assert checkpoint.load(two.parent, only={"model"}).step == 2


@pytest.mark.parametrize("name", ALL_FILES)
def test_truncated_longer_empty_and_missing_files(two, name):
    data = (two / name).read_bytes()
    for changed in (b"", data[:7], data[:9], data[:-1], data + b"\0"):
        (two / name).write_bytes(changed)
        refuses(two, name)
    (two / name).unlink()
    refuses(two, name)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_never_gives_other_weights(two, data):
    keeps_weights_or_refuses(two, ALL_FILES, data)


def place(**changes):
    """A change of what the header says of the tensor b, two numbers of which this file has the second."""
    return lambda header, places: places["b"].update(changes)


def text(value):
    return lambda header, places: header["__metadata__"].update({tensor_files.PLACES: value})


def deep(header, places):
    text('{"b":' + "[" * 100_000)(header, places)


def nowhere(header, places):
    del places["b"]


def other_dtype(header, places):
    header["b"]["dtype"] = "F16"


def other_rows(header, places):
    header["embed.weight"]["shape"], places["embed.weight"]["shape"] = [3, 2], [5, 2]


def third_dimension(header, places):
    header["b"]["shape"], places["b"] = [1, 1], {"saved_offsets": [1, 0], "shape": [2, 1]}


def number(header, places):
    header["b"]["shape"], places["b"] = [], {"saved_offsets": [], "shape": []}


def nothing_else(header, places):
    header["c"] = header.pop("b")
    places["c"] = places.pop("b") | {"shape": [1], "saved_offsets": [0]}


def no_metadata(header, places):
    header["__metadata__"] = [1]


BAD_PLACES = {
    "overlap": place(saved_offsets=[0]),
    "negative": place(saved_offsets=[-1]),
    "beyond the end": place(saved_offsets=[2]),
    "far beyond the end": place(saved_offsets=[2**70]),
    "gap at the end": place(shape=[3]),
    "gap before": place(saved_offsets=[2], shape=[3]),
    "huge": place(shape=[2**59]),
    "uncountable": place(shape=[2**62]),
    "negative shape": place(shape=[-2]),
    "fraction": place(saved_offsets=[1.0]),
    "bool": place(saved_offsets=[True]),
    "word": place(saved_offsets=["1"]),
    "null": place(saved_offsets=None),
    "too many offsets": place(saved_offsets=[1, 0]),
    "no offsets": place(saved_offsets=[], shape=[]),
    "another shape": place(shape=[2, 1]),
    "nowhere": nowhere,
    "another dtype": other_dtype,
    "other rows": other_rows,
    "third dimension": third_dimension,
    "number": number,
    "no JSON": text("no"),
    "no object": text("[1]"),
    "no text": text(7),
    "half a character": text('{"b": "\ud800"}'),
    "name twice": text('{"b":1,"b":1}'),
    "deep": deep,
    "no metadata": no_metadata,
    "nothing": lambda header, places: header.pop("__metadata__"),
}


@pytest.mark.parametrize("kind", BAD_PLACES)
def test_bad_places_under_fitting_hashes(two, kind):
    rewrite(two / MODEL[1], BAD_PLACES[kind])
    refuses(two, "-of-00002.safetensors")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (place(shape=[3]), place(shape=[3])),
        (place(shape=[3]), place(shape=[3], saved_offsets=[2])),
        (place(shape=[3], saved_offsets=[1]), place(shape=[3], saved_offsets=[2])),
        (place(shape=[2**59]), place(shape=[2**59])),
        (place(shape=[1]), place(shape=[1], saved_offsets=[0])),
        (number, number),
        (place(), nothing_else),
    ],
    ids=["end missing", "middle missing", "start missing", "all but two missing", "twice", "number twice", "one file"],
)
def test_pieces_that_agree_on_what_is_not_there(two, first, second):
    for name, change in zip(MODEL, (first, second), strict=True):
        rewrite(two / name, change)
    refuses(two, "-of-00002.safetensors", "'b'")


@pytest.mark.parametrize(
    "names",
    [
        MODEL[:1],
        MODEL[1:],
        [*MODEL, "model-00003-of-00003.safetensors"],
        [*MODEL, "model-00003-of-00002.safetensors"],
        ["model-00000-of-00002.safetensors", MODEL[0]],
        [*MODEL, "model.safetensors"],
        [MODEL[0], "model-00001-of-00001.safetensors"],
    ],
)
def test_files_of_a_group_that_do_not_belong_together(two, names):
    listed = json.loads((two / "manifest.json").read_text())["files"]
    kept = {name: record for name, record in listed.items() if name not in MODEL}
    data = (two / MODEL[0]).read_bytes()
    for name in MODEL:
        (two / name).unlink()
    for name in names:
        (two / name).write_bytes(data)
    forge(two, files=kept | dict.fromkeys(names, listed[MODEL[0]]))
    refuses(two, "step-2", "not all the files of 'model'")


def test_pieces_of_another_step(two):
    shutil.copy(two.parent / "step-1" / MODEL[0], two)
    refuses(two, MODEL[0], "SHA-256 differs")


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_pickle_is_never_run(two, name, tmp_path):
    marker = tmp_path / "marker"
    (two / name).write_bytes(pickle.dumps(Evil(marker)))
    forge(two)
    refuses(two, name)
    assert not marker.exists()


def test_a_bool_is_0_or_1(tmp_path):
    folder = put(tmp_path, 1, {"model": {"flags": torch.tensor([True, False])}})
    flip(folder / MODEL[1], -1, 2)
    forge(folder)
    with pytest.raises(DepthgateError, match="bool"):
        checkpoint.read_folder(folder)


@pytest.mark.parametrize("group", ["model-00001-of-00002", "a/b", "", 3])
def test_names_of_groups(tmp_path, group):
    with pytest.raises(DepthgateError, match="tensors has the group"):
        checkpoint.save(tmp_path, 1, {group: {}}, {}, {})
