"""Evaluation: how well a model predicts a text, deciding causally (the figure that counts) and by the top k."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from depthgate.config import EXPERT_KINDS, ROUTED_KINDS
from depthgate.data.batches import validation_rows
from depthgate.data.token_file import Documents
from depthgate.data.tokenizer import TextTokenizer
from depthgate.errors import DepthgateError
from depthgate.loading import LanguageModel
from depthgate.routing import Groups, Plans, Slots, depth_plans


@torch.no_grad()
def measure(model: LanguageModel, documents: Documents, batch: int, most: int | None = None) -> dict[str, Any]:
    """The figures of a model over documents, `batch` windows of `context` tokens at a time: over all windows, or over
    some with about `most` tokens, spread evenly."""
    nats = {True: 0.0, False: 0.0}
    targets = size = 0
    sums: dict[str, Any] = dict.fromkeys(("agreement", "routed_share", "experts_per_token"), 0)
    for rows in validation_rows(documents, model.context, batch, most):
        count = int((rows.targets >= 0).sum())
        if not count:
            continue
        tokens, wanted, pos, doc = (t.to(model.device) for t in rows)
        inside = (pos >= 0)[..., None]
        plans: Plans = ()
        for causal in (True, False):
            if causal or plans:  # else both ways are one
                loss, plans = model.loss(tokens, wanted, pos, doc, causal=causal)
                nats[causal] += loss.item() * count
            else:
                nats[False] = nats[True]
            slots = depth_plans(plans)
            if causal:
                sums["routed_share"] += _counts((p.chosen & inside, inside) for p in slots)
                sums["experts_per_token"] += _counts(_experts(model.kinds, plans, inside))
                continue
            both = ((p.causal_choice & inside, p.chosen & inside) for p in slots)
            sums["agreement"] += _counts((one & other, one | other) for one, other in both)
        targets += count
        size += sum(_bytes_of(*row, model.tokenizer) for row in zip(rows.tokens, rows.targets, rows.doc, strict=True))
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
        **{name: [part / all_ if all_ else 1.0 for part, all_ in layers.tolist()] for name, layers in sums.items()},
    }


def _experts(kinds: Sequence[str], plans: Plans, inside: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each layer with experts two masks: the experts that compute a token (B, T, ...), and the tokens that the
    layer was given (B, T, 1), which are those `inside` the text or, in a staged layer, those that entered.
    `plans`: those of a pass without gradients."""
    rest = iter(plans)
    for kind in kinds:
        entered = next(rest) if kind in ROUTED_KINDS else None
        if kind not in EXPERT_KINDS:
            continue
        if isinstance(entered, Slots) and not entered.tokens.numel():  # the experts of a staged layer were not asked
            yield inside[:0], inside[:0]
        elif isinstance(plan := next(rest), Groups):
            yield plan.computed, plan.choice[..., :1] >= 0
        elif isinstance(plan, Slots):
            yield plan.chosen & inside, inside


def _counts(layers: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Counts (layers, 2) of what is true in a part and in the whole, whose ratio over all batches is a share."""
    counts = [(int(part.sum()), int(whole.sum())) for part, whole in layers]
    return torch.tensor(counts, dtype=torch.int64).reshape(-1, 2)


def _bytes_of(tokens: Tensor, targets: Tensor, doc: Tensor, tokenizer: TextTokenizer) -> int:
    """Bytes of a row's targets (T,). Some tokenizers drop a space where a text begins, so the targets of each document
    are read as what comes after its first token here."""
    size = 0
    for each in sorted(set(doc[targets >= 0].tolist())):
        mine = (doc == each) & (targets >= 0)
        before = tokens[mine][:1].tolist()
        size += len(tokenizer.decode_bytes(before + targets[mine].tolist())) - len(tokenizer.decode_bytes(before))
    return size
