"""`depthgate train`: a decoder language model from text. Loads torch only after the sizes are known to fit."""

import os
import signal
import sys
from pathlib import Path

from depthgate.config import TrainConfig
from depthgate.errors import InvalidValueError, check_count
from depthgate.files import handled
from depthgate.flops import parameters


def run(config: TrainConfig, as_json: bool, resume: bool = False) -> int:
    """Train, or go on; the exit code: 0 when done or asked to stop (SIGTERM), 130 when interrupted."""
    _check_fits(config)
    try:
        with handled(lambda *_: sys.exit(), signal.SIGTERM):  # while it trains, the loop has handlers of its own
            from depthgate.train.loop import train

            code = train(config, resume)
    except SystemExit:
        print("depthgate: stopped before the first step; go on with --resume", file=sys.stderr)
        return 0
    if as_json and int(os.environ.get("RANK") or 0) == 0:  # the last row of metrics
        print(Path(config.out, "metrics.jsonl").read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2])
    return code


def _check_fits(config: TrainConfig) -> None:
    """Refuse what no memory here could hold, before anything is allocated."""
    check_count(config.batch * config.model.context, "batch * model.context", maximum=2**28)
    weights = parameters(config.model)
    need = 4 * weights * (4 if config.device == "cpu" else 1)  # with their gradients and two moments, or alone
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * int(os.environ.get("WORLD_SIZE") or 1)
    if need > have:
        sizes = f"{need / 2**30:,.0f} GiB of memory, and there are {have / 2**30:,.0f}"
        raise InvalidValueError(f"a model of {weights:,} weights needs {sizes}: choose a smaller one")
