"""Experts that choose out of the whole batch (integrated MoDE): against loops, laws, and its causal form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import depthgate as dg
from depthgate.layers import MoE
from depthgate.routing import Slots, Threshold
from tests.conftest import close
from tests.layers.test_moe import D, expert


def pooled(experts=4, **options):
    options = {"top_k": 1, "choice": "experts", "pool": "batch", "gate": "sigmoid", **options}
    return MoE(D, experts, hidden=8, **options)


def by_experts(layer, x, valid, taken):
    """Every expert on its own: it adds sigmoid(score) * its result to each of the tokens (expert -> (b, t))."""
    out = torch.zeros_like(x)
    for e, tokens in enumerate(taken):
        for b, t in tokens:
            assert valid[b, t]
            score = layer.router.proj(x[b : b + 1, t : t + 1])[0, 0, e]
            out[b, t] += score.sigmoid() * expert(layer.experts, e, x[b, t])
    return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("experts", [3, 7])
def test_the_pool_equals_the_loop(experts, padded):
    """Each expert takes the k best of all real tokens of the batch, whichever rows they stand in."""
    layer = pooled(experts, top_k=2).double()
    x = torch.randn(3, 8, D, dtype=torch.float64)
    valid = torch.ones(3, 8, dtype=torch.bool)
    if padded:
        valid[0, 5:] = valid[2, :3] = False
    y, (plan,) = layer(x, mask=valid if padded else None)
    k = int(valid.sum() * 2 / experts)
    scores = layer.router.proj(x)
    tokens = valid.nonzero().tolist()
    taken = [sorted(tokens, key=lambda bt, e=e: -scores[bt[0], bt[1], e])[:k] for e in range(experts)]
    close(y, by_experts(layer, x, valid, taken))
    assert plan.chosen.sum((0, 1)).tolist() == [k] * experts
    assert not plan.chosen[~valid].any()


def test_of_one_sequence_both_pools_are_the_same():
    layer = pooled()
    x = torch.randn(1, 16, D)
    layer.router.pool = "sequence"
    expected = layer(x)[0]
    layer.router.pool = "batch"
    close(layer(x)[0], expected)


@settings(max_examples=30)
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 6),
    st.sampled_from(["batch", "sequence"]),
    st.integers(0, 2**16),
)
def test_the_causal_form_equals_the_top_k_whose_thresholds_it_has(B, T, experts, pool, seed):
    """With the k-th best scores of the same tokens as thresholds, the rule takes what the top k of the batch takes."""
    torch.manual_seed(seed)
    layer = pooled(experts, capacity=0.4, rule=Threshold(experts, decay=0.0))
    x = torch.randn(B, T, D)
    y, (plan,) = layer(x)
    layer.router.update(plan)
    layer.router.pool = pool  # which has no say in a causal choice
    causal, (found,) = layer(x, causal=True)
    assert found.chosen.equal(plan.chosen)
    close(causal, y)


def test_no_later_token_changes_a_causal_result():
    layer = pooled()
    x = torch.randn(2, 32, D)
    layer.router.update(layer(x)[1][0])
    y, _ = layer(x, causal=True)
    changed = x.clone()
    changed[:, 20:] += 1
    assert layer(changed, causal=True)[0][:, :20].equal(y[:, :20])
    token_by_token = torch.cat([layer(x[:, t : t + 1], causal=True)[0] for t in range(32)], 1)
    close(token_by_token, y)


def test_a_capacity_of_one_is_the_dense_sum_of_experts():
    layer = pooled(3, capacity=1.0).double()
    x = torch.randn(2, 6, D, dtype=torch.float64)
    every = [[(b, t) for b in range(2) for t in range(6)]] * 3
    expected = by_experts(layer, x, torch.ones(2, 6, dtype=torch.bool), every)
    close(layer(x)[0], expected)
    close(layer(x, causal=True)[0], expected)  # thresholds that have learnt nothing let every token in


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_dispatch_and_combine(causal):
    """In float64 against finite differences, for a pool with padding, empty slots and tokens of several experts."""
    tokens = torch.tensor([[[0, 3, 7], [3, 4, 5], [1, 2, 6]]])
    filled = torch.tensor([[[True, True, True], [True, True, False], [True, False, False]]])
    gates = torch.where(filled, torch.rand(1, 3, 3, dtype=torch.float64), 0.0).requires_grad_()
    scores = torch.zeros(2, 4, 3, dtype=torch.float64)
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)

    def there_and_back(x, gates):
        plan = Slots(tokens, gates, scores, scores, filled, causal=causal)
        if causal:
            return plan.combine_sorted(plan.sorted_by_expert(x)[0].sin())
        return plan.combine(plan.dispatch(x, fill=0).sin())

    assert torch.autograd.gradcheck(there_and_back, (x, gates))
    plan = Slots(tokens, gates, scores, scores, filled)
    rows, ends = plan.sorted_by_expert(x)
    assert ends.tolist() == [3, 5, 6]
    close(rows, x.flatten(0, 1)[[0, 3, 7, 3, 4, 1]])
    close(plan.combine_sorted(rows), plan.combine(plan.dispatch(x)))


def test_all_gradients_are_there_and_equal_to_the_loops():
    layer = pooled(3, top_k=1).double()
    x = torch.randn(2, 6, D, dtype=torch.float64, requires_grad=True)
    y, (plan,) = layer(x)
    taken = [[divmod(i, 6) for i in plan.tokens[0, e].tolist()] for e in range(3)]
    expected = by_experts(layer, x, torch.ones(2, 6, dtype=torch.bool), taken)
    seed = torch.randn_like(y)
    wanted = [x, *layer.parameters()]
    for a, b in zip(torch.autograd.grad(y, wanted, seed), torch.autograd.grad(expected, wanted, seed), strict=True):
        close(a, b)


def test_a_pool_smaller_than_its_experts():
    """Every expert takes one token at least, also out of a pool of one token."""
    layer = pooled(8)
    _, (plan,) = layer(torch.randn(1, 1, D))
    assert plan.chosen.all()
    _, (plan,) = layer(torch.randn(1, 3, D))
    assert plan.chosen.sum((0, 1)).tolist() == [1] * 8
    y, _ = layer(torch.randn(2, 0, D))
    assert y.shape == (2, 0, D)


def test_padding_alone_is_computed_by_none():
    layer = pooled()
    mask = torch.zeros(2, 5, dtype=torch.bool)
    x = torch.full((2, 5, D), torch.nan)
    for causal in (False, True):
        y, (plan,) = layer(x, mask=mask, causal=causal)
        assert (y == 0).all()
        assert not plan.chosen.any()


def test_the_drop_in_layer_pools_too():
    options = {"top_k": 1, "choice": "experts", "pool": "batch", "gate": "sigmoid", "hidden": 8, "shared_experts": 1}
    layer, same = dg.MixtureOfExperts(D, 4, **options), MoE(D, 4, **options)
    same.load_state_dict(layer.state_dict())
    x = torch.randn(2, 16, D)
    y, plans = layer(x, return_plans=True)
    close(y, same(x)[0])
    assert plans[0].tokens.shape == (1, 4, 8)  # of 32 tokens in one pool, a quarter each
    assert (layer.router.rule.weight > 0).all()  # training moved its thresholds
    layer.eval()
    same.load_state_dict(layer.state_dict())
    close(layer(x, causal=True), same(x, causal=True)[0])


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 999))
def test_thresholds_move_as_by_sorting_the_batch(B, T, experts, padded, softmax, seed):
    torch.manual_seed(seed)
    layer = pooled(experts, capacity=0.4, gate="softmax" if softmax else "sigmoid")
    sorted_one = Threshold(experts)
    x, pos = torch.randn(B, T, D), torch.arange(T).expand(B, T).clone()
    if padded:
        pos[torch.rand(B, T) < 0.4] = -1
    for unless in (None, torch.tensor(False), torch.tensor(True)):
        plan = layer.router(x, pos)
        layer.router.update(plan, unless)
        sorted_one.update(layer.router._ranked(plan.scores.detach()), plan.valid, 0.4, unless)
        assert torch.equal(layer.router.rule.average, sorted_one.average)
        assert torch.equal(layer.router.rule.weight, sorted_one.weight)
