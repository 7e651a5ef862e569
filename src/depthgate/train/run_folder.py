"""The folder of a run: what the run was asked to do, which process holds it, and one row of metrics a step, which also
goes to the screen and to a tracker."""

import json
import math
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint.store import CONFIG, METRICS, TOKENIZER, as_written_now
from depthgate.checkpoint.tensors import damaged, from_json
from depthgate.config import RunConfig
from depthgate.errors import DepthgateError, DepthgateWarning, InvalidValueError
from depthgate.files import handled, replace, write_json

# Options that may differ when a run goes on: how long, where and how it is computed, not what.
_FREE = ["steps", "out", "device", "cuda_graph", "workers", "checkpoint_every", "keep", "tracker", "most_bad_steps"]
_FREE += ["data"]  # where it is: what is in it is known by its fingerprint
_LOCK = ".run.lock"
_SECONDS = 10  # between lines in a pipe
_REPORT_SECONDS, _REPORT_SHARE = 30, 0.01  # between reports, at least; most of the time that they may take
Row = dict[str, Any]
Record = Callable[[Row], object]


def plain(config: Any) -> dict[str, Any]:
    """The configuration as JSON holds it."""
    return json.loads(json.dumps(asdict(config)))  # type: ignore[no-any-return]


@contextmanager
def opened(config: RunConfig, resume: bool, name: str = CONFIG) -> Iterator[Path]:
    """The run's folder, held by this process alone: new and empty, or that of the run that goes on. The file `name`
    holds the configuration. A new run that fails before its first step leaves no trace, so that the same command,
    mended, can be given again; a run that is refused, for instance because of other data, is what it was."""
    if "\0" in config.out:
        raise InvalidValueError(f"out is {config.out!r}: a folder cannot have such a name; choose another")
    run, path = Path(config.out), Path(config.out, name)
    try:
        _is_new(run, path)  # before anything is written
        made = [folder for folder in (run, *run.parents) if not folder.exists()]
        run.mkdir(parents=True, exist_ok=True)
        with checkpoint.lock(run / _LOCK):
            new, steps, before = _is_new(run, path), checkpoint.steps(run), None
            if not new:
                _check_goes_on(config, resume, path)
            if resume and not steps:
                lost = "; the steps that its metrics.jsonl tells of were not saved" * (run / METRICS).exists()
                print(f"depthgate: nothing to resume in {run}: starting at step 0{lost}", file=sys.stderr)
            with suppress(OSError):
                before = path.read_bytes()
            try:
                for part in run.glob(".*.part"):  # left by a process that was killed while it wrote
                    shutil.rmtree(part, ignore_errors=True)  # the folder of a model
                    part.unlink(missing_ok=True)
                write_json(path, plain(config))
                yield run
            except BaseException as error:
                if checkpoint.steps(run) == steps and (new or isinstance(error, DepthgateError)):
                    _undo(path, new, before, made)
                raise
    except OSError as error:
        raise DepthgateError(f"cannot write {run} ({error.strerror or error}): choose another --out") from error


def _is_new(run: Path, path: Path) -> bool:
    """True for a folder without a run, whose configuration would be in `path`; one with other files is refused, as is
    one within a run's folder."""
    for above in run.absolute().parents:
        if any(above.glob(f"step-*/{checkpoint.MANIFEST}")):
            raise DepthgateError(f"out is {run}, within the folder of the run {above}: choose that, or another folder")
    if path.exists() or (run.is_dir() and checkpoint.steps(run)):
        return False
    if run.exists() and not run.is_dir():
        raise DepthgateError(f"out is {run}, which is not a folder: choose another name")
    if run.is_dir() and (runs := checkpoint.runs_in(run)):
        raise DepthgateError(
            f"out is {run}, which holds runs: choose another folder, or go on with one of them: {runs}"
        )
    if run.exists() and any(not inside.name.startswith(".") for inside in run.iterdir()):
        raise DepthgateError(f"out is {run}, which holds other files: choose another folder")
    return True


def _check_goes_on(config: RunConfig, resume: bool, path: Path) -> None:
    """Refuse a run that is not to go on, or not with this configuration."""
    run = path.parent
    if not resume:
        raise DepthgateError(f"out is {run}, which holds another run: choose another folder, or go on with --resume")
    try:
        recorded = from_json(path.read_bytes(), path)
    except (OSError, DepthgateError) as error:
        why = f"cannot read {path} ({error.strerror if isinstance(error, OSError) else error})"
        if not checkpoint.steps(run):
            raise DepthgateError(f"{why}: the run cannot go on; choose another --out") from None
        # That of the checkpoint is compared once it is read.
        warnings.warn(f"{why}\nthe configuration in the newest checkpoint is used", DepthgateWarning, stacklevel=4)
        return
    check_same(plain(config), as_written_now(recorded), run)
    done, before = max(checkpoint.steps(run), default=0), recorded.get("steps")
    if config.schedule_steps is None and before != config.steps and 0 < done < config.steps:
        was = (
            f"the learning rate was scheduled for {before} steps and is now for {config.steps}, so that it rises again"
        )
        warnings.warn(f"{was}; runs that may go on are started with --schedule_steps", DepthgateWarning, stacklevel=4)


