"""The decoder of a routed model: it tells its layers about their tokens, and sees that they had enough slots.

The causal rule may route any number of tokens. A compiled graph has fixed shapes, and on CUDA a layer that asks how
many there are waits for the device: layers get as many slots as a bound of their router says. A pass that lacked some
is computed again, with as many as it needs, and the bounds grow.
"""

import math
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor

from depthgate.errors import DepthgateWarning
from depthgate.hf.adapter import collected
from depthgate.hf.families import decoder_layers
from depthgate.hf.inputs import KEYWORD, Tokens, hand_down
from depthgate.hf.layer import BOUND_STEPS, RoutedLayer
from depthgate.ops.select import few_launches

_Decoder: Any = object  # next to a decoder of transformers, which is a module
_SPARE = 1 / 8  # of the slots that were needed, when bounds grow


class RoutedDecoder(_Decoder):  # type: ignore[misc]
    """A family's decoder, without a head, some layers of which are routed."""

    names: ClassVar[tuple[str, ...]]  # arguments of its own forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tokens = hand_down(self.names, self, args, kwargs)
        if tokens is None:  # transformers says what is missing
            return self.once(*args, **kwargs)
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _warn_of_frozen_routers(self)
        if not self._bounded(tokens, kwargs):
            return self.once(*args, **{**kwargs, KEYWORD: tokens})
        lacking = torch.zeros((), dtype=torch.long, device=next(self.parameters()).device)
        out = self.once(*args, **kwargs, **{KEYWORD: tokens._replace(lacking=lacking)})
        return _with_enough_slots(self, tokens, args, kwargs, lacking, out)

    def once(self, *args: Any, **kwargs: Any) -> Any:
        """The family's own forward."""
        return super().forward(*args, **kwargs)

    @property
    def routed_layers(self) -> list[RoutedLayer]:
        """Those among its layers: looked up in every call, where a look at all of its modules would take long."""
        return [layer for layer in decoder_layers(self) if isinstance(layer, RoutedLayer)]

    def _bounded(self, tokens: Tokens, kwargs: dict[str, Any]) -> bool:
        """True for a causal pass whose layers are not to wait for the device, and which can be computed again: a
        compiled one that is not given a cache, or one on CUDA that makes none either."""
        causal = not self.training if tokens.causal is None else tokens.causal
        if not causal or kwargs.get("past_key_values") is not None or (self.gradient_checkpointing and self.training):
            return False
        if torch.compiler.is_compiling():
            return bool(_may_break())
        compiled = any(layer._compiled_call_impl is not None for layer in self.routed_layers)
        cached = kwargs.get("use_cache", getattr(self.config, "use_cache", False)) is not False
        return compiled or (not cached and few_launches(next(self.parameters()).detach()))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _may_break() -> bool:
    """False for fullgraph=True and exported graphs, which cannot look at values in between: all tokens have slots."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tracing: Any = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is compiled: torch.export runs the model itself, unless strict=True
        return False
    # Asked by compiled code, torch 2.11 always says that it exports.
    return not (tracing.one_graph or tracing.error_on_graph_break or torch.compiler.is_exporting())


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _with_enough_slots(
    decoder: Any, tokens: Tokens, args: tuple[Any, ...], kwargs: dict[str, Any], lacking: Tensor, out: Any
) -> Any:
    """What a pass gave, or that of another one, if some layer `lacking` slots left tokens out. Waits for the device."""
    if int(lacking) <= 0:
        return out
    routers = [layer.depth_router for layer in decoder.routed_layers]
    shares = collected(routers, lambda args, _, plan: plan.tokens.shape[-1] / args[0].shape[1])
    with torch.compiler.set_stance("force_eager"), shares as needed:
        out = decoder.once(*args, **{**kwargs, KEYWORD: tokens})
    for router, found in zip(routers, needed, strict=True):
        router.bound = max(router.bound, *(min(BOUND_STEPS, math.ceil(BOUND_STEPS * x * (1 + _SPARE))) for x in found))
    return out


def _warn_of_frozen_routers(decoder: Any) -> None:
    """Warn where weights learn, but no router does."""
    weights = [weight for layer in decoder.routed_layers for weight in layer.depth_router.proj.parameters()]
    frozen = weights and not any(weight.requires_grad for weight in weights)
    if frozen and any(weight.requires_grad for weight in decoder.parameters()):
        what = "routers do not learn: training takes the first tokens of every text, or those that they happen to score"
        remedy = "with PEFT give modules_to_save=['depth_router'] and exclude_modules='.*depth_router.*'"
        warnings.warn(f"{what}, and the causal rule learns nothing; {remedy}", DepthgateWarning, stacklevel=4)
