"""Where the tokens of a text went."""

import torch

from depthgate.data.batches import Rows, windows
from depthgate.data.token_file import Documents
from depthgate.loading import LoadedDecoder
from depthgate.routing import Slots

PICTURED = 768  # tokens of a coloured text


def piece(documents: Documents, context: int) -> Rows:
    """Windows in order from the beginning of the first document that fills them, or of the first one of all."""
    lengths = documents.bounds.diff().tolist()
    number = next((i for i, length in enumerate(lengths) if length > PICTURED), 0)
    start = int(documents.bounds[number])
    return windows(documents, range(start, start + PICTURED, context), context)


@torch.no_grad()
def routed(model: LoadedDecoder, rows: Rows) -> tuple[list[str], list[list[int]]]:
    """The text of every token in the windows, and the numbers (from 1) of the layers that routed it causally."""
    plans = model(rows.tokens, rows.pos, rows.doc, causal=True).plans
    real = rows.pos >= 0
    chosen = [plan.chosen[..., 0][real].tolist() for plan in plans if isinstance(plan, Slots)]
    layers = routed_layers(model)
    through = [[layer for layer, yes in zip(layers, at, strict=True) if yes] for at in zip(*chosen, strict=True)]
    return [model.tokenizer.token_text(i) for i in rows.tokens[real].tolist()], through


def routed_layers(model: LoadedDecoder) -> list[int]:
    """The numbers, from 1, of the layers that route."""
    return [i + 1 for i in model.config.routed]
