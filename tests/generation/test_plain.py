"""Generation with a cache equals generation without, whatever is routed, batched, padded or cut into chunks."""

import inspect
from dataclasses import fields
from itertools import product

import pytest
import torch

import depthgate as dg
from depthgate.data.tokenizer import ByteTokenizer
from depthgate.errors import InvalidValueError
from depthgate.generation.config import Sampling
from depthgate.generation.plain import Reader, decode
from depthgate.generation.text import read_prompts
from tests.conftest import close
from tests.generation.models import VOCAB, built, prompts, said

PATTERNS = ("dense", "dense,mod", "mod,moe", "dense,mode_staged", "mod,mode")
RULES = ("scores", "predictor", "threshold")
CASES = [("dense", "scores"), ("dense,random", "scores"), ("mode", "threshold"), *product(PATTERNS[1:], RULES)]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("pattern", "rule"), CASES)
def test_cached_equals_uncached_and_every_row_its_solo_run(pattern, rule):
    model = built(pattern, rule)
    for rows, temperature in ((1, 0.0), (4, 0.8)):
        texts = prompts(rows, rows)
        options = {"max_new_tokens": 7, "temperature": temperature, "seed": list(range(rows))}
        cached = dg.generate(model, texts, **options, chunk=5)
        assert said(cached) == said(dg.generate(model, texts, **options, cache=False))
        assert said(cached) == said(dg.generate(model, texts, **options, chunk=64))
        for i, text in enumerate(texts):
            alone = dg.generate(model, [text], **{**options, "seed": i})
            assert said(alone) == said(cached[i : i + 1])
    if pattern not in ("dense", "mode"):
        routed = [share for result in cached for share in result.routed_share]
        assert min(routed) < 0.9  # the test is about models that skip some tokens
        assert max(routed) > 0.1  # and compute others


@pytest.mark.parametrize(("pattern", "rule"), CASES)
def test_every_logit_of_decoding_is_that_of_one_forward_pass(pattern, rule):
    model = built(pattern, rule)
    ids = prompts(1, 5)[0] + prompts(1, 6)[0]
    with torch.inference_mode():
        whole = model(torch.tensor([ids]), causal=True).logits[0]
    reader = Reader(model, 1, chunk=4)
    for n, token in enumerate(ids):
        logits = reader.step(torch.tensor([token])).logits if n else reader.prefill([[token]]).logits
        close(logits[0], whole[n].float())


def test_a_layer_stores_and_computes_only_what_enters_it():
    model = built("dense,mod", "scores")
    computed = [0] * 4

    def count(layer):
        def hook(module, args, kwargs):
            computed[layer] += int((kwargs["pos"] >= 0).sum())
            assert (kwargs["pos"] >= 0).any(1).all()  # no row that has nothing to compute

        return hook

    for i, layer in enumerate(model.layers):
        (layer.block if hasattr(layer, "block") else layer).register_forward_pre_hook(count(i), with_kwargs=True)
    todo = read_prompts(model, prompts(5, 3))
    reader = Reader(model, 5)
    for _ in decode(reader, todo, Sampling(temperature=0, max_new_tokens=12)):
        pass
    fed = sum(len(r.depths) for r in todo)
    entered = [sum(r.routed[i] for r in todo) for i in range(2)]
    # Chunks of a prefill are padded at the left, and a dense layer is given that padding as well.
    assert computed == [fed, entered[0], fed, entered[1]]
    stored = [int(layer.store.lengths.sum()) for layer in reader.caches]
    assert stored == [fed, entered[0], fed, entered[1]]
    assert 0 < sum(entered) < 2 * fed


def test_rows_that_end_leave_the_batch_and_the_others_do_not_notice():
    model = built(vocab=257)
    model.tokenizer = ByteTokenizer()
    model.head.weight.data[256] += 0.6  # an end that comes sooner or later
    texts = ["a", "bcd", "ef", "ghijk", "l"]
    results = dg.generate(model, texts, max_new_tokens=40, seed=[1, 2, 3, 4, 5])
    assert {r.finish for r in results} >= {"end"}
    assert len({len(r.tokens) for r in results}) > 1
    for i, text in enumerate(texts):
        assert said(dg.generate(model, text, max_new_tokens=40, seed=i + 1)) == said(results[i : i + 1])
        assert results[i].text == model.tokenizer.decode(results[i].tokens)


