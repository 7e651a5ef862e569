"""A tiny run of `depthgate train`, for the tests of its faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from depthgate.checkpoint import store as checkpoint
from depthgate.cli import main

TINY = [
    "--model.dim=16",
    "--model.layers=2",
    "--model.heads=2",
    "--model.context=32",
    "--batch=4",
    "--device=cpu",
    "--checkpoint_every=5",
    "--schedule_steps=1000000",  # so that shorter runs begin as longer ones do
]
TEXT = "the quick brown fox jumps over a lazy dog and then it sleeps for a while"


def write_data(path: Path) -> str:
    """Some documents, a few hundred tokens in all: an epoch ends within ten steps."""
    known = TEXT.split()
    texts = [" ".join(known[(i * j) % len(known)] for j in range(3, 25)) for i in range(12)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def words(out, data, steps, *options) -> list[str]:
    """The command line of a run."""
    return ["train", "--out", str(out), "--data", str(data), "--steps", str(steps), *TINY, *options]


def train(out, data, steps, *options) -> int:
    """A run in this process; its exit code."""
    torch.set_num_threads(1)  # threads that wait for each other take longer than so little work
    return main(words(out, data, steps, *options))


def start(out, data, steps, *options) -> subprocess.Popen:
    """A run in a process of its own."""
    command = [sys.executable, "-m", "depthgate", *words(out, data, steps, *options)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, text=True, stderr=subprocess.PIPE)


def rows(out) -> list[dict]:
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def same(a, b) -> bool:
    """Model, optimizer, position and RNG of two runs' newest checkpoints are equal, bit for bit."""
    one, two = checkpoint.load(Path(a)), checkpoint.load(Path(b))
    assert one.step == two.step
    assert one.tensors.keys() == two.tensors.keys()
    for group, tensors in one.tensors.items():
        assert tensors.keys() == two.tensors[group].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, two.tensors[group][name]), (group, name)
    assert one.state | {"seconds": 0} == two.state | {"seconds": 0}
    return True
