"""Faults that hold for every layer: precision, determinism, strides, autograd modes, checkpointing, copies, threads.

The numbers are rows of the table in docs/reliability.md.
"""

import copy
import math
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import depthgate as dg
from depthgate.layers import Attention, Block, MoD, SwiGLU
from depthgate.routing import TopTokens
from tests.conftest import close
from tests.zoo import LAYERS, D, build, gradients, loss

every_layer = pytest.mark.parametrize("name", LAYERS)


# 19: low precision
@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_finite_and_near_fp32(name, dtype):
    layer = build(name)
    x = torch.randn(2, 12, D)
    with torch.autocast("cpu", dtype=dtype):
        y, plans = layer(x)
    exact, exact_plans = layer(x)
    loss(y, plans).backward()
    assert all(g.isfinite().all() and g.dtype is torch.float32 for g in gradients(layer).values())
    assert all(p.scores.dtype is torch.float32 for p in plans)
    assert exact.dtype is torch.float32
    assert torch.equal(plans[0].scores, exact_plans[0].scores)  # fp32 inside autocast, bit for bit
    close(y.float(), exact, dtype)


@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_keep_their_dtype(name, dtype):
    layer = build(name).to(dtype)
    x = torch.randn(2, 12, D).to(dtype)
    y, plans = layer(x)
    assert y.dtype is dtype
    assert y.isfinite().all()
    assert all(p.scores.dtype is torch.float32 for p in plans)
    loss(y, plans).backward()
    assert all(g.isfinite().all() for g in gradients(layer).values())


def test_fp16_overflow_is_skipped_by_the_scaler_and_the_next_step_is_clean():
    layer = build("mod")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    before = copy.deepcopy(layer.state_dict())
    steps_taken = 0
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            y, plans = layer(torch.randn(2, 12, D))
            total = loss(y, plans)
        scaler.scale(total * 1e4).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(p.isfinite().all() for p in layer.parameters())
        steps_taken += not all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert 0 < steps_taken < 30


# 22, 23: determinism, and independence of what memory held
@every_layer
def test_two_runs_are_bitwise_equal_even_in_poisoned_memory(name):
    x = torch.randn(2, 12, D)

    def run():
        layer = build(name)
        y, plans = layer(x)
        loss(y, plans).backward()
        return [y, *gradients(layer).values()]

    first, second = run(), run()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    try:
        third = run()
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


# 24: short, empty and single rows
@every_layer
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (1, 7), (0, 4), (2, 0)])
def test_small_shapes(name, shape):
    """Each row of a small batch equals the row alone, and empty gives empty. Experts that choose out of the whole batch
    look at other rows, unless they decide causally."""
    layer = build(name)
    x = torch.randn(*shape, D)
    y, plans = layer(x)
    assert y.shape == x.shape
    assert len(plans) >= 1
    how = {"causal": True} if name == "integrated mode" else {}
    y = layer(x, **how)[0]
    for b in range(shape[0]):
        close(y[b], layer(x[b : b + 1], **how)[0][0])


# 27: strides
@every_layer
def test_odd_strides_give_the_contiguous_result(name):
    layer = build(name)
    for x in (
        torch.randn(12, 2, D).transpose(0, 1),
        torch.randn(1, 12, D).expand(2, 12, D),
        torch.randn(3, 20, D + 5)[1:, 3:15, 2 : D + 2],
        torch.randn(2, 24, 2 * D)[:, ::2, ::2],
        torch.randn(2, D, 12).mT,
    ):
        close(layer(x)[0], layer(x.contiguous())[0])


# 28: autograd modes
@every_layer
def test_gradients_of_x_alone_and_of_parameters_alone(name):
    layer = build(name)
    x = torch.randn(2, 12, D, requires_grad=True)
    loss(*layer(x)).backward()
    both, grad_x = gradients(layer), x.grad
    layer = build(name)
    loss(*layer(x.detach())).backward()
    for n, g in gradients(layer).items():
        close(g, both[n])
    layer = build(name).requires_grad_(False)
    x.grad = None
    loss(*layer(x)).backward()
    close(x.grad, grad_x)


@every_layer
def test_no_grad_inference_mode_retain_graph_and_later_writes(name):
    layer = build(name)
    x = torch.randn(2, 12, D)
    y, plans = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x)[0], y)
    with torch.inference_mode():
        assert torch.equal(layer(x)[0], y)
    total = loss(y, plans)
    total.backward(retain_graph=True)
    first = {n: g.clone() for n, g in gradients(layer).items()}
    layer.zero_grad()
    total.backward()
    for n, g in gradients(layer).items():
        close(g, first[n])
    kept = y.detach().clone()
    x.fill_(7.0)  # the result owns its memory
    assert torch.equal(y, kept)


@pytest.mark.parametrize("name", ["moe experts", "moe tokens", "soft moe"])
def test_double_backward(name):
    layer = build(name).double()
    x = torch.randn(1, 4, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0].pow(2).sum(), (x,))


