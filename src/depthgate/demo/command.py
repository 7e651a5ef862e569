"""`depthgate demo`: a Mixture-of-Depths language model and a dense one of equal training FLOPs; table and report."""

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from depthgate.demo.config import DemoConfig
from depthgate.demo.report import NOTE, cells, command, report_page, verdict
from depthgate.demo.results import measured
from depthgate.demo.runs import steps_done, train, twins
from depthgate.device import machine
from depthgate.errors import DepthgateError
from depthgate.files import replace, write_json


def run(config: DemoConfig, as_json: bool) -> int:
    """Train both models unless that is done, print a table (or one JSON object) and write the report; its path is
    printed last. The exit code: 0, or 130 where somebody asked to stop."""
    configs = twins(config)
    done = all(steps_done(each) >= each.steps for each in configs.values())
    if not train(configs):
        return 130
    report = Path(config.out) / "report.html"
    print("measuring both on held-out text, sampling from both", file=sys.stderr)
    try:
        about = _trained_on(report.with_name("machine.json"), done)
        results = [measured(name, each) for name, each in configs.items()]
        replace(report, report_page(config, results, about))
    except OSError as error:
        raise DepthgateError(
            f"cannot write {report} ({error.strerror or error}): choose another folder with --out"
        ) from error
    rows = [result.figures for result in results]
    if as_json:
        print(json.dumps({"machine": about, "command": command(config), "rows": rows, "report": str(report)}))
        return 0
    table = Table(title=verdict(rows), caption=NOTE, box=box.SIMPLE_HEAD)
    table.add_column("")
    for row in rows:
        table.add_column(row["model"], justify="right", no_wrap=True)
    for line in cells(rows):
        table.add_row(*line)
    Console().print(table)
    print(report)
    return 0


def _trained_on(path: Path, done: bool) -> dict[str, Any]:
    """The machine, date and commit of the training, which may lie before those of this report."""
    if done and path.exists():
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            pass  # damaged: what is known is this machine
    about = machine()
    write_json(path, about)
    return about
