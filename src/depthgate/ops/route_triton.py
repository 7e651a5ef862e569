"""A router's work as few kernels: score and decide, choose the k best or those that are marked, take them, merge.

`chosen`: a row of scores a program, no sort; its twin is `select.choose_by_sorting`. The k best of a document are those
above a threshold, which is found bit by bit: 32 counts over a row that stays in registers, where sorts would be a dozen
kernels that each take longer than a small block does. Twins of the others: `reference.scored`, `marked`, `taken`,
`merged`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthgate.ops.launch import launch, power_of_two

Chosen = list[Any]  # index, filled, slot, gates, flat: tensors, or None for those that are not asked for


@triton.jit
def gate_of(score, GATE: tl.constexpr):
    """A gate of `routing.scores`, by its name."""
    safe = tl.where(score != score, 0.0, tl.minimum(tl.maximum(score, -1e4), 1e4))
    if GATE == "one_plus_tanh":
        return 2 * tl.sigmoid(2 * safe)
    elif GATE == "sigmoid":
        return tl.sigmoid(safe)
    elif GATE == "raw":
        return safe
    else:
        return safe * 0 + 1


@triton.jit
def _put(chosen, score, row, batch, t, T, C, index, filled, slot, gates, flat, GATE: tl.constexpr):
    """Write the slots of a row: the chosen tokens ascending, then others."""
    rank = tl.cumsum(chosen.to(tl.int32), 0)
    total = tl.sum(chosen.to(tl.int32), 0)
    to = tl.where(chosen, rank - 1, total + t - rank)
    keep = (t < T) & (to < C)
    tl.store(index + row * C + to, t.to(tl.int64), keep)
    tl.store(slot + row * T + t, tl.where(chosen & (to < C), to, -1).to(tl.int64), t < T)
    if filled is not None:
        tl.store(filled + row * C + to, chosen, keep)
    if gates is not None:
        tl.store(gates + row * C + to, tl.where(chosen, gate_of(score, GATE), 0.0), keep)
    if flat is not None:
        tl.store(flat + row * C + to, batch * T + t, keep)
    return total


@triton.jit
def _choose_in(
    row, batch, scores, valid, doc, budgets, index, filled, slot, gates, flat, T, C,
    GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, BLOCK)
    left = t < T
    s = tl.load(scores + row * T + t, left, other=0.0)
    bits = tl.where(s == 0, 0.0, s).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # IEEE floats ordered as integers
    key = tl.where(s != s, -0x7FFFFFFF, key).to(tl.int64) + 0x80000000  # NaN under -inf; from 1 up
    label = tl.zeros([BLOCK], tl.int64)
    if doc is not None:
        label = tl.load(doc + batch * T + t, left, other=0).to(tl.int64)
    if valid is not None:
        left = left & (tl.load(valid + batch * T + t, left, other=0) != 0)
    chosen = t < 0
    todo = tl.sum(left.to(tl.int32), 0)
    while todo > 0:  # one document after another
        first = tl.min(tl.where(left, t, BLOCK), 0)
        current = tl.sum(tl.where(t == first, label, 0), 0)
        member = left & (label == current)
        size = tl.sum(member.to(tl.int32), 0)
        k = C
        if budgets is not None:
            k = tl.load(budgets + size)
        mine = tl.where(member, key, 0)
        threshold = tl.full([], 0, tl.int64)
        for i in range(32):
            trial = threshold + (tl.full([], 1, tl.int64) << (31 - i))
            enough = tl.sum((mine >= trial).to(tl.int32), 0) >= k
            threshold = tl.where(enough, trial, threshold)
        above = mine > threshold
        tied = member & (mine == threshold)
        room = k - tl.sum(above.to(tl.int32), 0)
        chosen = chosen | above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
        left = left & (label != current)
        todo -= size
    _put(chosen, s, row, batch, t, T, C, index, filled, slot, gates, flat, GATE)


@triton.jit
def _choose(
    scores, valid, doc, budgets, index, filled, slot, gates, flat, T, C, experts,
    GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    of_row = row // experts
    _choose_in(row, of_row, scores, valid, doc, budgets, index, filled, slot, gates, flat, T, C, GATE, BLOCK)


@triton.jit
def _score_of(
    n, N, x, valid, weight, bias, average, count, scores, decision, eps,
    D: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores of the tokens n (ROWS,) that come before N."""
    products, squares = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        here = (n < N)[:, None] & (d < D)[None, :]
        v = tl.load(x + n[:, None] * D + d[None, :], here, other=0.0).to(tl.float32)
        products += v * tl.load(weight + d, d < D, other=0.0)[None, :]
        if NORMED:
            squares += v * v
    s = tl.sum(products, 1)
    if NORMED:
        s *= tl.rsqrt(tl.sum(squares, 1) / D + eps)
    if valid is not None:  # whatever lies in padding
        s = tl.where(tl.load(valid + n, n < N, other=0) != 0, s, 0.0)
    if bias is not None:
        s += tl.load(bias)
    tl.store(scores + n, s, n < N)
    if average is not None:
        least = tl.load(average) / tl.load(count)
        tl.store(decision + n, s - tl.where(least != least, float("-inf"), least), n < N)


