"""Trackers get what metrics.jsonl gets; one that is not installed is named."""

import importlib.util
import json

import pytest

from depthgate.cli import main
from tests.train.tiny import TINY


def test_tensorboard_holds_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "text.txt").write_text("some words to learn from\n" * 40)
    run = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), "--steps", "3"]
    assert main(["train", *run, *TINY, "--tracker", "tensorboard"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]
    for key in ("loss", "lr", "tokens", "gradient_norm"):
        assert [e.value for e in events.Scalars(key)] == pytest.approx([row[key] for row in rows])
    assert [e.value for e in events.Scalars("routed_share/0")] == pytest.approx([r["routed_share"][0] for r in rows])


def test_a_tracker_that_is_missing_is_named(tmp_path, capsys):
    missing = [name for name in ("trackio", "wandb") if importlib.util.find_spec(name) is None]
    if not missing:
        pytest.skip("trackio and wandb are both installed here: nothing is missing")
    (tmp_path / "text.txt").write_text("some words to learn from\n" * 40)
    run = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), "--steps", "3"]
    assert main(["train", *run, *TINY, "--tracker", missing[0]]) == 2
    assert f"pip install {missing[0]}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()
    assert main(["train", *run, *TINY, "--tracker", "paper"]) == 2
    assert "tensorboard" in capsys.readouterr().err
