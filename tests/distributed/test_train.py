"""`torchrun -m depthgate train`: two processes equal one, and a run may go on with another number of them."""

import math
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import depthgate as dg
from depthgate.checkpoint import store as checkpoint
from depthgate.cli import main
from depthgate.config import TrainConfig
from depthgate.data.batches import Rows
from depthgate.routing import Threshold
from depthgate.train import optim
from depthgate.train.loop import Pretraining
from depthgate.train.step import Step
from tests.distributed.spawn import spawn, start
from tests.train.tiny import TINY, rows

TOLERANCE = {"rtol": 2e-3, "atol": 2e-5}  # sums over processes are in another order, and AdamW divides by small numbers


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n\n".join(f"document {i}: " + "abc defg hij " * (3 + i % 7) for i in range(40)))
    return path


def train(processes, out, data, steps, *options):
    """A run in this process, or in several that are connected as torchrun connects them."""
    launch(processes, out, ["--data", str(data), "--steps", str(steps), *TINY, *options])


def launch(processes, out, options):
    argv = ["train", "--out", str(out), *options]
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
    warnings.filterwarnings("error", "FSDP2")  # it would be of tensors that our layers return
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
    assert "Warning" not in done.stderr


def close(a, b):
    one, two = checkpoint.load(Path(a)), checkpoint.load(Path(b))
    assert one.step == two.step
    for name, tensor in one.tensors["model"].items():
        # Each process ranks its own tokens, and their thresholds are averaged: not that of all tokens together.
        tolerance = {"rtol": 0.1, "atol": 1e-3} if name.endswith("rule.average") else TOLERANCE
        torch.testing.assert_close(tensor, two.tensors["model"][name], **tolerance)
    assert one.state["sequences"] == two.state["sequences"]
    assert one.state["tokens"] == two.state["tokens"]


@pytest.mark.parametrize(
    "options", [[], ["--accumulate=2", "--model.pattern=mod,moe", "--model.experts=4", "--model.rule=predictor"]]
)
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


@pytest.mark.parametrize("pattern", ["soft_moe", "dense,mod", "moe"])
def test_two_processes_train_on_images_as_one(tmp_path, pattern):
    """In the model's layers `forward` is called, and not `add_to`; held-out images are measured by all processes."""
    random = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=random.integers(0, 256, (40, 8, 8, 3), np.uint8), y=np.arange(40) % 2)
    options = ["--task=images", "--device=cpu", "--model.dim=16", "--model.heads=2", "--model.layers=2", "--batch=8"]
    options += ["--model.experts=4", "--randaugment=0.5", "--drop_path=0.3", "--warmup=2", "--balance_loss=0"]
    options += [f"--data={tmp_path / 'a.npz'}", f"--model.pattern={pattern}", "--steps=20"]
    for run, processes in (("one", 1), ("two", 2)):
        launch(processes, tmp_path / run, options)
    close(tmp_path / "one", tmp_path / "two")
    one, two = (rows(tmp_path / run)[-1] for run in ("one", "two"))
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)
    assert one["held_out_loss"] == pytest.approx(two["held_out_loss"], rel=1e-3)


# Thresholds
SHAPE = {"vocab": 50, "dim": 16, "layers": 2, "heads": 2, "context": 12, "rule": "threshold", "key_shift": True}
SHAPE |= {"experts": 5, "top_k": 1, "shared_experts": 1, "capacity": 0.5}
SHARES = {"mod": 0.5, "mode": 0.2}  # of the tokens that an expert takes; five do not divide among two processes


def halves(seed):
    """The sequences of two processes, two each; of the second one's, one is padding, and in the second step both."""
    ids = torch.randint(50, (4, 13), generator=torch.Generator().manual_seed(seed))
    pos = torch.arange(12).repeat(4, 1)
    pos[2 if seed == 1 else 3 :] = -1
    batch = Rows(ids[:, :-1], torch.where(pos >= 0, ids[:, 1:], -1), pos, torch.zeros_like(pos))
    return [Rows(*half) for half in zip(*(t.chunk(2) for t in batch), strict=True)]


@torch.no_grad()
def moved(model, half, before):
    """Average and weight of every threshold after an update by these rows, by plain sorting."""
    _, plans = model.loss(*half)
    real = half.pos >= 0
    after = []
    for kind, plan, (average, weight) in zip(model.config.kinds, plans, before, strict=True):
        if real.any():
            kth = plan.scores[real].sort(0).values[-int(SHARES[kind] * real.sum())]
            share = (12 / (12 + (1 - weight).log() / math.log(0.99))).clamp(min=0.01)
            mean = average / weight + share * (kth - average / weight) if weight > 0 else kth
            weight = 0.99 * weight + 0.01
            average = weight * mean
        after.append((average, weight))
    return after


def _thresholds(world, folder):
    for pattern in ("mode", "mod,mode"):
        config = TrainConfig(model=dg.ModelConfig(**SHAPE, pattern=pattern), batch=4, lr=1e-3, max_documents=1)
        task, whole = Pretraining(config, world), Pretraining(config).model
        step = Step(task, optim.build(task.model, config, world), config, world)
        rules = [module for module in task.model.modules() if isinstance(module, Threshold)]
        expected = [(torch.zeros_like(rule.average), torch.zeros(())) for rule in rules]
        for seed in range(3):
            held = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in task.held().items()}
            whole.load_state_dict(held)
            both = [moved(whole, half, expected) for half in halves(seed)]
            expected = [tuple((a + b) / 2 for a, b in zip(*pair, strict=True)) for pair in zip(*both, strict=True)]
            assert step(halves(seed)[world.rank]).read()[1] > 0  # the gradient: no step was skipped
            for rule, (average, weight) in zip(rules, expected, strict=True):
                torch.testing.assert_close(rule.average, average)
                torch.testing.assert_close(rule.weight, weight)
        run = folder / pattern
        checkpoint.save(run, 3, {"model": task.held()}, {}, {}, 2, world)
        with torch.no_grad():
            logits, plans = task.model(halves(9)[0].tokens, causal=True)
        if world.first:
            assert all(0 < plan.chosen.float().mean() < 1 for plan in plans)
            torch.save([logits, *(plan.chosen for plan in plans)], run / "said.pt")


def test_each_process_ranks_its_own_pool_and_thresholds_are_averaged(tmp_path):
    """A process whose pool has no token has no say. One process opens what two saved, and says the same."""
    spawn(2, _thresholds, tmp_path)
    for pattern in ("mode", "mod,mode"):
        model = dg.Decoder(dg.ModelConfig(**SHAPE, pattern=pattern)).eval()
        model.load_state_dict(checkpoint.load(tmp_path / pattern).tensors["model"])
        with torch.no_grad():
            logits, plans = model(halves(9)[0].tokens, causal=True)
        said, *chosen = torch.load(tmp_path / pattern / "said.pt")
        torch.testing.assert_close(logits, said)
        assert all(plan.chosen.equal(theirs) for plan, theirs in zip(plans, chosen, strict=True))
