"""Fit a parabola in the logarithm of the parameters to each curve, find its minimum, and compare variants with dense.

The curves of a budget are fitted together, by least squares: a parabola for each variant, over the sizes around its
lowest loss, two on each side (farther away, losses are not a parabola), and what a seed adds to every loss. For a seed
gives all models the same text in the same order, and the same first weights where names and shapes agree: differences
between variants are differences between models of the same seeds. Models of one size are compared seed by seed.

Intervals are of 95%: all curves of a budget are fitted again to themselves plus normal noise, as large as their
residuals say it may be (for a parameter of the fit that gives Student's interval). There are none where less than two
residuals are free, or more than one in forty of the curves drawn has no minimum.

Figures are computed for the fitted curve, which gives the estimate, and for all drawn ones, which give the interval.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from depthgate.isoflop.config import CONTROLS, LEARNT, baseline

AGAIN, DENSE = "other seeds of dense", "dense"
DRAWS = 1000
_ENOUGH = 0.975  # share of the draws that must have a value for an interval to be given
_FREEDOM = 2
# Student's t for 95%, by degrees of freedom n from 1 on; for more of them 1.96 + 2.372 / n + 2.82 / n^2.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
Row = Mapping[str, Any]  # of results: a finished cell
Interval = tuple[float, float] | None
Points = list[tuple[float, float]]


class Curve:
    """Losses of one variant at one budget, by size, and the parabola fitted to them."""

    def __init__(self, rows: Iterable[Row], fits: Tensor, freedom: int) -> None:
        """`rows`: those of its cells; the loss is the causal one. `fits` (1 + draws, 3): the fitted curve, then those
        drawn around it. `freedom`: the free residuals there were."""
        rows = sorted(rows, key=lambda row: (row["params"], row["seed"]))
        self.budget, self.variant = float(rows[0]["budget"]), str(rows[0]["variant"])
        # Parameters and loss of each cell; parameters and forward FLOPs per token of each size.
        self.points = [(float(row["params"]), float(row["loss_causal"])) for row in rows]
        self.costs = means((float(row["params"]), float(row["forward_flops_per_token"])) for row in rows)
        sizes = means(self.points)
        place = min(range(len(sizes)), key=lambda i: sizes[i][1])
        self.fits = fits
        self.loss, self.loss_interval = _figure(self.fits[:, 1])
        self.params, self.params_interval = _figure(self.fits[:, 0].exp())
        self.open_because = _open_because([size for size, _ in sizes], place, self.params)
        self.bracketed = not self.open_because  # both a smaller and a larger size have a higher loss than the best one
        self.lowest = sizes[place][1]  # the lowest mean loss of a size
        self.ends_below = place == 0 and len(sizes) >= 3  # the smallest size is the best one
        if math.isnan(self.loss):
            self.params, self.loss = sizes[place]
        without = int(self.fits[1:, 0].isnan().sum())
        self.no_interval = ""  # why there are no intervals, if there are none
        if freedom < _FREEDOM:
            self.no_interval = "too few cells to tell"
        elif without > (1 - _ENOUGH) * DRAWS:
            self.no_interval = f"{without:,} of {DRAWS:,} curves drawn around that of {self.variant} have no minimum"

    def forward_flops(self, log_params: Tensor) -> Tensor:
        """FLOPs per token of a forward pass at these sizes, interpolated between the variant's sizes."""
        params, flops = torch.tensor(self.costs, dtype=torch.float64).log().T
        return (_interpolate(log_params, params, flops) if len(params) > 1 else flops).exp()

    def summary(self) -> dict[str, Any]:
        """Its figures for a table; those of a minimum that is not bracketed are None."""
        names = ("budget", "variant", "lowest", "loss", "loss_interval", "params", "params_interval", "bracketed")
        found = {name: getattr(self, name) for name in (*names, "open_because", "no_interval")}
        size = torch.tensor([self.params], dtype=torch.float64)
        found["forward_flops_per_token"] = float(self.forward_flops(size.log()))
        return found if self.bracketed else found | dict.fromkeys(("loss", "params", "forward_flops_per_token"))

    def line(self) -> Points:
        """Points of the fitted parabola, from the smallest size to the largest; none where it has no minimum."""
        at, low, bend = self.fits[0]
        sizes = torch.linspace(math.log(self.costs[0][0]), math.log(self.costs[-1][0]), 41, dtype=torch.float64)
        losses = low + bend * (sizes - at) ** 2
        return [] if at.isnan() else list(zip(sizes.exp().tolist(), losses.tolist(), strict=True))


