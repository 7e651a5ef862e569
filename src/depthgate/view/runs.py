"""Training runs: their metrics.jsonl as plain data, as far as it can be read, and the page that shows them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import depthgate.view.page as pages
from depthgate.errors import DepthgateError
from depthgate.files import replace
from depthgate.view.page import Html, isolated, short

METRICS, REPORT = "metrics.jsonl", "report.html"
_CONFIGS = ("finetune.json", "config.json")  # with the first, the second is that of a Hugging Face model
LAST = 20  # steps that the loss at the end is the mean of
_MOST = 1e100  # sums of larger numbers overflow
AXES: dict[str, tuple[tuple[float, str], ...]] = {  # with their units, the largest first
    "step": ((1, "steps"),),
    "tokens": ((1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"), (1, "tokens")),
    "flops": ((1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs")),
    "seconds": ((3600, "hours"), (60, "minutes"), (1, "seconds")),
}
Row = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """A run's rows, one a step, in order."""

    name: str
    rows: list[Row]
    asked: Row = field(default_factory=dict)  # its configuration; empty where that cannot be read
    notes: list[str] = field(default_factory=list)  # what could not be read

    @property
    def resumed(self) -> list[Row]:
        """The first row after each resume."""
        return [row for row in self.rows if row.get("resumed")]

    @property
    def layers(self) -> int:
        """Number of routed layers."""
        return max((len(row["routed_share"]) for row in self.rows), default=0)

    @property
    def model(self) -> str:
        """The trained model in a few words."""
        m = self.asked.get("model", {})
        if isinstance(m, str):  # the folder of a Hugging Face model
            return short(m)
        try:
            routed = f", capacity {m['capacity']:g}" if "mod" in str(m["pattern"]) or m["pattern"] == "random" else ""
            return short(f"{m['layers']} x {m['dim']}, {m['pattern']}{routed}")
        except (KeyError, TypeError, ValueError):
            return "unknown"

    @property
    def summary(self) -> Row:
        """The figures of the last row, and of the run as a whole."""
        losses = [row["loss"] for row in self.rows[-LAST:] if row["loss"] is not None]
        speeds = [row["tokens_per_second"] for row in self.rows if row["tokens_per_second"] is not None]
        end = self.rows[-1] if self.rows else dict.fromkeys(AXES)
        return {
            "run": self.name,
            **{axis: end[axis] for axis in AXES},
            "steps_asked": self.asked.get("steps"),
            "loss": fmean(losses) if losses else None,
            "routed_share": end.get("routed_share", []),
            "tokens_per_second": median(speeds) if speeds else None,
            "resumed_after": [row["step"] - 1 for row in self.resumed],
            "bad_steps": sum(row["loss"] is None for row in self.rows),
            "notes": self.notes,
        }


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Runs under names that tell them apart: those of their folders, with as much of the path as that takes."""
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise DepthgateError(
                f"{path} is not a folder: give a run of `depthgate train` (--model shows what a model does)"
            )
        if not (path / METRICS).is_file():
            raise DepthgateError(f"{path} is not a run: it has no {METRICS}, which `depthgate train` writes")
    parts = [path.absolute().parts for path in paths]
    depth = next((n for n in range(1, max(map(len, parts))) if len({p[-n:] for p in parts}) == len(parts)), None)
    if depth is None:
        raise DepthgateError("a run is named twice: leave one out")
    names = [short("/".join(part[-depth:])) for part in parts]
    for i, name in enumerate(names):  # what tells them apart may be what cannot be shown
        names[i] = f"{name} ({i + 1})" if name in names[:i] else name
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def _read(path: Path, name: str) -> Run:
    notes: list[str] = []
    try:
        lines = (path / METRICS).read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise DepthgateError(f"{path / METRICS} cannot be read ({error.strerror}): look at its rights") from None
    rows: list[Row] = []
    bad: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _row(line)
        if row is None or (rows and row["step"] <= rows[-1]["step"]):
            bad.append(number)
        else:
            rows.append(row)
    if bad == [len(lines)]:  # without its end: the run was killed as it wrote, or writes at this moment
        notes.append(f"the last line of {METRICS} is cut short, and left out")
    elif bad:
        some = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        notes.append(f"{len(bad)} of the lines of {METRICS} cannot be read, and are left out: {some}")
    if not rows:
        notes.append("no step is recorded yet")
    return Run(name, rows, _asked(path, notes), notes)


def _row(line: bytes) -> Row | None:
    """The values of a line that a page shows; None where the line is something else."""
    try:
        found = json.loads(line)
        row = {axis: found[axis] for axis in AXES}
        optional = {name: found.get(name) for name in ("loss", "tokens_per_second")}
        shares = list(found.get("routed_share", []))
        numbers = [*row.values(), *(value for value in optional.values() if value is not None), *shares]
        if any(isinstance(value, bool) or not abs(value) < _MOST for value in numbers):
            return None
        row |= {"step": int(row["step"]), "tokens": int(row["tokens"])}
        return {**row, **optional, "routed_share": shares, "resumed": found.get("resumed") is True}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _asked(folder: Path, notes: list[str]) -> Row:
    """The options of a run."""
    path = next((folder / name for name in _CONFIGS if (folder / name).exists()), folder / _CONFIGS[-1])
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and isinstance(found.get("model", ""), dict | str):
            if type(steps := found.pop("steps", None)) is int:
                return {**found, "steps": steps}
            notes.append(f"{path.name} does not say in a whole number how many steps were asked for")
            return found
    except (OSError, ValueError, RecursionError):
        pass
    notes.append(f"{path.name} cannot be read, so the page does not say what the run was asked to do")
    return {}


def curve(run: Run, axis: str, value: str, most: int = 240) -> tuple[Points, int]:
    """(axis, value) of a run's steps, no more than `most` points, and how many steps each is the mean of. A mean over
    steps without a value is not a number: a gap. routed_share is the mean of the layers, routed_share/2 the third."""

    def of(row: Row) -> float | None:
        name, _, layer = value.partition("/")
        found: Any = row[name]
        if name != "routed_share":
            return found  # type: ignore[no-any-return]
        shares = found if not layer else found[int(layer) : int(layer) + 1]
        return fmean(shares) if shares else None

    size = max(1, -(-len(run.rows) // most))
    points = []
    for i in range(0, len(run.rows), size):
        part = run.rows[i : i + size]
        known = [y for row in part if (y := of(row)) is not None]
        points.append((float(part[-1][axis]), fmean(known) if known else math.nan))
    return points, size


def unit(runs: Sequence[Run], axis: str) -> tuple[float, str]:
    """The largest unit in which the longest run has at least 2 of it, or the smallest."""
    most = max((run.rows[-1][axis] for run in runs if run.rows), default=0)
    return next((each for each in AXES[axis] if most >= 2 * each[0]), AXES[axis][-1])


def lines(runs: Sequence[Run], axis: str, value: str) -> tuple[dict[str, Points], int]:
    """One line a run, in the axis's unit, and the most steps that a point is the mean of."""
    scale, _ = unit(runs, axis)
    found = {run.name: curve(run, axis, value) for run in runs}
    points = {name: [(x / scale, y) for x, y in line] for name, (line, _) in found.items()}
    return points, max(size for _, size in found.values())