def _undo(path: Path, new: bool, before: bytes | None, made: list[Path]) -> None:
    """Put back the configuration that a run had before, and remove what a new run that made no step has written, with
    the folders that it has made."""
    run = path.parent
    with suppress(OSError):
        if before is not None:
            replace(path, before)
        elif not new:
            path.unlink()
        elif not (run / METRICS).exists() or not (run / METRICS).stat().st_size:
            for name in (path.name, METRICS, "report.html"):
                (run / name).unlink(missing_ok=True)
            shutil.rmtree(run / TOKENIZER, ignore_errors=True)
            (run / _LOCK).unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()


def check_same(asked: dict[str, Any], recorded: dict[str, Any], where: Path) -> None:
    """Refuse two configurations that cannot be of one run, and list their differences."""
    old, new = _flat(recorded), _flat(asked)
    moved = all(each.get("validation") is not None for each in (old, new))  # without any, some of the data is held out
    differ = [
        f"  {name}: {str(old.get(name, 'absent'))[:60]} there, {str(new.get(name, 'absent'))[:60]} here"
        for name in sorted(old.keys() | new.keys())
        if name not in _FREE and old.get(name) != new.get(name) and not (name == "validation" and moved)
    ]
    if differ:
        what = f"{where} was trained with another configuration; go on with the same one, or choose another --out:"
        more = [f"  and {len(differ) - 12} more"] if len(differ) > 12 else []
        raise DepthgateError("\n".join([what, *differ[:12], *more]))


