"""Parabolas in the logarithm of the parameters, their minima, and what they say of a variant beside dense.

A curve is fitted to the sizes around the lowest loss, two on each side: far from it, losses are no parabola.
Intervals are of 95%, by a bootstrap of residuals: each curve is fitted again to itself plus residuals drawn from its
own, widened by Student's t as few of them know little of their spread. A curve of less than five cells has none, and
none is given where more than one in forty of the curves drawn has no minimum.
Imports no torch.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

DRAWS = 1000
_ENOUGH = 0.975  # share of them that must have a value for an interval to be given
_CELLS = 5
# The 97.5% point of Student's t for 2, 3, 4 ... degrees of freedom; the normal distribution's is 1.96.
_T = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
Interval = tuple[float, float] | None
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Parabola:
    """loss = low + bend * (ln params - at)^2."""

    at: float
    low: float
    bend: float

    def __call__(self, params: float) -> float:
        return self.low + self.bend * (math.log(params) - self.at) ** 2


@dataclass(frozen=True)
class Curve:
    """A variant at one budget."""

    budget: float
    variant: str
    points: list[tuple[float, float]]  # parameters and loss of each cell, by parameters
    costs: list[tuple[float, float]]  # parameters and forward FLOPs a token of each size
    best: Parabola | None  # None where the curve has no minimum
    draws: list[Parabola]  # of the bootstrap
    bracketed: bool
    why: str  # it is not

    @property
    def loss(self) -> float:
        """The lowest of the fitted curve; without one, of the sizes."""
        return self.best.low if self.best else self.lowest[1]

    @property
    def lowest(self) -> tuple[float, float]:
        """Parameters and mean loss of the best size."""
        return min(means(self.points), key=lambda point: point[1])

    @property
    def params(self) -> float:
        """Where it is."""
        return _exp(self.best.at) if self.best else self.lowest[0]

    @property
    def no_interval(self) -> str:
        """Why the fitted curve has no intervals; nothing where it has."""
        cells = len(_near(self.points))
        if cells < _CELLS:
            return f"{cells} cells of {self.variant}, and {_CELLS} are needed"
        without = DRAWS - len(self.draws)
        few = len(self.draws) < _ENOUGH * DRAWS
        return f"{without:,} of {DRAWS:,} curves drawn around that of {self.variant} have no minimum" if few else ""

    @property
    def loss_interval(self) -> Interval:
        return interval(draw.low for draw in self.draws)

    @property
    def params_interval(self) -> Interval:
        return interval(_exp(draw.at) for draw in self.draws)

    def forward_flops(self, params: float) -> float:
        """FLOPs a token of a forward pass at a size, along the ladder of the variant's sizes."""
        return math.exp(_along([(math.log(p), math.log(f)) for p, f in self.costs], math.log(params)))


@dataclass(frozen=True)
class Verdict:
    """A variant beside dense at one budget; refused where a minimum is not bracketed."""

    budget: float
    variant: str
    refused: str
    gain: float = math.nan  # share of dense's best loss that the variant's best is below it, at equal training FLOPs
    gain_interval: Interval = None
    # Share of a dense forward pass's FLOPs that the smallest model of the variant with dense's best loss saves.
    forward_saving: float = math.nan
    forward_interval: Interval = None
    # Share of the training FLOPs that the variant saves on its way to dense's best loss.
    training_saving: float = math.nan
    training_interval: Interval = None
    extrapolated: bool = False  # the training FLOPs at which that is reached lie outside the budgets of the study
    no_interval: str = ""  # why the gain has none


def parabola(points: Sequence[tuple[float, float]]) -> Parabola | None:
    """The least-squares parabola through (parameters, loss); None where it has no minimum."""
    xs = [math.log(params) for params, _ in points]
    middle = sum(xs) / len(xs)
    rows = [(1.0, x - middle, (x - middle) ** 2) for x in xs]
    left = [[sum(r[i] * r[j] for r in rows) for j in range(3)] for i in range(3)]
    right = [sum(r[i] * y for r, (_, y) in zip(rows, points, strict=True)) for i in range(3)]
    solved = _solved(left, right)
    if solved is None or solved[2] <= 0:
        return None
    a, b, c = solved
    at = -b / (2 * c)
    return Parabola(middle + at, a - c * at**2, c)


def _solved(left: list[list[float]], right: list[float]) -> list[float] | None:
    """Cramer's rule for three unknowns."""

    def det(m: list[list[float]]) -> float:
        (a, b, c), (d, e, f), (g, h, i) = m
        return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)

    whole = det(left)
    if abs(whole) < 1e-12:
        return None
    columns = [[[right[r] if c == k else left[r][c] for c in range(3)] for r in range(3)] for k in range(3)]
    return [det(column) / whole for column in columns]


def _exp(x: float) -> float:
    return math.exp(x) if abs(x) < 700 else math.inf


def curve(rows: Sequence[Row]) -> Curve:
    """The curve of one variant at one budget, from the rows of its cells; the loss is the causal one."""
    rows = sorted(rows, key=lambda row: (row["params"], row["seed"]))
    points = [(float(row["params"]), float(row["loss_causal"])) for row in rows]
    costs = means([(float(row["params"]), float(row["forward_flops_per_token"])) for row in rows])  # seeds route alike
    near = _near(points)
    best = parabola(near) if len(costs) >= 3 else None
    why = _open(points, best)
    budget, variant = rows[0]["budget"], rows[0]["variant"]
    # A stream of its own for each curve: curves that are compared must not draw alike.
    draws = _bootstrap(near, best, random.Random(f"{budget} {variant}")) if best else []
    return Curve(budget, variant, points, costs, best, draws, not why, why)


