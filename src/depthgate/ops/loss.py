"""Cross-entropy of a linear head, a part of the rows at a time: the logits of all rows are never held.

Twin: `reference.linear_cross_entropy`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_ELEMENTS = 2**25  # logits held at a time, 128 MB in fp32


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    """Mean over the rows with targets (N,) >= 0 of the cross-entropy of x (N, D) @ weight (V, D)^T; 0 without any.

    Gradients are computed on the way forward, while a part's logits are there, so nothing is computed twice.
    """
    rows = max(1, _CHUNK_ELEMENTS // weight.shape[0]) if chunk is None else chunk
    return _LinearCrossEntropy.apply(x, weight, targets, rows)  # type: ignore[no-any-return, no-untyped-call]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
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
                part, wanted = x[start : start + chunk].to(low), targets[start : start + chunk]
                logits = (part @ w.T).to(total.dtype)
                total += F.cross_entropy(logits, wanted.clamp(min=-1), ignore_index=-1, reduction="sum")
                if not (wants_x or wants_weight):
                    continue
                grad = logits.softmax(-1)
                grad.scatter_add_(1, wanted.clamp(min=0)[:, None], -torch.ones_like(grad[:, :1]))
                grad = (grad * ((wanted >= 0) / count)[:, None]).to(low)
                if grad_x is not None:
                    grad_x[start : start + chunk] = grad @ w
                if grad_weight is not None:
                    grad_weight += grad.T @ part
        ctx.save_for_backward(grad_x, grad_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        grad_x, grad_weight = ctx.saved_tensors
        return (
            None if grad_x is None else grad_x * grad.to(grad_x.dtype),
            None if grad_weight is None else grad_weight * grad.to(grad_weight.dtype),
            None,
            None,
        )
