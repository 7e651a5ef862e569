"""Plans of every routed layer of any model, while it runs: `record`."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from depthgate import view
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.routing.plan import Plan, Plans
from depthgate.routing.routers import SoftSlots, TopExperts, TopTokens
from depthgate.routing.training import in_backward


class RecordedPlans(Sequence[Plan]):
    """Plans of one pass or more, in the order of the layers: `plans[0]`, or `plans["blocks.1"]` by the layer's name."""

    def __init__(self, plans: Plans = (), model: nn.Module | None = None) -> None:
        self.names = [""] * len(plans)
        self._plans = list(plans)
        self._model = model
        self._open = ExitStack()

    def __enter__(self) -> "RecordedPlans":
        if self._model is None:
            raise DepthgateError("these plans are of a call that is over: record others by `with dg.record(model)`")
        routers = [(n, m) for n, m in self._model.named_modules() if isinstance(m, TopTokens | TopExperts | SoftSlots)]
        if not routers:
            raise DepthgateError(f"no layer of this {type(self._model).__name__} routes: there is nothing to record")
        self._open.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code would not know of the hooks
        for name, router in routers:
            layer = name.rpartition(".")[0]
            hook = router.register_forward_hook(lambda *call, of=router, at=layer: self._note(of, at, *call))
            self._open.callback(hook.remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._open.close()

    def _note(self, router: nn.Module, layer: str, called: nn.Module, _: Any, plan: Plan) -> None:
        # Not a copy of it, which has its hook; nor in the backward pass, where checkpointing runs a layer again.
        if called is router and not in_backward():
            self.names.append(layer)
            self._plans.append(plan)

    @overload
    def __getitem__(self, at: int | str) -> Plan: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Plan]: ...
    def __getitem__(self, at: int | str | slice) -> Plan | Sequence[Plan]:
        plans = self._recorded()
        if not isinstance(at, str):
            return plans[at]
        if at not in self.names:
            raise DepthgateError(f"no plan of {at!r}: there are those of {', '.join(map(repr, self.names))}")
        return plans[self.names.index(at)]

    def __add__(self, other: Sequence[Plan]) -> "RecordedPlans":
        found = RecordedPlans((*self._plans, *other))
        found.names = [*self.names, *(other.names if isinstance(other, RecordedPlans) else [""] * len(other))]
        return found

    def __radd__(self, other: Sequence[Plan]) -> "RecordedPlans":
        return RecordedPlans(tuple(other)) + self

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self._recorded())

    def __repr__(self) -> str:
        named = zip(self.names, self._plans, strict=True)
        return "\n".join(f"{name}: {plan!r}" if name else repr(plan) for name, plan in named) or "no plans"

    def _recorded(self) -> list[Plan]:
        if not self._plans:
            raise DepthgateError("no plan was recorded: call the model inside `with dg.record(model) as plans:`")
        return self._plans

    def detach(self) -> "RecordedPlans":
        """The same plans without gradients, which would keep all that the pass has computed."""
        return self.to(None)

    def to(self, device: str | torch.device | None) -> "RecordedPlans":
        """The same plans on another device, without gradients."""
        found = RecordedPlans()
        for plan in self._recorded():
            tensors: Any = {name: each for name, each in plan._asdict().items() if isinstance(each, torch.Tensor)}
            kept: Any = {name: None if name == "taken" else each.detach().to(device) for name, each in tensors.items()}
            found._plans.append(plan._replace(**kept))
        found.names = self.names[:]
        return found

    def plot(self, **options: Any) -> Any:
        """A matplotlib figure of what the pass computed: see `depthgate.view.plot` for the options."""
        return view.plot(self._recorded(), names=self.names, **options)

    def save_page(self, path: str | Path, **options: Any) -> None:
        """The same as one self-contained HTML page: see `depthgate.view.save_page` for the options."""
        view.save_page(self._recorded(), path, names=self.names, **options)


def record(model: nn.Module) -> RecordedPlans:
    """The plans of every routed layer of any model, while it is used as a context.

        with dg.record(model) as plans:
            model(x)
        plans[0], plans["blocks.1"], plans.names; plans.plot(); plans.save_page("page.html")

    Names are those of the model's modules. A pass that activation checkpointing runs again is recorded once.
    Compiled code runs uncompiled within the context.
    """
    if not isinstance(model, nn.Module):
        raise InvalidValueError(f"model is a {type(model).__name__}: record needs an nn.Module")
    return RecordedPlans(model=model)
