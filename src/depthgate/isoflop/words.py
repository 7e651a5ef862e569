"""What a study found, in words. Imports no torch."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import fields

from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.fit import Curve, Interval, Verdict, baseline


def flops(number: float) -> str:
    """3e15, not 3e+15."""
    return f"{number:.3g}".replace("e+", "e")


def command(config: IsoflopConfig) -> str:
    """The command line that gives this configuration."""
    defaults = IsoflopConfig()
    told = {f.name: getattr(config, f.name) for f in fields(config)}
    given = [
        f"--{n} {shlex.quote(str(v).lower() if isinstance(v, bool) else str(v))}"
        for n, v in told.items()
        if v != getattr(defaults, n)
    ]
    return " ".join(["depthgate isoflop", *given])


def said(verdict: Verdict) -> str:
    """A verdict in words."""
    where = f"{verdict.variant} against dense at {flops(verdict.budget)} FLOPs"
    if verdict.refused:
        return f"{where}: no verdict, {verdict.refused}"
    lower = "lower" if verdict.gain >= 0 else "higher"
    parts, about = [f"best loss {abs(verdict.gain):.2%} {lower}{_between(verdict.gain_interval, 'gain', '.2%')}"], ""
    if verdict.gain_interval is None:
        parts.append(f"no interval: {verdict.no_interval}")
        about = "as an estimate alone, "
    elif verdict.gain_interval[0] <= 0 <= verdict.gain_interval[1]:
        return f"{where}: {parts[0]}: no difference can be told"
    if math.isfinite(verdict.forward_saving):
        less = f"{_less(verdict.forward_saving)}{_between(verdict.forward_interval, 'saving', '.0%')}"
        parts.append(f"{about}a forward pass of its smallest model with dense's best loss takes {less}")
    else:
        parts.append("no size of it reaches dense's best loss")
    if math.isfinite(verdict.training_saving):
        how = ", extrapolated beyond the budgets" if verdict.extrapolated else ""
        less = f"{_less(verdict.training_saving)}{_between(verdict.training_interval, 'saving', '.0%')}"
        parts.append(f"{about}to reach dense's best loss, training takes {less}{how}")
    return f"{where}: {'; '.join(parts)}"


def alone(curves: Sequence[Curve]) -> str:
    why = (
        "there is only dense" if baseline({curve.variant for curve in curves}) else "there is no dense to compare with"
    )
    return f"No verdict: {why}."


def _less(saving: float) -> str:
    return f"{abs(saving):.0%} {'fewer' if saving >= 0 else 'more'} FLOPs"


def _between(found: Interval, what: str, form: str) -> str:
    return "" if found is None else f" ({what} {found[0]:{form}} to {found[1]:{form}})"
