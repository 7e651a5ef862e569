"""`depthgate eval`: how well a model predicts a text, deciding causally (the figure that counts) and by the top k."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from depthgate.config import EvalConfig
from depthgate.errors import DepthgateError
from depthgate.loading import LoadedDecoder, load
from depthgate.routing import Groups, Slots
from depthgate.train.batches import validation_rows
from depthgate.train.loop import resolve_device
from depthgate.train.manifest import MANIFEST
from depthgate.train.run import CONFIG, cache
from depthgate.train.shards import Documents, everything, prepare, tokenize


def documents_of(config: EvalConfig, model: LoadedDecoder) -> Documents:
    """The text; `heldout` is what the run kept from its training."""
    if config.data != "heldout":
        return everything(tokenize(config.data, model.tokenizer, cache()))
    folder = Path(config.model)
    home = folder.parent if (folder / MANIFEST).exists() else folder
    try:
        asked = json.loads((home / CONFIG).read_text(encoding="utf-8"))
        data, validation = str(asked["data"]), asked["validation"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DepthgateError(
            f"{home / CONFIG} does not say what the run was trained on ({error}): name a text"
        ) from None
    return prepare(data, model.tokenizer, cache(), validation).validation


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """The figures of one model on one text."""
    model = load(config.model).to(resolve_device(config.device))
    return {"model": config.model, "data": config.data, **measure(model, documents_of(config, model), config.batch)}


@torch.no_grad()
def measure(model: LoadedDecoder, documents: Documents, batch: int, most: int | None = None) -> dict[str, Any]:
    """The figures of a model over documents, `batch` windows of `context` tokens at a time: of all, or of windows with
    about `most` tokens, spread evenly."""
    device = model.embed.weight.device
    nats = {True: 0.0, False: 0.0}
    targets = size = 0
    entered, agreed, used = _Ratios(), _Ratios(), _Ratios()
    for rows in validation_rows(documents, model.config.context, batch, most):
        tokens, wanted, pos, doc = (t.to(device) for t in rows[:4])
        kept = wanted >= 0
        count = int(kept.sum())
        if not count:
            continue
        real = int((pos >= 0).sum())
        for causal in (True, False):
            loss, plans = model.loss(tokens, wanted, pos, doc, causal=causal)
            nats[causal] += loss.item() * count
            slots = [plan for plan in plans if isinstance(plan, Slots)]
            if causal:
                entered.add([(int(plan.chosen.sum()), real) for plan in slots])
                continue
            both = [(plan.causal_choice & plan.chosen, plan.causal_choice | plan.chosen) for plan in slots]
            agreed.add([(int(yes.sum()), int(any_.sum())) for yes, any_ in both])
            # Of the choices that tokens make, those of an expert that is not null.
            groups = [plan for plan in plans if isinstance(plan, Groups)]
            used.add([(int((p.place < p.ends[-1]).sum()), int((p.choice >= 0).sum())) for p in groups])
        targets += count
        size += sum(model.tokenizer.bytes_of(row[row >= 0].tolist()) for row in wanted)
    if not size:
        raise DepthgateError(f"the text holds {targets} tokens to predict and no byte of text: give more")
    return {
        "tokens": targets,
        "bytes": size,
        "nats_per_token": nats[True] / targets,
        "bits_per_byte": nats[True] / math.log(2) / size,
        "nats_per_token_top_k": nats[False] / targets,
        "bits_per_byte_top_k": nats[False] / math.log(2) / size,
        "agreement": agreed.shares,
        "routed_share": entered.shares,
        "expert_share": used.shares,
    }


class _Ratios:
    """A share for each layer, of counts that are added up: the same for any size of batch."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.wholes: list[int] = []

    def add(self, counts: list[tuple[int, int]]) -> None:
        if not self.parts:
            self.parts, self.wholes = [0] * len(counts), [0] * len(counts)
        for i, (part, whole) in enumerate(counts):
            self.parts[i] += part
            self.wholes[i] += whole

    @property
    def shares(self) -> list[float]:
        """1 where there was nothing to count."""
        return [part / whole if whole else 1.0 for part, whole in zip(self.parts, self.wholes, strict=True)]


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
    for name in ("routed_share", "agreement", "expert_share"):
        if figures[name]:
            console.print(f"{name.replace('_', ' ')} by layer: {' '.join(f'{v:.3f}' for v in figures[name])}")
