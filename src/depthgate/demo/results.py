"""All that the report says of one run, as plain data."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthgate.config import TrainConfig
from depthgate.data.token_file import Documents
from depthgate.demo import measure
from depthgate.demo.runs import marks, metrics
from depthgate.flops import parameters, training_flops
from depthgate.loading import LoadedDecoder, load
from depthgate.train import evaluate
from depthgate.view.routes import held_out_tokens, read

_LOSSES = ("nats_per_byte", "bits_per_byte", "nats_per_byte_top_k", "bits_per_byte_top_k")


@dataclass
class Result:
    """A run that has been trained and measured."""

    config: TrainConfig
    figures: dict[str, Any]  # one row of the table
    losses: list[tuple[float, float]]  # FLOPs so far, training loss of the step
    validation: list[tuple[float, float]]  # FLOPs so far, causal loss in nats a byte
    tokens: list[str]  # a held-out text
    through: list[list[int]]  # the layers that routed each of its tokens
    routed_layers: list[int] = field(default_factory=list)


def measured(name: str, config: TrainConfig) -> Result:
    """Measure the checkpoints of a run, and sample from the last."""
    run = Path(config.out)
    rows = metrics(config)
    flops = {row["step"]: row["flops"] for row in rows}
    model = load(run)
    documents = measure.held_out(config, model)
    steps = marks(config)
    found = [_figures(model if step == steps[-1] else load(run / f"step-{step}"), documents) for step in steps]
    final = found[-1]
    seen, _, _ = read(model, held_out_tokens(documents, 768))
    last = rows[-1]
    figures = {
        "model": name,
        "parameters": parameters(model.config),
        "flops_per_token": training_flops(model.config),
        "steps": last["step"],
        "tokens": last["tokens"],
        "flops": last["flops"],
        "train_seconds": last["seconds"],
        "held_out_documents": len(documents.bounds) - 1,
        "held_out_tokens": final["tokens"],
        **{name: final[name] for name in _LOSSES},
        "routed_share": dict(zip(seen.layers, final["routed_share"], strict=True)),
        "sample": measure.sample(model, config.seed),
    }
    return Result(
        config=config,
        figures=figures,
        losses=[(row["flops"], float("nan") if row["loss"] is None else row["loss"]) for row in rows],
        validation=[(flops[step], each["nats_per_byte"]) for step, each in zip(steps, found, strict=True)],
        tokens=seen.tokens,
        through=seen.through,
        routed_layers=seen.layers,
    )


def _figures(model: LoadedDecoder, documents: Documents) -> dict[str, Any]:
    found = evaluate.measure(model, documents, 8, measure.MEASURED)
    for name in ("", "_top_k"):
        found[f"nats_per_byte{name}"] = found[f"bits_per_byte{name}"] * math.log(2)
    return found
