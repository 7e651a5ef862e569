"""Declarations of options: each is a field of a frozen dataclass that carries its own limits. Imports no torch.

steps: int = count(1000)  # a whole number from 1
schedule: str = choice("cosine", ("cosine", "wsd"))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from depthgate.errors import (
    InvalidValueError,
    check_capacity,
    check_choice,
    check_count,
    check_number,
    check_positive,
    check_probability,
)

DEVICES = ("auto", "cpu", "cuda")


def checked(default: Any, check: Callable[[Any, str], object]) -> Any:
    """A field whose value must pass `check(value, name)`, which raises InvalidValueError."""
    return field(default=default, metadata={"check": check})


def count(default: int | None, minimum: int = 1, maximum: int = 2**31 - 1) -> Any:
    """A field for a whole number."""
    return checked(default, partial(check_count, minimum=minimum, maximum=maximum))


def choice(default: str | None, names: Sequence[str]) -> Any:
    """A field for one of these names."""
    return checked(default, partial(check_choice, allowed=names))


def number(default: float | None, low: float, high: float, ends: str = "[]", note: str = "") -> Any:
    """A field for a number from `low` to `high`; see `check_number`."""
    return checked(default, partial(check_number, low=low, high=high, ends=ends, note=note))


def positive(default: float | None) -> Any:
    """A field for a finite number above 0."""
    return checked(default, check_positive)


def share(default: float | None) -> Any:
    """A field for a number in [0, 1]."""
    return number(default, 0, 1)


def weight(default: float | None) -> Any:
    """A field for a number in [0, 1)."""
    return checked(default, check_probability)


def token_share(default: float | None) -> Any:
    """A field for a share of tokens, in (0, 1]."""
    return checked(default, check_capacity)


def switch() -> Any:
    """A field for true or false that the command line takes without a value: --dry_run."""
    return field(default=False, metadata={"typed": {"action": "store_true"}})


def repeatable() -> Any:
    """A field for a list of texts, whose option may be given several times."""
    return field(default=None, metadata={"typed": {"action": "append"}})


def positional() -> Any:
    """A field for a list of texts that are typed without the name of an option."""
    return field(default_factory=list, metadata={"typed": {"nargs": "*", "default": []}})


@dataclass(frozen=True)
class Options:
    """Base of all option classes: checks every field when it is built. None passes where it is the default."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, check = getattr(self, each.name), each.metadata.get("check")
            if check is not None and not (value is None and each.default is None):
                check(value, each.name)
            if each.type is bool and not isinstance(value, bool):
                raise InvalidValueError(f"{each.name} is {value!r}: it must be true or false")
        self.check_together()

    def check_together(self) -> None:
        """Refuse values that do not go together."""


def whole_numbers(given: str | int, name: str, what: str = "whole numbers separated by commas") -> list[int]:
    """The numbers of a text such as 1,3,5."""
    try:
        return [int(part) for part in str(given).split(",")]
    except ValueError:
        raise InvalidValueError(f"{name} is {given!r}: it must be {what}") from None
