"""Rotary positions (Su et al. 2021, RoFormer)."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of x (B, T, H, d) by the angles of `rotation`."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotation(pos: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """pos (B, T) -> cos and sin (B, T, 1, half) of pos / base^(i / half)."""
    return _rotation(pos, half, base, dtype, pos.is_cuda and torch.compiler.is_compiling())  # type: ignore[no-any-return]


def _angles(pos: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequency = base ** (-torch.arange(half, device=pos.device, dtype=dtype) / half)
    angle = pos[:, :, None, None].to(dtype) * frequency
    return angle.cos(), angle.sin()


@cache
def _compiled_angles() -> Any:
    return torch.compile(_angles, dynamic=True)


# An op of our own only to be opaque: fused into its users, a compiler computes every angle again in each of them,
# forward and backward, which costs a large block more than a tenth of its time. By itself it may be compiled.
@torch.library.custom_op("depthgate::rotation", mutates_args=())
def _rotation(pos: Tensor, half: int, base: float, dtype: torch.dtype, compiled: bool) -> tuple[Tensor, Tensor]:
    cos, sin = (_compiled_angles() if compiled else _angles)(pos, half, base, dtype)
    return cos, sin


@_rotation.register_fake
def _(pos: Tensor, half: int, base: float, dtype: torch.dtype, compiled: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    shape = (*pos.shape, 1, half)
    return pos.new_empty(shape, dtype=dtype), pos.new_empty(shape, dtype=dtype)
