"""Folders that were damaged, mixed up or forged: dg.load gives the weights that were saved, or a DepthgateError.

Forged means that the manifest was made to fit, so that no hash helps. The numbers are rows of the table of faults in
docs/reliability.md.
"""

import json
import math
import os
import random
import resource
import shutil
import tracemalloc
import warnings
from pathlib import Path

import pytest
import torch

import depthgate as dg
from depthgate import loading
from depthgate.data.tokenizer import ByteTokenizer, folder_hash, train_bpe
from depthgate.errors import DepthgateError
from depthgate.flops import parameters
from tests.checkpoint.samples import Evil, forge, safetensors
from tests.train.tiny import train, write_data

NEWEST, BEFORE = "step-12", "step-10"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with the steps 10 and 12."""
    home = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        data = write_data(home / "text.jsonl")
        assert train(home / "run", data, 12) == 0
    return home / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def weights(path) -> dict:
    return {name: tensor.clone() for name, tensor in dg.load(path).state_dict().items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refused(path, *words: str) -> None:
    """A DepthgateError of a few lines that names the place."""
    with pytest.raises(DepthgateError) as caught:
        dg.load(path)
    assert len(str(caught.value)) < 1500
    for word in words:
        assert word in str(caught.value)


def change_json(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def change_tensors(path: Path, change) -> None:
    """`change` gets a dict of name -> [dtype, shape, bytes] to alter; the tied head is one of them."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    header.pop("__metadata__", None)
    tensors = {n: [e["dtype"], e["shape"], data[slice(*e["data_offsets"])]] for n, e in header.items()}
    tensors["head.weight"] = list(tensors["embed.weight"])
    change(tensors)
    end, header = 0, {}
    for name, (dtype, shape, part) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(part)]}
        end += len(part)
    path.write_bytes(safetensors(header, b"".join(part for _, _, part in tensors.values())))


