"""`depthgate view RUN_DIR...`: how training runs went, or go; and the report of a study."""

import json
from pathlib import Path

from depthgate.errors import DepthgateError
from depthgate.files import check_out, check_outs, write
from depthgate.view.config import ViewConfig
from depthgate.view.runs import METRICS, read_runs
from depthgate.view.runs_page import runs_page

_GRID, _REPORT = "grid.json", "report.html"  # of a study


def show(config: ViewConfig, as_json: bool) -> None:
    """Write what is asked for; print its path, or where the runs stand as JSON."""
    studies = [Path(folder) for folder in config.runs if _is_study(Path(folder))]
    if studies:
        _show_study(studies[0], config, as_json)
        return
    outs = check_outs((config.page, config.png, config.svg))
    runs = read_runs(config.runs)
    if config.png is not None or config.svg is not None:
        from depthgate.view.figures import runs_figure, save

        save(runs_figure(runs), config.png, config.svg)
    if config.page is not None:
        write(Path(config.page), runs_page(runs))
    if as_json:
        print(json.dumps({"page": config.page, "runs": [run.summary for run in runs]}))
        return
    for out in outs:
        print(out)


def _is_study(folder: Path) -> bool:
    return (folder / _GRID).is_file() and not (folder / METRICS).exists()


def _show_study(study: Path, config: ViewConfig, as_json: bool) -> None:
    """The report that the study wrote: where it is, or a copy."""
    if len(config.runs) > 1:
        raise DepthgateError(f"{study} is a study of `depthgate isoflop`: give it alone, or the runs in its cells/")
    if config.png or config.svg:
        raise DepthgateError(
            f"{study} is a study of `depthgate isoflop`: its report is a page, with pictures beside it (curves.png, "
            "curves.svg); leave --png and --svg out"
        )
    report = study / _REPORT
    if not report.is_file():
        raise DepthgateError(f"{study} has no {_REPORT} yet: `depthgate isoflop` writes it when its cells are done")
    page = report
    if config.out is not None:
        page = check_out(Path(config.out))
        write(page, report.read_bytes())
    print(json.dumps({"page": str(page)}) if as_json else page)
