"""Rotary positions (Su et al. 2021, RoFormer)."""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of x (B, H, T, d) by the angles of `rotation`."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


# An op of our own only to be opaque: fused into its users, a compiler computes every angle again in each of them,
# forward and backward, which costs a large block more than a tenth of its time.
@torch.library.custom_op("depthgate::rotation", mutates_args=())
def rotation(pos: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """pos (B, T) -> cos and sin (B, 1, T, half) of pos / base^(i / half)."""
    frequency = base ** (-torch.arange(half, device=pos.device, dtype=dtype) / half)
    angle = pos[:, None, :, None].to(dtype) * frequency
    return angle.cos(), angle.sin()


@rotation.register_fake
def _(pos: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    shape = (pos.shape[0], 1, pos.shape[1], half)
    return pos.new_empty(shape, dtype=dtype), pos.new_empty(shape, dtype=dtype)
