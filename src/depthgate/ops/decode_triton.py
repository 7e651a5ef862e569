"""The parts of a decode step as kernels. Their twins, which say what each computes, are those of `decode`.

Every kernel asks the device how many rows compute, and ends at once where there are none: a layer that no row enters
reads neither weights nor keys. A row's sums have one order, whatever other rows there are of the same tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _begin(
    embedding, token, pos, cos, sin, x, c, s, eps,
    K: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    k = tl.arange(0, BK)
    row = tl.load(embedding + tl.load(token + b) * K + k, k < K, other=0.0)
    if NORMED:
        wide = row.to(tl.float32)
        row = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)).to(row.dtype)
    tl.store(x + b * K + k, row, k < K)
    h = tl.arange(0, BH)
    at = tl.load(pos + b) * HALF + h
    tl.store(c + b * HALF + h, tl.load(cos + at, h < HALF), h < HALF)
    tl.store(s + b * HALF + h, tl.load(sin + at, h < HALF), h < HALF)


def begin(
    embedding: Tensor, token: Tensor, normed: bool, pos: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`decode.begin`."""
    B, K, half = len(token), embedding.shape[1], cos.shape[1]
    x, c, s = embedding.new_empty(B, K), cos.new_empty(B, half), sin.new_empty(B, half)
    size = {"BK": triton.next_power_of_2(K), "BH": triton.next_power_of_2(half)}
    eps = torch.finfo(x.dtype).eps
    _begin[(B,)](embedding, token, pos, cos, sin, x, c, s, eps, K=K, HALF=half, NORMED=normed, num_warps=4, **size)
    return x, c, s


@triton.jit
def _finish(tokens, live, entered, token, pos, drawn, lengths, seen, B, stride, V, L: tl.constexpr, BB: tl.constexpr):
    b = tl.arange(0, BB)
    there = b < tl.load(live)
    new = tl.load(tokens + b, there, other=0)
    tl.store(token + b, new, there)
    tl.store(seen + b.to(tl.int64) * V + new, 1, there)
    tl.store(pos + b, tl.load(pos + b, there, other=0) + 1, there)
    tl.store(drawn + b, tl.load(drawn + b, there, other=0) + 1, there)
    tl.store(lengths + b, tl.load(lengths + b, there, other=0) + 1, there)
    for n in range(L):
        at = lengths + (n + 1) * stride + b
        tl.store(at, tl.load(at, there, other=0) + tl.load(entered + n * B + b, there, other=0), there)


def finish(
    tokens: Tensor,
    live: Tensor,
    entered: Tensor,
    token: Tensor,
    pos: Tensor,
    drawn: Tensor,
    lengths: Tensor,
    seen: Tensor,
) -> None:
    """`decode.finish`."""
    L, B = entered.shape
    marks, block = seen.view(torch.int8), triton.next_power_of_2(B)
    _finish[(1,)](
        tokens, live, entered, token, pos, drawn, lengths, marks, B, lengths.stride(0), marks.stride(0), L=L, BB=block
    )


