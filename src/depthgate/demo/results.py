"""All that the report says of one run, as plain data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthgate.config import TrainConfig
from depthgate.demo import measure
from depthgate.demo.runs import marks, metrics
from depthgate.flops import parameters, training_flops
from depthgate.loading import load


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
    causal, top_k = (measure.loss(model, documents, choice) for choice in (True, False))
    earlier = {step: load(run / f"step-{step}") for step in marks(config)[:-1]}
    validation = [(flops[step], measure.loss(each, documents, True).nats_per_byte) for step, each in earlier.items()]
    tokens, through = measure.routed(model, measure.piece(documents, config.model.context))
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
        "held_out_tokens": causal.tokens,
        "nats_per_byte": causal.nats_per_byte,
        "bits_per_byte": causal.bits_per_byte,
        "nats_per_byte_top_k": top_k.nats_per_byte,
        "bits_per_byte_top_k": top_k.bits_per_byte,
        "routed_share": dict(zip(measure.routed_layers(model), causal.routed_share, strict=True)),
        "sample": measure.sample(model, config.seed),
    }
    return Result(
        config=config,
        figures=figures,
        losses=[(row["flops"], float("nan") if row["loss"] is None else row["loss"]) for row in rows],
        validation=[*validation, (last["flops"], causal.nats_per_byte)],
        tokens=tokens,
        through=through,
        routed_layers=measure.routed_layers(model),
    )
