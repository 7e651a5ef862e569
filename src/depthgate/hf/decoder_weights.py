"""`dg.hf.export` and `dg.hf.to_decoder`: our Decoder as a Llama or Qwen3 of transformers, and back, by one table.

Rotary positions turn the same pairs in both. Weights that one model stacks and the other keeps apart are stacked along
their rows, in the order of the table.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from depthgate.config import ModelConfig
from depthgate.errors import DepthgateError, InvalidValueError, check_choice
from depthgate.flops import swiglu_hidden
from depthgate.hf.classes import config_class, model_class
from depthgate.hf.families import FAMILIES, PREFIX, Routing, modeling
from depthgate.model import Decoder

AnyDecoder = TypeVar("AnyDecoder", bound=Decoder)

KINDS = {"llama": False, "qwen3": True}  # family -> qk_norm

VALUES = {  # in configs
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden": "intermediate_size",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
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
ROUTER = ("router.", "depth_router.")  # in a routed layer; all within has the same name in both

# Values that their configs may have and ours cannot express, each with the value that changes nothing.
_NEUTRAL = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}


def names(ours: ModelConfig, weights: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each weight of a Decoder, with the names of those that it equals, or is stacked from, in the other model."""
    for name in weights:
        if name in MODEL:
            yield name, MODEL[name]
            continue
        _, i, rest = name.split(".", 2)
        its = f"model.layers.{i}."
        if int(i) in ours.routed and rest.startswith(ROUTER[0]):
            yield name, (its + ROUTER[1] + rest.removeprefix(ROUTER[0]),)
        else:
            yield name, tuple(its + part for part in BLOCK[rest.removeprefix("block.")])


def _family(ours: ModelConfig, asked: str | None) -> str:
    """The family that a Decoder can be written as."""
    if asked is not None:
        check_choice(asked, "to", KINDS)
    for layer in ours.kinds:
        if layer not in ("dense", "mod"):
            raise InvalidValueError(
                f"cannot export a {layer!r} layer: Llama and Qwen3 only have dense layers, which may be routed "
                "(pattern: dense, mod)"
            )
    found = "qwen3" if ours.qk_norm else "llama"
    if asked not in (None, found):
        raise InvalidValueError(f"qk_norm is {str(ours.qk_norm).lower()}, which {asked} is not: write it as {found}")
    return found


def their_values(ours: ModelConfig, eps: float) -> dict[str, Any]:
    """The values of the other model's config; `eps` is what our norms add if our config does not say."""
    values = {theirs: getattr(ours, name) for name, theirs in VALUES.items()}
    values |= {
        VALUES["kv_heads"]: ours.kv_heads or ours.heads,
        VALUES["head_dim"]: ours.head_size,
        VALUES["hidden"]: ours.hidden or swiglu_hidden(ours.dim),
        VALUES["norm_eps"]: eps if ours.norm_eps is None else ours.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": ours.rope_base},
    }
    if ours.routed:
        routing = {name: getattr(ours, name) for name in ROUTING}
        values["depthgate"] = Routing(ours.routed, **routing).written()
    return values


