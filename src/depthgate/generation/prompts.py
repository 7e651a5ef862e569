"""The reading of prompts into the pages of a batch, before their rows begin."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from depthgate.generation.batch import TRASH, Batch, Table, Unread, padded
from depthgate.layers import SwiGLU
from depthgate.ops import decode as ops
from depthgate.ops.select import compact

_SPARE_SLOTS = 64  # of a routed layer, beyond twice those that tokens of a prompt take on average


class _Kept(NamedTuple):
    """A prompt of one size as a CUDA graph."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    found: tuple[Tensor, Tensor]


class Prompts:
    """Reads prompts into the pages of a batch. On CUDA a prompt of a size that was there before is a graph."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.config, self.device = batch, batch.model.config, batch.device
        self.waits = self.device.type != "cuda"  # True where to ask the device for a number costs nothing
        # What experts compute, the host has to know.
        self._replays = not self.waits and all(isinstance(layer.block.ffn, SwiGLU) for layer in batch.layers)
        self._kept: dict[int, _Kept | None] = {}  # by tokens; None after the first prompt
        self._pool = torch.cuda.graph_pool_handle() if self._replays else None

    def unread(self, prompts: int) -> Unread:
        """The state of so many prompts before anything is read of them."""
        keys, seen = self.batch.last_keys, self.batch.seen
        layers, _, *key = keys.shape
        return Unread(keys.new_zeros(layers, prompts, *key), seen.new_zeros(prompts, seen.shape[1]))

    def read(self, parts: Table, tables: Sequence[Table], past: list[int], state: Unread) -> tuple[Tensor, Tensor]:
        """Read the next tokens of prompts, whose entries go into the pages of the tables. `past`: entries that one
        prompt has in each group of layers already; 0 where there are several. Returns logits (B, V) after the last
        tokens, and on the host (L, B, T): 1 where a token entered a routed layer. Waits for the device once; again only
        where more tokens entered a layer than there were slots for."""
        B, T, width = len(parts), max(map(len, parts)), max(len(pages) for table in tables for pages in table)
        kept = self._replays and B == 1 and not any(past)
        if kept:
            T, width = min(_rounded(T), self.config.context), self.batch.tables.shape[2]
        tokens = torch.tensor([[*ids, *ids[-1:] * (T - len(ids))] for ids in parts]).to(self.device)
        sizes = torch.tensor([len(ids) for ids in parts]).to(self.device)
        where = padded(tables, width).to(self.device)
        span = partial(self._span, () if kept else tables, where, past)
        state.seen.scatter_(1, tokens, True)
        keys, few = state.last_keys.clone(), min(T, int(2 * self.config.capacity * T) + _SPARE_SLOTS)
        for slots in (None,) if self.waits else (few, T):
            state.last_keys.copy_(keys)
            if kept and slots == few:
                x, entered = self._replayed(few, tokens, sizes, where, state.last_keys)
            else:
                x, entered = self._through(tokens, sizes, past[0], span, state.last_keys, slots)
            host = entered.cpu()
            if slots is None or not len(host) or host.sum(2).max() <= slots:
                break
        x, norm = x.view(B, T, -1)[torch.arange(B, device=self.device), sizes - 1], self.batch.model.norm
        head = self.batch.model.head.weight
        return ops.linear(x, None, head, norm=norm.weight, eps=norm.eps, wide=True), host

    def _replayed(self, slots: int, *given: Tensor) -> tuple[Tensor, Tensor]:
        """`_through` of one prompt from its beginning. The first of its size is launched, which loads all kernels."""
        tokens, _, where, keys = given
        size, none = tokens.shape[1], [0] * len(where)

        def through(tokens: Tensor, sizes: Tensor, where: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
            return self._through(tokens, sizes, 0, partial(self._span, (), where, none), keys, slots)

        if size not in self._kept:
            self._kept[size] = None
            return through(*given)
        if (kept := self._kept[size]) is None:
            inputs, graph = tuple(each.clone() for each in given), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                found = through(*inputs)
            kept = self._kept[size] = _Kept(graph, inputs, found)
        for to, each in zip(kept.inputs, given, strict=True):
            to.copy_(each)
        kept.graph.replay()
        keys.copy_(kept.inputs[-1])
        return kept.found

    def _through(
        self, tokens: Tensor, sizes: Tensor, past: int, span: Callable[..., ops.Span], keys: Tensor, slots: int | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream (B T, D) after all layers, and who entered the routed ones (L, B, T). With `slots`
        nothing waits for the device, and tokens beyond them are left out. What stands after a row's tokens is
        computed too, but they do not look at it."""
        (B, T), batch, entered = tokens.shape, self.batch, list[Tensor]()
        row, place = (torch.arange(n, device=self.device) for n in (B, T))
        real, pos, whole = place < sizes[:, None], (place + past).repeat(B), span(0, sizes, T)
        x, cos, sin = batch.model.embed(tokens.flatten()), batch.cos[pos], batch.sin[pos]
        x = F.rms_norm(x, x.shape[-1:]) if self.config.embed_norm else x
        for n, layer in enumerate(batch.layers):
            last_key = keys[n] if len(keys) else None
            if layer.router is None:
                batch.add_update(layer, x, None, None, cos, sin, whole._replace(kv=layer.kv, last_key=last_key))
                continue
            wanted, gates = (each.view(B, T) for each in layer.router.decide(x, pos))
            entered.append(wanted & real)
            many = entered[-1].sum(1).clamp(max=T if slots is None else slots)
            if (C := int(many.max()) if slots is None else slots) == 0:
                continue
            index, filled = compact(entered[-1], C)
            flat = (index + T * row[:, None]).flatten()
            taken, some = x[flat], span(layer.group, many, C)._replace(kv=layer.kv, last_key=last_key)
            batch.add_update(layer, taken, None, gates.flatten()[flat], cos[flat], sin[flat], some)
            x[flat] = torch.where(filled.reshape(-1, 1), taken, x[flat])
        return x, torch.stack(entered) if entered else real.new_empty(0, B, T)

    def _span(
        self, tables: Sequence[Table], where: Tensor, past: Sequence[int], group: int, many: Tensor, C: int
    ) -> ops.Span:
        """Places in the pages of a group of layers for C entries of each row, after those that are there. The host's
        `tables` make it faster, but what is made of them holds for these rows alone."""
        size, kv, B = self.batch.size, self.batch.layers[0].kv, len(tables)
        begin, pages = past[group] % size, [table[group][past[group] // size] for table in tables]
        step = max(1, pages[min(1, B - 1)] - pages[0]) if pages else 1
        if pages and begin + C <= size and pages == [pages[0] + step * n for n in range(B)]:
            page: Any = slice(pages[0], pages[-1] + 1, step)
            return ops.Span(kv, where[group], past[group], many, page, slice(begin, begin + C), None)
        place = torch.arange(C, device=self.device)
        entry = place + past[group]
        page = where[group][:, (entry // size).clamp(max=where.shape[2] - 1)]
        page = torch.where(place < many[:, None], page, TRASH)
        return ops.Span(kv, where[group], past[group], many, page, (entry % size).expand_as(page), None)


def _rounded(tokens: int) -> int:
    """The next of the sizes for which prompts are kept as graphs: four to an octave, and 64 apart at least."""
    step = max(64, (1 << tokens.bit_length()) >> 3)
    return -(-tokens // step) * step