def _flat(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in config.items():
        out |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return out


def check_found(
    found: checkpoint.Checkpoint, config: RunConfig, new: dict[str, Any], model: nn.Module, held: Mapping[str, Tensor]
) -> None:
    """Refuse a checkpoint that this run cannot have saved, whatever its hashes say. `new` is the state of a new run,
    `held` are the tensors of `model` that a checkpoint holds."""
    if config.steps < found.step:
        raise InvalidValueError(
            f"steps is {config.steps}, and {config.out} has {found.step} already: give more, or leave it out"
        )
    check_same(plain(config), as_written_now(found.config), found.path)
    check_state(found, new)
    if found.tensors.keys() != {"model", "optimizer", "rng"}:
        raise damaged(found.path, "does not hold a model, its optimizer and its random numbers")
    wanted = {"model": held, "optimizer": _moments(found, model), "rng": {"cpu": torch.get_rng_state()}}
    for group, tensors in wanted.items():
        checkpoint.check_fit(found.tensors[group], tensors, found.path)
    try:
        torch.Generator().set_state(found.tensors["rng"]["cpu"])
    except RuntimeError:
        raise damaged(found.path, "does not hold the state of a random number generator") from None
    if any(found.state[name] != new[name] for name in new.keys() & {"data", "names"}):  # names of classes
        was, run = found.config.get("data"), found.path.parent
        if was != config.data:
            other = f"data is {config.data}, which does not hold what {run} was trained on"
            raise DepthgateError(f"{other} ({was}): leave --data out, or start another run")
        raise DepthgateError(
            f"{was} has changed since step {found.step} of {run}: give what it was, or start another run"
        )


def check_state(found: checkpoint.Checkpoint, new: dict[str, Any]) -> None:
    """Refuse a state without the names and types of `new`, or with an odd number."""
    state, kinds = found.state, {name: type(value) for name, value in new.items()}
    fits = {name: type(value) for name, value in state.items()} == kinds and state["step"] == found.step
    if not fits or not all(0 <= state[name] < math.inf for name, kind in kinds.items() if kind is not str):
        raise damaged(found.path / "state.json", "is not the state of a run")


def _moments(found: checkpoint.Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The tensors that AdamW, or Muon, keeps for the weights that have moments in a checkpoint."""
    weights, named, wanted = dict(model.named_parameters()), found.tensors["optimizer"], dict[str, Tensor]()
    for name in {name.rpartition(":")[0] for name in named} & weights.keys():
        keys = ("momentum_buffer",) if f"{name}:momentum_buffer" in named else ("exp_avg", "exp_avg_sq", "step")
        wanted |= {f"{name}:{key}": torch.zeros(()) if key == "step" else weights[name] for key in keys}
    return wanted


@contextmanager
def stop_signals() -> Iterator[dict[int, float]]:
    """SIGINT and SIGTERM that ask the run to stop after its current step, and when they came. Asked again a second
    later, the run stops at once. (Sooner, it is one Ctrl-C that came twice, from a terminal and from a launcher.)"""
    asked: dict[int, float] = {}

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if asked and time.monotonic() > min(asked.values()) + 1:
            raise KeyboardInterrupt
        asked.setdefault(number, time.monotonic())

    with handled(note, signal.SIGINT, signal.SIGTERM):
        yield asked


@contextmanager
def recording(config: RunConfig, run: Path, last: int) -> Iterator[Record]:
    """A function that sends the rows after step `last` to metrics.jsonl, the tracker, the screen and the report."""
    others = [_progress_line(config.steps, last), _report(run)]
    if config.tracker is not None:
        others.insert(0, _tracker(config.tracker, run, plain(config)))
    with ExitStack() as stack:
        takers = [Metrics(run, last).add, *map(stack.enter_context, others)]
        yield lambda row: [take(row) for take in takers]


class Metrics:
    """metrics.jsonl: one row a step, on its way to the disk when `add` returns."""

    def __init__(self, run: Path, last: int) -> None:
        """Remove rows after step `last`, whose steps will be made again, and a row that was cut short."""
        self.path, kept = run / METRICS, list[str]()
        with suppress(FileNotFoundError), self.path.open(encoding="utf-8", errors="replace") as file:
            kept = [line for line in file if _step(line) <= last]
        replace(self.path, "".join(kept))

    def add(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _step(line: str) -> float:
    """The step of a row of metrics; infinite if the row is damaged."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        step = json.loads(line)["step"]
        if type(step) is int and line.endswith("\n"):
            return step
    return math.inf


@contextmanager
def _report(run: Path) -> Iterator[Record]:
    """report.html in the run's folder, a page that reloads itself while the run lives. It is written at the start, with
    some of the rows, and at the end; if it cannot be written, the run goes on without it."""
    from depthgate.view.runs import write_report

    due = 0.0

    def write(live: bool) -> None:
        nonlocal due
        began = time.monotonic()
        try:
            write_report(run, live)
            due = began + max(_REPORT_SECONDS, (time.monotonic() - began) / _REPORT_SHARE)
        except Exception as error:  # of any kind: training does not stop for a page
            due = math.inf
            warnings.warn(f"report.html is not kept up to date: {error}", DepthgateWarning, stacklevel=2)

    write(live=True)
    try:
        yield lambda _: write(live=True) if time.monotonic() > due else None
    finally:
        if due < math.inf:
            write(live=False)


@contextmanager
def _progress_line(steps: int, done: int) -> Iterator[Record]:
    """A line on stderr that follows the steps; where stderr is not a terminal, a line every few seconds."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    console, last = Console(file=sys.stderr), time.monotonic()
    about = TextColumn("{task.fields[about]}", table_column=Column(ratio=1, no_wrap=True))  # cut where it is narrow
    columns = (MofNCompleteColumn(), TimeRemainingColumn(compact=True), about)
    with Progress(*columns, console=console, disable=not console.is_terminal, expand=True) as progress:
        task = progress.add_task("", total=steps, completed=done, about="")

        def show(row: Row) -> None:
            nonlocal last
            progress.update(task, completed=row["step"], about=_about(row))
            if not console.is_terminal and (time.monotonic() > last + _SECONDS or row["step"] == steps):
                last = time.monotonic()
                print(f"step {row['step']}/{steps} {_about(row)}", file=sys.stderr, flush=True)

        yield show


def _about(row: Row) -> str:
    """A step in a line, short enough for 80 columns with a few routed layers."""
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.3f}"
    shares = "".join(f" {share:.2f}".replace(" 0.", " .") for share in row["routed_share"])
    routed = f" routed{shares}" if shares else ""
    return f"loss {loss} {row['tokens_per_second']:,.0f} tok/s {row['utilisation']:.0%} of peak{routed}"


@contextmanager
def _tracker(name: str, run: Path, config: Row) -> Iterator[Record]:
    """A tracker by name, which gets every row of metrics as numbers."""
    log: Callable[..., object]
    try:
        if name == "tensorboard":
            writer = import_module("torch.utils.tensorboard").SummaryWriter(str(run / name))
            log, finish = (lambda given, step: [writer.add_scalar(*each, step) for each in given.items()]), writer.close
        else:
            tracker = import_module(name)
            own = {"trackio": {"resume": "allow"}, "wandb": {"dir": str(run)}}[name]
            tracker.init(project="depthgate", name=run.name, config=config, **own)
            log, finish = tracker.log, tracker.finish
    except ImportError as error:
        raise DepthgateError(f"tracker is {name!r}, which is not installed ({error}): pip install {name}") from error
    try:
        yield lambda row: log(_numbers(row), step=row["step"])
    finally:
        finish()


def _numbers(row: Row) -> dict[str, float]:
    """A row as flat numbers: one for each routed layer."""
    flat = {key: value for key, value in row.items() if type(value) in (int, float) and key != "step"}
    return {**flat, **{f"routed_share/{i}": share for i, share in enumerate(row["routed_share"])}}
