"""Optimizers, schedules of rate and capacity, and the state of optimizers as named tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.config import RunConfig, TrainConfig
from depthgate.device import ALONE, World
from depthgate.train.parallel import like

Optimizers = Sequence[torch.optim.Optimizer]


def capturable(config: Any, world: World, experts: bool) -> bool:
    """True if a step can be a CUDA graph: one process, nothing that waits for the device (products of experts that
    tokens choose do in fp32), and no rate that is a Python number (Muon's is)."""
    plain = getattr(config, "optimizer", "adamw") == "adamw" and (config.dtype == "bfloat16" or not experts)
    return config.cuda_graph and world.size == 1 and world.device.startswith("cuda") and plain


def build(model: nn.Module, config: TrainConfig, world: World = ALONE) -> Optimizers:
    """AdamW for everything, or Muon for the matrices of the layers and AdamW for the rest. Norms, biases and embeddings
    do not decay."""
    weights = dict(model.named_parameters())
    matrices = [n for n, w in weights.items() if w.ndim == 2 and _in_layers(n, w) and "router" not in n]
    muon = [weights.pop(name) for name in matrices] if config.optimizer == "muon" else []
    experts = any(config.model.experts_choose(kind) is False for kind in config.model.kinds)
    first = adamw(weights, config, _in_layers, world.device if capturable(config, world, experts) else "")
    if not muon:
        return [first]
    # Muon's steps have a size of their own; this makes it that of AdamW's, so that one rate serves both.
    second = torch.optim.Muon(muon, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [first, second]


def _in_layers(name: str, weight: Tensor) -> bool:
    return weight.ndim >= 2 and name.startswith("layers.")


def adamw(
    weights: Mapping[str, nn.Parameter], config: RunConfig, decays: Callable[[str, Tensor], bool], graph_on: str = ""
) -> torch.optim.AdamW:
    """AdamW with groups of their own for routers, whose rate is `router_lr` times that of the others, and for what
    decays. With `graph_on`, a device, rates are numbers there, which a CUDA graph reads."""
    assert config.lr is not None
    together: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, weight in weights.items():
        together.setdefault(("router" in name, decays(name, weight)), []).append(weight)
    groups = [
        {
            "params": alike,
            "weight_decay": config.weight_decay if decaying else 0.0,
            "scale": config.router_lr if router else 1.0,
            "lr": torch.tensor(config.lr, device=graph_on) if graph_on else config.lr,
        }
        for (router, decaying), alike in together.items()
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True, capturable=bool(graph_on))


def rate(config: RunConfig, step: int) -> float:
    """Learning rate of a step, counted from 0: a linear warm-up, then down to `lowest_lr` of the highest."""
    assert config.lr is not None
    steps = config.schedule_steps or config.steps
    warmup = min(config.warmup, steps // 2)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if config.schedule == "cosine":
        share = 0.5 + 0.5 * math.cos(math.pi * done)
    elif config.schedule == "linear":
        share = 1.0 - done
    else:
        share = min(1.0, max(0.0, (steps - step) / max(1, steps // 5)))
    return config.lr * (config.lowest_lr + (1 - config.lowest_lr) * share)


def capacity(goal: float, step: int, falling_steps: int) -> float:
    """Capacity of a step, counted from 0: from 1 down to the goal over so many steps, in sixteen stages so that a
    compiled model is compiled for few of them."""
    if step >= falling_steps:
        return goal
    return 1.0 + (goal - 1.0) * math.floor(16 * step / falling_steps) / 16


def set_rate(optimizers: Optimizers, lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            value = lr * group.get("scale", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value


def apply(optimizer: torch.optim.Optimizer, good: Tensor, norm: Tensor, clip: float) -> None:
    """Step with gradients scaled down to the norm `clip` if `good`, else change nothing. No host sync."""
    scale = ((norm + 1e-6) / clip).clamp(min=1).float()
    if isinstance(optimizer, torch.optim.AdamW):  # its fused kernel does both, as for a gradient scaler
        optimizer.grad_scale, optimizer.found_inf = scale, (~good).float()  # type: ignore[attr-defined]
        optimizer.step()
        return
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
    for weight in weights:
        weight.grad.div_(scale)
        optimizer.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight.grad))
    kept = [*weights, *(t for weight in weights for t in optimizer.state[weight].values())]
    before = [tensor.detach().clone() for tensor in kept]
    optimizer.step()
    for tensor, old in zip(kept, before, strict=True):
        tensor.detach().copy_(torch.where(good, tensor.detach(), old))


def state_tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """Every tensor that the optimizers keep, as "parameter:name"; a weight without gradients has none."""
    states = {weight: kept for optimizer in optimizers for weight, kept in optimizer.state.items()}
    named = ((name, states.get(weight, {})) for name, weight in model.named_parameters())
    return {f"{name}:{key}": value for name, kept in named for key, value in kept.items()}


def load_state_tensors(model: nn.Module, optimizers: Optimizers, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `state_tensors` gave."""
    weights = dict(model.named_parameters())
    owners = {weight: each for each in optimizers for group in each.param_groups for weight in group["params"]}
    for name, tensor in tensors.items():
        weight_name, _, key = name.rpartition(":")
        weight = weights[weight_name]
        owners[weight].state[weight][key] = like(tensor, weight)
