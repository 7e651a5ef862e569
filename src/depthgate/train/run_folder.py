"""The folder of a run: what the run was asked to do, which process holds it, and one row of metrics a step, which also
goes to the screen and to a tracker."""

import json
import math
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint.store import CONFIG, MAX_JSON, METRICS, TOKENIZER
from depthgate.checkpoint.tensors import damaged, from_json
from depthgate.config import RunConfig
from depthgate.errors import DepthgateError, DepthgateWarning, InvalidValueError
from depthgate.files import replace, write_json

# Options that may differ when a run goes on: how long, where and how it is computed, not what.
_FREE = (
    *("steps", "out", "device", "cuda_graph", "workers", "checkpoint_every", "keep", "tracker", "most_bad_steps"),
    "data",  # where it is: what is in it is known by its fingerprint
)
_SECONDS = 10  # between lines in a pipe
_REPORT_SECONDS, _REPORT_SHARE = 30, 0.01  # between reports, at least; most of the time that they may take
Row = dict[str, Any]
Show = Callable[[Row], None]


def plain(config: Any) -> dict[str, Any]:
    """The configuration as JSON holds it."""
    return json.loads(json.dumps(asdict(config)))  # type: ignore[no-any-return]


@contextmanager
def opened(config: RunConfig, resume: bool, name: str = CONFIG) -> Iterator[Path]:
    """The run's folder, held by this process alone: new and empty, or that of the run that goes on. The file `name`
    holds the configuration. A new run that fails before its first step leaves no trace, so that the same command,
    mended, can be given again."""
    if "\0" in config.out:
        raise InvalidValueError(f"out is {config.out!r}: a folder cannot have such a name; choose another")
    run = Path(config.out)
    try:
        _check_place(run, name)  # before anything is written
        run.mkdir(parents=True, exist_ok=True)
        with checkpoint.lock(run / ".run.lock"):
            new = not _is_run(run, name)
            if not new:
                _check_goes_on(config, resume, run, name)
            path, steps, before = run / name, checkpoint.steps(run), None
            with suppress(OSError, UnicodeDecodeError):
                before = path.read_text(encoding="utf-8")
            try:
                _clear_parts(run)
                write_json(path, plain(config))
                yield run
            except BaseException as error:
                if new:
                    _forget(run, name)
                elif before is not None and isinstance(error, DepthgateError) and checkpoint.steps(run) == steps:
                    with suppress(OSError):  # refused, for instance because of other data: the run is what it was
                        replace(path, before)
                raise
    except OSError as error:
        raise DepthgateError(
            f"cannot write {run} ({error.strerror or error}): choose another folder with --out"
        ) from error


def _is_run(run: Path, name: str) -> bool:
    return (run / name).exists() or bool(checkpoint.steps(run) if run.is_dir() else [])


def _check_place(run: Path, name: str) -> None:
    """Refuse a folder that holds something else than a run."""
    if _is_run(run, name) or not run.exists():
        return
    if not run.is_dir() or any(not path.name.startswith(".") for path in run.iterdir()):
        raise DepthgateError(f"out is {run}, which holds other files: choose another folder")


def _check_goes_on(config: RunConfig, resume: bool, run: Path, name: str) -> None:
    """Refuse a run that is not to go on, or not with this configuration."""
    if not resume:
        raise DepthgateError(f"out is {run}, which holds another run: choose another folder, or go on with --resume")
    recorded = _recorded(run / name, config)
    check_same(plain(config), recorded, run)
    if config.schedule_steps is None and recorded.get("steps") != config.steps:
        was = f"the learning rate was scheduled for {recorded.get('steps')} steps and is now for {config.steps}"
        warnings.warn(f"{was}: --schedule_steps keeps it as it was", DepthgateWarning, stacklevel=4)


def _clear_parts(run: Path) -> None:
    """Remove what a process that was killed while it wrote has left."""
    for part in run.glob(".*.part"):
        shutil.rmtree(part, ignore_errors=True)  # the folder of a model
        part.unlink(missing_ok=True)


def _forget(run: Path, config: str) -> None:
    """Remove what a run that made no step has written."""
    with suppress(OSError):
        if checkpoint.steps(run) or ((run / METRICS).exists() and (run / METRICS).stat().st_size):
            return
        for name in (config, METRICS, "report.html"):
            (run / name).unlink(missing_ok=True)
        shutil.rmtree(run / TOKENIZER, ignore_errors=True)


