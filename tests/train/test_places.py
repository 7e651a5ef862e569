"""Places that cannot be written or read, full disks, streams that are closed: an error by name, nothing lost (rows 3,
11 and 45 of docs/reliability.md)."""

import json
import os
import shutil
from pathlib import Path

import pytest

import depthgate as dg
from depthgate.checkpoint import store as checkpoint
from depthgate.cli import main
from depthgate.data.token_file import cache_folder
from depthgate.errors import DepthgateError
from tests.train import forks
from tests.train.tiny import rows, same, train, words, write_data


def refused(result: tuple[int, str], *says: str) -> None:
    code, errors = result
    assert code == 2, errors
    assert "Traceback" not in errors
    assert len(errors.splitlines()) < 6
    for words_ in says:
        assert words_ in errors, errors


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name not in (".run.lock", ".lock")}


@pytest.mark.parametrize(
    "kind", [{"close": [0, 1, 2]}, {"pipe": True}, {"log": "/dev/full"}], ids=["closed", "no reader", "full"]
)
def test_closed_streams_and_a_full_log_harm_no_run(tmp_path, data, kind):
    """12 steps, of which the last 2 are saved at the end, after the last line was shown."""
    code, _ = forks.run({"argv": words(tmp_path / "a", data, 12), **kind})
    assert code == 0
    assert train(tmp_path / "whole", data, 12) == 0
    assert same(tmp_path / "a", tmp_path / "whole")
    assert [row["step"] for row in rows(tmp_path / "a")] == list(range(1, 13))


@pytest.mark.parametrize(
    ("argv", "kind", "code"),
    [
        (["--help"], {"pipe": True}, 0),
        (["presets"], {"pipe": True}, 0),
        (["presets"], {"close": [1]}, 0),
        (["presets"], {"out": "/dev/full"}, 2),
        (["train", "--steps=0"], {"pipe": True}, 2),
        (["train", "--steps=0"], {"log": "/dev/full"}, 2),
        (["train", "--steps=0"], {"close": [2]}, 2),
    ],
)
def test_a_reader_that_leaves_is_not_an_error_and_a_full_disk_is_one(argv, kind, code):
    found, errors = forks.run({"argv": argv, **kind})
    assert found == code, errors
    assert "Traceback" not in errors


