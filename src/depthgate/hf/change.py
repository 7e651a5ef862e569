"""How much each layer of a model changes its tokens: those that change them least are the ones to route."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from depthgate.errors import InvalidValueError
from depthgate.hf.families import FAMILIES, family_of


def layer_changes(model: Any, batch: Any) -> list[float]:
    """Of each layer the mean over tokens of |f(x) - x| / |x|, on a batch: token ids (B, T), or the inputs of the
    model with them. The model is dense; it is left as it was."""
    inputs = _inputs(batch, model.get_input_embeddings().num_embeddings)
    mask = inputs.get("attention_mask")
    shares: list[Tensor] = []

    def measure(_: Any, args: tuple[Any, ...], out: Tensor) -> None:
        x, y = args[0].to(out.device).float(), out.float()  # a hook of accelerate moves it behind this one
        share = (y - x).norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-12)
        weight = torch.ones_like(share) if mask is None else mask.to(share)
        shares.append((share * weight).sum() / weight.sum().clamp(min=1))

    layers = getattr(model.base_model, FAMILIES[family_of(model)].layers)
    hooks = [layer.register_forward_hook(measure) for layer in layers]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(**inputs, use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return [float(share) for share in shares]


def least_changing(changes: list[float]) -> list[int]:
    """As many layers as every other, those that change their tokens least."""
    order = sorted(range(len(changes)), key=lambda i: changes[i])
    return sorted(order[: len(changes) // 2])


def _inputs(batch: Any, vocab: int) -> dict[str, Any]:
    inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.numel() == 0:
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise InvalidValueError(f"calibration is {got}: layers='auto' needs token ids of shape (batch, tokens)")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise InvalidValueError(
            f"calibration has the id {low if low < 0 else high}, but the model's are 0 to {vocab - 1}: use its own "
            "tokenizer"
        )
    return inputs
