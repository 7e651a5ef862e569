"""Keys and values of earlier tokens, layer by layer and row by row: a layer stores only the tokens it computed.

Each row of a layer is a list of entries (key, value, position) in the order of their positions. Rows of a routed layer
are shorter than the text, and differ from each other.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from depthgate.errors import InvalidValueError, check_count

_STEP = 8  # entries a row grows by at least, so that a token does not copy all that were before it
_GROWTH = 1.25


class LayerCache:
    """One layer's store. Memory is taken at the first append, when shapes are known."""

    def __init__(self, rows: int) -> None:
        self.rows = check_count(rows, "rows", minimum=0)
        # keys and values (B, G, S + 1, d), positions (B, S + 1): the last place takes what is not to be stored
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.pos: Tensor | None = None
        self.lengths: Tensor | None = None  # (B,) entries of each row
        self.most = 0  # at least the longest row: known without asking the device

    def append(self, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store k and v (B, G, T, d) of positions pos (B, T), those with pos < 0 left out; each row's positions ascend,
        and come after what it holds. Gives all that is stored, with pos -1 in places that hold nothing."""
        return self._append(k, v, pos, None)

    def at(self, rows: Tensor) -> "RowsOfCache":
        """The store of some rows (A,), as a store of its own."""
        return RowsOfCache(self, rows)

    def _append(self, k: Tensor, v: Tensor, pos: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        stored_k, stored_v, stored_pos, lengths = self._room(k, v, pos.shape[1])
        mine = lengths if rows is None else lengths[rows]
        real = pos >= 0
        rank = real.long().cumsum(1)
        trash = stored_pos.shape[1] - 1
        place = torch.where(real, mine[:, None] + rank - 1, trash)  # (A, T)
        row = (torch.arange(self.rows, device=pos.device) if rows is None else rows)[:, None]
        stored_k[row, :, place] = k.transpose(1, 2).to(stored_k.dtype)
        stored_v[row, :, place] = v.transpose(1, 2).to(stored_v.dtype)
        stored_pos[row, place] = torch.where(real, pos, -1)
        added = rank[:, -1] if pos.shape[1] else torch.zeros_like(mine)
        if rows is None:
            lengths += added
            return stored_k[:, :, : self.most], stored_v[:, :, : self.most], stored_pos[:, : self.most]
        lengths[rows] = mine + added
        return stored_k[rows, :, : self.most], stored_v[rows, :, : self.most], stored_pos[rows, : self.most]

    def _room(self, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The buffers, with room for `tokens` more in every row. The device is asked for the longest row only where
        the host's bound has come to the end of the room."""
        if self.k is None or self.v is None or self.pos is None or self.lengths is None:
            size = _rounded(tokens)
            self.k = k.new_zeros(self.rows, k.shape[1], size + 1, k.shape[3])
            self.v = v.new_zeros(self.rows, v.shape[1], size + 1, v.shape[3])
            self.pos = torch.full((self.rows, size + 1), -1, device=k.device)
            self.lengths = torch.zeros(self.rows, dtype=torch.long, device=k.device)
        elif self.most + tokens > self.pos.shape[1] - 1:
            self.most = int(self.lengths.max()) if self.rows else 0
            if self.most + tokens > self.pos.shape[1] - 1:
                self._resize(_rounded(max(self.most + tokens, int(_GROWTH * self.most))))
        self.most += tokens
        return self.k, self.v, self.pos, self.lengths

    def _resize(self, size: int) -> None:
        assert self.k is not None
        assert self.v is not None
        assert self.pos is not None
        n = min(self.most, self.pos.shape[1] - 1)
        for name in ("k", "v"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], size + 1, old.shape[3])
            new[:, :, :n] = old[:, :, :n]
            setattr(self, name, new)
        pos = self.pos.new_full((self.rows, size + 1), -1)
        pos[:, :n] = self.pos[:, :n]
        self.pos = pos

    def crop(self, position: int | Tensor) -> None:
        """Forget what is at `position` and after it: one for all rows, or one for each (B,)."""
        if self.pos is None or self.lengths is None:
            return
        limit = torch.as_tensor(position, device=self.pos.device).reshape(-1, 1)
        kept = (self.pos >= 0) & (self.pos < limit)
        self.lengths = kept.sum(1)
        self.pos = torch.where(kept, self.pos, -1)
        if isinstance(position, int):
            self.most = min(self.most, max(0, position))

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (N,), in this order; any may come several times, or not at all."""
        self.rows = len(rows)
        if self.k is None or self.v is None or self.pos is None or self.lengths is None:
            return
        self.k, self.v = self.k[rows], self.v[rows]
        self.pos, self.lengths = self.pos[rows], self.lengths[rows]

    def trim(self) -> None:
        """Give back memory that holds nothing; asks the device."""
        if self.pos is not None and self.lengths is not None:
            self.most = int(self.lengths.max()) if self.rows else 0
            self._resize(self.most)

    @property
    def nbytes(self) -> int:
        """Memory taken for keys and values."""
        return sum(t.nbytes for t in (self.k, self.v) if t is not None)


class RowsOfCache:
    """Some rows of a layer's store."""

    def __init__(self, cache: LayerCache, rows: Tensor) -> None:
        self.cache, self.rows = cache, rows

    def append(self, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.cache._append(k, v, pos, self.rows)

    def at(self, rows: Tensor) -> "RowsOfCache":
        return RowsOfCache(self.cache, self.rows[rows])


def _rounded(size: int) -> int:
    return -(-size // _STEP) * _STEP


class Cache(Sequence[LayerCache]):
    """The stores of all layers of a model."""

    def __init__(self, layers: int, rows: int) -> None:
        self.layers = [LayerCache(rows) for _ in range(check_count(layers, "layers", minimum=0))]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        return self.layers[i]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    def crop(self, position: int | Tensor) -> None:
        """Forget what is at `position` and after it, in every layer."""
        for layer in self.layers:
            layer.crop(position)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows, in every layer: finished ones leave, beams change places."""
        if rows.ndim != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
            raise InvalidValueError(f"rows is {rows.dtype} of shape {tuple(rows.shape)}: give whole numbers (N,)")
        for layer in self.layers:
            layer.select(rows)

    def repeat(self, times: int) -> None:
        """Every row `times` times, copies beside each other."""
        rows = torch.arange(self.rows).repeat_interleave(check_count(times, "times"))
        for layer in self.layers:
            layer.select(rows if layer.pos is None else rows.to(layer.pos.device))

    def trim(self) -> None:
        """Give back memory that holds nothing, in every layer."""
        for layer in self.layers:
            layer.trim()

    @property
    def rows(self) -> int:
        return self.layers[0].rows if self.layers else 0

    @property
    def nbytes(self) -> int:
        """Memory taken for keys and values."""
        return sum(layer.nbytes for layer in self.layers)
