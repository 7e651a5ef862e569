"""Three tasks made from any text, for models of ours and of transformers: no network, no other package.

    python benchmarks/offline_tasks.py --models DIR,DIR --data text.txt

Each item is a context of 40 words and four choices, of which one follows in the text:

    word          the next word, among words drawn from the same text
    continuation  the next 12 words, among 12 words from elsewhere in it
    order         the next 12 words, among the same with two neighbours exchanged

A model takes the choice whose text is likeliest by the byte, deciding causally. Chance is 1/4.
"""

import argparse
import json
import math
import random
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from depthgate.data.sources import documents
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError
from depthgate.loading import open_model

TASKS = ("word", "continuation", "order")
_CONTEXT, _SPAN, _CHOICES, _DOCUMENTS = 40, 12, 4, 2000


def items(data: str, task: str, count: int, seed: int = 0) -> list[tuple[str, list[str], int]]:
    """Context, choices, and the place of the right one; the same for every model."""
    chance = random.Random(f"{task} {seed}")
    texts = [words for text in islice(documents(data), _DOCUMENTS) if len(words := text.split()) > _CONTEXT + _SPAN]
    if len(texts) < 2:
        raise DepthgateError(f"{data} has {len(texts)} documents of more than {_CONTEXT + _SPAN} words: two are needed")
    found: list[tuple[str, list[str], int]] = []
    while len(found) < count:
        words = chance.choice(texts)
        start = chance.randrange(len(words) - _CONTEXT - _SPAN + 1)
        middle = start + _CONTEXT
        right = words[middle : middle + (1 if task == "word" else _SPAN)]
        wrong: list[list[str]] = []
        for _ in range(100):
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
                found.append((" ".join(words[start:middle]), choices, place))
                break
    return found


@torch.no_grad()
def likelihoods(model: Any, context: str, choices: list[str]) -> list[float]:
    """Nats by the byte of each choice after the context, negative."""
    (before,) = model.tokenizer.encode_many([context])
    rows = model.tokenizer.encode_many([f"{context} {choice}" for choice in choices])
    rows = [row[-model.context :] for row in rows]
    ids, pos = (torch.full((len(rows), max(map(len, rows))), fill) for fill in (0, -1))
    shared = [
        next((i for i, (a, b) in enumerate(zip(row, before, strict=False)) if a != b), len(before)) for row in rows
    ]
    for i, row in enumerate(rows):
        ids[i, : len(row)], pos[i, : len(row)] = torch.tensor(row), torch.arange(len(row))
    ids, pos = ids.to(model.device), pos.to(model.device)
    logits: Tensor = model(ids, pos, causal=True).logits[:, :-1].float().log_softmax(-1)
    each = logits.gather(-1, ids[:, 1:, None])[..., 0].cpu()
    return [
        float(each[i, max(first, 1) - 1 : len(row) - 1].sum()) / len(choices[i].encode())
        for i, (row, first) in enumerate(zip(rows, shared, strict=True))
    ]


def accuracy(folder: str, data: str, count: int, device: str, tasks: tuple[str, ...] = TASKS) -> dict[str, float]:
    """The share of items in which a model finds the right choice, for each task."""
    model, found = open_model(folder, device), {}
    for task in tasks:
        right = 0
        for context, choices, place in items(data, task, count):
            scores = likelihoods(model, context, choices)
            right += scores.index(max(scores)) == place
        found[task] = right / count
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--count", type=int, default=200, help="items of each task")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    for folder in asked.models.split(","):
        found = accuracy(folder, asked.data, asked.count, resolve_device(asked.device))
        error = {f"{task} +-": math.sqrt(p * (1 - p) / asked.count) for task, p in found.items()}
        print(json.dumps({"model": folder, **found, **error}), flush=True)


if __name__ == "__main__":
    main()
