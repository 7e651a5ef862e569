"""How our Decoder and transformers' Llama and Qwen3 call the same things: one table, read both ways. Imports no torch.

Rotary positions turn the same pairs in both. What one holds stacked and the other apart is stacked along its rows, in
the order of the table.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from depthgate.config import ModelConfig
from depthgate.errors import InvalidValueError, check_choice
from depthgate.flops import swiglu_hidden
from depthgate.hf.config import Routing
from depthgate.hf.families import PREFIX

KINDS = {"llama": False, "qwen3": True}  # -> whether queries and keys are normalised

VALUES = {  # of configs
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
ROUTER = ("router.", "depth_router.")  # of a routed layer, and all within has one name

# What their configs may say and ours cannot, with the value that means nothing is said.
_SILENT = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}


def names(ours: ModelConfig, weights: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Of each weight of a Decoder the names of what it is, or is stacked from, in the other model."""
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


def kind_of(ours: ModelConfig, asked: str | None) -> str:
    """The family that a Decoder can be written as."""
    if asked is not None:
        check_choice(asked, "to", KINDS)
    for layer in ours.kinds:
        if layer not in ("dense", "mod"):
            raise InvalidValueError(f"pattern has {layer!r}, which Llama and Qwen3 have not: only dense and mod can go")
    found = "qwen3" if ours.qk_norm else "llama"
    if asked not in (None, found):
        raise InvalidValueError(f"qk_norm is {str(ours.qk_norm).lower()}, which {asked} is not: write it as {found}")
    return found


def their_values(ours: ModelConfig, eps: float) -> dict[str, Any]:
    """A config of the other model; `eps` is what our norms add where their config does not say."""
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
    said = {f"rope_parameters.{name}": value for name, value in rope.items() if name != "rope_theta"}
    silent = {**_SILENT, "rope_parameters.rope_type": "default", "rope_parameters.partial_rotary_factor": 1.0}
    said |= {name: getattr(config, name, value) for name, value in _SILENT.items()}
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    said |= {"layer_types": sorted(windows)} if windows else {}
    for name, value in said.items():
        if value is not None and value != silent.get(name):
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
