"""Losses as functions of plans. Each is a mean over valid tokens, and 0 where there are none."""

import torch
import torch.nn.functional as F
from torch import Tensor

from depthgate.errors import InvalidValueError
from depthgate.routing.plan import Groups, Slots


def expert_mean(values: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of values (B, T, ...) over valid tokens -> (...); the others are not looked at."""
    if valid is None:
        count = torch.full((), values.shape[0] * values.shape[1], device=values.device)
    else:
        values = torch.where(valid.reshape(*valid.shape, *[1] * (values.ndim - 2)), values, 0.0)
        count = valid.sum()
    return values.sum((0, 1)) / count.clamp(min=1)


def valid_mean(values: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of values (B, T, ...) over valid tokens and whatever follows."""
    return expert_mean(values, valid).mean()


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
    experts = plan.scores.shape[-1]
    chosen = F.one_hot(plan.choice.clamp(min=0), experts).to(plan.scores.dtype).mean(2)  # (B, T, E)
    probability = plan.scores.softmax(-1)
    return experts * (expert_mean(chosen, plan.valid) * expert_mean(probability, plan.valid)).sum()


def z_loss(plan: Slots | Groups) -> Tensor:
    """Mean squared logsumexp of the scores: keeps router logits small (ST-MoE, eq. 5)."""
    if not isinstance(plan, Slots | Groups):
        raise InvalidValueError(f"z_loss got a {type(plan).__name__}: it needs a plan of Slots or Groups")
    return valid_mean(plan.scores.logsumexp(-1).square(), plan.valid)
