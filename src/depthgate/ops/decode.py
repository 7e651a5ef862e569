"""The parts of a decode step, over the rows of a batch that compute: one new token a row, keys and values in pages.

Each is a function of tensors alone, and is its own specification; `decode_triton` has the kernels that do the same on
CUDA, and return at once where no row computes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from depthgate.ops.attention import rope, rotation, with_half_of


class Rows(NamedTuple):
    """The rows of a batch that compute: the first `many` of `places`, ascending. Results have the rows in this order,
    and whatever lies beyond them is not computed."""

    places: Tensor  # (S,) int64
    many: Tensor  # () int32

    @property
    def taken(self) -> Tensor:
        """(N,) the rows themselves. Waits for the device."""
        return self.places[: int(self.many)]


class Pages(NamedTuple):
    """Keys and values of one layer: entry i of row r lies in page table[r, i // size], at place i % size."""

    kv: Tensor  # (P, 2, G, size, d)
    table: Tensor  # (S, n) int32
    lengths: Tensor  # (S,) int32 entries of each row
    last_key: Tensor | None  # (S, G, d) the last key of each row, where keys take half from the token before


class Heads(NamedTuple):
    """How queries and keys are made of a projection (N, (H + 2 G) d)."""

    heads: int
    kv_heads: int
    dim: int
    q_norm: Tensor | None  # (d,)
    k_norm: Tensor | None
    eps: float | None
    rope_base: float


def linear(
    x: Tensor,
    rows: Rows,
    weight: Tensor,
    *,
    add: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """weight (N, K) times the rows of x (S, K), plus `add` (N, K), normalised where there is a norm (K,)."""
    y = x[rows.taken]
    y = y if add is None else y + add
    y = y if norm is None else F.rms_norm(y, y.shape[-1:], norm, eps)
    return F.linear(y, weight)


def attend(qkv: Tensor, rows: Rows, pos: Tensor, heads: Heads, pages: Pages) -> Tensor:
    """Attention of the new token of each row to those before it and itself, (N, (H + 2 G) d) -> (N, H d). Its key and
    value are stored in the row's pages, which have room; `lengths` stay as they are until the step is over."""
    index, size = rows.taken, pages.kv.shape[3]
    H, G, d = heads.heads, heads.kv_heads, heads.dim
    q, k, v = qkv.view(-1, 1, H + 2 * G, d).split((H, G, G), dim=2)  # type: ignore[no-untyped-call]
    cos, sin = rotation(pos[index, None], d // 2, heads.rope_base, torch.promote_types(qkv.dtype, torch.float32))
    q = rope(q if heads.q_norm is None else F.rms_norm(q, (d,), heads.q_norm, heads.eps), cos, sin)
    k = rope(k if heads.k_norm is None else F.rms_norm(k, (d,), heads.k_norm, heads.eps), cos, sin)
    lengths, table, k, v = pages.lengths[index].long(), pages.table[index].long(), k[:, 0], v[:, 0]
    if pages.last_key is not None:
        before = torch.where((lengths > 0)[:, None, None], pages.last_key[index], k)
        pages.last_key[index] = k
        k = with_half_of(k, before)
    page = table.gather(1, lengths[:, None] // size)[:, 0]
    pages.kv[page, 0, :, lengths % size] = k.to(pages.kv.dtype)
    pages.kv[page, 1, :, lengths % size] = v.to(pages.kv.dtype)
    most = int(lengths.max()) + 1
    stored = pages.kv[table[:, : -(-most // size)]]  # (N, n, 2, G, size, d)
    keys, values = stored.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :most]  # each (N, G, T, d)
    allowed = torch.arange(most, device=qkv.device) <= lengths[:, None]
    y = F.scaled_dot_product_attention(q.view(-1, G, H // G, d), keys, values, allowed[:, None, None])
    return y.reshape(-1, H * d)


def add_update(x: Tensor, rows: Rows, update: Tensor, gates: Tensor | None = None) -> None:
    """Add updates (N, D) to the rows of x (S, D) in place, each times its gate (N,)."""
    update = update if gates is None else update * gates[:, None].to(update.dtype)
    x.index_add_(0, rows.taken, update.to(x.dtype))
