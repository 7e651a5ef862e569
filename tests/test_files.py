"""Files and folders that are whole or not there."""

import os
from pathlib import Path

import pytest

from depthgate import files


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    """Until the block ends, the old content stands; afterwards the new one, and nothing else is left."""
    path = tmp_path / "page.html"
    files.replace(path, "old")
    with files.writing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["page.html"]


def test_what_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    files.write_json(path, {"a": 1})

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.replace(path, b"x" * 1000)
    with pytest.raises(KeyboardInterrupt), files.writing(path):
        raise KeyboardInterrupt
    assert path.read_text() == '{\n "a": 1\n}'
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_folder_is_renamed_when_it_is_filled(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(UnicodeEncodeError), files.new_folder(target) as part:
        (part / "weights").write_text("half \ud800", encoding="utf-8")
    assert not os.listdir(tmp_path)
    with files.new_folder(target) as part:
        (part / "weights").write_text("whole")
        assert not target.exists()
    assert os.listdir(tmp_path) == ["model"]
    assert (target / "weights").read_text() == "whole"


def test_files_move_into_a_folder_the_named_one_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text("rows")
    moved: list[str] = []
    rename = os.replace

    def note(source: Path, target: Path) -> None:
        moved.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "replace", note)
    with files.new_folder(tmp_path, last="config.json") as part:
        for name in ("config.json", "model.safetensors", "a.json"):
            (part / name).write_text(name)
        assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["metrics.jsonl"]
    assert moved == ["a.json", "model.safetensors", "config.json"]
    assert sorted(os.listdir(tmp_path)) == ["a.json", "config.json", "metrics.jsonl", "model.safetensors"]
