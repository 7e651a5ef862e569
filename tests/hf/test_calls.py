"""Calls that cannot be right say so, and name the remedy."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import DynamicCache

import depthgate as dg
from tests.conftest import close
from tests.hf.zoo import dense, plans_of, routed, tokens


@pytest.mark.parametrize("mask", [torch.ones(2, 1, 8, 8), torch.ones(2, 4), torch.ones(3, 8), {"full_attention": None}])
def test_a_mask_that_does_not_tell_padding_is_refused(mask):
    with pytest.raises(dg.DepthgateError, match=r"attention_mask is .* need one of shape \(batch, tokens\)"):
        routed("llama")(tokens(2, 8), attention_mask=mask)


def test_packed_documents_and_a_cache_are_refused():
    with pytest.raises(dg.DepthgateError, match="use_cache=False"):
        routed("llama")(tokens(2, 8), position_ids=torch.arange(8)[None] % 4, use_cache=True)


def test_causal_routing_must_be_a_bool():
    with pytest.raises(dg.DepthgateError, match="causal_routing is 1"):
        routed("llama")(tokens(2, 8), causal_routing=1)


def test_looking_ahead_is_refused():
    with pytest.raises(dg.DepthgateError, match="routed layers look back only"):
        routed("llama")(tokens(2, 8), is_causal=False)


def test_attention_without_a_mask_of_ours_is_refused():
    model = routed("llama")
    model.config._attn_implementation = "paged|eager"
    with pytest.raises(dg.DepthgateError, match=r"paged.eager attention: call model.set_attn_implementation\('sdpa'"):
        model(tokens(2, 8), use_cache=False)


def test_caches_that_cannot_be_ragged_are_refused():
    model, ids = routed("llama"), tokens(2, 8)
    filled = DynamicCache()
    dense("llama")(ids, past_key_values=filled)
    with pytest.raises(dg.DepthgateError, match="start with an empty cache"):
        model(ids, past_key_values=filled)
    with pytest.raises(dg.DepthgateError, match="the cache is a tuple"):
        model.model.layers[0](
            torch.ones(2, 8, 32), past_key_values=(), depthgate_tokens=dg.hf.inputs.Tokens(None, None, None)
        )


def test_a_layer_cannot_be_called_by_itself():
    with pytest.raises(dg.DepthgateError, match="call the whole model"):
        routed("llama").model.layers[0](torch.ones(2, 8, 32))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_expert_logits_and_a_padding_mask_are_refused_together(kind):
    model, ids = routed(kind).train(), tokens(2, 8)
    out = model(ids, labels=ids, output_router_logits=True, use_cache=False)
    assert [len(logits) for logits in out.router_logits] == [4, 16, 16, 4]
    assert out.aux_loss > 0
    with pytest.raises(dg.DepthgateError, match="output_router_logits=False"):
        model(ids, labels=ids, output_router_logits=True, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_a_layer_that_no_token_enters_is_not_computed_and_stores_nothing(use_cache):
    model, ids = routed("llama"), tokens(2, 8)
    model.model.layers[0].depth_router.proj.bias.fill_(-1e3)
    calls = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    out = model(ids, use_cache=use_cache)
    assert not calls
    if use_cache:
        assert out.past_key_values.layers[0].keys is None
        assert out.past_key_values.get_seq_length() == 8
    del model.model.layers[0]  # without it the rest computes the same
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = i
    model.config.num_hidden_layers = 3
    close(model(ids, use_cache=use_cache).logits, out.logits)


@torch.no_grad()
def test_rows_that_skip_are_not_computed_when_others_are():
    model, ids = routed("llama"), tokens(3, 8)
    cache = DynamicCache(config=model.config)
    rows = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    with plans_of(model) as plans:
        for t in range(8):
            model(ids[:, t : t + 1], past_key_values=cache)
    entering = [int(plan.chosen.sum()) for plan in plans[::2]]
    assert rows == [n for n in entering if n]
    assert 0 < sum(rows) < 24


def test_a_chunked_prefill_and_samples_go_through_the_cache():
    model, ids = routed("gemma3_text"), tokens(2, 11)
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    plain = model.generate(ids, **how, use_cache=False)
    assert torch.equal(model.generate(ids, **how, prefill_chunk_size=4), plain)
    sampled = {**how, "do_sample": True, "num_return_sequences": 2, "top_k": 5}
    found = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        found.append(model.generate(ids, **sampled, use_cache=use_cache))
    assert torch.equal(*found)


@torch.no_grad()
def test_a_cache_can_be_cropped_reordered_and_used_again():
    model, ids = routed("llama"), tokens(3, 12)
    want = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    model(torch.cat([ids[:, :7], tokens(3, 4, seed=8)], 1), past_key_values=cache)
    cache.crop(-4)
    assert cache.get_seq_length() == 7
    rows = torch.tensor([2, 0, 2])
    cache.reorder_cache(rows)
    close(model(ids[rows, 7:], past_key_values=cache).logits, want[rows, 7:])
    cache.crop(-5)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    close(model(ids[[0, 0], 7:], past_key_values=cache).logits, want[[0, 0], 7:])
    cache.reset()
    close(model(ids, past_key_values=cache).logits, want)
    with pytest.raises(dg.DepthgateError, match="negative"):
        cache.layers[0].crop(3)


@torch.no_grad()
def test_a_decoder_called_without_its_head_routes_as_with_it():
    model, ids = routed("llama"), tokens(2, 9)
    close(model.lm_head(model.model(ids).last_hidden_state), model(ids).logits)
    embedded = model.model(inputs_embeds=model.get_input_embeddings()(ids)).last_hidden_state
    close(model.lm_head(embedded), model(ids).logits)


def test_generation_is_causal_in_training_mode_too():
    model, ids = routed("llama"), tokens(2, 8)
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **how)
    assert torch.equal(model.train().generate(ids, **how), want)


def test_training_with_the_cache_on_is_training():
    """transformers makes a cache unless told not to, in training too."""
    model, ids = routed("llama").train(), tokens(2, 12)
    losses = [model(ids, labels=ids, use_cache=use_cache).loss for use_cache in (True, False)]
    close(*losses)
    grads = [torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) for loss in losses]
    for a, b in zip(*grads, strict=True):
        if a is not None:
            close(a, b)
