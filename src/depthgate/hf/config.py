"""What a routed model's config.json says of routing, and what `depthgate convert` can be told. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from depthgate.config import GATE_NAMES, RULE_NAMES
from depthgate.errors import InvalidValueError, check_capacity, check_choice, check_count, check_probability


@dataclass(frozen=True)
class Routing:
    """How a model is routed: the value of `depthgate` in its config. Unknown and wrong values are refused."""

    layers: tuple[int, ...]
    capacity: float = 0.5
    gate: str = "one_plus_tanh"
    rule: str = "predictor"
    rule_loss: float = 0.01  # weight of the loss that teaches the causal rule

    def __post_init__(self) -> None:
        check_capacity(self.capacity)
        check_choice(self.gate, "gate", GATE_NAMES)
        check_choice(self.rule, "rule", RULE_NAMES)
        check_probability(self.rule_loss, "rule_loss")

    @classmethod
    def read(cls, values: Any, depth: int) -> "Routing":
        """From what a config holds, for a model of `depth` layers."""
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
        """As a config holds it."""
        return {**asdict(self), "layers": list(self.layers)}


def checked_layers(layers: Any, depth: int) -> tuple[int, ...]:
    """Numbers of layers, ascending, each once."""
    if isinstance(layers, str | bytes) or not isinstance(layers, Sequence):
        raise InvalidValueError(f"layers is {layers!r}: give 'every_other', 'auto', or numbers of layers, as [1, 3]")
    if not layers:
        raise InvalidValueError("layers is empty: name at least one layer to route")
    numbers = [check_count(layer, "a layer", minimum=0, maximum=depth - 1) for layer in layers]
    if len(set(numbers)) < len(numbers):
        raise InvalidValueError(f"layers is {list(layers)}: name each layer once")
    return tuple(sorted(numbers))


@dataclass(frozen=True)
class ConvertConfig:
    """Route some layers of a Hugging Face model, and save it as another; or write a run as a Hugging Face model.

    Args:
        model: folder of a Hugging Face model, a GGUF file, or a run of `depthgate train`; it stays as it is
        out: folder to write; it must not be there yet
        capacity: share of the tokens that go through a routed layer
        layers: every_other, auto (those that change their tokens least on --text), or numbers of layers, as 1,3,5
        gate: what a routed row is multiplied by
        rule: how a token is routed causally
        text: file of text that `--layers auto` measures on
        probe: tokens of each of the two sequences that the converted model is compared on with the dense one
        seed: seed of those sequences
        to: of a run, the family it must become: llama, or qwen3 (where it normalises queries and keys)
    """

    model: str
    out: str
    capacity: float = 0.5
    layers: str | list[int] = "every_other"
    gate: str = "one_plus_tanh"
    rule: str = "predictor"
    text: str | None = None
    probe: int = 64
    seed: int = 0
    to: str | None = None

    def __post_init__(self) -> None:
        check_capacity(self.capacity)
        check_choice(self.gate, "gate", GATE_NAMES)
        check_choice(self.rule, "rule", RULE_NAMES)
        check_count(self.probe, "probe", minimum=2, maximum=2**16)
        if self.to is not None:
            check_choice(self.to, "to", ("llama", "qwen3"))
        check_count(self.seed, "seed", minimum=0)
        if (self.layers == "auto") != (self.text is not None):
            raise InvalidValueError("--layers auto and --text FILE go together: give both, or neither")
        assert self.layer_choice

    @property
    def layer_choice(self) -> str | list[int]:
        """every_other, auto, or numbers."""
        if not isinstance(self.layers, str) or self.layers in ("every_other", "auto"):
            return self.layers
        try:
            return [int(part) for part in self.layers.split(",")]
        except ValueError:
            raise InvalidValueError(
                f"layers is {self.layers!r}: it must be every_other, auto, or numbers, as 1,3,5"
            ) from None
