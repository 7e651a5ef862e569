"""The parts of a decode step: one new token in each row of a batch, keys and values of those before it in pages.

Each is a function of tensors alone, and is its own specification; `decode_triton` has the kernels that do the same on
CUDA, and return at once where no row computes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from depthgate.ops.attention import rope, with_half_of


class Rows(NamedTuple):
    """The rows of a batch that compute: the first `many` of `places`, ascending. Results have the rows in this order,
    and whatever lies beyond them is not computed."""

    places: Tensor  # (B,) int64
    many: Tensor  # () int32

    @property
    def taken(self) -> Tensor:
        """(N,) the rows themselves. Waits for the device."""
        return self.places[: int(self.many)]


class Heads(NamedTuple):
    """The way in which a projection (N, (H + 2 G) d) becomes queries, keys and values."""

    heads: int
    kv_heads: int
    dim: int
    q_norm: Tensor | None  # (d,)
    k_norm: Tensor | None
    eps: float | None


class Pages(NamedTuple):
    """Keys and values of one layer: entry i of row r lies in page table[r, i // size], at place i % size."""

    kv: Tensor  # (P, 2, G, size, d)
    table: Tensor  # (B, n) int32
    lengths: Tensor  # (B,) int32 entries of each row
    last_key: Tensor | None  # (B, G, d) the last key of each row, where keys take half from the token before

    def stored(self, rows: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
        """Keys and values (N, G, most, d) of the first entries of some rows."""
        table = self.table if rows is None else self.table[rows]
        table = table[:, : -(-most // self.kv.shape[3])]
        first, (N, n) = int(table[0, 0]), table.shape
        if n == 1 and table[:, 0].tolist() == list(range(first, first + N)):  # as they lie: nothing is copied
            kv = self.kv[first : first + N]
        else:
            pages = self.kv.index_select(0, table.flatten()).view(N, n, *self.kv.shape[1:]).unbind(1)
            kv = pages[0] if n == 1 else torch.cat(pages, 3)
        return kv[:, 0, :, :most], kv[:, 1, :, :most]


def linear(
    x: Tensor,
    rows: Rows | None,
    weight: Tensor,
    *,
    add: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """weight (F, K) times rows of x (B, K), None: all, plus `add` (N, K), normalised where there is a norm (K,)."""
    y = x if rows is None else x[rows.taken]
    y = y if add is None else y + add
    y = y if norm is None else F.rms_norm(y, y.shape[-1:], norm, eps)
    return F.linear(y, weight)


def attend(qkv: Tensor, rows: Rows | None, cos: Tensor, sin: Tensor, heads: Heads, pages: Pages) -> Tensor:
    """Attention of the new token of each row to those before it and itself, (N, (H + 2 G) d) -> (N, H d). Queries and
    keys are turned by cos and sin (B, d/2). The key and value are stored in the row's pages, which have room for them;
    `lengths` stay as they are until the step is over."""
    index, size = None if rows is None else rows.taken, pages.kv.shape[3]
    H, G, d = heads.heads, heads.kv_heads, heads.dim
    lengths = pages.lengths
    if index is not None:
        cos, sin, lengths = cos[index], sin[index], lengths[index]
    q, k, v = qkv.view(-1, H + 2 * G, d).split((H, G, G), dim=1)  # type: ignore[no-untyped-call]
    q = rope(q if heads.q_norm is None else F.rms_norm(q, (d,), heads.q_norm, heads.eps), cos[:, None], sin[:, None])
    k = rope(k if heads.k_norm is None else F.rms_norm(k, (d,), heads.k_norm, heads.eps), cos[:, None], sin[:, None])
    place = slice(None) if index is None else index
    if pages.last_key is not None:
        before = torch.where((lengths > 0)[:, None, None], pages.last_key[place], k)
        pages.last_key[place] = k
        k = with_half_of(k, before)
    page = pages.table[place].gather(1, (lengths // size)[:, None].long())[:, 0]
    pages.kv[page, 0, :, lengths % size] = k.to(pages.kv.dtype)
    pages.kv[page, 1, :, lengths % size] = v.to(pages.kv.dtype)
    most = int(lengths.max()) + 1
    keys, values = pages.stored(index, most)
    allowed = None
    if len(q) > 1:
        allowed = (torch.arange(most, device=qkv.device) <= lengths[:, None])[:, None, None]
    y = F.scaled_dot_product_attention(q.view(-1, G, H // G, d), keys, values, allowed)
    return y.reshape(-1, H * d)


def add_update(x: Tensor, rows: Rows | None, update: Tensor, gates: Tensor | None = None) -> Tensor:
    """x (B, D) with updates (N, D) added to its rows, each times its gate (N,)."""
    update = update if gates is None else update * gates[:, None].to(update.dtype)
    return x + update if rows is None else x.index_add(0, rows.taken, update.to(x.dtype))
