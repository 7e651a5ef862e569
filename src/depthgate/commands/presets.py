"""`depthgate presets`: named starting points of `depthgate train`, with their shapes and sizes."""

import json
import shutil
from textwrap import fill
from typing import Any

from depthgate.config import PresetsConfig
from depthgate.console import print_table
from depthgate.flops import parameters, training_flops
from depthgate.recipes import PRESETS, images_config, train_config
from depthgate.vision import IMAGE_PRESETS

_SHAPE = ("dim", "layers", "context", "pattern")
_NAMES = (
    "tiny: minutes on two cores.",
    "124m, 770m: weights of the dense model. A mode model uses as many for a token, on average, of more that it has.",
    "vit: with --task images; a token is a patch, and context those of an image.",
    "dense-1b, mod-1b and mode-1b, earlier names of those of 770m, are still taken.",
)


def run(config: PresetsConfig, as_json: bool) -> None:  # noqa: ARG001
    """Print them all."""
    models: dict[str, Any] = {name: train_config(name).model for name in PRESETS}
    models |= {name: images_config(name).model for name in IMAGE_PRESETS}
    rows = [(n, parameters(m), training_flops(m), *(getattr(m, key) for key in _SHAPE)) for n, m in models.items()]
    if as_json:
        names = ("preset", "parameters", "flops_per_token", *_SHAPE)
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
        return
    cells = [(name, f"{weights:,}", f"{flops:,.0f}", *map(str, shape)) for name, weights, flops, *shape in rows]
    print_table(("preset", "parameters", "training FLOPs a token", "width", "layers", "context", "pattern"), cells)
    for line in _NAMES:
        print(fill(line, shutil.get_terminal_size().columns))
