"""Causal rules, losses and metrics: hand-worked numbers, and what each may and may not train."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import depthgate as dg
from depthgate.routing import (
    Groups,
    Slots,
    SoftSlots,
    Threshold,
    TopExperts,
    TopTokens,
    agreement,
    causal_bce,
    load_balance,
    predictor_accuracy,
    routed_share,
    update_thresholds,
    z_loss,
)
from tests.conftest import close


def hand_plan(valid=None):
    """One row, four tokens, tokens 1 and 3 in the top two; the causal rule picks 0 and 1."""
    scores = torch.tensor([[[0.5], [2.0], [-1.0], [1.0]]])
    decision = torch.tensor([[[1.0], [3.0], [-2.0], [-0.5]]])
    return Slots(torch.tensor([[[1, 3]]]), torch.ones(1, 1, 2), scores, decision, None, valid)


def bce(logit, target):
    p = 1 / (1 + math.exp(-logit))
    return -math.log(p) if target else -math.log(1 - p)


def test_bce_by_hand():
    expected = (bce(1.0, 0) + bce(3.0, 1) + bce(-2.0, 0) + bce(-0.5, 1)) / 4
    assert causal_bce(hand_plan()).item() == pytest.approx(expected)
    assert causal_bce(hand_plan()).item() == pytest.approx(expected)
    some = hand_plan(torch.tensor([[True, True, False, True]]))
    assert causal_bce(some).item() == pytest.approx((bce(1.0, 0) + bce(3.0, 1) + bce(-0.5, 1)) / 3)


def test_losses_and_metrics_refuse_plans_they_cannot_speak_of():
    slots = TopTokens(8, 0.5)(torch.randn(1, 4, 8))
    causal = TopTokens(8, 0.5)(torch.randn(1, 4, 8), causal=True)
    groups = TopExperts(8, 2)(torch.randn(1, 4, 8))
    soft = SoftSlots(8, 2)(torch.randn(1, 4, 8))
    threshold = TopTokens(8, 0.5, rule="threshold")(torch.randn(1, 4, 8))
    for function, plan in (
        (causal_bce, causal),
        (causal_bce, groups),
        (causal_bce, threshold),
        (agreement, causal),
        (predictor_accuracy, soft),
        (load_balance, slots),
        (z_loss, soft),
    ):
        with pytest.raises(dg.DepthgateError, match=r"got a|threshold"):
            function(plan)


def test_metrics_by_hand():
    plan = hand_plan()
    assert routed_share(plan).item() == 0.5
    assert predictor_accuracy(plan).item() == 0.5  # right on tokens 1 and 2
    assert agreement(plan).item() == pytest.approx(1 / 3)  # both: {1}; either: {0, 1, 3}
    some = hand_plan(torch.tensor([[False, True, True, True]]))
    assert predictor_accuracy(some).item() == pytest.approx(2 / 3)
    assert agreement(some).item() == pytest.approx(1 / 2)


def test_aux_positives_per_row_are_k():
    """The BCE's target has exactly k positives in every row, in every expert's column."""
    plan = TopTokens(8, 0.25, experts=3)(torch.randn(5, 16, 8))
    assert (plan.chosen.sum(1) == 4).all()


def test_load_balance_by_hand():
    scores = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]]]))
    choice = torch.tensor([[[0, 1], [0, 1]]])
    plan = Groups(torch.zeros(4), torch.zeros(3).int(), choice, torch.ones(1, 2, 2), choice, scores)
    share, prob = [0.5, 0.5, 0.0], [0.35, 0.425, 0.225]
    assert load_balance(plan).item() == pytest.approx(3 * sum(s * p for s, p in zip(share, prob, strict=True)))


def test_load_balance_is_one_when_balanced_and_counts_valid_tokens_only():
    router = TopExperts(4, 4, 1)
    with torch.no_grad():
        router.proj.weight.copy_(1e-4 * torch.eye(4))
    x = torch.eye(4).repeat(1, 3, 1)
    assert load_balance(router(x)).item() == pytest.approx(1.0, abs=1e-3)
    padded = torch.cat([x, torch.eye(4)[:1].repeat(1, 4, 1)], 1)
    pos = torch.cat([torch.arange(12), torch.full((4,), -1)])[None]
    close(load_balance(router(padded, pos)), load_balance(router(x)))


def test_z_loss_by_hand():
    plan = hand_plan()
    assert z_loss(plan).item() == pytest.approx((0.25 + 4 + 1 + 1) / 4)
    groups = TopExperts(4, 3)(torch.randn(2, 5, 4))
    close(z_loss(groups), groups.scores.exp().sum(-1).log().square().mean())


def test_losses_of_rows_without_valid_tokens_are_zero():
    x, pos = torch.randn(2, 4, 8), torch.full((2, 4), -1)
    for loss in (causal_bce, z_loss):
        assert loss(TopTokens(8, 0.5)(x, pos)).item() == 0
    assert load_balance(TopExperts(8, 2)(x, pos)).item() == 0


def test_nan_in_padding_reaches_no_gradient():
    x = torch.randn(2, 6, 8)
    x[1, 3:] = torch.nan
    pos = torch.arange(6).repeat(2, 1)
    pos[1, 3:] = -1
    for rule in ("scores", "predictor"):
        router = TopTokens(8, 0.5, rule=rule)
        plan = router(x, pos)
        (causal_bce(plan) + plan.gates.sum()).backward()
        assert all(p.grad.isfinite().all() for p in router.parameters())


def test_the_predictor_trains_itself_alone_and_scores_train_the_router():
    router = TopTokens(8, 0.25, rule="predictor")
    x = torch.randn(2, 16, 8, requires_grad=True)
    causal_bce(router(x)).backward()
    assert x.grad is None or x.grad.abs().sum() == 0
    assert router.proj.weight.grad is None
    assert all(p.grad.abs().sum() > 0 for p in router.rule.parameters())
    router = TopTokens(8, 0.25, rule="scores")
    causal_bce(router(x)).backward()
    assert x.grad.abs().sum() > 0
    assert router.proj.weight.grad.abs().sum() > 0
    assert router.proj.bias.grad.abs().sum() > 0


@pytest.mark.parametrize("rule", ["scores", "predictor"])
@pytest.mark.parametrize("capacity", [0.125, 0.25])
def test_training_a_rule_makes_it_agree_with_the_top_k(rule, capacity):
    """The loss teaches each rule to tell the router's top k from one token alone, on tokens of zero mean."""
    router = TopTokens(8, capacity, rule=rule)
    optimizer = torch.optim.Adam(router.parameters(), lr=0.03)
    x = torch.randn(16, 128, 8)
    before = agreement(router(x))
    for _ in range(400):
        optimizer.zero_grad()
        causal_bce(router(x)).backward()
        optimizer.step()
    assert before < 0.6
    assert predictor_accuracy(router(x)) > 0.95
    assert agreement(router(x)) > 0.75
    assert abs(routed_share(router(x, causal=True)).item() - capacity) < 0.15 * capacity


