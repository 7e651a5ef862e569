"""Losses and gradients that are not finite: a step that has them changes nothing, many end the run (rows 17 and 18 of
docs/reliability.md)."""

import math
import re
from itertools import pairwise

import pytest
import torch

import depthgate as dg
from depthgate.checkpoint import store as checkpoint
from depthgate.model import Decoder
from tests.train.tiny import rows, same, train


class Gradient(torch.autograd.Function):
    """Adds nothing to the loss, and one number to every gradient of a weight."""

    @staticmethod
    def forward(ctx, weight, number):
        ctx.shape, ctx.number = weight.shape, number
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        return torch.full(ctx.shape, ctx.number), None


def in_gradient(number: float, part: str):
    def change(model, loss):
        weight = next(weight for name, weight in model.named_parameters() if part in name)
        return loss + Gradient.apply(weight, number)

    return change


POISON = {
    "NaN loss": lambda model, loss: loss * math.nan,
    "infinite loss": lambda model, loss: loss * math.inf,
    "NaN gradient in one layer": in_gradient(math.nan, "layers.0."),
    "NaN gradient of a router": in_gradient(math.nan, "router"),
    "infinite gradient": in_gradient(-math.inf, "embed"),
    "infinite norm of finite gradients": in_gradient(1e38, "embed"),
}


def poison(monkeypatch, change, first: int, last: int) -> None:
    """Spoil the losses of the steps from `first` to `last`."""
    real, calls = Decoder.loss, []

    def loss(self, *args, **kwargs):
        calls.append(0)
        mean, plans = real(self, *args, **kwargs)
        return (change(self, mean) if first <= len(calls) <= last else mean), plans

    monkeypatch.setattr(Decoder, "loss", loss)


def finite(found: checkpoint.Checkpoint) -> bool:
    groups = (found.tensors["model"], found.tensors["optimizer"])
    return all(t.isfinite().all() for group in groups for t in group.values() if t.is_floating_point())


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, []) for kind in POISON),
        ("NaN loss", ["--model.rule=threshold", "--optimizer=muon"]),
        ("infinite norm of finite gradients", ["--model.rule=threshold", "--optimizer=muon"]),
    ],
)
def test_one_bad_step_is_skipped_and_the_next_is_made(tmp_path, data, kind, options, monkeypatch):
    every = ["--checkpoint_every=1", "--keep=20", *options]
    with monkeypatch.context() as patch:
        poison(patch, POISON[kind], 4, 4)
        assert train(tmp_path / "a", data, 7, *every) == 0
    saved = [checkpoint.read_folder(tmp_path / "a" / f"step-{step}") for step in range(1, 8)]
    for group in ("model", "optimizer"):  # exactly one skip: steps 3 and 4 are equal, and no other neighbours are
        kept = [equal(a.tensors[group], b.tensors[group]) for a, b in pairwise(saved)]
        assert kept == [False, False, True, False, False, False]
    assert all(finite(found) for found in saved)
    assert [found.state["bad"] for found in saved] == [0, 0, 0, 1, 0, 0, 0]
    marked = [row["loss"] is None or row["gradient_norm"] is None for row in rows(tmp_path / "a")]
    assert marked == [False, False, False, True, False, False, False]
    assert train(tmp_path / "b", data, 3, *every) == 0  # what came before was not touched
    assert equal(checkpoint.load(tmp_path / "b").tensors["model"], saved[3].tensors["model"])


def test_many_bad_steps_end_the_run_and_its_last_checkpoint_goes_on(tmp_path, data, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        poison(patch, POISON["NaN loss"], 7, 99)
        assert train(tmp_path / "a", data, 40, "--most_bad_steps=3", "--checkpoint_every=5") == 2
    errors = capsys.readouterr().err
    assert "step 9" in errors
    assert re.search(r"bad step \d+ in a row", errors)
    assert "all weights are finite" in errors
    assert checkpoint.load(tmp_path / "a").step == 5
    assert train(tmp_path / "a", data, 12, "--resume") == 0
    assert train(tmp_path / "whole", data, 12) == 0
    assert same(tmp_path / "a", tmp_path / "whole")
    assert [r["loss"] for r in rows(tmp_path / "a")] == [r["loss"] for r in rows(tmp_path / "whole")]


@pytest.mark.parametrize("part", ["router", "layers.0.", "norm.weight"])
def test_a_weight_that_is_not_a_number_is_named(tmp_path, data, part, monkeypatch, capsys):
    def spoil(model, loss):
        next(weight for name, weight in model.named_parameters() if part in name).data.fill_(math.nan)
        return loss * math.nan

    with monkeypatch.context() as patch:
        poison(patch, spoil, 7, 7)
        assert train(tmp_path / "a", data, 40, "--most_bad_steps=2") == 2
    errors = capsys.readouterr().err
    assert "the first weight that is not finite is" in errors
    assert part in errors.split("is not finite is")[1]
    assert checkpoint.load(tmp_path / "a").step == 5
    assert dg.load(tmp_path / "a")  # which refuses numbers that are not finite


@pytest.mark.parametrize("every", [1, 2])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, data, every, capsys):
    """A rate that is too large makes them from finite gradients; older checkpoints must not make room for them."""
    assert train(tmp_path / "a", data, 30, "--lr=1e38", "--warmup=0", f"--checkpoint_every={every}") == 2
    assert "not finite" in capsys.readouterr().err
    for step in checkpoint.steps(tmp_path / "a"):
        assert finite(checkpoint.read_folder(tmp_path / "a" / f"step-{step}"))
