"""Filters against hand-worked tables, loops and Hugging Face; choices against the filtered softmax; random streams."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from depthgate.errors import InvalidValueError
from depthgate.generation.config import Sampling
from depthgate.generation.sampling import Filters, _penalised, _weights, check_logits, pick, uniform
from tests.conftest import TOLERANCE, close

HALVES = [0.5, 0.25, 0.125, 0.125]
FORBIDDEN = -math.inf
NEAR = TOLERANCE[torch.float32][1]  # decisions that are nearer may go either way in fp32


def weights(logits, sampling, seen=None):
    filters = Filters.all_alike(sampling, logits.device)
    return _weights(_penalised(logits, filters, seen), filters)


def probabilities(logits, sampling, seen=None):
    found = weights(logits, sampling, seen).double()
    return found / found.sum(-1, keepdim=True)


def kept(logits, sampling, seen=None):
    row = torch.as_tensor(logits)[None]
    return weights(row, sampling, None if seen is None else torch.tensor([seen]))[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2, 3]),  # a tie with the third stays
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [0]),  # at least one
        ({"top_p": 0.49}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.74}, [0, 1]),
        ({"top_p": 0.76}, [0, 1, 2]),  # of equal ones the lower id
        ({"top_p": 0.88}, [0, 1, 2, 3]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"min_p": 0.0}, [0, 1, 2, 3]),
        ({"min_p": 0.24}, [0, 1, 2, 3]),
        ({"min_p": 0.26}, [0, 1]),
        ({"min_p": 0.51}, [0]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 2, "top_p": 0.66}, [0]),  # of the two that top-k left, the first has 2/3
        ({"top_k": 2, "top_p": 0.67}, [0, 1]),
        ({"temperature": 0.5, "top_p": 0.73}, [0, 1]),  # squared: 16, 4, 1, 1 of 22
        ({"temperature": 0.5, "top_p": 0.72}, [0]),
        ({"temperature": 0.5, "min_p": 0.24}, [0, 1]),
        ({"temperature": 2.0, "min_p": 0.49}, [0, 1, 2, 3]),  # square roots: 1, .71, .5, .5
    ],
)
def test_filters_keep_what_the_hand_worked_table_says(options, expected):
    assert kept([math.log(p) for p in HALVES], Sampling(**options)) == expected


def test_top_p_of_equal_tokens_keeps_the_lowest_ids_and_stops_when_it_is_reached():
    assert kept([0.0] * 1024, Sampling(top_p=0.25)) == list(range(256))
    assert kept([0.0] * 1024, Sampling(top_p=0.2501)) == list(range(257))
    assert kept([0.0, 1.0] * 512, Sampling(top_p=0.25, temperature=1e-3)) == list(range(1, 256, 2))


def test_the_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens():
    logits, seen = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0]]), torch.tensor([[True, True, False, False, True]])
    expected = torch.tensor([[1.0, -4.0, 2.0, -2.0, 0.0]]).softmax(-1)
    close(probabilities(logits, Sampling(repetition_penalty=2.0), seen), expected, torch.float32)
    greedy = Sampling(temperature=0, repetition_penalty=2.0)
    assert pick(logits, greedy, seen).tolist() == [2]  # 0 without the penalty
    assert pick(logits, Sampling(temperature=0)).tolist() == [0]
    assert kept([2.0, -2.0, 2.0, -2.0], Sampling(repetition_penalty=2.0, top_k=1), [True, True, False, False]) == [2]


def test_tokens_lie_on_the_unit_interval_in_order_of_their_ids():
    numbers = [0.0, 0.49, 0.51, 0.74, 0.76, 0.87, 0.88, 1 - 2**-53]
    logits = torch.tensor([HALVES] * len(numbers)).log()
    assert pick(logits, Sampling(), None, torch.tensor(numbers)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    backwards = pick(logits.flip(1), Sampling(), None, torch.tensor(numbers)).tolist()
    assert backwards == [0, 2, 3, 3, 3, 3, 3, 3]


# --- the same by loops over doubles; `gap` is how far the nearest decision is from going the other way


def naive(logits, sampling, seen):
    penalty, t = sampling.repetition_penalty, sampling.temperature
    x = [(v * penalty if v < 0 else v / penalty) if s else v for v, s in zip(logits, seen, strict=True)]
    alive, gap = list(range(len(x))), 1.0
    x = [v / t for v in x]
    if sampling.top_k is not None:
        kth = sorted(x, reverse=True)[min(sampling.top_k, len(x)) - 1]
        gap = min([gap, *(abs(v - kth) for v in x if v != kth)])
        alive = [i for i in alive if x[i] >= kth]
    p = softmax(x, alive)
    if sampling.top_p is not None and sampling.top_p < 1:
        mass, few = 0.0, []
        for i in sorted(alive, key=lambda i: (-x[i], i)):
            if mass >= sampling.top_p:
                break
            few.append(i)
            mass += p[i]
            gap = min(gap, abs(mass - sampling.top_p))
        alive = few
    if sampling.min_p is not None:
        best = max(p.values())
        gap = min([gap, *(abs(p[i] / best - sampling.min_p) for i in alive if p[i] < best)])
        alive = [i for i in alive if p[i] >= sampling.min_p * best]
    p = softmax(x, alive)
    return [p.get(i, 0.0) for i in range(len(x))], gap


def softmax(x, alive):
    best = max(x[i] for i in alive)
    e = {i: math.exp(x[i] - best) for i in alive}
    return {i: v / sum(e.values()) for i, v in e.items()}


def naive_pick(p, u):
    """The token at u, and how far u is from the nearest border."""
    end, borders = 0.0, []
    for share in p:
        end += share
        borders.append(end)
    token = next((i for i, end in enumerate(borders) if u < end), max(i for i, share in enumerate(p) if share))
    return token, min([1.0, *(abs(end - u) for end in borders[:-1])])


quarters = st.integers(-24, 24).map(lambda n: n / 4)  # exact in fp32 and bf16, with many ties
logits_lists = st.lists(quarters, min_size=1, max_size=12)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]) | st.floats(0.2, 5),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.none() | st.floats(0.01, 1),
    min_p=st.none() | st.floats(0, 1),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]) | st.floats(0.5, 2),
)


@settings(max_examples=150)
@given(data=st.data(), logits=logits_lists, sampling=samplings, u=st.floats(0, 1, exclude_max=True))
def test_filters_and_choice_equal_the_loops(data, logits, sampling, u):
    seen = data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)))
    expected, gap = naive(logits, sampling, seen)
    assume(gap > NEAR)
    rows, mask = torch.tensor([logits]), torch.tensor([seen])
    found = probabilities(rows, sampling, mask)[0]
    close(found, torch.tensor(expected), torch.float32)
    # What is removed is 0 exactly; only what is next to nothing may be rounded to 0.
    assert all((p > 0) == (q > 0) or (p == 0 and q < 1e-15) for p, q in zip(found.tolist(), expected, strict=True))
    token, gap = naive_pick(expected, u)
    chosen = pick(rows, sampling, mask, torch.tensor([u], dtype=torch.float64))
    assert expected[int(chosen)] > 0
    assert int(chosen) == token or gap < NEAR


@settings(max_examples=20)
@given(logits=logits_lists, sampling=samplings)
def test_frequencies_over_a_grid_of_numbers_are_the_filtered_softmax(logits, sampling):
    n, seen = 4096, [i % 3 == 0 for i in range(len(logits))]
    expected, gap = naive(logits, sampling, seen)
    assume(gap > NEAR)
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    chosen = pick(torch.tensor([logits] * n), sampling, torch.tensor([seen] * n), grid)
    counts = torch.bincount(chosen, minlength=len(logits)).tolist()
    # An interval of length p holds n * p points of the grid, one more or one less; 0.1 for fp32.
    assert all(abs(count - n * p) < 1.1 for count, p in zip(counts, expected, strict=True))
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)


@given(data=st.data(), sampling=samplings, width=st.sampled_from([2, 257, 1000]), rows=st.integers(1, 5))
def test_a_row_is_chosen_alike_in_any_batch_and_place(data, sampling, width, rows):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(rows, width, generator=generator) * 3
    seen = torch.rand(rows, width, generator=generator) < 0.3
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    together = pick(logits, sampling, seen, uniform)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    assert torch.equal(pick(logits[order], sampling, seen[order], uniform[order]), together[order])
    for b in range(rows):
        alone = slice(b, b + 1)
        assert torch.equal(pick(logits[alone], sampling, seen[alone], uniform[alone]), together[alone])


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("width", [1, 3, 50_000])
def test_no_number_gives_a_forbidden_token(u, width):
    logits = torch.full((2, width + 2), FORBIDDEN)
    logits[:, 1:-1] = torch.randn(2, width)
    for sampling in (Sampling(), Sampling(top_k=2, top_p=0.9, min_p=0.1), Sampling(temperature=1e300)):
        for dtype in (torch.float32, torch.float64):
            token = pick(logits, sampling, None, torch.tensor([u, u], dtype=dtype))
            assert weights(logits, sampling).gather(1, token[:, None]).min() > 0
            assert logits.gather(1, token[:, None]).isfinite().all()


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_greedy_is_the_limit_of_temperature(temperature):
    logits = torch.stack([torch.randperm(1000) / 10 for _ in range(50)])  # no ties: at a tie the limit is a fair choice
    greedy = pick(logits, Sampling(temperature=0))
    assert torch.equal(greedy, logits.argmax(-1))
    assert torch.equal(pick(logits, Sampling(temperature=temperature), None, torch.rand(50)), greedy)
    filtered = Sampling(temperature=0, top_k=5, top_p=0.1, min_p=0.9)  # none of them removes the best
    assert torch.equal(pick(logits, filtered), greedy)


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.zeros(3, 1000)
    logits[1, 500:] = 1
    logits[2, [7, 999]] = 2
    assert pick(logits, Sampling(temperature=0)).tolist() == [0, 500, 7]
    assert pick(logits.bfloat16(), Sampling(temperature=0)).tolist() == [0, 500, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_computed_in_fp32(dtype):
    logits, u = torch.randn(20, 300).to(dtype), torch.rand(20)
    sampling = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.1)
    seen = torch.rand(20, 300) < 0.5
    assert torch.equal(pick(logits, sampling, seen, u), pick(logits.float(), sampling, seen, u))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nothing_waits_for_the_device(temperature):
    """Fake tensors have no values: any read of one, and any shape that depends on one, raises."""
    sampling = Sampling(temperature, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    with FakeTensorMode():
        numbers = uniform(torch.arange(3), torch.ones(3, dtype=torch.long))
        token = pick(torch.randn(3, 50), sampling, torch.zeros(3, 50, dtype=torch.bool), numbers)
    assert token.shape == (3,)
    assert token.dtype == torch.int64


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_are_refused_by_row(bad):
    logits = torch.randn(4, 10)
    logits[0, 3] = FORBIDDEN
    check_logits(logits)
    logits[2, 5] = bad
    with pytest.raises(InvalidValueError, match=r"row 2 \(1 of 4 rows\)"):
        check_logits(logits)
    token = pick(logits, Sampling(), None, torch.full((4,), 0.9))
    assert ((token >= 0) & (token < 10)).all()


def test_a_row_without_any_choice_is_refused():
    with pytest.raises(InvalidValueError, match="no finite number"):
        check_logits(torch.tensor([[FORBIDDEN, FORBIDDEN]]))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, True, "1", None]),
        ("top_k", [0, -1, 1.5, True, "2"]),
        ("top_p", [0, -0.1, 1.01, math.nan, False, "0.5"]),
        ("min_p", [-0.1, 1.01, math.nan, True, "0.5"]),
        ("repetition_penalty", [0, -1, math.nan, math.inf, None]),
    ],
)
def test_bad_options_are_refused_by_name_and_value(name, values):
    for value in values:
        with pytest.raises(InvalidValueError, match=f"{name} is {value!r}: it must be"):
            Sampling(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
)
def test_filters_equal_hugging_faces(options):
    hf = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")
    logits, ids = torch.randn(40, 200) * 3, torch.randint(200, (40, 30))
    if options.get("top_k"):
        logits = (logits * 2).round() / 2 + torch.arange(200) * 1e-4 * ("top_p" in options)  # ties, unless sorted
    made = {
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }
    chain = hf.LogitsProcessorList([make(options[name]) for name, make in made.items() if name in options])
    expected = chain(ids, logits).softmax(-1)
    seen = torch.zeros(40, 200, dtype=torch.bool).scatter_(1, ids, True)
    found = probabilities(logits, Sampling(**options), seen)
    close(found, expected, torch.float32)
    assert torch.equal(found > 0, expected > 0)


# --- random streams

MASK = 2**64 - 1


class SplitMix64:
    """The published generator, in plain integers."""

    def __init__(self, state):
        self.state = state

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


def test_the_plain_generator_gives_the_published_numbers():
    plain = SplitMix64(1234567)  # https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [plain.next() for _ in range(4)] == published


@given(seed=st.integers(0, 2**63 - 1), steps=st.integers(1, 20))
def test_a_stream_is_the_plain_generator_seeded_by_its_own_first_number(seed, steps):
    plain = SplitMix64(SplitMix64(seed).next())
    expected = [(plain.next() >> 11) / 2**53 for _ in range(steps)]
    assert [float(uniform(torch.tensor([seed]), step)) for step in range(steps)] == expected
    assert all(0 <= u < 1 for u in expected)


def test_a_stream_depends_on_its_seed_and_step_alone():
    seeds, steps = torch.tensor([3, 1, 4, 1, 2**63 - 1]), [0, 1, 7, 10**6]
    table = torch.stack([uniform(seed[None], step) for step in steps for seed in seeds]).view(4, 5)
    for step, row in zip(steps, table, strict=True):
        assert torch.equal(uniform(seeds, step), row)
        assert torch.equal(uniform(seeds[[4, 0]], step), row[[4, 0]])
    each = uniform(seeds[[2, 0, 4, 1]], torch.tensor(steps))  # rows at steps of their own
    assert torch.equal(each, table[torch.arange(4), torch.tensor([2, 0, 4, 1])])
    assert torch.equal(table[:, 1], table[:, 3])
    assert len(set(table.flatten().tolist())) == 16


def test_streams_are_even_and_unrelated():
    """256 seeds in a row, 256 steps: chi-square over 64 cells, and neighbours in seed and step. Deterministic."""
    table = torch.stack([uniform(torch.arange(256), step) for step in range(256)])
    counts = torch.bincount((table.flatten() * 64).long(), minlength=64).double()
    assert 30 < float(((counts - 1024) ** 2 / 1024).sum()) < 105  # 63 +- 11
    for a, b in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / 256


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, True, "7"):
        with pytest.raises(InvalidValueError, match="seed is"):
            Sampling(seed=[0, seed])
