"""Fit a parabola in the logarithm of the parameters to each curve, find its minimum, and compare variants with dense.

A curve is fitted to the sizes around the lowest loss, two on each side: farther away, losses are not a parabola.
Intervals are of 95%, by a bootstrap of residuals: each curve is fitted again to itself plus residuals drawn from its
own, widened by Student's t because few residuals say little about their spread. A curve of fewer than five cells has
no interval, and neither has one where more than one in forty of the curves drawn has no minimum.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch

DRAWS = 1000
_ENOUGH = 0.975  # share of the draws that must have a value for an interval to be given
_CELLS = 5
# The 97.5% point of Student's t for 2, 3, 4 ... degrees of freedom; the normal distribution's is 1.96.
_T = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
Interval = tuple[float, float] | None
Points = Sequence[tuple[float, float]]


class Parabola(NamedTuple):
    """loss = low + bend * (ln params - at)^2."""

    at: float
    low: float
    bend: float

    @property
    def params(self) -> float:
        """The size at the minimum."""
        return math.exp(self.at) if abs(self.at) < 700 else math.inf

    def __call__(self, params: float) -> float:
        return self.low + self.bend * (math.log(params) - self.at) ** 2


@dataclass(frozen=True)
class Curve:
    """Losses of one variant at one budget, by size, and the parabola fitted to them."""

    budget: float
    variant: str
    points: list[tuple[float, float]]  # parameters and loss of each cell, by parameters
    costs: list[tuple[float, float]]  # parameters and forward FLOPs per token of each size
    best: Parabola | None  # None: the fitted curve has no minimum
    draws: list[Parabola]  # fitted in the bootstrap
    lowest: float  # the lowest mean loss of a size
    loss: float  # at the minimum of the fitted curve; without one, that of the best size
    params: float
    loss_interval: Interval
    params_interval: Interval
    open_because: str  # why the minimum is not bracketed on both sides; "" if it is
    no_interval: str  # why there are no intervals; "" if there are

    @property
    def bracketed(self) -> bool:
        """True if both a smaller and a larger size have a higher loss than the best one."""
        return not self.open_because

    def forward_flops(self, params: float) -> float:
        """FLOPs per token of a forward pass at this size, interpolated between the variant's sizes."""
        if len(self.costs) == 1:
            return self.costs[0][1]
        return math.exp(_interpolate([(math.log(p), math.log(f)) for p, f in self.costs], math.log(params)))


@dataclass(frozen=True)
class Verdict:
    """Comparison of a variant with dense at one budget."""

    budget: float
    variant: str
    refused: str  # why there is no verdict; "" if there is one
    gain: float = math.nan  # 1 - the variant's best loss / dense's best loss, at equal training FLOPs
    gain_interval: Interval = None
    # Share of dense's forward FLOPs that the smallest model of the variant with dense's best loss saves.
    forward_saving: float = math.nan
    forward_interval: Interval = None
    # Share of the training FLOPs that the variant saves until it reaches dense's best loss.
    training_saving: float = math.nan
    training_interval: Interval = None
    extrapolated: bool = False  # that loss is reached at training FLOPs outside the budgets of the study
    no_interval: str = ""  # why the gain has no interval


def parabolas(params: Sequence[float], losses: Sequence[Sequence[float]]) -> list[Parabola | None]:
    """Least-squares parabolas through each list of losses at these sizes; None for one without a minimum."""
    x = torch.tensor(params, dtype=torch.float64).log()
    middle = float(x.mean())
    powers = (x - middle)[:, None] ** torch.arange(3)
    found = torch.linalg.lstsq(powers, torch.tensor(losses, dtype=torch.float64).T).solution.T.tolist()
    # A bend below 1e-12 is a rounding error of a straight line.
    return [Parabola(middle - b / (2 * c), a - b * b / (4 * c), c) if c > 1e-12 else None for a, b, c in found]


def curve(rows: Sequence[Mapping[str, Any]]) -> Curve:
    """The curve of one variant at one budget, from the rows of its cells; the loss is the causal one."""
    rows = sorted(rows, key=lambda row: (row["params"], row["seed"]))
    budget, variant = rows[0]["budget"], rows[0]["variant"]
    points = [(float(row["params"]), float(row["loss_causal"])) for row in rows]
    costs = means([(float(row["params"]), float(row["forward_flops_per_token"])) for row in rows])
    sizes = means(points)
    lowest = min(sizes, key=lambda size: size[1])
    place = sizes.index(lowest)
    kept = {params for params, _ in sizes[max(0, place - 2) : place + 3]}
    near = [point for point in points if point[0] in kept]
    params, losses = zip(*near, strict=True)
    best = parabolas(params, [losses])[0] if len(sizes) >= 3 else None
    # Each curve has its own random stream: curves that are compared must not draw alike.
    draws = _bootstrap(near, best, random.Random(f"{budget} {variant}")) if best else []
    no_interval = ""
    if len(near) < _CELLS:
        no_interval = f"{len(near)} cells of {variant}, and {_CELLS} are needed"
    elif len(draws) < _ENOUGH * DRAWS:
        without = f"{DRAWS - len(draws):,} of {DRAWS:,} curves drawn around that of {variant}"
        no_interval = f"{without} have no minimum"
    return Curve(
        *(budget, variant, points, costs, best, draws, lowest[1]),
        loss=best.low if best else lowest[1],
        params=best.params if best else lowest[0],
        loss_interval=interval(draw.low for draw in draws),
        params_interval=interval(draw.params for draw in draws),
        open_because=_open_because(sizes, place, best),
        no_interval=no_interval,
    )


