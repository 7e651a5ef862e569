"""The curves of a study as pictures for papers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from depthgate.files import replace
from depthgate.isoflop.fit import Curve
from depthgate.view.figures import figure_bytes, new_figure

_MARKERS = "osD^vP*X"


def draw(curves: Sequence[Curve], paths: Sequence[Path]) -> None:
    """One panel for each budget: cells as marks, fitted parabolas as lines, minima as crosses."""
    figure = new_figure(4.6 * max(1, len({curve.budget for curve in curves})), 3.6)
    from matplotlib import ticker  # it is there now

    budgets = sorted({curve.budget for curve in curves})
    names = list(dict.fromkeys(curve.variant for curve in curves))
    for place, budget in enumerate(budgets):
        axes = figure.add_subplot(1, len(budgets), place + 1)
        for curve in (curve for curve in curves if curve.budget == budget):
            number = names.index(curve.variant)
            look: dict[str, Any] = {"color": f"C{number}"}
            axes.plot(*zip(*curve.points, strict=True), _MARKERS[number % 8], ms=5, label=curve.variant, **look)
            if curve.best:
                low, high = curve.costs[0][0], curve.costs[-1][0]
                xs = [low * (high / low) ** (i / 60) for i in range(61)]
                axes.plot(xs, [curve.best(x) for x in xs], "-", lw=1.4, **look)
                if curve.bracketed:
                    axes.plot([curve.params], [curve.loss], "x", ms=9, mew=2, **look)
        axes.set(xscale="log", xlabel="parameters", title=f"{budget:g} training FLOPs".replace("e+", "e"))
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))  # 20 k, 50 k, 100 k ...
        axes.xaxis.set_major_formatter(ticker.EngFormatter())
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.grid(alpha=0.3)
        if place == 0:
            axes.set_ylabel("causal loss, nats a token")
            axes.legend(frameon=False)
    for path in paths:
        replace(path, figure_bytes(figure, path.suffix[1:]))