def test_a_long_row_that_leaves_gives_its_memory_back():
    model = built(vocab=257)
    reader = Reader(model, 2)
    texts = [torch.randint(257, (n,)).tolist() for n in (40, 3)]
    reader.prefill(texts)
    before = reader.cache_bytes
    reader.select(torch.tensor([1]))
    alone = Reader(model, 1)
    alone.prefill(texts[1:])
    for each in (reader, alone):
        each.step(torch.tensor([7]))
    assert reader.cache_bytes <= alone.cache_bytes < before / 4


def test_stop_strings_end_the_text():
    model = built(vocab=257)
    model.tokenizer = ByteTokenizer()
    free = dg.generate(model, "abc", max_new_tokens=30, temperature=0)[0]
    assert len(free.text) > 5
    stop = free.text[3:5]
    cut = dg.generate(model, "abc", max_new_tokens=30, temperature=0, stop=stop)[0]
    assert cut.finish == "stop"
    assert cut.text == free.text[: free.text.index(stop)]


def test_events_are_the_result():
    model = built(vocab=257)
    model.tokenizer = ByteTokenizer()
    seen = []
    results = dg.generate(model, ["ab", "c"], max_new_tokens=7, callback=seen.append)
    for i, result in enumerate(results):
        mine = [event for event in seen if event.request == i]
        assert [event.token for event in mine] == result.tokens
        assert "".join(event.text for event in mine) == result.text
        assert [event.depth for event in mine] == result.depths[len(result.prompt_tokens) - 1 :]
        assert [event.finish for event in mine] == [None] * 6 + ["length"]


def test_the_context_is_the_end():
    model = built(context=12)
    result = dg.generate(model, [[1] * 9], max_new_tokens=50)[0]
    assert result.finish == "context"
    assert len(result.tokens) == 3
    with pytest.raises(InvalidValueError, match="context is 12"):
        dg.generate(model, [[1] * 12])


def test_a_repetition_penalty_is_felt():
    model = built()
    plain = dg.generate(model, [[1, 2, 3]], max_new_tokens=30, temperature=0)[0]
    other = dg.generate(model, [[1, 2, 3]], max_new_tokens=30, temperature=0, repetition_penalty=50.0)[0]
    assert len(set(other.tokens)) > len(set(plain.tokens))
    assert said([other]) == said(
        dg.generate(model, [[1, 2, 3]], max_new_tokens=30, temperature=0, repetition_penalty=50.0, cache=False)
    )


@pytest.mark.parametrize("pattern", ["dense", "dense,mod"])
def test_beams_find_the_best_of_all(pattern):
    """With as many beams as there are continuations, the search is exhaustive: compared with all of them."""
    model = built(pattern, vocab=6)
    prompt = [1, 2, 3]
    with torch.inference_mode():
        scores = {}
        for tokens in product(range(6), repeat=3):
            logits = model(torch.tensor([[*prompt, *tokens]]), causal=True).logits[0].log_softmax(-1)
            scores[tokens] = sum(logits[2 + i, t].item() for i, t in enumerate(tokens))
    best = max(scores, key=scores.get)
    found = dg.generate(model, [prompt], max_new_tokens=3, beams=40)[0]
    assert tuple(found.tokens) == best
    assert said([found]) == said(dg.generate(model, [prompt], max_new_tokens=3, beams=40, cache=False))
    greedy = dg.generate(model, [prompt], max_new_tokens=8, beams=1, temperature=0)[0]
    wide = dg.generate(model, [prompt], max_new_tokens=8, beams=4)[0]
    assert said([wide]) == said(dg.generate(model, [prompt], max_new_tokens=8, beams=4, cache=False))
    assert likelihood(model, prompt, wide.tokens) >= likelihood(model, prompt, greedy.tokens)


