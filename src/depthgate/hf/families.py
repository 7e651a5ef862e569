"""The families of transformers models that can be routed, what differs between them, and the config of a routed model.

They share a contract. A decoder has a list of layers; a layer is called as
layer(hidden_states, attention_mask=, position_ids=, past_key_values=, position_embeddings=, **kwargs) and returns
hidden states with its residual; its attention hands new keys and values to the cache under its own layer's number, and
takes its mask as it is.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

from depthgate.config import GATE_NAMES, RULE_NAMES
from depthgate.errors import InvalidValueError, check_capacity, check_count
from depthgate.options import Options, choice, number, option

PREFIX = "depthgate_"  # of the model type of a routed model
OURS = "depthgate"  # the model type of a Decoder as it is
VALUES = {  # of a ModelConfig -> of configs of transformers
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
HEADS = {  # Auto class -> the table of transformers that names its models
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
_CONTRACT = ("hidden_states", "attention_mask", "position_ids", "past_key_values", "position_embeddings")


class Family(NamedTuple):
    """Names within transformers: of classes, and of attributes that differ from family to family."""

    module: str
    config: str
    model: str
    layer: str
    layers: str = "layers"  # the decoder's list of layers
    attention: str = "self_attn"  # a layer's attention
    cache: str = "past_key_values"  # a layer's argument
    window: bool = False  # True: attention takes its window from the config if it has none of its own
    norm: str | None = None  # a norm that computes what Llama's does, in a layer that turns positions as Llama's does


def _usual(module: str, name: str, config: str | None = None, window: bool = False, like_llama: bool = True) -> Family:
    norm, layer = f"{name}RMSNorm" if like_llama else None, f"{name}DecoderLayer"
    return Family(module, config or f"{name}Config", f"{name}ForCausalLM", layer, window=window, norm=norm)


FAMILIES = {
    "llama": _usual("llama", "Llama"),
    "qwen2": _usual("qwen2", "Qwen2"),
    "qwen3": _usual("qwen3", "Qwen3"),
    "mistral": _usual("mistral", "Mistral", window=True),
    "gemma3_text": _usual("gemma3", "Gemma3", "Gemma3TextConfig", like_llama=False),
    "olmo2": _usual("olmo2", "Olmo2", like_llama=False),
    "phi3": _usual("phi3", "Phi3", window=True, like_llama=False),
    "granite": _usual("granite", "Granite"),
    "smollm3": _usual("smollm3", "SmolLM3"),
    "mixtral": _usual("mixtral", "Mixtral", window=True),
    "qwen3_moe": _usual("qwen3_moe", "Qwen3Moe"),
    "gpt_neox": Family(
        "gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", "GPTNeoXLayer", attention="attention", cache="layer_past"
    ),
    "gpt2": Family("gpt2", "GPT2Config", "GPT2LMHeadModel", "GPT2Block", layers="h", attention="attn"),
}


def modeling(kind: str) -> Any:
    """The module of transformers that holds a family's classes."""
    name = FAMILIES[kind].module
    return import_module(f"transformers.models.{name}.modeling_{name}")


def heads(kind: str) -> dict[str, str]:
    """The models of a family that transformers has, by their Auto class; AutoModel names the decoder without a head."""
    from transformers.models.auto import modeling_auto as auto

    found = {name: getattr(auto, table).get(kind) for name, table in HEADS.items()}
    return {name: model for name, model in found.items() if model is not None}


def decoder_layers(model: Any) -> Any:
    """The list of layers of a model of a known family, routed or not."""
    return getattr(model.base_model, FAMILIES[model.config.model_type.removeprefix(PREFIX)].layers)


def family_of(model: Any) -> str:
    """The family of a model that can be routed."""
    base: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    if not isinstance(model, base):
        hint = "it must be a transformers model"
        if hasattr(model, "merge_and_unload"):
            hint = "call merge_and_unload() and convert what it gives, or convert before the adapter is added"
        raise InvalidValueError(f"model is a {type(model).__name__}: {hint}")
    kind, name = str(model.config.model_type), type(model).__name__
    check_config_values(vars(model.config) | {"model_type": kind}, name)
    if type(model) not in (known := [getattr(modeling(kind), each) for each in heads(kind).values()]):
        raise InvalidValueError(f"{name} cannot be routed, only a {' or a '.join(each.__name__ for each in known)}")
    decoder = heads(kind)["AutoModel"] if model.base_model is not model else name
    _check_own(model.base_model, kind, decoder, f"the decoder of {name}")
    layers, told = decoder_layers(model), model.config.num_hidden_layers
    if len(layers) != told:
        remedy = (
            f"set config.num_hidden_layers to {len(layers)}, and give the layers' attention new numbers (layer_idx)"
        )
        raise InvalidValueError(f"{name} has {len(layers)} layers, and its config says {told}: {remedy}")
    for i, layer in enumerate(layers):
        _check_own(layer, kind, FAMILIES[kind].layer, f"layer {i} of {name}")
    return kind


def _check_own(part: Any, kind: str, theirs: str, what: str) -> None:
    """Refuse a part that is to get another class, and does not compute what its family's class does."""
    if type(part) is not getattr(modeling(kind), theirs):
        told = f"{what} is a {type(part).__name__}, not a {theirs}"
        raise InvalidValueError(f"{told}: its own forward would be lost; convert before it is changed")
    if "forward" in vars(part) and "_old_forward" not in vars(part):  # those of accelerate's hooks are known
        raise InvalidValueError(f"{what} has a forward of its own: convert before that is set")


