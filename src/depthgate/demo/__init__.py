"""`depthgate demo`: encoders on handwritten digits, read row by row, beside their dense twin; table and report."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from depthgate.bench.measure import machine
from depthgate.config import DemoConfig
from depthgate.demo.report import HEADERS, NOTE, cells, command, figures, report_page
from depthgate.demo.training import Run, build_models, load_split, train_all
from depthgate.errors import DepthgateError


def run(config: DemoConfig, as_json: bool) -> None:
    """Train every encoder, print a table (or one JSON object) and write the report; its path is printed last."""
    out = _writable_folder(Path(config.out))
    digits = load_split(config.seed)
    # One thread: the matrices are too small for two to help, and two that wait for each other stall on a busy machine.
    with _one_thread(), torch.random.fork_rng(devices=[]):
        about = machine()
        runs = [Run(name, model) for name, model in build_models(config).items()]
        train_all(runs, digits, config)
        rows = figures(runs, digits)
        report = out / "report.html"
        text = report_page(config, runs, rows, digits, about)
    try:
        report.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _cannot_write(report, error) from error
    if as_json:
        print(json.dumps({"machine": about, "command": command(config), "rows": rows, "report": str(report)}))
        return
    table = Table(title=f"Handwritten digits, {config.epochs} epochs", caption=NOTE, box=box.SIMPLE_HEAD)
    for name in HEADERS:
        justify: Literal["left", "right"] = "left" if name == "encoder" else "right"
        table.add_column(name.replace(" ", "\n", 1), justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    Console().print(table)
    print(report)


def _writable_folder(out: Path) -> Path:
    """The folder, made if need be, in which a file could be written just now."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _cannot_write(out, error) from error
    return out


def _cannot_write(path: Path, error: OSError) -> DepthgateError:
    reason = error.strerror or type(error).__name__
    return DepthgateError(f"cannot write {path} ({reason}): choose another folder with --out")


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
