"""Causal passes that are compiled: no slots for tokens that skip, no waiting for the device, and never a token lost."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from torch._dynamo.utils import counters

import depthgate as dg
from depthgate.hf.families import decoder_layers
from depthgate.hf.layer import BOUND_STEPS
from tests.conftest import close
from tests.hf.zoo import plans_of, routed, tokens


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()


def short(model):
    """A routed layer and a dense one."""
    del decoder_layers(model)[2:]
    model.config.num_hidden_layers = 2
    return model


def slots(model, call):
    """What a call gives, and how many slots the routed layers had, by the graphs that were made for it."""
    with plans_of(model) as plans:
        out = call()
    return out, [plan.tokens.shape[-1] for plan in plans]


@torch.no_grad()
def test_a_compiled_pass_has_slots_for_a_share_of_the_tokens_and_two_graphs():
    """The decoder is one graph, the head another; in between the slots are looked at."""
    model, ids = short(routed("llama", rule="threshold", capacity=0.5)), tokens(2, 120)
    want = model(ids, use_cache=False).logits
    call = torch.compile(model, backend="aot_eager", dynamic=False)
    for _ in range(2):
        close(call(ids, use_cache=False).logits, want)
    assert counters["stats"]["unique_graphs"] in (1, 2)  # torch 2.11 leaves the head alone
    got, found = slots(model, lambda: call(ids).logits)  # with the cache that transformers makes
    close(got, want)
    assert found == [120 * 33 // BOUND_STEPS + 16]


@torch.no_grad()
def test_a_pass_that_lacks_slots_is_computed_again_and_bounds_grow():
    model, ids = routed("llama", capacity=0.01), tokens(2, 120)
    want = model(ids, use_cache=False).logits
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", dynamic=False)
    routers = [layer.depth_router for layer in dg.hf.routed_layers(model)]
    assert [router.bound for router in routers] == [0, 0]
    close(model(ids, use_cache=False).logits, want)
    bounds = [router.bound for router in routers]
    assert all(8 < bound < BOUND_STEPS for bound in bounds)
    close(model(ids, use_cache=False).logits, want)
    assert [router.bound for router in routers] == bounds  # and this one had enough


@torch.no_grad()
def test_one_graph_has_a_slot_for_every_token():
    """fullgraph=True refuses to look at slots afterwards."""
    model, ids = short(routed("llama")), tokens(2, 40)
    want = model(ids, use_cache=False).logits
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(call(ids, use_cache=False).logits, want)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_an_exported_model_says_what_the_model_says_of_any_text(strict):
    model, ids = short(routed("llama")), tokens(4, 20)
    exported = torch.export.export(model, (ids[:2],), {"use_cache": False}, strict=strict).module()
    for some in (ids[:2], ids[2:]):  # of which others enter
        close(exported(some, use_cache=False).logits, model(some, use_cache=False).logits)


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_an_exported_model_reads_batches_of_other_shapes(strict):
    model, ids = short(routed("llama")), tokens(3, 20)
    sides = {0: torch.export.Dim("rows", min=2, max=8), 1: torch.export.Dim("length", min=2, max=64)}
    how = {"dynamic_shapes": {"input_ids": sides, "use_cache": None}, "strict": strict}
    exported = torch.export.export(model, (ids,), {"use_cache": False}, **how).module()
    for some in (ids[:2, :7], tokens(5, 33)):
        close(exported(some, use_cache=False).logits, model(some, use_cache=False).logits)