def check_config_values(values: Mapping[str, Any], name: str) -> None:
    """Refuse a model that cannot be routed according to its config, before anything is loaded."""
    kind = values["model_type"]
    if kind.startswith(PREFIX):
        remedy = "for another capacity run depthgate finetune --capacity, or call dg.hf.set_capacity"
        raise InvalidValueError(f"the model is routed already: {remedy}; for other layers call dg.hf.to_dense first")
    if values.get("is_encoder_decoder") or values.get("add_cross_attention"):
        raise InvalidValueError(f"{name} reads an encoder's output: only decoder-only models can be routed")
    if kind not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise InvalidValueError(f"{name} ({kind}) cannot be routed: {_missing(kind)}. Supported are {supported}")
    if values.get("quantization_config") is not None:
        what = f"{name} has quantised weights (quantization_config), which cannot be trained"
        raise InvalidValueError(f"{what}: take the model that it was made from, or a GGUF file")
    if values.get("use_bidirectional_attention"):
        raise InvalidValueError(f"{name} looks at later tokens (use_bidirectional_attention): routing is causal")


def _missing(kind: str) -> str:
    """The part of the contract that a model of an unknown family lacks, as far as its code tells."""
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        module = import_module(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]).__module__)
    except (ImportError, KeyError, AttributeError):
        return "transformers has no decoder language model of that type"
    layers = [each for key, each in vars(module).items() if key.endswith(("DecoderLayer", "Layer", "Block"))]
    found = [set(signature(each.forward).parameters) for each in layers if hasattr(each, "forward")]
    lacking = min(([a for a in _CONTRACT if a not in has] for has in found), key=len, default=list(_CONTRACT))
    if lacking:
        return f"its layers do not take {', '.join(lacking)}"
    return "its layers take all the arguments that are needed, but the family has not been tested"


def check_capacities(value: Any, name: str = "capacity") -> None:
    """A share of tokens, or one for each layer."""
    for each in value if isinstance(value, tuple | list) else (value,):
        check_capacity(each, name)


@dataclass(frozen=True)
class Routing(Options):
    """Routed layers and their options: the value of `depthgate` in a config. Unknown and wrong values are refused."""

    layers: tuple[int, ...]
    capacity: float | tuple[float, ...] = option(0.5, check=check_capacities)  # of all routed layers, or of each
    gate: str = choice("one_plus_tanh", GATE_NAMES)
    rule: str = choice("predictor", RULE_NAMES)
    rule_loss: float = number(0.01, "[0, 1)")  # of the loss that teaches the causal rule
    decay: float = number(0.9, "[0, 1)")  # of a threshold, in every step of training

    def check_together(self) -> None:
        if isinstance(self.capacity, tuple) and len(self.capacity) != len(self.layers):
            what = f"capacity has {len(self.capacity)} values, and {len(self.layers)} layers are routed"
            raise InvalidValueError(f"{what}: give one for all, or one for each")

    @property
    def capacities(self) -> tuple[float, ...]:
        """That of each routed layer."""
        each = self.capacity if isinstance(self.capacity, tuple) else (self.capacity,) * len(self.layers)
        return tuple(map(float, each))

    @classmethod
    def read(cls, values: Any, depth: int) -> "Routing":
        """The routing that a config holds, for a model of `depth` layers."""
        known = {each.name for each in fields(cls)}
        if not isinstance(values, Mapping) or "layers" not in values:
            raise InvalidValueError("the config does not say which layers are routed: give depthgate={'layers': [...]}")
        if unknown := sorted(map(str, values.keys() - known)):
            what = f"depthgate in the config has unknown keys ({', '.join(unknown)[:200]})"
            raise InvalidValueError(f"{what}: it may have {', '.join(sorted(known))}")
        capacity = values.get("capacity", cls.capacity)
        capacity = tuple(capacity) if isinstance(capacity, list) else capacity
        layers = checked_layers(values["layers"], depth)
        return cls(**{**values, "layers": layers, "capacity": in_order(values["layers"], capacity)})

    def written(self) -> dict[str, Any]:
        """The values as a config holds them."""
        each = list(self.capacity) if isinstance(self.capacity, tuple) else float(self.capacity)
        return {**asdict(self), "layers": list(self.layers), "capacity": each}


def checked_layers(layers: Any, depth: int) -> tuple[int, ...]:
    """Numbers of layers, ascending, each once."""
    if isinstance(layers, str | bytes) or not isinstance(layers, Sequence):
        raise InvalidValueError(f"layers is {layers!r}: give 'every_other', 'auto', or numbers, such as [1, 3]")
    if not layers:
        raise InvalidValueError("layers is empty: name at least one layer to route")
    numbers = [check_count(layer, "a layer", minimum=0, maximum=depth - 1) for layer in layers]
    if len(set(numbers)) < len(numbers):
        raise InvalidValueError(f"layers is {list(layers)}: name each layer once")
    return tuple(sorted(numbers))


def in_order(layers: Sequence[int], capacity: Any) -> Any:
    """The capacity that goes with layers once these are sorted; one for all of them, and a wrong number, as it is."""
    if not isinstance(capacity, tuple | list) or len(capacity) != len(layers):
        return capacity
    return tuple(share for _, share in sorted(zip(layers, capacity, strict=True)))
