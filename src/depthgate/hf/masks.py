"""What a token may look at, from slots alone: what came before it, in its document, within the window. And how each
kind of attention wants to be told."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgate.errors import DepthgateError


class Seen(NamedTuple):
    """Who looks at whom in one call of a layer. Of each row those that are there come first, in order."""

    query: Tensor  # (A, Q) slots, -1 for none
    key: Tensor  # (A, K)
    doc: Tensor | None  # (A, Q) documents of the queries, which are then the keys, too
    window: int | None  # how many slots back a token looks, its own among them; None: all
    plain: bool  # whether rows are full, in order, alone, within the window, and look at themselves only
    sorted_keys: bool = True  # whether the keys of a row are in order, too


def visible(query: Tensor, key: Tensor, doc: Tensor | None = None, window: int | None = None) -> Tensor:
    """Slots (A, Q) and (A, K), -1 for none -> (A, 1, Q, K), True where a query may look. `doc` (A, Q) is of the
    queries, which are then the keys, too."""
    q, k = query[:, :, None], key[:, None, :]
    allowed = (k >= 0) & (k <= q)
    if window is not None:
        allowed = allowed & (k > q - window)
    if doc is not None:
        allowed = allowed & (doc[:, :, None] == doc[:, None, :])
    # An empty row looks at everything: its result is thrown away, and looking at nothing would be 0/0.
    return (allowed | (q < 0))[:, None]


def as_asked(seen: Seen, implementation: str, dtype: torch.dtype) -> dict[str, Any]:
    """Keywords for the attention of a layer."""
    if "flash" in implementation:
        return {"attention_mask": None, **_lengths(seen, implementation)}
    if implementation == "flex_attention":
        return {"attention_mask": _block_mask(seen)}
    if implementation == "sdpa" and seen.plain:  # it is causal by itself, and fastest so
        return {"attention_mask": None}
    allowed = visible(*seen[:4])
    if implementation == "sdpa":
        return {"attention_mask": allowed}
    return {"attention_mask": torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)}


def _block_mask(seen: Seen) -> Any:
    """For flex attention: the law itself, and which blocks of it hold anything."""
    from torch.nn.attention.flex_attention import create_block_mask

    query, key, doc, window = seen[:4]

    def law(row: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q, k = query[row, i], key[row, j]
        allowed = (k >= 0) & (k <= q)
        if window is not None:
            allowed = allowed & (k > q - window)
        if doc is not None:
            allowed = allowed & (doc[row, i] == doc[row, j])
        return allowed | (q < 0)

    A, Q = query.shape
    return create_block_mask(law, A, None, Q, key.shape[1], device=query.device)


def _lengths(seen: Seen, implementation: str) -> dict[str, Any]:
    """For flash attention: where runs of tokens that look at each other begin in the flattened batch. The empty slots
    of a row are a run of their own, which nobody reads."""
    if seen.window is not None:
        raise DepthgateError(
            f"{implementation} counts its window in rows, and tokens that skip are none: for texts longer than the "
            f"window ({seen.window}) call model.set_attn_implementation('sdpa')"
        )
    if not seen.sorted_keys:
        raise DepthgateError(f"{implementation} cannot use a static cache: call model.set_attn_implementation('sdpa')")
    queries = run_starts(seen.query, seen.doc)
    keys = queries if seen.key is seen.query else run_starts(seen.key, None)
    return {
        "cu_seq_lens_q": queries,
        "cu_seq_lens_k": keys,
        "max_length_q": seen.query.shape[1],
        "max_length_k": seen.key.shape[1],
    }


def run_starts(slots: Tensor, doc: Tensor | None) -> Tensor:
    """Slots (A, C), -1 for none and last -> int32: where runs begin in the flattened rows, and their end. Without
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


def check_implementation(name: str) -> str:
    """Refuse kinds of attention that are not told here what to look at."""
    if name not in ("eager", "sdpa", "flex_attention") and ("flash" not in name or "paged" in name):
        raise DepthgateError(f"routed layers cannot use {name} attention: call model.set_attn_implementation('sdpa')")
    return name