def resume_marks(runs: Sequence[Run], axis: str) -> dict[str, Points]:
    """The first loss after each resume."""
    scale, _ = unit(runs, axis)
    return {
        f"{run.name}, resumed": [(row[axis] / scale, row["loss"]) for row in run.resumed if row["loss"] is not None]
        for run in runs
    }


def shares(runs: Sequence[Run], axis: str) -> dict[str, Points]:
    """One line for each layer of a single run, or for each run the mean of its layers; no points without routing."""
    if len(runs) > 1:
        found = lines(runs, axis, "routed_share")[0]
        return {run.name: found[run.name] if run.layers else [] for run in runs}
    return {
        f"routed layer {i + 1}": next(iter(lines(runs, axis, f"routed_share/{i}")[0].values()))
        for i in range(runs[0].layers)
    }


def write_report(folder: Path, live: bool) -> None:
    """Write report.html into a run's folder; while the run is `live` the page reloads itself."""
    run = _read(folder, short(folder.absolute().name))
    going = "The run is going on, and this page reloads itself. If it does not change any more, the run was killed."
    state = going if live else "The run has ended."
    written = f"Written {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC. {state}"
    replace(folder / REPORT, runs_page([run], pages.paragraph(written), live))


def runs_page(runs: Sequence[Run], about: Html | None = None, live: bool = False) -> Html:
    """The whole page: loss, routed share and throughput, against what the reader chooses; figures in a table."""
    parts: list[object] = [] if about is None else [about]
    parts += [pages.note(f"{isolated(run.name)}: {note}.") for run in runs for note in run.notes]
    # The style shows the charts of the axis that is asked for.
    charts = [f'<div class="by" data-axis="{axis}">{pages.row(_charts(runs, axis))}</div>' for axis in AXES]
    sections = {
        "": pages.join([*parts, pages.fill("axes")]),
        "How they went": Html("\n".join(charts)),
        "Where they stand": _table(runs),
    }
    return pages.page(f"depthgate view: {', '.join(isolated(run.name) for run in runs)}", sections, live)


def _charts(runs: Sequence[Run], axis: str) -> list[Html]:
    x = unit(runs, axis)[1]
    losses, size = lines(runs, axis, "loss")
    means = "One point a step." if size == 1 else f"Each point is the mean of {size} steps."
    marks = resume_marks(runs, axis)
    about = f"Training loss, routed by the top k. {means}"
    if any(marks.values()):
        about += " Marks: where a run was resumed."
    found = [pages.line_chart("Loss", about, losses, x, "nats a token", marks=marks)]
    if any(run.layers for run in runs):
        which = "each routed layer" if len(runs) == 1 else "a routed layer, the mean of all of them"
        about = f"The share of the tokens that go through {which}."
        found.append(pages.line_chart("Routed share", about, shares(runs, axis), x, "share of tokens", from_zero=True))
    about = f"Tokens a second, of training steps alone: no checkpoints, no start. {means}"
    speeds = lines(runs, axis, "tokens_per_second")[0]
    return [*found, pages.line_chart("Throughput", about, speeds, x, "tokens a second", from_zero=True)]


def _table(runs: Sequence[Run]) -> Html:
    heads = ("run", "model", "step", f"loss, last {LAST} steps", "tokens", "FLOPs", "seconds", "tokens/s, median")
    forms = {"loss": ".4f", "tokens": ",d", "flops": ".3g", "seconds": ",.1f", "tokens_per_second": ",.0f"}
    rows = []
    for run in runs:
        at = run.summary
        asked = "" if at["steps_asked"] is None else f" of {at['steps_asked']:,}"
        step = "-" if at["step"] is None else f"{at['step']:,}{asked}"
        figures = ["-" if at[name] is None else f"{at[name]:{form}}" for name, form in forms.items()]
        name = Html(f'<span class="name">{pages.html(isolated(run.name))}</span>')
        again = ", ".join(map(str, at["resumed_after"])) or "-"
        rows.append([name, run.model, step, *figures, again, at["bad_steps"]])
    about = "Bad steps: those without a finite loss, which change nothing."
    return pages.table((*heads, "resumed after step", "bad steps"), rows, about)
