"""Answers to the real `openai` client are those of dg.generate."""

import math

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import depthgate as dg
from depthgate.config import ModelConfig
from depthgate.flops import forward_flops, sequence_flops

SAID = "the quick"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"seed": 7},
        {"seed": 8, "top_p": 0.8, "temperature": 1.3, "top_k": 9, "min_p": 0.01},
        {"seed": 9, "repetition_penalty": 1.4},
        {"seed": 3, "stop": ["e", "zz"]},
        {"seed": 4, "stop": "o"},
    ],
)
def test_a_completion_is_what_generate_says_whole_and_in_parts(server, model, options):
    (result,) = dg.generate(model, SAID, max_new_tokens=40, **options)
    theirs = {name: options[name] for name in ("temperature", "seed", "top_p", "stop") if name in options}
    asked = {"model": "tiny", "prompt": SAID, "max_tokens": 40, **theirs}
    asked["extra_body"] = {name: value for name, value in options.items() if name not in theirs}
    done = server.client().completions.create(**asked)
    (choice,) = done.choices
    assert (choice.text, choice.index, choice.logprobs) == (result.text, 0, None)
    assert choice.finish_reason == {"end": "stop"}.get(result.finish, result.finish)
    assert (done.object, done.model) == ("text_completion", "tiny")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (9, len(result.tokens))
    assert done.usage.total_tokens == 9 + len(result.tokens)

    *parts, last = server.client().completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(part.choices[0].text for part in parts) == result.text
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
    assert len({part.id for part in (*parts, last)}) == 1
    assert last.choices == []
    assert last.usage == done.usage
    assert all(part.usage is None for part in parts)


def test_usage_says_how_deep_tokens_went(server, model):
    done = server.client().completions.create(model="tiny", prompt=SAID, max_tokens=30, seed=1, n=5)
    results = [dg.generate(model, SAID, max_new_tokens=30, seed=1 + i)[0] for i in range(5)]
    depth, depths = done.usage.depth, [each for result in results for each in result.depths]
    assert depth["layers"] == 2
    assert depth["mean_layers"] == sum(depths) / len(depths)
    assert 1 < depth["mean_layers"] < 2
    taken = sum(sequence_flops(model.config, len(result.depths), result.routed) for result in results)
    assert depth["flops_saved"] == 1 - taken / sum(sequence_flops(model.config, len(r.depths)) for r in results)


def test_flops_of_a_sequence_agree_with_those_of_a_model():
    mod = ModelConfig(pattern="dense,mod", capacity=0.25)
    staged = ModelConfig(pattern="mode_staged", first="dense", capacity=0.5)
    for config, rows in ((mod, [25, 25]), (staged, [50, 50, 50])):
        assert math.isclose(sequence_flops(config, 100, rows), 100 * forward_flops(config, 100))
    dense = ModelConfig(pattern="dense")
    assert sequence_flops(mod, 100) == sequence_flops(dense, 100) == 100 * forward_flops(dense, 100)
    assert sequence_flops(mod, 100, [0, 0]) < sequence_flops(mod, 100, [1, 0]) < sequence_flops(mod, 100)


def test_prompts_of_every_kind_and_several_of_each(server, model):
    client = server.client()
    ids = list(SAID.encode())
    for prompt, prompts in ((SAID, [SAID]), ([SAID, "a"], [SAID, "a"]), (ids, [SAID]), ([ids, [97]], [SAID, "a"])):
        done = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, seed=5, n=2)
        expected = [dg.generate(model, text, max_new_tokens=12, seed=seed)[0] for text in prompts for seed in (5, 6)]
        assert [choice.text for choice in done.choices] == [result.text for result in expected]
        assert [choice.index for choice in done.choices] == list(range(len(expected)))
        assert done.usage.prompt_tokens == sum(map(len, prompts))
        assert done.usage.completion_tokens == sum(len(result.tokens) for result in expected)
        texts = [""] * len(expected)
        for part in client.completions.create(model="tiny", prompt=prompt, max_tokens=12, seed=5, n=2, stream=True):
            texts[part.choices[0].index] += part.choices[0].text
        assert texts == [result.text for result in expected]


def test_without_a_seed_texts_differ_and_few_tokens_come(server):
    texts = [server.client().completions.create(model="tiny", prompt=SAID).choices[0].text for _ in range(3)]
    assert len(set(texts)) > 1
    assert max(map(len, texts)) <= 16


