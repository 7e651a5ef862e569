"""Fit a parabola in the logarithm of the parameters to each curve, find its minimum, and compare variants with dense.

A curve is fitted to the sizes around the lowest loss, two on each side: farther away, losses are not a parabola.
Intervals are of 95%, by a bootstrap of residuals: each curve is fitted again to itself plus residuals drawn from its
own, widened by Student's t because few residuals say little about their spread. A curve of fewer than five cells has
no interval, and neither has one where more than one in forty of the curves drawn has no minimum.

Every figure is computed for the fitted curve and for all drawn ones at once: the first of its values is the estimate,
the others give the interval.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

DRAWS = 1000
_ENOUGH = 0.975  # share of the draws that must have a value for an interval to be given
_CELLS = 5
# The 97.5% point of Student's t for 2, 3, 4 ... degrees of freedom; the normal distribution's is 1.96.
_T = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
Interval = tuple[float, float] | None
Points = list[tuple[float, float]]


class Curve:
    """Losses of one variant at one budget, by size, and the parabola fitted to them."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """`rows`: those of its cells; the loss is the causal one."""
        rows = sorted(rows, key=lambda row: (row["params"], row["seed"]))
        self.budget, self.variant = float(rows[0]["budget"]), str(rows[0]["variant"])
        # Parameters and loss of each cell; parameters and forward FLOPs per token of each size.
        self.points = [(float(row["params"]), float(row["loss_causal"])) for row in rows]
        self.costs = means((float(row["params"]), float(row["forward_flops_per_token"])) for row in rows)
        sizes = means(self.points)
        place = min(range(len(sizes)), key=lambda i: sizes[i][1])
        kept = [size for size, _ in sizes[max(0, place - 2) : place + 3]]
        near = [point for point in self.points if point[0] in kept]
        # Each curve has its own random stream: curves that are compared must not draw alike.
        random = torch.Generator().manual_seed(zlib.crc32(f"{self.budget} {self.variant}".encode()))
        self.fits = _fits(near, random)  # (1 + draws, 3): the fitted curve, then those drawn around it
        self.loss, self.loss_interval = _figure(self.fits[:, 1])
        self.params, self.params_interval = _figure(self.fits[:, 0].exp())
        self.open_because = _open_because([size for size, _ in sizes], place, self.params)
        self.bracketed = not self.open_because  # both a smaller and a larger size have a higher loss than the best one
        self.lowest = sizes[place][1]  # the lowest mean loss of a size
        if math.isnan(self.loss):
            self.params, self.loss = sizes[place]
        without = int(self.fits[1:, 0].isnan().sum())
        self.no_interval = ""  # why there are no intervals, if there are none
        if len(near) < _CELLS:
            self.no_interval = f"{len(near)} cells of {self.variant}, and {_CELLS} are needed"
        elif without > (1 - _ENOUGH) * DRAWS:
            self.no_interval = f"{without:,} of {DRAWS:,} curves drawn around that of {self.variant} have no minimum"

    def forward_flops(self, log_params: Tensor) -> Tensor:
        """FLOPs per token of a forward pass at these sizes, interpolated between the variant's sizes."""
        params, flops = torch.tensor(self.costs, dtype=torch.float64).log().T
        return (_interpolate(log_params, params, flops) if len(params) > 1 else flops).exp()

    def line(self) -> Points:
        """Points of the fitted parabola, from the smallest size to the largest; none where it has no minimum."""
        at, low, bend = self.fits[0]
        sizes = torch.linspace(math.log(self.costs[0][0]), math.log(self.costs[-1][0]), 41, dtype=torch.float64)
        losses = low + bend * (sizes - at) ** 2
        return [] if at.isnan() else list(zip(sizes.exp().tolist(), losses.tolist(), strict=True))


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

    @property
    def gain_may_be_zero(self) -> bool:
        """True if the gain has an interval, and 0 lies in it: the difference is not significant."""
        return self.gain_interval is not None and self.gain_interval[0] <= 0 <= self.gain_interval[1]


def parabolas(params: Sequence[float], losses: Tensor) -> Tensor:
    """(N, sizes) losses at these sizes -> (N, 3): at, low and bend of the least-squares parabolas
    low + bend * (ln params - at)^2; nan where there is no minimum."""
    x = torch.tensor(params, dtype=torch.float64).log()
    powers = (x - x.mean())[:, None] ** torch.arange(3)
    a, b, c = torch.linalg.lstsq(powers, losses.double().T).solution
    c = torch.where(c > 1e-12, c, math.nan)  # below, it is a rounding error of a straight line
    return torch.stack([x.mean() - b / (2 * c), a - b * b / (4 * c), c], 1)


def means(points: Iterable[tuple[float, float]]) -> Points:
    """Mean of the second values of each first value: the mean loss of each size."""
    groups = groupby(sorted(points), key=lambda point: point[0])
    return [(size, fmean(loss for _, loss in group)) for size, group in groups]


