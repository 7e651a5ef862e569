"""Parts of the layers of transformers models as one kernel each, where that has a dozen operations: norms and rotary
positions. Twins: `reference.scaled`, `reference.turned`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthgate.ops.launch import launch, power_of_two


@triton.jit
def _scale(x, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    row = tl.load(x + n * D + d, d < D, other=0.0)
    wide = row.to(tl.float32)
    unit = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)).to(row.dtype)
    scaled = unit.to(tl.float32) * tl.load(weight + d, d < D, other=0.0).to(tl.float32)
    tl.store(out + n * D + d, scaled.to(row.dtype), d < D)


@triton.jit
def _pairs(
    x, out, at, first_cos, cos, first_sin, sin,
    HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn the pairs of one token's heads, (HEADS, 2 * HALF) at `x + at`."""
    h, r = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    here = (h < HEADS) & (r < HALF)
    place = at + h * 2 * HALF + r
    a, b = tl.load(x + place, here, other=0.0), tl.load(x + place + HALF, here, other=0.0)
    left, right = a.to(tl.float32), b.to(tl.float32)
    one = (left * first_cos).to(a.dtype).to(tl.float32) + (-right * first_sin).to(a.dtype).to(tl.float32)
    two = (right * cos).to(a.dtype).to(tl.float32) + (left * sin).to(a.dtype).to(tl.float32)
    tl.store(out + place, one.to(a.dtype), here)
    tl.store(out + place + HALF, two.to(a.dtype), here)


@triton.jit
def _turn(
    q, k, cos, sin, q_out, k_out, C, every, H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, FEWER: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK)[None, :]
    at = (n // C * every + n % C) * 2 * HALF + r
    first_cos, last_cos = tl.load(cos + at, r < HALF, other=0.0), tl.load(cos + at + HALF, r < HALF, other=0.0)
    first_sin, last_sin = tl.load(sin + at, r < HALF, other=0.0), tl.load(sin + at + HALF, r < HALF, other=0.0)
    a, b, c, d = first_cos.to(tl.float32), last_cos.to(tl.float32), first_sin.to(tl.float32), last_sin.to(tl.float32)
    _pairs(q, q_out, n * H * 2 * HALF, a, b, c, d, H, HALF, ROWS, BLOCK)
    _pairs(k, k_out, n * G * 2 * HALF, a, b, c, d, G, HALF, FEWER, BLOCK)


def scaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., D) scaled to a mean square of one, in the dtype of x, times weight (D,)."""
    x, D = x.contiguous(), x.shape[-1]
    out, block = torch.empty_like(x), power_of_two(D)
    if x.numel():
        launch(_scale, (x.numel() // D,), x, weight, out, eps, warps=min(8, max(1, block // 256)), D=D, BLOCK=block)
    return out


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs (i, i + d/2) of q (B, H, C, d) and k (B, G, C, d) turned by the angles whose cosines and sines (B or 1,
    C, d) are given. Tokens lie before heads in memory, as in what a projection gives, and do so in what is returned."""
    (B, H, C, d), G = q.shape, k.shape[1]
    q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    new_q, new_k, every = torch.empty_like(q), torch.empty_like(k), C if len(cos) == B else 0
    given = q, k, cos.contiguous(), sin.contiguous(), new_q, new_k, C, every
    how = {"H": H, "G": G, "HALF": d // 2, "BLOCK": power_of_two(d // 2)}
    if q.numel():
        launch(_turn, (B * C,), *given, warps=2, **how, ROWS=power_of_two(H), FEWER=power_of_two(G))
    return new_q.transpose(1, 2), new_k.transpose(1, 2)
