"""Every kind of attention of transformers gives what sdpa gives: flex by its mask, flash by where runs begin."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DataCollatorWithFlattening, DynamicCache
from transformers.masking_utils import flash_attention_mask

import depthgate as dg
from depthgate.hf.inputs import run_starts
from tests.conftest import close
from tests.hf.zoo import plans_of, routed, tokens

NONE = -1


def runs_by_hand(module, query, key, value, attention_mask, scaling, **kwargs):
    """What flash attention computes, run by run: q (B, H, Q, d) to k (B, G, K, d); without starts, each row is a run.
    The last query of a run looks at its last key, the one before it at all but that, and so on."""
    (B, H, Q, d), K = query.shape, key.shape[2]
    q, k, v = (t.transpose(1, 2).reshape(-1, t.shape[1], d) for t in (query, key, value))
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    q_starts, k_starts = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if q_starts is None and attention_mask is not None:  # padding, of layers that are not routed
        allowed = attention_mask[:, None, None, :].bool() & torch.ones(Q, K, dtype=torch.bool).tril(K - Q)
        allowed |= ~allowed.any(-1, keepdim=True)
        grouped = [t.repeat_interleave(H // t.shape[1], 1) for t in (key, value)]
        return F.scaled_dot_product_attention(query, *grouped, allowed, scale=scaling).transpose(1, 2), None
    if q_starts is None:
        q_starts, k_starts = torch.arange(B + 1) * Q, torch.arange(B + 1) * K
    if kwargs.get("sliding_window") is not None:
        assert max(Q, K) <= kwargs["sliding_window"]
    assert len(q_starts) == len(k_starts)
    assert (q_starts[-1], k_starts[-1]) == (B * Q, B * K)
    assert kwargs.get("max_length_q", Q) >= q_starts.diff().max()
    assert kwargs.get("max_length_k", K) >= k_starts.diff().max()
    out = torch.zeros_like(q)
    for a, b, c, e in zip(q_starts, q_starts[1:], k_starts, k_starts[1:], strict=False):
        if b > a and e > c:
            allowed = torch.ones(b - a, e - c, dtype=torch.bool).tril((e - c) - (b - a))
            seen = F.scaled_dot_product_attention(
                *(t.transpose(0, 1) for t in (q[a:b], k[c:e], v[c:e])), allowed, scale=scaling
            )
            out[a:b] = seen.transpose(0, 1).nan_to_num(0.0)
    return out.view(B, Q, H, d), None


@pytest.fixture
def flash():
    """A kind of attention with the arguments of flash attention, which needs a GPU."""
    AttentionInterface.register("flash_by_hand", runs_by_hand)
    AttentionMaskInterface.register("flash_by_hand", flash_attention_mask)
    return "flash_by_hand"


def with_attention(kind, name):
    model = routed(kind)
    if name == "flex_attention":
        model.set_attn_implementation(name)
    else:  # transformers would look for the package
        model.config._attn_implementation = name
    return model


def calls(length):
    mask = (torch.arange(length) >= 3 * torch.arange(2)[:, None]).long()
    left = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return [{}, left, {"attention_mask": mask.flip(1)}]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_neox"])
@torch.no_grad()
def test_flex_attention_is_sdpa(kind):
    """Its law, run without its compiler."""
    model, flex, ids = routed(kind), with_attention(kind, "flex_attention"), tokens(2, 14)
    packed = {"position_ids": torch.arange(14)[None] % 6}
    with torch.compiler.set_stance("force_eager"):
        for call in [*calls(14), packed]:
            real = call.get("attention_mask", torch.ones_like(ids)).bool()
            for causal in (True, False):
                how = {**call, "use_cache": False, "causal_routing": causal}
                close(flex(ids, **how).logits[real], model(ids, **how).logits[real])
        caches = [DynamicCache(config=m.config) for m in (model, flex)]
        for piece in ids.split((9, 1, 3, 1), 1):
            want, got = (m(piece, past_key_values=c).logits for m, c in zip((model, flex), caches, strict=True))
            close(got, want)


@pytest.mark.parametrize("kind", ["llama", "smollm3", "gpt_neox"])
@torch.no_grad()
def test_flash_attention_is_told_what_sdpa_sees(kind, flash):
    model, told, ids = routed(kind), with_attention(kind, flash), tokens(2, 14)
    for call in calls(14):
        real = call.get("attention_mask", torch.ones_like(ids)).bool()
        for causal in (True, False):
            how = {**call, "use_cache": False, "causal_routing": causal}
            close(told(ids, **how).logits[real], model(ids, **how).logits[real])
    how = {"attention_mask": calls(14)[1]["attention_mask"], "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(told.generate(ids, **how), model.generate(ids, **how))


@pytest.mark.parametrize(
    ("attention", "positions", "lengths"),
    [
        ("sdpa", True, False),
        ("sdpa", True, True),
        ("eager", True, False),
        ("flex_attention", True, False),
        ("flash_by_hand", True, True),
        ("flash_by_hand", False, True),
    ],
)
@torch.no_grad()
def test_documents_as_the_flattening_collator_packs_them_stay_apart(attention, positions, lengths, flash):
    """One row without a mask; positions that start over, or flash attention's lengths, tell documents apart."""
    documents = [tokens(1, n, seed=n)[0] for n in (6, 1, 9)]
    collate = DataCollatorWithFlattening(return_position_ids=positions, return_flash_attn_kwargs=lengths)
    batch = collate([{"input_ids": d.tolist()} for d in documents])
    assert "attention_mask" not in batch
    model = with_attention("llama", attention)
    labels = batch.pop("labels")
    plain = routed("llama")
    for causal in (True, False):
        with torch.compiler.set_stance("force_eager"):
            packed = model(**batch, use_cache=False, causal_routing=causal).logits[0]
        apart = [plain(d[None], use_cache=False, causal_routing=causal).logits[0] for d in documents]
        close(packed, torch.cat(apart))  # rotary positions may go on from one to the next: only distances count
    assert (labels[0] == -100).nonzero()[:, 0].tolist() == [0, 6, 7]


