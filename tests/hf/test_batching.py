"""Continuous batching of converted models by our engine, through transformers' own doors."""

import asyncio

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import depthgate as dg
from tests.hf.words import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("batching") / "model", capacity=0.5)


@pytest.fixture(scope="module")
def model(folder):
    """Converted, with routers that say yes and no."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if "depth_router" in name:
            torch.nn.init.normal_(weight, std=1.0)
    return model


PROMPTS = [[1, 5, 9, 30], [1, 7], [1, 40, 41, 42, 43, 44, 45]]


def generated(model, prompt, **options):
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def test_a_batch_is_what_generate_says(model):
    config = model.generation_config
    config.max_new_tokens, config.do_sample = 20, False
    found = model.generate_batch(PROMPTS, generation_config=config)
    assert [each.generated_tokens for each in found.values()] == [generated(model, p) for p in PROMPTS]
    assert all(each.is_finished() and each.error is None for each in found.values())
    end = list(found.values())[1].generated_tokens[5]
    config.eos_token_id = [end, 1]
    cut = model.generate_batch(PROMPTS, generation_config=config)
    assert [each.generated_tokens for each in cut.values()] == [generated(model, p) for p in PROMPTS]
    assert list(cut.values())[1].generated_tokens[-1] == end
    config.eos_token_id = 2


@pytest.mark.parametrize("saved", [None, ["depth_router"]])
def test_an_adapter_is_merged_first(folder, saved):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'depthgate[finetune]'")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).eval()
    with pytest.raises(dg.DepthgateError, match=r"has an adapter.*merge_and_unload\(\)"):
        adapted.generate_batch(PROMPTS, generation_config=GenerationConfig(max_new_tokens=4, do_sample=False))
    merged = adapted.merge_and_unload()
    config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=2, eos_token_id=2)
    found = merged.generate_batch(PROMPTS, generation_config=config)
    assert [each.generated_tokens for each in found.values()] == [
        generated(merged, p, generation_config=config) for p in PROMPTS
    ]


def test_sampling_follows_the_config_and_torchs_seed(model):
    config = GenerationConfig(do_sample=True, top_k=5, temperature=0.7, max_new_tokens=12, eos_token_id=2)

    def said(seed):
        manager = model.init_continuous_batching(config)
        manager.start()
        torch.manual_seed(seed)
        names = manager.add_requests(PROMPTS)
        manager.stop()
        found = {each.request_id: each.generated_tokens for each in manager.request_id_iter(None)}
        return [found[name] for name in names]

    assert said(1) == said(1) != said(2)
    torch.manual_seed(1)
    seeds = [int(torch.randint(2**62, ())) for _ in PROMPTS]
    plain = dg.generate(dg.hf.to_decoder(model), PROMPTS, seed=seeds, top_k=5, temperature=0.7, max_new_tokens=12)
    assert said(1) == [each.tokens[: each.tokens.index(2) + 1] if 2 in each.tokens else each.tokens for each in plain]


def test_options_that_the_engine_does_not_have_are_refused(model):
    config = type(model.generation_config)(no_repeat_ngram_size=2, max_new_tokens=4)
    with pytest.raises(dg.DepthgateError, match="does not know no_repeat_ngram_size"):
        model.init_continuous_batching(config)


def test_requests_come_and_go(model):
    manager = model.init_continuous_batching()
    with pytest.raises(dg.DepthgateError, match="start"):
        manager.add_request([1, 5])
    manager.start()
    with pytest.raises(dg.DepthgateError, match="token id"):
        manager.add_request([10**6])
    with pytest.raises(dg.DepthgateError, match="temperature is not an option"):
        manager.add_request([1, 5], temperature=0.5)
    name = manager.add_request([1, 5], max_new_tokens=8, streaming=True, eos_token_id=-1)
    parts = list(manager.request_id_iter(name))
    assert [len(part.generated_tokens) for part in parts] == list(range(1, 9))
    gone = manager.add_request([1, 5], max_new_tokens=500, eos_token_id=-1)
    manager.cancel_request(gone)
    other = manager.add_request([1, 7], max_new_tokens=3, eos_token_id=-1)
    manager.stop()  # what runs is finished
    assert not manager.is_running()
    assert [each.request_id for each in manager.request_id_iter(None)] == [other]
    assert manager.engine.running == manager.engine.waiting == 0


def test_an_engine_that_fails_says_so(model):
    manager = model.init_continuous_batching()
    manager.start()
    manager.engine.batch = None  # a fault
    name = manager.add_request([1, 5], max_new_tokens=4)
    (output,) = manager.request_id_iter(name)
    assert output.error
    assert output.is_finished()
    assert manager.background_thread_status.fatal_error is not None
    with pytest.raises(dg.DepthgateError, match="start"):
        manager.add_request([1, 5])


def test_the_server_of_transformers_streams_and_completes(folder, model):
    utils = pytest.importorskip("transformers.cli.serving.utils", exc_type=ImportError)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = model.generation_config
    config.max_new_tokens, config.do_sample = 10, False

    async def main():
        server = utils.CBGenerateManager()
        server.init_cb(model, config)
        whole = await server.generate_non_streaming(model, tokenizer, {"input_ids": PROMPTS[0]}, config, "one")
        queue, streamer = server.generate_streaming(model, tokenizer, {"input_ids": PROMPTS[0]}, config, "two")
        parts = []
        while (part := await queue.get()) is not None:
            parts.append(part)
        assert server.is_alive()
        server.stop()
        return whole, parts, streamer.total_tokens

    (text, prompt, tokens), parts, count = asyncio.run(main())
    assert (prompt, tokens) == (len(PROMPTS[0]), generated(model, PROMPTS[0]))
    assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(parts).split() == text.split()
    assert count == len(tokens)


def test_a_prompt_that_is_refused_fails_alone(model):
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    first, *refused, last = model.generate_batch([PROMPTS[0], [10**6], [], [1] * 10**4, PROMPTS[1]], config).values()
    for output, words in zip(
        refused, ("is 1000000: it must be", "is empty: give", "context is 128: shorten"), strict=True
    ):
        assert output.is_finished()
        assert words in output.error
    for output, prompt in ((first, PROMPTS[0]), (last, PROMPTS[1])):
        assert output.error is None
        assert output.generated_tokens == generated(model, prompt, max_new_tokens=4, do_sample=False)
