"""Every error a user can cause, and the checks of plain values that raise them: each names the value and the remedy.

Imports no torch, so that the command line can refuse a bad value at once.
"""

import difflib
import math
import sys
import warnings
from collections.abc import Collection, Iterable
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from typing import Any


class DepthgateError(Exception):
    """Root of every error a user of depthgate can cause."""


class InvalidValueError(DepthgateError, ValueError):
    """A value outside its allowed range; also a ValueError."""


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def near(name: Any, known: Iterable[str], least: float = 0.6) -> str:
    """`: did you mean tiny-mod?` for the known name that is nearest; nothing where none is as near as `least`."""
    found = difflib.get_close_matches(str(name), known, 1, least)
    return f": did you mean {found[0]}?" if found else ""


def check_number(value: Any, name: str, interval: str, note: str = "") -> float:
    """A real number in an interval such as "(0, 1]", which contains 1 and not 0."""
    low, high = map(float, interval[1:-1].split(","))
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.nan
    inside = low < number < high or (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)
    if not inside:
        raise InvalidValueError(f"{name} is {_show(value)}: it must be a number in {interval}{note}")
    return number


def check_capacity(value: Any, name: str = "capacity") -> float:
    """A share of tokens."""
    return check_number(value, name, "(0, 1]", ", where 1 routes every token")


def check_count(value: Any, name: str, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
    """A whole number from `minimum` to `maximum`."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not minimum <= value <= maximum:
        raise InvalidValueError(f"{name} is {_show(value)}: it must be a whole number from {minimum} to {maximum}")
    return int(value)


def check_divides(part: int, whole: int, part_name: str, whole_name: str) -> int:
    """`part` must divide `whole`; returns the quotient."""
    if whole % part:
        raise InvalidValueError(f"{whole_name} {whole} is not divisible by {part_name} {part}: change one of them")
    return whole // part


def check_head(size: int, name: str, key_shift: bool = False) -> int:
    """The width of a head, whose pairs rotary positions turn, and of whose halves key_shift is made."""
    if size % 2:
        raise InvalidValueError(f"{name} is {size}: rotary positions need an even head size; change it")
    if key_shift and size % 4:
        raise InvalidValueError(f"the head size is {size}: key_shift needs a multiple of 4; change it")
    return size


def check_choice(value: Any, name: str, allowed: Collection[str]) -> str:
    """One of a fixed set of names."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidValueError(f"{name} is {_show(value)}: it must be one of {', '.join(sorted(allowed))}")
    return value


def installed(package: str, extra: str) -> Any:
    """A package that not all of depthgate needs, and that an extra of it brings along."""
    try:
        return import_module(package)
    except ImportError:
        raise DepthgateError(f"{package} is missing: pip install 'depthgate[{extra}]'") from None


class DepthgateWarning(UserWarning):
    """Something went wrong that depthgate could work around; the text says what was done instead."""


@cache
def warn_once(text: str) -> None:
    """Warn, once in a process for each text, at the line outside depthgate and torch that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("depthgate", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, DepthgateWarning, stacklevel=level)
