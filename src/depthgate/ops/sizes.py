"""Sizes that follow from others: plain numbers, shared by layers and by FLOPs counted from a configuration."""

import math


def budget(capacity: float, tokens: int) -> int:
    """k: how many of `tokens` valid tokens are routed. At least one, unless there are none."""
    return min(tokens, max(1, math.floor(capacity * tokens)))


def swiglu_hidden(dim: int) -> int:
    """The hidden size at which SwiGLU has the weights of a plain MLP four times as wide: 8/3 dim, a multiple of 8."""
    return -(-8 * dim // 24) * 8


def predictor_hidden(dim: int) -> int:
    """The hidden size of the MLP that predicts a router's choice."""
    return max(1, min(64, dim // 2))
