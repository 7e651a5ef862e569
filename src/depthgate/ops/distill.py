"""The loss of a student that is to say what a teacher says, a part of the rows at a time, as in `ops.loss`.

Twin: `reference.linear_distillation`.
"""

from typing import Any

import torch
from torch import Tensor

from depthgate.ops.loss import compiled_once, rows_at_once


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
    rows = rows_at_once(x, weight) if chunk is None else chunk
    given = (x, weight, teacher_x.detach(), teacher_weight.detach(), targets, temperature, text, rows, compiled)
    return _LinearDistillation.apply(*given)  # type: ignore[no-any-return, no-untyped-call]


def _both(
    logits: Tensor, taught: Tensor, targets: Tensor, count: Tensor, temperature: float, text: float
) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and the gradient of their mean by the student's logits."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    wide = logits.to(dtype)
    log_p = (taught.to(dtype) / temperature).log_softmax(-1)
    log_q = (wide / temperature).log_softmax(-1)
    p = log_p.exp()
    loss = (1 - text) * temperature**2 * (p * (log_p - log_q)).sum(-1)
    grad = (1 - text) * temperature * (log_q.exp() - p)
    if text:
        norms = wide.logsumexp(-1, keepdim=True)
        here = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
        loss = loss + text * (norms - wide.gather(1, targets.clamp(min=0)[:, None]))[:, 0]
        grad = grad + text * ((wide - norms).exp() - here.to(dtype))
    kept = targets >= 0
    return torch.where(kept, loss, 0.0).sum(), (grad * (kept / count)[:, None]).to(logits.dtype)


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        targets: Tensor,
        temperature: float,
        text: float,
        chunk: int,
        compiled: bool,
    ) -> Tensor:
        device = x.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        count = (targets >= 0).sum().clamp(min=1)
        total = torch.zeros((), device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        w, v = weight.to(low), teacher_weight.to(teacher_x.dtype)
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        both = compiled_once(_both) if compiled else _both
        with torch.autocast(device, enabled=False):
            for start in range(0, x.shape[0], chunk):
                here = slice(start, start + chunk)
                part = x[here].to(low)
                loss, grad = both(part @ w.T, teacher_x[here] @ v.T, targets[here], count, temperature, text)
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
        return (*scaled, *[None] * 7)
