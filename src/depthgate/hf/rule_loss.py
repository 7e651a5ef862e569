"""How a routed layer's causal rule learns inside somebody else's training loop, which knows nothing of plans.

The layer's output carries the lesson: it is the same tensor, and when a gradient comes back through it, the rule's
loss adds its own, or the threshold moves. That happens once a step with any kind of activation checkpointing, where
a plan kept on the module would lose its gradient, and a counter would count twice. The rule's loss is not divided by
the number of accumulated batches, and not multiplied by the scale of a gradient scaler: nobody tells the layer. Where
no gradient comes back, below the first weight that is trained, thresholds stay; and each process moves its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from depthgate.routing.causal import Threshold
from depthgate.routing.losses import causal_bce
from depthgate.routing.plan import Slots
from depthgate.routing.routers import TopTokens


class _WithLoss(torch.autograd.Function):
    """y as it is; backwards, `loss` is added to whatever is minimised."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class _With(torch.autograd.Function):
    """y as it is; backwards, `then` is done too. With a hook of y instead, torch 2.11 compiles a graph out of order."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return grad, None


def teach(y: Tensor, plan: Slots, router: TopTokens, weight: float) -> Tensor:
    """y, through which the rule learns from this plan, if it is one of training."""
    if plan.causal or not router.training or not torch.is_grad_enabled() or not y.requires_grad:
        return y
    if isinstance(router.rule, Threshold):
        return _With.apply(y, lambda: router.update(plan))  # type: ignore[no-any-return, no-untyped-call]
    if weight and plan.decision.requires_grad:
        return _WithLoss.apply(y, weight * causal_bce(plan))  # type: ignore[no-any-return, no-untyped-call]
    return y
