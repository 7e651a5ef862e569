"""Packed sequences as a pure function of their number, so that a run resumes by starting at a number."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count
from math import ceil, isqrt
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from depthgate.data.token_file import Documents, mix, take
from depthgate.errors import DepthgateError, check_count, check_divides

_SERIAL = 2**15  # tokens handled at once, so that torch does it in one thread: see `take`
_ROUNDS = 8  # of the Feistel network: with 4, neighbours stay neighbours twice as often as by chance


class Rows(NamedTuple):
    """Windows of tokens, each (B, T) int64; (T,) for a single one."""

    tokens: Tensor  # padding: 0
    targets: Tensor  # the next token; -1 where that belongs to another document, or at padding
    pos: Tensor  # from 0 in every piece of a document; padding: -1
    doc: Tensor  # 0, 1, 2 ... within the window; padding: -1


class Numbered(Protocol):
    """Training data as rows that are a pure function of their numbers: `Packed`, or `Shuffled` of data.images."""

    @property
    def context(self) -> int: ...  # tokens of a row
    def rows(self, numbers: Sequence[int]) -> Rows: ...
    def fingerprint(self) -> str: ...


def windows(documents: Documents, starts: Sequence[int], context: int, max_documents: int | None = None) -> Rows:
    """Windows of `context` tokens that begin at `starts`; padding past the end, and after `max_documents` pieces."""
    step = max(1, _SERIAL // (context + 1))
    parts = [_windows(documents, starts[i : i + step], context, max_documents) for i in range(0, len(starts), step)]
    return Rows(*map(torch.cat, zip(*parts, strict=True)))


def _windows(documents: Documents, starts: Sequence[int], context: int, max_documents: int | None) -> Rows:
    first = torch.tensor(starts, dtype=torch.int64)
    place = first[:, None] + torch.arange(context + 1)
    inside = place < len(documents)
    first, place = first.clamp(max=len(documents) - 1), place.clamp(max=len(documents) - 1)
    document = documents.documents_at(first, context + 1)
    ids = documents.read(place, document)
    doc = document - document[:, :1]
    pos = place - torch.maximum(take(documents.bounds, document), first[:, None])
    follows = inside[:, 1:] & (document[:, 1:] == document[:, :-1])
    kept = (inside if max_documents is None else inside & (doc < max_documents))[:, :-1]
    return Rows(
        torch.where(kept, ids[:, :-1], 0),
        torch.where(kept & follows, ids[:, 1:], -1),
        torch.where(kept, pos[:, :-1], -1),
        torch.where(kept, doc[:, :-1], -1),
    )


class Packed:
    """Training sequences of `context` tokens, numbered through all epochs: `packed[i]` never depends on what was read.

    The documents are one run of tokens, cut into `len(packed)` windows; epoch e is the numbers from e * len(packed),
    its windows in an order of its own. Each token of the run is an input once an epoch, except for a tail of at most
    `context` tokens. A window of more than `max_documents` documents keeps the first ones; the rest is padding.
    """

    def __init__(self, documents: Documents, context: int, seed: int = 0, max_documents: int | None = None) -> None:
        self.context = check_count(context, "context")
        self.seed = check_count(seed, "seed", minimum=0)
        if max_documents is not None:
            check_count(max_documents, "max_documents")
        self.documents, self.max_documents = documents, max_documents
        self._length = (len(documents) - 1) // context
        if self._length < 1:
            what = f"the data has {len(documents)} tokens to train on, but a sequence takes context + 1 = {context + 1}"
            options = "--model.context of train, --seq of finetune, --context of isoflop"
            raise DepthgateError(f"{what}: give more text, or a smaller context ({options})")

    def __len__(self) -> int:
        return self._length

    def fingerprint(self) -> str:
        return self.documents.fingerprint()

    @property
    def most_documents(self) -> int:
        """The largest number of documents in a window."""
        first = torch.arange(self._length) * self.context
        ends = torch.stack([first, first + self.context - 1])
        start, stop = torch.searchsorted(self.documents.bounds, ends, right=True)
        return int((stop - start).max()) + 1

    def __getitem__(self, number: int) -> Rows:
        return Rows(*(part[0] for part in self.rows([number])))

    def rows(self, numbers: Sequence[int]) -> Rows:
        """The sequences of these numbers, stacked."""
        starts = [self.window(number) * self.context for number in numbers]
        return windows(self.documents, starts, self.context, self.max_documents)

    def window(self, number: int) -> int:
        """The number of the window that a sequence is."""
        epoch, i = divmod(check_count(number, "sequence number", 0, 2**63), self._length)
        return permuted(i, self._length, mix(self.seed, epoch))


def permuted(i: int, n: int, key: int) -> int:
    """Element i of the permutation of range(n) that the key names, without the memory for all of it: a Feistel network
    permutes the next square, and what falls outside n is permuted again until it falls inside."""
    side = isqrt(n - 1) + 1
    while True:
        left, right = divmod(i, side)
        for round_key in _round_keys(key):
            left, right = right, (left + mix(round_key ^ right)) % side
        i = left * side + right
        if i < n:
            return i


@lru_cache(16)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(mix(key, r) for r in range(_ROUNDS))


def batches(
    packed: Numbered, batch: int, start: int = 0, workers: int = 0, rank: int = 0, world: int = 1
) -> Iterator[Rows]:
    """Batches without end, from sequence `start`: rows rank, rank + world ... of every `batch` sequences.

    Workers are threads that prepare the next batches; the work is all in torch, which lets other threads run. The
    stream is the same for any number of workers, and there is nothing to save.
    """
    check_count(batch, "batch")
    check_count(start, "start", minimum=0)
    check_count(workers, "workers", minimum=0, maximum=256)
    check_count(world, "world")
    check_count(rank, "rank", minimum=0, maximum=world - 1)
    check_divides(world, batch, "world", "batch")
    numbers = (range(first + rank, first + batch, world) for first in count(start, batch))
    return _ahead(packed, numbers, workers) if workers else map(packed.rows, numbers)


def _ahead(packed: Numbered, numbers: Iterator[range], workers: int) -> Iterator[Rows]:
    """The rows of these numbers, in order, made by threads before they are asked for."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="depthgate-data")
    try:
        waiting = deque(pool.submit(packed.rows, next(numbers)) for _ in range(2 * workers))
        while True:
            ready = waiting.popleft().result()
            waiting.append(pool.submit(packed.rows, next(numbers)))
            yield ready
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def validation_rows(documents: Documents, context: int, batch: int = 1, most: int | None = None) -> Iterator[Rows]:
    """Windows in order, `batch` at a time, the last batch filled up with padding. They do not overlap, and every token
    but a document's first is a target. With `most`, windows of about that many tokens in all, evenly spread."""
    check_count(context, "context")
    check_count(batch, "batch")
    if len(documents) < 2:
        raise DepthgateError(f"the validation data has {len(documents)} token: it must have at least 2")
    starts = range(0, len(documents) - 1, context)
    if most is not None:
        starts = starts[:: ceil(len(starts) * context / most)]
    past = len(documents)  # a window that begins there is padding
    for i in range(0, len(starts), batch):
        some = starts[i : i + batch]
        yield windows(documents, [*some, *[past] * (batch - len(some))], context)