def test_log_probabilities_are_the_models(server, model):
    ids = list(SAID.encode())
    done = server.client().completions.create(
        model="tiny", prompt=SAID, max_tokens=9, temperature=0.5, seed=2, logprobs=3
    )
    (result,) = dg.generate(model, SAID, max_new_tokens=9, temperature=0.5, seed=2)
    shown, text = done.choices[0].logprobs, done.choices[0].text
    assert text.isascii()  # each character is a token
    with torch.no_grad():
        logits = model(torch.tensor([ids + result.tokens[:-1]]), causal=True).logits[0, len(ids) - 1 :]
    expected = logits.float().log_softmax(-1)
    assert "".join(shown.tokens) == text
    assert shown.text_offset == list(range(len(text)))
    for i, token in enumerate(result.tokens):
        assert math.isclose(shown.token_logprobs[i], float(expected[i, token]), rel_tol=1e-4, abs_tol=1e-4)
        top = [chr(n) for n in expected[i].topk(3).indices.tolist()]
        assert list(reversed(shown.top_logprobs[i])) == top


def said_in_chat(model, messages, **options):
    ids = [i for role, text in messages for i in (256, *f"{role}: {text}\n".encode())]
    return dg.generate(model, [[*ids, *b"assistant: "]], **options)[0]


def test_a_chat_is_the_template_continued(server, model):
    client = server.client()
    talk = [{"role": "system", "content": "be quick"}, {"role": "user", "content": [{"type": "text", "text": " hi "}]}]
    told = [("system", "be quick"), ("user", "hi")]
    how = {"model": "tiny", "messages": talk, "seed": 3}
    done = client.chat.completions.create(**how, max_completion_tokens=20)
    result = said_in_chat(model, told, max_new_tokens=20, seed=3)
    message = done.choices[0].message
    assert (message.role, message.content) == ("assistant", result.text)
    assert (done.object, done.usage.prompt_tokens) == ("chat.completion", len(result.prompt_tokens))
    parts = list(client.chat.completions.create(**how, max_tokens=20, stream=True, logprobs=True, top_logprobs=2))
    assert {part.object for part in parts} == {"chat.completion.chunk"}
    assert "".join(part.choices[0].delta.content for part in parts) == result.text
    assert [part.choices[0].delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
    shown = [token for part in parts for token in part.choices[0].logprobs.content]
    assert [bytes(each.bytes)[:1] for each in shown] == [bytes([i]) if i < 256 else b"<" for i in result.tokens]
    assert all(len(each.top_logprobs) == 2 for each in shown)
    longest = client.chat.completions.create(**how)  # as much as there is room for, unless it ends before
    assert longest.choices[0].message.content == said_in_chat(model, told, max_new_tokens=256, seed=3).text


def test_words_that_spell_a_special_token_stay_words(server):
    talk = [{"role": "user", "content": "a<|endoftext|>b"}]
    done = server.client().chat.completions.create(model="tiny", messages=talk, max_tokens=1)
    assert done.usage.prompt_tokens == 1 + len("user: a<|endoftext|>b\nassistant: ")


def test_a_template_may_refuse(server):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    with pytest.raises(openai.BadRequestError, match="it is your turn"):
        server.client().chat.completions.create(model="tiny", messages=talk)


def test_the_model_is_listed(server):
    client = server.client()
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "depthgate"
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.models.retrieve("other")


def test_metrics_count_what_was_done(start, model):
    server = start()
    client = server.client()
    results = dg.generate(model, [SAID, "a"], max_new_tokens=20, seed=0)
    client.completions.create(model="tiny", prompt=[SAID, "a"], max_tokens=20, seed=0)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=SAID)
    page = client.get(f"{server.url}/metrics", cast_to=str)
    kinds = dict(line.split()[2:] for line in page.splitlines() if line.startswith("# TYPE"))
    assert kinds["depthgate_time_to_first_token_seconds"] == "histogram"
    assert kinds["depthgate_generated_tokens_total"] == "counter"
    assert kinds["depthgate_requests_running"] == "gauge"
    found = {s.name + s.labels.get("status", s.labels.get("le", "")): s.value
             for family in text_string_to_metric_families(page) for s in family.samples}  # fmt: skip
    assert found["depthgate_requests_total200"] == found["depthgate_requests_total404"] == 1
    assert found["depthgate_requests_running"] == found["depthgate_requests_waiting"] == 0
    tokens = [len(result.tokens) for result in results]
    assert found["depthgate_prompt_tokens_total"] == 10
    assert found["depthgate_generated_tokens_total"] == sum(tokens)
    assert found["depthgate_layers_total"] == 2 * sum(len(result.depths) for result in results)
    assert found["depthgate_layers_skipped_total"] == sum(2 - d for result in results for d in result.depths)
    assert found["depthgate_time_to_first_token_seconds_bucket+Inf"] == 2
    assert found["depthgate_token_latency_seconds_count"] == sum(tokens) - 2
    assert found["depthgate_token_latency_seconds_sum"] > 0
