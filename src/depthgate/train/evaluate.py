"""Evaluation: how well a model predicts a text, deciding causally (the figure that counts) and by the top k."""

import math
from typing import Any

import torch
from torch import Tensor

from depthgate.data.batches import validation_rows
from depthgate.data.token_file import Documents
from depthgate.data.tokenizer import TextTokenizer
from depthgate.errors import DepthgateError
from depthgate.loading import LanguageModel
from depthgate.routing import Groups, Slots

_Counts = list[tuple[int, int]]  # of each layer: tokens that count, and all


@torch.no_grad()
def measure(model: LanguageModel, documents: Documents, batch: int, most: int | None = None) -> dict[str, Any]:
    """The figures of a model over documents, `batch` windows of `context` tokens at a time: over all windows, or over
    some with about `most` tokens, spread evenly."""
    nats = {True: 0.0, False: 0.0}
    targets = size = 0
    entered, agreed, used = list[_Counts](), list[_Counts](), list[_Counts]()
    for rows in validation_rows(documents, model.context, batch, most):
        tokens, wanted, pos, doc = (t.to(model.device) for t in rows[:4])
        kept = wanted >= 0
        count = int(kept.sum())
        if not count:
            continue
        inside = (pos >= 0)[..., None]
        real = int(inside.sum())
        for causal in (True, False):
            loss, plans = model.loss(tokens, wanted, pos, doc, causal=causal)
            nats[causal] += loss.item() * count
            slots = [plan for plan in plans if isinstance(plan, Slots)]
            if causal:
                entered.append([(int((plan.chosen & inside).sum()), real) for plan in slots])
                continue
            both = [(plan.causal_choice & plan.chosen, plan.causal_choice | plan.chosen) for plan in slots]
            agreed.append([(int((yes & inside).sum()), int((any_ & inside).sum())) for yes, any_ in both])
            # Of the choices that tokens make, those of an expert that is not null.
            groups = [plan for plan in plans if isinstance(plan, Groups)]
            used.append([(int(p.computed.sum()), int((p.choice >= 0).sum())) for p in groups])
        targets += count
        size += sum(_bytes_of(*row, model.tokenizer) for row in zip(tokens, wanted, doc, strict=True))
    if not size:
        raise DepthgateError(f"the text holds {targets} tokens to predict and no byte of text: give more")
    if not math.isfinite(nats[True] + nats[False]):
        raise DepthgateError("the model gives losses that are not finite: its weights are damaged")
    return {
        "tokens": targets,
        "bytes": size,
        "nats_per_token": nats[True] / targets,
        "perplexity": math.exp(min(nats[True] / targets, 700)),
        "bits_per_byte": nats[True] / math.log(2) / size,
        "nats_per_token_top_k": nats[False] / targets,
        "bits_per_byte_top_k": nats[False] / math.log(2) / size,
        "agreement": _shares(agreed),
        "routed_share": _shares(entered),
        "expert_share": _shares(used),
    }


def _bytes_of(tokens: Tensor, targets: Tensor, doc: Tensor, tokenizer: TextTokenizer) -> int:
    """Bytes of a row's targets (T,). Some tokenizers drop a space where a text begins, so the targets of each document
    are read as what comes after its first token here."""
    size = 0
    for each in sorted(set(doc[targets >= 0].tolist())):
        mine = (doc == each) & (targets >= 0)
        before = tokens[mine][:1].tolist()
        size += tokenizer.bytes_of(before + targets[mine].tolist()) - tokenizer.bytes_of(before)
    return size


def _shares(counts: list[_Counts]) -> list[float]:
    """The share of each layer over all batches: the same for any size of batch; 1 where there was nothing to count."""
    sums = [(sum(part for part, _ in layer), sum(whole for _, whole in layer)) for layer in zip(*counts, strict=True)]
    return [part / whole if whole else 1.0 for part, whole in sums]
