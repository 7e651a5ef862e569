"""What a token may look at, from slots alone: what came before it, in its document, within the window."""

import torch
from torch import Tensor

from depthgate.errors import DepthgateError

IMPLEMENTATIONS = ("eager", "sdpa")


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


def as_asked(allowed: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    """The mask as an attention implementation wants it."""
    if implementation == "sdpa":
        return allowed
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def check_implementation(name: str) -> str:
    """Refuse kinds of attention whose masks are not made here."""
    if name not in IMPLEMENTATIONS:
        raise DepthgateError(f"routed layers cannot use {name} attention: call model.set_attn_implementation('sdpa')")
    return name
