"""The parts of a decode step as kernels. Their twins, which say what each computes, are those of `decode`.

Every kernel asks the device how many rows compute, and ends at once where there are none: a layer that no row enters
reads neither weights nor keys. A row's sums have one order, whatever other rows there are of the same tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthgate.ops.attend_triton import attend, attend_part, join_part, sizes
from depthgate.ops.linear_triton import (
    add_linear,
    eps_of,
    first_weights,
    let_next_begin,
    linear,
    one_row,
    overlaps,
    wait_for_those_before,
)
from depthgate.ops.route_triton import gate_of

__all__ = ["add_linear", "attend", "begin", "decide", "finish", "finish_likeliest", "linear", "routed_layer"]

_PARTS = 8  # of a row of logits, for the likeliest token
_EPS = torch.finfo(torch.float32).eps  # of a router's norm


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
def _write_down(
    new, finite, live, record, ring, steps, token, pos, drawn, lengths, seen, B, stride, V, size,
    L: tl.constexpr, RING: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BB)
    there = b < tl.load(live)
    step = tl.load(steps)
    place = ring + (step % RING) * size + b
    tl.store(place, new.to(tl.int32), there)
    tl.store(place + B, finite, there)
    tl.store(token + b, new, there)
    tl.store(seen + b.to(tl.int64) * V + new, 1, there)
    tl.store(pos + b, tl.load(pos + b, there, other=0) + 1, there)
    tl.store(drawn + b, tl.load(drawn + b, there, other=0) + 1, there)
    tl.store(lengths + b, tl.load(lengths + b, there, other=0) + 1, there)
    for n in range(L):
        at = lengths + (n + 1) * stride + b
        entered = tl.load(record + (2 + n) * B + b, there, other=0)
        tl.store(at, tl.load(at, there, other=0) + entered, there)
        tl.store(place + (2 + n) * B, entered, there)
    tl.debug_barrier()
    tl.store(steps, step + 1)


@triton.jit
def _finish(
    tokens, live, record, ring, steps, token, pos, drawn, lengths, seen, B, stride, V, size,
    L: tl.constexpr, RING: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BB)
    let_next_begin(PDL)
    wait_for_those_before(PDL)
    new = tl.load(tokens + b, b < B, other=0)
    finite = tl.load(record + B + b, b < B, other=0)
    _write_down(
        new, finite, live, record, ring, steps, token, pos, drawn, lengths, seen, B, stride, V, size, L, RING, BB
    )  # fmt: skip


@triton.jit
def _finish_likeliest(
    logits, tokens, tops, ids, turns, live, record, ring, steps, token, pos, drawn, lengths, seen, B, stride, V, size,
    L: tl.constexpr, RING: tl.constexpr, BB: tl.constexpr, PARTS: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    let_next_begin(PDL)
    wait_for_those_before(PDL)
    best = tl.full((BV,), -float("inf"), tl.float32)
    where = tl.zeros((BV,), tl.int32)
    each = tl.cdiv(V, PARTS)
    for start in range(part * each, tl.minimum(part * each + each, V), BV):
        v = start + tl.arange(0, BV)
        x = tl.load(logits + row.to(tl.int64) * V + v, v < tl.minimum(part * each + each, V), other=-float("inf"))
        x = tl.where(x == x, x, float("inf"))  # NaN is larger than all
        where = tl.where(x > best, v, where)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    tl.store(tops + row * PARTS + part, top)
    tl.store(ids + row * PARTS + part, tl.min(tl.where(best == top, where, V - 1), 0))
    tl.debug_barrier()
    if tl.atomic_add(turns, 1) < tl.num_programs(0) * PARTS - 1:
        return
    tl.store(turns, 0)  # the last program has what all of them found
    b = tl.arange(0, BB)
    at = b[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    each_top = tl.load(tops + at, (b < B)[:, None], other=0.0, cache_modifier=".cg")
    each_id = tl.load(ids + at, (b < B)[:, None], other=0, cache_modifier=".cg")
    highest = tl.max(each_top, 1)
    new = tl.min(tl.where(each_top == highest[:, None], each_id, V - 1), 1).to(tl.int64)
    finite = (tl.abs(highest) < float("inf")).to(tl.int32)
    tl.store(tokens + b, new, b < B)
    _write_down(
        new, finite, live, record, ring, steps, token, pos, drawn, lengths, seen, B, stride, V, size, L, RING, BB
    )  # fmt: skip


def _written(record: Tensor, ring: Tensor, lengths: Tensor, seen: Tensor) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Numbers and sizes of a step that is written down."""
    B, L = record.shape[1], len(record) - 2
    sizes = {"L": L, "RING": len(ring), "BB": triton.next_power_of_2(B), **overlaps(record.device)}
    return (B, lengths.stride(0), seen.stride(0), ring.stride(0)), sizes


