"""Runs of `depthgate train` as plain data: what their metrics.jsonl says, as far as it can be read."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from depthgate.errors import DepthgateError
from depthgate.view.page import short

METRICS, CONFIG = "metrics.jsonl", "config.json"
AXES = ("step", "tokens", "flops", "seconds")
LAST = 20  # steps that the loss at the end is the mean of
_MOST = 1e100  # sums of larger numbers overflow
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
        """How many layers are routed."""
        return max((len(row["routed_share"]) for row in self.rows), default=0)

    @property
    def summary(self) -> Row:
        """Where the run stands."""
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


def read_runs(folders: Sequence[str], started: bool = False) -> list[Run]:
    """Runs under names that tell them apart: of their folders, with as much of the path as that takes. `started`: they
    may have nothing but a configuration yet."""
    paths = [Path(folder) for folder in folders]
    for path in paths:
        check_run(path, started)
    parts = [path.absolute().parts for path in paths]
    depth = next((n for n in range(1, max(map(len, parts))) if len({p[-n:] for p in parts}) == len(parts)), None)
    if depth is None:
        raise DepthgateError("a run is named twice: leave one out")
    names = [short("/".join(part[-depth:])) for part in parts]
    for i, name in enumerate(names):  # what tells them apart may be what cannot be shown
        names[i] = f"{name} ({i + 1})" if name in names[:i] else name
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def check_run(path: Path, started: bool = False) -> None:
    """An error where a folder is no run."""
    if not path.is_dir():
        raise DepthgateError(f"{path} is no folder: give a run of `depthgate train` (--model shows what a model does)")
    if not (path / METRICS).is_file() and not (started and "steps" in _asked(path / CONFIG, [])):
        raise DepthgateError(f"{path} is no run: it has no {METRICS}, which `depthgate train` writes")


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
    return Run(name, rows, _asked(path / CONFIG, notes), notes)


def _row(line: bytes) -> Row | None:
    """A line with all that a page shows, as numbers; None where it is something else."""
    try:
        found = json.loads(line)
        row: Row = {axis: _number(found[axis]) for axis in AXES}
        row |= {name: _number(found.get(name), missing=True) for name in ("loss", "lr", "tokens_per_second")}
        row["routed_share"] = [_number(share) for share in found.get("routed_share", [])]
        row |= {"step": int(row["step"]), "tokens": int(row["tokens"])}
        return {**row, "resumed": found.get("resumed") is True}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _number(value: Any, missing: bool = False) -> Any:
    """A number that one can reckon with, or None where that may be `missing`."""
    if value is None and missing:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST:
        raise ValueError(value)
    return value


def _asked(path: Path, notes: list[str]) -> Row:
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and isinstance(found.get("model", {}), dict):
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
    steps without a value is not a number: a gap."""
    size = max(1, -(-len(run.rows) // most))
    points = []
    for i in range(0, len(run.rows), size):
        part = run.rows[i : i + size]
        known = [y for row in part if (y := _value(row, value)) is not None]
        points.append((float(part[-1][axis]), fmean(known) if known else math.nan))
    return points, size


def _value(row: Row, name: str) -> float | None:
    """A value of a row; routed_share is the mean of the layers, routed_share/2 that of the third."""
    if not name.startswith("routed_share"):
        found: float | None = row[name]
        return found
    shares, _, layer = row["routed_share"], *name.partition("/")[1:]
    if layer:
        return shares[int(layer)] if int(layer) < len(shares) else None
    return fmean(shares) if shares else None
