"""What the demo measures of a trained model: its loss on held-out text, a sample, and where a text was routed."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from depthgate.config import TrainConfig
from depthgate.errors import DepthgateError
from depthgate.loading import LoadedDecoder
from depthgate.routing import Slots, routed_share
from depthgate.train.batches import Rows, windows
from depthgate.train.run import cache
from depthgate.train.shards import Documents, prepare
from depthgate.train.tokenizer import END

PROMPT = "def "
SAMPLED = 300  # tokens; a token is a byte here
TEMPERATURE = 0.8
PICTURED = 768  # tokens of the coloured text
MEASURED = 2**15  # most held-out tokens that the loss is measured on
_BATCH = 8


class Loss(NamedTuple):
    """The loss on held-out text."""

    tokens: int  # predicted
    nats_per_byte: float
    routed_share: list[float]  # of each routed layer

    @property
    def bits_per_byte(self) -> float:
        return self.nats_per_byte / math.log(2)


def held_out(config: TrainConfig, model: LoadedDecoder) -> Documents:
    """The documents that a run did not train on."""
    return prepare(config.data, model.tokenizer, cache(), seed=config.seed).validation


@torch.no_grad()
def loss(model: LoadedDecoder, documents: Documents, causal: bool) -> Loss:
    """Over windows of `context` tokens, spread evenly: routers decide causally, as in generation, or take the top k, as
    in training."""
    nats, size, targets = 0.0, 0, 0
    shares: list[Tensor] = []
    starts = range(0, len(documents) - 1, model.config.context)
    starts = starts[:: math.ceil(len(starts) * model.config.context / MEASURED)]
    for i in range(0, len(starts), _BATCH):
        rows = windows(documents, starts[i : i + _BATCH], model.config.context)
        wanted = rows.targets[rows.targets >= 0]
        mean, plans = model.loss(rows.tokens, rows.targets, rows.pos, rows.doc, causal=causal)
        if len(wanted):
            nats += mean.item() * len(wanted)
            size += model.tokenizer.bytes_of(wanted.tolist())
            targets += len(wanted)
            shares.append(len(wanted) * torch.stack([routed_share(plan) for plan in plans] or [torch.empty(0)]))
    if not size:
        raise DepthgateError("the held-out part of the data has no byte to predict: give longer documents")
    return Loss(targets, nats / size, (torch.stack(shares).sum(0) / targets).flatten().tolist())


@torch.no_grad()
def sample(model: LoadedDecoder, seed: int, prompt: str = PROMPT) -> str:
    """The prompt and what the model makes of it, token by token, each from a pass over the last `context` tokens. The
    end of a document is never drawn, so that all samples are of one length."""
    generator = torch.Generator().manual_seed(seed)
    ids = model.tokenizer.encode(prompt)
    for _ in range(SAMPLED):
        logits = model(torch.tensor([ids[-model.config.context :]]), causal=True).logits[0, -1] / TEMPERATURE
        logits[model.tokenizer.end] = -math.inf
        ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return model.tokenizer.decode(ids)


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
    return [_text(model, i) for i in rows.tokens[real].tolist()], through


def routed_layers(model: LoadedDecoder) -> list[int]:
    """The numbers, from 1, of the layers that route."""
    return [i + 1 for i in model.config.routed]


def _text(model: LoadedDecoder, token: int) -> str:
    """A token alone may be part of a character: then its bytes are named."""
    if token == model.tokenizer.end:
        return END
    return model.tokenizer.decode_bytes([token]).decode(errors="backslashreplace")