def finish(
    tokens: Tensor,
    live: Tensor,
    record: Tensor,
    ring: Tensor,
    steps: Tensor,
    token: Tensor,
    pos: Tensor,
    drawn: Tensor,
    lengths: Tensor,
    seen: Tensor,
) -> None:
    """`decode.finish`."""
    numbers, how = _written(record, ring, lengths, seen)
    marks = seen.view(torch.int8)
    _finish[(1,)](tokens, live, record, ring, steps, token, pos, drawn, lengths, marks, *numbers, **how)


def finish_likeliest(
    logits: Tensor,
    turns: Tensor,
    live: Tensor,
    record: Tensor,
    ring: Tensor,
    steps: Tensor,
    token: Tensor,
    pos: Tensor,
    drawn: Tensor,
    lengths: Tensor,
    seen: Tensor,
) -> Tensor:
    """`decode.finish_likeliest`. The last of the programs that look for the largest writes the step down."""
    B, V, device = *logits.shape, logits.device
    tokens = torch.empty(B, dtype=torch.int64, device=device)
    tops, ids = torch.empty(B, _PARTS, device=device), torch.empty(B, _PARTS, dtype=torch.int32, device=device)
    numbers, how = _written(record, ring, lengths, seen)
    how |= {"PARTS": _PARTS, "BV": min(triton.next_power_of_2(triton.cdiv(V, _PARTS)), 4096), "num_warps": 8}
    state = live, record, ring, steps, token, pos, drawn, lengths, seen.view(torch.int8)
    _finish_likeliest[(B, _PARTS)](logits, tokens, tops, ids, turns, *state, *numbers, **how)
    return tokens


@triton.jit
def _scored(b, x, w, bias, eps, K: tl.constexpr, NORMED: tl.constexpr, BK: tl.constexpr):
    """The score of a row by weights and a bias that were loaded."""
    k = tl.arange(0, BK)
    v = tl.load(x + b.to(tl.int64) * K + k, k < K, other=0.0).to(tl.float32)
    score = tl.sum(v * w, 0)
    if NORMED:
        score *= tl.rsqrt(tl.sum(v * v, 0) / K + eps)
    return score + bias


