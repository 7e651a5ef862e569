"""The cells of a study: which models are trained, for how many steps, at which learning rate. Nothing is run here."""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from depthgate.config import ModelConfig, TrainConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.flops import parameters, training_flops
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.rates import Rates
from depthgate.isoflop.variants import Variant, widths

TOLERANCE = 0.03  # of the budget, that a cell's FLOPs may be off
CELLS = "cells"
# FLOPs a token at which a budget's best model is expected: _BEST * sqrt(budget).
_BEST = 0.56
_MOST_STEPS = 2**31 - 1


@dataclass(frozen=True)
class Cell:
    """One training run."""

    budget: float
    variant: str
    seed: int
    training: TrainConfig
    flops: float  # of the whole run
    part: str = CELLS  # the folder of the study that it is in

    @property
    def name(self) -> str:
        """Of its folder: unique within the part of the study."""
        model = self.training.model
        size = f"{model.layers}x{model.dim}"
        variant = self.variant.replace(":", "_").replace("=", "-").replace("+", "_")
        short = f"{self.budget:g}"
        budget = (short if float(short) == self.budget else f"{self.budget:.12g}").replace("e+", "e")
        return f"{budget}-{variant}-{size}-lr{self.training.lr:.3g}-s{self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.training.out)

    @property
    def params(self) -> int:
        return parameters(self.training.model)

    @property
    def tokens(self) -> int:
        t = self.training
        return t.steps * t.batch * t.model.context


class Ladder:
    """The shapes of a variant, by FLOPs a token."""

    def __init__(self, variant: Variant, vocab: int, context: int) -> None:
        self.variant = variant
        self.shapes: list[ModelConfig] = []
        for dim in widths():
            with suppress(InvalidValueError):  # such as more heads of keys than a small model has heads
                shape = variant.shape(dim, vocab, context)
                if not self.shapes or training_flops(shape) > training_flops(self.shapes[-1]):
                    self.shapes.append(shape)
        self.costs = [training_flops(shape) for shape in self.shapes]

    def around(self, cost: float, sizes: int, spread: float) -> list[ModelConfig]:
        """Shapes at about `cost` FLOPs a token, and at `spread` times more and less; all different."""
        targets = [cost * spread ** (i - (sizes - 1) / 2) for i in range(sizes)]
        places: list[int] = []
        for target in targets:
            near = min(range(len(self.costs)), key=lambda i: abs(math.log(self.costs[i] / target)))
            places.append(max(near, places[-1] + 1 if places else 0))
        if places[-1] >= len(self.shapes) or targets[-1] > 4 * self.costs[-1]:
            raise InvalidValueError(
                f"{self.variant.name} has no model of {targets[-1]:.3g} FLOPs a token: "
                "lower --budgets, --sizes or --spread"
            )
        return [self.shapes[i] for i in places]

    def next(self, shape: ModelConfig, up: bool) -> ModelConfig | None:
        """The neighbour of a shape, if there is one."""
        place = self.shapes.index(shape) + (1 if up else -1)
        return self.shapes[place] if 0 <= place < len(self.shapes) else None


