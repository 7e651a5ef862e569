"""The two runs of the demo: tiny-mod, and tiny-dense for as many steps as cost the same FLOPs."""

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint.store import METRICS
from depthgate.config import TrainConfig
from depthgate.demo.config import DemoConfig
from depthgate.errors import InvalidValueError
from depthgate.flops import training_flops
from depthgate.presets import train_config
from depthgate.train import loop

MOD, DENSE = "tiny-mod", "tiny-dense"
TOLERANCE = 0.01  # largest difference of the two runs' FLOPs
MARKS = 4  # checkpoints of each run that are kept and measured


def total_flops(config: TrainConfig) -> float:
    """FLOPs of a whole run."""
    return training_flops(config.model) * config.model.context * config.batch * config.steps


def twins(config: DemoConfig) -> dict[str, TrainConfig]:
    """Preset -> its run. Steps at which the two cannot cost the same are refused."""

    def pair(steps: int) -> tuple[TrainConfig, TrainConfig]:
        mod = _run(config, MOD, steps)
        return mod, _run(config, DENSE, max(1, round(total_flops(mod) / total_flops(_run(config, DENSE, 1)))))

    def alike(mod: TrainConfig, dense: TrainConfig) -> bool:
        return abs(total_flops(dense) / total_flops(mod) - 1) <= TOLERANCE

    mod, dense = pair(config.steps)
    if not alike(mod, dense):
        near = next(steps for steps in count(config.steps) if alike(*pair(steps)))
        raise InvalidValueError(
            f"steps is {config.steps}: no number of steps of {DENSE} costs the same FLOPs within {TOLERANCE:.0%}; "
            f"use --steps {near}"
        )
    return {MOD: mod, DENSE: dense}


def _run(config: DemoConfig, preset: str, steps: int) -> TrainConfig:
    return train_config(
        preset,
        data=config.data,
        out=str(Path(config.out) / preset.removeprefix("tiny-")),
        seed=config.seed,
        device="cpu",  # these models are too small for a GPU to help, and a CPU gives the same figures again
        steps=steps,
        schedule_steps=steps,
        checkpoint_every=-(-steps // MARKS),
        keep=MARKS + 2,  # one more is saved where a run was interrupted
    )


def steps_done(config: TrainConfig) -> int:
    """Steps up to the newest checkpoint."""
    run = Path(config.out)
    return max(checkpoint.steps(run), default=0) if run.is_dir() else 0


def train(configs: dict[str, TrainConfig]) -> bool:
    """Train both, or go on where they stopped; False if somebody asked to stop before the end."""
    for name, config in configs.items():
        print(f"{name}: {config.steps} steps, {total_flops(config) / 1e12:.3g} TFLOPs", file=sys.stderr)
        if loop.train(config, resume=True) or steps_done(config) < config.steps:
            print("the same command goes on from there", file=sys.stderr)
            return False
    return True


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    """The rows of a run, one a step."""
    lines = (Path(config.out) / METRICS).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def marks(config: TrainConfig) -> list[int]:
    """The steps whose checkpoints are measured: each quarter's end, as far as they are kept, and the last."""
    return [
        step
        for step in checkpoint.steps(Path(config.out))
        if step and (step % config.checkpoint_every == 0 or step == config.steps)
    ]
