"""Facts about tokens that a routed layer cannot see: padding, documents, and how tokens are to be chosen.

A hook on the decoder reads them from the decoder's own arguments and hands them down to the layers as one more keyword.
A token may attend to earlier tokens of its document, within the window; each kind of attention is told in its own way.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgate.errors import DepthgateError, InvalidValueError

KEYWORD = "depthgate_tokens"
PADDING = "token_mask"  # (B, T), 0 at padding, next to an attention_mask that is ready for use


class Tokens(NamedTuple):
    """The tokens of one call of the decoder."""

    valid: Tensor | None  # (B, T) bool, False at padding; None: no padding
    doc: Tensor | None  # (B, T) the document of each token; None: one a row
    causal: bool | None  # None: route causally unless the model is in training mode
    max_documents: int | None = None  # the most documents a row holds, where the caller knows


def hand_down(
    names: tuple[str, ...], decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add `Tokens` to a decoder's keywords: a forward pre-hook, once it is given the names of the arguments."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    causal, max_documents = kwargs.pop("causal_routing", None), kwargs.pop("max_documents", None)
    if causal is not None and not isinstance(causal, bool):
        raise InvalidValueError(f"causal_routing is {causal!r}: it must be True, False or None")
    if causal is None and given.get("past_key_values") is not None:
        causal = True  # as in generation
    attention = _checked(decoder.config._attn_implementation)
    if not given.get("is_causal", getattr(decoder.config, "is_causal", True)):
        raise InvalidValueError("is_causal is False: routed layers look back only; leave it out")
    if given.get("output_router_logits") and given.get("attention_mask") is not None:
        raise InvalidValueError(
            "transformers counts expert logits against attention_mask, and tokens that skip have none: "
            "pass output_router_logits=False, or no attention_mask"
        )
    shape = _shape(given)
    valid = _valid(kwargs.pop(PADDING, given.get("attention_mask")), shape)
    doc = _documents(given, shape, attention) if given.get("attention_mask") is None else None
    if doc is not None and "flash" in attention and shape[0] > 1:
        raise InvalidValueError(f"{attention} keeps documents apart in one row only: flatten the batch, or use sdpa")
    if doc is not None and _caches(decoder, given):
        raise InvalidValueError("position_ids hold several documents, and a cache holds one: pass use_cache=False")
    return args, {**kwargs, KEYWORD: Tokens(valid, doc, causal, max_documents)}


def argument_names(method: Callable[..., Any]) -> tuple[str, ...]:
    """Arguments of a method in order, without self."""
    return tuple(inspect.signature(method).parameters)[1:]


def _shape(given: dict[str, Any]) -> tuple[int, int]:
    """(B, T). What transformers would refuse is left to it."""
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    return (0, 0) if tokens is None else (tokens.shape[0], tokens.shape[1])


def _valid(mask: Any, shape: tuple[int, int]) -> Tensor | None:
    """(B, T) bool, False where a new token is padding. The mask covers all tokens, those in the cache first."""
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


def _documents(given: dict[str, Any], shape: tuple[int, int], attention: str) -> Tensor | None:
    """(B, T) the document of each token, as transformers tells them apart: another one begins where positions do not
    go on by one; without positions flash attention, and no other, looks at the starts of runs in a single row."""
    positions, starts = given.get("position_ids"), given.get("cu_seq_lens_q")
    doc: Tensor | None = None
    if positions is not None:
        from transformers.masking_utils import find_packed_sequence_indices

        doc = find_packed_sequence_indices(positions.expand(shape[0], -1))
    elif starts is not None and "flash" in attention:
        places = torch.arange(shape[1], device=starts.device, dtype=starts.dtype)
        doc = torch.searchsorted(starts, places, right=True)[None].expand(shape)
    return doc


def _caches(decoder: Any, given: dict[str, Any]) -> bool:
    if given.get("past_key_values") is not None:
        return True
    use_cache = given.get("use_cache")
    use_cache = decoder.config.use_cache if use_cache is None else use_cache
    return bool(use_cache) and not (decoder.gradient_checkpointing and decoder.training)


def _checked(attention: str) -> str:
    """Refuse kinds of attention that cannot be told here what to look at."""
    if attention not in ("eager", "sdpa", "flex_attention") and ("flash" not in attention or "paged" in attention):
        raise DepthgateError(
            f"routed layers cannot use {attention} attention: call model.set_attn_implementation('sdpa')"
        )
    return attention


class Attended(NamedTuple):
    """Queries and keys of one call of a layer. A slot is a token's place in the text; the empty ones of a row, -1, come
    last."""

    query: Tensor  # (A, Q) slots
    key: Tensor  # (A, K) slots
    full: bool  # True: no slot is empty
    cached: bool  # False: the keys are those of the queries
    length: int | None  # of the text so far, where the host knows it
    ordered: bool = True  # True: the keys of a row are in order
    doc: Tensor | None = None  # (A, Q) documents of the queries, which are then the keys, too
    window: int | None = None  # number of slots that a token looks back, its own included; None: all

    def allows(self, q: Tensor, k: Tensor, same_document: Tensor | bool = True) -> Tensor:
        """True where the query at slot q may look at the key at slot k."""
        allowed = (k >= 0) & (k <= q) & same_document
        if self.window is not None:
            allowed = allowed & (k > q - self.window)
        # An empty slot looks at everything: its result is thrown away, and looking at nothing would be 0/0.
        return allowed | (q < 0)


def attention_keywords(seen: Attended, implementation: str, dtype: torch.dtype) -> dict[str, Any]:
    """Keywords that tell the attention of a layer what to look at."""
    if "flash" in implementation:
        return {"attention_mask": None, **_run_lengths(seen, implementation)}
    if implementation == "flex_attention":
        return {"attention_mask": _block_mask(seen)}
    if implementation == "sdpa" and seen.full and not seen.cached and seen.doc is None and seen.window is None:
        return {"attention_mask": None}  # it is causal by itself, and fastest so
    same = True if seen.doc is None else seen.doc[:, :, None] == seen.doc[:, None, :]
    allowed = seen.allows(seen.query[:, :, None], seen.key[:, None, :], same)[:, None]
    if implementation == "sdpa":
        return {"attention_mask": allowed}
    return {"attention_mask": torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)}


def _block_mask(seen: Attended) -> Any:
    """The mask of flex attention: a function of indices, and the blocks in which it allows anything."""
    from torch.nn.attention.flex_attention import create_block_mask

    def allows(row: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = True if seen.doc is None else seen.doc[row, i] == seen.doc[row, j]
        return seen.allows(seen.query[row, i], seen.key[row, j], same)

    A, Q = seen.query.shape
    return create_block_mask(allows, A, None, Q, seen.key.shape[1], device=seen.query.device)


def _run_lengths(seen: Attended, implementation: str) -> dict[str, Any]:
    """For flash attention: the starts, in the flattened batch, of runs of tokens that look at each other. The empty
    slots of a row are a run of their own, whose result is not read."""
    if seen.window is not None:
        raise DepthgateError(
            f"{implementation} counts its window in rows, and tokens that skip have no row: for texts longer than the "
            f"window ({seen.window}) call model.set_attn_implementation('sdpa')"
        )
    if not seen.ordered:
        raise DepthgateError(f"{implementation} cannot use a static cache: call model.set_attn_implementation('sdpa')")
    queries = run_starts(seen.query, seen.doc)
    return {
        "cu_seq_lens_q": queries,
        "cu_seq_lens_k": queries if seen.key is seen.query else run_starts(seen.key, None),
        "max_length_q": seen.query.shape[1],
        "max_length_k": seen.key.shape[1],
    }


def run_starts(slots: Tensor, doc: Tensor | None) -> Tensor:
    """Slots (A, C), -1 for none and last -> int32: the starts of runs in the flattened rows, and their end. Without
    documents a row has two, that of its tokens and that of its empty slots; either may have no length."""
    A, C = slots.shape
    real = slots >= 0
    if doc is None:
        count = real.sum(1)
        ends = torch.stack((count, C - count), 1).flatten().cumsum(0)
        return torch.cat((ends.new_zeros(1), ends)).int()
    label = torch.where(real, doc, doc.new_full((), torch.iinfo(doc.dtype).min))
    begins = torch.ones_like(real)
    begins[:, 1:] = label[:, 1:] != label[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    return torch.cat((starts, starts.new_full((1,), A * C))).int()
