"""The parts of a decode step as kernels. Their twins, which say what each computes, are those of `decode`.

Every kernel asks the device how many rows compute, and ends at once where there are none: a layer that no row enters
reads neither weights nor keys. A row's sums have one order, whatever other rows there are of the same tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import core

from depthgate.ops.linear_triton import (
    add_linear,
    let_next_begin,
    linear,
    overlaps,
    wait_for_those_before,
)

__all__ = ["add_linear", "attend", "begin", "decide", "finish", "likeliest", "linear"]


@triton.jit
def _begin(
    embedding, token, pos, cos, sin, x, c, s, eps,
    K: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    let_next_begin(PDL)
    wait_for_those_before(PDL)
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
    how = {"BK": triton.next_power_of_2(K), "BH": triton.next_power_of_2(half), **overlaps(x.device)}
    eps = torch.finfo(x.dtype).eps
    _begin[(B,)](embedding, token, pos, cos, sin, x, c, s, eps, K=K, HALF=half, NORMED=normed, num_warps=4, **how)
    return x, c, s


@triton.jit
def _likeliest(logits, tokens, finite, V, BV: tl.constexpr, PDL: tl.constexpr):
    b = tl.program_id(0)
    let_next_begin(PDL)
    wait_for_those_before(PDL)
    best = tl.full((BV,), -float("inf"), tl.float32)
    where = tl.zeros((BV,), tl.int32)
    bad = tl.zeros((BV,), tl.int32)
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        x = tl.load(logits + b.to(tl.int64) * V + v, v < V, other=-float("inf"))
        where = tl.where(x > best, v, where)
        best = tl.maximum(best, x)
        bad += (x != x).to(tl.int32)
    most = tl.max(best, 0)
    tl.store(tokens + b, tl.min(tl.where(best == most, where, V - 1), 0).to(tl.int64))
    tl.store(finite + b, ((tl.sum(bad, 0) == 0) & (tl.abs(most) < float("inf"))).to(tl.int32))


def likeliest(logits: Tensor, finite: Tensor) -> Tensor:
    """`decode.likeliest`."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _likeliest[(len(logits),)](
        logits, tokens, finite, logits.shape[1], BV=8192, num_warps=16, **overlaps(logits.device)
    )
    return tokens


@triton.jit
def _finish(
    tokens, live, record, token, pos, drawn, lengths, seen, B, stride, V,
    L: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BB)
    let_next_begin(PDL)
    wait_for_those_before(PDL)
    there = b < tl.load(live)
    new = tl.load(tokens + b, there, other=0)
    tl.store(record + b, new.to(tl.int32), there)
    tl.store(token + b, new, there)
    tl.store(seen + b.to(tl.int64) * V + new, 1, there)
    tl.store(pos + b, tl.load(pos + b, there, other=0) + 1, there)
    tl.store(drawn + b, tl.load(drawn + b, there, other=0) + 1, there)
    tl.store(lengths + b, tl.load(lengths + b, there, other=0) + 1, there)
    for n in range(L):
        at = lengths + (n + 1) * stride + b
        tl.store(at, tl.load(at, there, other=0) + tl.load(record + (2 + n) * B + b, there, other=0), there)


def finish(
    tokens: Tensor,
    live: Tensor,
    record: Tensor,
    token: Tensor,
    pos: Tensor,
    drawn: Tensor,
    lengths: Tensor,
    seen: Tensor,
) -> None:
    """`decode.finish`."""
    B, marks = len(tokens), seen.view(torch.int8)
    how = {"L": len(record) - 2, "BB": triton.next_power_of_2(B), **overlaps(tokens.device)}
    strides = lengths.stride(0), marks.stride(0)
    _finish[(1,)](tokens, live, record, token, pos, drawn, lengths, marks, B, *strides, **how)


