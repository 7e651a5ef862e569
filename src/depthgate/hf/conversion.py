"""`dg.hf.convert`: route some layers of a transformers model, in place, so that at first nothing changes."""

import copy
from collections.abc import Sequence
from typing import Any

from depthgate.config import check_neutral
from depthgate.errors import InvalidValueError, check_capacity
from depthgate.hf.calibrate import layer_changes, least_changing
from depthgate.hf.classes import install, model_classes
from depthgate.hf.config import Routing, checked_layers
from depthgate.hf.families import family_of
from depthgate.hf.layer import RoutedLayer
from depthgate.routing.routers import TopTokens


def convert(
    model: Any,
    capacity: float = 0.5,
    layers: str | Sequence[int] = "every_other",
    *,
    gate: str = "one_plus_tanh",
    rule: str = "predictor",
    rule_loss: float = 0.01,
    calibration: Any = None,
) -> Any:
    """Route `layers` of a transformers causal language model, in place; the model is also returned.

    Routers start at zero. The gates one_plus_tanh and straight_through are then exactly 1 (others are refused), and
    every causal rule routes all tokens: in evaluation the model is at first what it was before, and with capacity 1 in
    training, too.

    layers: 'every_other' (1, 3, ...), numbers of layers, or 'auto': the half that changes its tokens least on
    `calibration`, token ids (B, T) or a dict of the model's inputs. rule_loss: weight of the loss that teaches the
    rule; a threshold needs none.
    """
    kind = family_of(model)
    depth = model.config.num_hidden_layers
    check_neutral(gate)
    Routing((0,), capacity, gate, rule, rule_loss)  # refuse what is wrong before anything is measured
    if (isinstance(layers, str) and layers == "auto") != (calibration is not None):
        raise InvalidValueError("layers='auto' and calibration go together: give both, or neither")
    chosen: Any = layers
    if isinstance(layers, str) and layers == "auto":
        chosen = least_changing(layer_changes(model, calibration))
    elif isinstance(layers, str) and layers == "every_other":
        chosen = range(1, depth, 2)
    routing = Routing(checked_layers(chosen, depth), float(capacity), gate, rule, float(rule_loss))
    config_type, model_type = model_classes(kind)
    before, config = model.config, copy.deepcopy(model.config)  # others may hold the same config
    config.__class__ = config_type
    if hasattr(config, "auto_map"):  # code that somebody else's config names is not this model's
        del config.auto_map
    config.depthgate = routing.written()
    for part in model.modules():
        if getattr(part, "config", None) is before:
            part.config = config
    model.__class__ = model_type
    install(model)
    return model


def routed_layers(model: Any) -> list[RoutedLayer]:
    """The routed layers of a model, in order."""
    return [part for part in model.modules() if isinstance(part, RoutedLayer)]


def set_capacity(model: Any, capacity: float) -> None:
    """Another capacity for all routed layers of a model, and for what is saved."""
    layers = routed_layers(model)
    if not layers:
        raise InvalidValueError("the model has no routed layers: convert it with dg.hf.convert")
    check_capacity(capacity)
    for layer in layers:
        for part in layer.depth_router.modules():  # PEFT may have wrapped the router, and keep a copy
            if isinstance(part, TopTokens):
                part.capacity = float(capacity)
    model.config.depthgate = {**model.config.depthgate, "capacity": float(capacity)}