def _open_because(sizes: Sequence[float], lowest: int, fitted: float) -> str:
    """The reason why a minimum is not bracketed on both sides; "" if it is."""
    if len(sizes) < 3:
        return f"{len(sizes)} size{'s' * (len(sizes) > 1)}: a curve needs three"
    if lowest in (0, len(sizes) - 1):
        return f"the {'largest' if lowest else 'smallest'} size has the lowest loss"
    if math.isnan(fitted):
        return "the fitted curve has no minimum"
    return "" if sizes[0] < fitted < sizes[-1] else "the fitted minimum lies outside the sizes"


def _fits(points: Points, random: torch.Generator) -> Tensor:
    """The parabola through three points or more, and those drawn around it where there are enough points."""
    params, losses = zip(*points, strict=True)
    measured, freedom = torch.tensor(losses, dtype=torch.float64), len(points) - 3
    fits = torch.full((1 + DRAWS, 3), math.nan, dtype=torch.float64)
    if len(set(params)) >= 3:
        fits[:1] = parabolas(params, measured[None])
    if len(points) >= _CELLS and not fits[0].isnan().any():
        at, low, bend = fits[0]
        fitted = low + bend * (torch.tensor(params, dtype=torch.float64).log() - at) ** 2
        scale = math.sqrt(len(points) / freedom) * (_T[freedom - 2] / 1.96 if freedom < len(_T) + 2 else 1.0)
        drawn = torch.randint(len(points), (DRAWS, len(points)), generator=random)
        found = parabolas(params, fitted + scale * (measured - fitted)[drawn])
        # Those without a minimum come last, so that two curves together lose no more of them than the worse one.
        fits[1:] = found[found[:, 0].isnan().argsort(stable=True)]
    return fits


def _figure(values: Tensor) -> tuple[float, Interval]:
    """The estimate, and the middle 95% of the drawn values; None if too few of these are finite."""
    drawn = values[1:][values[1:].isfinite()].double()
    if len(drawn) < _ENOUGH * DRAWS:
        return float(values[0]), None
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=drawn.dtype)).tolist()
    return float(values[0]), (low, high)


def _interpolate(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """y at x (N,) on lines through points (N or 1, n), n at least 2; beyond its ends, the nearest piece goes on."""
    xs, ys = (each.expand(len(x), -1) for each in (xs, ys))
    piece = (x[:, None] > xs[:, 1:-1]).sum(1, keepdim=True)
    (x0, y0), (x1, y1) = ((xs.gather(1, i)[:, 0], ys.gather(1, i)[:, 0]) for i in (piece, piece + 1))
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def baseline(variants: Iterable[str]) -> str | None:
    """The variant that others are compared with: dense, or the only one of dense layers."""
    kinds = [name for name in variants if "dense" in name.partition(":")[0].split("-")]
    return "dense" if "dense" in kinds else kinds[0] if len(kinds) == 1 else None


def verdicts(curves: Sequence[Curve]) -> list[Verdict]:
    """Comparison of each other variant with dense, at every budget where both were run."""
    dense = baseline({curve.variant for curve in curves})
    found = {curve.budget: curve for curve in curves if curve.variant == dense}
    return [
        _verdict(found[curve.budget], curve, [c for c in curves if c.variant == curve.variant and c.bracketed])
        for curve in curves
        if curve.variant != dense and curve.budget in found
    ]


def _verdict(dense: Curve, mine: Curve, budgets: Sequence[Curve]) -> Verdict:
    """`budgets`: the curves of the variant at all budgets where it is bracketed."""
    for each in (dense, mine):
        if each.open_because:
            return Verdict(mine.budget, mine.variant, f"{each.variant} is not bracketed: {each.open_because}")
    (d_at, d_low, _), (at, low, bend) = dense.fits.T, mine.fits.T
    # The smallest size as good as dense's best, nan if none is; never one below the smallest that was trained.
    smallest = (at - ((d_low - low) / bend).sqrt()).clamp(min=math.log(mine.costs[0][0]))
    saving = 1 - mine.forward_flops(smallest) / dense.forward_flops(d_at)
    reached = _reached(dense, budgets)
    first, last = math.log(budgets[0].budget * 0.999), math.log(budgets[-1].budget * 1.001)
    return Verdict(
        *(mine.budget, mine.variant, "", *_figure(1 - low / d_low), *_figure(saving)),
        *_figure(1 - reached.exp() / mine.budget),
        extrapolated=not (reached[0].isnan() or first <= reached[0] <= last),
        no_interval=dense.no_interval or mine.no_interval,
    )


def _reached(dense: Curve, budgets: Sequence[Curve]) -> Tensor:
    """Logarithm of the training FLOPs at which the variant's best loss is dense's, along its best losses at all
    budgets; nan where these do not fall, and where it would lie farther outside the budgets than they are apart."""
    if len(budgets) < 2:
        return torch.full((1 + DRAWS,), math.nan)
    losses = torch.stack([each.fits[:, 1] for each in budgets], 1).flip(1)
    flops = torch.tensor([each.budget for each in budgets], dtype=torch.float64).log().flip(0)
    found = _interpolate(dense.fits[:, 1], losses, flops)
    near = (found - (flops[0] + flops[-1]) / 2).abs() <= 1.5 * (flops[0] - flops[-1])
    return torch.where(near & (losses.diff() > 0).all(1), found, math.nan)
