"""Runs that are stopped, at any moment and in any way, and go on: the end is as if nothing had happened (rows 1, 2,
12 to 15 and 45 of docs/reliability.md)."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from depthgate.checkpoint import store as checkpoint
from depthgate.data.tokenizer import ByteTokenizer
from depthgate.model import Decoder
from depthgate.train import run_folder as run
from tests.train.tiny import rows, same, start, train, write_data

STEPS = 11  # an epoch has 8.5


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts."""
    home = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        assert train(home / "run", write_data(home / "text.jsonl"), STEPS) == 0
    return home / "run"


def at_row(monkeypatch, step: int, action) -> None:
    """Do something when the row of a step is written, in the middle of the run."""
    real = run.Metrics.add

    def add(self, row):
        real(self, row)
        if row["step"] == step:
            action()

    monkeypatch.setattr(run.Metrics, "add", add)


def send(*numbers: int):
    return lambda: [os.kill(os.getpid(), number) for number in numbers]


@pytest.mark.parametrize("step", range(1, STEPS))
def test_stopped_at_any_step_a_run_goes_on_as_if_it_had_not_been(tmp_path, data, whole, step, monkeypatch):
    number, code = ((signal.SIGTERM, 0), (signal.SIGINT, 130))[step % 2]
    with monkeypatch.context() as patch:
        at_row(patch, step, send(number))
        assert train(tmp_path / "a", data, STEPS) == code
    assert checkpoint.load(tmp_path / "a").step == step == rows(tmp_path / "a")[-1]["step"]
    assert train(tmp_path / "a", data, STEPS, "--resume") == 0
    assert same(tmp_path / "a", whole)
    assert [r["loss"] for r in rows(tmp_path / "a")] == [r["loss"] for r in rows(whole)]


def test_stopped_between_the_parts_of_a_step(tmp_path, data, monkeypatch):
    """A step that was half accumulated is done again from its beginning."""
    assert train(tmp_path / "whole", data, 9, "--accumulate=2") == 0
    real, calls = Decoder.loss, []

    def loss(self, *args, **kwargs):
        calls.append(0)
        if len(calls) == 14:  # the second part of step 7
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "loss", loss)
        assert train(tmp_path / "a", data, 9, "--accumulate=2") == 130
    assert checkpoint.load(tmp_path / "a").step == 5
    assert train(tmp_path / "a", data, 9, "--accumulate=2", "--resume") == 0
    assert same(tmp_path / "a", tmp_path / "whole")


def test_asked_by_two_at_once_a_run_saves_and_stops(tmp_path, data, monkeypatch):
    """As where a terminal and a launcher both pass Ctrl-C on."""
    at_row(monkeypatch, 7, send(signal.SIGINT, signal.SIGINT, signal.SIGTERM))
    assert train(tmp_path / "a", data, STEPS) == 130
    assert checkpoint.load(tmp_path / "a").step == 7


def test_asked_again_a_run_stops_at_once_and_goes_on_from_its_last_checkpoint(tmp_path, data, whole, monkeypatch):
    def ask_and_ask_again():
        send(signal.SIGTERM)()
        time.sleep(1.1)
        send(signal.SIGTERM)()

    with monkeypatch.context() as patch:
        at_row(patch, 7, ask_and_ask_again)
        assert train(tmp_path / "a", data, STEPS) == 130
    assert checkpoint.load(tmp_path / "a").step == 5
    assert train(tmp_path / "a", data, STEPS, "--resume") == 0
    assert same(tmp_path / "a", whole)


