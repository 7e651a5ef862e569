"""Training runs: their metrics.jsonl as plain data, as far as it can be read, and the page that shows them."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, compress
from pathlib import Path
from statistics import fmean, median
from typing import Any

import depthgate.view.page as pages
from depthgate.config import ROUTED_KINDS, ModelConfig
from depthgate.errors import DepthgateError
from depthgate.files import replace
from depthgate.view.page import LARGEST, Html, Points, isolated, short

METRICS, REPORT = "metrics.jsonl", "report.html"
_CONFIGS = ("finetune.json", "config.json")  # with the first, the second is that of a Hugging Face model
LAST = 20  # steps that the loss at the end is the mean of
AXES: dict[str, tuple[tuple[float, str], ...]] = {  # with their units, the largest first
    "step": ((1, "steps"),),
    "tokens": ((1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"), (1, "tokens")),
    "flops": ((1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs")),
    "seconds": ((3600, "hours"), (60, "minutes"), (1, "seconds")),
}
_HELD_OUT = ("held_out_loss", "held_out_accuracy", "causal_share", "agreement")  # in some of the rows
_OF_LAYERS = ("routed_share", "causal_share", "agreement")  # lists, a number for each routed layer
_COLUMNS = {  # of the table, that want a word
    "tokens/s": "the median",
    "agreement": "of the tokens that the causal rule or the top k takes, how many both take, the mean over layers",
    "bad steps": "those without a finite loss, which change nothing",
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run's rows, one a step, in order."""

    name: str
    rows: list[Row]
    asked: Row = field(default_factory=dict)  # its configuration; empty where that cannot be read
    notes: list[str] = field(default_factory=list)  # what could not be read

    @property
    def layers(self) -> int:
        """Number of routed layers."""
        return max((len(row["routed_share"]) for row in self.rows), default=0)

    @property
    def routed(self) -> list[int]:
        """The numbers of the routed layers in the model, counted from 0; of each other where the model is unknown."""
        with suppress(AttributeError, KeyError, TypeError, ValueError, DepthgateError):
            model = self.asked["model"]
            found = ModelConfig(**{name: model[name] for name in ("pattern", "first", "layers")}).routed
            if len(found) == self.layers:
                return list(found)
        return list(range(self.layers))

    @property
    def kind(self) -> str:
        """Tells the colour of the run."""
        return pages.kind_of(f"{self.model} {'mod' * bool(self.layers)}")

    @property
    def model(self) -> str:
        """The trained model in a few words."""
        m = self.asked.get("model", {})
        if isinstance(m, str):  # the folder of a Hugging Face model
            return short(m)
        try:
            routed = {*m["pattern"].split(",")} & {*ROUTED_KINDS}
            capacity = f", capacity {m['capacity']:g}" if routed else ""
            return short(f"{m['layers']} x {m['dim']}, {m['pattern']}{capacity}")
        except (AttributeError, KeyError, TypeError, ValueError):
            return "unknown"

    @property
    def summary(self) -> Row:
        """The figures of the last row, and of the run as a whole."""
        losses = [row["loss"] for row in self.rows[-LAST:] if row["loss"] is not None]
        held_out = next((row for row in reversed(self.rows) if row.get("held_out_loss") is not None), {})
        speeds = [row["tokens_per_second"] for row in self.rows if row["tokens_per_second"] is not None]
        end = self.rows[-1] if self.rows else dict.fromkeys(AXES)
        return {
            "run": self.name,
            **{axis: end[axis] for axis in AXES},
            "steps_asked": self.asked.get("steps"),
            "loss": fmean(losses) if losses else None,
            **{name: held_out.get(name) for name in _HELD_OUT},
            "routed_share": end.get("routed_share", []),
            "tokens_per_second": median(speeds) if speeds else None,
            "resumed_after": [row["step"] - 1 for row in self.rows if row["resumed"]],
            "bad_steps": sum(row["loss"] is None for row in self.rows),
            "notes": self.notes,
        }


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Runs under names that tell them apart: those of their folders, with as much of the path as that takes."""
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise DepthgateError(f"{path} is not a folder: give a run of `depthgate train`, or a model by --model")
        if not (path / METRICS).is_file():
            runs = sorted(str(inside.parent) for inside in path.glob(f"*/{METRICS}"))
            named = f"it holds runs, name some of them: {', '.join(runs[:9])}{' ...' * (len(runs) > 9)}"
            remedy = named if runs else f"it has no {METRICS} of `depthgate train`"
            raise DepthgateError(f"{path} is not a run: {remedy}")
    parts = [path.absolute().parts for path in paths]
    depth = next((n for n in range(1, max(map(len, parts))) if len({p[-n:] for p in parts}) == len(parts)), None)
    if depth is None:
        raise DepthgateError("a run is named twice: leave one out")
    names = [short("/".join(part[-depth:])) for part in parts]
    for i, name in enumerate(names):  # what tells them apart may be what cannot be shown
        names[i] = f"{name} ({i + 1})" if name in names[:i] else name
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def _read(path: Path, name: str) -> Run:
    rows, bad, notes = list[Row](), list[int](), list[str]()
    try:
        lines = (path / METRICS).read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise DepthgateError(f"{path / METRICS} cannot be read ({error.strerror}): look at its rights") from None
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is not None and (not rows or row["step"] > rows[-1]["step"]):
            rows.append(row)
        elif line.strip():
            bad.append(number)
    if bad == [len(lines)]:  # without its end: the run was killed as it wrote, or writes at this moment
        notes.append(f"the last line of {METRICS} is cut short, and left out")
    elif bad:
        some = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        notes.append(f"{len(bad)} of the lines of {METRICS} cannot be read, and are left out: {some}")
    if not rows:
        notes.append("no step is recorded yet")
    elif (gone := rows[-1]["step"] + 1 - rows[0]["step"] - len(rows)) > len(bad):
        notes.append(f"{gone:,} steps of the run have no line in {METRICS}")
    return Run(name, rows, _asked(path, notes), notes)


def _row(line: bytes) -> Row | None:
    """The values of a line that a page shows; None where the line is something else."""
    try:
        row: Row = {"loss": None, "tokens_per_second": None, "routed_share": [], "resumed": False} | json.loads(line)
        shares = {name: list(row[name]) for name in _OF_LAYERS if name in row}
        optional = (row["loss"], row["tokens_per_second"], row.get("held_out_loss"), row.get("held_out_accuracy"))
        numbers = [*(row[axis] for axis in AXES), *chain(*shares.values()), *(x for x in optional if x is not None)]
        if all(abs(value) < LARGEST for value in numbers):
            return row | shares | {"step": int(row["step"]), "tokens": int(row["tokens"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _asked(folder: Path, notes: list[str]) -> Row:
    """The options of a run."""
    path = next((folder / name for name in _CONFIGS if (folder / name).exists()), folder / _CONFIGS[-1])
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("model", ""), dict | str):
        notes.append(f"{path.name} cannot be read, so the page does not say what the run was asked to do")
        return {}
    if type(found.get("steps")) is not int:
        notes.append(f"{path.name} does not say in a whole number how many steps were asked for")
        found["steps"] = None
    return found


def curve(run: Run, axis: str, value: str, most: int = 240) -> tuple[Points, int]:
    """At most so many points of a value against an axis, and of how many steps each is the mean. Of a value of layers
    the mean over all of them is taken, routed_share/2 is that of the third; a value that few rows have, such as the
    held-out loss, is drawn where it is known."""
    name, _, layer = value.partition("/")
    picked = slice(int(layer), int(layer) + 1) if layer else slice(None)
    rows = [row for row in run.rows if row.get("held_out_loss") is not None] if name in _HELD_OUT else run.rows
    size = max(1, -(-len(rows) // most))
    points: list[tuple[float, float]] = []
    starts = range(0, len(rows) - size + 1, size) if rows else range(0)
    for i in starts:
        part = rows[i : i + size] if i < starts[-1] else rows[i:]  # with those that are too few for a point
        if points and name not in _HELD_OUT and part[0]["step"] > rows[i - 1]["step"] + 1:  # a gap
            points.append(((rows[i - 1][axis] + part[0][axis]) / 2, math.nan))
        values = [row[name][picked] if name in _OF_LAYERS else [row.get(name)] for row in part]
        known = [y for each in values for y in each if y is not None]
        points.append((float(part[-1][axis]), fmean(known) if known else math.nan))
    return points, size


def unit(runs: Sequence[Run], axis: str) -> tuple[float, str]:
    """The largest unit in which the longest run has at least 2 of it, or the smallest."""
    most = max((run.rows[-1][axis] for run in runs if run.rows), default=0)
    return next((each for each in AXES[axis] if most >= 2 * each[0]), AXES[axis][-1])


def charts(runs: Sequence[Run], axis: str) -> list[dict[str, Any]]:
    """Losses, share of the routed layers where there is one, and throughput against an axis, as view.page.line_chart
    takes them. A run without routing has no points among the shares; those of a single run are a line a layer."""
    scale, x = unit(runs, axis)

    def lines(value: str) -> dict[str, Points]:
        return {run.name: [(at / scale, y) for at, y in curve(run, axis, value)[0]] for run in runs}

    size = max(curve(run, axis, "loss")[1] for run in runs)
    means = "One point a step." if size == 1 else f"Each point is the mean of {size} steps."
    images = any(run.asked.get("task") == "images" for run in runs)
    loss, by = ("nats an image", "") if images else ("nats a token", "Routed by the top k, as trained. ")
    resumed = {run.name: [row for row in run.rows if row["resumed"] and row["loss"] is not None] for run in runs}
    marks = {f"{name}, resumed": [(row[axis] / scale, row["loss"]) for row in rows] for name, rows in resumed.items()}
    about = f"{by}{means}{' Marks: where a run was resumed.' * any(marks.values())}"
    found: list[dict[str, Any]] = [
        {"title": "Training loss", "about": about, "series": lines("loss"), "y": loss, "marks": marks, "smooth": True}
    ]
    if any((held_out := lines("held_out_loss")).values()):
        about = "Of text that the run is not trained on; routers decide from the token alone, as in generation."
        about = "Of images that the run is not trained on." if images else about
        found.append({"title": "Held-out loss", "about": about, "series": held_out, "y": loss})
    if any(run.summary["held_out_accuracy"] is not None for run in runs):
        about, right = "Of images that the run is not trained on.", lines("held_out_accuracy")
        found.append({"title": "Held-out accuracy", "about": about, "series": right, "y": "share that is right"})
    causal = any(run.summary["causal_share"] for run in runs)
    trained = [share for run in runs for row in run.rows for share in row["routed_share"]]
    if causal or (trained and max(trained) > min(trained) + 0.01):  # and not the line that the capacity is
        value = "causal_share" if causal else "routed_share"
        which, share = "a routed layer, the mean of all of them", lines(value)
        share |= {run.name: [] for run in runs if not run.layers}
        if len(runs) == 1:
            each = [lines(f"{value}/{i}").values() for i in range(runs[0].layers)]
            which = "each routed layer"
            share = {f"layer {n}": line for n, (line,) in zip(runs[0].routed, each, strict=True)}
        about = f"The share of the tokens that go through {which}{', by the causal rule, of held-out text' * causal}."
        title = "Causal share" if causal else "Routed share"
        found.append({"title": title, "about": about, "series": share, "y": "share of tokens"})
    about, speeds = f"Of training steps alone: no checkpoints, no start. {means}", lines("tokens_per_second")
    found.append({"title": "Throughput", "about": about, "series": speeds, "y": "tokens a second", "smooth": True})
    kinds, places = [run.kind for run in runs], [row[axis] / scale for run in runs for row in run.rows]
    for chart in found:
        chart |= {"x": x, "axis": "loss" if "loss" in chart["title"] else "from_zero", "named": len(runs) > 1}
        chart["span"] = [min(places), max(places)] if places else None
        chart["kinds"] = kinds if len(chart["series"]) == len(runs) else kinds * len(chart["series"])
    return found


def write_report(folder: Path, live: bool) -> None:
    """Write report.html into a run's folder; while the run is `live` the page reloads itself."""
    run = _read(folder, short(folder.absolute().name))
    about = pages.fill("live_report" if live else "report", time=datetime.now(UTC))
    replace(folder / REPORT, runs_page([run], about, live))


