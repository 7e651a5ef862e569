"""Several processes as one (`torchrun ... -m depthgate train`): FSDP2 from outside the model.

Each process holds a part of every weight and computes its own rows of each batch. Checkpoints are written and read by
all together (see `sharded`), and any number of processes can go on with them.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from depthgate.errors import DepthgateError
from depthgate.model import Decoder
from depthgate.routing import Threshold, TopTokens

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all: one alone does nothing here."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier()

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0) if self.size > 1 else flag

    def agree(self, work: Callable[[], T]) -> T:
        """What `work` gives in this process; if it fails in any process, it fails in all, for the same reason."""
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

    def compile(self, model: Decoder) -> None:
        """Compile the model's parts; whole layers where they are to be sharded, whose hooks stand around them."""
        if self.size == 1:
            model.compile_parts()
            return
        for layer in model.layers:
            layer.compile()

    def shard(self, model: Decoder) -> None:
        """Split every layer's weights, and the rest, among the processes."""
        if self.size == 1:
            return
        for module in model.modules():
            if isinstance(module, TopTokens):
                module.fewest_slots = 1
        mesh = init_device_mesh(self.device.split(":")[0], (self.size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "loss")

    def average_thresholds(self, model: Decoder) -> None:
        """One threshold for all: the mean of those that each process moved by its own rows."""
        if self.size > 1:
            for module in model.modules():
                if isinstance(module, Threshold):
                    module.average.copy_(self.sum(module.average) / self.size)


@contextmanager
def joined(device: str) -> Iterator[World]:
    """The processes that torchrun started, or this one alone."""
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
        yield World(device=device)
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    # The others wait while the first one prepares the data.
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=timedelta(hours=3))
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        gc.collect()  # a sharded model holds its process group, and both are in cycles
        dist.destroy_process_group()


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors put together from all processes; every process must ask."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """A whole tensor split as `model` is, on its device."""
    if isinstance(model, DTensor) and tensor.shape == model.shape:
        return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements)
    return tensor.to(model.device)
