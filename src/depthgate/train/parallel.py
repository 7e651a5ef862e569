"""The model that is trained: compiled a few layers at a time, and split among processes by FSDP2, from outside.

With several (`torchrun ... -m depthgate train`), each process holds a part of every weight and computes its own rows of
each batch. Checkpoints are written and read by all together (see checkpoint.store), and any number of processes can go
on with them.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from depthgate.config import ModelConfig
from depthgate.device import World
from depthgate.model import Decoder, residual
from depthgate.ops.loss import linear_cross_entropy
from depthgate.routing import Plans

Model = TypeVar("Model", bound=nn.Module)


class CompiledDecoder(Decoder):
    """A Decoder whose layers are compiled a few at a time, once for the whole pattern, and whose loss is compiled."""

    def __init__(self, config: ModelConfig, *, scores_have_no_loss: bool = False) -> None:
        super().__init__(config, scores_have_no_loss=scores_have_no_loss)
        # Kinds, training and evaluation, and stages of a falling capacity are all versions of one function.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self._residual = torch.compile(residual, dynamic=False)

    def through_layers(self, x: Tensor, caches: Sequence[Any], **call: Any) -> tuple[Tensor, Plans]:
        plans: Plans = ()
        span = max(2, len(self.config.pattern.split(",")))  # so that a router is fused into the layer before it
        for i in range(0, len(self.layers), span):
            x, more = self._residual(list(self.layers)[i : i + span], caches[i : i + span], x, **call)
            plans += more
        return x, plans

    def head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x, self.head.weight, targets, compiled=True)


def build_decoder(config: ModelConfig, compiled: bool, world: World) -> Decoder:
    """A new Decoder, its weights split among the processes if there are several. Then whole layers are compiled: hooks
    of FSDP stand around them."""
    kind = CompiledDecoder if compiled and world.size == 1 else Decoder
    no_loss = config.rule != "scores"  # `causal_bce` teaches a predictor alone, and a threshold has no loss
    return spread(kind(config, scores_have_no_loss=no_loss).to(world.device), compiled, world)


def spread(model: Model, compiled: bool, world: World, called: str = "add_to") -> Model:
    """Split the weights of a model with `layers` among the processes, if there are several, and compile its layers.
    called: the method of a layer that the model calls."""
    if world.size == 1:
        return model
    mesh = init_device_mesh(world.device.split(":")[0], (world.size,))
    for layer in model.layers:  # type: ignore[union-attr]
        if compiled:
            setattr(layer, called, torch.compile(getattr(layer, called)))
        fully_shard(layer, mesh=mesh)
        if called != "forward":  # which it knows
            register_fsdp_forward_method(layer, called)
    fully_shard(model, mesh=mesh)
    if hasattr(model, "loss"):
        register_fsdp_forward_method(model, "loss")
    return model


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


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor split as another is, on its device."""
    if isinstance(other, DTensor) and tensor.shape == other.shape:
        return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements)
    return tensor.to(other.device)
