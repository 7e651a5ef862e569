"""Keys and values of earlier tokens, layer by layer and row by row: a layer stores only the tokens it computed.

Each row of a layer is a list of entries (key, value, position) in the order of their positions. Rows of a routed layer
are shorter than the text, and differ in length.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_STEP = 8  # entries a row grows by at least, so that one more token rarely copies those before it
_GROWTH = 1.25


class Store(NamedTuple):
    """Buffers of one layer, with S places for entries in each row, and one more for tokens that are not to be kept."""

    k: Tensor  # (B, G, S + 1, d)
    v: Tensor  # (B, G, S + 1, d)
    pos: Tensor  # (B, S + 1), -1 in places that hold nothing
    lengths: Tensor  # (B,) entries of each row

    @property
    def size(self) -> int:
        return self.pos.shape[1] - 1

    @property
    def longest(self) -> int:
        """Entries of the longest row. Waits for the device."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def resized(self, size: int, used: int) -> "Store":
        """The same entries, all of them in the first `used` places, in rows of `size` places."""
        more = size + 1 - used
        k, v = (pad(old[:, :, :used], (0, 0, 0, more)) for old in (self.k, self.v))
        return Store(k, v, pad(self.pos[:, :used], (0, more), value=-1), self.lengths)


class LayerCache:
    """The cache of one layer. Memory is taken at the first append, when shapes are known."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.store: Store | None = None
        self.most = 0  # at least the length of the longest row: known without waiting for the device

    def append(
        self, k: Tensor, v: Tensor, pos: Tensor, rows: Tensor | slice = slice(None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store k and v (B, G, T, d) of positions pos (B, T), without those of pos < 0, and return everything stored,
        with pos -1 in places that hold nothing. The positions of a row ascend, and come after those it holds."""
        store = self._room(k, v, pos.shape[1])
        real = pos >= 0
        lengths = store.lengths[rows, None] + real.cumsum(1)  # after each token
        place = torch.where(real, lengths - 1, store.size)  # (A, T)
        row = torch.arange(self.rows, device=pos.device)[rows, None]
        store.k[row, :, place] = k.transpose(1, 2).to(store.k.dtype)
        store.v[row, :, place] = v.transpose(1, 2).to(store.v.dtype)
        store.pos[row, place] = torch.where(real, pos, -1)
        store.lengths[rows] += real.sum(1)
        return store.k[rows, :, : self.most], store.v[rows, :, : self.most], store.pos[rows, : self.most]

    def at(self, rows: Tensor) -> "RowsOfCache":
        """These rows (A,), as a cache of their own."""
        return RowsOfCache(self, rows)

    def _room(self, k: Tensor, v: Tensor, tokens: int) -> Store:
        """The buffers, with room for `tokens` more in every row. Waits for the device, to learn the length of the
        longest row, only where `most` has come to the end of the room."""
        if self.store is None:
            no_k, no_v = (x.new_zeros(self.rows, x.shape[1], 1, x.shape[3]) for x in (k, v))
            no_pos = torch.full((self.rows, 1), -1, device=k.device)
            self.store = Store(no_k, no_v, no_pos, torch.zeros(self.rows, dtype=torch.long, device=k.device))
        if self.most + tokens > self.store.size:
            self.most = self.store.longest
        if self.most + tokens > self.store.size:
            size = max(self.most + tokens, int(_GROWTH * self.most))
            self.store = self.store.resized(-(-size // _STEP) * _STEP, self.most)
        self.most += tokens
        return self.store

    def crop(self, position: int | Tensor) -> None:
        """Forget what is at `position` and after it: one for all rows, or one for each (B,)."""
        if self.store is not None:
            k, v, pos, _ = self.store
            kept = (pos >= 0) & (pos < torch.as_tensor(position, device=pos.device).reshape(-1, 1))
            self.store = Store(k, v, torch.where(kept, pos, -1), kept.sum(1))

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (N,), in this order; a row may come several times, or not at all. Where they are fewer
        than before, memory that holds nothing is given back, which waits for the device."""
        fewer, self.rows = len(rows) < self.rows, len(rows)
        if self.store is not None:
            self.store = Store(*(buffer[rows] for buffer in self.store))
            if fewer:  # the longest may have left
                self.most = self.store.longest
                self.store = self.store.resized(self.most, self.most)

    @property
    def nbytes(self) -> int:
        """Memory taken for keys and values."""
        return 0 if self.store is None else self.store.k.nbytes + self.store.v.nbytes


class RowsOfCache(NamedTuple):
    cache: LayerCache
    rows: Tensor

    def append(self, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.cache.append(k, v, pos, self.rows)

    def at(self, rows: Tensor) -> "RowsOfCache":
        return RowsOfCache(self.cache, self.rows[rows])