@triton.jit
def _score(
    x, valid, weight, bias, average, count, scores, decision, N, eps,
    D: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _score_of(n, N, x, valid, weight, bias, average, count, scores, decision, eps, D, NORMED, ROWS, BLOCK)


@triton.jit
def _mark_in(
    row, decision, valid, scores, index, filled, slot, gates, flat, many, lacking, T, C,
    GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, BLOCK)
    chosen = tl.load(decision + row * T + t, t < T, other=-1.0) >= 0  # not where it is NaN
    if valid is not None:
        chosen = chosen & (tl.load(valid + row * T + t, t < T, other=0) != 0)
    s = tl.load(scores + row * T + t, t < T, other=0.0)
    total = _put(chosen, s, row, row, t, T, C, index, filled, slot, gates, flat, GATE)
    tl.store(many + row, total)
    if lacking is not None:
        tl.atomic_max(lacking, (total - C).to(tl.int64))


@triton.jit
def _mark(
    decision, valid, scores, index, filled, slot, gates, flat, many, lacking, T, C,
    GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _mark_in(row, decision, valid, scores, index, filled, slot, gates, flat, many, lacking, T, C, GATE, BLOCK)


@triton.jit
def _route(
    x, weight, bias, average, count, cos, sin, scores, decision, index, filled, slot, gates, many, lacking,
    rows, cos_rows, sin_rows, T, C, every, eps, D: tl.constexpr, R: tl.constexpr, NORMED: tl.constexpr,
    CAUSAL: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """A row of the batch: score its tokens, choose or mark some, take them."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, T, ROWS):
        n = row * T + start + tl.arange(0, ROWS)
        last = (row + 1) * T
        _score_of(n, last, x, None, weight, bias, average, count, scores, decision, eps, D, NORMED, ROWS, BLOCK)
    tl.debug_barrier()  # what some threads have written, others read
    if CAUSAL:
        _mark_in(row, decision, None, scores, index, filled, slot, gates, None, many, lacking, T, C, GATE, TOKENS)
    else:
        _choose_in(row, row, scores, None, None, None, index, None, slot, gates, None, T, C, GATE, TOKENS)
    tl.debug_barrier()
    d, r = tl.arange(0, BLOCK)[None, :], tl.arange(0, PAIRS)[None, :]
    for start in range(0, C, ROWS):
        c = start + tl.arange(0, ROWS)
        token, to = tl.load(index + row * C + c, c < C, other=0)[:, None], (row * C + c)[:, None]
        here = (c < C)[:, None] & (d < D)
        tl.store(rows + to * D + d, tl.load(x + (row * T + token) * D + d, here), here)
        there, at = (c < C)[:, None] & (r < R), (row * every + token) * R + r
        tl.store(cos_rows + to * R + r, tl.load(cos + at, there), there)
        tl.store(sin_rows + to * R + r, tl.load(sin + at, there), there)


@triton.jit
def _take(
    x, cos, sin, index, rows, cos_rows, sin_rows, T, every, C, D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    batch, token = n // C, tl.load(index + n)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(rows + n * D + d, tl.load(x + (batch * T + token) * D + d, d < D), d < D)
    if cos is not None:
        r = tl.arange(0, PAIRS)
        here, at = (r < R) & (tl.program_id(1) == 0), (batch * every + token) * R + r
        tl.store(cos_rows + n * R + r, tl.load(cos + at, here), here)
        tl.store(sin_rows + n * R + r, tl.load(sin + at, here), here)


@triton.jit
def _merge(x, rows, slot, gates, y, T, C, D, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(slot + n)
    old = tl.load(x + n * D + d, d < D, other=0.0)
    if at >= 0:
        place = n // T * C + at
        gate = tl.load(gates + place)
        a, b = old.to(tl.float32), tl.load(rows + place * D + d, d < D, other=0.0).to(tl.float32)
        # As torch.lerp: a gate of 1 gives the row itself, and one of 0 what was there.
        new = tl.where(gate < 0.5, a + gate * (b - a), b - (b - a) * (1 - gate))
        old = new.to(old.dtype)
    tl.store(y + n * D + d, old, d < D)


def chosen(
    scores: Tensor, valid: Tensor | None, doc: Tensor | None, limits: Tensor | None, slots: int, gate: str | None = None
) -> Chosen:
    """scores (B, E, T) fp32, valid and doc (B, T), limits (T + 1,) int32: of a document of n tokens; None: all slots
    -> index and filled (B, E, slots), slot (B, E, T): the slot of each token, -1 for none. With the name of a gate also
    gates (B, E, slots) of the scores, 0 in empty slots, and flat (B * E * slots,), `index` counted through all rows;
    filled is then None if no slot is empty."""
    B, E, T = scores.shape
    made = _slots_of(scores, slots, gate, gate is None or limits is not None)
    given = [None if each is None else each.contiguous() for each in (scores, valid, doc, limits)]
    launch(_choose, (B * E,), *given, *made, T, slots, E, **_rows_of(T, gate))
    return made


def scored(
    x: Tensor,
    valid: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    threshold: tuple[Tensor, Tensor] | None = None,
    normed: bool = False,
) -> tuple[Tensor, Tensor]:
    """x (B, T, D), valid (B, T), weight (1, D) and bias (1,) in fp32 -> scores (B, T, 1) fp32, and what they are above
    the threshold, an average and its weight; without one the scores themselves. Padding has the bias for a score.
    normed: of tokens scaled to a mean square of one. A token's score does not depend on the others of its batch."""
    (B, T, D), x = x.shape, x.contiguous()
    scores = torch.empty(B, T, 1, device=x.device)
    decision = scores if threshold is None else torch.empty_like(scores)
    eps, rows = torch.finfo(torch.float32).eps, 4
    moved = (None, None) if threshold is None else threshold
    how = {"D": D, "NORMED": normed, "ROWS": rows, "BLOCK": min(1024, power_of_two(D))}
    launch(_score, (-(-B * T // rows),), x, valid, weight, bias, *moved, scores, decision, B * T, eps, **how)
    return scores, decision


def marked(
    decision: Tensor, valid: Tensor | None, scores: Tensor, gate: str, slots: int, lacking: Tensor | None = None
) -> tuple[Chosen, Tensor]:
    """decision and scores (B, T, 1) -> what `chosen` gives with a gate, of the tokens whose decision is >= 0, and how
    many these are (B,), whether or not they have a slot. lacking () int64 is raised to the most that have none."""
    B, T, _ = decision.shape
    made = _slots_of(scores.mT, slots, gate, True)
    many = torch.empty(B, dtype=torch.int32, device=decision.device)
    launch(_mark, (B,), decision.contiguous(), valid, scores, *made, many, lacking, T, slots, **_rows_of(T, gate))
    return made, many


def taken(
    x: Tensor, index: Tensor, rotary: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """x (B, T, D), rotary positions (B or 1, T, R) and index (B, 1, C) -> rows of x (B, C, D) and of the positions."""
    (B, T, D), C, x = x.shape, index.shape[-1], x.contiguous()
    rows, block = torch.empty(B, C, D, dtype=x.dtype, device=x.device), min(2048, power_of_two(D))
    cos, sin = (None, None) if rotary is None else (each.contiguous() for each in rotary)
    R, every = (1, 0) if cos is None else (cos.shape[-1], T if len(cos) == B else 0)
    out: Any = (None, None)
    if rotary is not None:
        out = tuple(torch.empty(B, C, R, dtype=each.dtype, device=x.device) for each in rotary)
    how = {"D": D, "R": R, "BLOCK": block, "PAIRS": power_of_two(R)}
    launch(_take, (B * C, -(-D // block)), x, cos, sin, index.contiguous(), rows, *out, T, every, C, **how)
    return rows, None if rotary is None else out


def small(x: Tensor) -> bool:
    """True if a single program per row of x (B, T, D) takes no longer than the launches that `routed` spares."""
    return x.shape[1] * x.shape[2] <= 2**20 and x.shape[2] <= 2048


def routed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: tuple[Tensor, Tensor] | None,
    normed: bool,
    gate: str,
    slots: int,
    rotary: tuple[Tensor, Tensor],
    causal: bool,
    lacking: Tensor | None = None,
) -> tuple[Tensor, Tensor, Chosen, Tensor, tuple[Tensor, Tensor]]:
    """`scored`, then `marked` (causal) or `chosen` without documents, then `taken`, in one kernel: scores, what the
    rule says of them, the slots without `flat`, the rows, and their rotary positions."""
    (B, T, D), x, R = x.shape, x.contiguous(), rotary[0].shape[-1]
    scores = torch.empty(B, T, 1, device=x.device)
    decision = scores if threshold is None else torch.empty_like(scores)
    index, filled, slot, gates, _ = made = _slots_of(scores.mT, slots, gate, causal, False)
    many = torch.empty(B, dtype=torch.int32, device=x.device) if causal else None
    rows = torch.empty(B, slots, D, dtype=x.dtype, device=x.device)
    cos, sin = (each.contiguous() for each in rotary)
    turned = (
        torch.empty(B, slots, R, dtype=cos.dtype, device=x.device),
        torch.empty(B, slots, R, dtype=sin.dtype, device=x.device),
    )
    moved, eps = (None, None) if threshold is None else threshold, torch.finfo(torch.float32).eps
    given = (x, weight, bias, *moved, cos, sin, scores, decision, index, filled, slot, gates, many, lacking, rows)
    how = {"D": D, "R": R, "NORMED": normed, "CAUSAL": causal, "GATE": gate, "ROWS": 32 if D <= 1024 else 16}
    how |= {"BLOCK": power_of_two(D), "PAIRS": power_of_two(R), "TOKENS": power_of_two(T)}
    launch(_route, (B,), *given, *turned, T, slots, T if len(cos) == B else 0, eps, warps=16, **how)
    return scores, decision, made, rows, turned


def merged(x: Tensor, rows: Tensor, slot: Tensor, gates: Tensor) -> Tensor:
    """x (B, T, D), rows (B, C, D) that carry their own residual, slot (B, 1, T), gates (B, 1, C) -> x with each token
    that has a slot taken from x (gate 0) to its row (gate 1), which it is then bit for bit."""
    (B, T, D), C = x.shape, rows.shape[1]
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    block = min(2048, power_of_two(D))
    launch(_merge, (B * T, -(-D // block)), x, rows.contiguous(), slot, gates.contiguous(), y, T, C, D, BLOCK=block)
    return y


def _slots_of(scores: Tensor, slots: int, gate: str | None, some_empty: bool, counted: bool = True) -> Chosen:
    """Room for what `_put` writes."""
    (B, E, T), device = scores.shape, scores.device
    index = torch.empty(B, E, slots, dtype=torch.int64, device=device)
    filled = torch.empty(B, E, slots, dtype=torch.bool, device=device) if some_empty else None
    slot = torch.empty(B, E, T, dtype=torch.int64, device=device)
    gates = None if gate is None else torch.empty(B, E, slots, device=device)
    flat = torch.empty(B * E * slots, dtype=torch.int64, device=device) if gate and counted else None
    return [index, filled, slot, gates, flat]


def _rows_of(T: int, gate: str | None) -> dict[str, Any]:
    """Options of kernels of which a program holds a row of T tokens."""
    block = power_of_two(T)
    return {"warps": min(16, max(1, block // 256)), "GATE": gate or "", "BLOCK": block}
