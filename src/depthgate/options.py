"""Declarations of options: each is a field of a frozen dataclass, with its limits and its line of --help. No torch.

steps: int = count(1000, "optimizer steps")
schedule: str = choice("cosine", ("cosine", "wsd"), "course of the learning rate")
"""

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, partial
from inspect import signature
from typing import Any, Self

from depthgate.errors import InvalidValueError, check_choice, check_count, check_number, near

DEVICES = ("auto", "cpu", "cuda")


def option(default: Any, about: str = "", check: Callable[[Any, str], object] | None = None) -> Any:
    """A field whose value must pass `check(value, name)`, which raises InvalidValueError."""
    return field(default=default, metadata={"about": about} | ({"check": check} if check else {}))


def required(about: str) -> Any:
    """A field without a default, for the name of something."""
    return option(MISSING, about, partial(_check_name, about=about))


def _check_name(value: Any, name: str, about: str) -> None:
    """Refuse an empty name, which would mean the current folder."""
    if value == "":
        raise InvalidValueError(f"{name} is empty: give the {about.partition('. ')[0]}")


def count(default: int | None, about: str = "", minimum: int = 1, maximum: int = 2**31 - 1) -> Any:
    """A field for a whole number."""
    return option(default, about, partial(check_count, minimum=minimum, maximum=maximum))


def choice(default: str | None, names: Sequence[str], about: str = "") -> Any:
    """A field for one of these names."""
    return option(default, about, partial(check_choice, allowed=names))


def number(default: float | None, interval: str, about: str = "") -> Any:
    """A field for a number in an interval such as "(0, 1]"."""
    return option(default, about, partial(check_number, interval=interval))


def repeatable(about: str) -> Any:
    """A field for a list of texts, whose option may be given several times."""
    return field(default=None, metadata={"about": about, "typed": {"action": "append"}})


def positional(about: str) -> Any:
    """A field for a list of texts that are typed without the name of an option."""
    return field(default_factory=list, metadata={"about": about, "typed": {"nargs": "*", "default": []}})


@cache
def _parameters(init: Any) -> Any:
    return signature(init).parameters


def refuse_unknown(cls: type[Any], given: Collection[str]) -> None:
    """Refuse names of arguments that a class does not take, with the nearest that it does."""
    known = _parameters(cls.__init__)
    unknown = sorted({*given} - known.keys())
    if unknown and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        remedy = near(unknown[0], known) or f": these are {', '.join([*known][1:])}"
        raise InvalidValueError(f"{unknown[0]} is not an option of {cls.__name__}{remedy}")


class Named:
    """Base of classes, other than those of options, that refuse arguments by name."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        refuse_unknown(cls, given)
        return super().__new__(cls)


@dataclass(frozen=True)
class Options:
    """Base of all option classes: checks every field when it is built. None passes where it is the default."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        refuse_unknown(cls, given)
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        """Add the lines of --help to the docstring, where they are looked for."""
        found = {name: each.metadata.get("about") for name, each in vars(cls).items() if isinstance(each, Field)}
        if lines := [f"    {name}: {about}" for name, about in found.items() if about]:
            cls.__doc__ = "\n".join([cls.__doc__ or "", "", "Args:", *lines])

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


def build(config: type[Any], values: Any) -> Any:
    """An option class from nested values; others of the values are left out."""
    given = {each.name: values[each.name] for each in fields(config) if each.name in values}
    for each in fields(config):
        if isinstance(each.type, type) and issubclass(each.type, Options):
            given[each.name] = build(each.type, given[each.name])
    return config(**given)


def whole_numbers(given: str | int, name: str, what: str = "whole numbers separated by commas") -> list[int]:
    """The numbers of a text such as 1,3,5."""
    try:
        return [int(part) for part in str(given).split(",")]
    except ValueError:
        raise InvalidValueError(f"{name} is {given!r}: it must be {what}") from None


def command(verb: str, config: Options) -> str:
    """The command line that gives this configuration."""
    given = {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
    words = {n: str(v).lower() if isinstance(v, bool) else shlex.quote(str(v)) for n, v in given.items()}
    return " ".join([f"depthgate {verb}", *(f"--{n} {word}".removesuffix(" true") for n, word in words.items())])
