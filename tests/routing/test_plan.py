"""Plans: hand-worked tables, the law that combine is dispatch's transpose, gradcheck in float64."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from depthgate.routing import Groups, Slots, Soft
from tests.conftest import close

F64 = torch.float64


def slots(dtype=F64, ragged=False):
    """Two rows of six tokens; two experts of three slots; token 2 of row 0 is picked twice."""
    index = torch.tensor([[[0, 2, 5], [1, 2, 4]], [[3, 4, 5], [0, 1, 2]]])
    gates = torch.rand(2, 2, 3, dtype=dtype) + 0.5
    scores = torch.randn(2, 6, 2, dtype=dtype)
    filled = torch.tensor([[[1, 1, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 0]]]).bool() if ragged else None
    if filled is not None:
        gates = torch.where(filled, gates, 0.0)
    return Slots(index, gates, scores, scores, filled)


def groups(dtype=F64):
    """One row of three tokens, K = 2, two experts and one null (expert 2); token 2 is padding.

    token 0 -> experts 1, 2(null); token 1 -> experts 0, 1. Pairs: 0 (t0, e1), 1 (t0, null),
    2 (t1, e0), 3 (t1, e1), 4 and 5 padding. Sorted by expert: pair 2 | pairs 0, 3 | the rest.
    """
    order = torch.tensor([2, 0, 3, 1, 4, 5])
    place = torch.tensor([[[1, 3], [0, 2], [4, 5]]])
    gates = torch.tensor([[[0.75, 0.0], [0.5, 0.25], [0.0, 0.0]]], dtype=dtype)
    choice = torch.tensor([[[1, 2], [0, 1], [-1, -1]]])
    scores = torch.zeros(1, 3, 3, dtype=dtype)
    return Groups(order, torch.tensor([1, 3]).int(), place, gates, choice, scores, torch.tensor([[1, 1, 0]]).bool())


def soft(dtype=F64):
    scores = torch.randn(2, 6, 2, 3, dtype=dtype)
    into = scores.softmax(1)
    back = scores.flatten(2).softmax(-1).view_as(scores)
    return Soft(into, back)


PLANS = {"slots": slots, "ragged slots": lambda **k: slots(ragged=True, **k), "groups": groups, "soft": soft}


def tokens_for(plan, **kwargs):
    B, T = plan.scores.shape[:2]
    return torch.randn(B, T, 4, dtype=F64, **kwargs)


def test_slots_by_hand():
    index = torch.tensor([[[1, 3], [0, 1]]])
    gates = torch.tensor([[[2.0, 0.5], [1.0, 10.0]]])
    plan = Slots(index, gates, torch.zeros(1, 4, 2), torch.zeros(1, 4, 2))
    x = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
    assert plan.dispatch(x)[..., 0].tolist() == [[[2, 4], [1, 2]]]
    assert plan.combine(plan.dispatch(x))[..., 0].tolist() == [[1.0, 2 * 2.0 + 10 * 2.0, 0.0, 0.5 * 4]]
    assert plan.chosen.int().tolist() == [[[0, 1], [1, 1], [0, 0], [1, 0]]]


def test_empty_slots_hold_the_fill_and_add_nothing():
    plan = slots(ragged=True)
    pos = torch.arange(6).expand(2, 6)
    assert plan.dispatch(pos, fill=-1).tolist() == [[[0, 2, -1], [1, 2, 4]], [[3, -1, -1], [0, 1, -1]]]
    rows = torch.full((2, 2, 3, 4), torch.nan, dtype=F64)
    rows = torch.where(plan.filled[..., None], 1.0, rows)
    update = plan.combine(rows)
    assert update.isfinite().all()
    assert update[0, 5].abs().sum() == 0  # token 5 stands in an empty slot only


def test_groups_by_hand():
    plan = groups()
    x = torch.tensor([[[1.0], [2.0], [3.0]]], dtype=F64)
    rows = plan.dispatch(x)
    assert rows[:, 0].tolist() == [2, 1, 2, 1, 3, 3]
    computed = rows.clone()
    computed[0] *= 10  # expert 0
    computed[1:3] *= 100  # expert 1
    computed[3:] = torch.nan  # of no expert: never looked at
    assert plan.combine(computed)[0, :, 0].tolist() == [0.75 * 100, 0.5 * 20 + 0.25 * 200, 0.0]


def test_soft_by_hand():
    into = torch.tensor([[[[0.25], [1.0]], [[0.75], [0.0]]]])  # two tokens, two experts of one slot
    back = torch.tensor([[[[0.5], [0.5]], [[1.0], [0.0]]]])
    plan = Soft(into, back)
    x = torch.tensor([[[4.0], [8.0]]])
    assert plan.dispatch(x)[0, :, 0, 0].tolist() == [7.0, 4.0]
    assert plan.combine(plan.dispatch(x))[0, :, 0].tolist() == [5.5, 7.0]


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS.keys())
def test_gradcheck_of_dispatch_and_combine(make):
    plan = make()
    x = tokens_for(plan, requires_grad=True)
    rows = plan.dispatch(x).detach().requires_grad_()
    for check in (gradcheck, gradgradcheck):
        assert check(plan.dispatch, (x,))
        assert check(plan.combine, (rows,))
    name = "gates" if hasattr(plan, "gates") else "dispatching"
    weight = getattr(plan, name)
    weight = weight.clone().requires_grad_()

    def through(x, w):
        moved = plan._replace(**{name: w})
        return moved.combine(moved.dispatch(x).tanh())

    assert gradcheck(through, (x, weight))


@pytest.mark.parametrize("kind", ["slots", "ragged slots", "groups"])
def test_combine_is_the_transpose_of_gated_dispatch(kind):
    """<combine(r), y> = <r, gate * dispatch(y)> for any rows r and tokens y, empty slots aside."""
    plan = PLANS[kind]()
    y = tokens_for(plan)
    rows = torch.randn_like(plan.dispatch(y))
    gates = plan.gates[..., None] if isinstance(plan, Slots) else plan.gates.flatten()[plan.order][:, None]
    close((plan.combine(rows) * y).sum(), (rows * gates * plan.dispatch(y)).sum())


def test_merge_is_exact_at_gate_one_and_for_an_equal_row():
    x = torch.randn(2, 6, 4)
    plan = slots(torch.float32).first_experts(1)
    rows = plan.dispatch(x)
    assert torch.equal(plan.merge(x, rows), x)
    ones = plan._replace(gates=torch.ones_like(plan.gates))
    new = torch.randn_like(rows)
    expected = x.clone()
    for b in range(2):
        expected[b, plan.tokens[b, 0]] = new[b, 0]
    assert torch.equal(ones.merge(x, new), expected)


def test_merge_by_hand_and_gradcheck():
    plan = slots(ragged=True).first_experts(1)
    x = tokens_for(plan, requires_grad=True)
    rows = torch.randn(2, 1, 3, 4, dtype=F64, requires_grad=True)
    y = plan.merge(x, rows)
    expected = x.detach().clone()
    for b in range(2):
        for c in range(3):
            if plan.filled[b, 0, c]:
                t, g = plan.tokens[b, 0, c], plan.gates[b, 0, c]
                expected[b, t] = (1 - g) * x[b, t] + g * rows[b, 0, c]
    close(y, expected)
    assert gradcheck(plan.merge, (x, rows))


def test_a_plan_is_immutable():
    with pytest.raises(AttributeError):
        slots().gates = None
