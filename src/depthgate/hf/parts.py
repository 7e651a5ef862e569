"""Norms and attention of converted models, whose small operations are one kernel each where they would be launched one
by one (CUDA, no gradients, no compiler). A part gets another class in place; everywhere else it is what it was."""

from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor

from depthgate.hf.families import FAMILIES, modeling
from depthgate.ops.select import few_launches

_Base: Any = object  # in front of classes of transformers
_ROTARY = "apply_rotary_pos_emb"  # what modules of transformers call the function that turns queries and keys


class OneKernelNorm(_Base):  # type: ignore[misc]
    """A norm that computes what Llama's does."""

    weight: Tensor
    variance_epsilon: float
    theirs: ClassVar[Any]  # the family's own class, and its forward
    unchanged: ClassVar[Any]

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, weight = hidden_states, self.weight
        alike = weight.dtype == x.dtype and weight.device == x.device and weight.is_contiguous()
        if not alike or not few_launches(x) or self.theirs.forward is not self.unchanged:
            return super().forward(x)  # type: ignore[no-any-return]
        from depthgate.ops import layer_triton

        return layer_triton.scaled(x, weight, self.variance_epsilon)


class OneKernelAttention(_Base):  # type: ignore[misc]
    """Attention that turns queries and keys as Llama's does."""

    theirs: ClassVar[Any]
    unchanged: ClassVar[Any]
    by_kernels: Any  # the family's own forward, with another function that turns them
    names: ClassVar[dict[str, Any]]  # of its module, as that forward knows them

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if few_launches(hidden_states) and self.theirs.forward is self.unchanged:
            now = self.unchanged.__globals__
            if all(now.get(name) is known for name, known in self.names.items()):
                return self.by_kernels(hidden_states, *args, **kwargs)
        return super().forward(hidden_states, *args, **kwargs)


@cache
def classes(kind: str) -> dict[type, type]:
    """The classes of a family that are given others, and those: none for families that compute something else, nor for
    what somebody has put in the place of a family's own. What is put there later is seen in every call."""
    if (name := FAMILIES[kind].norm) is None:
        return {}
    module, found = modeling(kind), dict[type, type]()
    norm, attention = getattr(module, name), getattr(module, name.replace("RMSNorm", "Attention"))
    rotary = getattr(module, _ROTARY, None)

    def own(function: Any) -> bool:
        return getattr(function, "__globals__", None) is vars(module)

    def add(theirs: Any, ours: type, **more: Any) -> None:
        body = {"__module__": __name__, "theirs": theirs, "unchanged": staticmethod(theirs.forward), **more}
        found[theirs] = type(f"OneKernel{theirs.__name__}", (ours, theirs), body)

    if own(norm.forward):
        add(norm, OneKernelNorm)
    if own(attention.forward) and own(rotary) and _ROTARY in attention.forward.__code__.co_names:
        asked = attention.forward.__code__.co_names
        names = {each: known for each, known in vars(module).items() if each in asked}
        add(attention, OneKernelAttention, by_kernels=_with_rotary(attention.forward), names=names)
    return found


def _with_rotary(forward: Any) -> Any:
    """An attention's forward, as it is, that finds a function of ours where it looks for its module's."""
    theirs = forward.__globals__[_ROTARY]

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype and cos.ndim == 3 and cos.shape[-1] == q.shape[-1]
        if not alike:
            return theirs(q, k, cos, sin)  # type: ignore[no-any-return]
        from depthgate.ops import layer_triton

        return layer_triton.turned(q, k, cos, sin)

    names = {**forward.__globals__, _ROTARY: turned}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def exchanged(decoder: torch.nn.Module, kind: str, back: bool = False) -> Iterator[tuple[Any, type]]:
    """The parts of a decoder of a family that are to have another class, and that class; `back`: their own again."""
    given = {ours: theirs for theirs, ours in classes(kind).items()} if back else classes(kind)
    return ((part, given[type(part)]) for part in decoder.modules() if type(part) in given)


def __getattr__(name: str) -> Any:
    """A class by its name, as unpickling asks for it."""
    for kind in FAMILIES if name.startswith("OneKernel") else ():
        for made in classes(kind).values():
            if made.__name__ == name:
                return made
    raise AttributeError(f"module 'depthgate.hf.parts' has no attribute {name!r}")
