"""Checkpoints under kills, full disks, damage and malice: a load gives exactly what was saved, or says why not.

The numbers are rows of the table of faults in docs/reliability.md.
"""

import errno
import hashlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint import tensors as tensor_files
from depthgate.errors import DepthgateError, DepthgateWarning
from tests.checkpoint.samples import (
    ALL_FILES,
    Evil,
    entry,
    flip,
    forge,
    keeps_weights_or_refuses,
    put,
    refuses,
    safetensors,
    same,
    whole,
)


@pytest.fixture
def two(tmp_path):
    """A run with the steps 1 and 2; returns the folder of 2, which tests then damage."""
    put(tmp_path / "run", 1)
    return put(tmp_path / "run", 2)


# What is saved is what is loaded
def test_every_dtype_and_layout_comes_back_bit_for_bit(tmp_path):
    raw = torch.arange(256, dtype=torch.uint8).repeat(3)  # every byte value: NaN payloads and denormals included
    model = {}
    for dtype in tensor_files.DTYPES:
        code = str(dtype)
        model[code] = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
        model[f"{code}.scalar"] = model[code][:1].reshape(())
        model[f"{code}.empty"] = torch.empty(0, 3, dtype=dtype)
    base = torch.randn(6, 8)
    model |= {"transposed": base.t(), "strided": base[::2, 1::3], "expanded": base[:1].expand(5, 8), "sliced": base[3]}
    model |= {"parameter": torch.nn.Parameter(base + 1), "conj": torch.randn(3, dtype=torch.complex64).conj()}
    model |= {"": torch.ones(1), '名 {,["\n': torch.ones(2), "long": torch.randn(2**16 + 1)}
    state = {"lr": 0.1, "inf": float("inf"), "seen": 2**70, "none": None, "nested": {"a": [1, [True, "ü"]]}}
    folder = checkpoint.save(tmp_path / "a" / "run", 7, {"model": model, "none": {}}, state, {"t": (1, 2)})
    found = checkpoint.load(tmp_path / "a" / "run")
    assert same(found.tensors, {"model": model, "none": {}})
    assert all(t.is_contiguous() and not t.requires_grad for t in found.tensors["model"].values())
    assert (found.step, found.path, found.state, found.config) == (7, folder, state, {"t": [1, 2]})
    checkpoint.read_folder(folder)
    names = {"model.safetensors", "none.safetensors", "state.json", "config.json", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == names


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    base = torch.randn(8, 4)
    tensors = {
        "a": base,
        "b": base,
        "c": base.view(8, 4),
        "part": base[:4],
        "other": base.t(),
        "same_value": base.clone(),
    }
    folder = checkpoint.save(tmp_path, 0, {"model": tensors}, {}, {})
    found = checkpoint.load(tmp_path).tensors["model"]
    assert same({"model": found}, {"model": tensors})
    assert found["a"] is found["b"] is found["c"]
    assert len({found[n].data_ptr() for n in tensors}) == 4
    assert (folder / "model.safetensors").stat().st_size < 4 * base.nbytes + 1000


def test_files_are_safetensors_both_ways(tmp_path):
    tensors = {"f": torch.randn(3, 5), "h": torch.randn(7).bfloat16(), "i": torch.tensor(3), "e": torch.empty(0, 2)}
    folder = checkpoint.save(tmp_path, 1, {"model": tensors}, {}, {})
    assert same({"m": load_file(folder / "model.safetensors")}, {"m": tensors})
    save_file(tensors, folder / "model.safetensors", metadata={"other": "text"})
    forge(folder)
    assert same(checkpoint.read_folder(folder).tensors, {"model": tensors})


def test_only_reads_and_checks_what_is_asked_for(two):
    flip(two / "optimizer.safetensors", -1)
    found = checkpoint.load(two.parent, only={"model"})
    assert found.step == 2
    assert found.tensors.keys() == {"model"}
    with pytest.raises(DepthgateError, match=r"\['sgd'\]: it has \['model', 'optimizer'\]"):
        checkpoint.read_folder(two, only=["sgd"])


def test_a_folder_under_another_name_is_read_as_it_is(two, tmp_path):
    exported = tmp_path / "exported"
    shutil.copytree(two, exported)
    assert whole(checkpoint.read_folder(exported)) == 2
    shutil.copytree(two, two.parent / "step-9")
    with pytest.warns(DepthgateWarning, match="step-9 holds step 2"):
        assert checkpoint.load(two.parent).step == 2


def test_no_checkpoint_is_an_error_but_no_steps(tmp_path):
    assert checkpoint.steps(tmp_path / "none") == []
    for run in (tmp_path, tmp_path / "none"):
        with pytest.raises(DepthgateError, match="no complete checkpoint"):
            checkpoint.load(run)
    (tmp_path / "file").touch()
    with pytest.raises(DepthgateError, match="file"):
        checkpoint.steps(tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"keep": 1}, "keep is 1"),
        ({"tensors": {"../x": {}}}, "'../x'"),
        ({"tensors": {"state.json": {}}}, "letters"),
        ({"tensors": {"m": {"a": [1]}}}, "list, not a tensor"),
        ({"tensors": {"m": {1: torch.ones(1)}}}, "named 1"),
        ({"tensors": {"m": {"\ud800": torch.ones(1)}}}, "rename"),
        ({"tensors": {"m": {"a": torch.ones(1, device="meta")}}}, "on meta"),
        ({"tensors": {"m": {"a": torch.eye(2).to_sparse()}}}, "sparse"),
        ({"tensors": {"m": {"a": torch.ones(1, dtype=torch.complex128)}}}, "complex128"),
        ({"state": {"a": torch.ones(1)}}, "state is not plain data"),
        ({"config": {"a": "x" * checkpoint.MAX_JSON}}, "config is"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, change, words):
    given_ = {"step": 1, "tensors": {}, "state": {}, "config": {}} | change
    with pytest.raises(DepthgateError, match=words):
        checkpoint.save(tmp_path / "run", **given_)
    assert not (tmp_path / "run").exists()


