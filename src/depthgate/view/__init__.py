"""Plans, texts and runs as pages and pictures. `plot` and `save_page` show plans alone, without a model or a text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthgate.routing.plan import Plan

Words = Sequence[str] | None
Grid = tuple[int, int] | None


def plot(plans: "Sequence[Plan]", tokens: Words = None, grid: Grid = None, row: int = 0) -> Any:
    """A matplotlib figure of one row of the batch: which tokens went through which layers, the load of experts, the
    slots of Soft MoE. tokens: their texts; grid: rows and columns, where tokens are patches of an image."""
    from depthgate.view.figures import plans_figure
    from depthgate.view.routes import plan_decisions

    return plans_figure(plan_decisions(plans, tokens, grid, row), grid)


def save_page(plans: "Sequence[Plan]", path: str | Path, tokens: Words = None, grid: Grid = None, row: int = 0) -> None:
    """The same as one self-contained HTML page, with every number."""
    from depthgate.files import write
    from depthgate.view.routes import plan_decisions
    from depthgate.view.routes_page import plans_page

    write(Path(path), plans_page(plan_decisions(plans, tokens, grid, row), grid, tokens))
