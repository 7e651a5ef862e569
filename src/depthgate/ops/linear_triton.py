"""Products of weights and the few rows of a decode step, as kernels; `decode.linear` and `decode.add_linear` are their
twins. Reading the weights is all that they cost: those of one row begin with it before the kernel before has ended,
where it is certain that the row computes. Where no row does, none is read.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def overlaps(device: torch.device) -> dict[str, bool]:
    """Options of a launch that let a kernel begin while the one before it runs, and wait for it inside; CUDA devices of
    compute capability 9 have this."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Let the programs of the next kernel begin as soon as there is room for them."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_those_before(PDL: tl.constexpr):
    """Wait until the kernels before this one have ended. Every program has to: a kernel that ends earlier than those
    before it would let the next one read what they have not written."""
    if PDL:
        gdc_wait()


@triton.jit
def _one_row(
    x, add, many, weight, norm, gates, out, eps, N,
    K: tl.constexpr, GLU: tl.constexpr, SCATTER: tl.constexpr, SURE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    place = weight + n[:, None].to(tl.int64) * K + k[None, :]
    second = N.to(tl.int64) * K
    col = (n < N)[:, None]
    let_next_begin(PDL)
    if not SURE:
        wait_for_those_before(PDL)
        if tl.load(many) == 0:
            return
    w = tl.load(place, col & (k < K)[None, :], other=0.0)
    if GLU:
        w2 = tl.load(place + second, col & (k < K)[None, :], other=0.0)
    if SURE:
        wait_for_those_before(PDL)
    total = tl.zeros((BN, BK), tl.float32)
    total2 = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for start in range(0, K, BK):
        at = start + k
        later = col & (at + BK < K)[None, :]
        w_next = tl.load(place + start + BK, later, other=0.0)
        v = tl.load(x + at, at < K, other=0.0).to(tl.float32)
        if not SCATTER and add is not None:
            v += tl.load(add + at, at < K, other=0.0).to(tl.float32)
        if norm is not None:
            squares += v * v
            v = v * tl.load(norm + at, at < K, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * v[None, :]
        w = w_next
        if GLU:
            w2_next = tl.load(place + second + start + BK, later, other=0.0)
            total2 += w2.to(tl.float32) * v[None, :]
            w2 = w2_next
    y = tl.sum(total, 1)
    y2 = tl.sum(total2, 1)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
        y2 *= scale
    if GLU:
        y = y * tl.sigmoid(y) * y2
    if SCATTER:
        y += tl.load(add + n, n < N, other=0.0).to(tl.float32)
        if gates is not None:
            y *= tl.load(gates)
        y += tl.load(out + n, n < N, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), n < N)


@triton.jit
def _ready(
    x, add, places, many, norm, out, eps, K: tl.constexpr, GATHER: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The rows that compute, side by side, and normalised where there is a norm."""
    i = tl.program_id(0)
    let_next_begin(PDL)
    wait_for_those_before(PDL)
    if i >= tl.load(many):
        return
    k = tl.arange(0, BK)
    row = tl.load(places + i).to(tl.int64) if GATHER else i.to(tl.int64)
    v = tl.load(x + row * K + k, k < K, other=0.0).to(tl.float32)
    if add is not None:
        v += tl.load(add + i.to(tl.int64) * K + k, k < K, other=0.0).to(tl.float32)
    if norm is not None:
        v = v * tl.rsqrt(tl.sum(v * v, 0) / K + eps) * tl.load(norm + k, k < K, other=0.0).to(tl.float32)
    tl.store(out + i.to(tl.int64) * K + k, v.to(out.dtype.element_ty), k < K)


@triton.jit
def _some_rows(
    x, add, places, many, weight, gates, out, part, turns, B, N,
    K: tl.constexpr, GLU: tl.constexpr, SCATTER: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_begin(PDL)
    wait_for_those_before(PDL)
    count = tl.load(many)
    first = tl.program_id(1) * BM
    if first >= count:
        return
    m = first + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Beyond the last row and column the last is read, so that no mask is needed; nothing is stored there.
    source = x + tl.minimum(m, B - 1)[None, :].to(tl.int64) * K + k[:, None]
    place = weight + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + k[None, :]
    second = N.to(tl.int64) * K
    total = tl.zeros((BN, BM), tl.float32)
    total2 = tl.zeros((BN, BM), tl.float32)
    PER: tl.constexpr = ((K + BK - 1) // BK + SPLITS - 1) // SPLITS * BK
    begin = tl.program_id(2) * PER
    for start in range(begin, tl.minimum(begin + PER, K), BK):
        if K % BK == 0:
            v = tl.load(source + start)
            w = tl.load(place + start)
        else:
            v = tl.load(source + start, (start + k < K)[:, None], other=0.0)
            w = tl.load(place + start, (start + k < K)[None, :], other=0.0)
        total = tl.dot(w, v, total, input_precision="ieee")
        if GLU:
            if K % BK == 0:
                w2 = tl.load(place + second + start)
            else:
                w2 = tl.load(place + second + start, (start + k < K)[None, :], other=0.0)
            total2 = tl.dot(w2, v, total2, input_precision="ieee")
    real = (n < N)[:, None] & (m < count)[None, :]
    at = m[None, :].to(tl.int64) * N + n[:, None]
    if SPLITS > 1:  # the last of the programs that share a tile adds up what they found, always in one order
        size = B.to(tl.int64) * N
        mine = part + tl.program_id(2) * size * (1 + GLU) + at
        tl.store(mine, total, real)
        if GLU:
            tl.store(mine + size, total2, real)
        tl.debug_barrier()
        turn = turns + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(turn, 1) < SPLITS - 1:
            return
        tl.store(turn, 0)
        total = tl.zeros((BN, BM), tl.float32)
        total2 = tl.zeros((BN, BM), tl.float32)
        for split in range(SPLITS):
            theirs = part + split * size * (1 + GLU) + at
            total += tl.load(theirs, real, other=0.0, cache_modifier=".cg")
            if GLU:
                total2 += tl.load(theirs + size, real, other=0.0, cache_modifier=".cg")
    if GLU:
        total = total * tl.sigmoid(total) * total2
    if SCATTER:
        total += tl.load(add + at, real, other=0.0).to(tl.float32)
        if gates is not None:
            total *= tl.load(gates + m, m < count, other=0.0)[None, :]
        at = tl.load(places + m, m < count, other=0)[None, :] * N + n[:, None]
        total += tl.load(out + at, real, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), real)


def _tile(rows: int, N: int, K: int, itemsize: int) -> dict[str, int]:
    """Shape of a program's tile: enough bytes under way in as many programs as there are processors."""
    if rows == 1:
        return {"BN": 4, "BK": triton.next_power_of_2(min(K, 4096 // itemsize)), "num_warps": 4}
    tile = {"BM": 16 if rows <= 16 else 64, "BN": 64, "num_warps": 4}
    if itemsize == 4:
        return tile | {"BN": 32, "BK": 32, "num_stages": 2, "SPLITS": 1}
    return tile | {"BK": 128, "num_stages": 4, "SPLITS": 4 if N <= 4096 else 1}


def linear(
    x: Tensor,
    rows: Any,
    weight: Tensor,
    *,
    gather: bool = True,
    add: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float | None = None,
    glu: bool = False,
    wide: bool = False,
) -> Tensor:
    """`decode.linear`."""
    B, K, N = len(rows.places), weight.shape[1], len(weight) // (1 + glu)
    out = x.new_empty(B, N, dtype=torch.float32 if wide else x.dtype)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if B == 1:
        _run_one_row(x, add, rows, weight, norm, None, out, eps, GLU=glu, SCATTER=False)
        return out
    if gather or norm is not None or add is not None:
        ready = x.new_empty(B, K)
        how = {"K": K, "GATHER": gather, "BK": triton.next_power_of_2(K), **overlaps(x.device)}
        _ready[(B,)](x, add, rows.places, rows.many, norm, ready, eps, num_warps=4, **how)
        x = ready
    _run_some_rows(x, None, rows, weight, None, out, GLU=glu, SCATTER=False)
    return out


def add_linear(x: Tensor, rows: Any, weight: Tensor, hidden: Tensor, add: Tensor, gates: Tensor | None) -> None:
    """`decode.add_linear`."""
    if len(rows.places) == 1:
        _run_one_row(hidden, add, rows, weight, None, gates, x, 0.0, GLU=False, SCATTER=True)
    else:
        _run_some_rows(hidden, add, rows, weight, gates, x, GLU=False, SCATTER=True)


def _run_one_row(
    x: Tensor,
    add: Tensor | None,
    rows: Any,
    weight: Tensor,
    norm: Tensor | None,
    gates: Tensor | None,
    out: Tensor,
    eps: float,
    **how: bool,
) -> None:
    N, K = out.shape[1], weight.shape[1]
    how |= _tile(1, N, K, x.element_size()) | overlaps(x.device)
    grid = (triton.cdiv(N, how["BN"]),)
    _one_row[grid](x, add, rows.many, weight, norm, gates, out, eps, N, K=K, SURE=rows.sure, **how)


def _run_some_rows(
    x: Tensor, add: Tensor | None, rows: Any, weight: Tensor, gates: Tensor | None, out: Tensor, **how: bool
) -> None:
    B, N, K = len(rows.places), out.shape[1], weight.shape[1]
    how |= _tile(B, N, K, x.element_size()) | overlaps(x.device)
    grid = (triton.cdiv(N, how["BN"]), triton.cdiv(B, how["BM"]), how["SPLITS"])
    part = torch.empty(how["SPLITS"] if how["SPLITS"] > 1 else 0, 1 + how["GLU"], B, N, device=x.device)
    _some_rows[grid](x, add, rows.places, rows.many, weight, gates, out, part, rows.turns, B, N, K=K, **how)
