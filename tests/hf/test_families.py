"""Every family: neutral at birth, causal, the same with a cache as without, packed as apart, checkpointed as not."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import DynamicCache

import depthgate as dg
from depthgate.hf.families import decoder_layers
from tests.conftest import close
from tests.hf.zoo import FAMILY_NAMES, dense, plans_of, routed, tokens

families = pytest.mark.parametrize("kind", FAMILY_NAMES)
attentions = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def left_padded(rows: int, length: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Tokens, their padding mask and positions; the rows begin at different places."""
    ids = tokens(rows, length)
    mask = (torch.arange(length) >= 3 * torch.arange(rows)[:, None]).long()
    return ids, {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@families
@attentions
@torch.no_grad()
def test_at_capacity_one_the_logits_are_those_of_the_dense_model(kind, attention):
    ids, left = left_padded(3, 14)
    right = {"attention_mask": left["attention_mask"].flip(1)}
    model = dense(kind, attention)
    calls = [{}, {"use_cache": False}, left, right, {"position_ids": torch.arange(14)[None] % 8, "use_cache": False}]
    before = [model(ids, **call).logits for call in calls]
    loss = model(ids, labels=ids, use_cache=False).loss
    assert dg.hf.convert(model, 1.0, [0, 3]) is model
    for call, want in zip(calls, before, strict=True):
        real = call.get("attention_mask", torch.ones_like(ids)).bool()
        for causal in (True, False):
            close(model(ids, **call, causal_routing=causal).logits[real], want[real])
        close(model.train()(ids, **call).logits[real], want[real])
        model.eval()
    close(model(ids, labels=ids, use_cache=False, causal_routing=False).loss, loss)
    if attention == "sdpa":  # without padding the very same kernels run
        assert torch.equal(model(ids, use_cache=False).logits, before[1])


@families
@attentions
@torch.no_grad()
def test_in_pieces_with_a_cache_the_logits_are_those_of_one_pass_without(kind, attention):
    model = routed(kind, attention)
    ids, call = left_padded(3, 16)
    with plans_of(model) as plans:
        want = model(ids, **call, use_cache=False).logits
    share = torch.cat([p.chosen[call["attention_mask"].bool()] for p in plans]).float().mean()
    assert 0.15 < share < 0.6
    cache, got, done = DynamicCache(config=model.config), [], 0
    for piece in (9, 3, 1, 1, 1, 1):
        now = slice(done, done + piece)
        mask, pos = call["attention_mask"][:, : done + piece], call["position_ids"][:, now]
        got.append(model(ids[:, now], attention_mask=mask, position_ids=pos, past_key_values=cache).logits)
        done += piece
        assert {layer.get_seq_length() for layer in cache.layers} == {done}
    real = call["attention_mask"].bool()
    close(torch.cat(got, 1)[real], want[real])
    for i, plan in zip((0, 3), plans, strict=True):  # what skipped stores nothing
        layer = cache.layers[i]
        window = getattr(layer, "window", done + 1)
        stored = (layer.slots > done - window).sum(1)
        assert torch.equal(stored, plan.chosen[:, max(0, done - window + 1) :, 0].sum(1))
        assert layer.keys.shape[2] <= (window - 1 if window <= done else 1.25 * stored.max() + 1)


@families
@attentions
def test_greedy_generation_with_a_cache_is_that_without(kind, attention):
    model = routed(kind, attention)
    ids, call = left_padded(3, 9)
    how = {"attention_mask": call["attention_mask"], "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **how), model.generate(ids, **how, use_cache=False))


@families
def test_beams_prompt_lookup_and_assisted_decoding_agree_with_no_cache(kind):
    model = routed(kind)
    ids, call = left_padded(2, 9)
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    beams = {**how, "attention_mask": call["attention_mask"], "num_beams": 3}
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, **beams, use_cache=False))
    one = tokens(1, 6).repeat(1, 3)  # a text that repeats itself has something to look up
    plain = model.generate(one, **how, use_cache=False)
    assert torch.equal(model.generate(one, **how, prompt_lookup_num_tokens=4), plain)
    assert torch.equal(model.generate(one, **how, assistant_model=dense(kind)), plain)
    assert torch.equal(model.generate(one, **how, assistant_model=routed(kind, rule="threshold")), plain)