def our_values(config: Any) -> ModelConfig:
    """The config of a Decoder that computes what a model with this config does."""
    kind = config.model_type.removeprefix(PREFIX)
    if kind not in KINDS:
        raise InvalidValueError(f"a Decoder cannot be a {kind}: only {', '.join(KINDS)} have its layers")
    if getattr(config, "quantization_config", None) is not None:
        raise InvalidValueError("the weights are quantised (quantization_config), and a Decoder's are not")
    rope: Mapping[str, Any] = config.rope_parameters
    neutral = {**_NEUTRAL, "rope_parameters.rope_type": "default", "rope_parameters.partial_rotary_factor": 1.0}
    said = {f"rope_parameters.{name}": value for name, value in rope.items() if name != "rope_theta"}
    said |= {name: getattr(config, name, value) for name, value in _NEUTRAL.items()}
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    said |= {"layer_types": sorted(windows)} if windows else {}
    for name, value in said.items():
        if value is not None and value != neutral.get(name):
            raise InvalidValueError(f"{name} is {value!r} in the model's config, which a Decoder cannot compute")
    values = {name: getattr(config, theirs) for name, theirs in VALUES.items()}
    kinds = ["dense"] * config.num_hidden_layers
    if (raw := getattr(config, "depthgate", None)) is not None:
        routing = Routing.read(raw, len(kinds))
        values |= {name: getattr(routing, name) for name in ROUTING}
        for i in routing.layers:
            kinds[i] = "mod"
    cycle = next(n for n in range(1, len(kinds) + 1) if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    return ModelConfig(**values, qk_norm=KINDS[kind], rope_base=rope["rope_theta"], pattern=",".join(kinds[:cycle]))


@torch.no_grad()
def export(decoder: Decoder, to: str | None = None) -> Any:
    """A transformers model that computes what a Decoder does: Qwen3 if it normalises queries and keys, else Llama;
    routed if the Decoder is. `to` names the family that it must be. Weights are copied."""
    if not isinstance(decoder, Decoder):
        raise InvalidValueError(f"decoder is a {type(decoder).__name__}: it must be a dg.Decoder")
    kind = _family(decoder.config, to)
    try:
        from transformers import initialization
    except ImportError:
        raise DepthgateError("transformers is missing: pip install 'depthgate[hf]'") from None
    dtype = decoder.embed.weight.dtype
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # as nn.RMSNorm has it
    tokenizer = getattr(decoder, "tokenizer", None)
    ends = {"bos_token_id": None, "eos_token_id": None if tokenizer is None else tokenizer.end}
    base = getattr(modeling(kind), FAMILIES[kind].model)
    routed = bool(decoder.config.routed)
    config = (config_class(kind) if routed else base.config_class)(
        **their_values(decoder.config, eps), **ends, dtype=dtype
    )
    with initialization.no_init_weights():  # all of them come from the decoder
        model = (model_class(kind) if routed else base)(config)
    model = model.to(decoder.embed.weight.device, dtype)
    held, ours = model.state_dict(), decoder.state_dict()
    for mine, theirs in names(decoder.config, ours):
        rows = [held[name].shape[0] if held[name].ndim else 1 for name in theirs]
        for name, part in zip(theirs, ours[mine].split(rows) if len(rows) > 1 else [ours[mine]], strict=True):
            held[name].copy_(part)
    model.tie_weights()
    return model.train(decoder.training)


def to_decoder(model: Any, kind: type[AnyDecoder] = Decoder) -> AnyDecoder:  # type: ignore[assignment]
    """A Decoder that computes what a Llama or Qwen3 of transformers does, converted or not. Weights are copied."""
    config = getattr(model, "config", None)
    if not hasattr(config, "model_type") or not hasattr(model, "lm_head"):
        raise InvalidValueError(
            f"model is a {type(model).__name__}: it must be a causal language model of transformers"
        )
    ours, theirs = our_values(config), dict(model.state_dict())
    with torch.device("meta"):
        decoder = kind(ours)
    mine: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, parts in names(ours, decoder.state_dict()):
        if missing := [part for part in parts if part not in theirs]:
            raise DepthgateError(f"the model has no {missing[0]}: it is of another kind than its config says")
        mine[name] = torch.cat([theirs[part] for part in parts]) if len(parts) > 1 else theirs[parts[0]].clone()
        used.update(parts)
    if left := sorted(theirs.keys() - used):
        raise DepthgateError(f"a Decoder has no place for {', '.join(left)[:200]}: remove it from the model first")
    decoder.load_state_dict(mine, assign=True)
    if ours.tied:
        decoder.head.weight = decoder.embed.weight
    return decoder.train(model.training)
