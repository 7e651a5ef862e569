"""`depthgate demo`: a study of two models, Mixture-of-Depths and dense, of equal training FLOPs; with samples."""

from itertools import count

from depthgate.config import DemoConfig
from depthgate.errors import InvalidValueError
from depthgate.flops import training_flops
from depthgate.isoflop.config import IsoflopConfig, command
from depthgate.isoflop.report import write
from depthgate.isoflop.study import Study
from depthgate.presets import train_config
from depthgate.view import page as pages
from depthgate.view.page import Html

MOD, DENSE = "tiny-mod", "tiny-dense"
TOLERANCE = 0.01  # largest difference of the two runs' FLOPs
SAMPLED = 300  # tokens of each sample, at most
TITLE = "depthgate demo: Mixture-of-Depths and dense at equal training FLOPs"


def run(config: DemoConfig, as_json: bool) -> None:
    """Train both models unless that is done; print a table, or one JSON object, and write the report."""
    study = Study(study_config(config), command("demo", config))
    with study.opened():
        study.run()
        if len(study.rows) == 2:
            write(study, as_json, TITLE, _introduction(study))
    study.check_failed()


def study_config(config: DemoConfig) -> IsoflopConfig:
    """The study of both presets at the FLOPs of so many steps of tiny-mod."""
    preset = train_config(MOD)
    per_step = [training_flops(train_config(name).model) for name in (MOD, DENSE)]

    def difference(steps: int) -> float:
        wanted = steps * per_step[0] / per_step[1]
        return abs(max(1, round(wanted)) / wanted - 1)

    if difference(config.steps) > TOLERANCE:
        near = next(steps for steps in count(config.steps) if difference(steps) <= TOLERANCE)
        what = f"steps is {config.steps}: no number of steps of {DENSE} costs the same FLOPs within {TOLERANCE:.0%}"
        raise InvalidValueError(f"{what}; use --steps {near}")
    return IsoflopConfig(
        data=config.data,
        out=config.out,
        budgets=config.steps * per_step[0] * preset.batch * preset.model.context,
        sizes=1,
        variants=f"{MOD},{DENSE}",
        seed=config.seed,
        context=preset.model.context,
        batch=preset.batch,
        lr=preset.lr,
        device="cpu",  # these models are too small for a GPU to help, and a CPU gives the same figures again
        parallel=1,
        measured=2**15,
        points=4,
        samples=SAMPLED,
    )


def _introduction(study: Study) -> Html:
    rows = {row["variant"]: row for row in study.rows}
    mod, dense = rows[MOD], rows[DENSE]
    cost, more = mod["flops_per_token"] / dense["flops_per_token"], dense["tokens"] / mod["tokens"]
    return pages.fill("demo", data=study.config.data, mod=mod, dense=dense, cost=cost, more=more)
