"""`dg.hf.export`: our Decoder as a Llama or Qwen3 of transformers; or, where it has parts that these lack, as a model
of transformers that holds it as it is."""

from dataclasses import asdict
from typing import Any

import torch

from depthgate.errors import InvalidValueError, check_choice
from depthgate.hf.classes import model_class, register
from depthgate.hf.decoder_weights import KINDS, their_values, theirs_of
from depthgate.hf.families import FAMILIES, OURS, modeling
from depthgate.model import Decoder


@torch.no_grad()
def export(decoder: Decoder, to: str | None = None) -> Any:
    """A transformers model that computes what a Decoder does: Qwen3 if it normalises queries and keys, else Llama,
    routed if the Decoder is; or, where these lack a part of it, a DepthgateForCausalLM, which holds the Decoder as it
    is. `to` names the one that it must be: qwen3, llama or depthgate. Weights are copied."""
    if not isinstance(decoder, Decoder):
        raise InvalidValueError(f"decoder is a {type(decoder).__name__}: it must be a dg.Decoder")
    ours = decoder.config
    family = "qwen3" if ours.qk_norm else "llama"
    lacking = [f"{each} layers" for each in sorted(set(ours.kinds) - {"dense", "mod"})]
    lacking += [name for name in ("key_shift", "embed_norm", "router_norm") if getattr(ours, name)]
    kind = check_choice(to or (OURS if lacking else family), "to", (*KINDS, OURS))
    if lacking and kind != OURS:
        raise InvalidValueError(f"to is {to!r}, which has no {lacking[0]}: write the model as {OURS}")
    if kind not in (family, OURS):
        raise InvalidValueError(f"qk_norm is {str(ours.qk_norm).lower()}, which {to} is not: write it as {family}")
    register()  # refuses where transformers is missing
    from transformers import initialization

    dtype = decoder.embed.weight.dtype
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # as nn.RMSNorm has it
    tokenizer = getattr(decoder, "tokenizer", None)
    ends = {"bos_token_id": None, "eos_token_id": None if tokenizer is None else tokenizer.end}
    values = {"depthgate": asdict(ours)} if kind == OURS else their_values(ours, eps)
    made = model_class(kind) if "depthgate" in values else getattr(modeling(kind), FAMILIES[kind].model)
    with initialization.no_init_weights():  # all of them come from the decoder
        model = made(made.config_class(**values, **ends, dtype=dtype))
    model = model.to(decoder.embed.weight.device, dtype)
    held = model.state_dict()
    for mine, weight in decoder.state_dict().items():
        theirs = theirs_of(mine, kind)
        parts = [weight] if len(theirs) == 1 else weight.split([len(held[name]) for name in theirs])
        for name, part in zip(theirs, parts, strict=True):
            held[name].copy_(part)
    model.tie_weights()
    return model.train(decoder.training)