# 40: activation checkpointing, both ways
@every_layer
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_equal_gradients(name, reentrant):
    x = torch.randn(2, 12, D, requires_grad=True)
    plain = build(name)
    y, plans = plain(x)
    total = loss(y, plans) if not reentrant else y.pow(2).mean()
    total.backward()
    grad_x, x.grad = x.grad, None
    recomputed = build(name)
    before = {k: v.clone() for k, v in recomputed.named_buffers()}
    if reentrant:  # reentrant checkpoints hand back tensors alone, so plans stay inside
        checkpoint(lambda x: recomputed(x)[0], x, use_reentrant=True).pow(2).mean().backward()
    else:
        loss(*checkpoint(recomputed, x, use_reentrant=False)).backward()
    close(x.grad, grad_x)
    for n, g in gradients(plain).items():
        other = gradients(recomputed)[n]
        assert (g is None) == (other is None)
        if g is not None:
            close(other, g)
    assert all(torch.equal(v, before[k]) for k, v in recomputed.named_buffers())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_dropout_chooses_the_same_tokens_again(reentrant):
    """Dropout before the router changes its scores: the recomputation must draw, and choose, the same."""
    seen = []

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.mod = MoD(Block(D, Attention(D, 2), SwiGLU(D), dropout=0.5), TopTokens(D, 0.25))
            self.mod.router.register_forward_hook(lambda module, args, plan: seen.append(plan.tokens.clone()))

        def forward(self, x):
            return x + self.mod(self.drop(x))[0]

    torch.manual_seed(1)
    layer = Noisy()
    x = torch.randn(2, 16, D, requires_grad=True)
    torch.manual_seed(2)
    layer(x).pow(2).mean().backward()
    expected = x.grad.clone()
    x.grad = None
    torch.manual_seed(2)
    checkpoint(layer, x, use_reentrant=reentrant).pow(2).mean().backward()
    close(x.grad, expected)
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])


# 41: copies, pickles, state dicts, devices
@every_layer
def test_copies_pickles_state_dicts_and_meta(name):
    layer = build(name)
    x = torch.randn(2, 12, D)
    y = layer(x)[0]
    assert torch.equal(copy.deepcopy(layer)(x)[0], y)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], y)
    with torch.device("meta"):
        empty = LAYERS[name]()
    assert all(p.is_meta for p in empty.parameters())
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(empty(x)[0], y)
    assert layer.to(torch.float64)(x.double())[0].dtype is torch.float64


def test_state_dict_keeps_router_predictor_and_threshold():
    for rule in ("predictor", "threshold"):
        layer = dg.MixtureOfDepths(nn.Identity(), D, 0.5, rule=rule)
        x = torch.randn(2, 12, D)
        layer(x)
        other = dg.MixtureOfDepths(nn.Identity(), D, 0.5, rule=rule)
        other.load_state_dict(layer.state_dict(), strict=True)
        (_, (ours,)), (_, (theirs,)) = (each.eval()(x, return_plans=True) for each in (layer, other))
        assert torch.equal(ours.decision, theirs.decision)
        assert any("router" in k and "rule" in k for k in layer.state_dict())


def test_a_shared_block_is_one_block():
    """Weight tying: two routed layers around one block share its gradients."""
    inner = nn.Linear(D, D)
    a, b = dg.MixtureOfDepths(inner, D, 0.5), dg.MixtureOfDepths(inner, D, 0.5)
    both = nn.ModuleList([a, b])
    assert len(list(both.parameters())) == 2 + 2 * 2
    x = torch.randn(2, 8, D)
    b(a(x)).sum().backward()
    assert inner.weight.grad.abs().sum() > 0


# 42: every parameter has a gradient, so DDP does not wait for one
@every_layer
def test_every_parameter_gets_a_gradient(name):
    layer = build(name)
    loss(*layer(torch.randn(2, 12, D))).backward()
    assert [n for n, g in gradients(layer).items() if g is None] == []


# 43: threads
@every_layer
def test_threads_share_a_module_without_harm(name):
    layer = build(name).eval()
    inputs = [torch.randn(2, 5 + i, D) for i in range(8)]
    with torch.no_grad():
        expected = [layer(x)[0] for x in inputs]
    got: dict[tuple[int, int], bool] = {}

    def work(thread):
        with torch.no_grad():
            for round_ in range(20):
                i = (thread + round_) % 8
                got[thread, round_] = torch.equal(layer(inputs[i])[0], expected[i])

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 80
    assert all(got.values())


def test_a_nan_token_that_is_not_chosen_stays_alone():
    layer = dg.MixtureOfDepths(nn.Linear(D, D), D, 0.5)
    x = torch.randn(2, 8, D)
    x[0, 3] = math.nan
    y, (plan,) = layer(x, return_plans=True)
    assert not plan.chosen[0, 3]
    finite = y.isfinite().all(-1)
    assert finite.sum() == 15
    assert not finite[0, 3]
