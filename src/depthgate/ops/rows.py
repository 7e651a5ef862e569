"""Rows of tokens (B, T, ...): moved by (B, N) indices, checked at the public boundary, and numbered by positions.

One flat index over B*T rows, expanded over the features, takes the vectorised paths of gather and scatter_add
both ways (on CPU ten times faster than indexing the batch dimension apart). Positions are data: (B, T) integers that
travel with their tokens; negative means padding. Checks look at shapes and dtypes, and wait for no device.
"""

from typing import Any

import torch
from torch import Tensor

from depthgate.errors import InvalidValueError


def flat_index(index: Tensor, T: int) -> Tensor:
    """(B, N) indices within rows of T tokens -> (B*N,) indices into B*T tokens."""
    if index.shape[0] == 1 or T == 0:
        return index.flatten()
    B, compiling = index.shape[0], torch.compiler.is_compiling()  # to which the number of steps of T is not B
    starts = torch.arange(B, device=index.device) * T if compiling else torch.arange(0, B * T, T, device=index.device)
    return (index + starts[:, None]).flatten()


def shaped(x: Tensor, *shape: int) -> Tensor:
    """x in another shape, as a tensor of its own and not a view: FSDP2 and in-place users of a result need that."""
    return torch.ops.aten._unsafe_view(x, shape)  # type: ignore[no-any-return]


def inverse_for_gathering(slot: Tensor | None, x: Tensor) -> Tensor | None:
    """slot (B, T, E) -> (B, T), where compiled CUDA code fuses gathers into what reads them: a gather by this inverse
    then writes no zeros and adds nothing by atomics. None where a scatter, which reads fewer rows, is better."""
    fusing = x.is_cuda and torch.compiler.is_compiling()
    return slot[..., 0] if slot is not None and slot.shape[-1] == 1 and fusing else None


def take_rows(x: Tensor, index: Tensor, inverse: Tensor | None = None, flat: Tensor | None = None) -> Tensor:
    """x (B, T, ...), index (B, N) -> (B, N, ...): row n of batch b is x[b, index[b, n]]. flat: flat_index(index, T).
    With the `inverse` (B, T) of `index`, -1 for tokens that are not taken, gradients come back by a gather; those of a
    row that it does not name are dropped."""
    if inverse is not None:
        return _Gather.apply(x, index, inverse)  # type: ignore[no-any-return, no-untyped-call]
    B, T = x.shape[:2]
    features = x.shape[2:]
    if x.numel() == 0:
        rows = x.new_zeros(B, index.shape[1], *features)
        return rows + x.sum() if x.is_floating_point() else rows  # what made x gets a gradient, of 0
    flat = flat_index(index, T) if flat is None else flat
    rows = x.reshape(B * T, -1)
    return shaped(rows.gather(0, flat[:, None].expand(-1, rows.shape[1])), B, index.shape[1], *features)


def add_rows(rows: Tensor, index: Tensor, T: int, inverse: Tensor | None = None) -> Tensor:
    """rows (B, N, D), index (B, N) -> (B, T, D): each row added at its index onto zeros.

    With the `inverse` (B, T) of an `index` without repeats it is a gather instead: rows that it does not name are not
    added, though they get a gradient as if they were.
    Where an index repeats (expert choice), CUDA adds in any order unless `torch.use_deterministic_algorithms`.
    """
    if inverse is not None:
        return _Gather.apply(rows, inverse, index)  # type: ignore[no-any-return, no-untyped-call]
    B, N, D = rows.shape
    flat = flat_index(index, T)
    target = rows.new_zeros(B * T, D)
    return shaped(target.scatter_add(0, flat[:, None].expand(-1, D), rows.reshape(B * N, D)), B, T, D)


def add_at(x: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """x (B, T, D), rows (B, N, D), index (B, N) unique within a batch row -> x with each row added at its index. What
    is not at an index is not computed, and the gradient of x is that of the result itself."""
    return _AddAt.apply(x, rows, index)  # type: ignore[no-any-return, no-untyped-call]


def put_rows(x: Tensor, index: Tensor, rows: Tensor, flat: Tensor | None = None) -> Tensor:
    """x (B, T, D), index (B, N) unique within a batch row, rows (B, N, D) -> x with those rows replaced."""
    B, T, D = x.shape
    flat = flat_index(index, T) if flat is None else flat
    return shaped(x.reshape(B * T, D).index_put((flat,), rows.reshape(-1, D)), B, T, D)


class _Gather(torch.autograd.Function):
    """Rows by an index, and their gradients by its inverse; -1 in either is a row of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _gathered(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grads[0], ctx.saved_tensors[0]), None, None


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    there = (index >= 0).reshape(*index.shape, *[1] * (x.ndim - 2))
    return torch.where(there, take_rows(x, index.clamp(min=0)), 0.0)


class _AddAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dtype = rows.dtype
        return put_rows(x, index, take_rows(x, index) + rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], take_rows(grads[0], ctx.saved_tensors[0]).to(ctx.dtype), None


def check_tokens(x: Any, dim: int, dim_name: str = "dim") -> None:
    """Token features of shape (batch, tokens, dim), of a floating dtype."""
    if not isinstance(x, Tensor) or x.is_nested:
        got = "nested tensor" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidValueError(f"x is a {got}: it must be a tensor of shape (batch, tokens, {dim})")
    if x.ndim != 3 or x.shape[-1] != dim:
        raise InvalidValueError(
            f"x has shape {tuple(x.shape)}: it must be (batch, tokens, {dim}), since {dim_name} is {dim}"
        )
    if not x.is_floating_point():
        raise InvalidValueError(f"x has dtype {x.dtype}: it must be a floating dtype; convert it with x.float()")


def check_shape(value: Any, x: Tensor, name: str) -> None:
    """A (batch, tokens) companion of `x`."""
    if not isinstance(value, Tensor) or value.shape != x.shape[:2]:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InvalidValueError(f"{name} is {shape}: it must be a tensor of shape {tuple(x.shape[:2])}, like x")


def check_per_token(value: Any, x: Tensor, name: str, dtype: torch.dtype | None = None) -> None:
    """The same, and bool where `dtype` says so, else integers."""
    check_shape(value, x, name)
    if dtype is torch.bool:
        if value.dtype is not torch.bool:
            where = ", True at real tokens" if name == "mask" else ""
            raise InvalidValueError(f"{name} has dtype {value.dtype}: it must be bool{where}")
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
