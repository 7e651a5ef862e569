"""`torchrun -m depthgate train`: two processes equal one, and a run may go on with another number of them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from depthgate.checkpoint import store as checkpoint
from depthgate.cli import main
from tests.distributed.spawn import start
from tests.train.tiny import TINY, rows

TOLERANCE = {"rtol": 2e-3, "atol": 2e-5}  # sums over processes are in another order, and AdamW divides by small numbers


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n\n".join(f"document {i}: " + "abc defg hij " * (3 + i % 7) for i in range(40)))
    return path


def train(processes, out, data, steps, *options):
    """A run in this process, or in several that are connected as torchrun connects them."""
    argv = ["train", "--out", str(out), "--data", str(data), "--steps", str(steps), *TINY, *options]
    env = {"HOME": str(Path(out).parent / "home")}
    if processes == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", env["HOME"])
            assert main(argv) == 0
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    start(processes, _train, argv, env)


def _train(rank, argv, env):
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    assert main(argv) == 0


def torchrun(processes, out, data, steps, *options):
    """The same by the command."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    command += ["-m", "depthgate", "train", "--out", str(out), "--data", str(data), "--steps", str(steps)]
    command += [*TINY, *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(Path(out).parent / "home")}
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        # About one launch of gloo in sixty aborts as the interpreter exits, its work done and saved; torch's doing.
        if done.returncode == 0 or "terminate called without an active exception" not in done.stderr:
            break
        command += [] if "--resume" in command else ["--resume"]
    assert done.returncode == 0, done.stdout + done.stderr


def close(a, b):
    one, two = checkpoint.load(Path(a)), checkpoint.load(Path(b))
    assert one.step == two.step
    for name, tensor in one.tensors["model"].items():
        # Each process ranks its own tokens, and their thresholds are averaged: not that of all tokens together.
        tolerance = {"rtol": 0.1, "atol": 1e-3} if name.endswith("rule.average") else TOLERANCE
        torch.testing.assert_close(tensor, two.tensors["model"][name], **tolerance)
    assert one.state["sequences"] == two.state["sequences"]
    assert one.state["tokens"] == two.state["tokens"]


@pytest.mark.parametrize("options", [[], ["--accumulate=2", "--model.pattern=mod,moe", "--model.experts=4"]])
def test_two_processes_equal_one(tmp_path, data, options):
    options = [*options, "--balance_loss=0"]  # the balance of a batch is not the mean of those of its parts
    train(1, tmp_path / "one", data, 6, *options)
    train(2, tmp_path / "two", data, 6, *options)
    close(tmp_path / "one", tmp_path / "two")
    losses = [[row["loss"] for row in rows(tmp_path / run)] for run in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert [row["tokens"] for row in rows(tmp_path / "one")] == [row["tokens"] for row in rows(tmp_path / "two")]


def test_a_run_goes_on_with_another_number_of_processes(tmp_path, data):
    train(1, tmp_path / "one", data, 9)
    train(2, tmp_path / "both", data, 3)
    train(1, tmp_path / "both", data, 6, "--resume")
    torchrun(2, tmp_path / "both", data, 9, "--resume")
    close(tmp_path / "one", tmp_path / "both")
    assert [row["step"] for row in rows(tmp_path / "both")] == list(range(1, 10))
