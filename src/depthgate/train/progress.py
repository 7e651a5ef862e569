"""What a run shows while it runs: a line on stderr, and a tracker if one is asked for by name."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from depthgate.errors import DepthgateError

_SECONDS = 10  # between lines in a pipe
Row = dict[str, Any]
Show = Callable[[Row], None]


@contextmanager
def progress_line(steps: int, done: int) -> Iterator[Show]:
    """A line on stderr that follows the steps; where stderr is no terminal, a line every few seconds."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _plain_lines(steps)
        return
    columns = (MofNCompleteColumn(), TimeRemainingColumn(compact=True), TextColumn("{task.fields[about]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, completed=done, about="")
        yield lambda row: progress.update(task, completed=row["step"], about=_about(row))


def _plain_lines(steps: int) -> Show:
    last = time.monotonic()

    def show(row: Row) -> None:
        nonlocal last
        if time.monotonic() > last + _SECONDS or row["step"] == steps:
            last = time.monotonic()
            print(f"step {row['step']}/{steps} {_about(row)}", file=sys.stderr, flush=True)

    return show


def _about(row: Row) -> str:
    """What a line says of a step; short, so that it fits into 80 columns with a few routed layers."""
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.3f}"
    shares = " ".join(f"{share:.2f}".removeprefix("0") for share in row["routed_share"]) or "all"
    return f"loss {loss} {row['tokens_per_second']:,.0f} tok/s {row['utilisation']:.0%} of peak routed {shares}"


def _scalars(row: Row) -> dict[str, float]:
    """A row as flat numbers: one for each routed layer."""
    flat = {key: value for key, value in row.items() if type(value) in (int, float) and key != "step"}
    return {**flat, **{f"routed_share/{i}": share for i, share in enumerate(row["routed_share"])}}


def _tensorboard(folder: Path, config: Row) -> tuple[Show, Callable[[], None]]:  # noqa: ARG001
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call, unused-ignore]

    def show(row: Row) -> None:
        for key, value in _scalars(row).items():
            writer.add_scalar(key, value, row["step"])  # type: ignore[no-untyped-call, unused-ignore]

    return show, writer.close


def _trackio(folder: Path, config: Row) -> tuple[Show, Callable[[], None]]:
    import trackio  # type: ignore[import-not-found, unused-ignore]

    trackio.init(project="depthgate", name=folder.name, config=config, resume="allow")
    return lambda row: trackio.log(_scalars(row), step=row["step"]), trackio.finish


def _wandb(folder: Path, config: Row) -> tuple[Show, Callable[[], None]]:
    import wandb  # type: ignore[import-not-found, unused-ignore]

    run = wandb.init(project="depthgate", name=folder.name, dir=str(folder), config=config)
    return lambda row: run.log(_scalars(row), step=row["step"]), run.finish


_TRACKERS = {"tensorboard": _tensorboard, "trackio": _trackio, "wandb": _wandb}


@contextmanager
def tracker(name: str | None, folder: Path, config: Row) -> Iterator[Show]:
    """A tracker by name, which gets every row of metrics as numbers; nothing without a name."""
    if name is None:
        yield lambda row: None  # noqa: ARG005
        return
    try:
        show, close = _TRACKERS[name](folder, config)
    except ImportError as error:
        raise DepthgateError(f"tracker is {name!r}, which is not installed ({error}): pip install {name}") from error
    try:
        yield show
    finally:
        close()
