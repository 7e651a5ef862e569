"""The engine gives every request what the plain path gives it alone, whatever joins, leaves, runs or waits with it."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import depthgate as dg
from depthgate.data.tokenizer import ByteTokenizer
from depthgate.errors import InvalidValueError
from depthgate.generation.config import Sampling
from depthgate.generation.engine import Engine
from depthgate.generation.text import read_prompts
from tests.generation.models import VOCAB, built, prompts, said

PATTERNS = ("dense,mod", "mod,moe", "dense,mode_staged", "mod,mode")
CASES = [("dense", "scores"), ("dense,random", "scores"), *product(PATTERNS, ("scores", "predictor", "threshold"))]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def finish(engine):
    """Let all requests come to their end; the events by request."""
    found = {}
    while engine.waiting or engine.running:
        for event in engine.turn():
            found.setdefault(event.request, []).append(event)
    return found


def idle(engine):
    """True if every row and page is free, none of them twice."""
    dense, routed = (sorted(free) for free in engine._free)
    pages = (engine.batch.layers[0].kv.shape[0], *(each.kv.shape[0] for each in engine.batch.layers if each.router))
    assert len(set(dense)) == len(dense)
    assert len(set(routed)) == len(routed)
    return engine.batch.live == 0 and {len(dense) + 1, len(routed) + 1} >= set(pages)


@pytest.mark.parametrize(("pattern", "rule"), CASES)
def test_requests_in_one_engine_are_those_of_the_plain_path(pattern, rule):
    model, texts = built(pattern, rule), prompts(4, 6)
    for temperature in (0.0, 0.8):
        options = {"max_new_tokens": 7, "temperature": temperature, "seed": list(range(4))}
        plain = said(dg.generate(model, texts, **options))
        for chunk in ({}, {"chunk": 3}):
            assert said(dg.generate(model, texts, **options, engine=True, **chunk)) == plain


MODELS = {pattern: built(pattern, "threshold") for pattern in ("dense,mod", "mod,mode")}


@st.composite
def requests(draw):
    options = {
        "max_new_tokens": draw(st.integers(1, 30)),
        "temperature": draw(st.sampled_from((0.0, 0.7, 1.0))),
        "top_k": draw(st.sampled_from((None, 1, 5))),
        "top_p": draw(st.sampled_from((None, 0.5))),
        "min_p": draw(st.sampled_from((None, 0.1))),
        "repetition_penalty": draw(st.sampled_from((1.0, 1.5))),
        "seed": draw(st.integers(0, 9)),
    }
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40))
    return prompt, options, draw(st.integers(0, 6)), draw(st.one_of(st.none(), st.integers(0, 12)))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(sorted(MODELS)),
    st.lists(requests(), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from((64, 96, None)),
    st.sampled_from((1, 4, 16)),
    st.sampled_from((5, 512)),
)
def test_joining_leaving_and_waiting_change_no_token(pattern, asked, rows, memory, page, chunk):
    """Requests come at any turn and may be cancelled some turns later; few rows and pages send some back."""
    model = MODELS[pattern]
    engine = Engine(model, rows=rows, memory=memory, page=page, chunk=chunk)
    made, leaving = [], {}
    for prompt, options, wait, cancel in asked:
        for _ in range(wait):
            engine.turn()
        made.append(engine.submit(prompt, Sampling(**options)))
        leaving[made[-1].number] = cancel
        for each in made:
            if leaving[each.number] is not None:
                leaving[each.number] -= 1
                if leaving[each.number] < 0:
                    engine.cancel(each)
    finish(engine)
    assert idle(engine)
    for request, (prompt, options, *_) in zip(made, asked, strict=True):
        (alone,) = dg.generate(model, [prompt], **options)
        result = request.result
        if result.finish == "cancelled":
            assert leaving[request.number] is not None
            assert result.tokens == alone.tokens[: len(result.tokens)]
        else:
            assert said([result]) == said([alone])


def test_a_request_that_is_sent_back_goes_on_where_it_was():
    """Pages for one request of full length: two that grow cannot both have them."""
    model = built("dense,mod", "threshold")
    engine = Engine(model, rows=2, memory=64, page=4)
    two = [engine.submit([1, 2, 3], Sampling(max_new_tokens=50, seed=seed)) for seed in (1, 2)]
    sent_back = False
    while engine.waiting or engine.running:
        engine.turn()
        sent_back = sent_back or bool(engine.waiting and two[1].result.tokens)
    assert sent_back
    assert said([each.result for each in two]) == [
        said(dg.generate(model, [[1, 2, 3]], max_new_tokens=50, seed=seed))[0] for seed in (1, 2)
    ]


def test_rows_beyond_the_pages_wait_and_are_served_in_order():
    model = built("dense")
    engine = Engine(model, rows=2, memory=64, page=8, chunk=8)
    made = [engine.submit([n] * 20, Sampling(max_new_tokens=3)) for n in range(5)]
    assert (engine.waiting, engine.running) == (5, 0)
    assert list(finish(engine)) == [each.number for each in made]
    assert idle(engine)


def test_log_probabilities_are_those_of_the_model():
    model = built("dense,mod")
    engine = Engine(model)
    request = engine.submit([3, 4, 5], Sampling(max_new_tokens=6, temperature=0.5, top_k=3), 4)
    other = engine.submit([6], Sampling(max_new_tokens=6))
    events = finish(engine)
    ids = request.ids
    logprobs = model(torch.tensor([ids[:-1]]), causal=True).logits[0, 2:].detach().float().log_softmax(-1)
    for row, event in zip(logprobs, events[request.number], strict=True):
        assert event.logprob == pytest.approx(float(row[event.token]), abs=1e-5)
        best = row.topk(4)
        assert [token for token, _ in event.top] == best.indices.tolist()
        assert [each for _, each in event.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert {(event.logprob, event.top) for event in events[other.number]} == {(None, ())}


def test_stop_strings_and_the_end_token_end_a_request_as_on_the_plain_path():
    model = built(vocab=257)
    model.tokenizer = ByteTokenizer()
    whole = dg.generate(model, ["ab", "c"], max_new_tokens=12, seed=3)
    stop = whole[0].text[4:6]
    options = {"max_new_tokens": 12, "seed": 3, "stop": [stop]}
    plain, ours = (dg.generate(model, ["ab", "c"], **options, engine=engine) for engine in (False, True))
    assert said(ours) == said(plain)
    assert [each.pieces for each in ours] == [each.pieces for each in plain]
    assert plain[0].finish == "stop"


def test_a_row_without_finite_logits_ends_and_the_others_go_on():
    model = built("dense")
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
    model.embed.weight.data[7] = float("nan")
    engine = Engine(model)
    broken = engine.submit([1, 7], Sampling(max_new_tokens=4))
    fine = engine.submit([1, 2], Sampling(max_new_tokens=4, temperature=0))
    events = finish(engine)
    assert [event.finish for event in events[broken.number]] == ["error"]
    assert fine.result.finish == "length"
    with pytest.raises(InvalidValueError, match="request 0 have NaN"):
        dg.generate(model, [[1, 7]], engine=True)


def test_pages_of_a_row_without_finite_logits_do_not_spoil_who_has_them_next():
    model = built("dense")
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
    model.embed.weight.data[7] = float("nan")
    engine, options = Engine(model, rows=2, memory=128, page=64, chunk=16), {"max_new_tokens": 9, "temperature": 0}
    for turns in (9, 2):  # to its end, and cancelled while it is read
        broken = engine.submit([7] * 41, Sampling(**options))
        for _ in range(turns):
            engine.turn()
        engine.cancel(broken)
        engine.turn()
        both = [[3], [1, 2] * 20]  # the short one reads its page as far as the long one its own, with a mask
        fine = [engine.submit(prompt, Sampling(**options)) for prompt in both]
        finish(engine)
        assert said([each.result for each in fine]) == said(dg.generate(model, both, **options))


@pytest.mark.parametrize("capacity", [0.125, 1.0])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_prompts_read_without_asking_the_device_are_the_same(monkeypatch, pattern, capacity):
    """As on CUDA: a routed layer has so many slots, and a chunk is read again where more tokens enter."""
    monkeypatch.setattr("depthgate.generation.prompts._SPARE_SLOTS", 1)
    model = built(pattern, "threshold")
    for layer in model.layers:
        if capacity == 1.0 and hasattr(layer, "router"):
            layer.router.rule.average.fill_(-9.0)  # nearly every token enters
    texts = [*prompts(5, 2), list(range(40)), [3] * 50]
    engine = Engine(model, page=8, chunk=16)
    engine.prompts.waits = False
    made = [engine.submit(text, Sampling(max_new_tokens=5)) for text in texts]
    finish(engine)
    assert idle(engine)
    assert said([each.result for each in made]) == said(dg.generate(model, texts, max_new_tokens=5))


class Forgets(dict):
    """A CPU has no graphs: every prompt is the first of its size."""

    def __setitem__(self, *_):
        pass


@pytest.mark.parametrize("pattern", ["dense", "dense,mod", "mod"])
def test_a_prompt_that_is_padded_for_a_graph_is_the_same(pattern):
    model = built(pattern, "threshold")
    texts = [*prompts(5, 2), list(range(40)), [3] * 50]
    for rows in (1, 3):
        engine = Engine(model, rows=rows, page=8, chunk=16)
        engine.prompts.waits, engine.prompts._replays, engine.prompts._kept = False, True, Forgets()
        made = [engine.submit(text, Sampling(max_new_tokens=5)) for text in texts]
        finish(engine)
        assert idle(engine)
        assert said([each.result for each in made]) == said(dg.generate(model, texts, max_new_tokens=5))


def test_a_tokenizer_that_fails_ends_its_request_alone(monkeypatch):
    model = built(vocab=257)
    model.tokenizer = ByteTokenizer()
    engine = Engine(model)
    broken = engine.submit("ab", Sampling(max_new_tokens=4, temperature=0))
    fine = engine.submit("c", Sampling(max_new_tokens=4, temperature=0))
    monkeypatch.setattr(broken.stream, "_decode", lambda token: 1 / 0)
    events = finish(engine)
    assert [event.finish for event in events[broken.number]] == ["error"]
    assert isinstance(broken.fault, ZeroDivisionError)
    assert said([fine.result]) == said(dg.generate(model, "c", max_new_tokens=4, temperature=0))
    assert idle(engine)


@pytest.mark.parametrize("pages", [0, 3, 10**9])
def test_memory_is_half_of_what_is_free_and_what_the_rows_can_hold(monkeypatch, pages):
    model = built("dense")
    token = sum(2 * layer.attention.kv_heads * layer.attention.head_dim * 8 for layer in model.layers)
    values = {"SC_AVPHYS_PAGES": 2 * pages, "SC_PAGE_SIZE": 8 * token}
    monkeypatch.setattr("os.sysconf", values.__getitem__)
    engine = Engine(model, rows=2, page=8)
    assert engine.most == {0: 8, 3: 24}.get(pages, 64)
    assert len(engine._free[0]) == {0: 1, 3: 3}.get(pages, 2 * 64 // 8)


def test_a_closed_stream_keeps_what_was_held_back():
    model = built(vocab=256)
    model.tokenizer = ByteTokenizer()
    (whole,) = dg.generate(model, "ab", max_new_tokens=9, seed=3)
    found = dg.stream(model, "ab", max_new_tokens=9, seed=3, engine=True)
    shown = [next(found) for _ in range(4)]
    found.close()
    assert [event.token for event in shown] == whole.tokens[:4]


@pytest.mark.parametrize(
    ("prompt", "options", "why"),
    [
        ([1] * 30, {"max_new_tokens": 30}, "there is memory for 32"),
        ([1], {"beams": 2}, "beams is 2"),
        ([], {}, "a prompt is empty"),
        ([1] * 64, {}, "context is 64"),
        ([99], {}, "token id"),
        ([1], {"stop": "x"}, "no tokenizer"),
    ],
)
def test_bad_requests_are_refused_at_once(prompt, options, why):
    engine = Engine(built("dense"), memory=32, page=8)
    with pytest.raises(InvalidValueError, match=why):
        engine.submit(prompt, Sampling(**options))
    assert engine.waiting == 0
    with pytest.raises(InvalidValueError, match="logprobs is 21"):
        engine.submit([1], Sampling(max_new_tokens=2), 21)


@pytest.mark.parametrize(
    ("options", "name"), [({"rows": 0}, "rows"), ({"memory": 5, "page": 8}, "memory"), ({"page": 0}, "page")]
)
def test_bad_sizes_of_an_engine(options, name):
    with pytest.raises(InvalidValueError, match=name):
        Engine(built("dense"), **options)


def test_engine_with_beams_or_without_a_cache_is_refused():
    for options in ({"beams": 2}, {"cache": False}):
        with pytest.raises(InvalidValueError, match="engine is True and"):
            dg.generate(built("dense"), [[1]], engine=True, **options)


def test_pages_that_others_took_while_a_prompt_was_read():
    """The prompt is read again when there is room: none of it is lost."""
    model = built("dense", context=64)
    long = torch.randint(40, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    engine = Engine(model, rows=2, memory=64, page=1, chunk=1)
    engine.ahead = 3  # as on CUDA
    first = engine.submit([1, 2, 3], Sampling(max_new_tokens=40, seed=1))
    for _ in range(18):
        engine.turn()
    second = engine.submit(long, Sampling(max_new_tokens=20, seed=2))
    finish(engine)
    wanted = dg.generate(model, [long], max_new_tokens=20, seed=2)
    assert said([second.result]) == said(wanted)
    assert len(first.result.tokens) == 40


def test_an_owner_of_many_requests_does_not_keep_others_waiting():
    engine = Engine(built("dense"), rows=2)
    results = read_prompts(engine.model, [[1], [2], [3], [4]])
    for result, owner in zip(results, ("one", "one", "one", "other"), strict=True):
        engine.add(result, Sampling(max_new_tokens=3), owners=(owner,))
    engine.turn()
    assert [bool(result.tokens) for result in results] == [True, False, False, True]


def test_owners_take_turns_in_one_row_and_so_do_what_they_asked_for():
    engine = Engine(built("dense"), rows=1)
    owners = [("one", "a"), ("one", "a"), ("one", "b"), ("one", "a"), ("other", "c"), ("other", "c")]
    results = read_prompts(engine.model, [[1]] * len(owners))
    for result, who in zip(results, owners, strict=True):
        engine.add(result, Sampling(max_new_tokens=1), owners=who)
    assert list(finish(engine)) == [0, 4, 2, 5, 1, 3]
