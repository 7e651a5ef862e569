"""`dg.hf.to_decoder`: a Llama or Qwen3 of transformers as our Decoder, by a table that export.py reads the other way.

Rotary positions turn the same pairs in both. Weights that one model stacks and the other keeps apart are stacked along
their rows, in the order of the table.
"""

from dataclasses import replace
from typing import Any, TypeVar

import torch

from depthgate.config import ModelConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.flops import swiglu_hidden
from depthgate.hf.families import OURS, PREFIX, VALUES, Routing
from depthgate.hf.layer import routed_layers
from depthgate.model import Decoder
from depthgate.routing.routers import TopTokens

AnyDecoder = TypeVar("AnyDecoder", bound=Decoder)

KINDS = {"llama": False, "qwen3": True}  # family -> qk_norm

ROUTING = ("capacity", "gate", "rule")  # in ours, and in the `depthgate` of a routed config

MODEL = {
    "embed.weight": ("model.embed_tokens.weight",),
    "norm.weight": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
}
BLOCK = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.q_norm.weight": ("self_attn.q_norm.weight",),
    "attention.k_norm.weight": ("self_attn.k_norm.weight",),
    "attention.out.weight": ("self_attn.o_proj.weight",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "ffn.up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn.down.weight": ("mlp.down_proj.weight",),
}

# Values that their configs may have and ours cannot express, each with the value that changes nothing.
_NEUTRAL: dict[str, Any] = {
    "quantization_config": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "rope_type": "default",
    "partial_rotary_factor": 1.0,
    "layer_types": [],  # full attention left out
}


def theirs_of(name: str, kind: str = "llama") -> tuple[str, ...]:
    """The names of those in the other model that a Decoder's weight equals, or is stacked from."""
    if kind == OURS:
        return (f"model.{name}",)
    if name in MODEL:
        return MODEL[name]
    _, i, rest = name.split(".", 2)
    parts = (f"depth_{rest}",) if rest.startswith("router.") else BLOCK[rest.removeprefix("block.")]
    return tuple(f"model.layers.{i}.{part}" for part in parts)


def their_values(ours: ModelConfig, eps: float) -> dict[str, Any]:
    """The values of the other model's config; `eps` is what our norms add if our config does not say."""
    filled = replace(
        ours,
        kv_heads=ours.kv_heads or ours.heads,
        head_dim=ours.head_size,
        hidden=ours.hidden or swiglu_hidden(ours.dim),
        norm_eps=ours.norm_eps or eps,
    )
    values = {theirs: getattr(filled, name) for name, theirs in VALUES.items()}
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": ours.rope_base}
    if ours.routed:
        values["depthgate"] = Routing(ours.routed, **{name: getattr(ours, name) for name in ROUTING}).written()
    return values


def our_values(config: Any) -> ModelConfig:
    """The config of a Decoder that computes what a model with this config does."""
    kind = config.model_type.removeprefix(PREFIX)
    if kind == OURS:
        return ModelConfig(**config.depthgate)
    if kind not in KINDS:
        raise InvalidValueError(f"a Decoder cannot be a {kind}: only {', '.join(KINDS)} have its layers")
    said = {**config.to_dict(), **config.rope_parameters}
    said["layer_types"] = sorted(set(said.get("layer_types") or ()) - {"full_attention"})
    for name, value in _NEUTRAL.items():
        if said.get(name) not in (None, value):
            raise InvalidValueError(f"{name} is {said[name]!r} in the model's config, which a Decoder cannot compute")
    values = {name: getattr(config, theirs) for name, theirs in VALUES.items()}
    kinds = ["dense"] * config.num_hidden_layers
    if (raw := getattr(config, "depthgate", None)) is not None:
        routing = Routing.read(raw, len(kinds))
        routing = replace(routing, capacity=sum(routing.capacities) / len(routing.capacities))
        values |= {name: getattr(routing, name) for name in ROUTING}
        for i in routing.layers:
            kinds[i] = "mod"
    return ModelConfig(**values, qk_norm=KINDS[kind], rope_base=said["rope_theta"], pattern=",".join(kinds))


def to_decoder(model: Any, kind: type[AnyDecoder] = Decoder) -> AnyDecoder:  # type: ignore[assignment]
    """A Decoder that computes what a Llama or Qwen3 of transformers does, converted or not, or a model that `export`
    wrote. Weights are copied."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type") or not hasattr(model, "get_output_embeddings"):
        raise InvalidValueError(f"model is a {type(model).__name__}: it must be a language model of transformers")
    ours, theirs = our_values(config), dict(model.state_dict())
    if any(".base_layer." in name or ".modules_to_save." in name for name in theirs):
        raise DepthgateError("the model has an adapter, which the engine cannot run: call merge_and_unload() first")
    with torch.device("meta"):
        decoder = kind(ours)
    table = {name: theirs_of(name, config.model_type) for name in decoder.state_dict()}
    if odd := sorted(theirs.keys() ^ {part for parts in table.values() for part in parts}):
        what = f"a Decoder has no place for {odd[0]}" if odd[0] in theirs else f"the model has no {odd[0]}"
        raise DepthgateError(f"{what}: it is of another kind than its config says, or has parts added to it")
    mine = {name: torch.cat([theirs[part] for part in parts]) for name, parts in table.items() if len(parts) > 1}
    mine |= {name: theirs[parts[0]].clone() for name, parts in table.items() if len(parts) == 1}
    decoder.load_state_dict(mine, assign=True)
    routers = [part for part in decoder.modules() if isinstance(part, TopTokens)]
    for router, layer in zip(routers, routed_layers(model), strict=False):  # each may have a capacity of its own
        router.capacity = layer.depth_router.capacity
    if ours.tied:
        decoder.head.weight = decoder.embed.weight
    return decoder.train(model.training)
