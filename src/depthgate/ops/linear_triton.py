"""Products of weights and the few rows of a decode step, as kernels; `decode.linear` and `decode.add_linear` are their
twins. Reading the weights is all that they cost: where it is certain that a row computes, they are asked for before the
kernel before has ended. Where no row does, none is read.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


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
def counted(many, SURE: tl.constexpr, PDL: tl.constexpr):
    """The number of rows that compute, after the wait; where no kernel before decides upon it, it is read meanwhile."""
    if SURE:
        count = tl.load(many)
        wait_for_those_before(PDL)
    else:
        wait_for_those_before(PDL)
        count = tl.load(many)
    return count


@triton.jit
def fetch_early(pointers, PDL: tl.constexpr):
    """Have lines of 128 bytes brought near, without waiting for them."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def first_weights(part, weight, N, K: tl.constexpr, GLU: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The first columns of a part's rows of weights (BN, BK), and those of its rows in the second half of a GLU."""
    n = part * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    place = weight + n[:, None].to(tl.int64) * K + k[None, :]
    real = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(place, real, other=0.0)
    w2 = w
    if GLU:
        w2 = tl.load(place + N.to(tl.int64) * K, real, other=0.0)
    return w, w2


@triton.jit
def one_row(
    part, w, w2, x, add, weight, norm, gate, out, eps, N,
    K: tl.constexpr, GLU: tl.constexpr, SCATTER: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A part of the product of a row: the first weights are there, and what comes later is read ahead."""
    n = part * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    place = weight + n[:, None].to(tl.int64) * K + k[None, :]
    second = N.to(tl.int64) * K
    col = (n < N)[:, None]
    total = tl.zeros((BN, BK), tl.float32)
    total2 = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    x_next = tl.load(x + k, k < K, other=0.0)
    if SCATTER:
        before = tl.load(out + n, n < N, other=0.0).to(tl.float32)
        added = tl.load(add + n, n < N, other=0.0).to(tl.float32)
    for start in range(0, K, BK):
        at = start + k
        later = col & (at + BK < K)[None, :]
        w_next = tl.load(place + start + BK, later, other=0.0)
        v = x_next.to(tl.float32)
        x_next = tl.load(x + at + BK, at + BK < K, other=0.0)
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
        y += added
        if gate is not None:
            y *= gate
        y += before
    tl.store(out + n, y.to(out.dtype.element_ty), n < N)


@triton.jit
def _one_row(
    x, add, many, weight, norm, gates, out, eps, N,
    K: tl.constexpr, GLU: tl.constexpr, SCATTER: tl.constexpr, SURE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_begin(PDL)
    if not SURE:
        wait_for_those_before(PDL)
        if tl.load(many) == 0:
            return
    w, w2 = first_weights(tl.program_id(0), weight, N, K, GLU, BN, BK)
    if SURE:
        wait_for_those_before(PDL)
    gate = None
    if gates is not None:
        gate = tl.load(gates)
    one_row(tl.program_id(0), w, w2, x, add, weight, norm, gate, out, eps, N, K, GLU, SCATTER, BN, BK)


@triton.jit
def _ready(
    x, add, places, many, norm, out, eps,
    K: tl.constexpr, GATHER: tl.constexpr, SURE: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The rows that compute, side by side, and normalised where there is a norm."""
    let_next_begin(PDL)
    i = tl.program_id(0).to(tl.int64)
    count = counted(many, SURE, PDL)
    if i >= count:
        return
    k = tl.arange(0, BK)
    row = i
    if GATHER and not SURE:
        row = tl.load(places + i).to(tl.int64)
    v = tl.load(x + row * K + k, k < K, other=0.0).to(tl.float32)
    if add is not None:
        v += tl.load(add + i * K + k, k < K, other=0.0).to(tl.float32)
    if norm is not None:
        v = v * tl.rsqrt(tl.sum(v * v, 0) / K + eps) * tl.load(norm + k, k < K, other=0.0).to(tl.float32)
    tl.store(out + i * K + k, v.to(out.dtype.element_ty), k < K)


@triton.jit
def _some_rows(
    x, x_tiles, add, places, many, weight, weight_tiles, gates, out, part, turns, B, N,
    K: tl.constexpr, GLU: tl.constexpr, SCATTER: tl.constexpr, SURE: tl.constexpr, SPLITS: tl.constexpr,
    TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_begin(PDL)
    PER: tl.constexpr = ((K + BK - 1) // BK + SPLITS - 1) // SPLITS * BK  # entries of a row that each split has
    begin = tl.program_id(2) * PER
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    second = N.to(tl.int64) * K
    # Beyond the last row and column the last is read, so that no mask is needed; nothing is stored there.
    weights = weight + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K
    count = counted(many, SURE, PDL)
    first = tl.program_id(1) * BM
    if first >= count:
        return
    m = first + tl.arange(0, BM)
    source = x + tl.minimum(m, B - 1)[:, None].to(tl.int64) * K + k[None, :]
    place = weights + k[None, :]
    if TURNED:
        total = tl.zeros((BN, BM), tl.float32)
        total2 = tl.zeros((BN, BM), tl.float32)
    else:
        total = tl.zeros((BM, BN), tl.float32)
        total2 = tl.zeros((BM, BN), tl.float32)
    real = (m < count)[:, None] & (n < N)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    if SCATTER:  # read before the product: nothing waits for it afterwards
        to = at
        if not SURE:
            to = tl.load(places + m, m < count, other=0)[:, None] * N + n[None, :]
        before = tl.load(out + to, real, other=0.0)
        added = tl.load(add + at, real, other=0.0)
    for start in range(begin, tl.minimum(begin + PER, K), BK):
        if weight_tiles is not None:
            v = x_tiles.load([first, start])
            w = weight_tiles.load([tl.program_id(0) * BN, start])
        else:
            v = tl.load(source + start, (start + k < K)[None, :], other=0.0)
            w = tl.load(place + start, (start + k < K)[None, :], other=0.0)
        if TURNED:
            total = tl.dot(w, tl.trans(v), total, input_precision="ieee")
        else:
            total = tl.dot(v, tl.trans(w), total, input_precision="ieee")
        if GLU:
            if weight_tiles is not None:
                w2 = weight_tiles.load([N + tl.program_id(0) * BN, start])
            else:
                w2 = tl.load(place + second + start, (start + k < K)[None, :], other=0.0)
            if TURNED:
                total2 = tl.dot(w2, tl.trans(v), total2, input_precision="ieee")
            else:
                total2 = tl.dot(v, tl.trans(w2), total2, input_precision="ieee")
    if TURNED:
        total = tl.trans(total)
        total2 = tl.trans(total2)
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
        total = tl.zeros((BM, BN), tl.float32)
        total2 = tl.zeros((BM, BN), tl.float32)
        for split in range(SPLITS):
            theirs = part + split * size * (1 + GLU) + at
            total += tl.load(theirs, real, other=0.0, cache_modifier=".cg")
            if GLU:
                total2 += tl.load(theirs + size, real, other=0.0, cache_modifier=".cg")
    if GLU:
        total = total * tl.sigmoid(total) * total2
    if SCATTER:
        total += added.to(tl.float32)
        if gates is not None:
            total *= tl.load(gates + m, m < count, other=0.0)[:, None]
        total += before.to(tl.float32)
        at = to
    tl.store(out + at, total.to(out.dtype.element_ty), real)


def _shape(tile: int, N: int, K: int, glu: bool, itemsize: int) -> dict[str, int]:
    """Shape of a program's tile: enough bytes under way in as many programs as there are processors. By measurements on
    an H200, docs/decisions/012."""
    if tile == 1:
        shape = {"BN": 4, "BK": min(triton.next_power_of_2(K), 4096 // itemsize), "num_warps": 8 if glu else 4}
        # Two rows of weights and few registers, so that all programs of a long product run at the same time.
        return shape | ({"BN": 2, "maxnreg": 64} if shape["BK"] < K else {})
    few = tile == 16
    shape = {"BM": tile, "BN": 64, "BK": 128, "TURNED": few, "SPLITS": 1, "num_warps": 4, "num_stages": 4}
    if itemsize == 4:
        return shape | {"BN": 32, "BK": 32, "num_stages": 2}
    if N > 4096:
        return shape | ({} if few else {"BN": 32 if glu else 64, "num_stages": 3})
    if K > 4096:
        return shape | {"SPLITS": 4 if few else 2, "num_stages": 6}
    return shape | ({"SPLITS": 4} if few else {"BN": 32, "num_stages": 6})


def eps_of(x: Tensor, eps: float | None) -> float:
    """That of a norm; where it says none, the smallest difference of the numbers of x."""
    return torch.finfo(x.dtype).eps if eps is None else eps


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
    if B == 1:
        _run_one_row(x, add, rows, weight, norm, None, out, eps_of(x, eps), GLU=glu, SCATTER=False)
        return out
    if gather or norm is not None or add is not None:
        ready = x.new_empty(B, K)
        how = {"K": K, "GATHER": gather, "SURE": rows.sure, "BK": triton.next_power_of_2(K), **overlaps(x.device)}
        _ready[(B,)](x, add, rows.places, rows.many, norm, ready, eps_of(x, eps), num_warps=4, **how)
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
    **how: int,
) -> None:
    N, K = out.shape[1], weight.shape[1]
    how |= _shape(1, N, K, bool(how["GLU"]), x.element_size()) | overlaps(x.device)
    grid = (triton.cdiv(N, how["BN"]),)
    _one_row[grid](x, add, rows.many, weight, norm, gates, out, eps, N, K=K, SURE=rows.sure, **how)


def _tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """Tiles of a matrix for the unit that copies them by itself, where their rows lie as it wants them."""
    rows_fit = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(1) == 1
    able = overlaps(x.device)["PDL"] and x.dtype != torch.float32  # devices that have one have the other
    return TensorDescriptor.from_tensor(x, [rows, columns]) if able and rows_fit else None


def _run_some_rows(
    x: Tensor, add: Tensor | None, rows: Any, weight: Tensor, gates: Tensor | None, out: Tensor, **how: int
) -> None:
    B, N, K = len(rows.places), out.shape[1], weight.shape[1]
    how |= _shape(rows.tile, N, K, bool(how["GLU"]), x.element_size()) | overlaps(x.device)
    grid = (triton.cdiv(N, how["BN"]), triton.cdiv(B, how["BM"]), how["SPLITS"])
    part = torch.empty(how["SPLITS"] if how["SPLITS"] > 1 else 0, 1 + how["GLU"], B, N, device=x.device)
    tiles = _tiles(x, how["BM"], how["BK"]), _tiles(weight, how["BN"], how["BK"])
    x_tiles, weight_tiles = tiles if None not in tiles else (None, None)
    _some_rows[grid](
        x, x_tiles, add, rows.places, rows.many, weight, weight_tiles, gates, out, part, rows.turns, B, N,
        K=K, SURE=rows.sure, **how,
    )  # fmt: skip
