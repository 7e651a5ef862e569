"""Tiny random models of every family that can be routed, with random routers."""

import copy
from contextlib import contextmanager
from functools import cache

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
import transformers

import depthgate as dg
from depthgate.hf.families import FAMILIES

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

ROUTED = [0, 3]
_SHARED = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Windows are shorter than the texts of the tests, and both kinds of layers are routed and left dense.
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_OWN = {
    "qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "layer_types": _MIXED},
    "mistral": {"sliding_window": 5, "head_dim": 8},
    "gemma3_text": {"sliding_window": 5, "head_dim": 8, "layer_types": _MIXED, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": 6},
    "granite": {"residual_multiplier": 0.7, "embedding_multiplier": 2.0},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
FAMILY_NAMES = sorted(FAMILIES)


@cache
def _dense(kind: str):
    torch.manual_seed(7)
    family = FAMILIES[kind]
    config = getattr(transformers, family.config)(**{**_SHARED, **_OWN.get(kind, {})})
    model = getattr(transformers, family.model)(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.5 if "embed" in name or "wte" in name else 0.2)
    return model.eval()


@cache
def _routed(kind: str, rule: str, capacity: float):
    return with_random_routers(dg.hf.convert(dense(kind), capacity, ROUTED, rule=rule))


def dense(kind: str, attention: str = "sdpa"):
    """A dense model that no other test holds."""
    model = copy.deepcopy(_dense(kind))
    model.set_attn_implementation(attention)
    return model


def routed(kind: str, attention: str = "sdpa", rule: str = "scores", capacity: float = 0.25):
    """A routed model with random routers that no other test holds."""
    model = copy.deepcopy(_routed(kind, rule, capacity))
    model.set_attn_implementation(attention)
    return model


def with_random_routers(model):
    """Draw routers at random. Their rules route about a third of the tokens, different ones in every row."""
    torch.manual_seed(11)
    rule = model.eval().config.depthgate["rule"]
    for i, layer in enumerate(dg.hf.routed_layers(model)):
        router = layer.depth_router
        with torch.no_grad(), plans_of(model) as plans:
            if rule == "threshold":
                router.rule.weight.fill_(0.5)
            for weight in router.parameters():
                weight.normal_(0, 0.3)
            model(tokens(8, 24, seed=2), use_cache=False)
            values = plans[i].decision.unique()
            k = int(0.65 * len(values))
            third = (values[k] + values[k + 1]) / 2  # between two, so that rounding decides nothing
            if rule == "threshold":
                router.rule.average += 0.5 * third
            else:
                (router.proj if rule == "scores" else router.rule.down).bias -= third
    return model


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


@contextmanager
def plans_of(model):
    """A list that fills with the plans of all routed layers, call by call."""
    plans = []
    hooks = [
        layer.depth_router.register_forward_hook(lambda _, args, plan: plans.append(plan))
        for layer in dg.hf.routed_layers(model)
    ]
    yield plans
    for hook in hooks:
        hook.remove()
