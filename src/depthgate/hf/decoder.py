"""`dg.hf.export` and `dg.hf.to_decoder`: our Decoder as a Llama or Qwen3 of transformers, and back, by one table."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from depthgate.config import ModelConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.hf.families import FAMILIES, modeling
from depthgate.hf.table import kind_of, names, our_values, their_values
from depthgate.model import Decoder

AnyDecoder = TypeVar("AnyDecoder", bound=Decoder)


@torch.no_grad()
def export(decoder: Decoder, to: str | None = None) -> Any:
    """A transformers model that computes what a Decoder does: Qwen3 where it normalises queries and keys, else Llama;
    routed if it is. `to` says which it must be. Weights are copied."""
    if not isinstance(decoder, Decoder):
        raise InvalidValueError(f"decoder is a {type(decoder).__name__}: it must be a dg.Decoder")
    kind = kind_of(decoder.config, to)
    try:
        from transformers import initialization
    except ImportError:
        raise DepthgateError("transformers is missing: pip install 'depthgate[hf]'") from None
    from depthgate.hf.classes import model_classes

    dtype = decoder.embed.weight.dtype
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # as nn.RMSNorm has it
    values = their_values(decoder.config, eps)
    tokenizer = getattr(decoder, "tokenizer", None)
    ends = {"bos_token_id": None, "eos_token_id": None if tokenizer is None else tokenizer.end}
    base = getattr(modeling(kind), FAMILIES[kind].model)
    config_type: Any
    model_type: Any
    config_type, model_type = model_classes(kind) if decoder.config.routed else (base.config_class, base)
    config = config_type(**values, **ends, dtype=dtype)
    with initialization.no_init_weights():  # all of them come from the decoder
        model = model_type(config)
    model = model.to(decoder.embed.weight.device, dtype)
    held = model.state_dict()
    for mine, theirs in names(decoder.config, decoder.state_dict()):
        parts = decoder.state_dict()[mine]
        rows = [held[name].shape[0] if held[name].ndim else 1 for name in theirs]
        for name, part in zip(theirs, parts.split(rows) if len(rows) > 1 else [parts], strict=True):
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
    return from_weights(our_values(config), dict(model.state_dict()), kind).train(model.training)


def from_weights(config: ModelConfig, theirs: dict[str, Tensor], kind: type[AnyDecoder]) -> AnyDecoder:
    """A Decoder of this config from the weights of the other model, all of which must be there and be used."""
    with torch.device("meta"):
        decoder = kind(config)
    mine: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, parts in names(config, decoder.state_dict()):
        if missing := [part for part in parts if part not in theirs]:
            raise DepthgateError(f"the model has no {missing[0]}: it is of another kind than its config says")
        mine[name] = torch.cat([theirs[part] for part in parts]) if len(parts) > 1 else theirs[parts[0]].clone()
        used.update(parts)
    if left := sorted(theirs.keys() - used):
        raise DepthgateError(f"a Decoder has no place for {', '.join(left)[:200]}: change the model before")
    decoder.load_state_dict(mine, assign=True)
    if config.tied:
        decoder.head.weight = decoder.embed.weight
    return decoder
