"""Cells that are added to a study as its losses come in: the same ones, wherever it was interrupted."""

import math
from concurrent.futures import Future
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from depthgate.errors import DepthgateError
from depthgate.flops import parameters
from depthgate.isoflop import cell as cell_module
from depthgate.isoflop import fit
from depthgate.isoflop.cell import launch
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.grid import Grid


def made(**options):
    return Grid(IsoflopConfig(budgets=1e10, variants="dense", context=32, **options), "bytes", 257, "cpu", {})


def rows_of(cells, best):
    """As if each had been trained: losses of a parabola around `best` weights, and a little for the seed."""
    return [
        {
            "cell": cell.name,
            "budget": cell.budget,
            "variant": cell.variant,
            "params": cell.params,
            "seed": cell.seed,
            "loss_causal": 2 + 0.01 * math.log(cell.params / best) ** 2 + 1e-6 * cell.seed,
        }
        for cell in cells
    ]


def whole(grid, rows, best, stop=None):
    """Run a study to its end, or until it has `stop` rows more: all rows."""
    cells, rows, new = grid.cells(), list(rows), 0
    todo = cells
    while todo:
        for cell in todo:
            if cell.name not in {row["cell"] for row in rows}:
                if new == stop:
                    return rows
                rows += rows_of([cell], best)
                new += 1
        todo = grid.more(cells, rows, lambda _: None)
        cells = [*cells, *todo]
    return rows


def trainable(grid, shape):
    """Whether there is such a size, and a number of steps that comes near the budget."""
    try:
        return shape is not None and bool(grid.cell(1e10, "dense", shape, 0))
    except DepthgateError:
        return False


@settings(deadline=None, max_examples=60)
@given(st.floats(3e3, 3e6), st.integers(0, 4), st.integers(1, 2), st.integers(0, 2), st.integers(0, 14))
def test_an_interrupted_study_ends_as_one_that_was_not(best, more_sizes, seeds, further, stop):
    grid = made(sizes=3, more_sizes=more_sizes, seeds=seeds, seeds_at_minimum=seeds + further)
    unbroken = whole(grid, [], best)
    again = whole(grid, whole(grid, [], best, stop), best)
    assert {row["cell"] for row in again} == {row["cell"] for row in unbroken}
    sizes = sorted({row["params"] for row in unbroken})
    assert 3 <= len(sizes) <= 3 + more_sizes
    losses = [(row["params"], row["loss_causal"]) for row in unbroken]
    lowest = min(fit.means(losses), key=lambda mean: mean[1])[0]
    assert sum(row["params"] == lowest for row in unbroken) == seeds + further
    for size in sizes:
        count = sum(row["params"] == size for row in unbroken)
        near = abs(math.log(size / best)) - abs(math.log(lowest / best)) < 1e-3  # it was the lowest, before its seeds
        assert count in ((seeds, seeds + further) if near else (seeds,))
    ladder = grid.ladders["dense"]
    end = [parameters(shape) for shape in ladder].index(lowest) + (-1 if lowest == sizes[0] else 1)
    beyond = ladder[end] if 0 <= end < len(ladder) else None
    assert lowest not in (sizes[0], sizes[-1]) or len(sizes) == 3 + more_sizes or not trainable(grid, beyond)


def test_more_sizes_may_be_asked_for_later():
    few, many = (made(sizes=3, more_sizes=n) for n in (1, 4))
    first = whole(few, [], 2e3)
    assert {row["cell"] for row in whole(many, first, 2e3)} == {row["cell"] for row in whole(many, [], 2e3)}


def test_a_curve_with_a_failed_cell_is_left_alone():
    grid = made(sizes=3, more_sizes=2)
    cells = grid.cells()
    assert grid.more(cells, rows_of(cells[:-1], 1.0), lambda _: None) == []


def test_a_size_that_does_not_fit_is_the_end():
    grid = made(sizes=3, more_sizes=2)

    def full(_):
        raise DepthgateError("no room")

    assert grid.more(grid.cells(), rows_of(grid.cells(), 1e9), full) == []


def test_sizes_of_an_earlier_center_do_not_count_as_added_ones():
    best, there = 2e3, made(sizes=3, center=8.0)
    earlier = whole(there, [], best)
    fresh = whole(made(sizes=3, center=4.0, more_sizes=2), [], best)
    grown = whole(made(sizes=3, center=4.0, more_sizes=2), earlier, best)
    assert {row["cell"] for row in grown} == {row["cell"] for row in (*fresh, *earlier)}


def test_cells_that_a_finished_curve_asks_for_begin_beside_those_of_others(monkeypatch):
    """By a launcher whose cells end at once, but for one, which ends when another has begun beside it."""
    grid = made(sizes=1, seeds_at_minimum=2, calibrate=False)
    (first,) = cells = grid.cells()
    slow = grid.cell(1e10, "dense", grid.ladders["dense"][1], 7)
    futures, beside = {}, []

    @contextmanager
    def start(*_):
        def submit(new):
            beside.append([name for name, future in futures.items() if not future.done()])
            futures.update((cell.name, Future()) for cell in new)
            ending = [cell for cell in new if cell != slow] if slow in new else [*new, slow]
            for cell in ending:
                futures[cell.name].set_result(*rows_of([cell], cell.params))
            return [futures[cell.name] for cell in new]

        yield submit

    monkeypatch.setattr(cell_module, "_processes", start)
    rows = []

    def more():
        cells.extend(new := grid.more(cells, rows, lambda _: None))
        return new

    for cell, row in launch([first, slow], grid.config, 2, more):
        rows.extend([row] if cell != slow else [])
    assert beside == [[], [slow.name]]
    assert [row["seed"] for row in rows] == [0, 1]
