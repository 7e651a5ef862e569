"""Further ways of generating, each held to the same text without a cache."""

import inspect

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import DynamicCache, GenerationMixin

from depthgate.hf.cache_transformers import RaggedLayer
from tests.conftest import close
from tests.hf.zoo import FAMILY_NAMES, dense, routed, tokens

families = pytest.mark.parametrize("kind", FAMILY_NAMES)
some = pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
HOW = {"do_sample": False, "eos_token_id": None}


def left_padded(rows, length):
    return tokens(rows, length), (torch.arange(length) >= 3 * torch.arange(rows)[:, None]).long()


def longer(mask, count):
    return torch.cat([mask, mask.new_ones(len(mask), count)], 1)


@families
def test_a_conversation_goes_on_with_its_cache(kind):
    """A turn, new words by the user, another turn: the same as all of it without a cache."""
    model, (ids, mask) = routed(kind), left_padded(2, 8)
    first = model.generate(ids, attention_mask=mask, **HOW, max_new_tokens=3, return_dict_in_generate=True)
    said = torch.cat([first.sequences, tokens(2, 3, seed=4)], 1)
    how = {**HOW, "attention_mask": longer(mask, 6), "max_new_tokens": 4}
    got = model.generate(said, **how, past_key_values=first.past_key_values)
    assert torch.equal(got, model.generate(said, **how, use_cache=False))


@some
def test_a_cache_that_was_made_in_inference_mode_goes_on_outside_it(kind):
    model, ids = routed(kind), tokens(2, 12)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :8], past_key_values=cache)
        model(ids[:, 8:9], past_key_values=cache)  # makes room that the next ones are written into
    with torch.no_grad():
        got = model(ids[:, 9:], past_key_values=cache).logits
        close(got, model(ids).logits[:, 9:])


@some
def test_a_static_cache_gets_padding_of_one_kind_with_and_without_any(kind):
    """Where it was a tensor for one batch and None for another, a step was compiled twice."""
    model, (ids, mask) = routed(kind), left_padded(2, 8)
    found = []
    hook = model.register_forward_pre_hook(lambda *call: found.append(call[2].get("token_mask")), with_kwargs=True)
    for given in (mask, torch.ones_like(mask)):
        model.generate(ids, attention_mask=given, cache_implementation="static", **HOW, max_new_tokens=3)
    hook.remove()
    steps = [*found[1:3], *found[4:]]  # what comes after the text was read is compiled
    assert len(steps) == 4
    assert all(torch.equal(each, torch.ones(2, 1, dtype=torch.long)) for each in steps)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_cache_has_little_more_room_than_it_needs(kind):
    model = routed(kind)
    made = model.generate(tokens(2, 900), **HOW, max_new_tokens=70, return_dict_in_generate=True)
    ragged = [layer for layer in made.past_key_values.layers if isinstance(layer, RaggedLayer)]
    for layer in ragged:
        longest = int((layer.slots >= 0).sum(1).max())
        assert 64 < longest < 900 or layer.keys.shape[2] <= layer.window - 1
        assert layer.keys.shape[2] == layer.values.shape[2] == layer.slots.shape[1] <= longest + 64
    assert ragged


@families
def test_embeddings_as_input_give_the_text_of_their_tokens(kind):
    model, (ids, mask) = routed(kind), left_padded(2, 8)
    how = {**HOW, "attention_mask": mask, "max_new_tokens": 5}
    want = model.generate(ids, **how, use_cache=False)[:, 8:]
    embedded = dense(kind).get_input_embeddings()(ids)  # gemma's scale themselves
    for more in ({}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(inputs_embeds=embedded, **how, **more), want)


@some
def test_beams_that_sample_or_return_many_and_guidance(kind):
    model, (ids, mask) = routed(kind), left_padded(2, 8)
    for more in (
        {"num_beams": 3, "do_sample": True},
        {"num_beams": 4, "num_return_sequences": 3},
        {"guidance_scale": 1.5},
        {"prefill_chunk_size": 3},
    ):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            how = {**HOW, "attention_mask": mask, "max_new_tokens": 5, **more, "use_cache": use_cache}
            if not use_cache:
                how.pop("prefill_chunk_size", None)
            found.append(model.generate(ids, **how))
        assert torch.equal(*found), more


@families
def test_one_padded_row_with_an_assistant_and_with_lookup(kind):
    model, (ids, mask) = routed(kind, rule="predictor"), left_padded(3, 12)
    ids = tokens(1, 4).repeat(1, 3)
    how = {**HOW, "attention_mask": mask[1:2], "max_new_tokens": 8}
    want = model.generate(ids, **how, use_cache=False)
    for more in (
        {"assistant_model": model},  # whatever it drafts is right
        {"assistant_model": routed(kind, rule="threshold")},
        {"prompt_lookup_num_tokens": 3},
    ):
        assert torch.equal(model.generate(ids, **how, **more), want)


@some
@torch.no_grad()
def test_half_precision_generates_with_a_cache_as_without(kind):
    model, (ids, mask) = routed(kind).bfloat16(), left_padded(3, 8)
    how = {**HOW, "attention_mask": mask, "max_new_tokens": 4}
    assert torch.equal(model.generate(ids, **how), model.generate(ids, **how, use_cache=False))


@some
@torch.no_grad()
def test_rows_that_end_early_leave_the_others_alone(kind):
    """An end is followed by padding, which must not enter a layer."""
    model, ids = routed(kind), tokens(3, 8)
    free = model.generate(ids, **{**HOW, "max_new_tokens": 8}, use_cache=False)
    end = int(free[0, 10])
    how = {"do_sample": False, "eos_token_id": end, "pad_token_id": 0, "max_new_tokens": 8}
    assert torch.equal(model.generate(ids, **how), model.generate(ids, **how, use_cache=False))


@some
@torch.no_grad()
def test_only_the_last_logits_and_a_batch_that_shrinks(kind):
    model, ids = routed(kind), tokens(3, 10)
    want = model(ids, use_cache=False).logits
    close(model(ids, logits_to_keep=2, use_cache=False).logits, want[:, -2:])
    cache = DynamicCache(config=model.config)
    model(ids[:, :6], past_key_values=cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    close(model(ids[[2, 0], 6:], past_key_values=cache).logits, want[[2, 0], 6:])


@families
def test_generate_sees_the_arguments_of_the_familys_own_method(kind):
    own, theirs = (type(m).prepare_inputs_for_generation for m in (routed(kind), dense(kind)))
    assert inspect.signature(own) == inspect.signature(theirs)
    assert isinstance(routed(kind), GenerationMixin)
