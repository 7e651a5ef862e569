"""Launches of Triton kernels in eager code, where the host's time counts."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}  # kernels by what Triton would compile another one for


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, **constants: Any) -> None:
    """kernel[grid](*args, **constants) on the device of the first of its arguments, a tensor. `constants` are the last
    parameters of the kernel, in its order. A kernel that was compiled before for arguments like these is launched as it
    is: to look at them again takes Triton several times as long as the launch."""
    device = args[0].device
    key = (id(kernel), device.index, warps, *constants.values(), *map(_kind, args))
    with _on(device):
        if (known := _compiled.get(key)) is not None:
            known[(*grid, 1, 1)[:3]](*args, *constants.values())
        elif (made := kernel[grid](*args, **constants, num_warps=warps)) is not None:  # as in triton's interpreter
            _compiled[key] = made


def _kind(value: Any) -> Any:
    """Everything about an argument that Triton compiles another kernel for, and a little more."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return type(value)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels go to the current device, whatever their arguments."""
    here = device.type == "cpu" or torch.cuda.current_device() == device.index  # a CPU: triton's interpreter
    return nullcontext() if here else torch.cuda.device(device)


def power_of_two(n: int) -> int:
    """The smallest one that is at least n."""
    return 1 << (n - 1).bit_length()
