"""Options: limits stand with the fields, also with those of a base class, and every bad value is refused by name."""

import math
from dataclasses import dataclass, fields

import pytest

from depthgate.cli import VERBS
from depthgate.config import ModelConfig, RunConfig
from depthgate.errors import InvalidValueError, check_capacity
from depthgate.options import Options, choice, count, number, option


@dataclass(frozen=True)
class Base(Options):
    steps: int = count(5, maximum=9)
    kind: str = choice("a", ("a", "b"))
    fast: bool = False
    maybe: int | None = count(None)


@dataclass(frozen=True)
class Sub(Base):
    steps: int = count(0, minimum=0)
    rate: float = number(1.0, "(0, inf)")
    part: float = number(0.0, "[0, 1]")
    loss: float = number(0.0, "[0, 1)")
    tokens: float = option(1.0, check=check_capacity)
    heat: float = number(1.0, "[0, inf)")

    def check_together(self) -> None:
        if self.steps and self.kind == "b":
            raise InvalidValueError("b takes no steps")


GOOD = [{}, {"steps": 0}, {"steps": 2**31 - 1}, {"kind": "b"}, {"maybe": 1}, {"maybe": None}, {"fast": True}]
GOOD += [{"part": 0}, {"part": 1}, {"loss": 0}, {"tokens": 1}, {"heat": 0}, {"rate": 1e-300}]
BAD = {
    "steps": [-1, 2**31, 1.0, True, None, "1", math.nan],
    "kind": ["c", "", None, 1, []],
    "fast": [1, 0, None, "true"],
    "maybe": [0, 0.5, "x"],
    "rate": [0, -1, math.inf, math.nan, None, "1"],
    "part": [-0.1, 1.1, math.nan],
    "loss": [-0.1, 1],
    "tokens": [0, 1.1],
    "heat": [-1, math.inf],
}


@pytest.mark.parametrize("values", GOOD, ids=repr)
def test_good_values_pass(values):
    assert all(getattr(Sub(**values), name) == value for name, value in values.items())


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_refused_by_name_and_value(name, value):
    with pytest.raises(InvalidValueError) as caught:
        Sub(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}: it must be ")


def test_a_base_keeps_its_limits_and_its_own_default():
    assert Base().steps == 5
    with pytest.raises(InvalidValueError, match="steps is 10: it must be a whole number from 1 to 9"):
        Base(steps=10)


def test_values_that_do_not_go_together():
    with pytest.raises(InvalidValueError, match="b takes no steps"):
        Sub(steps=1, kind="b")


@pytest.mark.parametrize("config", [*VERBS.values(), ModelConfig, RunConfig])
def test_every_number_of_every_verb_has_limits(config):
    """A text may be anything; what is a number or one of some names is checked before anything is done with it."""
    free = {f.name for f in fields(config) if "check" not in f.metadata}
    assert {f.name for f in fields(config) if f.type in (int, float, int | None, float | None)} & free <= {"vocab"}
    assert not free & {"device", "dtype", "schedule", "optimizer", "gate", "rule"}
