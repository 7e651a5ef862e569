"""Converted transformers models on CUDA compute what they do on the CPU, by every kind of attention."""

import json

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, DataCollatorWithFlattening
from transformers.masking_utils import flash_attention_mask

import depthgate as dg
from depthgate.cli import main
from depthgate.device import count_flops
from tests.conftest import close
from tests.hf.words import save_model, write_text
from tests.hf.zoo import FAMILY_NAMES, routed, tokens, with_random_routers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


def left_padded(rows, length):
    return tokens(rows, length), (torch.arange(length) >= 3 * torch.arange(rows)[:, None]).long()


def wide(dtype=torch.float32):
    """A Llama with heads as wide as kernels want them, some layers routed."""
    torch.manual_seed(0)
    shape = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    model = dg.hf.convert(transformers.LlamaForCausalLM(config), 0.25, [0, 3], rule="scores")
    model = with_random_routers(model).to("cuda", dtype)
    for layer in dg.hf.routed_layers(model):
        layer.depth_router.float()
    return model


def runs_of_torch(module, query, key, value, attention_mask, scaling, **kwargs):
    """torch's flash attention with the arguments of the package that transformers calls."""
    (B, H, Q, d), K = query.shape, key.shape[2]
    q, k, v = (t.transpose(1, 2).reshape(-1, t.shape[1], d) for t in (query, key, value))
    starts = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if starts[0] is None and attention_mask is not None:  # padding, of layers that are not routed
        allowed = torch.ones(Q, K, dtype=torch.bool, device=q.device).tril(K - Q)
        allowed = attention_mask[:, None, None, :].bool() & allowed
        allowed = allowed | ~allowed.any(-1, keepdim=True)
        y = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, allowed, scale=scaling, enable_gqa=key.shape[1] != H
        )
        return y.transpose(1, 2), None
    if starts[0] is None:
        starts = tuple(torch.arange(B + 1, device=q.device, dtype=torch.int32) * n for n in (Q, K))
    y = torch.ops.aten._flash_attention_forward(q, k, v, *starts, Q, K, 0.0, True, False, scale=scaling)[0]
    return y.view(B, Q, H, d), None


@pytest.mark.parametrize("kind", FAMILY_NAMES)
def test_logits_and_texts_are_those_of_the_cpu(kind):
    (ids, mask), here, there = left_padded(3, 12), routed(kind), routed(kind).cuda()
    how = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "use_cache": False}
    on = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in how.items()}
    real = mask.bool()
    with torch.no_grad():
        close(there(ids.cuda(), **on).logits.cpu()[real], here(ids, **how).logits[real])
    want = here.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(there.generate(ids.cuda(), attention_mask=mask.cuda(), **GREEDY).cpu(), want)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_a_static_cache_is_compiled_by_generate_and_gives_the_same_text(kind):
    (ids, mask), model = left_padded(2, 9), routed(kind).cuda()
    how = {**GREEDY, "attention_mask": mask.cuda()}
    want = model.generate(ids.cuda(), **how, use_cache=False)
    assert torch.equal(model.generate(ids.cuda(), **how, cache_implementation="static"), want)


def test_flex_attention_is_sdpa_forwards_and_backwards():
    ids, mask = (part.cuda() for part in left_padded(2, 200))
    found = []
    for name in ("sdpa", "flex_attention"):
        model = wide().train()
        model.set_attn_implementation(name)
        for call in ({"attention_mask": mask}, {"position_ids": torch.arange(200, device="cuda")[None] % 70}):
            model(ids, **call, labels=ids, use_cache=False).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=2e-3, atol=2e-4, msg=name)


def test_flash_attention_is_sdpa_padded_packed_cached_and_backwards():
    AttentionInterface.register("flash_of_torch", runs_of_torch)
    AttentionMaskInterface.register("flash_of_torch", flash_attention_mask)
    ids, mask = (part.cuda() for part in left_padded(2, 60))
    documents = [tokens(1, n, seed=n)[0].tolist() for n in (20, 1, 39)]
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": d} for d in documents])
    packed = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in packed.items()}
    found = []
    for name in ("sdpa", "flash_of_torch"):
        model = wide(torch.bfloat16)
        model.config._attn_implementation = name
        with torch.no_grad():
            padded = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
            first = model(ids[:, :50], causal_routing=True)
            rest = model(ids[:, 50:], past_key_values=first.past_key_values).logits
        loss = model.train()(**packed, use_cache=False).loss
        loss.backward()
        grads = [p.grad for n, p in model.named_parameters() if p.grad is not None]
        found.append([padded, rest, loss.detach(), *grads])
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() <= 0.03 * b.float().norm() + 1e-4


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_flops_of_keys_that_heads_share_are_counted(kernel):
    B, H, T, d = 2, 4, 64, 32
    q, k, v = (torch.randn(B, heads, T, d, device="cuda", dtype=torch.bfloat16) for heads in (H, 2, 2))
    with sdpa_kernel(kernel):
        counted = count_flops(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    assert counted == 2 * 2 * B * H * T * T * d


def test_finetune_compiled_learns_as_it_does_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_model(tmp_path / "model", capacity=0.5, rule="threshold", gate="straight_through")
    write_text(tmp_path / "text")
    losses = []
    for compiled in ("false", "true"):
        names = ["--model", tmp_path / "model", "--data", tmp_path / "text", "--out", tmp_path / compiled]
        fixed = ["--batch", 4, "--seq", 48, "--steps", 4, "--lr", 1e-3, "--device", "cuda", "--compile", compiled]
        assert main(["finetune", *map(str, names), *map(str, fixed)]) == 0
        rows = (tmp_path / compiled / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=0.05, abs=1e-3)  # in bfloat16