@triton.jit
def _turned(a, b, norm, cos, sin, eps, half, half_mask, D: tl.constexpr):
    """The halves of heads (M, d/2), normalised and turned."""
    if norm is not None:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a = a * scale * tl.load(norm + half, half_mask, other=0.0).to(tl.float32)[None, :]
        b = b * scale * tl.load(norm + D // 2 + half, half_mask, other=0.0).to(tl.float32)[None, :]
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _absorbed(qa, qb, ka, kb, values, there, best, weight, total):
    """The largest score, the sum of weights and the weighted sum of values so far (M,), (M,), (M, d), with a tile of
    entries: their keys (d/2, N), values (N, d), and which of them are real."""
    z = tl.dot(qa, ka, input_precision="ieee")
    z = tl.dot(qb, kb, z, input_precision="ieee")
    z = tl.where(there[None, :], z, -float("inf"))
    top = tl.maximum(best, tl.max(z, 1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp(z - safe[:, None])
    shrink = tl.exp(best - safe)
    total = tl.dot(p.to(values.dtype), values, total * shrink[:, None], input_precision="ieee")
    return top, weight * shrink + tl.sum(p, 1), total


@triton.jit
def _attend(
    qkv, places, many, cos, sin, q_norm, k_norm, eps, kv, stride, table, entries, lengths, last_key, part, sums, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, SURE: tl.constexpr,
    BH: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) // G
    g = tl.program_id(0) % G
    split = tl.program_id(1)
    let_next_begin(PDL)
    if SURE:
        row = i.to(tl.int64)
    else:
        wait_for_those_before(PDL)
        if i >= tl.load(many):
            return
        row = tl.load(places + i).to(tl.int64)
    R: tl.constexpr = H // G
    HALF: tl.constexpr = D // 2
    h = tl.arange(0, BH)
    half = tl.arange(0, BD // 2)
    d = tl.arange(0, BD)
    e = tl.arange(0, BS)
    some = half < HALF
    # The tiles of entries that this split has, of all that the row will have with the new one.
    length = tl.load(lengths + row)
    tiles = tl.cdiv(tl.cdiv(length + 1, BS), SPLITS)
    start = split * tiles * BS
    end = tl.minimum(start + tiles * BS, length)
    # The first tile is of steps before: where the row is sure to compute, it is read while the kernel before runs.
    page = tl.load(table + row * entries + tl.minimum(start // SIZE, entries - 1)).to(tl.int64)
    own_page = tl.load(table + row * entries + length // SIZE).to(tl.int64)
    k = kv + page * stride + (g * SIZE + start % SIZE) * D
    there = start + e < end
    ka = tl.load(k + e[None, :] * D + half[:, None], there[None, :] & some[:, None], other=0.0)
    kb = tl.load(k + e[None, :] * D + HALF + half[:, None], there[None, :] & some[:, None], other=0.0)
    values = tl.load(
        k + G * SIZE * D + e[:, None] * D + d[None, :], there[:, None] & (d < D)[None, :], other=0.0
    )  # fmt: skip
    if SURE:
        wait_for_those_before(PDL)
        if i >= tl.load(many):
            return
    base = qkv + i.to(tl.int64) * (H + 2 * G) * D
    at = (g * R + h)[:, None] * D + half[None, :]
    q_mask = (h < R)[:, None] & some[None, :]
    c = tl.load(cos + row * HALF + half, some, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * HALF + half, some, other=0.0).to(tl.float32)[None, :]
    qa = tl.load(base + at, q_mask, other=0.0).to(tl.float32)
    qb = tl.load(base + at + HALF, q_mask, other=0.0).to(tl.float32)
    one = tl.zeros((1,), tl.int32)[:, None] + half[None, :]
    real = some[None, :]
    new_a = tl.load(base + (H + g) * D + one, real, other=0.0).to(tl.float32)
    new_b = tl.load(base + (H + g) * D + HALF + one, real, other=0.0).to(tl.float32)
    value = tl.load(base + (H + G + g) * D + d, d < D, other=0.0)
    qa, qb = _turned(qa, qb, q_norm, c, s, eps, half, some, D)
    dtype = kv.dtype.element_ty
    qa, qb = (qa * scale).to(dtype), (qb * scale).to(dtype)
    best = tl.full((BH,), -float("inf"), tl.float32)
    weight = tl.zeros((BH,), tl.float32)
    total = tl.zeros((BH, BD), tl.float32)
    best, weight, total = _absorbed(qa, qb, ka, kb, values, there, best, weight, total)
    for t in range(start + BS, end, BS):
        there = t + e < end
        page = tl.load(table + row * entries + t // SIZE).to(tl.int64)
        k = kv + page * stride + (g * SIZE + t % SIZE) * D
        ka = tl.load(k + e[None, :] * D + half[:, None], there[None, :] & some[:, None], other=0.0)
        kb = tl.load(k + e[None, :] * D + HALF + half[:, None], there[None, :] & some[:, None], other=0.0)
        values = tl.load(
            k + G * SIZE * D + e[:, None] * D + d[None, :], there[:, None] & (d < D)[None, :], other=0.0
        )  # fmt: skip
        best, weight, total = _absorbed(qa, qb, ka, kb, values, there, best, weight, total)
    if (length >= start) & (length < start + tiles * BS):  # the new token is this split's
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
        own = kv + own_page * stride + (g * SIZE + length % SIZE) * D
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
def _joined(
    part, sums, out, many,
    H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The splits of a head, together."""
    i = tl.program_id(0)
    let_next_begin(PDL)
    wait_for_those_before(PDL)
    if i // H >= tl.load(many):
        return
    s = i.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)
    d = tl.arange(0, BD)
    best = tl.load(sums + s * 2)
    share = tl.exp(best - tl.max(best, 0))
    total = tl.load(part + s[:, None] * D + d[None, :], (d < D)[None, :], other=0.0)
    y = tl.sum(total * share[:, None], 0) / tl.sum(tl.load(sums + s * 2 + 1) * share, 0)
    tl.store(out + i.to(tl.int64) * D + d, y.to(out.dtype.element_ty), d < D)


@core.extern
def _set_conditional(handle, value, _semantic=None):  # type: ignore[no-untyped-def]
    """Set the number that an IF node of the graph asks for. The driver has this function."""
    types = {(core.dtype("int64"), core.dtype("int32")): ("cudaGraphSetConditional", core.dtype("int32"))}
    return core.extern_elementwise("", "", [handle, value], types, is_pure=False, _semantic=_semantic)


@triton.jit
def _gate(score, GATE: tl.constexpr):
    safe = tl.minimum(tl.maximum(score, -1e4), 1e4)
    if GATE == "one_plus_tanh":
        return 2 * tl.sigmoid(2 * safe)
    elif GATE == "sigmoid":
        return tl.sigmoid(safe)
    elif GATE == "raw":
        return safe
    else:
        return safe * 0 + 1


@triton.jit(do_not_specialize=["handle"])
def _score(
    x, weight, bias, scores, live, threshold, places, many, gates, entered, handle, eps,
    K: tl.constexpr, NORMED: tl.constexpr, GATE: tl.constexpr, ALONE: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The scores of rows; a row that is alone is decided upon at once."""
    b = tl.program_id(0)
    k = tl.arange(0, BK)
    let_next_begin(PDL)
    w = tl.load(weight + k, k < K, other=0.0)
    wait_for_those_before(PDL)
    v = tl.load(x + b.to(tl.int64) * K + k, k < K, other=0.0).to(tl.float32)
    score = tl.sum(v * w, 0)
    if NORMED:
        score *= tl.rsqrt(tl.sum(v * v, 0) / K + eps)
    score += tl.load(bias)
    if ALONE:
        wanted = ((tl.load(live) > 0) & (score - tl.load(threshold) >= 0)).to(tl.int32)
        tl.store(places, 0)
        tl.store(gates, _gate(score, GATE))
        tl.store(entered, wanted)
        tl.store(many, wanted)
        if handle is not None:
            _set_conditional(handle.to(tl.int64), wanted)
    else:
        tl.store(scores + b, score)


@triton.jit(do_not_specialize=["handle"])
def _decide(
    scores, live, threshold, places, many, gates, entered, handle, B,
    GATE: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BB)
    let_next_begin(PDL)
    wait_for_those_before(PDL)
    there = b < tl.load(live)
    score = tl.load(scores + b, there, other=0.0)
    wanted = (there & (score - tl.load(threshold) >= 0)).to(tl.int32)  # not where it is NaN
    rank = tl.cumsum(wanted, 0)
    to = tl.where(wanted > 0, rank - 1, tl.sum(wanted, 0) + b - rank)  # the others come last
    tl.store(places + to, b.to(tl.int64), b < B)
    tl.store(gates + to, _gate(score, GATE), b < B)
    tl.store(entered + b, wanted, there)
    tl.store(many, tl.sum(wanted, 0))
    if handle is not None:
        _set_conditional(handle.to(tl.int64), tl.sum(wanted, 0))


def decide(
    x: Tensor,
    live: Tensor,
    entered: Tensor,
    weight: Tensor,
    bias: Tensor,
    threshold: Tensor,
    normed: bool,
    gate: str,
    handle: int | None,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """`decode.decide`."""
    B, K = x.shape
    places, many = entered.new_empty(B, dtype=torch.int64), entered.new_empty(())
    scores, gates = torch.empty(2, B, device=x.device)
    decision, how = (live, threshold, places, many, gates, entered, handle), {"GATE": gate, **overlaps(x.device)}
    size = {"K": K, "BK": triton.next_power_of_2(K), "NORMED": normed, "ALONE": B == 1, "num_warps": 8}
    _score[(B,)](x, weight, bias, scores, *decision, torch.finfo(torch.float32).eps, **size, **how)
    if B > 1:
        _decide[(1,)](scores, *decision, B, BB=triton.next_power_of_2(B), num_warps=2, **how)
    return (places, many), gates


_ENTRIES = 64  # of a tile


def attend(qkv: Tensor, rows: Any, cos: Tensor, sin: Tensor, heads: Any, pages: Any, splits: int) -> Tensor:
    """`decode.attend`, by `splits` programs for each row and head of keys."""
    B, H, G, d = len(rows.places), heads.heads, heads.kv_heads, heads.dim
    part = torch.empty(B * H * splits, d, dtype=torch.float32, device=qkv.device)
    sums = torch.empty(B * H * splits, 2, dtype=torch.float32, device=qkv.device)
    out = qkv.new_empty(B, H * d)
    eps = torch.finfo(qkv.dtype).eps if heads.eps is None else heads.eps
    size, wide = pages.kv.shape[3], max(32, triton.next_power_of_2(d))
    tile, heads_tile, how = min(size, _ENTRIES), max(16, triton.next_power_of_2(H // G)), overlaps(qkv.device)
    _attend[(B * G, splits)](
        qkv, rows.places, rows.many, cos, sin, heads.q_norm, heads.k_norm, eps, pages.kv, pages.kv.stride(0),
        pages.table, pages.table.stride(0), pages.lengths, pages.last_key, part, sums, d**-0.5,
        H=H, G=G, D=d, SIZE=size, SPLITS=splits, SURE=rows.sure, BH=heads_tile, BS=tile, BD=wide, num_warps=4, **how
    )  # fmt: skip
    _joined[(B * H,)](part, sums, out, rows.many, H=H, D=d, SPLITS=splits, BD=wide, num_warps=2, **how)
    return out
