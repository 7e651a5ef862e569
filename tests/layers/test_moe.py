"""MoE by token choice and expert choice, integrated MoDE, Soft MoE: against loops over tokens and experts."""

import pytest
import torch
import torch.nn.functional as F

from depthgate.layers import Experts, MoE, SoftMoE
from depthgate.routing import TopExperts
from tests.conftest import close

D = 16


def expert(experts, e, x):
    """One expert, by its equation."""
    h = x @ experts.up[e]
    if experts.up_bias is not None:
        h = h + experts.up_bias[e]
    if experts.activation == "swiglu":
        gate, up = h.chunk(2, -1)
        h = F.silu(gate) * up
    else:
        h = F.gelu(h)
    y = h @ experts.down[e]
    return y if experts.down_bias is None else y + experts.down_bias[e]


def by_tokens(layer, x, valid):
    """Every token on its own: its best experts, the softmax of those that are real, the weighted sum."""
    router = layer.router
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            if not valid[b, t]:
                continue
            logits = router.proj.weight @ x[b, t]
            best = logits.sort(descending=True, stable=True).indices[: router.top_k]
            real = [e for e in best.tolist() if e < router.num_experts]
            gates = logits[real].softmax(0) if router.top_k > 1 else logits.softmax(0)[real]
            if router.gate == "sigmoid":
                gates = logits[real].sigmoid()
            for g, e in zip(gates, real, strict=True):
                out[b, t] += g * expert(layer.experts, e, x[b, t])
    return out


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("null", [0, 3])
@pytest.mark.parametrize(
    ("dtype", "gate"), [(torch.float32, "softmax"), (torch.float64, "softmax"), (torch.float64, "sigmoid")]
)
def test_token_choice_equals_the_loop(top_k, null, dtype, gate):
    layer = MoE(D, 4, top_k=top_k, null_experts=null, gate=gate).to(dtype)
    x = torch.randn(2, 9, D, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 5:] = False
    y, (plan,) = layer(x, mask=mask)
    expected = by_tokens(layer, x, mask)
    close(y, expected)
    assert (y[~mask] == 0).all()
    assert (plan.choice >= 4).any() == (null > 0)
    params = [x, *layer.parameters()]
    seed = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, params, seed), torch.autograd.grad(expected, params, seed), strict=True):
        close(a, b)


def test_a_null_expert_adds_exactly_nothing():
    layer = MoE(D, 2, top_k=1, null_experts=1)
    with torch.no_grad():
        layer.router.proj.weight.zero_()
        layer.router.proj.weight[2, 0] = 1.0
    x = torch.randn(2, 6, D)
    x[..., 0] = x[..., 0].abs() + 1
    y, (plan,) = layer(x)
    assert (plan.choice == 2).all()
    assert torch.equal(y, torch.zeros_like(x))
    assert torch.equal(x + y, x)
    y.sum().backward()
    assert layer.experts.up.grad.abs().sum() == 0  # and it is not None: nothing hangs in DDP


def test_unused_and_overfull_experts():
    """One expert gets every token and the others none: dropless, and zero gradients for the idle."""
    layer = MoE(D, 3, top_k=1)
    with torch.no_grad():
        layer.router.proj.weight.zero_()
        layer.router.proj.weight[1, 0] = 1.0
    x = torch.randn(2, 50, D)
    x[..., 0] = x[..., 0].abs() + 1
    y, (plan,) = layer(x)
    assert plan.ends.tolist() == [0, 100, 100]
    close(y, by_tokens(layer, x, torch.ones(2, 50, dtype=torch.bool)))
    y.sum().backward()
    assert layer.experts.up.grad[0].abs().sum() == 0
    assert layer.experts.up.grad[2].abs().sum() == 0
    assert layer.experts.up.grad[1].abs().sum() > 0


