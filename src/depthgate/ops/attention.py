"""Attention over packed documents without a mask (flash attention over runs of tokens, each looking at itself alone),
attention over a cache, and rotary positions (Su et al. 2021, RoFormer).

Twin: `reference.packed_attention`.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def can_pack(v: Tensor) -> bool:
    """True if the kernel takes values (B, T, G, d) like these: half precision on CUDA, heads of at most 256."""
    return v.is_cuda and v.dtype in (torch.bfloat16, torch.float16) and v.shape[-1] <= 256 and v.shape[-1] % 8 == 0


def packed_attention(q: Tensor, k: Tensor, v: Tensor, doc: Tensor, most: int) -> Tensor:
    """Causal attention of q (B, T, H, d) to k and v (B, T, G, d) -> (B, T, H, d), within each run of equal `doc`
    (B, T): 0 0 0 1 1 2 ..., at most `most` of them, then padding, -1."""
    B, T = doc.shape
    starts = run_starts(doc, most)
    flat = [t.to(v.dtype).reshape(B * T, *t.shape[2:]) for t in (q, k, v)]
    y = torch.ops.aten._flash_attention_forward(*flat, starts, starts, T, T, 0.0, True, False)[0]
    return y.view(q.shape)  # type: ignore[no-any-return]


def run_starts(doc: Tensor, most: int) -> Tensor:
    """doc (B, T), each row 0 ... 0 1 ... 1 2 ... and -1 at its end -> (B * (most + 1) + 1,) int32: where each run
    begins in the flattened batch, as if every row had `most` of them and one of padding; then the end."""
    sizes = (doc[:, :, None] == torch.arange(most, device=doc.device)).sum(1)  # (B, most)
    padding = doc.shape[1] - sizes.sum(1, keepdim=True)
    ends = torch.cat((sizes, padding), 1).flatten().cumsum(0)
    return torch.cat((ends.new_zeros(1), ends)).int()


def without_cudnn(asked: bool, *more: SDPBackend) -> AbstractContextManager[object]:
    """A context for attention to a cache: cuDNN would plan again for every number of keys, on an H200 tens of
    milliseconds each. `more`: kinds that serve where there is no mask."""
    return sdpa_kernel([*more, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if asked else nullcontext()


def cached_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of q (B, H, T, d) to stored k and v (B, G, S, d) where mask (B, 1, T, S) allows it -> (B, H, T, d)."""
    B, H, T, d = q.shape
    G = k.shape[1]
    if T == 1:  # the queries that share a head of keys become its rows: no key is copied
        q = q.reshape(B, G, H // G, d)
    elif G != H:
        k, v = k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)
    with without_cudnn(q.is_cuda):
        return F.scaled_dot_product_attention(q, k, v, mask).reshape(B, H, T, d)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of x (B, T, H, d) by the angles of `rotation`."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if not x.is_cuda and not torch.compiler.is_compiling():  # the same sums, to the bit, in fewer operations
        return x * torch.cat((cos, cos), -1) + x.roll(x.shape[-1] // 2, -1) * torch.cat((-sin, sin), -1)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def with_half_of(k: Tensor, before: Tensor) -> Tensor:
    """Keys (..., d) whose slower half of the rotary pairs is that of other keys, those of the tokens before."""
    (fast, _, fast2, _), (_, slow, _, slow2) = k.chunk(4, -1), before.chunk(4, -1)
    return torch.cat((fast, slow, fast2, slow2), -1)


def token_before(pos: Tensor, doc: Tensor | None) -> Tensor:
    """pos and doc (B, T) -> (B, T): where the token before stands, in the same document, padding left out; the place of
    the token itself if it is the first."""
    place = torch.arange(pos.shape[1], device=pos.device).expand_as(pos)
    last = torch.where(pos >= 0, place, -1).cummax(1).values
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    there = before >= 0
    if doc is not None:
        there = there & (doc.gather(1, before.clamp(min=0)) == doc)
    return torch.where(there, before, place)


def rotation(pos: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """pos (B, T) -> cos and sin (B, T, 1, half) of pos / base^(i / half)."""
    if not torch.compiler.is_compiling():
        return _angles(pos, half, base, dtype)
    return _rotation(pos, half, base, dtype, pos.is_cuda)  # type: ignore[no-any-return]


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
