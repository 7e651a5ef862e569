"""Losses and metrics as functions of plans, 0-d tensors: nothing waits for the device until a value is read.

A loss is a mean over valid tokens, and 0 where there are none. `causal_bce`, `predictor_accuracy` and `agreement`
compare the causal rule with the top-k choice, so they want plans of a pass without `causal=True`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from depthgate.errors import InvalidValueError
from depthgate.routing.plan import Groups, Plan, Slots


def expert_mean(values: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of values (B, T, ...) over valid tokens -> (...); the others are not looked at."""
    if valid is None:
        return values.mean((0, 1)) if values.shape[:2].numel() else values.sum((0, 1))
    values = torch.where(valid.reshape(*valid.shape, *[1] * (values.ndim - 2)), values, 0.0)
    return values.sum((0, 1)) / valid.sum().clamp(min=1)


def valid_mean(values: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of values (B, T, ...) over valid tokens and whatever follows."""
    return values.mean() if valid is None and values.numel() else expert_mean(values, valid).mean()


def causal_bce(plan: Slots) -> Tensor:
    """Binary cross-entropy of the causal rule's logits against "was it in the top k" (MoD paper, section 3.5).
    Trains the router's scores where they are the rule, and a `Predictor` alone where that is."""
    logits = plan_of_top_k(plan, "causal_bce").decision
    if torch.is_grad_enabled() and plan.scores.requires_grad and not logits.requires_grad:
        raise InvalidValueError("causal_bce: a threshold has nothing to train; use update_thresholds, and no loss")
    target = plan.chosen.to(logits.dtype)
    return valid_mean(F.binary_cross_entropy_with_logits(logits, target, reduction="none"), plan.valid)


def plan_of_top_k(plan: Slots, what: str) -> Slots:
    """Return the plan, if it is one of Slots chosen by the top k, which causal rules are compared with."""
    if not isinstance(plan, Slots) or plan.causal:
        got = "plan of a causal call" if isinstance(plan, Slots) else type(plan).__name__
        raise InvalidValueError(f"{what} got a {got}: it needs the Slots plan of a call without causal=True")
    return plan


def load_balance(plan: Groups) -> Tensor:
    """E * sum over experts of (share of choices) * (mean probability): 1 when balanced (Switch Transformer, eq. 4).
    Null experts count as experts."""
    if not isinstance(plan, Groups):
        raise InvalidValueError(f"load_balance got a {type(plan).__name__}: it needs the Groups plan of token choice")
    probability = expert_mean(plan.scores.softmax(-1), plan.valid)  # (E,)
    choice = plan.choice.flatten()  # -1 at padding
    chosen = torch.zeros_like(probability).index_add(0, choice.clamp(min=0), (choice >= 0).to(probability.dtype))
    return len(probability) * (chosen * probability).sum() / chosen.sum().clamp(min=1)


def z_loss(plan: Slots | Groups) -> Tensor:
    """Mean squared logsumexp of the scores: keeps router logits small (ST-MoE, eq. 5)."""
    if not isinstance(plan, Slots | Groups):
        raise InvalidValueError(f"z_loss got a {type(plan).__name__}: it needs a plan of Slots or Groups")
    return valid_mean(plan.scores.logsumexp(-1).square(), plan.valid)


def routed_share(plan: Plan) -> Tensor:
    """Share of valid tokens that are computed: by an expert, averaged over experts (Slots); by real experts, among
    all their choices (Groups); all of them (Soft)."""
    if isinstance(plan, Slots):
        return valid_mean(plan.chosen.float(), plan.valid)
    if isinstance(plan, Groups):
        return valid_mean(plan.computed.float(), plan.valid)
    return torch.ones((), device=a_plan(plan, "routed_share").scores.device)


def predictor_accuracy(plan: Slots) -> Tensor:
    """Share of valid tokens on which the causal rule and this plan say the same."""
    plan = plan_of_top_k(plan, "predictor_accuracy")
    return valid_mean((plan.causal_choice == plan.chosen).float(), plan.valid)


def agreement(plan: Slots) -> Tensor:
    """Tokens routed by both the causal rule and this plan, among those routed by either (1 if by neither)."""
    plan = plan_of_top_k(plan, "agreement")
    both = (plan.causal_choice & plan.chosen).sum()
    either = (plan.causal_choice | plan.chosen).sum()
    return torch.where(either > 0, both / either.clamp(min=1), 1.0)


def has_nan(plan: Plan) -> Tensor:
    """True if any valid token's score is NaN. Such tokens lose every choice, so a run should look at this."""
    plan = a_plan(plan, "has_nan")
    bad = plan.scores.isnan().flatten(2).any(-1)
    return (bad if plan.valid is None else bad & plan.valid).any()


def a_plan(plan: Plan, what: str) -> Plan:
    """Return the plan, if it is one: a layer returns a tuple of them."""
    if not isinstance(plan, Plan):
        raise InvalidValueError(f"{what} got a {type(plan).__name__}: it needs one plan, such as plans[0]")
    return plan


def with_loss(y: Tensor, loss: Tensor | None, then: Callable[[], None] | None = None) -> Tensor:
    """y as it is; when a gradient comes back through it, `loss` adds its own to the backward pass, and `then` is
    called."""
    return _WithLoss.apply(y, loss, then)  # type: ignore[no-any-return, no-untyped-call]


class _WithLoss(torch.autograd.Function):
    """With a hook of y instead, torch 2.11 compiles a graph out of order."""

    @staticmethod
    def forward(y: Tensor, loss: Tensor | None, then: Callable[[], None] | None) -> Tensor:  # noqa: ARG004
        return torch.ops.aten._unsafe_view(y, y.shape)  # type: ignore[no-any-return]  # not a view: may be written to

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        _, loss, ctx.then = inputs
        ctx.save_for_backward(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (loss,) = ctx.saved_tensors
        if ctx.then is not None:
            ctx.then()
        return grad, None if loss is None else torch.ones_like(loss), None
