"""Soft MoE's weights and means from one matrix of exponentials (Puigcerver et al. 2023, section 2).

Logits are cosines times a scale of at most `MOST`, so exp(logit - scale) neither overflows nor vanishes in fp32, and
one such matrix serves the softmax over tokens as well as that over slots, and it alone is kept for the backward pass. A
mean makes its probabilities again when it needs them: there are fewer slots than values of a token, and so nothing but
products and one sum goes over the tokens, and nothing writes them in float32.

Twins: `reference.soft_exponentials` and `reference.weighted_means`.
"""

from typing import Any

import torch
from torch import Tensor

MOST = 40.0
_TINY = 1e-12  # added to squared lengths: a token of zeros stays one, with a finite gradient


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products: bfloat16 where x has it or CUDA's autocast asks for it, else float32 or better. Halves
    are too narrow for the exponentials."""
    cast = x.is_cuda and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.bfloat16
    if x.dtype is torch.bfloat16 or (cast and x.dtype is not torch.float64):
        return torch.bfloat16
    return torch.promote_types(x.dtype, torch.float32)


def soft_exponentials(x: Tensor, slots: Tensor, bound: Tensor, valid: Tensor | None) -> Tensor:
    """x (B, T, D), slots (D, S) of length `bound` (1,), valid (B, T) -> exp(|x|^-1 x slots - bound) (B, T, S) in the
    dtype of x, 0 at padding. The bound takes no part in the gradient, since it cancels in every mean."""
    return _Exponentials.apply(x, slots, bound, valid)  # type: ignore[no-any-return, no-untyped-call]


def weighted_means(weights: Tensor, x: Tensor) -> Tensor:
    """weights (B, M, K) of at least 0, x (B, K, D) -> (B, M, D): means of x, 0 where all weights are."""
    with torch.autocast(x.device.type, enabled=False):  # which would make weights halves, and lose small ones
        return _Means.apply(weights, x)  # type: ignore[no-any-return, no-untyped-call]


# The compiler does not look into these: traced, torch 2.13 refuses a second one where shapes are dynamic.
for _function in (soft_exponentials, weighted_means):
    torch.compiler.allow_in_graph(_function)  # type: ignore[no-untyped-call]


def _product(x: Tensor, slots: Tensor) -> Tensor:
    """x (B, T, D), slots (D, S) -> (B, T, S), in float32 or better."""
    if x.dtype is not torch.bfloat16:
        return x @ slots
    if x.is_cuda:
        return torch.mm(x.flatten(0, 1), slots, out_dtype=torch.float32).view(*x.shape[:2], -1)
    return x.float() @ slots.float()


def _inverse_length(x: Tensor) -> Tensor:
    """x (B, T, D) -> (B, T, 1) in float32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square() + _TINY)


class _Exponentials(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, slots: Tensor, bound: Tensor, valid: Tensor | None) -> Tensor:
        # Not in place: compiled by torch 2.11, gradients would then be zero.
        weights = torch.addcmul(-bound, _product(x, slots), _inverse_length(x)).exp()
        if valid is not None:
            weights = torch.where(valid[..., None], weights, 0.0)
        return _in(x.dtype, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, slots, bound, _ = inputs
        ctx.save_for_backward(x, slots, output, bound)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, slots, weights, bound = ctx.saved_tensors
        inverse = _inverse_length(x)
        wide = _in(inverse.dtype, weights)
        grad, logits = grads[0] * wide, wide.clamp(min=torch.finfo(wide.dtype).tiny).log() + bound
        along = (grad * logits).sum(-1, keepdim=True) * inverse.square()
        grad = _in(x.dtype, grad * inverse)  # of the products
        with torch.autocast(x.device.type, enabled=False):
            towards, grad_slots = grad @ slots.mT, x.flatten(0, 1).mT @ grad.flatten(0, 1)
        return torch.addcmul(towards, x, _in(x.dtype, -along)), grad_slots, None, None


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(weights: Tensor, x: Tensor) -> Tensor:
        return torch.bmm(_in(x.dtype, weights * _inverse_sums(weights)), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        weights, x = ctx.saved_tensors
        inverse, grad = _inverse_sums(weights), _in(x.dtype, grads[0])
        # Products in the memory's order of the weights, whose rows are slots: a multiple of what tensor cores take.
        shares, turned = weights * inverse, not weights.is_contiguous()
        with torch.autocast(x.device.type, enabled=False):
            each = torch.bmm(x, grad.mT).mT if turned else torch.bmm(grad, x.mT)
            grad_x = torch.bmm(_in(x.dtype, shares).mT, grad)
        # A mean moves towards what gets more weight, by the difference of the two.
        return _in(x.dtype, (each - (shares * each).sum(-1, keepdim=True)) * inverse), grad_x


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    """x in a dtype. Compiled by torch 2.11, a result that `to` has left as it is gets gradients of zero."""
    return x if x.dtype is dtype else x.to(dtype)


def _inverse_sums(weights: Tensor) -> Tensor:
    """(B, M, K) -> (B, M, 1), in float32 or better; 0 where all weights are."""
    wide = torch.promote_types(weights.dtype, torch.float32)
    sums = weights.sum(-1, keepdim=True, dtype=wide)
    return torch.where(sums > 0, 1 / sums.clamp(min=torch.finfo(wide).tiny), 0.0)
