"""`select.choose` as one kernel: a row of scores a program, no sort. Its twin is `select.choose_by_sorting`.

The k best of a document are those above a threshold, which is found bit by bit: 32 counts over a row that stays in
registers, where sorts would be a dozen kernels that each take longer than a small block does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _choose(scores, valid, doc, budgets, index, filled, slot, T, C, experts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    batch = row // experts
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
    rank = tl.cumsum(chosen.to(tl.int32), 0)
    total = tl.sum(chosen.to(tl.int32), 0)
    to = tl.where(chosen, rank - 1, total + t - rank)
    keep = (t < T) & (to < C)
    tl.store(index + row * C + to, t.to(tl.int64), keep)
    tl.store(filled + row * C + to, chosen, keep)
    tl.store(slot + row * T + t, tl.where(chosen & (to < C), to, -1).to(tl.int64), t < T)


def choose(
    scores: Tensor, valid: Tensor | None, doc: Tensor | None, budgets: Tensor | None, slots: int
) -> list[Tensor]:
    """scores (B, E, T) fp32, valid and doc (B, T), budgets (T + 1,) int32: of a document of n tokens; None: all slots
    -> index and filled (B, E, slots), slot (B, E, T): the slot of each token, -1 for none."""
    B, E, T = scores.shape
    index = torch.empty(B, E, slots, dtype=torch.int64, device=scores.device)
    filled = torch.empty(B, E, slots, dtype=torch.bool, device=scores.device)
    slot = torch.empty(B, E, T, dtype=torch.int64, device=scores.device)
    given = [None if each is None else each.contiguous() for each in (scores, valid, doc, budgets)]
    block = triton.next_power_of_2(T)
    warps = min(16, max(1, block // 256))
    with torch.cuda.device(scores.device):  # kernels go to the current one, whatever their arguments
        _choose[(B * E,)](*given, index, filled, slot, T, slots, E, BLOCK=block, num_warps=warps)
    return [index, filled, slot]
