"""The same as pictures for papers and notebooks, by matplotlib."""

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from depthgate.errors import DepthgateError
from depthgate.files import write
from depthgate.view.experts import ExpertLayer, SlotLayer
from depthgate.view.page import pieces
from depthgate.view.plans import Grid, Seen
from depthgate.view.routes import Routes
from depthgate.view.runs import Run
from depthgate.view.runs_page import lines, resume_marks, shares, unit

# skipped; by the top k alone; by the causal rule alone; by both: the colours of the pages
_CELLS = ("#eef1f4", "#187a4b", "#b4480f", "#1f5fbf")
_NAMES = ("skipped", "top k alone", "causal alone", "both")
_NAMED = 48  # tokens that have room for their names


def new_figure(width: float, height: float) -> Any:
    """A figure that no window or backend knows of, and that a notebook shows."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DepthgateError("matplotlib is missing: pip install 'depthgate[plot]'") from None

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            return figure_bytes(self, "png")

    return Picture(figsize=(width, height), layout="constrained")


def figure_bytes(figure: Any, kind: str) -> bytes:
    """A file's content: png or svg."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a token that no font has is drawn as a box
        figure.savefig(file, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def save(figure: Any, png: str | None, svg: str | None) -> None:
    """The files that are named."""
    for kind, out in (("png", png), ("svg", svg)):
        if out is not None:
            write(Path(out), figure_bytes(figure, kind))


def plans_figure(found: Seen, grid: Grid | None) -> Any:
    """A panel for each layer with experts, and one map for all layers that tokens skip."""
    busy = [layer for layer in found.experts if layer.used]  # no panel where no token came
    if not (found.routes or busy or found.slots):
        raise DepthgateError("no token came to any expert: there is nothing to draw")
    rows = (0.3 * len(found.routes.layers) + 1.6) if found.routes else 0.0
    heights = [rows] * bool(found.routes) + [2.4] * len(busy)
    heights += [_slots_height(layer, grid) for layer in found.slots]
    figure = new_figure(9, sum(heights))
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if found.routes:
        _draw_map(parts.pop(0), found.routes)
    for layer in busy:
        _draw_load(parts.pop(0).add_subplot(), layer)
    for slots in found.slots:
        _draw_slots(parts.pop(0), slots, grid)
    return figure


def routes_figure(found: Routes, experts: Sequence[ExpertLayer]) -> Any:
    """The map of a text, and the load of its experts."""
    if not found.layers and not experts:
        raise DepthgateError("this model has no routed layers and no experts: there is nothing to draw")
    return plans_figure(Seen(found if found.layers else None, list(experts), []), None)


def _draw_map(part: Any, found: Routes) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    axes, side = part.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    cells = [[2 * a + b for a, b in zip(x, y, strict=True)] for x, y in zip(found.causal, found.top_k, strict=True)]
    axes.imshow(cells, cmap=ListedColormap(_CELLS), vmin=0, vmax=3, aspect="auto", interpolation="nearest")
    axes.set(ylabel="layer", yticks=range(len(found.layers)), yticklabels=found.layers)
    if len(found.tokens) <= _NAMED:
        names = [piece.heading for piece in pieces(found.tokens)]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7, parse_math=False)
    else:
        axes.set_xlabel("token")
    used = sorted({cell for row in cells for cell in row})
    keys = [Patch(color=_CELLS[n], label=_NAMES[n]) for n in used]
    part.legend(handles=keys, loc="outside upper center", ncols=4, frameon=False)
    side.barh(range(len(found.layers)), found.shares(found.causal), color=_CELLS[3])
    side.set(xlabel="routed share")
    side.grid(alpha=0.3, axis="x")


def _draw_load(axes: Any, layer: ExpertLayer) -> None:
    names = [*map(str, range(layer.experts)), *["null"] * bool(layer.null_experts)]
    axes.bar(names, [*layer.load, *[layer.null_share] * bool(layer.null_experts)], color=_CELLS[3])
    if total := layer.experts + layer.null_experts:
        axes.axhline(1 / total, color=_CELLS[2], linestyle="--", linewidth=1)
    axes.set(title=f"layer {layer.layer}: load of the experts", ylabel="share of choices")


