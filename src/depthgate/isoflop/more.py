"""Cells that what is known now asks for: sizes beyond the open end of a curve, and more seeds of each minimum."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from depthgate.errors import DepthgateError
from depthgate.flops import parameters
from depthgate.isoflop import fit
from depthgate.isoflop.grid import Cell, Grid

Row = Mapping[str, Any]


def more_cells(
    grid: Grid, cells: Sequence[Cell], rows: Sequence[Row], check: Callable[[Sequence[Cell]], None]
) -> list[Cell]:
    """Those that are not among `cells` yet. `check` raises where cells cannot be trained."""
    known, done = {cell.name for cell in cells}, {row["cell"] for row in rows}
    found: list[Cell] = []
    for budget, variant in dict.fromkeys((cell.budget, cell.variant) for cell in cells):
        asked = [cell for cell in cells if (cell.budget, cell.variant) == (budget, variant)]
        if all(cell.name in done for cell in asked):  # else some failed
            mine = [row for row in rows if (row["budget"], row["variant"]) == (budget, variant)]
            found += _of_curve(grid, asked, mine, check)
    return [cell for cell in found if cell.name not in known]


def _of_curve(
    grid: Grid, asked: Sequence[Cell], rows: Sequence[Row], check: Callable[[Sequence[Cell]], None]
) -> list[Cell]:
    """What one variant lacks at one budget; perhaps cells that are there already."""
    config, budget, variant = grid.config, asked[0].budget, asked[0].variant
    ladder, sizes = grid.ladders[variant], {row["params"] for row in rows}
    # Also sizes that were added before a study was interrupted, and that the grid by itself does not have.
    shapes = sorted((shape for shape in ladder.shapes if parameters(shape) in sizes), key=parameters)
    known = {cell.name for cell in asked}
    cells = [grid.cell(budget, variant, shape, seed) for shape in shapes for seed in range(config.seeds)]
    if any(cell.name not in known for cell in cells):
        return cells
    losses = dict(fit.means([(row["params"], row["loss_causal"]) for row in rows]))
    lowest = min(range(len(shapes)), key=lambda i: losses[parameters(shapes[i])])
    end = ladder.next(shapes[lowest], up=lowest > 0) if lowest in (0, len(shapes) - 1) else None
    if end is not None and grid.beyond(budget, variant, end) <= config.more_sizes:
        with suppress(DepthgateError):  # a size that cannot be trained is the end of the ladder
            new = [grid.cell(budget, variant, end, seed) for seed in range(config.seeds)]
            check(new)
            return new
    seeds = range(config.seeds, config.seeds_at_minimum or config.seeds)
    # Those that have some of them already get all, also where they made another size the lowest.
    begun = {row["params"] for row in rows if row["seed"] >= config.seeds}
    chosen = [shape for i, shape in enumerate(shapes) if i == lowest or parameters(shape) in begun]
    return [grid.cell(budget, variant, shape, seed) for shape in chosen for seed in seeds]
