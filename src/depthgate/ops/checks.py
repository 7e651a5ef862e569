"""Checks of tensors at the public boundary: shapes and dtypes only, so nothing waits for a device."""

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