@dataclass(frozen=True)
class Verdict:
    """Comparison of a variant with dense, or with another one, at one budget."""

    budget: float
    variant: str
    refused: str  # why there is no verdict; "" if there is one
    gain: float = math.nan  # 1 - the variant's best loss / dense's best loss, at equal training FLOPs
    gain_interval: Interval = None
    # Share of dense's forward FLOPs that the smallest model of the variant with dense's best loss saves.
    forward_saving: float = math.nan
    forward_interval: Interval = None
    forward_at_least: bool = False  # smaller models than those trained may do, so that the saving may be larger
    # Share of the training FLOPs that the variant saves until it reaches dense's best loss, along the lines between
    # budgets. An estimate: what seeds add at one budget and not at the next, and how losses bend, is not in the draws.
    training_saving: float = math.nan
    extrapolated: bool = False  # that loss is reached at training FLOPs outside the budgets of the study
    no_interval: str = ""  # why the gain has no interval
    against: str = DENSE  # what it is compared with

    @property
    def gain_may_be_zero(self) -> bool:
        """True if the gain has an interval, and 0 lies in it: the difference is not significant."""
        return self.gain_interval is not None and self.gain_interval[0] <= 0 <= self.gain_interval[1]


def parabolas(params: Sequence[float], losses: Tensor) -> Tensor:
    """(N, sizes) losses at these sizes -> (N, 3): at, low and bend of the least-squares parabolas
    low + bend * (ln params - at)^2; nan where there is no minimum."""
    x = torch.tensor(params, dtype=torch.float64).log()
    powers = (x - x.mean())[:, None] ** torch.arange(3)
    return _minima(x.mean(), torch.linalg.lstsq(powers, losses.double().T).solution.T)


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


def curves(rows: Iterable[Row]) -> list[Curve]:
    """A curve for each budget and variant, by budget, dense first; those of a budget are fitted together."""

    def key(row: Row) -> tuple[float, bool, str]:
        return row["budget"], not row["variant"].startswith("dense"), row["variant"]

    found = []
    for _, at_budget in groupby(sorted(rows, key=key), lambda row: row["budget"]):
        variants = [list(group) for _, group in groupby(at_budget, lambda row: row["variant"])]
        fits, freedom = _fitted_together(variants)
        found += [Curve(mine, each, freedom) for mine, each in zip(variants, fits, strict=True)]
    return found


def _near(rows: Sequence[Row]) -> list[Row]:
    """The cells around the lowest loss."""
    sizes = means((row["params"], row["loss_causal"]) for row in rows)
    place = min(range(len(sizes)), key=lambda i: sizes[i][1])
    kept = [size for size, _ in sizes[max(0, place - 2) : place + 3]]
    return [row for row in rows if row["params"] in kept]


def _fitted_together(variants: Sequence[Sequence[Row]]) -> tuple[list[Tensor], int]:
    """Parabolas of the variants of one budget, each as (1 + draws, 3): the fitted one, and those drawn around it; nan
    where there is none. And how many residuals are free."""
    nothing = torch.full((1 + DRAWS, 3), math.nan, dtype=torch.float64)
    near = [_near(rows) for rows in variants]
    curved = [n for n, rows in enumerate(near) if len({row["params"] for row in rows}) >= 3]
    cells = [row for n in curved for row in near[n]]
    if not cells:
        return [nothing] * len(variants), 0
    losses = torch.tensor([row["loss_causal"] for row in cells], dtype=torch.float64)
    sizes = [torch.tensor([row["params"] for row in near[n]], dtype=torch.float64).log() for n in curved]
    middle = [x.mean() for x in sizes]
    powers = [(x - at)[:, None] ** torch.arange(3) for x, at in zip(sizes, middle, strict=True)]
    columns = torch.cat((torch.block_diag(*powers), _seed_columns(cells)), 1)  # type: ignore[no-untyped-call]
    inverse = torch.linalg.pinv(columns)
    fitted, freedom = columns @ (inverse @ losses), len(cells) - int(torch.linalg.matrix_rank(columns))
    drawn = losses.expand(1 + DRAWS, -1).clone()
    if freedom >= _FREEDOM:
        # Each budget has its own random stream.
        random = torch.Generator().manual_seed(zlib.crc32(f"{cells[0]['budget']}".encode()))
        spread = float((losses - fitted).square().sum()) ** 0.5 / torch.randn(
            (DRAWS, freedom), generator=random, dtype=torch.float64
        ).norm(dim=1)
        noise = torch.randn((DRAWS, len(cells)), generator=random, dtype=torch.float64)
        drawn[1:] = fitted + spread[:, None] * noise
    else:
        drawn[1:] = math.nan
    found = [nothing] * len(variants)
    for at, n, part in zip(middle, curved, (drawn @ inverse.T).split(3, 1), strict=False):
        found[n] = _minima(at, part)
    return found, freedom


def _seed_columns(cells: Sequence[Row]) -> Tensor:
    """(cells, seeds - 1): what each seed adds, all of them together 0. No columns, so that seeds are noise like any
    other, where variants share no seeds, not even by way of others: what a seed adds could not be told from them."""
    seeds = sorted({row["seed"] for row in cells})
    used = {name: {row["seed"] for row in cells if row["variant"] == name} for name in {r["variant"] for r in cells}}
    joined = used.pop(min(used))
    while found := [name for name, mine in used.items() if mine & joined]:
        joined |= used.pop(found[0])
    if used:
        return torch.zeros(len(cells), 0, dtype=torch.float64)
    one_hot = torch.tensor([[row["seed"] == seed for seed in seeds] for row in cells], dtype=torch.float64)
    return one_hot[:, :-1] - one_hot[:, -1:]


