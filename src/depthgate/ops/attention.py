"""Attention over packed documents without a mask (by kernels of ours, or flash attention over runs of tokens, each
looking at itself alone), attention over a cache, and rotary positions (Su et al. 2021, RoFormer).

Twins: `reference.packed_attention`, `reference.short_attention`.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import register_flop_formula

from depthgate.ops.select import triton_works

# The longest rows and the widest heads for which our kernels were faster than PyTorch's: of packed documents, and of
# tokens that all look at all (benchmarks/results/h200-attention.md).
_PACKED, _TO_ALL = (2048, 64), (256, 32)


def can_pack(v: Tensor) -> bool:
    """True if the kernel takes values (B, T, G, d) like these: half precision on CUDA, heads of at most 256."""
    return v.is_cuda and v.dtype in (torch.bfloat16, torch.float16) and v.shape[-1] <= 256 and v.shape[-1] % 8 == 0


def packed_attention(q: Tensor, k: Tensor, v: Tensor, doc: Tensor, most: int) -> Tensor:
    """Causal attention of q (B, T, H, d) to k and v (B, T, G, d) -> (B, T, H, d), within each run of equal `doc`
    (B, T): 0 0 0 1 1 2 ..., at most `most` of them, then padding, -1."""
    B, T = doc.shape
    q, k = q.to(v.dtype), k.to(v.dtype)
    if is_short(v, *_PACKED):
        return short_attention(q, k, v, doc, True)
    starts = run_starts(doc, most)
    flat = [t.reshape(B * T, *t.shape[2:]) for t in (q, k, v)]
    y = torch.ops.aten._flash_attention_forward(*flat, starts, starts, T, T, 0.0, True, False)[0]
    return y.view(q.shape)  # type: ignore[no-any-return]


def attention_to_all(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
    """Attention of every token to all tokens, or to those that are `real` (B, T): q, k, v (B, T, H, d) -> the same."""
    if real is None and is_short(v, *_TO_ALL) and q.dtype == v.dtype:
        return short_attention(q, k, v, None, False)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    # A row of padding alone looks at itself: its result is thrown away, and looking at nothing would be 0/0.
    mask = None if real is None else (real | ~real.any(1, keepdim=True))[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def is_short(v: Tensor, longest: int, widest: int) -> bool:
    """True if our kernels are to attend to values (B, T, G, d) like these: short rows, narrow heads, halves on CUDA."""
    B, T, _, d = v.shape
    halves = v.is_cuda and v.dtype in (torch.bfloat16, torch.float16)
    return halves and B > 0 and 0 < T <= longest and d <= widest and triton_works()


def short_attention(q: Tensor, k: Tensor, v: Tensor, doc: Tensor | None, causal: bool) -> Tensor:
    """Attention of q (B, T, H, d) to k and v (B, T, G, d) -> (B, T, H, d): causal and within each run of equal `doc`,
    as above, or of all tokens to all."""
    return _short_attention(q, k, v, doc, causal)[0]  # type: ignore[no-any-return]


@torch.library.custom_op("depthgate::short_attention", mutates_args=())
def _short_attention(
    q: Tensor, k: Tensor, v: Tensor, doc: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from depthgate.ops import short_attention_triton

    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    runs = _runs(doc)
    y, lse = short_attention_triton.forward(q, k, v, runs, causal)
    return y, lse, y.new_empty(0, dtype=torch.int32) if runs is None else runs


def _runs(doc: Tensor | None) -> Tensor | None:
    """doc (B, T), each row 0 ... 0 1 ... 1 2 ... and -1 at its end -> (2, B, T) int32: where the run of each token
    begins and ends."""
    if doc is None:
        return None
    label = torch.where(doc < 0, doc.shape[1], doc).contiguous()
    return torch.stack([torch.searchsorted(label, label), torch.searchsorted(label, label, right=True) - 1]).int()


@_short_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, doc: Tensor | None, causal: bool) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    (B, T, H, _), runs = q.shape, (0,) if doc is None else (2, *doc.shape)
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    return v.new_empty(q.shape), lse, q.new_empty(runs, dtype=torch.int32)


@torch.library.custom_op("depthgate::short_attention_backward", mutates_args=())
def _short_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor, y: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from depthgate.ops import short_attention_triton

    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    known = runs if runs.numel() else None
    return short_attention_triton.backward(grad, q, k, v, known, y, lse, causal)


@_short_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *given, _, ctx.causal = inputs
    y, lse, runs = output
    ctx.save_for_backward(*given, runs, y, lse)


def _back(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_short_attention_backward(grad, *ctx.saved_tensors, ctx.causal), None, None


_short_attention.register_autograd(_back, setup_context=_keep)


@register_flop_formula([torch.ops.depthgate.short_attention])
def _flops(q_shape: Any, k_shape: Any, *_: Any, **__: Any) -> int:
    """Those of products of all pairs, as for any attention."""
    B, T, H, d = q_shape
    return int(4 * B * H * T * k_shape[1] * d)


@register_flop_formula([torch.ops.depthgate.short_attention_backward])
def _backward_flops(grad_shape: Any, q_shape: Any, k_shape: Any, *_: Any, **__: Any) -> int:  # noqa: ARG001
    B, T, H, d = q_shape
    return int(10 * B * H * T * k_shape[1] * d)


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
