"""Cross-entropy of a linear head, a part of the rows at a time: the logits of all rows are never held.

Twin: `reference.linear_cross_entropy`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Logits held at a time, 128 MB in fp32 on CPU; CUDA wants larger products, and has room for them.
_PART = {"cpu": 2**25, "cuda": 2**28}


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None, compiled: bool = False
) -> Tensor:
    """Mean over the rows with targets (N,) >= 0 of the cross-entropy of x (N, D) @ weight (V, D)^T; 0 without any.

    Gradients are computed on the way forward, while a part's logits are there, so nothing is computed twice.
    `compiled`: what is done with logits between two products goes through torch.compile.
    """
    rows = rows_at_once(x, weight) if chunk is None else chunk
    if not torch.is_grad_enabled():  # the function below would not know, and compute gradients for nobody
        x, weight = x.detach(), weight.detach()
    loss = _LinearCrossEntropy.apply(x, weight, targets, rows, compiled)  # type: ignore[no-untyped-call]
    return loss  # type: ignore[no-any-return]


def rows_at_once(x: Tensor, weight: Tensor) -> int:
    """How many rows of x have their logits held at a time."""
    return max(1, _PART.get(x.device.type, _PART["cpu"]) // weight.shape[0])


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits (N, V), targets (N,) -> the sum of the losses, and the logarithm of each row's sum of exponentials."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    norms = wide.logsumexp(-1)
    picked = wide.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets >= 0, norms - picked, 0.0).sum(), norms


def _losses_and_gradient(logits: Tensor, targets: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and the gradient of their mean by the logits."""
    total, norms = _losses(logits, targets)
    wide = logits.to(norms.dtype)
    probability = (wide - norms[:, None]).exp()
    here = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    grad = torch.where(here, probability - 1, probability) * ((targets >= 0) / count)[:, None]
    return total, grad.to(logits.dtype)


@cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function through torch.compile, the same for all who ask."""
    return torch.compile(function, dynamic=False)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, compiled: bool) -> Tensor:
        device = x.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        count = (targets >= 0).sum().clamp(min=1)
        total = torch.zeros((), device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        w = weight.to(low)
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        both = compiled_once(_losses_and_gradient) if compiled else _losses_and_gradient
        with torch.autocast(device, enabled=False):
            for start in range(0, x.shape[0], chunk):
                part, wanted = x[start : start + chunk].to(low), targets[start : start + chunk]
                logits = part @ w.T
                if not (wants_x or wants_weight):
                    total += _losses(logits, wanted)[0]
                    continue
                loss, grad = both(logits, wanted, count)
                total += loss
                if grad_x is not None:
                    grad_x[start : start + chunk] = grad @ w
                if grad_weight is not None:
                    grad_weight += grad.T @ part
        ctx.save_for_backward(grad_x, grad_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (grad,) = grads
        grad_x, grad_weight = ctx.saved_tensors
        return (
            None if grad_x is None else grad_x * grad.to(grad_x.dtype),
            None if grad_weight is None else grad_weight * grad.to(grad_weight.dtype),
            None,
            None,
            None,
        )
