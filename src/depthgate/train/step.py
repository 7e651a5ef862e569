"""One optimizer step: forward and backward of every part of a batch, the losses of the plans, the update."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from depthgate.config import TrainConfig
from depthgate.model import Decoder
from depthgate.routing import Groups, Plans, Slots, TopTokens, causal_bce, load_balance, routed_share, z_loss
from depthgate.routing.routers import update_thresholds
from depthgate.train.batches import Rows
from depthgate.train.parallel import World, whole


class Result(NamedTuple):
    """What a step gave: 0-d tensors and one share for every routed layer."""

    loss: Tensor  # cross-entropy in nats a target, of the top-k pass
    norm: Tensor  # of all gradients, before clipping
    shares: list[Tensor]


def set_capacity(model: Decoder, capacity: float) -> None:
    """The share every Mixture-of-Depths router takes from now on."""
    for module in model.layers.modules():
        if isinstance(module, TopTokens):
            module.capacity = capacity


def plan_losses(plans: Plans, config: TrainConfig) -> Tensor | float:
    """The weighted losses of all plans."""
    total: Tensor | float = 0.0
    for plan in plans:
        if isinstance(plan, Slots | Groups):
            total = total + config.z_loss * z_loss(plan)
        if isinstance(plan, Groups):
            total = total + config.balance_loss * load_balance(plan)
        if isinstance(plan, Slots) and config.model.rule != "threshold":
            total = total + config.rule_loss * causal_bce(plan)
    return total


def precision(config: TrainConfig, device: str) -> AbstractContextManager[object]:
    """Products in bfloat16 where the configuration says so."""
    return torch.autocast(device.split(":")[0], torch.bfloat16) if config.dtype == "bfloat16" else nullcontext()


def step(
    model: Decoder,
    optimizers: Sequence[torch.optim.Optimizer],
    rows: Rows,
    config: TrainConfig,
    world: World = World(),  # noqa: B008
) -> Result:
    """Gradients of the whole batch, a part at a time; parts weigh as many targets as they have. The update is made
    only if loss and gradient norm are finite. `rows` are this process's own."""
    device = world.device
    parts = [
        Rows(*(t.to(device, non_blocking=True) for t in part))
        for part in zip(*(t.chunk(config.accumulate) for t in rows), strict=True)
    ]
    targets = world.sum((rows.targets >= 0).sum().to(device)).clamp(min=1)
    loss = torch.zeros((), device=device)
    seen: list[Plans] = []
    for part in parts:
        with precision(config, device):
            mean, plans = model.loss(part.tokens, part.targets, part.pos, part.doc)
            weight = (part.targets >= 0).sum() / targets
            # Times the processes, since gradients are averaged over them.
            total = mean * weight * world.size + plan_losses(plans, config) / len(parts)
        total.backward()  # type: ignore[no-untyped-call]
        loss += mean.detach() * weight
        seen.append(plans)
    loss = world.sum(loss)
    norm = whole({"norm": torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)})["norm"]
    if bool(torch.isfinite(loss) & torch.isfinite(norm)):
        for optimizer in optimizers:
            optimizer.step()
        if config.model.rule == "threshold":
            for plans in seen:
                update_thresholds(model, plans)
            world.average_thresholds(model)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    shares = [torch.stack(layer).mean() for layer in zip(*([routed_share(p) for p in ps] for ps in seen), strict=True)]
    return Result(loss, norm, shares)
