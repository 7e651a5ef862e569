"""Small checkpoints, and ways to damage them."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from depthgate.checkpoint import store as checkpoint
from depthgate.errors import DepthgateError, DepthgateWarning

CONFIG = {"dim": 8, "pattern": "mod,dense"}
ALL_FILES = ["config.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def content(value: int) -> dict:
    embed = torch.full((4, 3), float(value))
    return {
        "model": {"embed.weight": embed, "head.weight": embed, "b": torch.full((2,), value, dtype=torch.bfloat16)},
        "optimizer": {"m": torch.full((5,), -float(value))},
    }


def put(run: Path, step: int, value: int | None = None, **options) -> Path:
    value = step if value is None else value
    return checkpoint.save(run, step, content(value), {"value": value}, CONFIG, **options)


def whole(found: checkpoint.Checkpoint) -> int:
    """Every part of what was loaded comes from one save; returns which."""
    value = found.state["value"]
    assert same(found.tensors, content(value))
    assert found.config == CONFIG
    return value


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        a[g].keys() == b[g].keys()
        and all(
            a[g][n].dtype == t.dtype and a[g][n].shape == t.shape and bits(a[g][n]) == bits(t) for n, t in b[g].items()
        )
        for g in b
    )


def forge(folder: Path, files_too: bool = True, **changes) -> None:
    """Write a manifest whose hashes fit what now lies in the folder, with changes on top."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    for name in body["files"]:
        if files_too and (folder / name).is_file():
            data = (folder / name).read_bytes()
            body["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    body |= changes
    body["sha256"] = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(body, indent=1))


def refuses(folder: Path, *words: str) -> None:
    """The folder alone is refused by name; a load of the run warns of it and gives the step before."""
    with pytest.raises(DepthgateError) as caught:
        checkpoint.read_folder(folder)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 1000
    for word in words:
        assert word in str(caught.value)
    with pytest.warns(DepthgateWarning, match=r"is loaded instead") as warned:
        assert whole(checkpoint.load(folder.parent)) == 1
    assert folder.name in str(warned[0].message)


def keeps_weights_or_refuses(folder: Path, files: list[str], data: st.DataObject) -> None:
    """Damage any of the files of a checkpoint of the value 2 anywhere: it is read as it was, or refused."""
    name = data.draw(st.sampled_from(files))
    before = (folder / name).read_bytes()
    begin = data.draw(st.integers(0, len(before)))
    end = data.draw(st.integers(begin, min(len(before), begin + 16)))
    damage = before[:begin] + data.draw(st.binary(max_size=16)) + before[end:]
    forged = data.draw(st.booleans()) and name != "manifest.json"
    manifest = (folder / "manifest.json").read_bytes()
    try:
        (folder / name).write_bytes(damage)
        if forged:  # hashes that fit: what is read may then differ, but only as data, or it is refused
            forge(folder)
        try:
            found = checkpoint.read_folder(folder)
        except DepthgateError:
            return
        assert forged or whole(found) == 2
    finally:
        (folder / "manifest.json").write_bytes(manifest)
        (folder / name).write_bytes(before)


def flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape, begin, end, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)