class Grid:
    """All that decides the cells of a study: its options, the vocabulary, the device and the learning rates."""

    def __init__(self, config: IsoflopConfig, tokenizer: str, vocab: int, device: str, rates: Rates) -> None:
        self.config, self.tokenizer, self.device, self.rates = config, tokenizer, device, rates
        self.ladders = {v.name: Ladder(v, vocab, config.tokens_in_sequence) for v in config.variant_list}

    def cells(self) -> list[Cell]:
        """The first seed of everything comes before the second of anything."""
        config = self.config
        shapes = {(budget, name): self._shapes(budget, name) for budget in config.budget_list for name in self.ladders}
        return [
            self.cell(budget, name, shape, seed)
            for seed in range(config.seeds)
            for (budget, name), found in shapes.items()
            for shape in found
        ]

    def _shapes(self, budget: float, variant: str) -> list[ModelConfig]:
        config = self.config
        cost = config.center * _BEST * math.sqrt(budget)
        return self.ladders[variant].around(cost, config.sizes, config.spread)

    def beyond(self, budget: float, variant: str, shape: ModelConfig) -> int:
        """How many steps of the ladder a shape lies below the smallest or above the largest one asked for."""
        ladder, asked = self.ladders[variant].shapes, self._shapes(budget, variant)
        place = ladder.index(shape)
        return max(ladder.index(asked[0]) - place, place - ladder.index(asked[-1]), 0)

    def cell(
        self, budget: float, variant: str, shape: ModelConfig, seed: int, lr: float | None = None, part: str = CELLS
    ) -> Cell:
        """One cell, or an error that says why there can be none."""
        config = self.config
        options = self.ladders[variant].variant.training
        cuda = self.device == "cuda"
        training = TrainConfig(
            data=_full(config.data),
            validation=None if config.validation is None else _full(config.validation),
            tokenizer=self.tokenizer,
            device=self.device,
            seed=seed,
            model=shape,
            batch=config.batch or batch_for(budget, shape.context),
            lr=lr or config.lr or self.rates.of(variant, shape.dim, budget),
            dtype="bfloat16" if cuda else "float32",
            workers=1,
            **{"compile": cuda, **options},
        )
        steps, flops = _steps(training, budget)
        if steps > _MOST_STEPS:
            raise InvalidValueError(
                f"budgets has {budget:g}: that is {steps:,} steps of the {shape.layers}x{shape.dim} model, and "
                f"{_MOST_STEPS:,} are the most; lower it or raise --batch"
            )
        training = replace(
            training, steps=steps, warmup=max(1, min(steps // 10, 100)), checkpoint_every=max(50, -(-steps // 4))
        )
        cell = Cell(budget, variant, seed, training, flops, part)
        return replace(cell, training=replace(training, out=str(Path(config.out).absolute() / part / cell.name)))


def _full(data: str) -> str:
    """A path from the root on, as a worker may have another working folder; a name as it is."""
    return str(Path(data).absolute()) if Path(data).exists() else data


def batch_for(budget: float, context: int) -> int:
    """Sequences in a step: about 1,024 tokens at 1e12 FLOPs, and 16,384 at 1e16; a power of two. Twice as many and more
    cost small models a lot (docs/log.md)."""
    sequences = 1024 * (budget / 1e12) ** 0.3 / context
    return 1 << max(0, round(math.log2(sequences)))


def total_flops(training: TrainConfig, steps: int) -> float:
    """Training FLOPs of so many steps, a falling capacity included."""
    tokens = training.batch * training.model.context
    falling = min(training.capacity_steps, steps) if training.model.routed else 0
    total = 0.0
    if falling:
        from depthgate.train.optim import capacity

        for step in range(falling):
            share = capacity(training.model.capacity, step, training.capacity_steps)
            total += training_flops(replace(training.model, capacity=share)) * tokens
    return total + training_flops(training.model) * tokens * (steps - falling)


def _steps(training: TrainConfig, budget: float) -> tuple[int, float]:
    """The steps whose FLOPs come nearest to the budget, and these FLOPs."""
    each = total_flops(replace(training, capacity_steps=0), 1)
    steps = round(budget / each)
    while steps > 1 and total_flops(training, steps) > budget + each / 2:
        steps -= max(1, int((total_flops(training, steps) - budget) / each))
    flops = total_flops(training, steps)
    if steps < 1 or abs(flops / budget - 1) > TOLERANCE:
        size = f"{training.model.layers}x{training.model.dim}"
        raise InvalidValueError(
            f"budgets has {budget:g}: a step of the {size} model, {training.batch} x {training.model.context} tokens, "
            f"takes {each:.3g} FLOPs, so no number of steps comes within {TOLERANCE:.0%} of it; raise the budget or "
            "lower --context"
        )
    return steps, flops


def memory(cell: Cell) -> float:
    """Bytes a cell needs, about: weights with gradients and two moments, and what layers keep for the backward pass."""
    model, t = cell.training.model, cell.training
    kept = t.batch // t.accumulate * model.context * (model.layers * 24 * model.dim + 2 * model.vocab)
    return 16.0 * cell.params + (2.0 if t.dtype == "bfloat16" else 4.0) * kept


def check_fits(cells: Sequence[Cell], device: str, at_once: int = 1) -> None:
    """Refuse cells that no memory here holds, `at_once` of them at a time."""
    if device == "cuda":
        import torch

        have = float(torch.cuda.get_device_properties(0).total_memory)
    else:
        have = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    large = max(cells, key=memory)
    if memory(large) * at_once > have:
        raise DepthgateError(
            f"{large.name} has {large.params:,} weights and needs about {memory(large) / 2**30:,.0f} GiB "
            f"({at_once} at a time), and there are {have / 2**30:,.0f}: lower --parallel, --batch or --budgets"
        )


def described(cell: Cell) -> dict[str, Any]:
    """What a row of results says before anything was run."""
    model, t = cell.training.model, cell.training
    return {
        "cell": cell.name,
        "budget": cell.budget,
        "variant": cell.variant,
        "params": cell.params,
        "layers": model.layers,
        "dim": model.dim,
        "pattern": model.pattern,
        "capacity": model.capacity if model.routed else 1.0,
        "flops_per_token": cell.flops / cell.tokens,
        "tokens": cell.tokens,
        "steps": t.steps,
        "batch": t.batch,
        "context": model.context,
        "lr": t.lr,
        "seed": cell.seed,
    }