@families
@torch.no_grad()
def test_no_token_sees_a_later_one(kind):
    model = routed(kind)
    ids = tokens(2, 12)
    other = ids.clone()
    other[:, 7:] = tokens(2, 5, seed=9)
    close(model(ids, use_cache=False).logits[:, :7], model(other, use_cache=False).logits[:, :7])


@families
@torch.no_grad()
def test_packed_documents_are_as_if_apart(kind):
    model = routed(kind)
    ids, lengths = tokens(2, 15), (6, 1, 8)
    pos = torch.cat([torch.arange(n) for n in lengths])[None]
    for causal in (True, False):
        packed = model(ids, position_ids=pos, use_cache=False, causal_routing=causal).logits
        apart = [model(part, use_cache=False, causal_routing=causal).logits for part in ids.split(lengths, 1)]
        close(packed, torch.cat(apart, 1))


@families
@torch.no_grad()
def test_padding_changes_nothing_in_training(kind):
    """The top k of each row's real tokens, whichever side the padding is on."""
    model = routed(kind)
    ids = tokens(1, 9)
    want = model(ids, use_cache=False, causal_routing=False).logits
    padding, zeros, ones = tokens(1, 4, seed=5), torch.zeros(1, 4), torch.ones(1, 9)
    right = model(
        torch.cat([ids, padding], 1), attention_mask=torch.cat([ones, zeros], 1), causal_routing=False, use_cache=False
    )
    close(right.logits[:, :9], want)
    left = model(
        torch.cat([padding, ids], 1),
        attention_mask=torch.cat([zeros, ones], 1),
        position_ids=torch.cat([zeros, torch.arange(9)[None]], 1).long(),
        causal_routing=False,
        use_cache=False,
    )
    close(left.logits[:, 4:], want)


@families
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(kind, reentrant):
    ids = tokens(2, 12)

    def gradients(checkpointed: bool) -> dict[str, torch.Tensor]:
        model = routed(kind, rule="predictor").train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(ids, labels=ids, use_cache=False).loss.backward()
        model(ids, labels=ids, attention_mask=(torch.arange(12) < torch.tensor([[12], [9]])).long()).loss.backward()
        model(ids, labels=ids, position_ids=torch.arange(12)[None] % 7, use_cache=False).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    plain, again = gradients(False), gradients(True)
    assert plain.keys() == again.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    for part in ("proj.weight", "rule.down.weight"):
        assert all(plain[name].abs().max() > 0 for name in plain if name.endswith(f"depth_router.{part}"))


@pytest.mark.parametrize("kind", FAMILY_NAMES)
def test_a_forward_pass_of_training_compiles_to_one_graph(kind):
    """Padded rows, top k; the loss stands outside, as transformers' own of GPT-2 breaks the graph."""
    ids, mask = tokens(2, 12), (torch.arange(12) < torch.tensor([[12], [9]])).long()
    found = []
    for compiled in (False, True):
        model = routed(kind, rule="predictor").train()
        layers = decoder_layers(model)
        del layers[1 : 3 if kind in ("qwen3", "gemma3_text") else 4]  # a routed layer of each kind is left
        model.config.num_hidden_layers = len(layers)
        call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        logits = call(ids, attention_mask=mask, use_cache=False).logits
        logits[mask.bool()].logsumexp(-1).sum().backward()
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        found.append({"logits": logits[mask.bool()].detach(), **grads})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


@families
@torch.no_grad()
def test_hidden_states_and_attentions_are_recorded(kind):
    out = routed(kind, "eager")(tokens(2, 8), output_hidden_states=True, output_attentions=True, use_cache=False)
    assert [tuple(h.shape) for h in out.hidden_states] == [(2, 8, 32)] * 5
    assert len(out.attentions) == 4
