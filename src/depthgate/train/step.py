"""One optimizer step: forward and backward of every part of a batch, the losses of the plans, the update.

Nothing in a step waits for the device, so that on CUDA the whole of it can be captured once and replayed as a graph:
small models are otherwise bound by the launches of their kernels, which the graph does not make.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from depthgate.config import TrainConfig
from depthgate.data.batches import Rows
from depthgate.device import World
from depthgate.model import Decoder
from depthgate.routing import (
    Groups,
    Plans,
    Slots,
    Threshold,
    TopTokens,
    causal_bce,
    load_balance,
    routed_share,
    update_thresholds,
    z_loss,
)
from depthgate.train import optim
from depthgate.train.parallel import CompiledDecoder, average_thresholds, whole

_WARMUP = 2  # steps before a capture, in which libraries and the compiler set themselves up


class Figures(NamedTuple):
    """What a step gave, on its way to the host."""

    values: Tensor
    ready: torch.cuda.Event | None = None

    def read(self) -> tuple[float, float, list[float]]:
        """Cross-entropy in nats a target, of the top-k pass; norm of all gradients before clipping; the routed share
        of every routed layer. Waits for the step to end."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm, *shares = self.values.tolist()
        return loss, norm, shares


def plan_figures(plans: Plans, config: TrainConfig) -> tuple[Tensor | float, list[Tensor]]:
    """The sum of the weighted losses of all plans, and the share of tokens that each Mixture-of-Depths layer takes."""
    total: Tensor | float = 0.0
    for plan in plans:
        if isinstance(plan, Groups):
            total = total + config.z_loss * z_loss(plan) + config.balance_loss * load_balance(plan)
        if isinstance(plan, Slots) and config.model.rule != "threshold":
            total = total + config.rule_loss * causal_bce(plan)
    return total, [routed_share(plan) for plan in plans if isinstance(plan, Slots)]


def precision(config: TrainConfig, device: str) -> AbstractContextManager[object]:
    """Products in bfloat16 where the configuration says so."""
    return torch.autocast(device.split(":")[0], torch.bfloat16) if config.dtype == "bfloat16" else nullcontext()


class Step:
    """Steps of one model: `step(rows)`, where `rows` are this process's own."""

    def __init__(
        self,
        model: Decoder,
        optimizers: Sequence[torch.optim.Optimizer],
        config: TrainConfig,
        world: World = World(),  # noqa: B008
    ) -> None:
        self.model, self.optimizers, self.config, self.world = model, optimizers, config, world
        self.capacity = config.model.capacity
        compiled = isinstance(model, CompiledDecoder)
        self.plan_figures = torch.compile(plan_figures, dynamic=False) if compiled else plan_figures
        self._replay: _Replay | None = None

    def set_capacity(self, capacity: float) -> None:
        """The share every Mixture-of-Depths router takes from now on."""
        if capacity == self.capacity:
            return
        self.capacity, self._replay = capacity, None
        for module in self.model.layers.modules():
            if isinstance(module, TopTokens):
                module.capacity = capacity

    def __call__(self, rows: Rows) -> Figures:
        device = self.world.device
        if not device.startswith("cuda"):
            return Figures(self.body(rows))
        rows = Rows(*(t if t.is_cuda else t.pin_memory() for t in rows))
        if not optim.capturable(self.config, self.world):
            return _to_host(self.body(Rows(*(t.to(device, non_blocking=True) for t in rows))))
        if self._replay is None:
            self._replay = _Replay(self, rows)
        return _to_host(self._replay(rows))

    def body(self, rows: Rows, live: bool = True) -> Tensor:
        """Gradients of the whole batch, a part at a time; parts weigh as many targets as they have. The update is made
        only if loss and gradient norm are finite (and the step is `live`). Gives the figures, without a wait."""
        config, world, model = self.config, self.world, self.model
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        parts = [Rows(*part) for part in zip(*(t.chunk(config.accumulate) for t in rows), strict=True)]
        targets = world.sum((rows.targets >= 0).sum()).clamp(min=1)
        loss = torch.zeros((), device=world.device)
        seen: list[Plans] = []
        shares: list[list[Tensor]] = []
        for part in parts:
            with precision(config, world.device):
                mean, plans = model.loss(*part[:4], max_documents=config.max_documents)
                weight = (part.targets >= 0).sum() / targets
                more, routed = self.plan_figures(plans, config)
                # Times the processes, since gradients are averaged over them.
                total = mean * weight * world.size + more / len(parts)
            total.backward()  # type: ignore[no-untyped-call]
            loss += mean.detach() * weight
            seen.append(plans)
            shares.append(routed)
        loss = world.sum(loss)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = whole({"norm": torch.nn.utils.get_total_norm(grads)})["norm"]
        good = torch.isfinite(loss) & torch.isfinite(norm)
        if not live:
            good = good & False
        for optimizer in self.optimizers:
            optim.apply(optimizer, good, norm, config.clip)
        if config.model.rule == "threshold":
            self._move_thresholds(seen, good)
        means = [torch.stack(layer).mean() for layer in zip(*shares, strict=True)]
        means = [world.sum(mean) / world.size for mean in means] if world.size > 1 else means
        return torch.stack([loss, norm, *means])

    def _move_thresholds(self, seen: list[Plans], good: Tensor) -> None:
        rules = [module for module in self.model.modules() if isinstance(module, Threshold)]
        before = [(rule.average.clone(), rule.weight.clone()) for rule in rules]
        for plans in seen:
            update_thresholds(self.model, plans)
        average_thresholds(self.model, self.world)
        for rule, (average, weight) in zip(rules, before, strict=True):
            rule.average.copy_(torch.where(good, rule.average, average))
            rule.weight.copy_(torch.where(good, rule.weight, weight))


class _Replay:
    """A step as a CUDA graph: its batch is copied to where the graph reads it, and one launch does the rest."""

    def __init__(self, step: Step, rows: Rows) -> None:
        self.rows = Rows(*(t.to(step.world.device) for t in rows))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP):
                step.body(self.rows, live=False)
        torch.cuda.current_stream().wait_stream(stream)
        for optimizer in step.optimizers:
            optimizer.zero_grad(set_to_none=True)  # the graph's own memory is to hold the gradients
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.figures = step.body(self.rows)

    def __call__(self, rows: Rows) -> Tensor:
        for mine, new in zip(self.rows, rows, strict=True):
            mine.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.figures


def _to_host(values: Tensor) -> Figures:
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return Figures(host, ready)