def test_runs_by_a_table():
    """Two rows of four slots: 3 tokens and 1, then documents 5 5 | 6, and one that is left over."""
    slots = torch.tensor([[0, 2, 3, NONE], [4, NONE, NONE, NONE]])
    assert run_starts(slots, None).tolist() == [0, 3, 4, 5, 8]
    doc = torch.tensor([[5, 5, 6, 0], [1, 1, 1, 1]])
    assert run_starts(slots, doc).tolist() == [0, 2, 3, 4, 5, 8]
    full = torch.tensor([[0, 1], [0, 1]])
    assert run_starts(full, None).tolist() == [0, 2, 2, 4, 4]
    assert run_starts(full, full).tolist() == [0, 1, 2, 3, 4]
    assert run_starts(full, None).dtype == torch.int32


def test_what_flash_attention_cannot_do_is_refused(flash):
    ids = tokens(2, 12)
    with pytest.raises(dg.DepthgateError, match=r"counts its window in rows.*\(5\).*set_attn_implementation\('sdpa'\)"):
        with_attention("mistral", flash)(ids, use_cache=False)
    with pytest.raises(dg.DepthgateError, match="cannot use a static cache"):
        with_attention("llama", flash).generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(dg.DepthgateError, match="keeps documents apart in one row only: flatten the batch"):
        with_attention("llama", flash)(ids, position_ids=torch.arange(12)[None] % 5, use_cache=False)


@torch.no_grad()
def test_flash_attention_within_the_window_of_a_short_text(flash):
    close(with_attention("mistral", flash)(tokens(2, 5)).logits, routed("mistral")(tokens(2, 5)).logits)


def test_plans_do_not_depend_on_the_attention(flash):
    ids, found = tokens(2, 12), []
    for name in ("sdpa", "eager", flash):
        model = with_attention("llama", name)
        with torch.no_grad(), plans_of(model) as plans:
            model(ids, use_cache=False)
        found.append([plan.chosen for plan in plans])
    for chosen in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(chosen, found[0], strict=True))
