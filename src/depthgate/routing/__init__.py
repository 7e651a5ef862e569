"""Routing: routers look at tokens and return plans; losses and metrics are functions of plans."""

from depthgate.routing.causal import RULES, Predictor, Rule, Scores, Threshold
from depthgate.routing.losses import (
    agreement,
    causal_bce,
    has_nan,
    load_balance,
    predictor_accuracy,
    routed_share,
    z_loss,
)
from depthgate.routing.plan import Groups, Plan, Plans, Slots, Soft, depth_plans
from depthgate.routing.routers import SoftSlots, TopExperts, TopTokens, update_thresholds
from depthgate.routing.scores import GATES, Gate, RandomScorer, one_plus_tanh, raw, sigmoid, straight_through

__all__ = [
    "GATES",
    "RULES",
    "Gate",
    "Groups",
    "Plan",
    "Plans",
    "Predictor",
    "RandomScorer",
    "Rule",
    "Scores",
    "Slots",
    "Soft",
    "SoftSlots",
    "Threshold",
    "TopExperts",
    "TopTokens",
    "agreement",
    "causal_bce",
    "depth_plans",
    "has_nan",
    "load_balance",
    "one_plus_tanh",
    "predictor_accuracy",
    "raw",
    "routed_share",
    "sigmoid",
    "straight_through",
    "update_thresholds",
    "z_loss",
]
