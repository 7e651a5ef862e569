"""Plans alone, without a model or a text: what `plans.plot()` and `plans.save_page()` show."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from depthgate.errors import DepthgateError, check_count
from depthgate.routing.plan import Plan, Slots
from depthgate.view.experts import ExpertLayer, SlotLayer, check_grid, plan_experts
from depthgate.view.routes import Routes, routes_of_plans

Grid = tuple[int, int]


class Seen(NamedTuple):
    """One row of a batch, by kind of plan; layers are numbered by the place of their plan, from 1."""

    routes: Routes | None
    experts: list[ExpertLayer]
    slots: list[SlotLayer]


def seen(plans: Sequence[Plan], tokens: Sequence[str] | None, grid: Grid | None, row: int) -> Seen:
    """What plans say of a row of their batch."""
    if not plans:
        raise DepthgateError("there are no plans: no layer of the model routes")
    rows = min(plan.scores.shape[0] for plan in plans)
    check_count(row, "row", minimum=0, maximum=rows - 1)
    length = max(plan.scores.shape[1] for plan in plans)
    if tokens is not None and len(tokens) != length:
        raise DepthgateError(f"there are {len(tokens)} tokens, and plans for {length}: they are of another text")
    # Within a routed layer, others see the routed tokens alone; those plans have no place on a map of all tokens.
    depth = [(i, p) for i, p in enumerate(plans, 1) if isinstance(p, Slots) and p.scores.shape[1:] == (length, 1)]
    found = [plan_experts(i, plan, row) for i, plan in enumerate(plans, 1)]
    slots = [each for each in found if isinstance(each, SlotLayer)]
    check_grid(grid, slots)
    map_of = routes_of_plans([i for i, _ in depth], [p for _, p in depth], tokens, len(plans), row) if depth else None
    return Seen(map_of, [each for each in found if isinstance(each, ExpertLayer)], slots)


def save_page(
    plans: Sequence[Plan], path: str | Path, tokens: Sequence[str] | None, grid: Grid | None, row: int
) -> None:
    """One self-contained page."""
    from depthgate.files import check_out, write
    from depthgate.view.routes_page import plans_page

    out = check_out(Path(path))
    found = seen(plans, tokens, grid, row)
    write(out, plans_page(found.routes, found.experts, found.slots, grid, tokens))
