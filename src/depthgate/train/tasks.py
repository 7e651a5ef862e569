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
from itertools import islice
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgate.errors import DepthgateError
from depthgate.loading import LanguageModel

TASKS = ("word", "continuation", "order")
_CONTEXT, _SPAN, _CHOICES, _DOCUMENTS = 40, 12, 4, 2000
_TRIES = 100  # draws of wrong choices for an item, and of items for each that is wanted


class Item(NamedTuple):
    context: str
    choices: list[str]
    right: int


def items(texts: Iterable[str], task: str, count: int, seed: int = 0) -> list[Item]:
    """Items of a task, drawn from the first documents of a text; the same for every model."""
    chance = random.Random(f"{task} {seed}")
    long = [words for text in islice(texts, _DOCUMENTS) if len(words := text.split()) > _CONTEXT + _SPAN]
    if len(long) < 2:
        what = f"the text has {len(long)} documents of more than {_CONTEXT + _SPAN} words"
        raise DepthgateError(f"{what}, and tasks are made from two or more: give more text")
    drawn = (_item(long, task, chance) for _ in range(_TRIES * count))
    found = [*islice((item for item in drawn if item), count)]
    if len(found) < count:
        raise DepthgateError(f"the words of the text are too few for the task {task!r}: give another text")
    return found


def _item(texts: Sequence[list[str]], task: str, chance: random.Random) -> Item | None:
    """One item, unless no three wrong choices are found for it."""
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
            choices = [*wrong[:place], right, *wrong[place:]]
            return Item(" ".join(words[start:middle]), [" ".join(each) for each in choices], place)
    return None


@torch.no_grad()
def likelihoods(model: LanguageModel, context: str, choices: Sequence[str]) -> list[float]:
    """The log-probability by the byte of each choice after the context, of which the model reads as much as it can."""
    (before,) = model.tokenizer.encode_many([context])
    rows = model.tokenizer.encode_many([f"{context} {choice}" for choice in choices])
    begins = [len(commonprefix([row, before])) - max(0, len(row) - model.context) for row in rows]
    rows = [row[-model.context :] for row in rows]
    ids, pos = (torch.full((len(rows), max(map(len, rows))), fill) for fill in (0, -1))
    for i, row in enumerate(rows):
        ids[i, : len(row)], pos[i, : len(row)] = torch.tensor(row), torch.arange(len(row))
    ids, pos = ids.to(model.device), pos.to(model.device)
    logits: Tensor = model(ids, pos, causal=True).logits[:, :-1].float().log_softmax(-1)
    each = logits.gather(-1, ids[:, 1:, None])[..., 0].cpu()
    sums = [each[i, max(begins[i], 1) - 1 : len(row) - 1].sum() for i, row in enumerate(rows)]
    return [float(total) / len(choice.encode()) for total, choice in zip(sums, choices, strict=True)]


def accuracy(model: LanguageModel, asked: Iterable[Item]) -> dict[str, Any]:
    """The share of items in which a model finds the right choice, and the standard error of that."""
    found = [(likelihoods(model, item.context, item.choices), item.right) for item in asked]
    share = sum(scores.index(max(scores)) == right for scores, right in found) / len(found)
    return {"accuracy": share, "error": math.sqrt(share * (1 - share) / len(found)), "items": len(found)}
