"""Matrix products with one weight per expert, without a Python loop over experts."""

import ctypes
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from depthgate.ops import reference

_ALIGN_BYTES = 16  # grouped_mm wants every row to start at a multiple of this
_HUGE_BYTES = 32 * 2**20  # malloc hands out fresh zeroed pages above this, every time
_MADV_HUGEPAGE = 14


def _cast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands in the dtype autocast asks for, or else in that of x: grouped_mm does not autocast."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if x.dtype is torch.float64:
        dtype = x.dtype
    return x.to(dtype), weight.to(dtype)


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (N, D) sorted by expert, weight (E, D, F), ends (E,) int32 -> (N, F): rows ends[e-1]:ends[e] times weight[e].

    Rows from ends[-1] on cost no multiplication and are exactly 0, as are their gradients (`grouped_mm` would
    leave both uninitialised).
    """
    x, weight = _cast(x, weight)
    if x.dtype is torch.float64:  # no grouped kernel has it; it serves checks, not speed
        return reference.grouped_matmul(x, weight, ends)
    N, out_features = x.shape[0], weight.shape[2]
    step = _ALIGN_BYTES // x.element_size()
    pad_in, pad_out = -x.shape[1] % step, -out_features % step
    if pad_in or pad_out:
        x, weight = F.pad(x, (0, pad_in)), F.pad(weight, (0, pad_out, 0, pad_in))
    owned = (torch.arange(N, device=x.device) < ends[-1])[:, None]
    x = torch.where(owned, x, 0.0)
    y = torch.where(owned, F.grouped_mm(x.contiguous(), weight.contiguous(), offs=ends), 0.0)
    return y[:, :out_features] if pad_out else y


def expert_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x (E, N, D), weight (E, D, F) -> (E, N, F): expert e's rows times its weight."""
    if _in_huge_pages(weight) and not torch.compiler.is_compiling():
        x, weight = _cast(x, weight)
        return _HugePageMatmul.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]
    return torch.bmm(x, weight)


def _in_huge_pages(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.nbytes >= _HUGE_BYTES and sys.platform == "linux"


def _empty_in_huge_pages(like: Tensor) -> Tensor:
    """Memory like `like`, asked for in huge pages: a gradient of 300 MB is 75,000 page faults (75 ms) without."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    page = 4096
    start = -(-out.data_ptr() // page) * page
    length = (out.data_ptr() + out.nbytes - start) // page * page
    # Advice only: where the kernel refuses, the memory is as good, and slower to touch first.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return out


class _HugePageMatmul(torch.autograd.Function):
    """torch.bmm whose weight gradient is written into huge pages; see docs/decisions/003-huge-pages.md."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = torch.bmm(grad, weight.mT) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        if torch.is_grad_enabled():  # a second derivative is wanted: `out=` has none
            return grad_x, torch.bmm(x.mT, grad)
        return grad_x, torch.bmm(x.mT, grad, out=_empty_in_huge_pages(weight))
