"""On CUDA: the same tokens and the same answers as on CPU, eager and compiled. Skipped, with a reason, without one."""

import pytest
import torch

from depthgate.ops.select import top_k, top_of_documents
from tests.conftest import close
from tests.zoo import LAYERS, D, build, gradients, loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def test_tied_bf16_scores_choose_the_same_tokens_on_cpu_cuda_and_compiled():
    scores = torch.randn(64, 1, 2048).bfloat16().float()
    valid = torch.rand(64, 2048) > 0.2
    doc = torch.randint(0, 5, (64, 2048)).sort(-1).values
    on = scores.cuda(), valid.cuda(), doc.cuda()
    expected = top_k(scores, 256)
    assert torch.equal(top_k(on[0], 256).cpu(), expected)
    assert torch.equal(torch.compile(top_k, fullgraph=True)(on[0], 256).cpu(), expected)
    expected = top_of_documents(scores, valid, doc, 0.125)
    assert torch.equal(top_of_documents(*on, 0.125).cpu(), expected)
    compiled = torch.compile(top_of_documents, fullgraph=True)
    assert torch.equal(compiled(*on, 0.125).cpu(), expected)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_equal_the_cpu(name, compiled):
    x = torch.randn(2, 12, D)
    here, there = build(name), build(name).cuda()
    y, plans = here(x)
    loss(y, plans).backward()
    run = torch.compile(there, fullgraph=True) if compiled else there
    z, cuda_plans = run(x.cuda())
    loss(z, cuda_plans).backward()
    close(z.cpu(), y)
    for n, g in gradients(here).items():
        close(gradients(there)[n].cpu(), g)


@pytest.mark.parametrize("name", LAYERS)
def test_bf16_layers_are_finite_and_repeat_bitwise(name):
    x = torch.randn(2, 64, D, device="cuda", dtype=torch.bfloat16)

    def once():
        layer = build(name).to("cuda", torch.bfloat16)
        y, plans = layer(x)
        loss(y, plans).backward()
        return [y, *gradients(layer).values()]

    # A token that several experts take is summed by atomics, in any order, unless torch is asked to keep one.
    torch.use_deterministic_algorithms(name == "moe experts")
    try:
        first, second = once(), once()
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, second, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_a_training_step_waits_for_nothing(name):
    """No host sync in the top-k pass and its backward: torch raises on any. (Grouped products in fp32 do wait.)"""
    layer = build(name).to("cuda", torch.bfloat16)
    x = torch.randn(2, 12, D, device="cuda", dtype=torch.bfloat16)
    loss(*layer(x)).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(*layer(x)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
