"""The cells of a study: which models are trained, for how many steps, at which learning rate. Nothing is run here."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import torch

from depthgate.config import ModelConfig, TrainConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.flops import parameters, training_flops
from depthgate.isoflop.config import IsoflopConfig, Variant
from depthgate.isoflop.fit import means, parabolas
from depthgate.train.optim import capacity

TOLERANCE = 0.03  # largest difference of a cell's FLOPs from its budget, as a share of it
CELLS = "cells"
TRIED = (0.25, 0.5, 1.0, 2.0, 4.0)  # learning rates of a sweep, as multiples of the rule's
_BEST = 0.56  # a budget's best model is expected at _BEST * sqrt(budget) FLOPs per token
_MOST_STEPS = 2**31 - 1
# Widths of the ladder: four to a doubling from 128 on, so that heads are of 32 or 64.
WIDTHS = [16, 24, 32, 48, 64, 96] + [2**n // 4 * (4 + i) for n in range(7, 15) for i in range(4)]
# lr = scale * (width / 128) ** power * (budget / 1e12) ** _BUDGET_POWER: docs/log.md has the sweeps behind it.
_SCALE_AND_POWER = (4e-3, -0.75)
_BUDGET_POWER = -0.0866  # half the rate at 3e15 FLOPs
_POWERS = (-1.5, 0.0)  # two widths say little: a power outside is taken for noise
_MOST_RATES = 9


@dataclass(frozen=True)
class Cell:
    """One training run."""

    budget: float
    variant: str
    seed: int
    training: TrainConfig
    flops: float  # FLOPs of the whole run
    part: str = CELLS  # folder of the study that holds it

    @property
    def name(self) -> str:
        """Name of the cell's folder, unique within its part of the study."""
        variant = self.variant.replace(":", "_").replace("=", "-").replace("+", "_")
        short = f"{self.budget:g}"
        budget = (short if float(short) == self.budget else f"{self.budget:.12g}").replace("e+", "e")
        return f"{budget}-{variant}-{size(self.training.model)}-lr{self.training.lr:.3g}-s{self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.training.out)

    @property
    def params(self) -> int:
        return parameters(self.training.model)

    @property
    def tokens(self) -> int:
        return self.training.steps * self.training.batch * self.training.model.context

    @property
    def memory(self) -> float:
        """Bytes needed, about: weights with gradients and two moments, and what layers keep for the backward pass."""
        model, t = self.training.model, self.training
        kept = t.batch // t.accumulate * model.context * (model.layers * 24 * model.dim + 2 * model.vocab)
        return 16.0 * self.params + (2.0 if t.dtype == "bfloat16" else 4.0) * kept

    def described(self) -> dict[str, Any]:
        """The part of the cell's row of results that is known before it is run."""
        model, t = self.training.model, self.training
        return {
            **{"cell": self.name, "budget": self.budget, "variant": self.variant, "params": self.params},
            **{"layers": model.layers, "dim": model.dim, "pattern": model.pattern},
            "capacity": model.capacity if model.routed else 1.0,
            **{"flops_per_token": self.flops / self.tokens, "tokens": self.tokens, "steps": t.steps},
            **{"batch": t.batch, "context": model.context, "lr": t.lr, "seed": self.seed},
        }


def size(model: ModelConfig) -> str:
    """Layers x width."""
    return f"{model.layers}x{model.dim}"


class Ladder:
    """The shapes of a variant, by FLOPs per token."""

    def __init__(self, variant: Variant, vocab: int, context: int) -> None:
        self.variant = variant
        self.shapes: list[ModelConfig] = []
        for dim in [variant.model["dim"]] if "dim" in variant.model else WIDTHS:
            with suppress(InvalidValueError):  # such as more heads of keys than a small model has heads
                shape = variant.shape(dim, vocab, context)
                if not self.shapes or training_flops(shape) > training_flops(self.shapes[-1]):
                    self.shapes.append(shape)
        self.costs = [training_flops(shape) for shape in self.shapes]

    def around(self, cost: float, sizes: int, spread: float) -> list[ModelConfig]:
        """Different shapes at about `cost` FLOPs per token, and at `spread` times more and less."""
        if sizes == len(self.shapes) == 1:
            return self.shapes
        targets = [cost * spread ** (i - (sizes - 1) / 2) for i in range(sizes)]
        places: list[int] = []
        for target in targets:
            near = min(range(len(self.costs)), key=lambda i: abs(math.log(self.costs[i] / target)))
            places.append(max(near, places[-1] + 1 if places else 0))
        if places[-1] >= len(self.shapes) or targets[-1] > 4 * self.costs[-1]:
            raise InvalidValueError(
                f"{self.variant.name} has no model of {targets[-1]:.3g} FLOPs per token: "
                "lower --budgets, --sizes or --spread"
            )
        return [self.shapes[i] for i in places]

    def next(self, shape: ModelConfig, up: bool) -> ModelConfig | None:
        """The neighbour of a shape, if there is one."""
        place = self.shapes.index(shape) + (1 if up else -1)
        return self.shapes[place] if 0 <= place < len(self.shapes) else None