def means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean loss (or whatever comes second) of each size."""
    sizes = sorted({params for params, _ in points})
    losses = {size: [loss for params, loss in points if params == size] for size in sizes}
    return [(size, sum(losses[size]) / len(losses[size])) for size in sizes]


def _near(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of the size with the lowest loss, and of two sizes on each side of it."""
    sizes = means(points)
    lowest = min(range(len(sizes)), key=lambda i: sizes[i][1])
    kept = {params for params, _ in sizes[max(0, lowest - 2) : lowest + 3]}
    return [point for point in points if point[0] in kept]


def _open(points: Sequence[tuple[float, float]], best: Parabola | None) -> str:
    """Why a minimum is not bracketed on both sides; nothing where it is."""
    sizes = means(points)
    if len(sizes) < 3:
        return f"{len(sizes)} sizes: a curve needs three"
    lowest = min(range(len(sizes)), key=lambda i: sizes[i][1])
    if lowest in (0, len(sizes) - 1):
        return f"the {'smallest' if lowest == 0 else 'largest'} size has the lowest loss"
    if best is None:
        return "the fitted curve has no minimum"
    if not math.log(sizes[0][0]) < best.at < math.log(sizes[-1][0]):
        return "the fitted minimum lies outside the sizes"
    return ""


def _bootstrap(points: Sequence[tuple[float, float]], best: Parabola, draw: random.Random) -> list[Parabola]:
    if len(points) < _CELLS:
        return []
    freedom = len(points) - 3
    scale = math.sqrt(len(points) / freedom) * (_T[freedom - 2] / 1.96 if freedom < len(_T) + 2 else 1.0)
    residuals = [scale * (loss - best(params)) for params, loss in points]
    found = (parabola([(params, best(params) + draw.choice(residuals)) for params, _ in points]) for _ in range(DRAWS))
    return [each for each in found if each is not None]


def interval(values: Iterable[float]) -> Interval:
    """The middle 95% of the values; None where too many draws have no such value to speak of it."""
    found = sorted(value for value in values if math.isfinite(value))
    if len(found) < _ENOUGH * DRAWS:
        return None
    return found[int(0.025 * (len(found) - 1))], found[round(0.975 * (len(found) - 1))]


def _along(line: Sequence[tuple[float, float]], x: float) -> float:
    """y at x of a line through points; beyond its ends, the nearest piece goes on."""
    pairs = list(pairwise(line))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def verdicts(curves: Sequence[Curve]) -> list[Verdict]:
    """Every variant but dense, at every budget where both were run."""
    found = {(curve.budget, curve.variant): curve for curve in curves}
    dense = baseline({curve.variant for curve in curves})
    return [
        _verdict(found[curve.budget, dense], curve, [c for c in curves if c.variant == curve.variant and c.bracketed])
        for curve in curves
        if dense and curve.variant != dense and (curve.budget, dense) in found
    ]


def baseline(variants: Iterable[str]) -> str | None:
    """What the others are compared with: dense, or the only one of its kind."""
    kinds = [name for name in variants if name.partition(":")[0] == "dense"]
    return "dense" if "dense" in kinds else kinds[0] if len(kinds) == 1 else None


def _verdict(dense: Curve, mine: Curve, others: Sequence[Curve]) -> Verdict:
    """`others`: the variant at all budgets where it is bracketed."""
    for each in (dense, mine):
        if not each.bracketed or each.best is None:
            return Verdict(mine.budget, mine.variant, f"{each.variant} is not bracketed: {each.why}")
    assert dense.best is not None
    assert mine.best is not None
    pairs = list(zip(dense.draws, mine.draws, strict=False))
    reached = _reached(dense.best.low, others, None)
    outside = reached is not None and not others[0].budget * 0.999 <= reached <= others[-1].budget * 1.001
    drawn = [_reached(dense.draws[i].low, others, i) for i in range(_fewest([dense, *others]))]
    return Verdict(
        mine.budget,
        mine.variant,
        "",
        1 - mine.best.low / dense.best.low,
        interval(1 - m.low / d.low for d, m in pairs),
        _forward(dense, mine, dense.best, mine.best),
        interval(_forward(dense, mine, d, m) for d, m in pairs),
        math.nan if reached is None else 1 - reached / mine.budget,
        interval(1 - flops / mine.budget for flops in drawn if flops is not None),
        outside,
        dense.no_interval or mine.no_interval,
    )


def _fewest(curves: Sequence[Curve]) -> int:
    return min(len(curve.draws) for curve in curves)


def _forward(dense: Curve, mine: Curve, d: Parabola, m: Parabola) -> float:
    """What the smallest model of the variant as good as dense's best saves of its forward FLOPs; not a number where
    none is as good. Sizes below the smallest that was trained are not believed."""
    if m.low > d.low:
        return math.nan
    at = max(m.at - math.sqrt((d.low - m.low) / m.bend), math.log(mine.costs[0][0]))
    return 1 - mine.forward_flops(math.exp(at)) / dense.forward_flops(math.exp(d.at))


def _reached(loss: float, others: Sequence[Curve], draw: int | None) -> float | None:
    """Training FLOPs at which the variant's best loss is `loss`, along its best losses at all budgets; None where these
    do not fall, and where it would be farther outside the budgets than they are apart."""
    if len(others) < 2:
        return None
    lows = [(each.best if draw is None else each.draws[draw]) for each in others]
    line = [(low.low, math.log(each.budget)) for low, each in zip(lows, others, strict=True) if low]
    if any(after[0] >= before[0] for before, after in pairwise(line)):
        return None
    found = _along(line[::-1], loss)
    span = line[-1][1] - line[0][1]
    return math.exp(found) if line[0][1] - span <= found <= line[-1][1] + span else None
