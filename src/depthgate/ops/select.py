"""Choice of tokens: the k best of each document, exactly k, ties to the earlier position.

Scores become unique int64 keys (score order in the high half, position in the low half), so every device, kernel
and compiler that sorts keys right chooses the same tokens. Twins: `reference.top_tokens`, `reference.compact`.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from depthgate.errors import DepthgateWarning
from depthgate.flops import SLACK, budget

_LOWEST = -(2**31)  # int32: padding
_NAN = _LOWEST + 1  # NaN ranks under -inf and above padding
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FEW = 4096  # elements that a CPU sorts faster than it makes keys of them


def budgets(capacity: float, tokens: Tensor) -> Tensor:
    """`budget` of a tensor of counts; float64, so that it rounds as Python does."""
    return (tokens.double() * capacity + SLACK).floor().long().clamp(min=1).minimum(tokens)


def ranking_keys(scores: Tensor, valid: Tensor | None = None) -> Tensor:
    """scores (..., T) -> unique int64 keys (..., T), larger is better: earlier wins a tie, NaN loses to all,
    padding to NaN."""
    T = scores.shape[-1]
    s = scores.detach().float()
    s = torch.where(s == 0, torch.zeros_like(s), s)  # -0.0 ties with 0.0
    bits = s.view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # IEEE floats ordered as integers
    order = torch.where(s.isnan(), _NAN, order)
    if valid is not None:
        order = torch.where(valid, order, _LOWEST)
    return order * 2**31 + torch.arange(T - 1, -1, -1, device=s.device)


def _sorts_at_once(x: Tensor) -> bool:
    """True where one sort is faster than a choice in several small steps: while every step has to be launched."""
    return not torch.compiler.is_compiling() and (x.is_cuda or x.numel() <= _FEW)


def top_k(scores: Tensor, k: int) -> Tensor:
    """scores (..., T) -> the k best positions (..., k), ascending."""
    if _sorts_at_once(scores):  # ascending, NaN comes last
        best = scores.detach().float().neg().sort(dim=-1, stable=True).indices[..., :k]
    else:
        best = ranking_keys(scores).topk(k, dim=-1, sorted=False).indices
    return best.sort(dim=-1).values


def top_of_documents(scores: Tensor, valid: Tensor | None, doc: Tensor | None, capacity: float) -> Tensor:
    """scores (B, E, T), valid and doc (B, T) -> chosen (B, E, T): of each document's n valid tokens,
    the `budget(capacity, n)` best. Without `doc` a row is one document."""
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid[:, None].expand_as(scores)
    order = ranking_keys(scores, valid).argsort(dim=-1, descending=True)
    T = scores.shape[-1]
    # Within the order of scores, a stable sort by document lines up each document, best token first.
    # Padding joins a document of its own, which nothing is chosen from.
    label = torch.zeros_like(order) if doc is None else doc[:, None].expand_as(scores).long()
    label = torch.where(valid, label, torch.iinfo(torch.int64).max)
    by_score = label.gather(-1, order)
    by_doc, within = by_score.sort(dim=-1, stable=True)
    order = order.gather(-1, within)
    start = torch.searchsorted(by_doc, by_doc, side="left")
    size = torch.searchsorted(by_doc, by_doc, side="right") - start
    rank = torch.arange(T, device=scores.device) - start
    chosen = (rank < budgets(capacity, size)) & valid.gather(-1, order)
    return torch.zeros_like(valid).scatter(-1, order, chosen)


def compact(chosen: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """chosen (..., T) bool -> index and filled (..., slots): the chosen positions ascending, then empty slots,
    which hold other, distinct positions."""
    if _sorts_at_once(chosen):
        filled, index = chosen.sort(dim=-1, descending=True, stable=True)
        return index[..., :slots], filled[..., :slots]
    position = torch.arange(chosen.shape[-1], device=chosen.device)
    up_to = chosen.cumsum(-1)
    count = up_to[..., -1:]
    place = torch.where(chosen, up_to - 1, count + position - up_to)
    index = torch.empty_like(place).scatter(-1, place, position.expand_as(place))[..., :slots]
    return index, position[:slots] < count


def choose(
    scores: Tensor, valid: Tensor | None, doc: Tensor | None, capacity: float, slots: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """scores (B, E, T), valid and doc (B, T) -> index and filled (B, E, slots): `top_of_documents`, compact; and, where
    it costs nothing, slot (B, E, T): the slot of each token, -1 for none."""
    if by_kernels(scores):
        limits = limits_of(scores, valid, doc, capacity, slots)
        index, filled, slot = _choose_on_cuda(scores.detach().float(), valid, doc, limits, slots)
        return index, filled, slot
    if doc is None:
        return *_best_of_rows(scores, valid, capacity, slots), None
    return *choose_by_sorting(scores, valid, doc, capacity, slots), None


def by_kernels(scores: Tensor) -> bool:
    """True if the kernels take scores (..., T)."""
    return scores.is_cuda and rows_fit(scores.shape[-1], scores.numel()) and triton_works()


def rows_fit(T: int, scores: int) -> bool:
    """True if there are not too many tokens in a row, which a program of the kernels holds, nor scores in all."""
    return T <= 2**14 and 0 < scores < 2**40


def few_launches(x: Tensor) -> bool:
    """True if a kernel is to do what takes several operations on x, since each of them has to be launched: CUDA, no
    gradients, no compiler. Elsewhere operations of torch do it, which know gradients and can be fused."""
    eager = x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    eager = eager and not torch.jit.is_tracing()  # type: ignore[no-untyped-call]
    return eager and type(x) is Tensor and x.dtype in _DTYPES and triton_works()


def limits_of(scores: Tensor, valid: Tensor | None, doc: Tensor | None, capacity: float, slots: int) -> Tensor | None:
    """How many tokens of a document of n are chosen, (T + 1,) int32; None where every slot is filled."""
    T = scores.shape[-1]
    if valid is None and doc is None and budget(capacity, T) == slots:
        return None
    return budgets(capacity, torch.arange(T + 1, device=scores.device)).int()


def choose_by_sorting(
    scores: Tensor, valid: Tensor | None, doc: Tensor | None, capacity: float, slots: int
) -> tuple[Tensor, Tensor]:
    """`choose` without a kernel of its own."""
    return compact(top_of_documents(scores, valid, doc, capacity), slots)


def _best_of_rows(scores: Tensor, valid: Tensor | None, capacity: float, slots: int) -> tuple[Tensor, Tensor]:
    """`choose` of rows that are one document each: no more is sorted than there are slots."""
    T = scores.shape[-1]
    real = None if valid is None else valid[:, None].expand_as(scores)
    best = ranking_keys(scores, real).topk(slots, dim=-1).indices
    count = torch.full((len(scores),), T, device=scores.device) if valid is None else valid.sum(-1)
    filled = torch.arange(slots, device=scores.device) < budgets(capacity, count)[:, None, None]
    index = torch.where(filled, best, best + T).sort(dim=-1).values
    return index % max(T, 1), index < T


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def triton_works() -> bool:
    """True if Triton is installed and compiles the kernel; warns once if not."""
    global _works
    if _works is None:
        try:
            from depthgate.ops import route_triton

            with torch.no_grad():
                few = torch.zeros(1, 1, 2, device="cuda")
                route_triton.chosen(few, None, None, torch.ones(3, dtype=torch.int32, device="cuda"), 1)
            _works = True
        except Exception as error:  # a missing package, an unknown GPU, a compiler of its own kinds of errors
            _works = False
            warnings.warn(f"Triton does not work here ({error}): tokens are chosen by sorting", DepthgateWarning, 2)
    return _works


_works: bool | None = None


@torch.library.custom_op("depthgate::choose", mutates_args=())
def _choose_on_cuda(
    scores: Tensor, valid: Tensor | None, doc: Tensor | None, budgets: Tensor | None, slots: int
) -> list[Tensor]:
    from depthgate.ops import route_triton

    return route_triton.chosen(scores, valid, doc, budgets, slots)[:3]


@_choose_on_cuda.register_fake
def _(scores: Tensor, *others: Any) -> list[Tensor]:
    shape = (*scores.shape[:2], others[-1])
    index, filled = scores.new_empty(shape, dtype=torch.int64), scores.new_empty(shape, dtype=torch.bool)
    return [index, filled, scores.new_empty(scores.shape, dtype=torch.int64)]