@torch.inference_mode()
def likelihood(model, prompt, tokens):
    logits = model(torch.tensor([[*prompt, *tokens]]), causal=True).logits[0].log_softmax(-1)
    return sum(logits[len(prompt) - 1 + i, t].item() for i, t in enumerate(tokens))


BAD = {
    "no prompts": ({"prompts": []}, "prompts is empty"),
    "an empty prompt": ({"prompts": [[]]}, "a prompt is empty"),
    "an empty text": ({"prompts": ""}, "a prompt is empty"),
    "an id too large": (
        {"prompts": [[1, VOCAB]]},
        f"a token id of a prompt is {VOCAB}: it must be a whole number from 0 to {VOCAB - 1}",
    ),
    "a negative id": ({"prompts": [[-1]]}, "a token id of a prompt is -1: it must be a whole number from 0"),
    "a float": ({"prompts": [[1.5]]}, "1.5"),
    "a float tensor": ({"prompts": torch.ones(1, 3)}, "a token id of a prompt is 1.0: it must be a whole number"),
    "a bool": ({"prompts": [[True]]}, "True"),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    "temperature": ({"temperature": -1.0}, "temperature is -1"),
    "top_k": ({"top_k": 0}, "top_k is 0"),
    "top_p": ({"top_p": 1.5}, "top_p is 1.5"),
    "min_p": ({"min_p": -0.1}, "min_p is -0.1"),
    "penalty": ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
    "beams": ({"beams": 0}, "beams is 0"),
    "seeds": ({"seed": [1, 2]}, "seed has 2"),
    "a number among texts": ({"prompts": [[1, 2], 3]}, "a prompt is 3"),
    "bytes": ({"prompts": b"abc"}, "prompts is bytes"),
    "no seed": ({"seed": None}, "seed is None"),
    "no stop": ({"stop": None}, "stop is None"),
    "an empty stop": ({"stop": ""}, "stop is ''"),
    "stop without a tokenizer": ({"stop": "a"}, "no tokenizer"),
    "beams that sample": ({"beams": 2, "top_k": 3}, "beams is 2"),
    "no callback": ({"callback": 3}, "callback is 3"),
    "an unknown option": (
        {"temprature": 1.0},
        "temprature is not an option of Sampling: did you mean temperature?",
    ),
    "text without a tokenizer": ({"prompts": "abc"}, "no tokenizer"),
}


@pytest.mark.parametrize(("given", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_before_anything_is_computed(given, says, monkeypatch):
    model = built()
    if isinstance(given.get("prompts"), str) and not given["prompts"]:
        model.tokenizer = ByteTokenizer()
    monkeypatch.setattr(model, "hidden", lambda *_, **__: pytest.fail("the model was run"))
    with pytest.raises(dg.DepthgateError, match=says):
        dg.generate(model, **{"prompts": [[1, 2]], **given})


@pytest.mark.parametrize("function", [dg.generate, dg.stream])
def test_options_are_shown_with_their_defaults(function):
    shown = inspect.signature(function).parameters
    for option in fields(Sampling):
        assert (shown[option.name].default, shown[option.name].annotation) == (option.default, option.type)
        assert f"{option.name}: " in function.__doc__


def test_a_stream_is_the_same_tokens_one_by_one():
    model = built()
    options = {"max_new_tokens": 6, "seed": 4}
    results = dg.generate(model, [[1, 2], [3]], **options)
    events = dg.stream(model, [[1, 2], [3]], **options)
    first = next(events)  # before the rest is computed
    assert (first.request, first.token) == (0, results[0].tokens[0])
    rest = list(events)
    assert [e.token for e in [first, *rest] if e.request == 1] == results[1].tokens
    with pytest.raises(InvalidValueError):
        dg.stream(model, [[]])  # at once, not when the first token is asked for


def test_beams_call_back_too():
    model = built(vocab=257)
    model.tokenizer = ByteTokenizer()
    seen = []
    result = dg.generate(model, "ab", max_new_tokens=5, beams=3, callback=seen.append)[0]
    assert [event.token for event in seen] == result.tokens
    assert "".join(event.text for event in seen) == result.text
    assert list(dg.stream(model, "ab", max_new_tokens=5, beams=3)) == seen
