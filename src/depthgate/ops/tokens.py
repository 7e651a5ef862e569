"""Token tensors at the public boundary: checks of shapes and dtypes, which wait for no device, and positions.

Positions are data: (B, T) integers that travel with their tokens; negative means padding.
"""

from typing import Any

import torch
from torch import Tensor

from depthgate.errors import InvalidValueError


def check_tokens(x: Any, dim: int, name: str = "x", dim_name: str = "dim") -> None:
    """Token features of shape (batch, tokens, dim), of a floating dtype."""
    if not isinstance(x, Tensor):
        raise InvalidValueError(f"{name} is a {type(x).__name__}: it must be a tensor of shape (batch, tokens, {dim})")
    if x.ndim != 3 or x.shape[-1] != dim:
        raise InvalidValueError(
            f"{name} has shape {tuple(x.shape)}: it must be (batch, tokens, {dim}), since {dim_name} is {dim}"
        )
    if not x.is_floating_point():
        raise InvalidValueError(
            f"{name} has dtype {x.dtype}: it must be a floating dtype; convert it with {name}.float()"
        )


def check_per_token(value: Any, x: Tensor, name: str, dtype: torch.dtype | None = None) -> None:
    """A (batch, tokens) companion of `x`: bool where `dtype` says so, else integers."""
    if not isinstance(value, Tensor) or value.shape != x.shape[:2]:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InvalidValueError(f"{name} is {shape}: it must be a tensor of shape {tuple(x.shape[:2])}, like x")
    if dtype is torch.bool:
        if value.dtype is not torch.bool:
            raise InvalidValueError(f"{name} has dtype {value.dtype}: it must be bool, True at real tokens")
    elif value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        raise InvalidValueError(f"{name} has dtype {value.dtype}: it must hold integers")


def plain_positions(x: Tensor) -> Tensor:
    """x (B, T, ...) -> (B, T): 0, 1, 2, ... in every row."""
    B, T = x.shape[:2]
    return torch.arange(T, device=x.device).expand(B, T)


def masked_positions(mask: Tensor, x: Tensor) -> Tensor:
    """mask (B, T) of x (B, T, ...), True at real tokens -> (B, T): real tokens counted from 0 in each row, -1 at
    padding."""
    check_per_token(mask, x, "mask", torch.bool)
    return torch.where(mask, mask.long().cumsum(1) - 1, -1)
