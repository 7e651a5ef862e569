"""Attention of the new token of each row to the entries in its pages, as kernels; `decode.attend` is their twin. The
entries of a row are read in parts, by several programs, and what these found is joined by a second kernel.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthgate.ops.linear_triton import counted, eps_of, fetch_early, let_next_begin, overlaps


@triton.jit
def _turned(a, b, norm, cos, sin, eps, half, half_mask, D: tl.constexpr):
    """The halves of heads (M, d/2), normalised and turned."""
    if norm is not None:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a = a * scale * tl.load(norm + half, half_mask, other=0.0).to(tl.float32)[None, :]
        b = b * scale * tl.load(norm + D // 2 + half, half_mask, other=0.0).to(tl.float32)[None, :]
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _span(split, length, SPLITS: tl.constexpr, BS: tl.constexpr):
    """Start and end of the entries of a split: a fair share of the tiles that the row has with its new entry."""
    tiles = tl.cdiv(length + 1, BS)
    return split * tiles // SPLITS * BS, (split + 1) * tiles // SPLITS * BS


@triton.jit
def _tile(
    kv, stride, table, entries, row, g, t, end,
    G: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Halves of the keys (d/2, N) and values (N, d) of the entries from t on, and which of them are real."""
    e = tl.arange(0, BS)
    half = tl.arange(0, BD // 2)
    d = tl.arange(0, BD)
    there = t + e < end
    some = there[None, :] & (half < D // 2)[:, None]
    page = tl.load(table + row * entries + tl.minimum(t // SIZE, entries - 1)).to(tl.int64)
    k = kv + page * stride + (g * SIZE + t % SIZE) * D
    ka = tl.load(k + e[None, :] * D + half[:, None], some, other=0.0)
    kb = tl.load(k + e[None, :] * D + D // 2 + half[:, None], some, other=0.0)
    v = tl.load(k + G * SIZE * D + e[:, None] * D + d[None, :], there[:, None] & (d < D)[None, :], other=0.0)
    return ka, kb, v, there


@triton.jit
def _absorbed(qa, qb, ka, kb, v, there, best, weight, total):
    """The largest score, the sum of weights and the weighted sum of values so far (M,), (M,), (M, d), with a tile."""
    z = tl.dot(qa, ka, input_precision="ieee")
    z = tl.dot(qb, kb, z, input_precision="ieee")
    z = tl.where(there[None, :], z, -float("inf"))
    top = tl.maximum(best, tl.max(z, 1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp(z - safe[:, None])
    shrink = tl.exp(best - safe)
    total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
    return top, weight * shrink + tl.sum(p, 1), total


@triton.jit
def attend_part(
    i, row, g, split, first, qkv, cos, sin, q_norm, k_norm, eps, kv, stride, table, entries, lengths, last_key,
    part, sums, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
    BH: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A split of one row and one head of keys; the first tile is there already, or None."""
    R: tl.constexpr = H // G
    HALF: tl.constexpr = D // 2
    h = tl.arange(0, BH)
    half = tl.arange(0, BD // 2)
    d = tl.arange(0, BD)
    some = half < HALF
    length = tl.load(lengths + row)
    start, end = _span(split, length, SPLITS, BS)
    own_page = tl.load(table + row * entries + length // SIZE).to(tl.int64)
    base = qkv + i.to(tl.int64) * (H + 2 * G) * D
    at = (g * R + h)[:, None] * D + half[None, :]
    q_mask = (h < R)[:, None] & some[None, :]
    c = tl.load(cos + row * HALF + half, some, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * HALF + half, some, other=0.0).to(tl.float32)[None, :]
    qa = tl.load(base + at, q_mask, other=0.0).to(tl.float32)
    qb = tl.load(base + at + HALF, q_mask, other=0.0).to(tl.float32)
    one = tl.zeros((1,), tl.int32)[:, None] + half[None, :]
    own = (length >= start) & (length < end)  # the new token is this split's
    real = some[None, :] & own
    new_a = tl.load(base + (H + g) * D + one, real, other=0.0).to(tl.float32)
    new_b = tl.load(base + (H + g) * D + HALF + one, real, other=0.0).to(tl.float32)
    value = tl.load(base + (H + G + g) * D + d, (d < D) & own, other=0.0)
    if last_key is not None:
        last = last_key + (row * G + g) * D + one
        old_a = tl.load(last, real, other=0.0).to(tl.float32)
        old_b = tl.load(last + HALF, real, other=0.0).to(tl.float32)
    qa, qb = _turned(qa, qb, q_norm, c, s, eps, half, some, D)
    dtype = kv.dtype.element_ty
    qa, qb = (qa * scale).to(dtype), (qb * scale).to(dtype)
    best = tl.full((BH,), -float("inf"), tl.float32)
    weight = tl.zeros((BH,), tl.float32)
    total = tl.zeros((BH, BD), tl.float32)
    begin = start
    if first is not None:
        best, weight, total = _absorbed(qa, qb, first[0], first[1], first[2], first[3], best, weight, total)
        begin += BS
    stop = tl.minimum(end, length)
    for t in range(begin, stop, BS):
        ka, kb, v, there = _tile(kv, stride, table, entries, row, g, t, stop, G, D, SIZE, BS, BD)
        best, weight, total = _absorbed(qa, qb, ka, kb, v, there, best, weight, total)
    if own:
        new_a, new_b = _turned(new_a, new_b, k_norm, c, s, eps, half, some, D)
        if last_key is not None:
            slow = (half >= HALF // 2)[None, :] & (length > 0)
            tl.debug_barrier()  # several threads have loaded the same key: all of them before one stores
            tl.store(last, new_a.to(dtype), real)
            tl.store(last + HALF, new_b.to(dtype), real)
            new_a, new_b = tl.where(slow, old_a, new_a), tl.where(slow, old_b, new_b)
        place = kv + own_page * stride + (g * SIZE + length % SIZE) * D
        tl.store(place + one, new_a.to(dtype), real)
        tl.store(place + HALF + one, new_b.to(dtype), real)
        tl.store(place + G * SIZE * D + d, value.to(dtype), d < D)
        seen_a, seen_b = new_a.to(dtype).to(tl.float32), new_b.to(dtype).to(tl.float32)
        score = tl.sum(qa.to(tl.float32) * seen_a + qb.to(tl.float32) * seen_b, 1)
        highest = tl.maximum(best, score)
        share = tl.exp(score - highest)
        less = tl.exp(best - highest)
        total = total * less[:, None] + share[:, None] * value.to(tl.float32)[None, :]
        weight = weight * less + share
        best = highest
    to = ((i * H + g * R + h) * SPLITS + split).to(tl.int64)
    tl.store(part + to[:, None] * D + d[None, :], total, (h < R)[:, None] & (d < D)[None, :])
    tl.store(sums + to * 2, best, h < R)
    tl.store(sums + to * 2 + 1, weight, h < R)


@triton.jit
def _attend(
    qkv, places, many, cos, sin, q_norm, k_norm, eps, kv, stride, table, entries, lengths, last_key, part, sums, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, SURE: tl.constexpr,
    AHEAD: tl.constexpr, NEAR: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) // G
    g = tl.program_id(0) % G
    split = tl.program_id(1)
    let_next_begin(PDL)
    first = None
    if SURE:  # the first tile is of steps before: it is read, or brought near, while the kernel before runs
        row = i.to(tl.int64)
        length = tl.load(lengths + row)
        start, end = _span(split, length, SPLITS, BS)
        if AHEAD:
            first = _tile(kv, stride, table, entries, row, g, start, tl.minimum(end, length), G, D, SIZE, BS, BD)
        elif PDL:
            LINE: tl.constexpr = 1024 // kv.dtype.element_ty.primitive_bitwidth
            for t in range(start, tl.minimum(end, start + NEAR), BS):
                page = tl.load(table + row * entries + tl.minimum(t // SIZE, entries - 1)).to(tl.int64)
                lines = kv + page * stride + (g * SIZE + t % SIZE) * D
                lines += tl.minimum(tl.arange(0, BS * BD // LINE) * LINE, BS * D - 1)
                fetch_early(lines, PDL)
                fetch_early(lines + G * SIZE * D, PDL)
    if i >= counted(many, SURE, PDL):
        return
    if not SURE:
        row = tl.load(places + i).to(tl.int64)
    attend_part(
        i, row, g, split, first, qkv, cos, sin, q_norm, k_norm, eps, kv, stride, table, entries, lengths, last_key,
        part, sums, scale, H, G, D, SIZE, SPLITS, BH, BS, BD,
    )  # fmt: skip


@triton.jit
def join_part(i, part, sums, out, real, D: tl.constexpr, SPLITS: tl.constexpr, first, WIDE: tl.constexpr):
    """What the splits of a head found, together: some columns of it, from the first on."""
    s = i * SPLITS + tl.arange(0, SPLITS).to(tl.int64)
    d = first + tl.arange(0, WIDE)
    best = tl.load(sums + s * 2)
    weight = tl.load(sums + s * 2 + 1)
    total = tl.load(part + s[:, None] * D + d[None, :], (d < D)[None, :], other=0.0)
    share = tl.exp(best - tl.max(best, 0))
    y = tl.sum(total * share[:, None], 0) / tl.sum(weight * share, 0)
    tl.store(out + i * D + d, y.to(out.dtype.element_ty), real & (d < D))


@triton.jit
def _join(
    part, sums, out, many,
    H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, SURE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_begin(PDL)
    real = tl.program_id(0) // H < counted(many, SURE, PDL)
    join_part(tl.program_id(0), part, sums, out, real, D, SPLITS, tl.program_id(1) * WIDE, WIDE)


AHEAD = 16  # largest tile of products with which a split's first entries are read before the wait
NEAR = 64  # entries of a split that are brought near before it, with larger ones
_COLUMNS = 32  # of a head that a program joins


def sizes(heads: Any, pages: Any, splits: int, rows: int) -> dict[str, int]:
    """Sizes that the kernels of a layer are compiled for, with tiles of so many rows in its products."""
    H, G, d, size = heads.heads, heads.kv_heads, heads.dim, pages.kv.shape[3]
    tile = {"BH": max(16, triton.next_power_of_2(H // G)), "BS": min(size, 128 if rows == 16 else 64)}
    return {"H": H, "G": G, "D": d, "SIZE": size, "SPLITS": splits, "BD": max(32, triton.next_power_of_2(d)), **tile}


def attend(qkv: Tensor, rows: Any, cos: Tensor, sin: Tensor, heads: Any, pages: Any, splits: int) -> Tensor:
    """`decode.attend`, by `splits` programs for each row and head of keys."""
    B, H, d = len(rows.places), heads.heads, heads.dim
    how, known = overlaps(qkv.device), sizes(heads, pages, splits, rows.tile)
    part = torch.empty(B * H * splits, d, dtype=torch.float32, device=qkv.device)
    sums = torch.empty(B * H * splits, 2, dtype=torch.float32, device=qkv.device)
    out = qkv.new_empty(B, H * d)
    _attend[(B * heads.kv_heads, splits)](
        qkv, rows.places, rows.many, cos, sin, heads.q_norm, heads.k_norm, eps_of(qkv, heads.eps),
        pages.kv, pages.kv.stride(0), pages.table, pages.table.stride(0), pages.lengths, pages.last_key, part,
        sums, d**-0.5,
        SURE=rows.sure, AHEAD=rows.tile <= AHEAD, NEAR=NEAR, num_warps=4, num_stages=2, **known, **how,
    )  # fmt: skip
    grid = (B * H, triton.cdiv(d, _COLUMNS))
    small = {"H": H, "D": d, "SPLITS": splits, "SURE": rows.sure, "WIDE": _COLUMNS}
    _join[grid](part, sums, out, rows.many, num_warps=1, **small, **how)
    return out
