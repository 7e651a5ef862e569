"""Routers that train by themselves, in training loops that know nothing of plans.

Losses go into the backward pass of a layer's result, each exactly once, with any kind of activation checkpointing;
thresholds move once in a forward pass, and not again when a checkpoint runs it a second time.
"""

import torch
from torch import Tensor, nn

from depthgate.errors import DepthgateError, InvalidValueError, check_number, warn_once
from depthgate.routing.losses import causal_bce, load_balance, with_loss, z_loss
from depthgate.routing.plan import Groups, Plan, Slots
from depthgate.routing.routers import SoftSlots, TopTokens


def in_backward() -> bool:
    """True within a backward pass, where activation checkpointing runs layers a second time."""
    return torch._C._current_graph_task_id() != -1


@torch.library.custom_op("depthgate::in_backward", mutates_args=())
def _in_backward(like: Tensor) -> Tensor:
    """`in_backward` of the moment when compiled code runs, on the device of another tensor."""
    return torch.full((), in_backward(), device=like.device)


@_in_backward.register_fake
def _(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=like.device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def warn_when_traced(text: str) -> None:
    """Warn, once in a process for each text; in compiled code when it is traced."""
    warn_once(text)


def warn_of_scaler(y: Tensor, remedy: str) -> None:
    """Warn where y is computed in float16, which needs a gradient scaler: what it divides includes routers' losses."""
    device = y.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
        what = "routers put losses of scale 1 into the backward pass, but float16 is trained with a gradient scaler"
        warn_when_traced(f"{what}: {remedy}")


def router_loss(plan: Plan, rule: float, balance: float, z: float) -> Tensor | None:
    """The weighted sum of the losses that a plan of this kind has; None if it has none.

    rule: `causal_bce`, of a top-k plan whose causal rule learns from a loss; of others whose rule could, 0, since DDP
    waits for every gradient. balance: `load_balance`, of token choice. z: `z_loss`, of Slots and Groups.
    """
    parts = []
    if isinstance(plan, Slots) and plan.decision.requires_grad:
        if rule and not plan.causal:
            parts.append(rule * causal_bce(plan))
        elif plan.decision is not plan.scores:
            parts.append(0 * plan.decision.sum())
    if balance and isinstance(plan, Groups):
        parts.append(balance * load_balance(plan))
    if z and isinstance(plan, Slots | Groups):
        parts.append(z * z_loss(plan))
    return torch.stack(parts).sum() if parts else None


class RouterTraining(nn.Module):
    """The part of a drop-in layer that trains its router, in training mode. Has no parameters and no state."""

    def __init__(self, losses: str | None, rule_loss: float, balance_loss: float, z_loss: float) -> None:
        super().__init__()
        if losses not in ("backward", None):
            raise InvalidValueError(f"losses is {losses!r}: it must be 'backward', or None to add them by hand")
        given = {"rule": rule_loss, "balance": balance_loss, "z": z_loss}
        weights = {name: check_number(weight, f"{name}_loss", "[0, 1e9)") for name, weight in given.items()}
        self.weights = weights if losses else {}
        self.scale: Tensor | None = None  # of the main loss, where `set_loss_scale` has told it

    def forward(self, y: Tensor, plan: Plan, router: nn.Module) -> Tensor:
        """y (B, T, D), the layer's result, with the losses of its plan in its backward pass."""
        if not self.training:
            return y
        if isinstance(router, TopTokens) and isinstance(plan, Slots):
            if torch.compiler.is_compiling():
                router.update(plan, unless=_in_backward(y))
            elif not in_backward():
                router.update(plan)
        loss = router_loss(plan, **self.weights) if self.weights and torch.is_grad_enabled() else None
        if loss is None or not loss.requires_grad:
            return y
        if self.scale is not None:
            loss = loss * self.scale
        else:
            warn_of_scaler(y, "call dg.set_loss_scale(model, scaler.get_scale()) before each step")
        return with_loss(y, loss)


def set_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Tell the drop-in layers of a model by what the main loss is multiplied before its backward pass, from now on.

        dg.set_loss_scale(model, 1 / 4)                    # before (loss / 4).backward() of each of four parts
        dg.set_loss_scale(model, scaler.get_scale() / 4)   # before scaler.scale(loss / 4).backward(), in every step

    Their routers' losses are then multiplied alike. Call it before the forward pass.
    """
    if not isinstance(model, nn.Module):
        raise InvalidValueError(f"model is a {type(model).__name__}: it must be an nn.Module")
    layers = [module for module in model.modules() if isinstance(module, RouterTraining)]
    if not layers and not any(isinstance(module, SoftSlots) for module in model.modules()):  # which have no loss
        raise DepthgateError(
            f"this {type(model).__name__} has no drop-in layer of depthgate: there is nothing to scale"
        )
    one = isinstance(scale, Tensor) and scale.numel() == 1 and scale.is_floating_point()
    if not isinstance(scale, Tensor) or not one or scale.device.type == "cpu":  # others are not waited for
        number = scale.item() if isinstance(scale, Tensor) and one else scale
        scale = torch.tensor(check_number(number, "scale", "(0, 1e30)"), device="cpu")
    for layer in layers:
        layer.scale = scale.detach().float().reshape(())
