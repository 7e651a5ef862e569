"""The cells of a study: which models are trained, for how many steps, at which learning rate. Nothing is run here."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from depthgate.config import ModelConfig, TrainConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.flops import parameters, training_flops
from depthgate.isoflop.config import IsoflopConfig, Variant
from depthgate.isoflop.fit import means, parabolas
from depthgate.recipes import SCHEDULE
from depthgate.train.optim import capacity
from depthgate.vision import AUGMENTED, ImagesConfig

CELLS = "cells"
TRIED = (0.5, 1.0, 2.0)  # learning rates of a sweep, as multiples of the rule's
TOLERANCE = 0.03  # largest difference of a cell's FLOPs from its budget, as a share of it
_BEST, _BEST_POWER = 0.011, 0.62  # a budget's best model is expected at _BEST * budget ** _BEST_POWER FLOPs per token
_BEST_OF_IMAGES = 0.0045
_MOST_STEPS = 2**31 - 1
# Widths of the ladder: four to a doubling from 128 on, so that heads are of 32 or 64.
WIDTHS = [16, 24, 32, 48, 64, 96] + [2**n // 4 * (4 + i) for n in range(7, 15) for i in range(4)]
# lr = scale * (128 / width) ** _WIDTH_POWER, at all budgets: docs/log.md has the sweeps behind it.
_SCALE, _WIDTH_POWER = 0.008, 0.75
_SCALE_OF_IMAGES = 0.002  # with 512 images in a step; it goes with the square root of their number
_MOST_RATES = 9
Row = dict[str, Any]  # of results: a finished cell
Check = Callable[[Sequence["Cell"]], None]


@dataclass(frozen=True)
class Cell:
    """One training run."""

    budget: float
    variant: str
    seed: int
    training: Any  # TrainConfig, or ImagesConfig
    flops: float  # FLOPs of the whole run
    part: str = CELLS  # folder of the study that holds it

    @property
    def name(self) -> str:
        """Name of the cell's folder, unique within its part of the study."""
        variant = self.variant.replace(":", "_").replace("=", "-").replace("+", "_")
        model, budget = self.training.model, f"{self.budget:.4g}".replace("e+", "e")
        return f"{budget}-{variant}-{model.layers}x{model.dim}-lr{self.training.lr:.3g}-s{self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.training.out)

    @property
    def params(self) -> int:
        return parameters(self.training.model)

    @property
    def memory(self) -> float:
        """Bytes needed, about: weights with gradients and two moments, and what layers keep for the backward pass."""
        model, t = self.training.model, self.training
        words = 2 * getattr(model, "vocab", 0)
        kept = t.batch // t.accumulate * model.context * (model.layers * 24 * model.dim + words)
        return 16.0 * self.params + (2.0 if t.dtype == "bfloat16" else 4.0) * float(kept)

    def described(self) -> Row:
        """The part of the cell's row of results that is known before it is run."""
        model, t = self.training.model, self.training
        tokens = t.steps * t.batch * model.context
        return {
            "cell": self.name,
            "budget": self.budget,
            "variant": self.variant,
            "params": self.params,
            "layers": model.layers,
            "dim": model.dim,
            "pattern": model.pattern,
            "capacity": model.capacity if model.routed else 1.0,
            "flops_per_token": self.flops / tokens,
            "tokens": tokens,
            "steps": t.steps,
            "batch": t.batch,
            "context": model.context,
            "lr": t.lr,
            "seed": self.seed,
        }


def ladder(variant: Variant, vocab: Any, context: int) -> list[ModelConfig]:
    """The shapes of a variant, each with more FLOPs per token than the one before."""
    shapes: list[ModelConfig] = []
    for dim in (widths := [variant.model["dim"]] if "dim" in variant.model else WIDTHS):
        with suppress(InvalidValueError):  # such as more heads of keys than a small model has heads
            shape = variant.shape(dim, vocab, context)
            if not shapes or training_flops(shape) > training_flops(shapes[-1]):
                shapes.append(shape)
    return shapes or [variant.shape(widths[-1], vocab, context)]  # which raises, and says why there are none


