"""Converted transformers models under FSDP2: two processes equal one, also where no token of one enters a layer."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import depthgate as dg
from depthgate.hf.families import decoder_layers
from tests.conftest import close
from tests.distributed.spawn import spawn
from tests.hf.zoo import FAMILY_NAMES, plans_of, routed, tokens

RULES = ("scores", "predictor", "threshold")


def sharded(model, mesh):
    """At the borders of layers, as transformers and accelerate do."""
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _equal(world):
    mesh = init_device_mesh("cpu", (2,))
    ids = tokens(4, 12)
    mine = slice(2 * world.rank, 2 * world.rank + 2)
    for i, kind in enumerate(FAMILY_NAMES):
        rule = RULES[i % 3]
        single, parts = routed(kind, rule=rule).train(), sharded(routed(kind, rule=rule).train(), mesh)
        expected = single(ids, labels=ids, use_cache=False).loss
        expected.backward()
        loss = parts(ids[mine], labels=ids[mine], use_cache=False).loss
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        close(mean / 2, expected.detach())
        want = {name: weight.grad for name, weight in single.named_parameters()}
        for name, weight in parts.named_parameters():
            if want[name] is None:
                assert weight.grad is None
            else:
                torch.testing.assert_close(weight.grad.full_tensor(), want[name], rtol=1e-3, atol=1e-5, msg=name)


def test_losses_and_gradients_of_two_processes_are_those_of_one():
    spawn(2, _equal)


def _alone(world):
    """On rank 1 no token passes the threshold, which every process has for itself; both still meet in every
    collective, and the shorter text waits for the longer one."""
    mesh = init_device_mesh("cpu", (2,))
    model, ids = routed("llama", rule="threshold"), tokens(2, 10)
    for layer in dg.hf.routed_layers(model):
        layer.depth_router.rule.average.add_(1e6 * world.rank)
    how = {"max_new_tokens": 3 + 2 * world.rank, "do_sample": False, "eos_token_id": None}
    with torch.no_grad(), plans_of(model) as plans:
        want, text = model(ids, use_cache=False).logits, model.generate(ids, **how)
        assert all(plan.chosen.any() == (world.rank == 0) for plan in plans[:2])
        parts = sharded(model, mesh)
        close(parts(ids, use_cache=False).logits, want)
    assert torch.equal(parts.generate(ids, **how, synced_gpus=True), text)


def test_a_process_without_a_routed_token_does_not_keep_the_other_waiting():
    spawn(2, _alone)