def runs_page(runs: Sequence[Run], about: object = "", live: bool = False, title: str = "") -> Html:
    """The whole page: losses, shares and throughput, against what the reader chooses; figures in a table."""
    notes = [pages.note(f"{isolated(run.name)}: {note}.") for run in runs for note in run.notes]
    # The style shows the charts of the axis that is asked for.
    drawn = {axis: [pages.line_chart(**chart) for chart in charts(runs, axis)] for axis in AXES}
    by_axis = [Html(f'<div class="by" data-axis="{axis}">{pages.row(each)}</div>') for axis, each in drawn.items()]
    if any(run.rows for run in runs) and not any(run.summary["held_out_loss"] for run in runs):
        notes.append(pages.paragraph("Held-out losses are measured about ten times in a run, and not in one so short."))
    top = pages.join([about, *notes, pages.fill("axes")])
    sections = {"": top, "How they went": pages.join(by_axis), "Where they stand": _table(runs)}
    return pages.page(title or f"depthgate view: {', '.join(isolated(run.name) for run in runs)}", sections, live)


def _table(runs: Sequence[Run]) -> Html:
    names = f"run|model|step|held-out loss|held-out accuracy|loss, last {LAST} steps|tokens|FLOPs|seconds|tokens/s"
    heads = [*names.split("|"), "agreement", "resumed after step", "bad steps"]
    forms = {"held_out_loss": ".4f", "held_out_accuracy": ".2%", "loss": ".4f", "tokens": ",d", "flops": ".3g"}
    forms |= {"seconds": ",.1f", "tokens_per_second": ",.0f"}
    rows = []
    for run in runs:
        at = run.summary
        asked = "" if at["steps_asked"] is None else f" of {at['steps_asked']:,}"
        step = "-" if at["step"] is None else f"{at['step']:,}{asked}"
        figures = ["-" if at[name] is None else f"{at[name]:{form}}".replace("e+", "e") for name, form in forms.items()]
        agreed = f"{fmean(at['agreement']):.2f}" if at["agreement"] else "-"
        again = ", ".join(map(str, at["resumed_after"])) or "-"
        rows.append([isolated(run.name), run.model, step, *figures, agreed, again, at["bad_steps"] or "-"])
    shown = [n < 3 or any(row[n] != "-" for row in rows) for n in range(len(heads))]  # no column of nothing
    heads = [*compress(heads, shown)]
    about = " ".join(f"{head.capitalize()}: {what}." for head, what in _COLUMNS.items() if head in heads)
    return pages.table(heads, [[*compress(row, shown)] for row in rows], about)
