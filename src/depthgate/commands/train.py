"""`depthgate train`: a decoder language model from text, or a vision transformer from images. Loads torch only after
the sizes are known to fit."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from depthgate.config import TrainConfig
from depthgate.errors import InvalidValueError, check_count
from depthgate.files import handled
from depthgate.flops import parameters
from depthgate.vision import ImagesConfig


def run(config: TrainConfig | ImagesConfig, as_json: bool, resume: bool = False) -> int:
    """Train, or go on; the exit code: 0 when done or asked to stop (SIGTERM), 130 when interrupted."""
    _check_fits(config)
    try:
        with handled(lambda *_: sys.exit(), signal.SIGTERM):  # while it trains, the loop has handlers of its own
            if isinstance(config, ImagesConfig):
                from depthgate.train import images

                code = images.train(config, resume)
            else:
                from depthgate.train.loop import train

                code = train(config, resume)
    except SystemExit:
        print("depthgate: stopped before the first step; go on with --resume", file=sys.stderr)
        return 0
    if as_json and int(os.environ.get("RANK") or 0) == 0:  # the last row of metrics
        print(Path(config.out, "metrics.jsonl").read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2])
    return code


def _check_fits(config: TrainConfig | ImagesConfig) -> None:
    """Refuse what no memory here could hold, before anything is allocated."""
    model: Any = config.model
    if isinstance(config, ImagesConfig) and model.image is None:  # the data will tell: one patch, at least
        model = replace(model, image=model.patch)
    check_count(config.batch * model.context, "batch * model.context", maximum=2**28)
    weights = parameters(model)
    need = 4 * weights * (4 if config.device == "cpu" else 1)  # with their gradients and two moments, or alone
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * int(os.environ.get("WORLD_SIZE") or 1)
    if need > have:
        sizes = f"{need / 2**30:,.0f} GiB of memory, and there are {have / 2**30:,.0f}"
        raise InvalidValueError(f"a model of {weights:,} weights needs {sizes}: choose a smaller one")