@triton.jit
def _linear(
    x, add, places, many, weight, norm, gates, out, eps, N,
    K: tl.constexpr, GATHER: tl.constexpr, GLU: tl.constexpr, SCATTER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    count = tl.load(many)
    first = tl.program_id(1) * BM
    if first >= count:
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    col = (n < N)[:, None]
    if BM == 1:
        row = tl.load(places + first) if GATHER else first
        total = tl.zeros((BN, BK), tl.float32)
        total2 = tl.zeros((BN, BK), tl.float32)
        squares = tl.zeros((BK,), tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            mask = k < K
            v = tl.load(x + row.to(tl.int64) * K + k, mask, other=0.0).to(tl.float32)
            if not SCATTER and add is not None:
                v += tl.load(add + first * K + k, mask, other=0.0).to(tl.float32)
            if norm is not None:
                squares += v * v
                v = v * tl.load(norm + k, mask, other=0.0).to(tl.float32)
            place = n[:, None].to(tl.int64) * K + k[None, :]
            total += tl.load(weight + place, col & mask[None, :], other=0.0).to(tl.float32) * v[None, :]
            if GLU:
                total2 += (
                    tl.load(weight + N.to(tl.int64) * K + place, col & mask[None, :], other=0.0).to(tl.float32)
                    * v[None, :]
                )
        y = tl.sum(total, 1)
        y2 = tl.sum(total2, 1)
        if norm is not None:
            scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
            y *= scale
            y2 *= scale
        if GLU:
            y = y * tl.sigmoid(y) * y2
        if SCATTER:
            y += tl.load(add + first * N + n, n < N, other=0.0).to(tl.float32)
            if gates is not None:
                y *= tl.load(gates + first)
            to = out + tl.load(places + first).to(tl.int64) * N + n
            y += tl.load(to, n < N, other=0.0).to(tl.float32)
        else:
            to = out + first * N + n
        tl.store(to, y.to(out.dtype.element_ty), n < N)
    else:
        m = first + tl.arange(0, BM)
        there = (m < count)[:, None]
        row = tl.load(places + m, m < count, other=0) if GATHER or SCATTER else m
        source = row if GATHER else m
        total = tl.zeros((BM, BN), tl.float32)
        total2 = tl.zeros((BM, BN), tl.float32)
        squares = tl.zeros((BM,), tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            mask = there & (k < K)[None, :]
            v = tl.load(x + source[:, None].to(tl.int64) * K + k[None, :], mask, other=0.0)
            if norm is not None:
                wide = v.to(tl.float32)
                if add is not None:
                    wide += tl.load(add + m[:, None] * K + k[None, :], mask, other=0.0).to(tl.float32)
                squares += tl.sum(wide * wide, 1)
                v = (wide * tl.load(norm + k, k < K, other=0.0).to(tl.float32)[None, :]).to(v.dtype)
            place = n[None, :].to(tl.int64) * K + k[:, None]
            real = (n < N)[None, :] & (k < K)[:, None]
            total = tl.dot(v, tl.load(weight + place, real, other=0.0), total, input_precision="ieee")
            if GLU:
                w = tl.load(weight + N.to(tl.int64) * K + place, real, other=0.0)
                total2 = tl.dot(v, w, total2, input_precision="ieee")
        if norm is not None:
            scale = tl.rsqrt(squares / K + eps)[:, None]
            total *= scale
            total2 *= scale
        if GLU:
            total = total * tl.sigmoid(total) * total2
        real = there & (n < N)[None, :]
        if SCATTER:
            total += tl.load(add + m[:, None] * N + n[None, :], real, other=0.0).to(tl.float32)
            if gates is not None:
                total *= tl.load(gates + m, m < count, other=0.0)[:, None]
            to = out + row[:, None].to(tl.int64) * N + n[None, :]
            total += tl.load(to, real, other=0.0).to(tl.float32)
        else:
            to = out + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(to, total.to(out.dtype.element_ty), real)


@triton.jit
def _turned(a, b, norm, cos, sin, eps, half, half_mask, D: tl.constexpr):
    """The halves of heads (M, d/2), normalised and turned."""
    if norm is not None:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a = a * scale * tl.load(norm + half, half_mask, other=0.0).to(tl.float32)[None, :]
        b = b * scale * tl.load(norm + D // 2 + half, half_mask, other=0.0).to(tl.float32)[None, :]
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _attend(
    qkv, places, many, cos, sin, q_norm, k_norm, eps, kv, stride, table, entries, lengths, last_key, part, sums, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
    BH: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) // G
    g = tl.program_id(0) % G
    split = tl.program_id(1)
    if i >= tl.load(many):
        return
    row = tl.load(places + i).to(tl.int64)
    length = tl.load(lengths + row)
    R: tl.constexpr = H // G
    HALF: tl.constexpr = D // 2
    h = tl.arange(0, BH)
    half = tl.arange(0, BD // 2)
    d = tl.arange(0, BD)
    some = half < HALF
    base = qkv + i.to(tl.int64) * (H + 2 * G) * D
    at = (g * R + h)[:, None] * D + half[None, :]
    q_mask = (h < R)[:, None] & some[None, :]
    c = tl.load(cos + row * HALF + half, some, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * HALF + half, some, other=0.0).to(tl.float32)[None, :]
    qa = tl.load(base + at, q_mask, other=0.0).to(tl.float32)
    qb = tl.load(base + at + HALF, q_mask, other=0.0).to(tl.float32)
    qa, qb = _turned(qa, qb, q_norm, c, s, eps, half, some, D)
    dtype = kv.dtype.element_ty
    qa, qb = (qa * scale).to(dtype), (qb * scale).to(dtype)
    # The tiles of entries that this split has, of all that the row will have with the new one.
    tiles = tl.cdiv(tl.cdiv(length + 1, BS), SPLITS)
    start = split * tiles * BS
    end = tl.minimum(start + tiles * BS, length)
    best = tl.full((BH,), -float("inf"), tl.float32)
    weight = tl.zeros((BH,), tl.float32)
    total = tl.zeros((BH, BD), tl.float32)
    for t in range(start, end, BS):
        j = t + tl.arange(0, BS)
        there = j < end
        page = tl.load(table + row * entries + t // SIZE).to(tl.int64)
        k = kv + page * stride + (g * SIZE + t % SIZE) * D
        v = k + G * SIZE * D
        e = tl.arange(0, BS)
        ka = tl.load(k + e[None, :] * D + half[:, None], there[None, :] & some[:, None], other=0.0)
        kb = tl.load(k + e[None, :] * D + HALF + half[:, None], there[None, :] & some[:, None], other=0.0)
        z = tl.dot(qa, ka, input_precision="ieee")
        z = tl.dot(qb, kb, z, input_precision="ieee")
        z = tl.where(there[None, :], z, -float("inf"))
        top = tl.maximum(best, tl.max(z, 1))
        p = tl.exp(z - top[:, None])
        shrink = tl.exp(best - top)
        values = tl.load(v + e[:, None] * D + d[None, :], there[:, None] & (d < D)[None, :], other=0.0)
        total = tl.dot(p.to(dtype), values, total * shrink[:, None], input_precision="ieee")
        weight = weight * shrink + tl.sum(p, 1)
        best = top
    if (length >= start) & (length < start + tiles * BS):  # the new token is this split's
        one = tl.zeros((1,), tl.int32)[:, None] + half[None, :]
        real = some[None, :]
        new_a = tl.load(base + (H + g) * D + one, real, other=0.0).to(tl.float32)
        new_b = tl.load(base + (H + g) * D + HALF + one, real, other=0.0).to(tl.float32)
        new_a, new_b = _turned(new_a, new_b, k_norm, c, s, eps, half, some, D)
        if last_key is not None:
            last = last_key + (row * G + g) * D + one
            slow = (half >= HALF // 2)[None, :] & (length > 0)
            old_a = tl.load(last, real, other=0.0).to(tl.float32)
            old_b = tl.load(last + HALF, real, other=0.0).to(tl.float32)
            tl.debug_barrier()  # several threads load the same key: all of them before one stores
            tl.store(last, new_a.to(dtype), real)
            tl.store(last + HALF, new_b.to(dtype), real)
            new_a, new_b = tl.where(slow, old_a, new_a), tl.where(slow, old_b, new_b)
        value = tl.load(base + (H + G + g) * D + d, d < D, other=0.0)
        own = (
            kv + tl.load(table + row * entries + length // SIZE).to(tl.int64) * stride + (g * SIZE + length % SIZE) * D
        )
        tl.store(own + one, new_a.to(dtype), real)
        tl.store(own + HALF + one, new_b.to(dtype), real)
        tl.store(own + G * SIZE * D + d, value.to(dtype), d < D)
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
def _joined(part, sums, out, many, H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BD: tl.constexpr):
    """The splits of a head, together."""
    i = tl.program_id(0)
    if i // H >= tl.load(many):
        return
    s = i.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)
    d = tl.arange(0, BD)
    best = tl.load(sums + s * 2)
    share = tl.exp(best - tl.max(best, 0))
    total = tl.load(part + s[:, None] * D + d[None, :], (d < D)[None, :], other=0.0)
    y = tl.sum(total * share[:, None], 0) / tl.sum(tl.load(sums + s * 2 + 1) * share, 0)
    tl.store(out + i.to(tl.int64) * D + d, y.to(out.dtype.element_ty), d < D)


@triton.jit
def _decide(
    x, live, weight, bias, threshold, places, many, gates, entered, eps, B,
    K: tl.constexpr, NORMED: tl.constexpr, GATE: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BB)
    there = b < tl.load(live)
    score = tl.zeros((BB,), tl.float32)
    squares = tl.zeros((BB,), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        v = tl.load(x + b[:, None] * K + k[None, :], there[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
        score += tl.sum(v * tl.load(weight + k, k < K, other=0.0).to(tl.float32)[None, :], 1)
        squares += tl.sum(v * v, 1)
    if NORMED:
        score *= tl.rsqrt(squares / K + eps)
    score += tl.load(bias).to(tl.float32)
    wanted = there & (score - tl.load(threshold) >= 0)  # not where it is NaN
    safe = tl.minimum(tl.maximum(score, -1e4), 1e4)
    if GATE == "one_plus_tanh":
        gate = 2 * tl.sigmoid(2 * safe)
    elif GATE == "sigmoid":
        gate = tl.sigmoid(safe)
    elif GATE == "raw":
        gate = safe
    else:
        gate = tl.full((BB,), 1.0, tl.float32)
    rank = tl.cumsum(wanted.to(tl.int32), 0)
    to = tl.where(wanted, rank - 1, tl.sum(wanted.to(tl.int32), 0) + b - rank)  # the others come last
    tl.store(places + to, b.to(tl.int64), b < B)
    tl.store(gates + to, gate, b < B)
    tl.store(entered + b, wanted.to(tl.int32), there)
    tl.store(many, tl.sum(wanted.to(tl.int32), 0))


def decide(
    x: Tensor, live: Tensor, entered: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor, normed: bool, gate: str
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """`decode.decide`."""
    B, K = x.shape
    places, many = entered.new_empty(B, dtype=torch.int64), entered.new_empty(())
    gates = torch.empty(B, device=x.device)
    block = triton.next_power_of_2(B)
    _decide[(1,)](
        x, live, weight, bias, threshold, places, many, gates, entered, torch.finfo(torch.float32).eps, B,
        K=K, NORMED=normed, GATE=gate, BB=block, BK=max(32, min(triton.next_power_of_2(K), 8192 // block)), num_warps=8,
    )  # fmt: skip
    return (places, many), gates


def _tile(rows: int, N: int, K: int, glu: bool, itemsize: int) -> dict[str, int]:
    """Shape of a program's tile: enough bytes under way in as many programs as there are processors."""
    if rows == 1:
        return {"BM": 1, "BN": 4 if glu or N <= 4096 else 8, "BK": triton.next_power_of_2(min(K, 1024)), "num_warps": 4}
    tile = {"BM": 16 if rows <= 16 else 64, "BN": 16 if glu or N <= 4096 else 32, "num_warps": 4}
    if itemsize == 4:
        return tile | {"BK": 32, "num_stages": 2}
    return tile | {"BK": 256 if rows <= 16 and not glu else 128, "num_stages": 4}


def linear(
    x: Tensor, rows: Any, weight: Tensor, *, gather: bool = True, glu: bool = False, wide: bool = False, **more: Any
) -> Tensor:
    """`decode.linear`."""
    out = x.new_empty(len(rows.places), len(weight) // (1 + glu), dtype=torch.float32 if wide else x.dtype)
    _run(x, rows, weight, out, GATHER=gather, GLU=glu, SCATTER=False, **more)
    return out


def add_linear(x: Tensor, rows: Any, weight: Tensor, hidden: Tensor, add: Tensor, gates: Tensor | None) -> None:
    """`decode.add_linear`."""
    _run(hidden, rows, weight, x, add=add, gates=gates, GATHER=False, GLU=False, SCATTER=True)


def _run(
    x: Tensor,
    rows: Any,
    weight: Tensor,
    out: Tensor,
    *,
    add: Tensor | None = None,
    norm: Tensor | None = None,
    gates: Tensor | None = None,
    eps: float | None = None,
    **how: bool,
) -> None:
    B, N, K = len(rows.places), out.shape[1], weight.shape[1]
    tile = _tile(B, N, K, how["GLU"], x.element_size())
    grid = (triton.cdiv(N, tile["BN"]), triton.cdiv(B, tile["BM"]))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    _linear[grid](x, add, rows.places, rows.many, weight, norm, gates, out, eps, N, K=K, **how, **tile)


def attend(qkv: Tensor, rows: Any, cos: Tensor, sin: Tensor, heads: Any, pages: Any, splits: int) -> Tensor:
    """`decode.attend`, by `splits` programs for each row and head of keys."""
    B, H, G, d = len(rows.places), heads.heads, heads.kv_heads, heads.dim
    part = torch.empty(B * H * splits, d, dtype=torch.float32, device=qkv.device)
    sums = torch.empty(B * H * splits, 2, dtype=torch.float32, device=qkv.device)
    out = qkv.new_empty(B, H * d)
    eps = torch.finfo(qkv.dtype).eps if heads.eps is None else heads.eps
    size, wide = pages.kv.shape[3], max(32, triton.next_power_of_2(d))
    tile, heads_tile = min(size, 64), max(16, triton.next_power_of_2(H // G))
    _attend[(B * G, splits)](
        qkv, rows.places, rows.many, cos, sin, heads.q_norm, heads.k_norm, eps, pages.kv, pages.kv.stride(0),
        pages.table, pages.table.stride(0), pages.lengths, pages.last_key, part, sums, d**-0.5,
        H=H, G=G, D=d, SIZE=size, SPLITS=splits, BH=heads_tile, BS=tile, BD=wide, num_warps=4,
    )  # fmt: skip
    _joined[(B * H,)](part, sums, out, rows.many, H=H, D=d, SPLITS=splits, BD=wide, num_warps=2)
    return out
