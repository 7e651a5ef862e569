"""Attention in rows of up to a few thousand tokens and heads of up to 64: forward, and backward in two kernels. A query
t looks at the keys first[t] to t, or at all of them. Twin: `reference.short_attention`.

Flash attention for packed documents launches programs for as many documents as a batch may hold; here a row is one
thing, whose documents are intervals, and blocks of keys outside of them are passed over.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthgate.ops.launch import launch, power_of_two

_LOG2_E = 1.4426950408889634


@triton.jit
def _tile(x, row, per_token, tokens, columns, T, D: tl.constexpr):
    """Rows (tokens, columns) of one head that begins at `row`; 0 beyond the end."""
    here = (tokens < T)[:, None] & (columns < D)[None, :]
    return tl.load(x + row + tokens[:, None] * per_token + columns[None, :], here, other=0.0)


@triton.jit
def _sees(query, key, first, T, CAUSAL: tl.constexpr):
    """Which queries see which keys; the three go together by broadcasting."""
    seen = (query < T) & (key < T)
    if CAUSAL:
        seen = seen & (key <= query) & (key >= first)
    return seen


@triton.jit
def _first(runs, at, t, T, CAUSAL: tl.constexpr):
    """The first key that each query of a row sees."""
    if runs is not None and CAUSAL:
        return tl.load(runs + at + t, t < T, other=0)
    return t * 0


@triton.jit
def _forward(
    q, k, v, runs, y, lse, qb, qt, qh, kb, kt, kh, vb, vt, vh, T, H, scale,
    R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """`scale` is in units of log2; R query heads share a head of keys."""
    head, block = tl.program_id(0) // tl.cdiv(T, BM), tl.program_id(0) % tl.cdiv(T, BM)
    b, h = (head // H).to(tl.int64), head % H
    m, n, d = block * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)
    query = _tile(q, b * qb + h * qh, qt, m, d, T, D)
    first = _first(runs, b * T, m, T, CAUSAL)
    low, high = 0, T
    if CAUSAL:
        low, high = tl.min(tl.where(m < T, first, T), 0) // BN * BN, tl.minimum(T, (block + 1) * BM)
    top = tl.full([BM], float("-inf"), tl.float32)
    total, out = tl.zeros([BM], tl.float32), tl.zeros([BM, BD], tl.float32)
    for start in range(low, high, BN):
        key = _tile(k, b * kb + h // R * kh, kt, start + n, d, T, D)
        s = tl.dot(query, tl.trans(key)) * scale
        s = tl.where(_sees(m[:, None], (start + n)[None, :], first[:, None], T, CAUSAL), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet
        p, shrink = tl.exp2(s - safe[:, None]), tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        value = _tile(v, b * vb + h // R * vh, vt, start + n, d, T, D)
        out = tl.dot(p.to(value.dtype), value, out * shrink[:, None])
        top = new
    seen = tl.where(total > 0, total, 1.0)
    to = (b * T * H + h) * D + m[:, None] * H * D + d[None, :]
    tl.store(y + to, (out / seen[:, None]).to(y.dtype.element_ty), (m < T)[:, None] & (d < D)[None, :])
    tl.store(lse + head.to(tl.int64) * T + m, top + tl.log2(seen), m < T)


@triton.jit
def _backward_query(
    q, k, v, runs, y, lse, grad, delta, gq, qb, qt, qh, kb, kt, kh, vb, vt, vh, T, H, scale, plain_scale,
    R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The gradient of q, and delta: the sum over a row of its output times the gradient of that."""
    head, block = tl.program_id(0) // tl.cdiv(T, BM), tl.program_id(0) % tl.cdiv(T, BM)
    b, h = (head // H).to(tl.int64), head % H
    m, n, d = block * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)
    query, row = _tile(q, b * qb + h * qh, qt, m, d, T, D), (b * T * H + h) * D
    mine = _tile(grad, row, H * D, m, d, T, D)
    sums = tl.sum(_tile(y, row, H * D, m, d, T, D).to(tl.float32) * mine.to(tl.float32), 1)
    place = head.to(tl.int64) * T + m
    tl.store(delta + place, sums, m < T)
    norm, first = tl.load(lse + place, m < T, other=0.0), _first(runs, b * T, m, T, CAUSAL)
    low, high = 0, T
    if CAUSAL:
        low, high = tl.min(tl.where(m < T, first, T), 0) // BN * BN, tl.minimum(T, (block + 1) * BM)
    out = tl.zeros([BM, BD], tl.float32)
    for start in range(low, high, BN):
        key = _tile(k, b * kb + h // R * kh, kt, start + n, d, T, D)
        value = _tile(v, b * vb + h // R * vh, vt, start + n, d, T, D)
        p = tl.exp2(tl.dot(query, tl.trans(key)) * scale - norm[:, None])
        p = tl.where(_sees(m[:, None], (start + n)[None, :], first[:, None], T, CAUSAL), p, 0.0)
        ds = p * (tl.dot(mine, tl.trans(value)) - sums[:, None])
        out = tl.dot(ds.to(key.dtype), key, out)
    to = row + m[:, None] * H * D + d[None, :]
    tl.store(gq + to, (out * plain_scale).to(gq.dtype.element_ty), (m < T)[:, None] & (d < D)[None, :])


@triton.jit
def _backward_key(
    q, k, v, runs, lse, grad, delta, gk, gv, qb, qt, qh, kb, kt, kh, vb, vt, vh, T, H, size, scale, plain_scale,
    R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The gradients of k and v. `runs` holds, `size` places after the first keys, where the last query is that sees a
    key."""
    G = H // R
    head, block = tl.program_id(0) // tl.cdiv(T, BN), tl.program_id(0) % tl.cdiv(T, BN)
    b, g = (head // G).to(tl.int64), head % G
    m, n, d = tl.arange(0, BM), block * BN + tl.arange(0, BN), tl.arange(0, BD)
    key, value = _tile(k, b * kb + g * kh, kt, n, d, T, D), _tile(v, b * vb + g * vh, vt, n, d, T, D)
    low, high = 0, T
    if CAUSAL:
        low = block * BN // BM * BM
        if runs is not None:
            high = tl.max(tl.load(runs + size + b * T + n, n < T, other=0), 0) + 1
    out_k, out_v = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
    for r in range(R):
        h = g * R + r
        row = (b * T * H + h) * D
        for start in range(low, high, BM):
            query, mine = _tile(q, b * qb + h * qh, qt, start + m, d, T, D), _tile(grad, row, H * D, start + m, d, T, D)
            place, there = (b * H + h) * T + start + m, start + m < T
            norm, sums = tl.load(lse + place, there, other=0.0), tl.load(delta + place, there, other=0.0)
            first = _first(runs, b * T, start + m, T, CAUSAL)
            p = tl.exp2(tl.dot(key, tl.trans(query)) * scale - norm[None, :])
            p = tl.where(_sees((start + m)[None, :], n[:, None], first[None, :], T, CAUSAL), p, 0.0)
            out_v = tl.dot(p.to(mine.dtype), mine, out_v)
            ds = p * (tl.dot(value, tl.trans(mine)) - sums[None, :])
            out_k = tl.dot(ds.to(query.dtype), query, out_k)
    to, here = (b * T * G + g) * D + n[:, None] * G * D + d[None, :], (n < T)[:, None] & (d < D)[None, :]
    tl.store(gk + to, (out_k * plain_scale).to(gk.dtype.element_ty), here)
    tl.store(gv + to, out_v.to(gv.dtype.element_ty), here)


def _how(q: Tensor, k: Tensor, causal: bool) -> dict[str, int | bool]:
    """Options of the kernels. Blocks are of 64, or less in shorter rows: larger ones leave no room for a second one."""
    (_, _, H, d), block = q.shape, min(64, max(16, power_of_two(q.shape[1])))
    how = {"R": H // k.shape[2], "D": d, "BD": max(16, power_of_two(d)), "BM": block, "BN": block}
    return {"warps": 4, **how, "CAUSAL": causal}


def _strides(*given: Tensor) -> list[int]:
    return [step for each in given for step in each.stride()[:3]]


def forward(q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """q (B, T, H, d), k and v (B, T, G, d), whose last stride is 1; runs (2, B, T) int32: the first key that a query
    sees, and the last query that sees a key -> y (B, T, H, d), and the logarithm to base 2 of what each of its rows was
    divided by (B, H, T)."""
    B, T, H, d = q.shape
    y, lse = torch.empty(q.shape, dtype=v.dtype, device=q.device), torch.empty(B, H, T, device=q.device)
    how = _how(q, k, causal)
    programs, given = B * H * -(-T // int(how["BM"])), (q, k, v, runs, y, lse, *_strides(q, k, v))
    launch(_forward, (programs,), *given, T, H, d**-0.5 * _LOG2_E, **how)
    return y, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None, y: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from that of y and from what `forward` gave."""
    (B, T, H, d), G, grad = q.shape, k.shape[2], grad.contiguous()
    new = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (q, k, v)]
    delta, scale, how = torch.empty_like(lse), d**-0.5, _how(q, k, causal)
    given, steps = (q, k, v, runs), _strides(q, k, v)
    scales, blocks = (scale * _LOG2_E, scale), -(-T // int(how["BM"]))
    launch(_backward_query, (B * H * blocks,), *given, y, lse, grad, delta, new[0], *steps, T, H, *scales, **how)
    launch(_backward_key, (B * G * blocks,), *given, lse, grad, delta, *new[1:], *steps, T, H, B * T, *scales, **how)
    return new[0], new[1], new[2]
