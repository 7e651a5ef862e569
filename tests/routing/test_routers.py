"""Properties of every router, on anything hypothesis thinks of."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import depthgate as dg
from depthgate.ops import reference
from depthgate.routing import GATES, RULES, RandomScorer, SoftSlots, TopExperts, TopTokens, has_nan, load_balance
from tests.conftest import close

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 20))
CAPACITY = st.sampled_from([0.125, 0.25, 0.5, 0.7, 1.0])


def draw_pos(data, B, T):
    """Positions with padding anywhere, or none."""
    if data.draw(st.booleans()):
        return None
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=B, max_size=B)))
    return torch.where(mask, mask.cumsum(1) - 1, -1)


@given(SIZES, CAPACITY, st.data())
def test_top_tokens_routes_exactly_k_valid_tokens_ascending(size, capacity, data):
    B, T = size
    x = torch.randn(B, T, 8)
    pos = draw_pos(data, B, T)
    plan = TopTokens(8, capacity)(x, pos)
    valid = torch.ones(B, T, dtype=torch.bool) if pos is None else pos >= 0
    assert plan.scores.dtype is torch.float32
    for b in range(B):
        routed = plan.tokens[b, 0] if plan.filled is None else plan.tokens[b, 0][plan.filled[b, 0]]
        n = int(valid[b].sum())
        assert len(routed) == (max(1, math.floor(capacity * n)) if n else 0)
        assert routed.tolist() == sorted(set(routed.tolist()))
        assert valid[b][routed].all()
        assert routed.tolist() == reference.top_tokens(plan.scores[b, :, 0].tolist(), valid[b].tolist(), None, capacity)


@given(SIZES, CAPACITY, st.data())
def test_top_tokens_is_permutation_equivariant(size, capacity, data):
    B, T = size
    router = TopTokens(8, capacity, experts=2)
    x = torch.randn(B, T, 8)
    order = torch.tensor(data.draw(st.permutations(range(T))))
    assert torch.equal(router(x).chosen[:, order], router(x[:, order]).chosen)


@given(SIZES, CAPACITY)
def test_a_row_is_routed_the_same_in_any_batch(size, capacity):
    B, T = size
    router = TopTokens(8, capacity)
    x = torch.randn(B, T, 8)
    alone = torch.cat([router(x[b : b + 1]).tokens for b in range(B)])
    assert torch.equal(router(x).tokens, alone)


@given(SIZES, CAPACITY, st.data())
def test_documents_are_routed_as_if_alone(size, capacity, data):
    """Packed == separate: each document's choice is what it would be in a row of its own."""
    B, T = size
    router = TopTokens(8, capacity)
    x = torch.randn(B, T, 8)
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=T))
    doc = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[:T]
    doc = torch.nn.functional.pad(doc, (0, T - len(doc)), value=len(lengths)).expand(B, T)
    pos = torch.arange(T).expand(B, T)
    packed = router(x, pos, doc=doc).chosen
    for d in doc[0].unique():
        here = doc[0] == d
        assert torch.equal(packed[:, here], router(x[:, here]).chosen)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("value", [0.0, math.inf, -math.inf, math.nan, 1e4, -1e4, 1e-45])
def test_equal_and_odd_scores_give_exactly_k_and_finite_gates(gate, value):
    router = TopTokens(4, 0.25, gate=gate)
    router.proj.forward = lambda x, *_: torch.full((*x.shape[:2], 1), value)
    plan = router(torch.randn(2, 16, 4))
    assert plan.tokens.tolist() == [[[0, 1, 2, 3]]] * 2
    assert plan.gates.isfinite().all()
    assert plan.gates.bfloat16().isfinite().all()
    assert bool(has_nan(plan)) is math.isnan(value)