class Grid:
    """Everything that decides the cells of a study: its options, the vocabulary, the device and the learning rates.
    `rates`: variant -> (scale, power) at 1e12 FLOPs, for variants whose rates were found by a sweep."""

    def __init__(
        self,
        config: IsoflopConfig,
        tokenizer: str,
        vocab: int,
        device: str,
        rates: Mapping[str, tuple[float, float]],
    ) -> None:
        self.config, self.tokenizer, self.device, self.rates = config, tokenizer, device, rates
        self.ladders = {v.name: Ladder(v, vocab, config.tokens_in_sequence) for v in config.variant_list}

    def cells(self) -> list[Cell]:
        """The cells that the options ask for; the first seed of all comes before the second of any."""
        return [
            self.cell(budget, name, shape, seed)
            for seed in self.config.seed_list
            for budget in self.config.budget_list
            for name in self.ladders
            for shape in self.shapes(budget, name)
        ]

    def shapes(self, budget: float, variant: str) -> list[ModelConfig]:
        """The models of a variant at a budget."""
        cost = self.config.center * _BEST * math.sqrt(budget)
        return self.ladders[variant].around(cost, self.config.sizes, self.config.spread)

    def cell(
        self, budget: float, variant: str, shape: ModelConfig, seed: int, lr: float | None = None, part: str = CELLS
    ) -> Cell:
        """One cell, or an error that says why it cannot be one."""
        config, cuda = self.config, self.device == "cuda"
        training = TrainConfig(
            data=_absolute(config.data),
            validation=None if config.validation is None else _absolute(config.validation),
            tokenizer=self.tokenizer,
            device=self.device,
            seed=seed,
            model=shape,
            batch=config.batch or batch_for(budget, shape.context),
            lr=lr or config.lr or learning_rate(variant, shape.dim, budget, self.rates),
            dtype="bfloat16" if cuda else "float32",
            workers=1,
            keep=config.points + 1,
            **{"compile": cuda, **self.ladders[variant].variant.training},
        )
        steps, flops = _steps(training, budget)
        every = max(50 if config.points == 1 else 1, -(-steps // max(4, config.points)))
        training = replace(training, steps=steps, warmup=max(1, min(steps // 10, 100)), checkpoint_every=every)
        cell = Cell(budget, variant, seed, training, flops, part)
        return replace(cell, training=replace(training, out=str(Path(config.out).absolute() / part / cell.name)))

    def more(
        self, cells: Sequence[Cell], rows: Sequence[Mapping[str, Any]], check: Callable[[Sequence[Cell]], None]
    ) -> list[Cell]:
        """Cells that the results so far ask for and `cells` lacks: sizes beyond the open end of a curve, and more seeds
        of each minimum. `check` raises where cells cannot be trained."""
        known, done, found = {cell.name for cell in cells}, {row["cell"] for row in rows}, list[Cell]()
        for budget, variant in dict.fromkeys((cell.budget, cell.variant) for cell in cells):
            asked = {cell.name for cell in cells if (cell.budget, cell.variant) == (budget, variant)}
            mine = [row for row in rows if (row["budget"], row["variant"]) == (budget, variant)]
            if asked <= done:  # else some failed
                wanted = self._wanted(budget, variant, mine, check)
                found += next((new for new in wanted if any(cell.name not in known for cell in new)), [])
        return [cell for cell in found if cell.name not in known]

    def _wanted(
        self, budget: float, variant: str, rows: Sequence[Mapping[str, Any]], check: Callable[[Sequence[Cell]], None]
    ) -> Iterator[list[Cell]]:
        """Cells that a variant needs at a budget, in the order in which they are needed, those that are there too."""
        config, ladder = self.config, self.ladders[variant]

        def made(shapes: Sequence[ModelConfig], seeds: Sequence[int]) -> list[Cell]:
            return [self.cell(budget, variant, shape, seed) for shape in shapes for seed in seeds]

        # Includes sizes that were added before a study was interrupted, and that the grid by itself does not have.
        losses = dict(means([(row["params"], row["loss_causal"]) for row in rows]))
        shapes = sorted((shape for shape in ladder.shapes if parameters(shape) in losses), key=parameters)
        yield made(shapes, config.seed_list)
        lowest = min(shapes, key=lambda shape: losses[parameters(shape)])
        end = ladder.next(lowest, up=lowest != shapes[0]) if lowest in (shapes[0], shapes[-1]) else None
        place, asked = ladder.shapes.index, self.shapes(budget, variant)
        beyond = 0 if end is None else max(place(asked[0]) - place(end), place(end) - place(asked[-1]))
        if end is not None and beyond <= config.more_sizes:
            with suppress(DepthgateError):  # a size that cannot be trained is the end of the ladder
                new = made([end], config.seed_list)
                check(new)
                yield new
        # Sizes that have some of the further seeds get all of them, also where these made another size the lowest.
        begun = {row["params"] for row in rows if row["seed"] not in config.seed_list}
        yield made([s for s in shapes if s == lowest or parameters(s) in begun], config.further_seeds)


def _absolute(data: str) -> str:
    """An absolute path, because a worker may have another working folder; a name of a data set as it is."""
    return str(Path(data).absolute()) if Path(data).exists() else data


def batch_for(budget: float, context: int) -> int:
    """Sequences in a step, a power of two: about 1,024 tokens at 1e12 FLOPs, and 16,384 at 1e16. Larger batches cost
    small models a lot (docs/log.md)."""
    return 1 << max(0, round(math.log2(1024 * (budget / 1e12) ** 0.3 / context)))


def total_flops(training: TrainConfig, steps: int) -> float:
    """Training FLOPs of so many steps, a falling capacity included."""
    falling = min(training.capacity_steps, steps) if training.model.routed else 0
    shares = (capacity(training.model.capacity, step, training.capacity_steps) for step in range(falling))
    models = [replace(training.model, capacity=share) for share in shares]
    per_token = sum(map(training_flops, models)) + training_flops(training.model) * (steps - falling)
    return per_token * training.batch * training.model.context


def _steps(training: TrainConfig, budget: float) -> tuple[int, float]:
    """The steps whose FLOPs come nearest to the budget, and these FLOPs."""
    each = total_flops(replace(training, capacity_steps=0), 1)
    steps = round(budget / each)
    while steps > 1 and total_flops(training, steps) > budget + each / 2:
        steps -= max(1, int((total_flops(training, steps) - budget) / each))
    flops = total_flops(training, steps)
    about = f"budgets has {budget:g}: a step of the {size(training.model)} model"
    if steps < 1 or abs(flops / budget - 1) > TOLERANCE:
        raise InvalidValueError(
            f"{about}, {training.batch} x {training.model.context} tokens, takes {each:.3g} FLOPs, so no number of "
            f"steps comes within {TOLERANCE:.0%} of it; raise the budget or lower --context"
        )
    if steps > _MOST_STEPS:
        raise InvalidValueError(f"{about} takes {each:.3g} FLOPs, so {steps:,} are needed; lower it or raise --batch")
    return steps, flops


def check_fits(cells: Sequence[Cell], device: str, at_once: int = 1) -> None:
    """Refuse cells that need more memory than this machine has, `at_once` of them at a time."""
    if device == "cuda":
        have = float(torch.cuda.get_device_properties(0).total_memory)
    else:
        have = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    large = max(cells, key=lambda cell: cell.memory)
    if large.memory * at_once > have:
        raise DepthgateError(
            f"{large.name} has {large.params:,} weights and needs about {large.memory / 2**30:,.0f} GiB "
            f"({at_once} at a time), and there are {have / 2**30:,.0f}: lower --parallel, --batch or --budgets"
        )


def learning_rate(variant: str, dim: int, budget: float, rates: Mapping[str, tuple[float, float]]) -> float:
    """The rate of a variant at a width and budget, by its own sweep or by the rule for all."""
    scale, power = rates.get(variant, _SCALE_AND_POWER)
    return float(f"{scale * (dim / 128) ** power * (budget / 1e12) ** _BUDGET_POWER:.3g}")


def best_rate(losses: Mapping[float, float]) -> float:
    """rate -> loss: the minimum of the parabola through the best rate and its neighbours, in the logarithm of the rate;
    the best rate itself where it is the first or last one tried."""
    rates = sorted(losses)
    best = min(rates, key=lambda rate: losses[rate])
    near = rates[max(0, rates.index(best) - 1) : rates.index(best) + 2]
    found = parabolas(near, [[losses[rate] for rate in near]])[0] if len(near) == 3 else None
    return math.exp(found.at) if found else best


def further_rates(losses: Mapping[float, float], tried: Sequence[float]) -> list[float]:
    """The next rate to try: one beyond the best, where that is the lowest or highest of those with a loss and one of
    those tried last; none where it is not, or where enough have been tried."""
    best = min(losses, key=lambda rate: losses[rate], default=None)
    if best is None or best not in tried or len(losses) >= _MOST_RATES:
        return []
    return [best / 2] if best == min(losses) else [best * 2] if best == max(losses) else []


def fit_rates(best: Sequence[tuple[int, float]], budget: float) -> tuple[float, float]:
    """(width, best rate) of each size at a budget -> scale at 1e12 FLOPs, and power within reason, by least squares of
    logarithms."""
    x, y = [math.log(dim / 128) for dim, _ in best], [math.log(rate) for _, rate in best]
    power = linear_regression(x, y).slope if len(set(x)) > 1 else 0.0
    power = min(max(power, _POWERS[0]), _POWERS[1])
    return math.exp(fmean(y) - power * fmean(x)) / (budget / 1e12) ** _BUDGET_POWER, power
