"""Matrix products with one weight per expert, without a Python loop over experts."""

import ctypes
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

_ALIGN_BYTES = 16  # grouped_mm wants every row to start at a multiple of this
_HUGE_BYTES = 32 * 2**20  # malloc hands out fresh zeroed pages above this, every time
_MADV_HUGEPAGE = 14


def _cast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands in the dtype autocast asks for: ops of our own are not cast by it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype is torch.float64:
        return x, weight
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of tokens (..., D) as one operation, and as a tensor of its own: FSDP2 warns of views."""
    rows = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], len(weight)))  # type: ignore[no-any-return]


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor, complete: bool = False) -> Tensor:
    """x (N, D) sorted by expert, weight (E, D, F), ends (E,) int32 -> (N, F): rows ends[e-1]:ends[e] times weight[e].

    Rows from ends[-1] on cost no multiplication and are exactly 0, as are their gradients (the kernel leaves both
    uninitialised). `complete` promises that there are none, and spares the passes that see to it.
    """
    x, weight = _cast(x, weight)
    step = _ALIGN_BYTES // x.element_size()
    out_features = weight.shape[2]
    pad_in, pad_out = -x.shape[1] % step, -out_features % step
    if pad_in or pad_out:
        x, weight = F.pad(x, (0, pad_in)), F.pad(weight, (0, pad_out, 0, pad_in))
    y: Tensor
    if complete:
        y = _grouped_mm(x, weight, ends)
    else:
        owned = (torch.arange(x.shape[0], device=x.device) < ends[-1])[:, None]
        y = torch.where(owned, _grouped_mm(torch.where(owned, x, 0.0), weight, ends), 0.0)
    return y[:, :out_features] if pad_out else y


# Ops of our own around F.grouped_mm, since torch.compile knows that one in bf16 only.


@torch.library.custom_op("depthgate::grouped_mm", mutates_args=())
def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if x.dtype is torch.float64 or not len(x):  # no grouped kernel has either; it serves checks, not speed
        from depthgate.ops import reference

        return reference.grouped_matmul(x, weight, ends)
    if not weight.mT.is_contiguous():  # either major is fine, other strides are not
        weight = weight.contiguous()
    return F.grouped_mm(x.contiguous(), weight, offs=ends)


@_grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("depthgate::grouped_outer", mutates_args=())
def _grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """x (N, D), y (N, F) -> (E, D, F): x^T y over each expert's rows, the weight gradient of `_grouped_mm`."""
    if x.dtype is torch.float64 or not len(x):
        from depthgate.ops import reference

        return reference.grouped_outer(x, y, ends)
    return F.grouped_mm(x.contiguous().mT, y.contiguous(), offs=ends)


@_grouped_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    grad_x = _grouped_mm(grad, weight.mT, ends) if needs_x else None
    return grad_x, _grouped_outer(x, grad, ends) if needs_weight else None, None


def _grouped_outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, y, ends = ctx.saved_tensors
    return _grouped_mm(y, grad.mT, ends), _grouped_mm(x, grad, ends), None


_grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save)
_grouped_outer.register_autograd(_grouped_outer_backward, setup_context=_save)


@register_flop_formula([torch.ops.depthgate.grouped_mm, torch.ops.depthgate.grouped_outer], get_raw=True)
def _flops(x: Tensor, other: Tensor, ends: Tensor, **_: Any) -> int:
    """FLOPs of the rows that have an expert."""
    return 2 * int(ends[-1]) * x.shape[1] * other.shape[-1]


def expert_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x (E, N, D), weight (E, D, F) -> (E, N, F): expert e's rows times its weight."""
    if weight.is_cuda and weight.dtype is torch.float32 and torch.is_autocast_enabled("cuda"):
        return _WideGradient.apply(_cast(x, weight)[0], weight)  # type: ignore[no-any-return, no-untyped-call]
    huge = weight.device.type == "cpu" and weight.nbytes >= _HUGE_BYTES and sys.platform == "linux"
    if huge and not torch.compiler.is_compiling():
        x, weight = _cast(x, weight)
        return _HugePageMatmul.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]
    return torch.bmm(x, weight)


class _WideGradient(torch.autograd.Function):
    """torch.bmm under autocast whose weight's gradient is written in float32 at once: experts have so many weights that
    to write it in halves, and then to cast it, takes as long as the product."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        cast = weight.to(x.dtype)
        ctx.save_for_backward(x, cast)
        return torch.bmm(x, cast)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, cast = ctx.saved_tensors
        return torch.bmm(grads[0], cast.mT), _wide_bmm(x.mT, grads[0])


def _wide_bmm(x: Tensor, y: Tensor) -> Tensor:
    """x (E, N, D) times y (E, D, F), of halves, in float32."""
    return torch.bmm(x, y, out_dtype=torch.float32) if x.is_cuda else torch.bmm(x.float(), y.float())


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
