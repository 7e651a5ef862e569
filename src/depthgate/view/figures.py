"""Pictures of plans and runs for papers and notebooks, by matplotlib."""

import io
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from depthgate.errors import DepthgateError
from depthgate.view.page import colour, kind_of, looks, pieces, short
from depthgate.view.routes import Decisions, ExpertLayer, Image, SlotLayer
from depthgate.view.runs import Run, charts

# Colours of cells, as on pages. Each half has one: the upper is the causal rule's, the lower the top k's.
_SKIPPED, _COMPUTED, _ODD, _PALE = colour("band"), colour("mod"), colour("odd"), colour("mod", -0.55)
_CELLS = {
    _SKIPPED: "skipped",
    _COMPUTED: "computed",
    _ODD: "one choice alone: above the causal rule's, below the top k's",
}
_CELLS |= {_PALE: "computed causally, top k not known"}
_NAMED = 48  # tokens that have room for their names
_DASHES: Sequence[Any] = ("-", "--", ":", "-.")  # lines differ in more than colour
_LINE = 512  # tokens of a line of the map: each has more than one pixel


def new_figure(width: float, height: float, title: str = "") -> Any:
    """A figure without a window or a backend, which a notebook shows."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DepthgateError("matplotlib is missing: pip install 'depthgate[plot]'") from None

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            return figure_bytes(self, "png")

    figure = Picture(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, parse_math=False)
    return figure


def figure_bytes(figure: Any, kind: str) -> bytes:
    """Content of a png or svg file."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a token that no font has is drawn as a box
        figure.savefig(file, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def plans_figure(found: Decisions, image: Image, title: str = "") -> Any:
    """One map for all layers that tokens skip, and a panel for each layer with experts that tokens came to."""
    panels: list[tuple[float, Callable[[Any], None]]] = []  # height, and what draws
    if found.layers and image.grid is None:
        lines = -(-len(found.tokens) // _LINE)
        panels.append((lines * (0.24 * len(found.layers) + 0.45) + 1.1, partial(_draw_map, found, lines)))
    elif found.layers:
        panels.append((1.0 + 1.6 * -(-len(found.layers) // 6), partial(_draw_patches, found, image)))
    panels += [(2.4, partial(_draw_load, layer)) for layer in found.experts if layer.used]
    for layer in found.slots:
        height = 2.8 if image.grid is None else 0.6 + 1.35 * -(-len(layer.into) // 8)
        panels.append((height, partial(_draw_slots, layer, image)))
    if not panels:
        raise DepthgateError("no layer is routed and no token came to any expert: there is nothing to draw")
    heights = [height for height, _ in panels]
    figure = new_figure(9, sum(heights), title)
    parts = figure.subfigures(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (_, draw) in zip(parts, panels, strict=True):
        draw(part)
    return figure


def _halves(found: Decisions) -> list[list[str]]:
    """Two rows for each layer, with a colour for each token: by the causal rule, and by the top k."""
    rows = []
    for layer in found.layers:
        full, both = _COMPUTED if layer.compared or not found.compared else _PALE, (layer.causal, layer.top_k)
        for mine in both:
            cells = zip(mine, *both, strict=True)
            rows.append([_SKIPPED if not on else full if a and b else _ODD for on, a, b in cells])
    return rows


def _rgb(row: Sequence[str]) -> list[tuple[int, ...]]:
    return [tuple(bytes.fromhex(cell[1:])) for cell in row]


def _draw_key(found: Decisions, part: Any) -> None:
    from matplotlib.patches import Patch

    used = {cell for row in _halves(found) for cell in row}
    handles = [Patch(color=cell, label=name) for cell, name in _CELLS.items() if cell in used]
    part.legend(handles=handles, loc="outside upper center", ncols=2 + (len(used) < 4), frameon=False, fontsize=8)


def _draw_map(found: Decisions, lines: int, part: Any) -> None:
    """All tokens, so many a line, and the share that each layer computed."""
    grid, rows, places = part.add_gridspec(lines, 2, width_ratios=(6, 1)), _halves(found), range(len(found.layers))
    size = -(-len(found.tokens) // lines)
    for line in range(lines):
        axes = part.add_subplot(grid[line, 0])
        start, stop = line * size, min(len(found.tokens), (line + 1) * size)
        ends = (start - 0.5, stop - 0.5, len(found.layers) - 0.5, -0.5)
        axes.imshow([_rgb(row[start:stop]) for row in rows], aspect="auto", extent=ends, interpolation="nearest")
        axes.set_xlim(start - 0.5, start + size - 0.5)
        axes.set_yticks(places, found.names, fontsize=8, parse_math=False)
    axes.set(xlabel="token")
    if len(found.tokens) <= _NAMED:
        names = [piece.heading for piece in pieces(found.tokens)]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7, parse_math=False)
    part.supylabel("layer", fontsize=10)
    _draw_key(found, part)
    side = part.add_subplot(grid[:, 1])
    side.barh(places, [layer.routed_share for layer in found.layers], color=_COMPUTED)
    side.set(xlabel="share computed", xlim=(0, 1), ylim=(len(found.layers) - 0.5, -0.5))
    side.set_yticks(places, found.names, fontsize=8, parse_math=False)
    side.grid(alpha=0.3, axis="x")


def _draw_image(axes: Any, tokens: Sequence[Any], image: Image, **how: Any) -> Any:
    """A number for each patch, as an image; over the image itself where it is known."""
    down, across = image.grid or (1, len(tokens))
    ends = (-0.5, across - 0.5, down - 0.5, -0.5)
    if image.pixels is not None:
        high, wide = image.pixels.shape[:2]
        how["aspect"] = (high / down) / (wide / across)  # of a patch
        axes.imshow(image.pixels.tolist(), extent=ends, aspect=how["aspect"])
    return axes.imshow([tokens[i : i + across] for i in range(0, len(tokens), across)], extent=ends, **how)


def _veil(share: float) -> tuple[float, ...]:
    """What lies over a patch of an image: nothing where its share of the greatest weight is 1, grey where it is 0."""
    return (0.5, 0.5, 0.5, 0.92 * (1 - min(1.0, max(0.0, share))) if math.isfinite(share) else 1.0)


def _draw_patches(found: Decisions, image: Image, part: Any) -> None:
    """For each layer, which patches of the image it computed."""
    halves, across, prefix = _halves(found), min(6, len(found.layers)), image.prefix
    wide = image.grid[1] if image.grid else 1
    for place, layer in enumerate(found.layers):
        axes, both = part.add_subplot(-(-len(found.layers) // across), across, place + 1), halves[2 * place :][:2]
        starts = range(prefix, len(found.tokens), wide)
        cells = [cell for i in starts for half in both for cell in half[i : i + wide]]
        colours = _rgb(cells) if image.pixels is None else [_veil(cell != _SKIPPED) for cell in cells]
        _draw_image(axes, colours, image)
        axes.set(xticks=[], yticks=[])
        before = f", prefix {sum(layer.routed[:prefix])} of {prefix}" if prefix else ""
        axes.set_title(f"layer {layer.name}: {layer.routed_share:.0%}{before}", fontsize=8, parse_math=False)
    if image.pixels is None:
        _draw_key(found, part)
    else:
        part.supxlabel("grey: skipped", fontsize=8)


def _draw_load(layer: ExpertLayer, part: Any) -> None:
    axes = part.add_subplot(xlabel="expert", ylabel="share of choices")
    axes.set_title(f"layer {layer.name}: load of the experts", parse_math=False)
    axes.bar(layer.bars.keys(), layer.bars.values(), color=colour(layer.kind))
    axes.axhline(1 / (layer.experts + layer.null_experts), color=colour("text"), linestyle="--", linewidth=1)


def _draw_slots(layer: SlotLayer, image: Image, part: Any) -> None:
    if image.grid is None:
        axes = part.add_subplot()
        drawn = axes.imshow(layer.into, aspect="auto", cmap="magma", interpolation="nearest")
        axes.set(xlabel="token", ylabel="slot")
        axes.set_title(f"layer {layer.name}: how much of each token a slot holds", parse_math=False)
        part.colorbar(drawn, ax=axes, label="weight")
        return
    part.suptitle(f"layer {layer.name}: how much of each patch a slot holds", fontsize=10, parse_math=False)
    patches = [row[image.prefix :] for row in layer.into]
    high = max((weight for row in patches for weight in row if math.isfinite(weight)), default=1.0)
    for number, weights in enumerate(patches):
        axes = part.add_subplot(-(-len(layer.into) // 8), min(8, len(layer.into)), number + 1)
        axes.set_axis_off()
        if image.pixels is None:
            drawn = _draw_image(axes, weights, image, cmap="magma", vmin=0, vmax=high)
        else:
            _draw_image(axes, [_veil(weight / (high or 1)) for weight in weights], image)
        axes.set_title(f"expert {number // layer.slots}, slot {number % layer.slots}", fontsize=7)
    if image.pixels is None:
        part.colorbar(drawn, ax=part.axes, shrink=0.8).set_label(f"weight (even: {layer.even:.3g})", fontsize=8)
    else:
        part.supxlabel(f"grey: weight 0, clear: {high:.3g} (even: {layer.even:.3g})", fontsize=8)


def runs_figure(runs: Sequence[Run], title: str = "") -> Any:
    """Losses against steps and FLOPs, and the other charts of runs against steps."""
    loss, *others = charts(runs, "step")
    drawn = [loss, charts(runs, "flops")[0], *others]
    figure = new_figure(10, 0.5 + 3.2 * -(-len(drawn) // 2) + 0.2 * len(runs), title)
    from matplotlib.lines import Line2D

    for place, chart in enumerate(drawn, 1):
        axes = figure.add_subplot(-(-len(drawn) // 2), 2, place)
        colours = [colour(*look) for look in looks(chart["kinds"])]
        for number, (of, points) in enumerate(zip(colours, chart["series"].values(), strict=False)):
            if points:  # a run without them keeps its colour from others
                axes.plot(*zip(*points, strict=True), _DASHES[number % 4], color=of, linewidth=1.4)
        if chart["axis"] == "loss":  # the first steps are far above all others
            late = [y for points in chart["series"].values() for _, y in points[len(points) // 20 :] if y == y]
            axes.set_ylim(top=1.03 * max(late) if late else None)
        for of, points in zip(colours, chart.get("marks", {}).values(), strict=False):
            if points:
                axes.plot(*zip(*points, strict=True), "D", color=of, markersize=5)
        axes.set(title=chart["title"], xlabel=chart["x"], ylabel=chart["y"])
        axes.grid(alpha=0.3)
        if chart["axis"] == "from_zero":  # to above the highest: no line lies on the border
            axes.set_ylim(0, 1.08 * max((y for line in axes.lines for y in line.get_ydata() if y == y), default=1) or 1)
        if "share" in chart["title"] and len(runs) == 1:  # its lines are layers
            names = dict(zip(chart["series"], axes.lines, strict=True))
            _legend(axes, names, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    colours = [colour(*look) for look in looks([run.kind for run in runs])]
    lines = [Line2D([], [], color=of, linestyle=_DASHES[n % 4]) for n, of in enumerate(colours)]
    keys: dict[str, Any] = {short(run.name, 40): line for run, line in zip(runs, lines, strict=True)}
    if any(loss["marks"].values()):
        keys["resumed"] = Line2D([], [], color="gray", marker="D", linestyle="none")
    _legend(figure, keys, loc="outside lower center", ncols=min(4, max(1, 100 // max(map(len, keys)))))
    return figure


def study_figure(curves: Sequence[Any], loss: str, short: Callable[[float], str]) -> Any:
    """Curves of a study (isoflop.fit.Curve): a panel a budget, cells as marks, parabolas, minima with intervals."""
    budgets, names = sorted({c.budget for c in curves}), list(dict.fromkeys(c.variant for c in curves))
    figure = new_figure(4.6 * len(budgets), 3.6)
    from matplotlib import ticker

    panels = figure.subplots(1, len(budgets), squeeze=False)[0]
    colours, keys = [colour(*look) for look in looks([*map(kind_of, names)])], dict[str, Any]()
    ring: dict[str, Any] = {"fmt": "o", "ms": 9, "mew": 2, "mfc": "none", "capsize": 3, "elinewidth": 1.4}
    for curve in curves:
        axes, number = panels[budgets.index(curve.budget)], names.index(curve.variant)
        look: dict[str, Any] = {"color": colours[number]}
        keys[curve.variant], *_ = axes.plot(*zip(*curve.points, strict=True), "osD^vP*X"[number % 8], ms=5, **look)
        if line := curve.line():
            axes.plot(*zip(*line, strict=True), "-", lw=1.4, **look)
        if curve.bracketed:
            pairs = ((curve.params, curve.params_interval), (curve.loss, curve.loss_interval))
            across, upright = (sure and [[max(0.0, at - sure[0])], [max(0.0, sure[1] - at)]] for at, sure in pairs)
            axes.errorbar([curve.params], [curve.loss], yerr=upright, xerr=across, **ring, **look)
    for axes, budget in zip(panels, budgets, strict=True):
        axes.set(xscale="log", xmargin=0.08, xlabel="parameters", title=f"{short(budget)} training FLOPs")
        axes.xaxis.set(major_locator=ticker.LogLocator(subs=(1.0, 2.0, 5.0)), major_formatter=ticker.EngFormatter())
        axes.xaxis.set(minor_formatter=ticker.NullFormatter())  # major ones are 20 k, 50 k, 100 k ...
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(loss)
    keys["minimum, 95% interval"], *_ = panels[0].plot([], [], "o", ms=9, mew=2, mfc="none", color="gray")
    _legend(figure, keys, loc="outside lower center", ncols=3 * len(budgets))
    return figure


def _legend(where: Any, keys: dict[str, Any], **how: Any) -> None:
    """A legend next to the curves, and not over them. Names are not formulas."""
    names = [f" {name}" for name in keys]  # one that begins with _ would be left out
    for text in where.legend(list(keys.values()), names, frameon=False, fontsize=8, **how).get_texts():
        text.set_parse_math(False)
