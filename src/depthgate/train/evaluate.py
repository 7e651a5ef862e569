"""`depthgate eval`: how well a model predicts a text, deciding causally (the figure that counts) and by the top k."""

import json
import math
from typing import Any

import torch

from depthgate.config import EvalConfig
from depthgate.errors import DepthgateError
from depthgate.loading import load
from depthgate.routing import Slots, agreement, routed_share
from depthgate.train.batches import validation_rows
from depthgate.train.loop import resolve_device
from depthgate.train.run import cache
from depthgate.train.shards import everything, tokenize


@torch.no_grad()
def evaluate(config: EvalConfig) -> dict[str, Any]:
    """The figures of one model on one text."""
    device = resolve_device(config.device)
    model = load(config.model).to(device)
    documents = everything(tokenize(config.data, model.tokenizer, cache()))
    nats = {True: 0.0, False: 0.0}
    targets = size = 0
    agreed: list[list[float]] = []
    shares: list[list[float]] = []
    for rows in validation_rows(documents, model.config.context, config.batch):
        tokens, wanted, pos, doc = (t.to(device) for t in rows[:4])
        kept = wanted >= 0
        count = int(kept.sum())
        if not count:
            continue
        for causal in (True, False):
            loss, plans = model.loss(tokens, wanted, pos, doc, causal=causal)
            nats[causal] += loss.item() * count
            slots = [plan for plan in plans if isinstance(plan, Slots)]
            if causal:
                shares.append([routed_share(plan).item() for plan in plans])
            else:
                agreed.append([agreement(plan).item() for plan in slots])
        targets += count
        size += model.tokenizer.bytes_of(wanted[kept].tolist())
    if not size:
        raise DepthgateError(f"data {config.data!r} holds {targets} tokens to predict and no byte of text: give more")
    return {
        "model": config.model,
        "data": config.data,
        "tokens": targets,
        "nats_per_token": nats[True] / targets,
        "bits_per_byte": nats[True] / math.log(2) / size,
        "nats_per_token_top_k": nats[False] / targets,
        "bits_per_byte_top_k": nats[False] / math.log(2) / size,
        "agreement": _means(agreed),
        "routed_share": _means(shares),
    }


def _means(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def run(config: EvalConfig, as_json: bool) -> None:
    """Print the figures."""
    figures = evaluate(config)
    if as_json:
        print(json.dumps(figures))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{config.model} on {config.data}: {figures['tokens']:,} tokens")
    for name in ("decision", "nats/token", "bits/byte"):
        table.add_column(name, justify="left" if name == "decision" else "right")
    table.add_row("causal", f"{figures['nats_per_token']:.4f}", f"{figures['bits_per_byte']:.4f}")
    table.add_row("top k", f"{figures['nats_per_token_top_k']:.4f}", f"{figures['bits_per_byte_top_k']:.4f}")
    console = Console()
    console.print(table)
    for name in ("routed_share", "agreement"):
        if figures[name]:
            console.print(f"{name.replace('_', ' ')} by routed layer: {' '.join(f'{v:.3f}' for v in figures[name])}")
