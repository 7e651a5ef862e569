"""Plans, texts and runs as pages and pictures. `plot` and `save_page` show plans alone, without a model or a text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthgate.routing.plan import Plan


def plot(
    plans: "Sequence[Plan]",
    tokens: Sequence[str] | None = None,
    grid: tuple[int, int] | None = None,
    row: int = 0,
    *,
    prefix: int = 0,
    causal_rule: bool = False,
    names: Sequence[str] | None = None,
    image: Any = None,
    title: str = "",
) -> Any:
    """A matplotlib figure of what a pass computed for one row of the batch: which tokens went through which layers, the
    load of experts, the slots of Soft MoE.

    tokens: their texts. grid: rows and columns, where tokens are patches of an image, with a `prefix` of so many other
    tokens (class and registers) before them, and the image itself as a tensor (3, height, width). causal_rule: also
    show what the causal rule would choose, next to the top k. names: of the layers; numbers from 0 unless given.
    """
    from depthgate.view.figures import plans_figure
    from depthgate.view.routes import image_of, plan_decisions

    found = plan_decisions(plans, tokens, grid, row, prefix, causal_rule, names)
    return plans_figure(found, image_of(grid, prefix, image), title)


def save_page(
    plans: "Sequence[Plan]",
    path: str | Path,
    tokens: Sequence[str] | None = None,
    grid: tuple[int, int] | None = None,
    row: int = 0,
    *,
    prefix: int = 0,
    causal_rule: bool = False,
    names: Sequence[str] | None = None,
    image: Any = None,
    title: str = "What the layers did with one sample",
) -> None:
    """The same as one self-contained HTML page, with every number."""
    from depthgate.files import write
    from depthgate.view.page import check_replaces
    from depthgate.view.routes import image_of, plan_decisions
    from depthgate.view.routes_page import plans_page

    check_replaces(Path(path))
    found = plan_decisions(plans, tokens, grid, row, prefix, causal_rule, names)
    write(Path(path), plans_page(title, found, image_of(grid, prefix, image), tokens))
