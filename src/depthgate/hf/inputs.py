"""Facts about tokens that a routed layer cannot see: padding, documents, how they are chosen, and where they look. The
decoder hands them down to its layers as one more keyword."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from depthgate.errors import DepthgateError, InvalidValueError, check_choice

KEYWORD = "depthgate_tokens"
PADDING = "token_mask"  # (B, T), 0 at padding, next to an attention_mask that is ready for use
MODES: dict[str, bool | None] = {"auto": None, "causal": True, "top_k": False}  # routing_mode -> Tokens.causal


class Tokens(NamedTuple):
    """The tokens of one call of the decoder."""

    pos: Tensor | None  # (B, T) place in the call, -1 at padding; None: no padding
    doc: Tensor | None  # (B, T) the first token of each token's document; None: one a row
    causal: bool | None  # None: route causally unless the model is in training mode
    max_documents: int | None = None  # the most documents a row holds, where the caller knows
    rule_loss: float = 0.0  # weight of the loss that teaches the causal rule
    lacking: Tensor | None = None  # () the most slots that a layer lacked so far; None: layers take all they need


def causal_of(asked: Any, cached: bool, mode: Any) -> bool | None:
    """Whether a call chooses causally: as it asks, as a cache needs, as the model's routing_mode says; None: unless the
    model is in training mode."""
    if asked is not None and not isinstance(asked, bool):
        raise InvalidValueError(f"causal_routing is {asked!r}: it must be True, False or None")
    if asked is not None or cached:  # with a cache as in generation
        return cached if asked is None else asked
    return MODES[check_choice(mode, "routing_mode", MODES)]


def hand_down(names: tuple[str, ...], decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tokens | None:
    """The tokens of a call of a decoder, by its arguments; those that are ours alone are taken out of `kwargs`. None if
    there are no tokens."""
    asked, most = kwargs.pop("causal_routing", None), kwargs.pop("max_documents", None)
    weight, padding = kwargs.pop("rule_loss", None), kwargs.pop(PADDING, None)
    given = {name: value for name, value in (*zip(names, args, strict=False), *kwargs.items()) if value is not None}
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if tokens is None:
        return None
    causal = causal_of(asked, "past_key_values" in given, decoder.config.routing_mode)
    _check(given, decoder.config)
    mask = given.get("attention_mask")
    doc = _documents(given, tokens.shape[:2], decoder) if mask is None else None
    if doc is not None:
        kwargs["use_cache"] = False
    if isinstance(mask, Tensor) and mask.ndim == 2 and "attention_mask" in kwargs:
        kwargs["attention_mask"] = mask.expand(len(tokens), -1) if len(mask) == 1 else mask  # one for all rows
    mask = mask if padding is None else padding
    valid = None if mask is None else valid_tokens(mask, tokens.shape[:2])
    pos = None if valid is None else torch.arange(valid.shape[1], device=valid.device).where(valid, -1)
    return Tokens(pos, doc, causal, most, decoder.config.depthgate["rule_loss"] if weight is None else weight)


def _check(given: dict[str, Any], config: Any) -> None:
    """Refuse calls that routed layers cannot serve."""
    kind, cache = config._attn_implementation, given.get("past_key_values")
    flash, remedy = "flash" in kind and "paged" not in kind, "call model.set_attn_implementation('sdpa')"
    if not flash and kind not in ("eager", "sdpa", "flex_attention"):
        raise DepthgateError(f"routed layers cannot use {kind} attention: {remedy}")
    if getattr(cache, "offloading", False):  # before a dense layer looks for CUDA
        raise DepthgateError("routed layers cannot use an offloaded cache: use cache_implementation='dynamic'")
    if flash and getattr(cache, "is_compileable", False):
        raise DepthgateError(f"{kind} cannot use a static cache: {remedy}")
    if not given.get("is_causal", getattr(config, "is_causal", True)):
        raise InvalidValueError("is_causal is False: routed layers look back only; leave it out")
    if given.get("output_router_logits") and "attention_mask" in given:
        what = "transformers counts expert logits against attention_mask, and tokens that skip have none"
        raise InvalidValueError(f"{what}: pass output_router_logits=False, or no attention_mask")


def valid_tokens(mask: Any, shape: Sequence[int]) -> Tensor | None:
    """(B, T) bool, False where a new token is padding. The mask covers all tokens, those in the cache first."""
    fits = isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[0] in (1, shape[0]) and mask.shape[1] >= shape[1]
    if not fits:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        what = f"attention_mask is {got}: routed layers need one of shape (batch, tokens), 0 at padding"
        raise InvalidValueError(f"{what}; they make masks of more dimensions themselves")
    valid = (mask[:, mask.shape[1] - shape[1] :] != 0).expand(shape)
    return None if not torch.compiler.is_compiling() and bool(valid.all()) else valid


def places(ids: Tensor, mask: Any, positions: Any, cache: Any) -> tuple[Tensor | None, Tensor | None]:
    """Positions (B, T) of new tokens, -1 at padding, and their documents (B, T), as a Decoder takes them. The mask
    covers all tokens, those in the cache first; without one, another document begins where positions do not go on."""
    (B, T), doc = ids.shape, None
    if getattr(cache, "is_compileable", False) or getattr(cache, "offloading", False):
        raise DepthgateError("a Decoder cannot use a static or offloaded cache: use cache_implementation='dynamic'")
    if mask is not None:
        valid = valid_tokens(mask, (B, T))
        positions = None if valid is None and cache is None else (mask != 0).cumsum(1)[:, -T:] - 1
        positions = positions if valid is None else torch.where(valid, positions, -1)
    elif cache is not None:
        positions = torch.arange(T, device=ids.device).expand(B, T) + cache.get_seq_length()
    elif positions is not None:
        from transformers.masking_utils import find_packed_sequence_indices

        positions = positions.expand(B, T)
        doc = find_packed_sequence_indices(positions)
    return positions, doc


def _documents(given: dict[str, Any], shape: tuple[int, int], decoder: Any) -> Tensor | None:
    """(B, T) the first token of each token's document, as transformers tells documents apart: another one begins where
    positions do not go on by one; without positions flash attention, and no other, looks at the starts of runs."""
    positions, starts = given.get("position_ids"), given.get("cu_seq_lens_q")
    attention = decoder.config._attn_implementation
    checkpointed = decoder.gradient_checkpointing and decoder.training  # transformers then makes no cache
    cached = "past_key_values" in given or (given.get("use_cache") and not checkpointed)
    doc: Tensor | None = None
    if cached and torch.compiler.is_compiling():  # it cannot look at positions; a cache holds one document
        return None
    if positions is not None:
        from transformers.masking_utils import find_packed_sequence_indices

        doc = find_packed_sequence_indices(positions.expand(shape[0], -1))
    elif starts is not None and "flash" in attention:
        places = torch.arange(shape[1], device=starts.device, dtype=starts.dtype)
        doc = torch.searchsorted(starts, places, right=True).repeat(shape[0], 1)
    if doc is None:
        return None
    if "flash" in attention and shape[0] > 1:
        raise InvalidValueError(f"{attention} keeps documents apart in one row only: flatten the batch, or use sdpa")
    if cached:
        raise InvalidValueError("position_ids hold several documents, and a cache holds one: pass use_cache=False")
    return torch.searchsorted(doc, doc)


def attention_keywords(
    kind: str, query: Tensor, key: Tensor, first: Tensor | None, window: int | None, dtype: torch.dtype, newest: bool
) -> dict[str, Any]:
    """Keywords that tell this kind of attention which keys (A, K) each query (A, Q) looks at. Both are given by their
    slots, their places in the text; without a cache they are the same tensor. Empty slots, -1, come last in a row.
    first (A, Q): the earliest slot that a query looks at, where a row holds several documents. window: how many slots
    back, its own included. newest: queries are the last tokens of their rows, one in each, and none is empty."""
    if "flash" in kind:
        if window is not None:
            remedy = f"for texts longer than the window ({window}) call model.set_attn_implementation('sdpa')"
            raise DepthgateError(f"{kind} counts its window in rows, and tokens that skip have no row: {remedy}")
        starts = run_starts(query, first)
        return {
            "attention_mask": None,
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts if key is query else run_starts(key, None),
            "max_length_q": query.shape[1],
            "max_length_k": key.shape[1],
        }
    if kind == "sdpa" and key is query and first is None and window is None:
        # It is causal by itself, and fastest so: empty slots come last, where no token looks.
        return {"attention_mask": None}
    if kind == "sdpa" and newest and first is None and window is None:
        return {"attention_mask": (key >= 0)[:, None, None]}
    first = torch.zeros_like(query) if first is None else first
    if window is not None:
        first = first.maximum(query - window + 1)
    # An empty slot looks at everything: its result is thrown away, and looking at nothing would be 0/0.
    first, last = torch.where(query < 0, -1, first), torch.where(query < 0, torch.iinfo(query.dtype).max, query)
    if kind == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def allows(row: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (first[row, i] <= key[row, j]) & (key[row, j] <= last[row, i])

        (A, Q), K = query.shape, key.shape[1]
        return {"attention_mask": create_block_mask(allows, A, None, Q, K, device=query.device)}
    allowed = ((first[:, :, None] <= key[:, None, :]) & (key[:, None, :] <= last[:, :, None]))[:, None]
    if kind == "sdpa":
        return {"attention_mask": allowed}
    return {"attention_mask": torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)}


def run_starts(slots: Tensor, doc: Tensor | None) -> Tensor:
    """Slots (A, C), -1 for none and last -> int32: the starts, in the flattened rows, of runs of tokens that look at
    each other, and the end. Without documents a row has two runs, its tokens and its empty slots, whose result is not
    read; either may have no length."""
    real = slots >= 0
    if doc is None:
        lengths = torch.stack((real.sum(1), (~real).sum(1)), 1).flatten()
    else:
        lengths = torch.unique_consecutive(torch.where(real, doc, -1).flatten(), return_counts=True)[1]
    return F.pad(lengths.cumsum(0), (1, 0)).int()
