"""A static cache has a place for every token and is right for every family; a step with it is one graph."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import CompileConfig, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer

import depthgate as dg
from depthgate.hf.families import decoder_layers
from tests.conftest import close
from tests.hf.zoo import FAMILY_NAMES, ROUTED, dense, routed, tokens

GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


def left_padded(rows, length):
    return tokens(rows, length), (torch.arange(length) >= 3 * torch.arange(rows)[:, None]).long()


@pytest.mark.parametrize("kind", FAMILY_NAMES)
def test_generation_with_a_static_cache_is_that_without_a_cache(kind):
    """Windows are shorter than the prompts; the rows begin at different places."""
    model, (ids, mask) = routed(kind), left_padded(3, 9)
    how = {**GREEDY, "attention_mask": mask}
    static = {"cache_implementation": "static"}
    assert torch.equal(model.generate(ids, **how, **static), model.generate(ids, **how, use_cache=False))
    beams = {**how, "num_beams": 2, "max_new_tokens": 5}
    assert torch.equal(model.generate(ids, **beams, **static), model.generate(ids, **beams, use_cache=False))


@pytest.mark.parametrize("rule", ["predictor", "threshold"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@torch.no_grad()
def test_pieces_of_any_length_give_the_logits_of_one_pass(kind, rule):
    model, ids = routed(kind, rule=rule), tokens(3, 20)
    want = model(ids, use_cache=False).logits
    cache = StaticCache(model.config, max_cache_len=24)
    for _ in range(2):
        got, done = [], 0
        for piece in ids.split((2, 9, 1, 1, 6, 1), 1):
            pos = torch.arange(done, done + piece.shape[1])[None]
            got.append(model(piece, past_key_values=cache, position_ids=pos).logits)
            done += piece.shape[1]
            assert {int(layer.get_seq_length()) for layer in cache.layers} == {done}
        close(torch.cat(got, 1), want)
        cache.reset()


@torch.no_grad()
def test_a_prompt_in_a_window_is_not_compared_with_the_places_of_an_empty_cache():
    model, ids = routed("mistral", "eager"), tokens(2, 20)
    out = model(ids, past_key_values=StaticCache(model.config, max_cache_len=24), output_attentions=True)
    close(out.logits, model(ids, use_cache=False).logits)
    assert all(out.attentions[i].shape[2] == out.attentions[i].shape[3] for i in ROUTED)


@torch.no_grad()
def test_a_prompt_of_which_no_token_enters_leaves_room_for_later_ones():
    model, ids = routed("llama"), tokens(2, 10)
    for layer in dg.hf.routed_layers(model):
        layer.depth_router.proj.bias.fill_(-1e3)
    cache = StaticCache(model.config, max_cache_len=12)
    model(ids[:, :4], past_key_values=cache)
    assert all(layer.is_initialized for layer in cache.layers)
    assert not (cache.layers[0].slots[:, :12] >= 0).any()
    want = model(ids, use_cache=False).logits[:, 4:]
    close(model(ids[:, 4:], past_key_values=cache).logits, want)


def test_a_decoding_step_is_one_graph_and_compiled_once():
    model, (ids, mask) = routed("llama"), left_padded(2, 9)
    del decoder_layers(model)[2:]  # a routed one and a dense one are left
    model.config.num_hidden_layers = 2
    how = {**GREEDY, "attention_mask": mask}
    compiled = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiled._compile_all_devices = True
    torch._dynamo.utils.counters.clear()
    got = model.generate(ids, **how, cache_implementation="static", compile_config=compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(got, model.generate(ids, **how, use_cache=False))


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_a_forward_that_is_compiled_by_hand_generates(cache):
    """Compiled code cannot see that positions are of one document."""
    model, ids = routed("llama"), tokens(2, 8)
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **how, use_cache=False)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(ids, **how, cache_implementation=cache), want)


def test_offloaded_and_quantised_caches_are_refused_by_name():
    for model in (routed("llama"), dg.hf.convert(dense("llama"))):  # the first layer routed, or not
        for named in ("offloaded", "offloaded_static"):
            with pytest.raises(dg.DepthgateError, match="offloaded cache: use cache_implementation='dynamic'"):
                model.generate(tokens(2, 8), max_new_tokens=2, cache_implementation=named)
    kind = type("Int4Layer", (QuantizedLayer,), {"_quantize": None, "_dequantize": None})
    quantised = Cache(layers=[kind() for _ in range(4)])
    with pytest.raises(dg.DepthgateError, match="a Int4Layer: use cache_implementation='dynamic'"):
        routed("llama")(tokens(2, 8), past_key_values=quantised)