def _recorded(path: Path, config: Any) -> dict[str, Any]:
    """The configuration that a run was started with. If the file is damaged or missing, that of the newest checkpoint,
    in which the vocabulary is the tokenizer's and not what was asked for."""
    run = path.parent
    try:
        with path.open("rb") as file:
            return from_json(file.read(MAX_JSON), path)
    except (OSError, DepthgateError) as error:
        if not checkpoint.steps(run):
            raise DepthgateError(f"cannot read {path} ({error}): the run cannot go on; choose another --out") from None
        warnings.warn(f"{error}\nthe configuration in the newest checkpoint is used", DepthgateWarning, stacklevel=2)
        found = checkpoint.load(run, ()).config
        if isinstance(found.get("model"), dict):
            found["model"]["vocab"] = config.model.vocab
        return found


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
        more = [f"  and {len(differ) - 12} more"] if len(differ) > 12 else []
        raise DepthgateError(
            f"{where} was trained with another configuration; go on with the same one, or choose another --out:\n"
            + "\n".join(differ[:12] + more)
        )


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
    check_same(plain(config), found.config, found.path)
    check_state(found, new)
    if found.tensors.keys() != {"model", "optimizer", "rng"}:
        raise damaged(found.path, "does not hold a model, its optimizer and its random numbers")
    checkpoint.check_fit(found.tensors["model"], held, found.path)
    checkpoint.check_fit(found.tensors["optimizer"], _moments(found, model), found.path)
    checkpoint.check_fit(found.tensors["rng"], {"cpu": torch.get_rng_state()}, found.path)
    try:
        torch.Generator().set_state(found.tensors["rng"]["cpu"])
    except RuntimeError:
        raise damaged(found.path, "does not hold the state of a random number generator") from None


def check_state(found: checkpoint.Checkpoint, new: dict[str, Any]) -> None:
    """Refuse a state without the names and types of `new`, or with an odd number."""
    state = found.state

    def fits(name: str, value: Any) -> bool:
        number = isinstance(value, int | float)
        return type(state[name]) is type(value) and (not number or 0 <= state[name] < math.inf)

    known = state.keys() == new.keys() and state["step"] == found.step
    if not known or not all(fits(name, value) for name, value in new.items()):
        raise damaged(found.path / "state.json", "is not the state of a run")


