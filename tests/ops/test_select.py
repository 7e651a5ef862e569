"""The choice of tokens against its naive twin, on anything hypothesis thinks of."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthgate.errors import DepthgateWarning
from depthgate.flops import budget
from depthgate.ops import reference, select
from depthgate.ops.select import compact, top_k, top_of_documents

# Few distinct values, so that ties are the rule; and every kind of odd float.
SCORE = st.one_of(
    st.sampled_from([-1.0, -0.0, 0.0, 0.5, 1e4, -1e4, math.inf, -math.inf, math.nan, 1e-45, -1e-45]),
    st.floats(width=32),
)
CAPACITY = st.one_of(st.sampled_from([0.125, 0.25, 0.5, 1.0, 1, 0.29, 1e-9]), st.floats(1e-3, 1.0))


@given(st.lists(SCORE, min_size=1, max_size=40), CAPACITY)
def test_top_k_equals_the_naive_choice(scores, capacity):
    k = budget(capacity, len(scores))
    chosen = top_k(torch.tensor(scores, dtype=torch.float32), k).tolist()
    assert chosen == reference.top_tokens(scores, [True] * len(scores), None, capacity)
    assert len(chosen) == k


@st.composite
def rows(draw):
    T = draw(st.integers(1, 24))
    B = draw(st.integers(1, 3))
    grid = lambda item: st.lists(st.lists(item, min_size=T, max_size=T), min_size=B, max_size=B)  # noqa: E731
    doc = draw(st.one_of(st.none(), grid(st.integers(0, 3))))
    return draw(grid(SCORE)), draw(grid(st.booleans())), doc


@given(rows(), CAPACITY)
def test_top_of_documents_equals_the_naive_choice(case, capacity):
    scores, valid, doc = case
    chosen = top_of_documents(
        torch.tensor(scores, dtype=torch.float32)[:, None],
        torch.tensor(valid),
        None if doc is None else torch.tensor(doc),
        capacity,
    )[:, 0]
    for b in range(len(scores)):
        expected = reference.top_tokens(scores[b], valid[b], None if doc is None else doc[b], capacity)
        assert chosen[b].nonzero()[:, 0].tolist() == expected


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 5))
def test_compact_lists_the_chosen_then_distinct_others(chosen, extra):
    count = sum(chosen)
    slots = min(len(chosen), count + extra)
    index, filled = compact(torch.tensor(chosen), slots)
    assert index[filled].tolist() == [t for t, c in enumerate(chosen) if c]
    assert (index.tolist(), filled.tolist()) == reference.compact(chosen, slots)
    assert len(set(index.tolist())) == slots


@pytest.mark.parametrize(
    ("capacity", "tokens", "k"),
    [(0.125, 8, 1), (0.125, 7, 1), (0.125, 1, 1), (0.125, 16, 2), (0.5, 5, 2), (1.0, 9, 9), (1, 9, 9), (0.3, 0, 0)],
)
def test_budget_by_hand(capacity, tokens, k):
    assert budget(capacity, tokens) == k


def test_a_budget_in_hundredths_is_exact():
    """As whole numbers say: in floating point 0.29 * 100 is a little less than 29."""
    sizes = torch.arange(300)
    for hundredths in range(1, 101):
        wanted = [min(n, max(1, hundredths * n // 100)) for n in range(300)]
        assert [budget(hundredths / 100, n) for n in range(300)] == wanted
        assert select.budgets(hundredths / 100, sizes).tolist() == wanted
    assert [budget(share, n) for share, n in ((1 / 3, 3_000_000), (0.7, 10_000_000))] == [1_000_000, 7_000_000]


def test_order_of_oddities_by_hand():
    """+inf, then numbers, then -inf, then NaN; 0.0 and -0.0 tie and the earlier wins."""
    scores = torch.tensor([math.nan, -math.inf, -0.0, 0.0, math.inf, -1.0])
    assert [top_k(scores, k).tolist() for k in range(1, 7)] == [
        [4],
        [2, 4],
        [2, 3, 4],
        [2, 3, 4, 5],
        [1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]


def test_ties_of_bf16_scores_go_to_the_earlier_token():
    """bf16-valued scores tie at the k-th place in most long rows; the choice must not depend on the kernel."""
    scores = torch.randn(64, 2048).bfloat16().float()
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :256].sort(-1).values
    tied = (scores == scores.gather(1, scores.topk(256).indices[:, -1:])).sum(1) > 1
    assert tied.float().mean() > 0.5
    assert torch.equal(top_k(scores, 256), expected)


def test_padding_loses_to_nan():
    scores = torch.tensor([[5.0, math.nan, 4.0]])[:, None]
    chosen = top_of_documents(scores, torch.tensor([[False, True, False]]), None, 1.0)
    assert chosen[0, 0].tolist() == [False, True, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton works where there is a GPU")
def test_without_triton_there_is_one_warning(monkeypatch):
    monkeypatch.setattr(select, "_works", None)
    with pytest.warns(DepthgateWarning, match="Triton does not work here .* tokens are chosen by sorting"):
        assert not select.triton_works()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not select.triton_works()