@pytest.mark.parametrize("null", [0, 2])
def test_expert_choice_equals_the_loop(null):
    layer = MoE(D, 4, top_k=2, choice="experts", null_experts=null).double()
    x = torch.randn(2, 10, D, dtype=torch.float64)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 7:] = False
    y, _ = layer(x, mask=mask)
    expected = torch.zeros_like(x)
    for b in range(2):
        n = int(mask[b].sum())
        probs = (x[b, :n] @ layer.router.proj.weight.T).softmax(-1)
        for e in range(4):
            for t in probs[:, e].topk(n // 2).indices.tolist():
                expected[b, t] += probs[t, e] * expert(layer.experts, e, x[b, t])
    close(y, expected)


def test_expert_choice_in_causal_mode_uses_its_threshold():
    layer = MoE(D, 4, choice="experts")
    x = torch.randn(2, 32, D)
    layer.router.update(layer(x)[1][0])
    y, (plan,) = layer(x, causal=True)
    changed = x.clone()
    changed[:, 20:] += 1
    close(layer(changed, causal=True)[0][:, :20], y[:, :20])
    assert 0.3 < plan.chosen.float().mean() < 0.7


def test_the_shared_expert_is_always_on():
    layer = MoE(D, 2, top_k=1, null_experts=1, shared_experts=2)
    x = torch.randn(2, 5, D)
    with_shared, _ = layer(x)
    shared, layer.shared = layer.shared, None
    close(with_shared, layer(x)[0] + shared(x)[0])
    assert shared.hidden == 2 * layer.experts.hidden
    layer.shared = shared
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    x[~mask] = torch.nan
    y, _ = layer(x, mask=mask)
    assert (y[~mask] == 0).all()
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_rows_of_a_moe_are_independent():
    x = torch.randn(3, 8, D)
    for layer in (MoE(D, 4), MoE(D, 4, choice="experts"), SoftMoE(D, 4)):
        together = layer(x)[0]
        for b in range(3):
            close(layer(x[b : b + 1])[0], together[b : b + 1])


def test_token_choice_is_causal_and_permutation_equivariant():
    layer = MoE(D, 4, null_experts=1)
    x = torch.randn(2, 8, D)
    y = layer(x)[0]
    close(torch.cat([layer(x[:, t : t + 1])[0] for t in range(8)], 1), y)
    order = torch.randperm(8)
    close(layer(x[:, order])[0], y[:, order])


# Soft MoE


@pytest.mark.parametrize(("experts", "slots"), [(1, 1), (3, 1), (5, 2), (4, 3)])
def test_soft_moe_equals_the_paper_written_out(experts, slots):
    layer = SoftMoE(D, experts, slots)
    x = torch.randn(2, 7, D)
    y, _ = layer(x)
    phi = layer.router.scale * layer.router.phi / layer.router.phi.norm(dim=0, keepdim=True)
    expected = torch.zeros_like(x)
    for b in range(2):
        logits = (x[b] / x[b].norm(dim=-1, keepdim=True)) @ phi
        inputs = logits.softmax(0).T @ x[b]
        outputs = torch.stack([expert(layer.experts, s // slots, inputs[s]) for s in range(experts * slots)])
        expected[b] = logits.softmax(1) @ outputs
    close(y, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_soft_moe_padding_changes_nothing(side):
    layer = SoftMoE(D, 4, 2)
    x = torch.randn(3, 8, D)
    lengths = [8, 5, 0]
    t = torch.arange(8)
    mask = torch.stack([(t >= 8 - n) if side == "left" else (t < n) for n in lengths])
    x[~mask] = torch.nan
    x.requires_grad_()
    y, _ = layer(x, mask=mask)
    assert (y[~mask] == 0).all()
    for b, n in enumerate(lengths[:2]):
        alone, _ = layer(x[b : b + 1, mask[b]])
        close(y[b, mask[b]], alone[0])
        assert n == mask[b].sum()
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert (x.grad[~mask] == 0).all()


def test_soft_moe_is_equivariant_over_tokens_and_mixes_them():
    layer = SoftMoE(D, 4)
    x = torch.randn(2, 8, D)
    order = torch.randperm(8)
    y = layer(x)[0]
    close(layer(x[:, order])[0], y[:, order])
    changed = x.clone()
    changed[:, -1] += 1
    assert not torch.allclose(layer(changed)[0][:, 0], y[:, 0])


def test_at_birth_soft_routing_is_soft():
    """Logits of at most one, so no token owns a slot: the nearest peer starts almost hard."""
    _, (plan,) = SoftMoE(256, 16)(torch.randn(2, 64, 256))
    assert plan.into.max() < 0.05


def test_both_forms_of_experts_agree():
    for kwargs in ({}, {"activation": "gelu", "bias": True}):
        experts = Experts(3, D, 24, **kwargs)
        rows = torch.randn(2, 3, 4, D)
        batched = experts(rows)
        flat = rows.transpose(0, 1).reshape(24, D)
        grouped = experts.grouped(flat, torch.tensor([8, 16, 24], dtype=torch.int32))
        close(grouped.reshape(3, 2, 4, D).transpose(0, 1), batched)


def test_the_router_of_token_choice_breaks_ties_by_expert():
    router = TopExperts(D, 4, 2)
    torch.nn.init.zeros_(router.proj.weight)
    plan = router(torch.randn(1, 3, D))
    assert plan.choice.tolist() == [[[0, 1]] * 3]


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_in_empty_out(shape):
    x = torch.randn(*shape, D)
    for layer in (MoE(D, 4), MoE(D, 4, choice="experts"), SoftMoE(D, 4)):
        y, plans = layer(x)
        assert y.shape == x.shape
        assert len(plans) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("choice", "null", "gate", "shared"),
    [
        ("tokens", 0, "softmax", 0),
        ("tokens", 2, "sigmoid", 1),
        ("experts", 0, "sigmoid", 1),
        ("experts", 1, "softmax", 0),
    ],
)
@torch.no_grad()
def test_shapes_that_do_not_depend_on_the_choice_give_the_same(choice, null, gate, shared, dtype):
    torch.manual_seed(0)
    layer = MoE(D, 4, 2, choice, null, shared_experts=shared, gate=gate, hidden=8).to(dtype)
    torch.nn.init.normal_(layer.router.proj.weight)
    if choice == "experts":
        layer.router.rule.average.fill_(-1.4 if gate == "softmax" else 0.0)
        layer.router.rule.weight.fill_(1.0)
    x = torch.randn(7, D, dtype=dtype)
    update, (plan,) = layer(x[:, None], plain=True, causal=True)
    counts = (plan.chosen if choice == "experts" else plan.computed).sum(-1)
    assert (choice == "tokens" and not null) or len(counts.unique()) > 1  # the test is about choices that differ
    close(layer.each_alone(x), update[:, 0], dtype)