@dataclass(frozen=True)
class Grid:
    """Everything that decides the cells of a study. `scales`: variant -> scale of its learning rates, for those that
    were found by a sweep."""

    config: IsoflopConfig
    tokenizer: str
    vocab: Any  # or size, channels and classes of images
    device: str
    scales: Mapping[str, float]

    @cached_property
    def ladders(self) -> dict[str, list[ModelConfig]]:
        return {v.name: ladder(v, self.vocab, self.config.tokens_in_sequence) for v in self.config.variant_list}

    def cells(self) -> list[Cell]:
        """The cells that the options ask for; the first seed of all comes before the second of any."""
        return [
            self.cell(budget, name, shape, seed)
            for seed in range(self.config.seed, self.config.seed + max(self.config.seeds, 2))
            for budget in self.config.budget_list
            for name in self.ladders
            for shape in self.shapes(budget, name)
            if seed in self.config.seeds_of(name, budget)
        ]

    def shapes(self, budget: float, variant: str) -> list[ModelConfig]:
        """Different models of a variant: with about the FLOPs per token that are expected to be best for a budget, and
        with `spread` times more and less."""
        shapes, sizes, config = self.ladders[variant], self.config.sizes, self.config
        if sizes == len(shapes) == 1:
            return shapes
        best = _BEST_OF_IMAGES if config.images else _BEST
        costs, middle = [training_flops(shape) for shape in shapes], config.center * best * budget**_BEST_POWER
        targets = [middle * config.apart ** (i - (sizes - 1) / 2) for i in range(sizes)]
        places: list[int] = []
        for target in targets:
            near = min(range(len(costs)), key=lambda i: abs(math.log(costs[i] / target)))
            places.append(max(near, places[-1] + 1 if places else 0))
        if places[-1] >= len(shapes) or targets[-1] > 4 * costs[-1]:
            what = f"{variant} has no model of {targets[-1]:.3g} FLOPs per token"
            raise InvalidValueError(f"{what}: lower --budgets, --sizes or --spread")
        return [shapes[i] for i in places]

    def cell(
        self, budget: float, variant: str, shape: ModelConfig, seed: int, lr: float | None = None, part: str = CELLS
    ) -> Cell:
        """One cell, or an error that says why it cannot be one."""
        config, cuda = self.config, self.device == "cuda"
        options = next(each.training for each in config.variant_list if each.name == variant)
        shared: dict[str, Any] = {"data": _absolute(config.data), "device": self.device, "seed": seed, "model": shape}
        shared |= {
            "dtype": "bfloat16" if cuda else "float32",
            "compile": cuda,
            "workers": int(cuda),
            "keep": config.points + 1,
        }
        images = (config.batch or (512 if config.large else 64)) if config.images else None
        shared["lr"] = lr or config.lr or learning_rate(variant, shape.dim, self.scales, images)
        if images is not None:
            shared |= {**AUGMENTED, "batch": images}
            return self._settled(ImagesConfig(**{**shared, **SCHEDULE, **options}), budget, variant, part)
        # A power of two: about 1,024 tokens at 1e12 FLOPs, 16,384 at 1e16. Larger ones cost small models a lot.
        batch = 1 << max(0, round(math.log2(1024 * (budget / 1e12) ** 0.3 / shape.context)))
        texts = {"validation": config.validation and _absolute(config.validation), "tokenizer": self.tokenizer}
        shared |= {**texts, "batch": config.batch or batch}
        return self._settled(TrainConfig(**{**shared, **SCHEDULE, **options}), budget, variant, part)

    def _settled(self, training: Any, budget: float, variant: str, part: str) -> Cell:
        """The cell of a run, with as many steps as its budget allows."""
        config = self.config
        steps, flops = _steps(training, budget)
        every = max(50 if config.points == 1 else 1, -(-steps // max(4, config.points)))
        training = replace(training, steps=steps, warmup=max(1, steps // 25), checkpoint_every=every)
        cell = Cell(budget, variant, training.seed, training, flops, part)
        return replace(cell, training=replace(training, out=str(Path(config.out).absolute() / part / cell.name)))

    def more(self, cells: Sequence[Cell], rows: Sequence[Mapping[str, Any]], check: Check) -> list[Cell]:
        """Cells that the results so far ask for and `cells` lacks: sizes beyond the open end of a curve, and more seeds
        of each minimum. `check` raises where cells cannot be trained."""
        known, done, found = {cell.name for cell in cells}, {row["cell"] for row in rows}, list[Cell]()
        for curve in dict.fromkeys((cell.budget, cell.variant) for cell in cells):
            mine = [row for row in rows if (row["budget"], row["variant"]) == curve]
            if all(cell.name in done for cell in cells if (cell.budget, cell.variant) == curve):  # else some failed
                wanted = ([cell for cell in new if cell.name not in known] for new in self._wanted(*curve, mine, check))
                found += next(filter(None, wanted), [])
        return found

    def _wanted(
        self, budget: float, variant: str, rows: Sequence[Mapping[str, Any]], check: Check
    ) -> Iterator[list[Cell]]:
        """Cells that a variant needs at a budget, in the order in which they are needed, those that are there too."""
        config, shapes = self.config, self.ladders[variant]

        def made(places: Iterable[int], seeds: Iterable[int]) -> list[Cell]:
            return [self.cell(budget, variant, shapes[i], seed) for i in places for seed in seeds]

        # Includes sizes that were added before a study was interrupted, and that the grid by itself does not have.
        losses = dict(means((row["params"], row["loss_causal"]) for row in rows))
        found = {i: losses[parameters(shape)] for i, shape in enumerate(shapes) if parameters(shape) in losses}
        seeds = config.seeds_of(variant, budget)
        yield made(found, seeds)
        lowest = min(found, key=lambda i: found[i])
        asked = [shapes.index(shape) for shape in self.shapes(budget, variant)]
        end = lowest - 1 if lowest == min(found) else lowest + 1 if lowest == max(found) else -1
        if end in range(len(shapes)) and max(asked[0] - end, end - asked[-1]) <= config.more_sizes:
            with suppress(DepthgateError):  # a size that cannot be trained is the end of the ladder
                new = made([end], seeds)
                check(new)
                yield new
        # Sizes that have some of the further seeds get all of them, also where these made another size the lowest.
        begun = {row["params"] for row in rows if row["seed"] not in seeds}
        further = range(seeds.stop, config.seed + (config.seeds_at_minimum or config.seeds))
        yield made((i for i in found if i == lowest or parameters(shapes[i]) in begun), further)


def _absolute(data: str) -> str:
    """An absolute path, because a worker may have another working folder; a name of a data set as it is."""
    return str(Path(data).absolute()) if Path(data).exists() else data


def total_flops(training: Any, steps: int) -> float:
    """Training FLOPs of so many steps, a falling capacity included."""
    falls = getattr(training, "capacity_steps", 0)
    falling = min(falls, steps) if training.model.routed else 0
    shares = (capacity(training.model.capacity, step, falls) for step in range(falling))
    cost = partial(training_flops, sequences=training.batch // training.accumulate)
    dearer = sum(cost(replace(training.model, capacity=share)) for share in shares)
    per_token = dearer + cost(training.model) * (steps - falling)
    return float(per_token * training.batch * training.model.context)


def _steps(training: Any, budget: float) -> tuple[int, float]:
    """The steps whose FLOPs come nearest to the budget, and these FLOPs."""
    fixed = replace(training, capacity_steps=0) if getattr(training, "capacity_steps", 0) else training
    each = total_flops(fixed, 1)
    steps = round(budget / each)
    while steps > 1 and total_flops(training, steps) > budget + each / 2:
        steps -= max(1, int((total_flops(training, steps) - budget) / each))
    flops, model, why = total_flops(training, steps), training.model, ""
    if steps < 1 or abs(flops / budget - 1) > TOLERANCE:
        why = f"so no number of steps is within {TOLERANCE:.0%} of it; raise the budget, lower --batch or --center"
    elif steps > _MOST_STEPS:
        why = f"so {steps:,} steps are needed; lower it or raise --batch"
    if why:
        step = f"a step of the {model.layers}x{model.dim} model, {training.batch} x {model.context} tokens"
        raise InvalidValueError(f"budgets has {budget:g}: {step}, takes {each:.3g} FLOPs, {why}")
    return steps, flops


def check_fits(cells: Sequence[Cell], device: str, at_once: int = 1) -> None:
    """Refuse cells that need more memory than this machine has, `at_once` of them at a time."""
    have = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if device == "cuda":
        have = float(torch.cuda.get_device_properties(0).total_memory)
    large = max(cells, key=lambda cell: cell.memory)
    if large.memory * at_once > have:
        need = f"about {large.memory / 2**30:,.0f} GiB ({at_once} at a time), and there are {have / 2**30:,.0f}"
        what = f"{large.name} has {large.params:,} weights and needs {need}"
        raise DepthgateError(f"{what}: lower --parallel, --batch or --budgets")


def learning_rate(variant: str, dim: int, scales: Mapping[str, float], images: int | None = None) -> float:
    """The rate of a variant at a width, at its own scale or at that for all, or for `images` in a step."""
    scale = scales.get(variant, _SCALE if images is None else _SCALE_OF_IMAGES * (images / 512) ** 0.5)
    return float(f"{scale * (128 / dim) ** _WIDTH_POWER:.3g}")


def best_rate(losses: Mapping[float, float]) -> float:
    """rate -> loss: the minimum of the parabola through the best rate and its neighbours, in the logarithm of the rate;
    the best rate itself where it is the first or last one tried."""
    rates = sorted(losses)
    best = min(rates, key=lambda rate: losses[rate])
    near = rates[max(0, rates.index(best) - 1) : rates.index(best) + 2]
    if len(near) < 3:
        return best
    found = float(parabolas(near, torch.tensor([[losses[rate] for rate in near]], dtype=torch.float64))[0, 0])
    return best if math.isnan(found) else math.exp(found)


def further_rates(losses: Mapping[float, float], tried: Sequence[float]) -> list[float]:
    """The next rate to try: one beyond the best, where that is the lowest or highest of those with a loss and one of
    those tried last; none where it is not, or where enough have been tried."""
    best = min(losses, key=lambda rate: losses[rate], default=None)
    if best is None or best not in tried or len(losses) >= _MOST_RATES:
        return []
    return [best / 2] if best == min(losses) else [best * 2] if best == max(losses) else []


def scale_of_rates(rate: float, dim: int) -> float:
    """The scale of the rule that gives this rate at a width."""
    return float(rate * (dim / 128) ** _WIDTH_POWER)