def test_z_loss_reaches_the_router_of_expert_choice():
    router = TopTokens(8, 0.5, experts=4, gate=torch.exp, rule="threshold", across_experts=True)
    plan = router(torch.randn(2, 6, 8))
    close(z_loss(plan), (plan.scores.exp().sum(-1).log() ** 2).mean())
    assert z_loss(plan) > 1e-4
    z_loss(plan).backward()
    assert router.proj.weight.grad.abs().sum() > 0


def test_a_threshold_without_an_update_routes_everything():
    for layer in (
        dg.MixtureOfDepths(nn.Identity(), 8, 0.25, rule="threshold"),
        dg.MixtureOfExperts(8, 4, choice="experts"),
    ):
        _, (plan,) = layer(torch.randn(2, 6, 8), causal=True, return_plans=True)
        assert plan.chosen.all()


def test_threshold_after_one_update_is_the_kth_best_of_the_batch():
    router = TopTokens(8, 0.25, rule="threshold")
    x = torch.randn(3, 16, 8)
    router.update(router(x))
    plan = router(x)
    kth = plan.scores.flatten().sort(descending=True).values[12 - 1]
    close(router.rule.threshold, kth[None])
    assert router(x, causal=True).chosen.sum() == 12


@pytest.mark.parametrize("experts", [1, 3])
def test_the_threshold_lets_through_what_short_documents_took(experts):
    """Documents of 5 tokens get one each, 20% where the capacity is 12.5%; what they get with padding and kept ones."""
    options = {"experts": experts, "rule": "threshold", "across_experts": experts > 1}
    x, doc, pos = torch.randn(4, 40, 8), torch.arange(40).expand(4, 40) // 5, torch.arange(40).repeat(4, 1)
    pos[1:, 30:] = -1
    keep = torch.rand(4, 40) < 0.05
    for kept in ({}, {"keep": keep}):
        router = TopTokens(8, 0.125, **options)
        plan = router(x, pos, doc=doc, **kept)
        assert (plan.chosen.sum((0, 1)) == 8 + 3 * 6).all()
        router.update(plan)
        causal = router(x, pos, causal=True, doc=doc, **kept).chosen
        kept_too = (keep & (pos >= 0))[..., None] & ~plan.chosen if kept else torch.zeros_like(causal)
        assert torch.equal(causal.sum((0, 1)), (plan.chosen | kept_too).sum((0, 1)))


def test_where_shares_are_exact_the_threshold_is_that_of_the_capacity():
    """Long documents: k of all tokens of the batch is the sum of the k of each sequence, also with padding."""
    x, pos = torch.randn(3, 64, 8), torch.arange(64).repeat(3, 1)
    pos[1, 32:] = -1
    for places in (None, pos):
        router, valid = TopTokens(8, 0.125, rule="threshold"), None if places is None else places >= 0
        plan, alone = router(x, places), Threshold()
        for _ in range(3):
            router.update(plan)
            alone.update(plan.scores, valid, 0.125)
        assert torch.equal(router.rule.average, alone.average)
        assert torch.equal(router.rule.weight, alone.weight)


