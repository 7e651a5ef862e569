"""Learning rates: a power of the width and of the budget, fitted on sweeps. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# lr = scale * (width / 128) ** power * (budget / 1e12) ** _BUDGET: see docs/log.md for the sweeps that these rest on.
FITTED: dict[str, tuple[float, float]] = {"dense": (4e-3, -0.75), "mod": (4e-3, -0.75)}
_BUDGET = -0.0866  # half the rate at 3e15 FLOPs
TRIED = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the rule, in a sweep
_MOST = 9
_POWERS = (-1.5, 0.0)  # two widths say little: a power outside is taken for noise


@dataclass(frozen=True)
class Rates:
    """variant -> (scale, power), at 1e12 FLOPs."""

    fitted: Mapping[str, tuple[float, float]]

    def of(self, variant: str, dim: int, budget: float) -> float:
        """The rate of a variant at a width; a variant that has no fit of its own takes that of its kind."""
        kind = variant.partition(":")[0]
        default = FITTED.get(kind, FITTED["mod" if kind in ("mode", "random") else "dense"])
        scale, power = self.fitted.get(variant, default)
        return float(f"{scale * (dim / 128) ** power * _share(budget):.3g}")


def _share(budget: float) -> float:
    """Of the rate at 1e12 FLOPs."""
    return float((budget / 1e12) ** _BUDGET)


def best_rate(losses: Mapping[float, float]) -> float:
    """rate -> loss: where the parabola through the best rate and its neighbours, in the logarithm of the rate, is
    lowest; the best rate itself where it is the first or last one tried."""
    rates = sorted(losses)
    best = min(rates, key=lambda rate: losses[rate])
    place = rates.index(best)
    if place in (0, len(rates) - 1):
        return best
    (x0, y0), (x1, y1), (x2, y2) = [(math.log(r), losses[r]) for r in rates[place - 1 : place + 2]]
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (right - left) / (x2 - x0)
    return best if bend <= 0 else math.exp((x0 + x1) / 2 - left / (2 * bend))


def further(losses: Mapping[float, float], tried: Sequence[float]) -> list[float]:
    """A rate beyond the best one, where that is the lowest or highest of those that came to an end, and of those that
    were tried last; none where it is not, or where _MOST have been tried."""
    best = min(losses, key=lambda rate: losses[rate], default=None)
    if best is None or best not in tried or len(losses) >= _MOST:
        return []
    return [best / 2] if best == min(losses) else [best * 2] if best == max(losses) else []


def fit(best: Sequence[tuple[int, float]], budget: float) -> tuple[float, float]:
    """(width, best rate) of each size at a budget -> scale at 1e12 FLOPs, and power within reason, by least squares of
    logarithms; of one width, its rate."""
    x = [math.log(dim / 128) for dim, _ in best]
    y = [math.log(rate) for _, rate in best]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mx) ** 2 for a in x)
    power = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
    power = min(max(power, _POWERS[0]), _POWERS[1])
    return math.exp(my - power * mx) / _share(budget), power
