"""`depthgate demo`: a study of three models of equal training FLOPs (dense, MoD and MoDE), with samples."""

import os
from contextlib import suppress
from itertools import count

from depthgate.config import DemoConfig
from depthgate.errors import InvalidValueError
from depthgate.flops import training_flops
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.report import BEST, best_cells, write
from depthgate.isoflop.study import Study
from depthgate.options import command
from depthgate.recipes import train_config
from depthgate.view import page as pages
from depthgate.view.page import Html

MODELS = DENSE, MOD, MODE = "tiny-dense", "tiny-mod", "tiny-mode"
TOLERANCE = 0.01  # largest difference of two runs' FLOPs
SAMPLED = 192  # tokens of the sample, at most; with what it goes on from, one window
TITLE = "depthgate demo: dense, Mixture-of-Depths and MoDE at equal training FLOPs"


def run(config: DemoConfig, as_json: bool) -> None:
    """Train the models unless that is done; print a table, or one JSON object, and write the report."""
    study = Study(study_config(config), command("demo", config))
    with study.opened():
        study.run()
        if len(study.rows) == len(MODELS):
            with suppress(OSError, StopIteration):  # where there are links, `best` is one to the best run
                (study.out / BEST).unlink(missing_ok=True)
                (study.out / BEST).symlink_to(next(iter(best_cells(study).values()))["folder"].relative_to(study.out))
            write(study, as_json, TITLE, _introduction(study))
    study.check_failed()


def study_config(config: DemoConfig) -> IsoflopConfig:
    """The study of all presets at the FLOPs of so many steps of the dense one."""
    preset = train_config(DENSE)
    dense, *others = (training_flops(train_config(name).model) for name in MODELS)

    def difference(steps: int) -> float:
        wanted = [steps * dense / each for each in others]
        return max(abs(max(1, round(each)) / each - 1) for each in wanted)

    if difference(config.steps) > TOLERANCE:
        near = next(steps for steps in count(config.steps) if difference(steps) <= TOLERANCE)
        what = f"steps is {config.steps}: no numbers of steps of the others cost the same FLOPs within {TOLERANCE:.0%}"
        raise InvalidValueError(f"{what}; use --steps {near}")
    return IsoflopConfig(
        data=config.data,
        out=config.out,
        budgets=config.steps * dense * preset.batch * preset.model.context,
        sizes=1,
        variants=",".join(MODELS),
        seed=config.seed,
        tokenizer="bytes",
        context=preset.model.context,
        batch=preset.batch,
        lr=preset.lr,
        device="cpu",  # these models are too small for a GPU to help, and a CPU gives the same figures again
        parallel=min(2, os.cpu_count() or 1),
        measured=2**16,
        points=4,
        samples=SAMPLED,
    )


def _introduction(study: Study) -> Html:
    rows = {row["variant"]: row for row in study.rows}
    dense, mod, mode = (rows[name] for name in MODELS)
    experts = train_config(MODE).model.experts
    return pages.fill("demo", data=study.config.data, mod=mod, dense=dense, mode=mode, experts=experts)