def test_kept_tokens_take_their_places_before_the_threshold():
    """Of 8 tokens 4 are routed, 2 of them kept: the threshold lets the best 2 of the others through, as the top k does,
    and the best one where kept tokens take every place."""
    scores = torch.tensor([-3.0, -4.0, 1.0, 5.0, 2.0, 4.0, 3.0, 0.0])
    for kept, threshold in (([0, 1], 4.0), ([0, 3], 3.0), ([0, 1, 2], 5.0), ([0, 1, 2, 7], 5.0)):
        router = TopTokens(1, 0.5, rule="threshold")
        nn.init.ones_(router.proj.weight)
        keep = torch.zeros(1, 8, dtype=torch.bool)
        keep[:, kept] = True
        router.update(router(scores[None, :, None], keep=keep))
        assert router.rule.threshold.item() == pytest.approx(threshold)
        plan = router(scores[None, :, None], keep=keep)
        assert len(kept) == 4 or agreement(plan) == predictor_accuracy(plan) == 1


def test_threshold_is_a_moving_average_of_the_newest_scores():
    """The first update is taken whole, the n-th after it by 12/(12 + n) of the way, or by 1 - decay if that is more."""
    rule, wanted = Threshold(decay=0.9), 1.0
    for n, v in enumerate([1.0, 2.0, 4.0, *range(200)]):
        rule.update(torch.full((1, 4, 1), float(v)), None, 0.5)
        wanted += max(0.1, 12 / (12 + n)) * (v - wanted)
        assert rule.threshold.item() == pytest.approx(wanted, rel=3e-5, abs=3e-5)
    assert wanted == pytest.approx(199 - 0.9 / 0.1, rel=1e-3)  # a line is followed by decay / (1 - decay) behind


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.99])
@given(st.integers(0, 10**6), st.integers(1, 120))
@settings(max_examples=20)
def test_batches_that_are_alike_are_decided_as_the_top_k_does(decay, seed, updates):
    rule, scores = Threshold(5, decay), torch.randn(2, 16, 5, generator=torch.Generator().manual_seed(seed))
    for _ in range(updates):
        rule.update(scores, None, 0.25)
    kth = scores.flatten(0, 1).sort(0, descending=True).values[7]
    taken = rule(scores, scores) >= 0
    assert taken[scores >= kth].all()
    assert (scores >= kth - 1e-4 * kth.abs())[taken].all()  # and none that is not as good


def test_threshold_skips_padding_nan_and_empty_batches():
    rule = Threshold()
    scores = torch.tensor([[[5.0], [1.0], [2.0], [3.0]]])
    rule.update(scores, torch.tensor([[False, True, True, True]]), 0.34)
    assert rule.threshold.item() == pytest.approx(3.0)
    before = rule.state_dict()
    before = {k: v.clone() for k, v in before.items()}
    rule.update(scores, torch.zeros(1, 4, dtype=torch.bool), 0.5)
    rule.update(torch.full((1, 4, 1), math.nan), None, 0.5)
    rule.update(torch.zeros(0, 4, 1), None, 0.5)
    assert all(torch.equal(v, before[k]) for k, v in rule.state_dict().items())


def test_forward_never_moves_the_threshold():
    router = TopTokens(8, 0.25, rule="threshold")
    before = {k: v.clone() for k, v in router.state_dict().items()}
    router.train()(torch.randn(2, 8, 8))
    assert all(torch.equal(v, before[k]) for k, v in router.state_dict().items())


def test_update_thresholds_matches_routers_and_plans_in_order():
    first, second = TopTokens(8, 0.25, rule="threshold"), TopTokens(8, 0.5, rule="threshold")
    both, x = nn.ModuleList([first, second]), torch.randn(2, 16, 8)
    plans = (first(x), second(-x))
    update_thresholds(both, plans)
    close(first.rule.threshold, plans[0].scores.flatten().sort(descending=True).values[7][None])
    close(second.rule.threshold, plans[1].scores.flatten().sort(descending=True).values[15][None])
    with pytest.raises(dg.DepthgateError, match="whole forward pass"):
        update_thresholds(both, plans[:1])


def test_names_that_load_no_torch_are_those_of_the_tables():
    from depthgate.config import GATE_NAMES, RULE_NAMES
    from depthgate.routing import GATES, RULES

    assert (set(GATE_NAMES), set(RULE_NAMES)) == (set(GATES), set(RULES))


def test_gates_by_hand():
    s = torch.tensor([0.0, 1.0], requires_grad=True)
    from depthgate.routing import GATES

    assert GATES["one_plus_tanh"](s)[0] == 1
    close(GATES["one_plus_tanh"](s)[1], torch.tensor(1 + math.tanh(1)))
    close(GATES["sigmoid"](s)[1], torch.tensor(1 / (1 + math.exp(-1))))
    assert GATES["raw"](s)[1] == 1
    ones = GATES["straight_through"](s)
    assert (ones == 1).all()
    ones.sum().backward()
    close(s.grad, torch.sigmoid(s) * (1 - torch.sigmoid(s)))
