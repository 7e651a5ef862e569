"""Positions are data: (B, T) integers that travel with their tokens; negative means padding."""

import torch
from torch import Tensor


def plain_positions(x: Tensor) -> Tensor:
    """x (B, T, ...) -> (B, T): 0, 1, 2, ... in every row."""
    B, T = x.shape[:2]
    return torch.arange(T, device=x.device).expand(B, T)


def masked_positions(mask: Tensor) -> Tensor:
    """mask (B, T), True at real tokens -> (B, T): real tokens counted from 0 in each row, -1 at padding."""
    return torch.where(mask, mask.long().cumsum(1) - 1, -1)
