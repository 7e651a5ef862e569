"""The part of a routed model's config.json that is about routing. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from depthgate.config import GATE_NAMES, RULE_NAMES
from depthgate.errors import InvalidValueError, check_capacity, check_count
from depthgate.options import Options, choice, number, option


@dataclass(frozen=True)
class Routing(Options):
    """Routed layers and their options: the value of `depthgate` in a config. Unknown and wrong values are refused."""

    layers: tuple[int, ...]
    capacity: float = option(0.5, check=check_capacity)
    gate: str = choice("one_plus_tanh", GATE_NAMES)
    rule: str = choice("predictor", RULE_NAMES)
    rule_loss: float = number(0.01, "[0, 1)")  # of the loss that teaches the causal rule

    @classmethod
    def read(cls, values: Any, depth: int) -> "Routing":
        """The routing that a config holds, for a model of `depth` layers."""
        known = {each.name for each in fields(cls)}
        if not isinstance(values, Mapping) or "layers" not in values:
            raise InvalidValueError("the config does not say which layers are routed: give depthgate={'layers': [...]}")
        if unknown := sorted(map(str, values.keys() - known)):
            raise InvalidValueError(
                f"depthgate in the config has unknown keys ({', '.join(unknown)[:200]}): "
                f"it may have {', '.join(sorted(known))}"
            )
        return cls(**{**values, "layers": checked_layers(values["layers"], depth)})

    def written(self) -> dict[str, Any]:
        """The values as a config holds them."""
        return {**asdict(self), "layers": list(self.layers)}


def checked_layers(layers: Any, depth: int) -> tuple[int, ...]:
    """Numbers of layers, ascending, each once."""
    if isinstance(layers, str | bytes) or not isinstance(layers, Sequence):
        raise InvalidValueError(
            f"layers is {layers!r}: give 'every_other', 'auto', or numbers of layers, such as [1, 3]"
        )
    if not layers:
        raise InvalidValueError("layers is empty: name at least one layer to route")
    numbers = [check_count(layer, "a layer", minimum=0, maximum=depth - 1) for layer in layers]
    if len(set(numbers)) < len(numbers):
        raise InvalidValueError(f"layers is {list(layers)}: name each layer once")
    return tuple(sorted(numbers))