@pytest.mark.parametrize("write", range(6))
@pytest.mark.parametrize("steps", [5, STEPS], ids=["last", "first"])
def test_asked_during_a_save_a_run_finishes_it(tmp_path, data, write, steps, monkeypatch):
    """At every file of the first checkpoint, be it of the middle or of the end of a run."""
    number, code = ((signal.SIGTERM, 0), (signal.SIGINT, 130))[write % 2]
    real, calls = checkpoint.sync, []

    def slow(path):
        calls.append(path)
        if len(calls) == write + 1:
            os.kill(os.getpid(), number)
        return real(path)

    monkeypatch.setattr(checkpoint, "sync", slow)
    every = 5 if steps > 5 else 1000
    assert train(tmp_path / "a", data, steps, f"--checkpoint_every={every}") == code
    assert checkpoint.steps(tmp_path / "a") == [5]
    assert checkpoint.load(tmp_path / "a").step == 5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_asked_while_it_prepares_its_data_a_run_leaves_nothing(tmp_path, data, whole, number, code, monkeypatch):
    def interrupted(self, texts):
        os.kill(os.getpid(), number)
        time.sleep(1)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode_many", interrupted)
        assert train(tmp_path / "a", data, STEPS) == code
    assert signal.getsignal(signal.SIGTERM) is before
    assert [p for p in tmp_path.rglob("*") if p.name.startswith(".tmp-") or p.suffix == ".tokens"] == []
    assert train(tmp_path / "a", data, STEPS) == 0  # as if it had not been tried
    assert same(tmp_path / "a", whole)


def test_a_real_process_holds_its_run_and_sigterm_makes_it_save(tmp_path, data, capsys):
    process = start(tmp_path / "a", data, 10**6)
    try:
        while not (tmp_path / "a").exists() or not checkpoint.steps(tmp_path / "a"):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        assert train(tmp_path / "a", data, STEPS, "--resume") == 2
        assert "is held by a process" in capsys.readouterr().err
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "go on with --resume" in errors
    assert "Traceback" not in errors
    reached = checkpoint.load(tmp_path / "a").step
    assert reached == rows(tmp_path / "a")[-1]["step"]
    assert train(tmp_path / "a", data, reached + 1, "--resume") == 0  # the dead hold nothing
    assert train(tmp_path / "whole", data, reached + 1) == 0
    assert same(tmp_path / "a", tmp_path / "whole")


def test_killed_at_random_moments_a_run_always_goes_on():
    soak = Path(__file__).parents[1] / "soak" / "kill_runs.py"
    command = [sys.executable, soak, "--rounds", "3", "--longest", "0.8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 runs killed")
    assert "equal to an uninterrupted run bit for bit" in done.stdout


def test_a_clock_that_goes_backwards_is_not_looked_at(tmp_path, data, monkeypatch):
    now = [2e9]

    def backwards() -> float:
        now[0] -= 1000
        return now[0]

    monkeypatch.setattr(time, "time", backwards)
    monkeypatch.setattr(time, "time_ns", lambda: int(backwards() * 1e9))
    assert train(tmp_path / "a", data, 7) == 0
    seconds = [row["seconds"] for row in rows(tmp_path / "a")]
    assert all(0 < a < b < 60 for a, b in pairwise(seconds))
    assert all(row["tokens_per_second"] > 0 for row in rows(tmp_path / "a"))


def test_steps_are_the_total_also_when_resumed_and_every_run_saves_at_its_end(tmp_path, data):
    assert train(tmp_path / "a", data, 3, "--resume") == 0  # nothing was written yet: from the beginning
    assert checkpoint.steps(tmp_path / "a") == [3]
    assert train(tmp_path / "a", data, 7, "--resume") == 0
    assert checkpoint.steps(tmp_path / "a") == [5, 7]
    for steps, code in ((7, 0), (2, 2)):  # nothing is left to do, or fewer steps than there are; and nothing is lost
        assert train(tmp_path / "a", data, steps, "--resume") == code
        assert json.loads((tmp_path / "a" / "config.json").read_text())["steps"] == 7
        assert checkpoint.load(tmp_path / "a").step == 7
        assert [row["step"] for row in rows(tmp_path / "a")] == list(range(1, 8))


def test_rows_of_metrics_that_a_power_cut_spoiled(tmp_path, data):
    assert train(tmp_path / "a", data, 5) == 0
    path = tmp_path / "a" / "metrics.jsonl"
    spoiled = [b"\0" * 100, b"\xff\xfe\n", b'{"step": Infinity}\n', b'{"step": true}\n', b"[" * 10**5 + b"\n", b'{"st']
    path.write_bytes(path.read_bytes() + b"\n".join(spoiled))
    assert train(tmp_path / "a", data, 7, "--resume") == 0
    assert [row["step"] for row in rows(tmp_path / "a")] == list(range(1, 8))