# Rotation
def test_rotation_keeps_the_newest(tmp_path):
    for step in (5, 9, 10, 100):
        put(tmp_path, step)
    assert checkpoint.steps(tmp_path) == [10, 100]
    for step in (101, 102):
        put(tmp_path, step, keep=3)
    assert checkpoint.steps(tmp_path) == [100, 101, 102]
    assert {p.name for p in tmp_path.iterdir()} == {".lock", "step-100", "step-101", "step-102"}


def test_damaged_ones_push_no_good_one_out(tmp_path):
    for step in (1, 2):
        put(tmp_path, step)
    (put(tmp_path, 3, keep=3) / "state.json").write_bytes(b"")
    flip(put(tmp_path, 9, keep=9) / "model.safetensors", -1)  # only reading it would tell
    with pytest.warns(DepthgateWarning) as warned:
        assert checkpoint.load(tmp_path).step == 2
    assert [f"step-{n}" in str(w.message) for n, w in zip((9, 3), warned, strict=True)] == [True, True]
    with pytest.warns(DepthgateWarning, match="step-9 is later than step 4"):
        put(tmp_path, 4)
    assert checkpoint.steps(tmp_path) == [2, 3, 4, 9]
    with pytest.warns(DepthgateWarning, match="step 4 is loaded instead"):
        assert whole(checkpoint.load(tmp_path)) == 4


def test_saving_a_step_again_replaces_it(two):
    put(two.parent, 2, 22)
    assert whole(checkpoint.load(two.parent)) == 22
    flip(two / "model.safetensors", 0)
    put(two.parent, 2, 23)
    assert whole(checkpoint.load(two.parent)) == 23
    shutil.rmtree(two)
    two.symlink_to(two.parent / "step-1")
    put(two.parent, 2, 24)
    assert whole(checkpoint.load(two.parent)) == 24
    assert whole(checkpoint.read_folder(two.parent / "step-1")) == 1
    assert {p.name for p in two.parent.iterdir()} == {".lock", "step-1", "step-2"}


# 1, 2, 3: a kill, a power cut or an error at every call that changes the disk
class Kill(BaseException):
    """The process is gone: neither this call nor any after it happens."""