def _slots_shape(layer: SlotLayer) -> tuple[int, int]:
    many = len(layer.into)
    wide = min(8, many)
    return -(-many // wide), wide


def _slots_height(layer: SlotLayer, grid: Grid | None) -> float:
    return 0.6 + 1.35 * _slots_shape(layer)[0] if grid else 2.8


def _draw_slots(part: Any, layer: SlotLayer, grid: Grid | None) -> None:
    if grid is None:
        axes = part.add_subplot()
        axes.imshow(layer.into, aspect="auto", cmap="magma", interpolation="nearest")
        axes.set(title=f"layer {layer.layer}: how much of each token a slot holds", xlabel="token", ylabel="slot")
        return
    part.suptitle(f"layer {layer.layer}: how much of each patch a slot holds", fontsize=10)
    high = max((weight for row in layer.into for weight in row if math.isfinite(weight)), default=1.0)
    for number, axes in enumerate(part.subplots(*_slots_shape(layer), squeeze=False).flat):
        axes.set_axis_off()
        if number < len(layer.into):
            row = layer.into[number]
            image = [row[i : i + grid[1]] for i in range(0, len(row), grid[1])]
            axes.imshow(image, cmap="magma", vmin=0, vmax=high, interpolation="nearest")
            axes.set_title(f"expert {number // layer.slots}, slot {number % layer.slots}", fontsize=7)


def runs_figure(runs: Sequence[Run]) -> Any:
    """Loss against steps and FLOPs, routed share, throughput."""
    figure = new_figure(10, 7 + 0.2 * len(runs))
    panels = figure.subplots(2, 2)
    for axes, axis in zip(panels[0], ("step", "flops"), strict=True):
        _draw_lines(axes, lines(runs, axis, "loss")[0])
        for number, points in enumerate(resume_marks(runs, axis).values()):
            if points:
                axes.plot(*zip(*points, strict=True), "D", color=f"C{number}", markersize=5)
        axes.set(xlabel=unit(runs, axis)[1], ylabel="training loss, nats a token")
    drawn = _draw_lines(panels[1][0], shares(runs, "step"))
    panels[1][0].set(xlabel="steps", ylabel="routed share")
    if len(runs) == 1 and drawn:  # lines of layers, and not of runs
        _legend(panels[1][0], drawn, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    _draw_lines(panels[1][1], lines(runs, "step", "tokens_per_second")[0])
    panels[1][1].set(xlabel="steps", ylabel="tokens a second")
    for axes in panels[1]:  # from 0 to above the highest: no line lies on the border
        axes.set_ylim(0, 1.08 * max((y for line in axes.lines for y in line.get_ydata() if y == y), default=1) or 1)
    from matplotlib.lines import Line2D

    keys = {run.name: Line2D([], [], color=f"C{number}") for number, run in enumerate(runs)}
    if any(run.resumed for run in runs):
        keys["resumed"] = Line2D([], [], color="gray", marker="D", linestyle="none")
    _legend(figure, keys, loc="outside lower center", ncols=min(4, max(1, 100 // max(map(len, keys)))))
    return figure


def _draw_lines(axes: Any, found: Any) -> dict[str, Any]:
    """Lines by name; one without points keeps its colour from others."""
    drawn = {
        name: axes.plot(*zip(*points, strict=True), linewidth=1.4, color=f"C{number}")[0]
        for number, (name, points) in enumerate(found.items())
        if points
    }
    axes.grid(alpha=0.3)
    return drawn


def _legend(where: Any, keys: dict[str, Any], **how: Any) -> None:
    """Beside the curves, and not over them. Names are no formulas."""
    names = [f" {name}" for name in keys]  # one that begins with _ would be left out
    for text in where.legend(list(keys.values()), names, frameon=False, fontsize=8, **how).get_texts():
        text.set_parse_math(False)
