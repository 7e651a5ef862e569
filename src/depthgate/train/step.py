"""One optimizer step: the gradients of every part of a batch, their norm, and the update.

Nothing in a step waits for the device, so that on CUDA the whole step can be captured once and replayed as a graph:
small models are otherwise bound by the launches of their kernels, which a graph does not make.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from depthgate.config import RunConfig
from depthgate.data.batches import Rows
from depthgate.device import ALONE, World
from depthgate.routing import Plans, Threshold, update_thresholds
from depthgate.train.optim import Optimizers, apply

_WARMUP = 2  # steps before a capture, in which libraries and the compiler set themselves up


class Task(Protocol):
    """A model in training, as step and loop see it: `loop.Pretraining`, or `Recovery` of depthgate.hf.recover."""

    goal: float  # capacity of the routed layers at the end
    falling_steps: int  # steps over which the capacity falls from 1 to the goal

    @property
    def model(self) -> nn.Module: ...
    @property
    def capacity(self) -> float: ...  # share of the tokens that routed layers take now
    def set_capacity(self, capacity: float) -> None: ...
    def flops_per_token(self, capacity: float) -> float: ...  # of training, at this capacity
    def held(self) -> dict[str, Tensor]: ...  # the tensors of a checkpoint; a resumed run writes into them
    def loss(self, rows: Rows) -> tuple[Tensor, Tensor | float, list[Tensor], Plans]:
        """Mean loss over the targets, loss of the routers, share of the tokens that each routed layer takes, and plans
        by which thresholds are to move after the step."""


class Figures(NamedTuple):
    """The results of a step, on their way to the host."""

    values: Tensor
    ready: torch.cuda.Event | None = None

    def read(self) -> tuple[float, float, list[float]]:
        """Loss in nats per target (of the top-k pass), norm of all gradients before clipping, and the routed share of
        every routed layer. Waits for the step to end."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm, *shares = self.values.tolist()
        return loss, norm, shares


def precision(config: RunConfig, device: str) -> AbstractContextManager[object]:
    """A context in which products are in bfloat16 if the configuration says so."""
    return torch.autocast(device.split(":")[0], torch.bfloat16) if config.dtype == "bfloat16" else nullcontext()


class Step:
    """Steps of one task: `step(rows)`, where `rows` are those of this process."""

    def __init__(self, task: Task, optimizers: Optimizers, config: RunConfig, world: World = ALONE) -> None:
        """Steps are replayed as a CUDA graph if the optimizers were built for it."""
        self.task, self.optimizers, self.config, self.world = task, optimizers, config, world
        self.graph = all(optimizer.defaults.get("capturable", False) for optimizer in optimizers)
        self._thresholds = [module for module in task.model.modules() if isinstance(module, Threshold)]
        self._move = self._move_thresholds
        if config.compile and world.size == 1:  # many small operations, which take longer than they compute
            self._move = torch.compile(self._move, dynamic=False)
        self._replay: Callable[[Rows], Tensor] | None = None

    def set_capacity(self, capacity: float) -> None:
        """Let routed layers take another share from now on."""
        if capacity != self.task.capacity:
            self.task.set_capacity(capacity)
            self._replay = None

    def __call__(self, rows: Rows) -> Figures:
        device = self.world.device
        if not device.startswith("cuda"):
            return Figures(self.body(rows))
        rows = Rows(*(t if t.is_cuda else t.pin_memory() for t in rows))
        if self.graph:
            self._replay = self._replay or self._captured(rows)
            values = self._replay(rows)
        else:
            values = self.body(Rows(*(t.to(device, non_blocking=True) for t in rows)))
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return Figures(host, ready)

    def body(self, rows: Rows, dry: bool = False) -> Tensor:
        """The figures, without waiting for them. Each part of the batch weighs as many targets as it has. The update is
        made if loss and gradient norm are finite; a dry run launches the same kernels and changes nothing."""
        config, world = self.config, self.world
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        parts = [Rows(*part) for part in zip(*(t.chunk(config.accumulate) for t in rows), strict=True)]
        targets = world.sum((rows.targets >= 0).sum()).clamp(min=1)
        loss = torch.zeros((), device=world.device)
        seen: list[Plans] = []
        shares: list[list[Tensor]] = []
        for part in parts:
            with precision(config, world.device):
                mean, of_routers, routed, plans = self.task.loss(part)
                weight = (part.targets >= 0).sum() / targets
                # Times the processes, since gradients are averaged over them.
                total = mean * weight * world.size + of_routers / len(parts)
            total.backward()  # type: ignore[no-untyped-call]
            loss += mean.detach() * weight
            seen.append(plans)
            shares.append(routed)
        loss = world.sum(loss)
        grads = [p.grad for p in self.task.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        good = torch.zeros_like(finite) if dry else finite
        for optimizer in self.optimizers:
            apply(optimizer, good, norm, config.clip)
        if self._thresholds and seen[0]:
            self._move(seen, good)
        means = [torch.stack(layer).mean() for layer in zip(*shares, strict=True)]
        means = [world.sum(mean) / world.size for mean in means] if world.size > 1 else means
        return torch.stack([loss, norm, *means])

    def _move_thresholds(self, seen: list[Plans], good: Tensor) -> None:
        """Move thresholds by the plans of all parts, to the mean over the processes, if `good`."""
        held = [tensor for rule in self._thresholds for tensor in (rule.average, rule.weight)]
        before = [tensor.clone() for tensor in held]
        for plans in seen:
            update_thresholds(self.task.model, plans)
        for tensor, old in zip(held, before, strict=True):
            tensor.copy_(torch.where(good, self.world.sum(tensor) / self.world.size, old))

    def _captured(self, example: Rows) -> Callable[[Rows], Tensor]:
        """The step as a CUDA graph: a batch is copied to where the graph reads it, and one launch does the rest."""
        held = Rows(*(t.to(self.world.device) for t in example))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP):
                self.body(held, dry=True)
        torch.cuda.current_stream().wait_stream(stream)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)  # the graph's own memory is to hold the gradients
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            figures = self.body(held)

        def replay(rows: Rows) -> Tensor:
            for mine, new in zip(held, rows, strict=True):
                mine.copy_(new, non_blocking=True)
            graph.replay()
            return figures

        return replay
