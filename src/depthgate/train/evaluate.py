"""How well a model predicts a text, deciding causally (the figure that counts) and by the top k."""

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


@torch.no_grad()
def measure(model: LanguageModel, documents: Documents, batch: int, most: int | None = None) -> dict[str, Any]:
    """The figures of a model over documents, `batch` windows of `context` tokens at a time: of all, or of windows with
    about `most` tokens, spread evenly."""
    nats = {True: 0.0, False: 0.0}
    targets = size = 0
    entered, agreed, used = _Ratios(), _Ratios(), _Ratios()
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
                entered.add([(int((plan.chosen & inside).sum()), real) for plan in slots])
                continue
            both = [(plan.causal_choice & plan.chosen, plan.causal_choice | plan.chosen) for plan in slots]
            agreed.add([(int((yes & inside).sum()), int((any_ & inside).sum())) for yes, any_ in both])
            # Of the choices that tokens make, those of an expert that is not null.
            groups = [plan for plan in plans if isinstance(plan, Groups)]
            used.add([(int(p.computed.sum()), int((p.choice >= 0).sum())) for p in groups])
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
        "agreement": agreed.shares,
        "routed_share": entered.shares,
        "expert_share": used.shares,
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