def _minima(middle: Tensor, powers: Tensor) -> Tensor:
    """(N, 3) coefficients of parabolas in the distance from `middle` -> (N, 3): at, low and bend of
    low + bend * (ln params - at)^2; nan where there is no minimum."""
    a, b, c = powers.T
    c = torch.where(c > 1e-12, c, math.nan)  # below, it is a rounding error of a straight line
    return torch.stack([middle - b / (2 * c), a - b * b / (4 * c), c], 1)


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


def verdicts(curves: Sequence[Curve]) -> list[Verdict]:
    """Comparison of each other variant with dense, and of Soft MoE with its controls, at every budget where both were
    run."""
    names = {curve.variant for curve in curves}
    dense, known = baseline(names), {(curve.variant, curve.budget): curve for curve in curves}
    pairs: list[Any] = [(dense, name) for name in names - {dense}]
    for name in names:
        kind, colon, options = name.partition(":")
        pairs += [(f"{each}{colon}{options}", name) for each in CONTROLS if kind == LEARNT]
    bracketed = {name: [c for c in curves if c.variant == name and c.bracketed] for name in names}
    return [
        replace(_verdict(known[first, c.budget], c, bracketed[name]), against=first)
        for c in curves
        for first, name in pairs
        if name == c.variant and (first, c.budget) in known
    ]


def paired(differences: Sequence[float]) -> tuple[float, Interval]:
    """The mean of differences, and Student's interval of it where there are two or more."""
    mean, freedom = fmean(differences), len(differences) - 1
    if not freedom:
        return mean, None
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.372 / freedom + 2.82 / freedom**2
    wide = student * stdev(differences) / math.sqrt(len(differences))
    return mean, (mean - wide, mean + wide)


def calibrations(rows: Iterable[Row]) -> list[Verdict]:
    """Comparison of dense with itself at every budget where it has several seeds: every other one of them against the
    rest, at the same sizes."""
    rows = list(rows)
    dense, found = baseline({row["variant"] for row in rows}), []
    for budget in sorted({row["budget"] for row in rows}):
        mine = [row for row in rows if (row["budget"], row["variant"]) == (budget, dense)]
        seeds = sorted({row["seed"] for row in mine})
        halves = [
            dict(means((r["params"], r["loss_causal"]) for r in mine if r["seed"] in seeds[n::2])) for n in (0, 1)
        ]
        gains = [1 - halves[1][size] / loss for size, loss in sorted(halves[0].items()) if loss and size in halves[1]]
        if len(gains) > 1:
            found.append(Verdict(budget, AGAIN, "", *paired(gains), against=str(dense)))
        elif len(seeds) > 1:
            found.append(Verdict(budget, AGAIN, "only one size has other seeds", against=str(dense)))
    return found


def seed_by_seed(rows: Sequence[Row]) -> dict[str, tuple[int, float, Interval]]:
    """For cells of one budget and one size of each variant: how many seeds each variant shares with dense, or with the
    one of the shortest name, the gain over it, and its interval."""
    names = sorted({row["variant"] for row in rows}, key=lambda name: (len(name), name))
    known = {(row["variant"], row["seed"]): row["loss_causal"] for row in rows}
    first = baseline(names) or names[0]
    found = {}
    for name in names:
        gains = [1 - loss / known[first, s] for (at, s), loss in known.items() if at == name and known.get((first, s))]
        if name != first and gains:
            found[name] = (len(gains), *paired(gains))
    return found


def _verdict(dense: Curve, mine: Curve, budgets: Sequence[Curve]) -> Verdict:
    """`budgets`: the curves of the variant at all budgets where it is bracketed."""
    for each in (dense, mine):
        if each.open_because:
            return Verdict(mine.budget, mine.variant, f"{each.variant} is not bracketed: {each.open_because}")
    (d_at, d_low, _), (at, low, bend) = dense.fits.T, mine.fits.T
    # The smallest size as good as dense's best, nan if none is; never one below the smallest that was trained.
    as_good, trained = at - ((d_low - low) / bend).sqrt(), math.log(mine.costs[0][0])
    saving = 1 - mine.forward_flops(as_good.clamp(min=trained)) / dense.forward_flops(d_at)
    smaller = as_good < trained
    reached = float(_reached(dense, budgets)[0])
    first, last = math.log(budgets[0].budget * 0.999), math.log(budgets[-1].budget * 1.001)
    return Verdict(
        *(mine.budget, mine.variant, "", *_figure(1 - low / d_low), *_figure(saving)),
        bool(smaller[0]) or (not as_good[0].isnan() and float(smaller[1:].double().mean()) > 1 - _ENOUGH),
        1 - math.exp(reached) / mine.budget,
        extrapolated=not (math.isnan(reached) or first <= reached <= last),
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