@triton.jit
def _score(
    x, weight, bias, scores, eps, K: tl.constexpr, NORMED: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    let_next_begin(PDL)
    w = tl.load(weight + tl.arange(0, BK), tl.arange(0, BK) < K, other=0.0)
    b = tl.load(bias)
    wait_for_those_before(PDL)
    tl.store(scores + tl.program_id(0), _scored(tl.program_id(0), x, w, b, eps, K, NORMED, BK))


@triton.jit
def _decide(
    scores, live, threshold, places, many, gates, entered, B,
    GATE: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BB)
    let_next_begin(PDL)
    there = b < tl.load(live)
    least = tl.load(threshold)
    wait_for_those_before(PDL)
    score = tl.load(scores + b, there, other=0.0)
    wanted = (there & (score - least >= 0)).to(tl.int32)  # not where it is NaN
    rank = tl.cumsum(wanted, 0)
    to = tl.where(wanted > 0, rank - 1, tl.sum(wanted, 0) + b - rank)  # the others come last
    tl.store(places + to, b.to(tl.int64), b < B)
    tl.store(gates + to, gate_of(score, GATE), b < B)
    tl.store(entered + b, wanted, there)
    tl.store(many, tl.sum(wanted, 0))


def decide(
    x: Tensor, live: Tensor, entered: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor, normed: bool, gate: str
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """`decode.decide`."""
    B, K = x.shape
    places, many = entered.new_empty(B, dtype=torch.int64), entered.new_empty(())
    scores, gates = torch.empty(2, B, device=x.device)
    how = overlaps(x.device)
    size = {"K": K, "BK": triton.next_power_of_2(K), "NORMED": normed, "num_warps": 8}
    _score[(B,)](x, weight, bias, scores, _EPS, **size, **how)
    block = triton.next_power_of_2(B)
    _decide[(1,)](scores, live, threshold, places, many, gates, entered, B, GATE=gate, BB=block, num_warps=2, **how)
    return (places, many), gates


@triton.jit
def _wait_for_all(turns):
    """Wait until all programs of the kernel are here. Those of a cooperative launch run at the same time."""
    tl.debug_barrier()
    first = tl.program_id(0) == 0
    mine = tl.atomic_add(turns, tl.where(first, 0x7FFFFFFF - tl.num_programs(0) + 2, 1), sem="release")
    turned = False
    while not turned:  # the sign changes when the last of them has come
        turned = (mine ^ tl.atomic_add(turns, 0, sem="acquire")) < 0
    tl.debug_barrier()


@triton.jit
def _rows_of(
    w, w2, x, add, weight, norm, gate, out, eps, N,
    K: tl.constexpr, GLU: tl.constexpr, SCATTER: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A program's share of the product of a row; its first weights are there, and the next ones are read ahead."""
    every = tl.num_programs(0)
    for n in range(tl.program_id(0), tl.cdiv(N, BN), every):
        w_next, w2_next = first_weights(n + every, weight, N, K, GLU, BN, BK)
        one_row(n, w, w2, x, add, weight, norm, gate, out, eps, N, K, GLU, SCATTER, BN, BK)
        w = w_next
        w2 = w2_next


@triton.jit
def _routed_layer(
    x, live, entered, router, bias, threshold, turns, norm, qkv_weight, qkv, eps, cos, sin, q_norm, k_norm, head_eps,
    kv, stride, table, entries, lengths, last_key, part, sums, scale, heads, out_weight, attended, up_norm, up_weight,
    hidden, up_eps, down_weight, router_eps, N_QKV, N_OUT, N_UP,
    K: tl.constexpr, KH: tl.constexpr, KU: tl.constexpr, NORMED: tl.constexpr, GATE: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
    BH: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_begin(PDL)
    pid = tl.program_id(0)
    # What no kernel of the step writes is read before the wait.
    router_row = tl.load(router + tl.arange(0, BK), tl.arange(0, BK) < K, other=0.0)
    b = tl.load(bias)
    least = tl.load(threshold)
    alive = tl.load(live) > 0
    wait_for_those_before(PDL)
    score = _scored(pid * 0, x, router_row, b, router_eps, K, NORMED, BK)
    wanted = alive & (score - least >= 0)
    if pid == 0:
        tl.store(entered, wanted.to(tl.int32))
    if not wanted:
        return
    every = tl.num_programs(0)
    w, w2 = first_weights(pid, qkv_weight, N_QKV, K, False, BN, BW)
    _rows_of(w, w2, x, None, qkv_weight, norm, None, qkv, eps, N_QKV, K, False, False, BN, BW)
    _wait_for_all(turns)
    for n in range(pid, G * SPLITS, every):
        attend_part(
            pid * 0, (pid * 0).to(tl.int64), n % G, n // G, None, qkv, cos, sin, q_norm, k_norm, head_eps, kv, stride,
            table, entries, lengths, last_key, part, sums, scale, H, G, D, SIZE, SPLITS, BH, BS, BD,
        )  # fmt: skip
    _wait_for_all(turns)
    for n in range(pid, H, every):
        join_part(n, part, sums, heads, True, D, SPLITS, 0, BD)
    w, w2 = first_weights(pid, out_weight, N_OUT, KH, False, BN, BW)  # asked for before the wait, as by other kernels
    _wait_for_all(turns)
    _rows_of(w, w2, heads, None, out_weight, None, None, attended, eps, N_OUT, KH, False, False, BN, BW)
    w, w2 = first_weights(pid, up_weight, N_UP, K, True, BN, BW)
    _wait_for_all(turns)
    _rows_of(w, w2, x, attended, up_weight, up_norm, None, hidden, up_eps, N_UP, K, True, False, BN, BW)
    w, w2 = first_weights(pid, down_weight, N_OUT, KU, False, BN, BW)
    _wait_for_all(turns)
    gate = gate_of(score, GATE)
    _rows_of(w, w2, hidden, attended, down_weight, None, gate, x, eps, N_OUT, KU, False, True, BN, BW)


def routed_layer(
    x: Tensor,
    live: Tensor,
    entered: Tensor,
    turns: Tensor,
    layer: Any,
    cos: Tensor,
    sin: Tensor,
    heads: Any,
    pages: Any,
    splits: int,
) -> None:
    """`decode.routed_layer`. One kernel, whose programs wait for each other between the layer's parts: where the row
    does not enter, no other begins."""
    weight, bias, threshold, normed, gate = layer.router
    K, KH, KU, itemsize = x.shape[1], layer.out.shape[1], layer.down.shape[1], x.element_size()
    part, sums = (torch.empty(heads.heads * splits, n, device=x.device) for n in (heads.dim, 2))
    qkv, joined, hidden = (x.new_empty(1, n) for n in (len(layer.qkv), KH, KU))
    attended = torch.empty_like(x)
    norm, up_norm = ((each[0], eps_of(x, each[1])) for each in (layer.norm, layer.up_norm))
    cuda = x.is_cuda
    # Two programs of few registers for each multiprocessor; in float32 their memory would not fit on small devices.
    each = 2 if itemsize == 2 else 1
    programs = each * torch.cuda.get_device_properties(x.device).multi_processor_count if cuda else 1
    how = {"launch_cooperative_grid": True} if cuda else {}
    _routed_layer[(programs,)](
        x, live, entered, weight, bias, threshold, turns, norm[0], layer.qkv, qkv, norm[1], cos, sin,
        heads.q_norm, heads.k_norm, eps_of(x, heads.eps), pages.kv, pages.kv.stride(0), pages.table,
        pages.table.stride(0), pages.lengths, pages.last_key, part, sums, heads.dim**-0.5, joined,
        layer.out, attended, up_norm[0], layer.up, hidden, up_norm[1], layer.down, _EPS, len(layer.qkv), K, KU,
        K=K, KH=KH, KU=KU, NORMED=normed, GATE=gate, BK=triton.next_power_of_2(K), BN=4, maxnreg=128,
        BW=triton.next_power_of_2(min(K, 4096 // itemsize)), num_warps=8, **sizes(heads, pages, splits, 1), **how,
        **overlaps(x.device),
    )  # fmt: skip
