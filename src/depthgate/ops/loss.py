"""Losses of a linear head, a part of the rows at a time: the logits of all rows are never held.

Twins: `reference.linear_cross_entropy`, `reference.linear_distillation`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Logits held at a time, 128 MB in fp32 on CPU; CUDA wants larger products, and has room for them.
_PART = {"cpu": 2**25, "cuda": 2**28}
# logits of a part, its rows, how many rows count in all -> sum of the losses, gradient of their mean by the logits
_LossOfPart = Callable[[Tensor, slice, Tensor], tuple[Tensor, Tensor]]


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None, compiled: bool = False
) -> Tensor:
    """Mean over the rows with targets (N,) >= 0 of the cross-entropy of x (N, D) @ weight (V, D)^T; 0 without any.

    Gradients are computed on the way forward, while a part's logits are there, so nothing is computed twice.
    `compiled`: the work on logits between two products goes through torch.compile.
    """
    trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    both = _compiled(_cross_entropy_and_gradient) if compiled else _in_few_passes

    def of_part(logits: Tensor, here: slice, count: Tensor) -> tuple[Tensor, Tensor]:
        return both(logits, targets[here], count) if trains else _cross_entropy(logits, targets[here])

    return _by_parts(x, weight, targets, of_part, chunk)


def linear_distillation(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    text: float = 0.0,
    chunk: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """Mean over the rows with targets (N,) >= 0 of

        (1 - text) * t^2 * KL(teacher || student), both softened by the temperature t, + text * cross-entropy

    for logits x (N, D) @ weight (V, D)^T and those of the teacher, whose width may differ. 0 without any such row.
    Gradients reach x and weight alone, and are computed on the way forward.
    """
    taught, head = teacher_x.detach(), teacher_weight.detach().to(teacher_x.dtype)
    both = _compiled(_distillation_and_gradient) if compiled else _distillation_and_gradient

    def of_part(logits: Tensor, here: slice, count: Tensor) -> tuple[Tensor, Tensor]:
        return both(logits, taught[here] @ head.T, targets[here], count, temperature, text)

    return _by_parts(x, weight, targets, of_part, chunk)


def _cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits (N, V), targets (N,) -> the sum of the losses, and the logarithm of each row's sum of exponentials."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    norms = wide.logsumexp(-1)
    picked = wide.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets >= 0, norms - picked, 0.0).sum(), norms


def _in_few_passes(logits: Tensor, targets: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """`_cross_entropy_and_gradient` where nothing fuses its passes over the logits: here they are fewer."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    kept, at = targets >= 0, targets.clamp(min=0)[:, None]
    grad = wide.log_softmax(-1)
    total = -torch.where(kept, grad.gather(1, at)[:, 0], 0.0).sum()
    weights = (kept / count)[:, None].to(wide.dtype)
    grad = grad.exp_().mul_(weights).scatter_add_(1, at, -weights)
    return total, grad.to(logits.dtype)


def _cross_entropy_and_gradient(logits: Tensor, targets: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    total, norms = _cross_entropy(logits, targets)
    wide = logits.to(norms.dtype)
    probability = (wide - norms[:, None]).exp()
    here = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    grad = torch.where(here, probability - 1, probability) * ((targets >= 0) / count)[:, None]
    return total, grad.to(logits.dtype)


def _distillation_and_gradient(
    logits: Tensor, taught: Tensor, targets: Tensor, count: Tensor, temperature: float, text: float
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    wide = logits.to(dtype)
    log_p = (taught.to(dtype) / temperature).log_softmax(-1)
    log_q = (wide / temperature).log_softmax(-1)
    p = log_p.exp()
    kept = targets >= 0
    total = (1 - text) * temperature**2 * torch.where(kept, (p * (log_p - log_q)).sum(-1), 0.0).sum()
    grad = (1 - text) * temperature * (log_q.exp() - p) * (kept / count)[:, None]
    if text:
        of_text, text_grad = _cross_entropy_and_gradient(wide, targets, count)
        total, grad = total + text * of_text, grad + text * text_grad
    return total, grad.to(logits.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function through torch.compile, once for all callers."""
    return torch.compile(function, dynamic=False)


def _by_parts(x: Tensor, weight: Tensor, targets: Tensor, of_part: _LossOfPart, chunk: int | None) -> Tensor:
    rows = max(1, _PART.get(x.device.type, _PART["cpu"]) // weight.shape[0]) if chunk is None else chunk
    if not torch.is_grad_enabled():  # the function below would not know, and compute gradients that are not used
        x, weight = x.detach(), weight.detach()
    return _LossByParts.apply(x, weight, targets, of_part, rows)  # type: ignore[no-any-return, no-untyped-call]


class _LossByParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, of_part: _LossOfPart, chunk: int) -> Tensor:
        device = x.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        count = (targets >= 0).sum().clamp(min=1)
        total = torch.zeros((), device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        w = weight.to(low)
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        with torch.autocast(device, enabled=False):
            for start in range(0, x.shape[0], chunk):
                here = slice(start, start + chunk)
                part = x[here].to(low)
                loss, grad = of_part(part @ w.T, here, count)
                total += loss
                if grad_x is not None:
                    grad_x[here] = grad @ w
                if grad_weight is not None:
                    grad_weight += grad.T @ part
        ctx.save_for_backward(grad_x, grad_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if kept is None else kept * grads[0].to(kept.dtype) for kept in ctx.saved_tensors]
        return (*scaled, None, None, None)