class Calls:
    """Counts the calls that change the disk, and lets call number `at` fail.

    A kill fails all calls after it too and tears a write in half. With `power`, files that were written but not synced
    also lose their second half, wherever they were moved. With `code`, call `at` alone fails, with that error number.
    """

    NAMES = ("open", "fsync", "rename", "mkdir", "unlink", "rmdir")

    def __init__(self, monkeypatch, run: Path, at: int = -1, power: bool = False, code: int = 0) -> None:
        self.run, self.at, self.power, self.code = run, at, power, code
        self.unsynced: set[int] = set()
        self.log: list[tuple[str, str]] = []
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))
        monkeypatch.setattr(Path, "write_bytes", self.wrap("write", Path.write_bytes))
        monkeypatch.setattr(tensor_files, "save_file", self.wrap("save_file", save_file))

    def wrap(self, name, real):
        def call(*args, **kwargs):
            if name == "open" and not args[1] & (os.O_CREAT | os.O_WRONLY):
                return real(*args, **kwargs)
            target = args[1] if name in ("rename", "save_file") else args[0]
            self.log.append((name, os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)))
            now = len(self.log) - 1
            if now == self.at and self.code:
                if name == "save_file":
                    raise SafetensorError(f"I/O error: {os.strerror(self.code)} (os error {self.code})")
                raise OSError(self.code, os.strerror(self.code), str(target))
            if now >= self.at >= 0 and not self.code:
                if now == self.at and name in ("write", "save_file"):
                    real(*args, **kwargs)
                    os.truncate(target, target.stat().st_size // 2)
                    self.unsynced.add(target.stat().st_ino)
                if now == self.at and self.power:
                    for path in self.run.rglob("*"):
                        if path.stat().st_ino in self.unsynced:
                            os.truncate(path, path.stat().st_size // 2)
                raise Kill
            done = real(*args, **kwargs)
            if name == "fsync":
                self.unsynced.discard(os.fstat(args[0]).st_ino)
            elif name in ("write", "save_file"):
                self.unsynced.add(target.stat().st_ino)
            return done

        return call


def history(run: Path) -> None:
    put(run, 1)
    put(run, 2)


SCENES = {  # what is there before, the save that is hit, what a load may give then
    "first": (lambda run: None, 1, {1}),
    "rotating": (history, 3, {2, 3}),
    "replacing": (history, 2, {2, 99}),
    "replacing the only one": (lambda run: put(run, 5), 5, {5, 99}),
}


def hit(scene: str, tmp_path: Path, **how):
    """Run the scene once for every call; yields the run and what happened there."""
    before, step, allowed = SCENES[scene]
    at = 0
    while True:
        run = tmp_path / f"{scene}-{at}"
        before(run)
        value = 99 if step in checkpoint.steps(run) else step
        with pytest.MonkeyPatch.context() as patch:
            calls = Calls(patch, run, at, **how)
            outcome: object = None
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    put(run, step, value)
                except (Kill, DepthgateError) as error:
                    outcome = error
        yield run, outcome, warned, allowed, value
        if len(calls.log) <= at:
            assert outcome is None
            assert at > 15  # the calls were seen
            return
        shutil.rmtree(run, ignore_errors=True)
        at += 1


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("scene", SCENES)
def test_a_kill_at_any_call_leaves_a_whole_checkpoint(scene, power, tmp_path):
    seen = set()
    for run, outcome, _, allowed, _ in hit(scene, tmp_path, power=power):
        assert outcome is None or isinstance(outcome, Kill)
        if scene != "first" or checkpoint.steps(run):
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # and nothing that was named step-N is damaged
                seen.add(whole(checkpoint.load(run)))
            assert seen <= allowed
        for number in checkpoint.steps(run):  # not even an old one that was being removed
            if (run / f"step-{number}").exists():
                checkpoint.read_folder(run / f"step-{number}")
        step = put(run, 50)
        assert whole(checkpoint.load(run)) == 50
        names = {p.name for p in run.iterdir()}
        assert names == {".lock", step.name, *(f"step-{n}" for n in checkpoint.steps(run))}
        assert len(checkpoint.steps(run)) <= 2
    assert seen == allowed


def test_names_reach_the_disk_in_order(tmp_path, monkeypatch):
    history(tmp_path)
    with monkeypatch.context() as patch:
        calls = Calls(patch, tmp_path)
        put(tmp_path, 3)
    done = [(name, path) for name, path in calls.log if name in ("fsync", "rename")]
    renamed = done.index(("rename", str(tmp_path / "step-3")))
    temp = done[renamed - 1][1]
    assert [(name, path.removeprefix(temp)) for name, path in done[: renamed + 2]] == [
        ("fsync", "/model.safetensors"),
        ("fsync", "/optimizer.safetensors"),
        ("fsync", "/state.json"),
        ("fsync", "/config.json"),
        ("fsync", "/manifest.json"),
        ("fsync", ""),
        ("rename", str(tmp_path / "step-3")),
        ("fsync", str(tmp_path)),
    ]
    assert [name for name, _ in calls.log[: calls.log.index(("rename", str(tmp_path / "step-3")))]].count("unlink") == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("scene", ["rotating", "replacing the only one"])
def test_an_error_at_any_call_is_named_and_harmless(scene, code, tmp_path):
    for run, outcome, warned, allowed, value in hit(scene, tmp_path, code=code):
        if outcome is not None:
            assert os.strerror(code) in str(outcome)
            assert str(run) in str(outcome)
        loaded = whole(checkpoint.load(run))
        assert loaded in allowed
        assert outcome is not None or loaded == value
        left = [p.name for p in run.iterdir() if p.name.startswith(".tmp-")]
        assert not left or warned  # what could not be removed was named
        put(run, 50)
        assert whole(checkpoint.load(run)) == 50
        assert not [p for p in run.iterdir() if p.name.startswith((".tmp-", ".old-"))]


def test_real_kills():
    soak = Path(__file__).parents[1] / "soak" / "kill_saves.py"
    done = subprocess.run([sys.executable, soak, "--rounds", "8"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "8 kills" in done.stdout


# 3: no space, no right to write
def test_too_little_space_is_found_before_writing(two):
    huge = torch.zeros(1).expand(2**50)  # 4 PiB that take 4 bytes of memory
    with pytest.raises(DepthgateError, match="MiB free, and a checkpoint needs 4294967297"):
        checkpoint.save(two.parent, 3, {"model": {"w": huge}}, {}, {})
    assert whole(checkpoint.load(two.parent)) == 2


def test_a_disk_that_fills_up_meanwhile(two):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))  # Python ignores SIGXFSZ, so a write fails with EFBIG
    try:
        with pytest.raises(DepthgateError, match="File too large"):
            checkpoint.save(two.parent, 3, {"model": {"w": torch.zeros(2**20)}}, {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p.name for p in two.parent.iterdir()} == {".lock", "step-1", "step-2"}
    assert whole(checkpoint.load(two.parent)) == 2


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for run in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run"), tmp_path / ("x" * 300)):
        with pytest.raises(DepthgateError, match="cannot save step 1"):
            put(run, 1)


# 4, 5: damage
@pytest.mark.parametrize("name", ALL_FILES)
def test_truncated_longer_empty_and_missing_files(two, name):
    data = (two / name).read_bytes()
    for cut in sorted({0, 1, 7, 8, 9, len(data) // 2, len(data) - 1}):
        (two / name).write_bytes(data[:cut])
        refuses(two, name)
    (two / name).write_bytes(data + b"\0")
    refuses(two, name)
    (two / name).unlink()
    refuses(two, name)


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_flipped_bit_anywhere_is_found(two, name):
    data = (two / name).read_bytes()
    for at in range(0, len(data), max(1, len(data) // 60)):
        flip(two / name, at, 1 << at % 8)
        with pytest.raises(DepthgateError, match=r"manifest|safetensors|json|step-2"):
            checkpoint.read_folder(two)
        (two / name).write_bytes(data)
    flip(two / name, len(data) // 2)
    refuses(two, name)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_never_gives_other_weights(two, data):
    keeps_weights_or_refuses(two, ALL_FILES, data)


@pytest.mark.parametrize("name", ALL_FILES)
def test_files_of_another_step(two, name):
    data = (two.parent / "step-1" / name).read_bytes()
    if data != (two / name).read_bytes():
        (two / name).write_bytes(data)
        refuses(two)
    else:
        assert name == "config.json"


BAD_SAFETENSORS = {
    "header of 10^9 bytes": safetensors({}, length=10**9),
    "header of 2^64 bytes": safetensors({}, length=2**64 - 1),
    "no JSON": safetensors(b"not json"),
    "no text": safetensors(b"\xff\xfe"),
    "no object": safetensors([1]),
    "deep": safetensors(b"[" * 100_000),
    "overlap": safetensors({"a": entry([2], 0, 2), "b": entry([2], 1, 3)}, b"123"),
    "gap": safetensors({"a": entry([1], 0, 1), "b": entry([1], 2, 3)}, b"123"),
    "shared data": safetensors({"a": entry([2], 0, 2), "b": entry([2], 0, 2)}, b"12"),
    "data too short": safetensors({"a": entry([4], 0, 4)}, b"123"),
    "bytes left over": safetensors({"a": entry([2], 0, 2)}, b"123"),
    "shape and size differ": safetensors({"a": entry([3], 0, 2)}, b"12"),
    "negative": safetensors({"a": entry([-1, -2], 0, 2)}, b"12"),
    "backwards": safetensors({"a": entry([2], 2, 0)}, b"12"),
    "fraction": safetensors({"a": entry([2.0], 0, 2)}, b"12"),
    "bool as size": safetensors({"a": entry([True], 0, 1)}, b"1"),
    "dtype": safetensors({"a": entry([1], 0, 1, "OBJECT")}, b"1"),
    "dtype no text": safetensors({"a": entry([1], 0, 1, ["F32"])}, b"1"),
    "no offsets": safetensors({"a": {"dtype": "U8", "shape": [1]}}, b"1"),
    "no entry": safetensors({"a": 1}),
    "1 TB tensor": safetensors({"a": entry([10**12], 0, 10**12)}, b"1"),
    "too many tensors": safetensors(b"{" + b",".join(b'"%0100d":[]' % i for i in range(4 * 10**5)) + b"}"),
    "bool of 2": safetensors({"a": entry([1], 0, 1, "BOOL")}, b"\2"),
    "tied to nothing": safetensors({"__metadata__": {tensor_files.ALIASES: '{"b":"c"}'}, "a": entry([0], 0, 0)}),
    "tied to itself": safetensors({"__metadata__": {tensor_files.ALIASES: '{"a":"a"}'}, "a": entry([0], 0, 0)}),
    "ties that are no ties": safetensors({"__metadata__": {tensor_files.ALIASES: "[1]"}, "a": entry([0], 0, 0)}),
}


@pytest.mark.parametrize("kind", BAD_SAFETENSORS)
def test_bad_safetensors_under_fitting_hashes(two, kind):
    (two / "model.safetensors").write_bytes(BAD_SAFETENSORS[kind])
    forge(two)
    with pytest.raises(DepthgateError, match=r"model\.safetensors") as caught:
        checkpoint.read_folder(two)
    assert len(str(caught.value)) < 1000
    with pytest.warns(DepthgateWarning, match=r"step-2/model\.safetensors"):
        assert whole(checkpoint.load(two.parent)) == 1


@pytest.mark.parametrize("kind", ["header of 10^9 bytes", "header of 2^64 bytes", "too many tensors"])
def test_a_huge_header_is_not_parsed(two, kind, monkeypatch):
    """The package would take memory for all that a header holds."""
    (two / "model.safetensors").write_bytes(BAD_SAFETENSORS[kind])
    forge(two)
    monkeypatch.setattr(tensor_files, "safe_open", None)
    with pytest.raises(DepthgateError, match=r"model\.safetensors .* header claims"):
        checkpoint.read_folder(two)


HEADERS_THAT_ARE_DATA = {
    "name twice": safetensors(b'{"a":%s,"a":%s}' % ((json.dumps(entry([1], 0, 1)).encode(),) * 2), b"1"),
    "uncountable empty": safetensors({"a": entry([0, 2**62, 2**62], 0, 0)}),
}


@pytest.mark.parametrize("kind", HEADERS_THAT_ARE_DATA)
def test_odd_headers_under_fitting_hashes_give_data_and_nothing_else(two, kind):
    (two / "model.safetensors").write_bytes(HEADERS_THAT_ARE_DATA[kind])
    forge(two)
    assert checkpoint.read_folder(two).tensors["model"].keys() == {"a"}


# 6: names
@pytest.mark.parametrize(
    "name",
    (
        "../evil.safetensors|/etc/passwd|a/b.safetensors|..|.||a\0.safetensors|manifest.json|model.pt|.hidden.safetensors|"
        "a\n.safetensors|tokenizer.json|ü.safetensors|\\.safetensors|" + "x" * 5000 + ".safetensors"
    ).split("|"),
)
def test_names_in_the_manifest_stay_in_the_folder(two, name):
    listed = json.loads((two / "manifest.json").read_text())["files"]
    (two.parent / "evil.safetensors").write_bytes((two / "model.safetensors").read_bytes())
    forge(two, files=listed | {name: listed["model.safetensors"]})
    refuses(two, "manifest.json", "not a file of a checkpoint")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "upgrade depthgate"),
        ({"version": 0}, "read and save it with the depthgate that wrote it"),
        ({"version": "1"}, "is not the manifest"),
        ({"format": "other"}, "is not the manifest"),
        ({"step": 3}, "holds step 3"),
        ({"step": "2"}, "does not list a step"),
        ({"files": []}, "does not list a step, state.json and config.json"),
        ({"files": {}}, "does not list a step, state.json and config.json"),
        ({"files": {"state.json": {"size": -1, "sha256": ""}, "config.json": {}}}, "config.json"),
        ({"files": {"state.json": {"size": "", "sha256": ""}, "config.json": 7}}, "lists 'state.json', which is not"),
        ({"more": 1}, "is not what was saved"),
    ],
)
def test_manifests_of_other_kinds(two, changes, words):
    forge(two, files_too=False, **changes)
    refuses(two, words)


@pytest.mark.parametrize("name", [*ALL_FILES, "step-2"])
def test_links_are_not_followed(two, name, tmp_path):
    path = two if name == "step-2" else two / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refuses(two, name, "symbolic link")


def test_extra_files_folders_and_pipes(two):
    (two / "extra.pt").touch()
    refuses(two, "extra.pt", "not in the manifest")
    (two / "extra.pt").unlink()
    (two / "state.json").unlink()
    (two / "state.json").mkdir()
    refuses(two, "state.json", "Is a directory")
    (two / "state.json").rmdir()
    os.mkfifo(two / "state.json")
    refuses(two, "state.json", "not a plain file")
    shutil.rmtree(two)
    two.touch()
    refuses(two, "Not a directory")


# 7, 8: malice
@pytest.mark.parametrize("name", ALL_FILES)
def test_a_pickle_is_never_run(two, name, tmp_path):
    marker = tmp_path / "marker"
    torch.save(Evil(marker), tmp_path / "evil.pt")
    for attack in (pickle.dumps(Evil(marker)), (tmp_path / "evil.pt").read_bytes()):
        (two / name).write_bytes(attack)
        if name != "manifest.json":
            forge(two)
        refuses(two, name)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists()  # the attack is a real one


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "model.safetensors"])
def test_a_file_of_a_terabyte_is_not_read(two, name, monkeypatch):
    with open(two / name, "r+b") as file:
        file.truncate(2**40)  # sparse
    real = hashlib.file_digest

    def digest(file, kind):
        assert os.fstat(file.fileno()).st_size < 2**20
        return real(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    refuses(two, name)
    if name == "config.json":  # and when the manifest agrees
        listed = json.loads((two / "manifest.json").read_text())["files"]
        forge(two, files_too=False, files=listed | {name: {"size": 2**40, "sha256": "0" * 64}})
        with pytest.raises(DepthgateError, match="more than the 16777216 allowed"):
            checkpoint.read_folder(two)


# 10, 11: several writers
def test_two_processes_cannot_write_the_same_run(two):
    code = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('ready', flush=True); input()"
    )
    temp = two.parent / ".tmp-step-3-of-a-live-process"
    temp.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", code, two.parent / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"ready\n"
        with pytest.raises(DepthgateError, match=r"run/\.lock is held by a process"):
            put(two.parent, 3)
        assert temp.exists()
        assert whole(checkpoint.load(two.parent)) == 2  # reading needs no lock
    finally:
        holder.kill()
        holder.communicate()
    put(two.parent, 3)  # the dead hold nothing
    assert not temp.exists()


def test_two_saves_in_one_process_do_not_overlap(two):
    with checkpoint.lock(two.parent / ".lock"), pytest.raises(DepthgateError, match="is held"):
        put(two.parent, 3)
    put(two.parent, 3)


def test_a_reader_next_to_a_writer_always_gets_a_whole_checkpoint(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.checkpoint.samples import put\n"
        "for step in range(1, 10**6): put(Path(sys.argv[1]), step)"
    )
    put(tmp_path, 0)
    writer = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=Path(__file__).parents[2])
    found = [0]
    try:
        while found[-1] < 12 and writer.poll() is None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found.append(whole(checkpoint.load(tmp_path)))
    finally:
        writer.kill()
        writer.wait()
    assert found == sorted(found)
    assert found[-1] >= 12
