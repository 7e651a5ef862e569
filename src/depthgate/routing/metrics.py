"""Metrics as functions of plans: 0-d tensors, so that nothing waits for the device until a value is read.

`predictor_accuracy` and `agreement` compare the causal rule with the top-k choice, so they want plans of a pass
without `causal=True`.
"""

import torch
from torch import Tensor

from depthgate.errors import InvalidValueError
from depthgate.routing.losses import plan_of_top_k, valid_mean
from depthgate.routing.plan import Groups, Plan, Slots


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
