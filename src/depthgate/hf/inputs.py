"""What routed layers must know of their tokens and cannot see: padding, documents, and how tokens are to be chosen.

A hook on the decoder reads it from the decoder's own arguments and hands it down to the layers as one more keyword.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgate.errors import InvalidValueError
from depthgate.hf.masks import check_implementation

KEYWORD = "depthgate_tokens"
CAUSAL = "causal_routing"
MAX_DOCUMENTS = "max_documents"
PADDING = "token_mask"  # (B, T), 0 at padding, beside an attention_mask that is ready for use


class Tokens(NamedTuple):
    """Of one call of the decoder."""

    valid: Tensor | None  # (B, T) bool, False at padding; None: no padding
    doc: Tensor | None  # (B, T) the document of each token; None: one a row
    causal: bool | None  # None: causal unless the model is in training mode
    max_documents: int | None = None  # the most documents a row holds, where the caller knows


def hand_down(
    names: tuple[str, ...], decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook, once it is given the names of the decoder's arguments."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    causal = kwargs.pop(CAUSAL, None)
    max_documents = kwargs.pop(MAX_DOCUMENTS, None)
    if causal is not None and not isinstance(causal, bool):
        raise InvalidValueError(f"{CAUSAL} is {causal!r}: it must be True, False or None")
    if causal is None and given.get("past_key_values") is not None:
        causal = True  # somebody generates
    attention = check_implementation(decoder.config._attn_implementation)
    if not given.get("is_causal", getattr(decoder.config, "is_causal", True)):
        raise InvalidValueError("is_causal is False: routed layers look back only; leave it out")
    if given.get("output_router_logits") and given.get("attention_mask") is not None:
        raise InvalidValueError(
            "transformers counts expert logits against attention_mask, and tokens that skip have none: "
            "pass output_router_logits=False, or no attention_mask"
        )
    shape = _shape(given)
    valid = _valid(kwargs.pop(PADDING, given.get("attention_mask")), shape)
    doc: Tensor | None = None
    positions, starts = given.get("position_ids"), given.get("cu_seq_lens_q")
    if given.get("attention_mask") is None:
        if positions is not None:
            doc = _documents(positions, shape[0])
        elif starts is not None and "flash" in attention:  # others do not look at it
            doc = _runs(starts, shape)
        if doc is not None and "flash" in attention and shape[0] > 1:
            raise InvalidValueError(
                f"{attention} keeps documents apart in one row only: flatten the batch, or use sdpa"
            )
        if doc is not None and _caches(decoder, given):
            raise InvalidValueError("position_ids hold several documents, and a cache holds one: pass use_cache=False")
    return args, {**kwargs, KEYWORD: Tokens(valid, doc, causal, max_documents)}


def argument_names(method: Callable[..., Any]) -> tuple[str, ...]:
    """Of a method, in order, without self."""
    return tuple(inspect.signature(method).parameters)[1:]


def _shape(given: dict[str, Any]) -> tuple[int, int]:
    """(B, T). What transformers would refuse is left to it."""
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    return (0, 0) if tokens is None else (tokens.shape[0], tokens.shape[1])


def _valid(mask: Any, shape: tuple[int, int]) -> Tensor | None:
    """Which of the new tokens are no padding. The mask tells it of all, those in the cache first."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidValueError(
            f"attention_mask is {got}: routed layers need one of shape (batch, tokens), 0 at padding; "
            "they make masks of more dimensions themselves"
        )
    valid = mask[:, mask.shape[1] - shape[1] :] != 0
    return None if not torch.compiler.is_compiling() and bool(valid.all()) else valid


def _documents(position_ids: Tensor, batch: int) -> Tensor | None:
    """Documents as transformers tells them apart: where positions do not go on by one, another begins."""
    from transformers.masking_utils import find_packed_sequence_indices

    doc: Tensor | None = find_packed_sequence_indices(position_ids.expand(batch, -1))
    return doc


def _runs(starts: Tensor, shape: tuple[int, int]) -> Tensor:
    """Documents as flash attention tells them apart, of a batch of one row."""
    places = torch.arange(shape[1], device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts, places, right=True)[None].expand(shape)


def _caches(decoder: Any, given: dict[str, Any]) -> bool:
    if given.get("past_key_values") is not None:
        return True
    use_cache = given.get("use_cache")
    use_cache = decoder.config.use_cache if use_cache is None else use_cache
    return bool(use_cache) and not (decoder.gradient_checkpointing and decoder.training)