def test_nan_never_wins():
    router = TopTokens(1, 0.5)
    with torch.no_grad():
        router.proj.weight.fill_(1.0)
    x = torch.tensor([[[math.nan], [-5.0], [math.nan], [-7.0]]])
    assert router(x).tokens.tolist() == [[[1, 3]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_are_fp32_in_low_precision_models_and_autocast(dtype):
    """The weights and tokens are rounded, the product is not: it equals the fp32 product of the same values."""
    x = torch.randn(2, 32, 64).to(dtype)
    for router in (TopTokens(64, 0.5).to(dtype), TopExperts(64, 4).to(dtype)):
        exact = x.float() @ router.proj.weight.float().T
        for scores in (router(x).scores, _autocast(router, x, dtype).scores):
            assert scores.dtype is torch.float32
            close(scores, exact)
            assert (scores != scores.to(dtype).float()).any()
    soft = SoftSlots(64, 4).to(dtype)
    assert soft(x).into.dtype is torch.float32
    assert _autocast(soft, x, dtype).into.dtype is torch.float32
    close(_autocast(soft, x, dtype).into, soft(x).into)


def _autocast(router, x, dtype):
    with torch.autocast("cpu", dtype=dtype):
        return router(x)


@pytest.mark.parametrize("rule", RULES)
def test_the_causal_choice_of_a_token_depends_on_it_alone(rule):
    router = TopTokens(8, 0.25, rule=rule)
    x = torch.randn(2, 24, 8)
    router.update(router(x))
    whole = router(x, causal=True).chosen
    for t in range(24):
        assert torch.equal(router(x[:, t : t + 1], causal=True).chosen, whole[:, t : t + 1])
    changed = x.clone()
    changed[:, 12:] += 1
    assert torch.equal(router(changed, causal=True).chosen[:, :12], whole[:, :12])
    # and the top-k choice is not causal: an earlier token is displaced by raising later scores
    raised = x.clone()
    raised[:, 12:] = 10 * router.proj.weight[0] / router.proj.weight.norm()
    assert not torch.equal(router(raised).chosen[:, :12], router(x).chosen[:, :12])


def test_causal_counts_are_ragged_and_padding_stays_out():
    router = TopTokens(8, 0.25)
    x = torch.randn(3, 10, 8)
    pos = torch.arange(10).repeat(3, 1)
    pos[0, :4] = -1
    plan = router(x, pos, causal=True)
    expected = (plan.scores[..., 0] >= 0) & (pos >= 0)
    assert torch.equal(plan.chosen[..., 0], expected)
    assert torch.equal(plan.causal_choice[..., 0], expected)
    assert plan.tokens.shape[-1] == expected.sum(1).max()


def test_kept_tokens_come_first():
    router = TopTokens(8, 0.25)
    x = torch.randn(4, 16, 8)
    keep = torch.zeros(4, 16, dtype=torch.bool)
    keep[:, 9] = True
    plan = router(x, keep=keep)
    assert plan.chosen[:, 9].all()
    assert plan.chosen.sum(1).tolist() == [[4]] * 4
    others = plan.scores.masked_fill(keep[..., None], -math.inf).topk(3, dim=1).indices
    assert plan.chosen[..., 0].gather(1, others[..., 0]).all()


def test_the_causal_choice_of_any_plan_is_that_of_a_causal_pass():
    """With kept tokens and padding; and of some rows of the plan alone."""
    router = TopTokens(8, 0.25)
    x, keep = torch.randn(4, 16, 8), torch.zeros(4, 16, dtype=torch.bool)
    keep[:, 9:12] = True
    pos = torch.arange(16).expand(4, 16).clone()
    pos[1, 10:] = -1
    plan, causal = router(x, pos, keep=keep), router(x, pos, causal=True, keep=keep)
    assert torch.equal(plan.causal_choice, causal.chosen)
    assert torch.equal(causal.causal_choice, causal.chosen)
    some = torch.tensor([1, 3])
    assert torch.equal(plan.rows(some, 4).causal_choice, causal.chosen[some])


@given(SIZES, st.integers(1, 5), st.integers(0, 3), st.data())
def test_top_experts_sorts_every_choice_once(size, experts, null, data):
    B, T = size
    top_k = data.draw(st.integers(1, experts))
    router = TopExperts(8, experts, top_k, null)
    x = torch.randn(B, T, 8)
    pos = draw_pos(data, B, T)
    plan = router(x, pos)
    flat = plan.choice.flatten()
    assert sorted(plan.order.tolist()) == list(range(B * T * top_k))
    assert torch.equal(plan.order[plan.row.flatten()], torch.arange(B * T * top_k))
    start = 0
    for e, end in enumerate(plan.ends.tolist()):
        assert (flat[plan.order[start:end]] == e).all()
        start = end
    rest = flat[plan.order[start:]]
    assert ((rest < 0) | (rest >= experts)).all()
    # each token has top_k different experts: its best ones
    best = plan.scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].sort(-1).values
    valid = torch.ones(B, T, dtype=torch.bool) if pos is None else pos >= 0
    assert torch.equal(plan.choice[valid], best[valid])
    assert (plan.choice[~valid] == -1).all()
    real = (plan.choice >= 0) & (plan.choice < experts)
    assert (plan.gates[~real] == 0).all()
    if top_k > 1 and null == 0:
        close(plan.gates[valid].sum(-1), torch.ones(int(valid.sum())))


def test_top_one_gate_is_the_probability():
    router = TopExperts(8, 4, 1)
    plan = router(torch.randn(2, 5, 8))
    close(plan.gates[..., 0], plan.scores.softmax(-1).max(-1).values)


@given(SIZES, st.integers(1, 5), st.integers(1, 3), st.data())
def test_soft_slots_laws(size, experts, slots, data):
    """|logits| <= scale; dispatch sums to one over valid tokens, combine over slots; padding weighs nothing."""
    B, T = size
    router = SoftSlots(8, experts, slots)
    with torch.no_grad():
        router.scale.fill_(3.0)
    x = 100 * torch.randn(B, T, 8)
    pos = draw_pos(data, B, T)
    plan = router(x, pos)
    close(plan.scores.abs().clamp(min=3.0), torch.full_like(plan.scores, 3.0))  # none is larger
    valid = torch.ones(B, T, dtype=torch.bool) if pos is None else pos >= 0
    some = valid.any(1)
    close(plan.into.sum(1)[some], torch.ones(int(some.sum()), experts, slots))
    close(plan.back.flatten(2).sum(-1)[valid], torch.ones(int(valid.sum())))
    assert (plan.into[~valid] == 0).all()
    assert (plan.back[~valid] == 0).all()
    assert (plan.into[~some] == 0).all()


def test_soft_slots_follow_the_paper():
    """L = l2norm(X) (scale l2norm(Phi)); slot content is the un-normalised X."""
    router = SoftSlots(8, 3, 2)
    with torch.no_grad():
        router.scale.fill_(2.5)
    x = torch.randn(2, 5, 8)
    plan = router(x)
    unit = torch.nn.functional.normalize
    logits = torch.einsum("btd,ds->bts", unit(x, dim=-1), 2.5 * unit(router.phi, dim=0)).view(2, 5, 3, 2)
    close(plan.scores, logits)
    close(plan.dispatch(x), torch.einsum("btec,btd->becd", logits.softmax(1), x))
    rows = torch.randn(2, 3, 2, 8)
    close(plan.combine(rows), torch.einsum("bts,bsd->btd", logits.flatten(2).softmax(-1), rows.flatten(1, 2)))


def test_zero_tokens_have_finite_gradients_in_soft_slots():
    x = torch.zeros(1, 3, 8, requires_grad=True)
    plan = SoftSlots(8, 2)(x)
    plan.dispatch(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_nothing_in_nothing_out(shape):
    x = torch.randn(*shape, 8)
    for router in (TopTokens(8, 0.5), TopExperts(8, 4), SoftSlots(8, 4)):
        plan = router(x)
        assert plan.combine(plan.dispatch(x)).shape == x.shape


def test_soft_slots_refuse_a_causal_call():
    with pytest.raises(dg.DepthgateError, match="no causal form"):
        SoftSlots(8, 2)(torch.randn(1, 3, 8), causal=True)


def random_router():
    return TopTokens(8, 0.25, gate=torch.ones_like, scorer=RandomScorer())


def test_a_scorer_of_ones_own_is_checked():
    with pytest.raises(dg.DepthgateError, match="scorer is 3"):
        TopTokens(8, 0.25, scorer=3)

    class Wrong(torch.nn.Module):
        def forward(self, tokens, pos, capacity):
            return tokens[..., 0]

    with pytest.raises(dg.DepthgateError, match="scorer returned"):
        TopTokens(8, 0.25, scorer=Wrong())(torch.randn(2, 6, 8))


def test_gates_of_a_random_router_are_those_of_its_scores():
    router = TopTokens(8, 0.5, gate="sigmoid", scorer=RandomScorer(), scores_have_no_loss=True).eval()
    plan = router(torch.randn(2, 6, 8))
    close(plan.gates, plan.scores.mT.gather(2, plan.tokens).sigmoid())


def test_a_random_router_takes_its_share_by_chance_and_again_the_same_once_trained():
    torch.manual_seed(0)
    router, other = random_router(), random_router()
    x = torch.randn(2, 4000, 8)
    assert list(router.parameters()) == []
    a, b = router(x), router(x)
    assert a.tokens.shape == (2, 1, 1000)
    assert not torch.equal(a.tokens, b.tokens)  # drawn in every pass while it trains
    assert 0.2 < torch.isin(a.tokens[0, 0], a.tokens[1, 0]).float().mean() < 0.3  # rows apart from each other
    assert torch.equal(a.gates, torch.ones_like(a.gates))
    router.eval()
    other.eval()
    plan = router(x, causal=True)
    share = plan.chosen.float().mean().item()
    assert abs(share - 0.25) < 0.02
    assert torch.equal(plan.chosen, router(torch.randn_like(x), causal=True).chosen)  # whatever the tokens are
    both = (plan.chosen & other(x, causal=True).chosen).float().mean().item()
    assert abs(both - 0.0625) < 0.02  # layers differ
    late = torch.arange(3000, 3010).expand(2, 10)
    assert torch.equal(router(x[:, :10], late, causal=True).chosen, plan.chosen[:, 3000:3010])
    runs = plan.chosen[0, :, 0].float()
    assert abs((runs[1:] * runs[:-1]).mean().item() - 0.0625) < 0.02  # neighbours know nothing of each other


class _Largest(TorchDispatchMode):
    """The most bytes of a tensor that any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            self.bytes = max(self.bytes, each.nbytes if isinstance(each, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_token_choice_makes_nothing_much_larger_than_its_scores(gate):
    """Forward, losses and backward: among many experts a choice is a number, and not a row of them."""
    router, x = TopExperts(8, 64, 8, null_experts=2, gate=gate), torch.randn(4, 32, 8)
    with _Largest() as made:
        plan = router(x)
        (plan.gates.sum() + load_balance(plan)).backward()
    keys = plan.scores.numel() * 8  # one of int64 for each score
    assert made.bytes <= keys
