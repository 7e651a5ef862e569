"""`depthgate presets`: named starting points of `depthgate train`, with their sizes."""

import json

from depthgate.config import PresetsConfig
from depthgate.console import print_table
from depthgate.flops import parameters, training_flops
from depthgate.presets import PRESETS, train_config


def run(config: PresetsConfig, as_json: bool) -> None:  # noqa: ARG001
    """Print them all."""
    models = {name: train_config(name).model for name in PRESETS}
    rows = [(name, parameters(model), training_flops(model)) for name, model in models.items()]
    if as_json:
        print(json.dumps([dict(zip(("preset", "parameters", "flops_per_token"), row, strict=True)) for row in rows]))
        return
    cells = [(name, f"{weights:,}", f"{flops:,.0f}") for name, weights, flops in rows]
    print_table(("preset", "parameters", "training FLOPs a token"), cells)