LIMITS = {  # largest file -> what does not fit into it, in the order in which a run writes
    "config.json": (500, "cannot write {out} (File too large)"),
    "tokenizer": (3000, "the tokenizer cannot be written to {out}/tokenizer: File too large"),
    "token cache": (8000, "the token cache {home}/.cache/depthgate/"),
    "checkpoint": (40_000, "cannot save step 5 in {out} (File too large)"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_disk_that_fills_up_is_named_at_every_file(tmp_path, data, name):
    """RLIMIT_FSIZE: a write beyond it fails as one to a full disk does."""
    Path(data).write_text(Path(data).read_text() * 8)
    out, (limit, says) = tmp_path / "a", LIMITS[name]
    refused(forks.run({"argv": words(out, data, 12), "limit": limit}), says.format(out=out, home=tmp_path / "home"))
    # Nothing half-made stays, and where no step was made, nothing at all.
    assert out.exists() == (name == "checkpoint")
    assert name != "checkpoint" or names(out) == {"config.json", "metrics.jsonl", "tokenizer"}
    assert train(out, data, 2, "--resume") == 0
    assert dg.load(out)


MIDWAY = {
    "metrics.jsonl": (8000, "--checkpoint_every=1000", "cannot write {out} (File too large)"),
    "checkpoint": (40_000, "--checkpoint_every=5", "cannot save step 10 in {out} (File too large)"),
    "config.json": (500, "--checkpoint_every=5", "cannot write {out} (File too large)"),
}


@pytest.mark.parametrize("name", MIDWAY)
def test_a_disk_that_fills_up_later_leaves_what_was_saved(tmp_path, data, name):
    """At a row of metrics, at the second checkpoint, and when a resume writes down again what was asked for."""
    out, (limit, every, says) = tmp_path / "a", MIDWAY[name]
    assert train(out, data, 5) == 0
    result = forks.run({"argv": words(out, data, 1000, "--resume", every), "limit": limit})
    refused(result, says.format(out=out))
    assert names(out) == {"config.json", "metrics.jsonl", "report.html", "tokenizer", "step-5"}
    assert json.loads((out / "config.json").read_text())["data"] == data
    assert train(tmp_path / "whole", data, 12) == 0
    assert train(out, data, 12, "--resume") == 0
    assert same(out, tmp_path / "whole")
    assert [row["step"] for row in rows(out)] == list(range(1, 13))


@pytest.mark.skipif(os.getuid() == 0 and not shutil.which("setpriv"), reason="root needs setpriv to be refused")
def test_folders_and_files_without_permission(tmp_path, data):
    assert train(tmp_path / "run", data, 5) == 0
    for name in ("closed", "config", "metrics"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
    shutil.copytree(tmp_path / "run", tmp_path / "held")
    secret = write_data(tmp_path / "secret.jsonl")
    (tmp_path / "folder").mkdir()
    home = tmp_path / "homeless"
    home.mkdir()
    modes = {
        tmp_path / "run": 0o555,
        tmp_path / "closed": 0,
        tmp_path / "config" / "config.json": 0,
        tmp_path / "metrics" / "metrics.jsonl": 0,
        tmp_path / "held" / "step-5" / "model.safetensors": 0,
        Path(secret): 0,
        tmp_path / "folder": 0,
        home: 0o555,
    }
    for path, mode in modes.items():
        path.chmod(mode)

    def resumed(name: str) -> dict:
        return {"argv": words(tmp_path / name, data, 9, "--resume")}

    measure = ["eval", "--data", data, "--device=cpu", "--model"]
    try:
        scenes = (
            resumed("run"),
            resumed("closed"),
            {"argv": words(tmp_path / "closed", data, 9)},
            {"argv": [*measure, str(tmp_path / "closed")]},
            resumed("metrics"),
            {"argv": words(tmp_path / "new", secret, 9)},
            {"argv": words(tmp_path / "new", tmp_path / "folder", 9)},
            {"argv": words(tmp_path / "new", data, 9), "env": {"HOME": str(home)}},
            {"argv": words(home / "deep" / "run", data, 9)},
            {"argv": [*measure, str(tmp_path / "held")]},
            {"argv": [*measure, str(tmp_path / "run")]},  # reading needs no right to write
            resumed("config"),
        )
        done = [forks.run(scene, bound_by_modes=True) for scene in scenes]
    finally:
        for path in modes:
            path.chmod(0o755)
    says = [
        f"cannot write {tmp_path / 'run'} (Permission denied)",
        "Permission denied",
        "Permission denied",
        f"{tmp_path / 'closed'} cannot be read (Permission denied)",
        f"cannot write {tmp_path / 'metrics'} (Permission denied)",
        "secret.jsonl cannot be read: Permission denied",
        "folder cannot be read: Permission denied",
        f"the token cache {home}/.cache/depthgate/",
        f"cannot write {home}/deep/run (Permission denied)",
        "model.safetensors cannot be opened (Permission denied)",
    ]
    for result, text in zip(done, says, strict=False):
        refused(result, text)
    assert done[-2][0] == 0
    assert "the configuration in the newest checkpoint is used" in done[-1][1]  # it cannot be read, but replaced
    assert done[-1][0] == 0
    for name in ("run", "closed", "metrics"):
        assert names(tmp_path / name) == {"config.json", "metrics.jsonl", "report.html", "tokenizer", "step-5"}
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["new", "resumed"])
def test_places_that_are_no_folders(tmp_path, data, resume, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out in ("file", "file/run", "notes", "x" * 300, "a\0b", "loop", "loop/run"):
        assert train(tmp_path / out, data, 3, *resume) == 2
        errors = capsys.readouterr().err
        assert "choose another" in errors
        assert "Traceback" not in errors
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path / "notes") == ["a.txt"]


def test_a_run_is_held_by_one_process(tmp_path, data, capsys):
    assert train(tmp_path / "a", data, 3) == 0
    with checkpoint.lock(tmp_path / "a" / ".run.lock"):
        assert train(tmp_path / "a", data, 6, "--resume") == 2
    assert ".run.lock is held by a process" in capsys.readouterr().err
    assert checkpoint.steps(tmp_path / "a") == [3]
    (tmp_path / "b").mkdir()
    with checkpoint.lock(tmp_path / "b" / ".run.lock"):
        assert train(tmp_path / "b", data, 6) == 2
    assert names(tmp_path / "b") == set()


def test_a_run_that_another_process_made_meanwhile_is_not_overwritten(tmp_path, data, monkeypatch, capsys):
    """The folder is looked at again once it is held."""
    assert train(tmp_path / "made", data, 3) == 0
    real = Path.mkdir

    def overtaken(path, *args, **kwargs):
        if path.name == "late" and not path.exists():
            shutil.copytree(tmp_path / "made", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", overtaken)
    assert train(tmp_path / "late", data, 5) == 2
    assert "holds another run" in capsys.readouterr().err
    assert same(tmp_path / "late", tmp_path / "made")


def test_what_a_killed_process_left_is_ignored_and_cleared_away(tmp_path, data):
    assert train(tmp_path / "a", data, 5) == 0
    (tmp_path / "a" / ".tmp-step-7-dead").mkdir()
    (tmp_path / "a" / ".tmp-step-7-dead" / "model.safetensors").write_bytes(b"half")
    for name in (".config.json.0a1b2c3d.part", ".metrics.jsonl.0a1b2c3d.part"):
        (tmp_path / "a" / name).write_text("half")
    assert dg.load(tmp_path / "a")
    assert train(tmp_path / "a", data, 7, "--resume") == 0
    assert names(tmp_path / "a") == {"config.json", "metrics.jsonl", "report.html", "tokenizer", "step-5", "step-7"}


def test_where_tokens_are_kept(tmp_path, monkeypatch):
    assert cache_folder() == tmp_path / "home" / ".cache" / "depthgate"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "depthgate"
    monkeypatch.setenv("XDG_CACHE_HOME", "")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(DepthgateError, match="set HOME or XDG_CACHE_HOME"):
        cache_folder()


def test_a_run_is_not_begun_within_another(tmp_path, capsys):
    run, data = tmp_path / "run", write_data(tmp_path / "text.jsonl")
    assert train(run, data, 1) == 0
    before = sorted((run / "step-1").iterdir())
    for within in ("step-1", "sub", "a/b/c"):
        for more in ((), ("--resume",)):
            assert train(run / within, data, 1, *more) == 2
            assert f"within the folder of the run {run}" in capsys.readouterr().err
    assert sorted((run / "step-1").iterdir()) == before
    assert not (run / "sub").exists()
    assert main(["train", "--out", str(run), "--resume", "--task", "images"]) == 2
    assert "task is 'images', but the run is one of text: leave it out" in capsys.readouterr().err
