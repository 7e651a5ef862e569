"""`depthgate isoflop`: run a study, or what is left of it, and report."""

from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.report import print_grid, write
from depthgate.isoflop.study import Study


def run(config: IsoflopConfig, as_json: bool) -> None:
    """Run the cells that are missing and write the report; or only print the grid."""
    study = Study(config)
    if config.dry_run:
        print_grid(study, as_json)
        return
    with study.opened():
        study.run()
        if study.rows:
            write(study, as_json)
    study.check_failed()
