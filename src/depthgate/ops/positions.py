"""Positions are data: (B, T) integers that travel with their tokens; negative means padding."""

import torch
from torch import Tensor

from depthgate.ops.checks import check_per_token


def plain_positions(x: Tensor) -> Tensor:
    """x (B, T, ...) -> (B, T): 0, 1, 2, ... in every row."""
    B, T = x.shape[:2]
    return torch.arange(T, device=x.device).expand(B, T)


def masked_positions(mask: Tensor, x: Tensor) -> Tensor:
    """mask (B, T) of x (B, T, ...), True at real tokens -> (B, T): real tokens counted from 0 in each row, -1 at
    padding."""
    check_per_token(mask, x, "mask", torch.bool)
    return torch.where(mask, mask.long().cumsum(1) - 1, -1)