# 8, 9 and bad input: configurations under fitting hashes
HUGE = {"dim": 2**16, "heads": 2, "layers": 2**12, "hidden": 2**20}
CONFIGS = {
    "hidden 10**9": {"hidden": 10**9},
    "every size at its most": HUGE,
    "many layers": {"layers": 4096},
    "no layers": {"layers": 0},
    "one layer more": {"layers": 3},
    "wide experts": {"pattern": "moe", "experts": 2**14, "expert_hidden": 2**20},
    "pattern of nothing": {"pattern": "sparse"},
    "empty pattern": {"pattern": ""},
    "pattern as a number": {"pattern": 3},
    "pattern as a list": {"pattern": ["dense"]},
    "no pattern": {"pattern": None},
    "long pattern": {"pattern": "mod," * 10**5 + "dense"},
    "negative": {"dim": -16},
    "text for a number": {"dim": "16"},
    "fraction for a number": {"dim": 16.5},
    "float for a number": {"dim": 16.0},
    "boolean for a number": {"layers": True},
    "number for a boolean": {"tied": 1},
    "text for a boolean": {"qk_norm": "no"},
    "NaN": {"capacity": math.nan},
    "infinity": {"rope_base": math.inf},
    "capacity 0": {"capacity": 0},
    "capacity as text": {"capacity": "0.5"},
    "gate": {"gate": "os.system"},
    "gate as a list": {"gate": ["raw"]},
    "rule": {"rule": "__import__"},
    "another rule": {"rule": "scores"},
    "head size": {"heads": 3},
    "key heads": {"kv_heads": 3},
    "another vocabulary": {"vocab": 300},
    "vocabulary 0": {"vocab": 0},
    "untied": {"tied": False, "qk_norm": True},
    "number of 4000 digits": {"dim": int("9" * 4000)},
    "null": {"vocab": None},
    "unknown key": {"code": "print()"},
    "private key": {"__class__": "x"},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_forged_configuration_is_refused_before_a_model_is_made(run, changes, monkeypatch):
    change_json(run / NEWEST / "config.json", lambda config: config["model"].update(changes))
    forge(run / NEWEST)
    made = []
    real = loading.LoadedDecoder.__init__
    monkeypatch.setattr(
        loading.LoadedDecoder, "__init__", lambda model, config: (made.append(config), real(model, config))[1]
    )
    refused(run, NEWEST)
    refused(run / NEWEST, NEWEST)
    assert all(parameters(config) < 10**5 for config in made)


@pytest.mark.parametrize("value", [None, [], "model", 3, {}, {"dim": 16}], ids=repr)
def test_a_configuration_without_a_model_is_refused(run, value):
    change_json(run / NEWEST / "config.json", lambda config: config.update(model=value))
    forge(run / NEWEST)
    refused(run, "config.json", "wrong or missing keys")


def poison(number: float):
    def change(tensors):
        dtype, shape, data = tensors["norm.weight"]
        tensors["norm.weight"] = [dtype, shape, torch.full((len(data) // 4,), number).numpy().tobytes()]

    return change


def double(name):
    def change(tensors):
        _, shape, data = tensors[name]
        tensors[name] = [
            "F64",
            shape,
            torch.frombuffer(bytearray(data), dtype=torch.float32).double().numpy().tobytes(),
        ]

    return change


TENSORS = {
    "missing": (lambda t: t.pop("norm.weight"), "lacks 'norm.weight'"),
    "missing and extra": (lambda t: t.update(more=t.pop("norm.weight")), "has the unknown 'more'"),
    "extra": (lambda t: t.update(more=["F32", [1], bytes(4)]), "has the unknown 'more'"),
    "long name": (lambda t: t.update({"x" * 5000: t.pop("norm.weight")}), "norm.weight"),
    "none": (lambda t: t.clear(), "another model"),
    "other shape": (lambda t: t["norm.weight"].__setitem__(1, [4, 4]), "norm.weight is float32 (4, 4)"),
    "swapped sides": (lambda t: t["embed.weight"].__setitem__(1, [16, 257]), "embed.weight is float32 (16, 257)"),
    "as integers": (lambda t: t["norm.weight"].__setitem__(0, "I32"), "norm.weight is int32"),
    "as float64": (double("norm.weight"), "norm.weight is float64"),
    "NaN": (poison(math.nan), "norm.weight that are not finite"),
    "infinite": (poison(-math.inf), "norm.weight that are not finite"),
    "two heads": (lambda t: t.update({"head.weight": ["F32", [257, 16], bytes(257 * 64)]}), "ties"),
}


@pytest.mark.parametrize(("change", "says"), TENSORS.values(), ids=TENSORS.keys())
def test_forged_tensors_are_refused(run, change, says):
    path = run / NEWEST / "model.safetensors"
    change_tensors(path, lambda tensors: None)
    forge(run / NEWEST)
    assert same(weights(run / NEWEST), weights(run))  # the file is read as long as nothing else is changed
    change_tensors(path, change)
    forge(run / NEWEST)
    refused(run / NEWEST, says)


def test_ties_do_not_count_as_weights(run):
    """A thousand names of one tensor must not let a configuration ask for a thousand times as much."""
    path = run / NEWEST / "model.safetensors"
    names = {f"layers.{i}.x": "embed.weight" for i in range(4096)}
    entry = {"dtype": "F32", "shape": [257, 16], "data_offsets": [0, 257 * 64]}
    header = {"__metadata__": {"depthgate.aliases": json.dumps(names)}, "embed.weight": entry}
    path.write_bytes(safetensors(header, bytes(257 * 64)))
    change_json(run / NEWEST / "config.json", lambda config: config["model"].update(layers=4096, dim=64))
    forge(run / NEWEST)
    refused(run, "another model than the one that the weights belong to")


@pytest.mark.parametrize("text", ["\ud800", '{"a": "\ud800"}', "[", "{}" * 3])
def test_ties_that_are_no_text_are_refused(run, text):
    header = {"__metadata__": {"depthgate.aliases": text}}
    (run / NEWEST / "model.safetensors").write_bytes(safetensors(header))
    forge(run / NEWEST)
    with pytest.warns(UserWarning, match=r"model\.safetensors"):
        assert same(weights(run), weights(run / BEFORE))


# The tokenizer lies next to the checkpoints, outside their hashes
TOKENIZERS = {
    "gone": (lambda folder: shutil.rmtree(folder), "tokenizer is missing"),
    "empty": (lambda folder: (folder / "tokenizer.json").write_text(""), "not a tokenizer"),
    "binary": (lambda folder: (folder / "tokenizer.json").write_bytes(b"\x80\0"), "not a tokenizer"),
    "a terabyte": (lambda folder: os.truncate(folder / "tokenizer.json", 2**40), "bytes"),
    "without end": (lambda folder: (folder / "tokenizer_config.json").unlink(), "does not say which token ends"),
    "of another size": (
        lambda folder: train_bpe(["ab ab"], 258).save(folder),
        "they belong to different runs",
    ),
}


@pytest.mark.parametrize(("damage", "says"), TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_a_damaged_tokenizer_is_refused(run, damage, says):
    damage(run / "tokenizer")
    tracemalloc.start()
    refused(run, "tokenizer", says)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**28  # of a terabyte no more is read than a tokenizer can have


@pytest.mark.parametrize("number", [2**24, 2**31, 2**32 - 1, 10**30, -1, 1.5, True, "7", None])
@pytest.mark.parametrize("where", ["vocab", "added"])
def test_an_absurd_id_takes_no_memory(run, number, where):
    """The package `tokenizers` would make room for every id up to the largest, and end the process where it cannot."""

    def change(value):
        if where == "vocab":
            value["model"]["vocab"]["a"] = number
        else:
            value["added_tokens"][0]["id"] = number

    change_json(run / "tokenizer" / "tokenizer.json", change)
    refused(run, "tokenizer.json is not a tokenizer")


def test_the_tokenizer_of_another_run_is_refused_where_the_checkpoint_knows_its_own(run):
    state = run / NEWEST / "state.json"
    change_json(state, lambda value: value.update(tokenizer=folder_hash(run / "tokenizer")))
    forge(run / NEWEST)
    assert same(weights(run), weights(run / NEWEST))
    ByteTokenizer().save(run / "tokenizer")  # the same, written again
    assert same(weights(run), weights(run / NEWEST))
    change_json(run / "tokenizer" / "tokenizer.json", lambda value: value["model"]["vocab"].update(a=98, b=97))
    refused(run, "is not the tokenizer that the model was trained with")
    shutil.rmtree(run / "tokenizer")
    refused(run, "tokenizer is missing")


# 4, 5, 6, 7: two hundred random mutations of a whole run
def test_whatever_is_done_to_a_run_other_weights_are_never_loaded(trained, tmp_path):
    good = {step: weights(trained / step) for step in (BEFORE, NEWEST)}
    rng = random.Random(0)
    marker = tmp_path / "marker"
    torch.save(Evil(marker), tmp_path / "evil.pt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {"refused": 0, NEWEST: 0, BEFORE: 0, "forged": 0}
    for number in range(200):
        run = Path(shutil.copytree(trained, tmp_path / "run"))
        forged, what = mutate(run, rng, (tmp_path / "evil.pt").read_bytes())
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                found = weights(run)
        except DepthgateError:
            outcomes["refused"] += 1
        else:
            step = next((step for step in good if same(found, good[step])), "forged")
            assert step != "forged" or forged, (number, what)
            assert step != BEFORE or NEWEST in "".join(str(w.message) for w in warned), (number, what)
            outcomes[step] += 1
        shutil.rmtree(run)
    assert not marker.exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB
    assert min(outcomes["refused"], outcomes[NEWEST], outcomes[BEFORE]) > 10  # all of them were met


ODD = [None, True, -1, 0, 1.5, math.nan, math.inf, 2**31, 10**400, "", "x" * 10**5, "\ud800", "../x", [], {}, [[1]]]


def mutate(run: Path, rng: random.Random, evil: bytes) -> tuple[bool, str]:
    """Do one harmful thing; returns whether hashes were made to fit, and what it was."""
    paths = sorted(p for p in run.rglob("*") if p.is_file() and p.name != "metrics.jsonl" and p.name[0] != ".")
    path = rng.choice([p for p in paths if p.parent.name == NEWEST] * 2 + paths)
    kind = rng.choice(["flip", "cut", "grow", "remove", "swap", "value", "key", "evil", "noise", "link"])
    content = bytearray(path.read_bytes())
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 5])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[rng.randrange(len(content)) :]
    elif kind == "grow":
        content += rng.randbytes(rng.choice([1, 8, 1000]))
    elif kind == "noise":
        begin = rng.randrange(len(content))
        content[begin : begin + rng.randrange(64)] = rng.randbytes(rng.randrange(64))
    elif kind == "evil":
        content = bytearray(evil)
    elif kind == "swap":
        content = bytearray(rng.choice(paths).read_bytes())
    elif kind in ("value", "key") and path.suffix == ".json":
        content = bytearray(json.dumps(altered(json.loads(content), kind, rng)).encode())
    path.unlink()
    if kind == "link":
        path.symlink_to(rng.choice([p for p in paths if p != path]))
    elif kind != "remove":
        path.write_bytes(content)
    forged = rng.random() < 0.5 and (path.parent / "manifest.json").is_file() and path.name != "manifest.json"
    if forged:
        forge(path.parent)
    return forged, f"{kind} {path}, forged: {forged}"


def altered(value, kind: str, rng: random.Random):
    """One odd value, or one key more or less, somewhere in a JSON object."""
    place = value
    while (inner := [v for v in place.values() if isinstance(v, dict) and v]) and rng.random() < 0.7:
        place = rng.choice(inner)
    if kind == "value":
        place[rng.choice(list(place))] = rng.choice(ODD)
    elif rng.random() < 0.5:
        del place[rng.choice(list(place))]
    else:
        place[rng.choice(["_private", "code", "", "\0"])] = rng.choice(ODD)
    return value
