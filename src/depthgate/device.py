"""Devices: which one to use, the processes that share the work, the machine, FLOPs of a call and how long it takes."""

import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from depthgate.errors import DepthgateError, InvalidValueError

_Call = Callable[[], object]
_Shape = tuple[int, ...]
T = TypeVar("T")


def resolve_device(device: str) -> str:
    """Turn "auto" into cuda or cpu, and refuse cuda where there is none."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidValueError("device is 'cuda', but no CUDA device is available: use --device cpu")
    return device


@dataclass(frozen=True)
class World:
    """This process among those that train together. Where it is alone, nothing here communicates."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def sum(self, value: Tensor) -> Tensor:
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """True in all processes if the flag is true in any."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0) if self.size > 1 else flag

    def agree(self, work: Callable[[], T]) -> T:
        """Do `work` in this process; if it fails in any process, it fails in all, for the same reason."""
        if self.size == 1:
            return work()
        failed: Exception | None = None
        try:
            done = work()
        except Exception as error:
            failed = error
        reasons: list[str | None] = [None] * self.size
        dist.all_gather_object(reasons, None if failed is None else str(failed) or repr(failed))
        if failed is not None and not isinstance(failed, DepthgateError):
            raise failed
        if reason := next(filter(None, reasons), None):
            raise DepthgateError(reason) from failed
        return done

    def told(self, value: T) -> T:
        """The first process's value."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]


ALONE = World()  # one process, on the CPU


def _attention_forward(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    """query (B, H, T, d), key (B, G, S, d), value (B, G, S, e): scores, and their product with the values."""
    B, H, T, d = query
    return 2 * B * H * T * key[2] * (d + value[3])


def _attention_backward(_: _Shape, query: _Shape, key: _Shape, value: _Shape, *__: Any, **___: Any) -> int:
    """Scores once more, two gradients of each forward product."""
    B, H, T, d = query
    return 2 * B * H * T * key[2] * (3 * d + 2 * value[3])


# torch 2.11 knows none of those of a CPU, and refuses keys that several heads of queries share.
_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{where}{direction}"): count
    for kernel, where in (("flash", "_for_cpu"), ("flash", ""), ("efficient", ""), ("cudnn", ""))
    for direction, count in (("", _attention_forward), ("_backward", _attention_backward))
}


def count_flops(fn: _Call) -> int:
    """FLOPs of the matrix products that `fn` runs, backward passes included: 2 for each multiply and add.

    Counted from shapes: a causal mask saves nothing; rows of a grouped product past its last offset are counted though
    not computed; elementwise work, sorting and moving rows are free. `fn` must not be compiled: the counter sees
    operators, not kernels.
    """
    with FlopCounterMode(display=False, custom_mapping=dict(_ATTENTION)) as counter:
        fn()
    return int(counter.get_total_flops())


def interleaved(
    cases: Mapping[str, _Call], repeats: int, warmup: int, device: str, between: _Call = lambda: None
) -> dict[str, list[float]]:
    """Seconds of every case in each of `repeats` rounds, after `warmup` rounds that are thrown away.

    Every round runs every case once, so that whatever drifts on the machine meets all cases alike. `between` runs
    before each case; neither it nor the freeing of what the case returned is timed.
    """
    wait: _Call = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(warmup + repeats):
        for name, fn in cases.items():
            between()
            wait()
            start = time.perf_counter()
            result = fn()
            wait()
            seconds[name].append(time.perf_counter() - start)
            del result
    return {name: taken[warmup:] for name, taken in seconds.items()}


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s that a large matrix product reaches here: what a model's utilisation is a share of."""
    n, turns = (8192, 10) if device.startswith("cuda") else (768, 5)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * n**3 / min(interleaved({"product": lambda: a @ b}, turns, 2, device)["product"])


def copy_rate(device: str) -> float:
    """Bytes a second that a large copy reads and writes here: the limit of a decode step."""
    source = torch.empty(2**30 if device.startswith("cuda") else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * len(source) / min(interleaved({"copy": lambda: target.copy_(source)}, 5, 2, device)["copy"])


def machine(device: str = "cpu") -> dict[str, Any]:
    """Facts that a figure must carry: hardware, versions, date, and the commit where the source lies in git."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
    }


def _cpu_name() -> str:
    cpus = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", cpus.read_text(), re.MULTILINE) if cpus.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of this source tree, "-dirty" where files differ from it; None for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