def means(points: Points) -> list[tuple[float, float]]:
    """Mean of the second values of each first value: the mean loss of each size."""
    sizes = sorted({params for params, _ in points})
    return [(size, fmean(loss for params, loss in points if params == size)) for size in sizes]


def _open_because(sizes: Points, lowest: int, best: Parabola | None) -> str:
    if len(sizes) < 3:
        return f"{len(sizes)} size{'s' * (len(sizes) > 1)}: a curve needs three"
    if lowest in (0, len(sizes) - 1):
        return f"the {'largest' if lowest else 'smallest'} size has the lowest loss"
    if best is None:
        return "the fitted curve has no minimum"
    inside = math.log(sizes[0][0]) < best.at < math.log(sizes[-1][0])
    return "" if inside else "the fitted minimum lies outside the sizes"


def _bootstrap(points: Points, best: Parabola, draw: random.Random) -> list[Parabola]:
    if len(points) < _CELLS:
        return []
    freedom = len(points) - 3
    scale = math.sqrt(len(points) / freedom) * (_T[freedom - 2] / 1.96 if freedom < len(_T) + 2 else 1.0)
    fitted = [best(params) for params, _ in points]
    residuals = [scale * (loss - on_curve) for (_, loss), on_curve in zip(points, fitted, strict=True)]
    drawn = [[on_curve + draw.choice(residuals) for on_curve in fitted] for _ in range(DRAWS)]
    return [each for each in parabolas([params for params, _ in points], drawn) if each]


def interval(values: Iterable[float]) -> Interval:
    """The middle 95% of the values; None if too few of the draws have a finite one."""
    found = sorted(value for value in values if math.isfinite(value))
    if len(found) < _ENOUGH * DRAWS:
        return None
    return found[int(0.025 * (len(found) - 1))], found[round(0.975 * (len(found) - 1))]


def _interpolate(line: Points, x: float) -> float:
    """y at x on a line through points; beyond its ends, the nearest piece goes on."""
    pairs = list(pairwise(line))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def verdicts(curves: Sequence[Curve]) -> list[Verdict]:
    """Comparison of each other variant with dense, at every budget where both were run."""
    found = {(curve.budget, curve.variant): curve for curve in curves}
    dense = baseline({curve.variant for curve in curves})
    return [
        _verdict(found[curve.budget, dense], curve, [c for c in curves if c.variant == curve.variant and c.bracketed])
        for curve in curves
        if dense and curve.variant != dense and (curve.budget, dense) in found
    ]


def baseline(variants: Iterable[str]) -> str | None:
    """The variant that others are compared with: dense, or the only one of dense layers."""
    kinds = [name for name in variants if "dense" in name.partition(":")[0].split("-")]
    return "dense" if "dense" in kinds else kinds[0] if len(kinds) == 1 else None


def _verdict(dense: Curve, mine: Curve, budgets: Sequence[Curve]) -> Verdict:
    """`budgets`: the curves of the variant at all budgets where it is bracketed."""
    for each in (dense, mine):
        if each.open_because:
            return Verdict(mine.budget, mine.variant, f"{each.variant} is not bracketed: {each.open_because}")
    assert dense.best
    assert mine.best
    pairs = list(zip(dense.draws, mine.draws, strict=False))
    reached = _reached(dense.best.low, [(each.budget, each.loss) for each in budgets])
    fewest = min(len(each.draws) for each in (dense, *budgets))
    drawn = (_reached(dense.draws[i].low, [(c.budget, c.draws[i].low) for c in budgets]) for i in range(fewest))
    return Verdict(
        mine.budget,
        mine.variant,
        "",
        1 - mine.best.low / dense.best.low,
        interval(1 - m.low / d.low for d, m in pairs),
        _forward_saving(dense, mine, dense.best, mine.best),
        interval(_forward_saving(dense, mine, d, m) for d, m in pairs),
        1 - reached / mine.budget,
        interval(1 - flops / mine.budget for flops in drawn),
        not (math.isnan(reached) or budgets[0].budget * 0.999 <= reached <= budgets[-1].budget * 1.001),
        dense.no_interval or mine.no_interval,
    )


def _forward_saving(dense: Curve, mine: Curve, d: Parabola, m: Parabola) -> float:
    """Share of dense's forward FLOPs that the variant's smallest model with dense's best loss saves; nan if none is as
    good. The answer is never a size below the smallest that was trained."""
    if m.low > d.low:
        return math.nan
    at = max(m.at - math.sqrt((d.low - m.low) / m.bend), math.log(mine.costs[0][0]))
    return 1 - mine.forward_flops(math.exp(at)) / dense.forward_flops(math.exp(d.at))


def _reached(loss: float, best: Points) -> float:
    """Training FLOPs at which the variant's best loss is `loss`, along its best losses (budget, loss) at all budgets;
    nan where these do not fall, and where it would lie farther outside the budgets than they are apart."""
    line = [(low, math.log(budget)) for budget, low in best]
    if len(line) < 2 or any(after[0] >= before[0] for before, after in pairwise(line)):
        return math.nan
    found = _interpolate(line[::-1], loss)
    span = line[-1][1] - line[0][1]
    return math.exp(found) if line[0][1] - span <= found <= line[-1][1] + span else math.nan