def _moments(found: checkpoint.Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The tensors that AdamW, or Muon, keeps for the weights that have moments in a checkpoint."""
    weights, named = dict(model.named_parameters()), found.tensors["optimizer"]
    wanted: dict[str, Tensor] = {}
    for name in {name.rpartition(":")[0] for name in named} & weights.keys():
        keys = ("momentum_buffer",) if f"{name}:momentum_buffer" in named else ("exp_avg", "exp_avg_sq", "step")
        wanted |= {f"{name}:{key}": torch.zeros(()) if key == "step" else weights[name] for key in keys}
    return wanted


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM that ask the run to stop after its current step, as a list that fills. Asked again a second
    later, the run stops at once. (Sooner, it is one Ctrl-C that came twice, from a terminal and from a launcher.)"""
    asked: list[int] = []
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal first
        if not asked:
            first = time.monotonic()
            asked.append(number)
        elif time.monotonic() > first + 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread is told of signals
        yield asked
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def recording(config: RunConfig, run: Path, last: int, first_process: bool) -> Iterator[Show]:
    """A function that takes the rows of metrics after step `last`, for the folder, the tracker, the screen and the
    report. It does nothing in other processes than the first."""
    if not first_process:
        yield lambda row: None  # noqa: ARG005
        return
    with (
        closing(Metrics(run, last)) as metrics,
        _tracker(config.tracker, run, plain(config)) as track,
        _progress_line(config.steps, last) as show,
        _report(run) as report,
    ):

        def record(row: Row) -> None:
            for take in (metrics.add, track, show, report):
                take(row)

        yield record


@contextmanager
def _report(run: Path) -> Iterator[Show]:
    """report.html in the run's folder, a page that reloads itself while the run lives. It is written at the start, with
    some of the rows, and at the end; if it cannot be written, the run goes on without it."""
    from depthgate.view.runs import write_report

    due = 0.0

    def write(live: bool) -> None:
        nonlocal due
        began = time.monotonic()
        if due == math.inf or (live and began < due):
            return
        try:
            write_report(run, live)
            due = began + max(_REPORT_SECONDS, (time.monotonic() - began) / _REPORT_SHARE)
        except Exception as error:  # of any kind: training does not stop for a page
            due = math.inf
            warnings.warn(f"report.html is not kept up to date: {error}", DepthgateWarning, stacklevel=2)

    write(live=True)
    try:
        yield lambda row: write(live=True)  # noqa: ARG005
    finally:
        write(live=False)


class Metrics:
    """metrics.jsonl: one row a step, on its way to the disk when `add` returns."""

    def __init__(self, run: Path, last: int) -> None:
        """Remove rows after step `last`, whose steps will be made again, and a row that was cut short."""
        path, kept = run / METRICS, list[str]()
        with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
            kept = [line for line in file if self._step(line) <= last]
        replace(path, "".join(kept))
        self.file = path.open("a", encoding="utf-8")

    @staticmethod
    def _step(line: str) -> float:
        try:
            step = json.loads(line)["step"] if line.endswith("\n") else None
        except (ValueError, KeyError, TypeError, RecursionError):
            step = None
        return step if type(step) is int else math.inf

    def add(self, row: Row) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


@contextmanager
def _progress_line(steps: int, done: int) -> Iterator[Show]:
    """A line on stderr that follows the steps; where stderr is not a terminal, a line every few seconds."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console, last = Console(file=sys.stderr), time.monotonic()
    columns = (MofNCompleteColumn(), TimeRemainingColumn(compact=True), TextColumn("{task.fields[about]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps, completed=done, about="")

        def show(row: Row) -> None:
            nonlocal last
            if console.is_terminal:
                progress.update(task, completed=row["step"], about=_about(row))
            elif time.monotonic() > last + _SECONDS or row["step"] == steps:
                last = time.monotonic()
                print(f"step {row['step']}/{steps} {_about(row)}", file=sys.stderr, flush=True)

        yield show


def _about(row: Row) -> str:
    """A step in a line, short enough for 80 columns with a few routed layers."""
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.3f}"
    shares = " ".join(f"{share:.2f}".removeprefix("0") for share in row["routed_share"]) or "all"
    return f"loss {loss} {row['tokens_per_second']:,.0f} tok/s {row['utilisation']:.0%} of peak routed {shares}"


@contextmanager
def _tracker(name: str | None, run: Path, config: Row) -> Iterator[Show]:
    """A tracker by name, which gets every row of metrics as numbers; nothing without a name."""
    if name is None:
        yield lambda row: None  # noqa: ARG005
        return
    try:
        show, close = _TRACKERS[name](run, config)
    except ImportError as error:
        raise DepthgateError(f"tracker is {name!r}, which is not installed ({error}): pip install {name}") from error
    try:
        yield show
    finally:
        close()


def _scalars(row: Row) -> dict[str, float]:
    """A row as flat numbers: one for each routed layer."""
    flat = {key: value for key, value in row.items() if type(value) in (int, float) and key != "step"}
    return {**flat, **{f"routed_share/{i}": share for i, share in enumerate(row["routed_share"])}}


def _tensorboard(run: Path, config: Row) -> tuple[Show, Callable[[], None]]:  # noqa: ARG001
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"))  # type: ignore[no-untyped-call, unused-ignore]

    def show(row: Row) -> None:
        for key, value in _scalars(row).items():
            writer.add_scalar(key, value, row["step"])  # type: ignore[no-untyped-call, unused-ignore]

    return show, writer.close


def _trackio(run: Path, config: Row) -> tuple[Show, Callable[[], None]]:
    import trackio  # type: ignore[import-not-found, unused-ignore]

    trackio.init(project="depthgate", name=run.name, config=config, resume="allow")
    return lambda row: trackio.log(_scalars(row), step=row["step"]), trackio.finish


def _wandb(run: Path, config: Row) -> tuple[Show, Callable[[], None]]:
    import wandb  # type: ignore[import-not-found, unused-ignore]

    started = wandb.init(project="depthgate", name=run.name, dir=str(run), config=config)
    return lambda row: started.log(_scalars(row), step=row["step"]), started.finish


_TRACKERS = {"tensorboard": _tensorboard, "trackio": _trackio, "wandb": _wandb}
