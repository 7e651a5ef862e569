"""Pictures of plans and runs for papers and notebooks, by matplotlib."""

import io
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from depthgate.errors import DepthgateError
from depthgate.view.page import pieces
from depthgate.view.routes import Decisions, ExpertLayer, Grid, SlotLayer
from depthgate.view.runs import Run, charts

# name -> colour, as on pages; a cell is 1 by the top k, plus 2 by the causal rule; 4 where only that is known
_CELLS = {"skipped": "#eef1f4", "top k alone": "#187a4b", "causal alone": "#b4480f", "both": "#1f5fbf"}
_CELLS |= {"computed causally": "#9a2f86"}
_ORANGE, _BLUE = _CELLS["causal alone"], _CELLS["both"]
_NAMED = 48  # tokens that have room for their names


def new_figure(width: float, height: float) -> Any:
    """A figure without a window or a backend, which a notebook shows."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DepthgateError("matplotlib is missing: pip install 'depthgate[plot]'") from None

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            return figure_bytes(self, "png")

    return Picture(figsize=(width, height), layout="constrained")


def figure_bytes(figure: Any, kind: str) -> bytes:
    """Content of a png or svg file."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a token that no font has is drawn as a box
        figure.savefig(file, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def plans_figure(found: Decisions, grid: Grid | None, prefix: int = 0) -> Any:
    """One map for all layers that tokens skip, and a panel for each layer with experts that tokens came to."""
    panels: list[tuple[float, Callable[[Any], None]]] = []  # height, and what draws
    if found.layers and grid is None:
        panels.append((0.3 * len(found.layers) + 1.6, partial(_draw_map, found)))
    elif found.layers and grid is not None:
        panels.append((1.0 + 1.6 * -(-len(found.layers) // 6), partial(_draw_patches, found, grid, prefix)))
    panels += [(2.4, partial(_draw_load, layer)) for layer in found.experts if layer.used]
    for layer in found.slots:
        height = 2.8 if grid is None else 0.6 + 1.35 * -(-len(layer.into) // 8)
        panels.append((height, partial(_draw_slots, layer, grid, prefix)))
    if not panels:
        raise DepthgateError("no layer is routed and no token came to any expert: there is nothing to draw")
    heights = [height for height, _ in panels]
    figure = new_figure(9, sum(heights))
    parts = figure.subfigures(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (_, draw) in zip(parts, panels, strict=True):
        draw(part)
    return figure


def _cells(found: Decisions) -> list[list[int]]:
    """For each layer and token, a number of _CELLS."""
    plain = 4 if found.compared else 3
    return [
        [2 * a + b if each.compared else plain * a for a, b in zip(each.causal, each.top_k, strict=True)]
        for each in found.layers
    ]


def _draw_key(found: Decisions, part: Any) -> None:
    from matplotlib.patches import Patch

    used = {cell for row in _cells(found) for cell in row}
    keys = [(n, name, colour) for n, (name, colour) in enumerate(_CELLS.items()) if n in used]
    names = {} if found.compared else {"both": "computed"}
    handles = [Patch(color=colour, label=names.get(name, name)) for _, name, colour in keys]
    part.legend(handles=handles, loc="outside upper center", ncols=len(_CELLS), frameon=False)


def _draw_map(found: Decisions, part: Any) -> None:
    from matplotlib.colors import ListedColormap

    axes, side = part.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    colours = ListedColormap([*_CELLS.values()])
    axes.imshow(_cells(found), cmap=colours, vmin=0, vmax=len(_CELLS) - 1, aspect="auto", interpolation="nearest")
    axes.set(xlabel="token", ylabel="layer")
    axes.set_yticks(range(len(found.layers)), found.names, parse_math=False)
    if len(found.tokens) <= _NAMED:
        names = [piece.heading for piece in pieces(found.tokens)]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7, parse_math=False)
    _draw_key(found, part)
    side.barh(range(len(found.layers)), [layer.routed_share for layer in found.layers], color=_BLUE)
    side.set(xlabel="share computed", xlim=(0, 1))
    side.grid(alpha=0.3, axis="x")


def _draw_patches(found: Decisions, grid: Grid, prefix: int, part: Any) -> None:
    """For each layer, which patches of the image it computed."""
    from matplotlib.colors import ListedColormap

    colours, across = ListedColormap([*_CELLS.values()]), min(6, len(found.layers))
    for place, (layer, cells) in enumerate(zip(found.layers, _cells(found), strict=True), 1):
        axes = part.add_subplot(-(-len(found.layers) // across), across, place)
        image = [cells[i : i + grid[1]] for i in range(prefix, len(cells), grid[1])]
        axes.imshow(image, cmap=colours, vmin=0, vmax=len(_CELLS) - 1, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        before = f", prefix {sum(layer.routed[:prefix])} of {prefix}" if prefix else ""
        axes.set_title(f"layer {layer.name}: {layer.routed_share:.0%}{before}", fontsize=8, parse_math=False)
    _draw_key(found, part)


def _draw_load(layer: ExpertLayer, part: Any) -> None:
    axes = part.add_subplot(ylabel="share of choices")
    axes.set_title(f"layer {layer.name}: load of the experts", parse_math=False)
    axes.bar(layer.bars.keys(), layer.bars.values(), color=_BLUE)
    axes.axhline(1 / (layer.experts + layer.null_experts), color=_ORANGE, linestyle="--", linewidth=1)


def _draw_slots(layer: SlotLayer, grid: Grid | None, prefix: int, part: Any) -> None:
    if grid is None:
        axes = part.add_subplot()
        image = axes.imshow(layer.into, aspect="auto", cmap="magma", interpolation="nearest")
        axes.set(xlabel="token", ylabel="slot")
        axes.set_title(f"layer {layer.name}: how much of each token a slot holds", parse_math=False)
        part.colorbar(image, ax=axes, label="weight")
        return
    part.suptitle(f"layer {layer.name}: how much of each patch a slot holds", fontsize=10, parse_math=False)
    high = max((weight for row in layer.into for weight in row if math.isfinite(weight)), default=1.0)
    for number, row in enumerate(layer.into):
        axes = part.add_subplot(-(-len(layer.into) // 8), min(8, len(layer.into)), number + 1)
        axes.set_axis_off()
        image = axes.imshow(
            [row[i : i + grid[1]] for i in range(prefix, len(row), grid[1])],
            **{"cmap": "magma", "vmin": 0, "vmax": high, "interpolation": "nearest"},
        )
        axes.set_title(f"expert {number // layer.slots}, slot {number % layer.slots}", fontsize=7)
    part.colorbar(image, ax=part.axes, label="weight", shrink=0.8)


def runs_figure(runs: Sequence[Run]) -> Any:
    """Loss against steps and FLOPs, and the other charts of runs against steps."""
    figure = new_figure(10, 7 + 0.2 * len(runs))
    from matplotlib.lines import Line2D

    loss, *others = charts(runs, "step")
    drawn = [loss, charts(runs, "flops")[0], *others]
    for place, chart in enumerate(drawn, 1):
        axes = figure.add_subplot(2, 2, place)
        for style, lines in (("-", chart["series"]), ("D", chart.get("marks", {}))):
            for number, points in enumerate(lines.values()):
                if points:  # a run without them keeps its colour from others
                    axes.plot(*zip(*points, strict=True), style, color=f"C{number}", linewidth=1.4, markersize=5)
        axes.set(title=chart["title"], xlabel=chart["x"], ylabel=chart["y"])
        axes.grid(alpha=0.3)
        if chart["from_zero"]:  # to above the highest: no line lies on the border
            axes.set_ylim(0, 1.08 * max((y for line in axes.lines for y in line.get_ydata() if y == y), default=1) or 1)
        if chart["title"] == "Routed share" and len(runs) == 1:  # its lines are layers
            names = dict(zip(chart["series"], axes.lines, strict=True))
            _legend(axes, names, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    keys = {run.name: Line2D([], [], color=f"C{number}") for number, run in enumerate(runs)}
    if any(loss["marks"].values()):
        keys["resumed"] = Line2D([], [], color="gray", marker="D", linestyle="none")
    _legend(figure, keys, loc="outside lower center", ncols=min(4, max(1, 100 // max(map(len, keys)))))
    return figure


def _legend(where: Any, keys: dict[str, Any], **how: Any) -> None:
    """A legend next to the curves, and not over them. Names are not formulas."""
    names = [f" {name}" for name in keys]  # one that begins with _ would be left out
    for text in where.legend(list(keys.values()), names, frameon=False, fontsize=8, **how).get_texts():
        text.set_parse_math(False)
