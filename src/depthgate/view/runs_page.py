"""The page of training runs: loss, routed share and throughput, against what the reader chooses."""

from collections.abc import Sequence
from typing import Any

from depthgate.view import page as pages
from depthgate.view.page import Html, isolated, short
from depthgate.view.runs import AXES, LAST, Points, Run, curve

# axis -> what it is called, and its units, the largest first
UNITS: dict[str, tuple[str, tuple[tuple[float, str], ...]]] = {
    "step": ("steps", ((1, "steps"),)),
    "tokens": ("tokens", ((1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"), (1, "tokens"))),
    "flops": ("FLOPs", ((1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"))),
    "seconds": ("seconds", ((3600, "hours"), (60, "minutes"), (1, "seconds"))),
}
_ALIVE = (
    "This page follows the runs as long as the command that serves it; it looks every two seconds."
    " To keep one, write it with --out in place of --watch."
)


def runs_page(runs: Sequence[Run], live: bool = False) -> Html:
    """The whole page; a `live` one asks its server for news."""
    names = ", ".join(isolated(run.name) for run in runs)
    about: list[object] = [pages.paragraph(_ALIVE)] if live else []
    notes = [(run.name, note) for run in runs for note in run.notes]
    about += [pages.note(f"{isolated(name)}: {note}.") for name, note in notes]
    sections: dict[str, object] = {"": pages.join([*about, _axis_buttons()])}
    drawn = [_loss, *[_shares] * any(run.layers for run in runs), _speed]
    sections["How they went"] = _switched(lambda axis: pages.row([chart(runs, axis) for chart in drawn]))
    sections["Where they stand"] = _table(runs)
    return pages.page(f"depthgate view: {names}", sections, live=live)


def unit(runs: Sequence[Run], axis: str) -> tuple[float, str]:
    """The largest unit in which the longest run has at least 2 of it, or the smallest."""
    most = max((run.rows[-1][axis] for run in runs if run.rows), default=0)
    units = UNITS[axis][1]
    return next((u for u in units if most >= 2 * u[0]), units[-1])


def lines(runs: Sequence[Run], axis: str, value: str) -> tuple[dict[str, Points], int]:
    """One line a run, in the axis's unit, and the most steps that a point is the mean of."""
    scale, _ = unit(runs, axis)
    found = {run.name: curve(run, axis, value) for run in runs}
    points = {name: [(x / scale, y) for x, y in line] for name, (line, _) in found.items()}
    return points, max(size for _, size in found.values())


def resume_marks(runs: Sequence[Run], axis: str) -> dict[str, Points]:
    """Where runs went on: at the first loss after it."""
    scale, _ = unit(runs, axis)
    return {
        f"{run.name}, resumed": [(row[axis] / scale, row["loss"]) for row in run.resumed if row["loss"] is not None]
        for run in runs
    }


def shares(runs: Sequence[Run], axis: str) -> dict[str, Points]:
    """Of a run alone each layer, of several the mean of the layers: nothing for those that route nobody."""
    if len(runs) > 1:
        found = lines(runs, axis, "routed_share")[0]
        return {run.name: found[run.name] if run.layers else [] for run in runs}
    return {
        f"routed layer {i + 1}": next(iter(lines(runs, axis, f"routed_share/{i}")[0].values()))
        for i in range(runs[0].layers)
    }


def _means(size: int) -> str:
    return "One point a step." if size == 1 else f"Each point is the mean of {size} steps."


def _loss(runs: Sequence[Run], axis: str) -> Html:
    points, size = lines(runs, axis, "loss")
    marks = resume_marks(runs, axis)
    more = " Marks: where a run was resumed." if any(marks.values()) else ""
    about = f"Training loss, routed by the top k. {_means(size)}{more}"
    return pages.line_chart("Loss", about, points, unit(runs, axis)[1], "nats a token", marks=marks)


def _shares(runs: Sequence[Run], axis: str) -> Html:
    about = "The share of the tokens that go through " + (
        "each routed layer." if len(runs) == 1 else "a routed layer, the mean of all of them."
    )
    return pages.line_chart(
        "Routed share", about, shares(runs, axis), unit(runs, axis)[1], "share of tokens", from_zero=True
    )


def _speed(runs: Sequence[Run], axis: str) -> Html:
    points, size = lines(runs, axis, "tokens_per_second")
    about = f"Tokens a second, of training steps alone: no checkpoints, no start. {_means(size)}"
    return pages.line_chart("Throughput", about, points, unit(runs, axis)[1], "tokens a second", from_zero=True)


def _axis_buttons() -> Html:
    buttons = "".join(
        f'<label><input type="radio" name="axis" id="axis-{axis}"{" checked" if axis == "step" else ""}> '
        f"{UNITS[axis][0]}</label>"
        for axis in AXES
    )
    return Html(f'<fieldset class="axis"><legend>Draw against</legend>{buttons}</fieldset>')


def _switched(chart: Any) -> Html:
    """The same chart for every axis; the style shows the one that is asked for, so the page needs no script."""
    return pages.join([Html(f'<div class="by" data-axis="{axis}">{chart(axis)}</div>') for axis in AXES])


def _table(runs: Sequence[Run]) -> Html:
    heads = ("run", "model", "step", f"loss, last {LAST} steps", "tokens", "FLOPs", "seconds", "tokens/s, median")
    rows = []
    for run in runs:
        at = run.summary
        asked = "" if at["steps_asked"] is None else f" of {at['steps_asked']:,}"
        end = [_shown(at["step"], ",d", asked), _shown(at["loss"], ".4f"), _shown(at["tokens"], ",d")]
        end += [_shown(at["flops"], ".3g"), _shown(at["seconds"], ",.1f"), _shown(at["tokens_per_second"], ",.0f")]
        again = ", ".join(map(str, at["resumed_after"])) or "-"
        rows.append(
            [
                Html(f'<span class="name">{pages.html(isolated(run.name))}</span>'),
                model(run),
                *end,
                again,
                at["bad_steps"],
            ]
        )
    about = "Bad steps: those without a finite loss, which change nothing."
    return pages.table((*heads, "resumed after step", "bad steps"), rows, about, "Where the runs stand")


def model(run: Run) -> str:
    """What is trained, in a few words."""
    m = run.asked.get("model", {})
    try:
        routed = f", capacity {m['capacity']:g}" if "mod" in str(m["pattern"]) or m["pattern"] == "random" else ""
        return short(f"{m['layers']} x {m['dim']}, {m['pattern']}{routed}")
    except (KeyError, TypeError, ValueError):
        return "unknown"


def _shown(value: Any, form: str, more: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{more}"
