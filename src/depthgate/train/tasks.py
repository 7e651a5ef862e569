"""Three tasks made from any text, for models of ours and of transformers. Each item is a context of 40 words and four
choices, of which one follows in the text:

    word          the next word, among words drawn from the same text
    continuation  the next 12 words, among 12 words from elsewhere in it
    order         the next 12 words, among the same with two neighbours exchanged

A model takes the choice whose text is likeliest by the byte, deciding causally. Chance is 1/4.
"""

import math
import random
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from depthgate.errors import DepthgateError
from depthgate.loading import LanguageModel

_CONTEXT, _SPAN, _CHOICES, _DOCUMENTS = 40, 12, 4, 2000
_TRIES = 100  # draws of wrong choices for an item, and of items for each that is wanted


class Item(NamedTuple):
    """The text before, and texts of which that at `right` follows."""

    context: str
    choices: list[str]
    right: int


def measure(model: LanguageModel, texts: Iterable[str], tasks: Sequence[str], count: int) -> dict[str, float]:
    """The share of `count` items of each task in which a model finds the right choice, and its standard error."""
    texts = list(islice(texts, _DOCUMENTS))
    found: dict[str, float] = {}
    for task, asked in [(task, items(texts, task, count)) for task in tasks]:
        scores = [likelihoods(model, each.context, each.choices) for each in asked]
        share = sum(mine.index(max(mine)) == each.right for mine, each in zip(scores, asked, strict=True)) / count
        found |= {task: share, f"{task}_stderr": math.sqrt(share * (1 - share) / count)}
    return found


def items(texts: Iterable[str], task: str, count: int) -> list[Item]:
    """Items of a task, the same for every model."""
    chance = random.Random(f"{task} 0")  # as for the figures in docs/log.md
    long = [words for text in texts if len(words := text.split()) > _CONTEXT + _SPAN]
    places = sum(len(words) - _CONTEXT - _SPAN + 1 for words in long)  # with more items, most would be there twice
    drawn = (_item(long, task, chance) for _ in range(_TRIES * count if places >= count else 0))
    found = list(islice(filter(None, drawn), count))
    if len(found) < count:
        what = f"{len(long)} documents of more than {_CONTEXT + _SPAN} words"
        why = f"the text has {what}, too little for {count} items of the task {task!r}"
        raise DepthgateError(f"{why}: give more text, or a lower --limit")
    return found


def _item(texts: Sequence[list[str]], task: str, chance: random.Random) -> Item | None:
    """An item, unless three wrong choices that differ are not found for it."""
    words = chance.choice(texts)
    start = chance.randrange(len(words) - _CONTEXT - _SPAN + 1)
    middle = start + _CONTEXT
    right = words[middle : middle + (1 if task == "word" else _SPAN)]
    wrong: list[list[str]] = []
    for _ in range(_TRIES):
        other = chance.choice(texts)
        at = chance.randrange(len(other) - _SPAN + 1)
        made = other[at : at + len(right)]
        if task == "order":
            place = chance.randrange(_SPAN - 1)
            made = [*right[:place], right[place + 1], right[place], *right[place + 2 :]]
        if made != right and made not in wrong:
            wrong.append(made)
        if len(wrong) == _CHOICES - 1:
            place = chance.randrange(_CHOICES)
            choices = [" ".join(each) for each in (*wrong[:place], right, *wrong[place:])]
            return Item(" ".join(words[start:middle]), choices, place)
    return None


@torch.no_grad()
def likelihoods(model: LanguageModel, context: str, choices: Sequence[str]) -> list[float]:
    """The log-probability by the byte of each choice after the context, of which the model reads as much as it can."""
    before, *rows = model.tokenizer.encode_many([context, *(f"{context} {choice}" for choice in choices)])
    same = [len([*takewhile(lambda two: two[0] == two[1], zip(row, before, strict=False))]) for row in rows]
    begins = [max(1, n - max(0, len(row) - model.context)) for n, row in zip(same, rows, strict=True)]
    rows = [row[-model.context :] for row in rows]
    ids, pos = (torch.full((len(rows), max(map(len, rows))), fill) for fill in (0, -1))
    for i, row in enumerate(rows):
        ids[i, : len(row)], pos[i, : len(row)] = torch.tensor(row), torch.arange(len(row))
    ids, pos = ids.to(model.device), pos.to(model.device)
    logits: Tensor = model(ids, pos, causal=True).logits[:, :-1].float().log_softmax(-1)
    each = logits.gather(-1, ids[:, 1:, None])[..., 0].cpu()
    if not each.isfinite().all():
        raise DepthgateError("the model gives probabilities that are not finite: its weights are damaged")
    sums = [each[i, begins[i] - 1 : len(row) - 1].sum() for i, row in enumerate(rows)]
    return [float(total) / len(choice.encode()) for total, choice in zip(sums, choices, strict=True)]
