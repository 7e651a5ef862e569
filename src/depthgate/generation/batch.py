"""The rows of an engine, on the device: what each has read, in pages, how it samples, and the step that all make.

Nothing is allocated for good after the start: rows come and go, pages are handed out by the engine.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthgate.cache import LayerCache
from depthgate.config import ROUTED_KINDS
from depthgate.generation.sampling import Filters, pick, uniform
from depthgate.layers import Attention, Block, MoD, SwiGLU
from depthgate.layers.ffn import swiglu
from depthgate.model import Decoder
from depthgate.ops.attention import rotation, with_half_of
from depthgate.ops.decode import Heads, Pages, Rows, add_update, attend, linear

TRASH = 0  # the page of rows that hold nothing


class Likely(NamedTuple):
    """Log-probabilities, as the model says, before all filters."""

    token: Tensor  # (N,) of the token that was picked
    best: Tensor  # (N, n) of the likeliest, best first
    ids: Tensor  # (N, n) which these are

    def read(self) -> list[tuple[float, list[tuple[int, float]]]]:
        """Those of each row, for the host. Waits for the device."""
        best = [list(zip(*row, strict=True)) for row in zip(self.ids.tolist(), self.best.tolist(), strict=True)]
        return list(zip(self.token.tolist(), best, strict=True))


class Taken(NamedTuple):
    """What a step found for each row."""

    tokens: Tensor  # (B,) the tokens that come next
    entered: Tensor  # (B, L) the routed layers that the tokens before them went through: 1 or 0
    finite: Tensor  # (B,) bool: False where the logits are not numbers
    likely: Likely | None


class _Layer(NamedTuple):
    block: Block
    router: Any  # None in a layer that every token goes through
    group: int  # whose table and lengths it has: 0 in those, and in routed layers one of its own
    kv: Tensor  # (P, 2, G, size, d)
    heads: Heads


class Batch:
    """Rows for sequences of a model, with pages for their keys and values: `dense` pages, each for all the layers that
    every token goes through, and `routed` pages, each for one routed layer. The first `live` rows are in use."""

    def __init__(self, model: Decoder, rows: int, dense: int, routed: int, size: int) -> None:
        config, weight = model.config, model.embed.weight
        self.model, self.size, self.device, self.live = model, size, weight.device, 0
        kinds = [kind in ROUTED_KINDS for kind in config.kinds]
        blocks: list[Any] = [layer.block if isinstance(layer, MoD) else layer for layer in model.layers]
        attention: Attention = blocks[0].attention
        groups, page = 1 + sum(kinds), (2, attention.kv_heads, size, attention.head_dim)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        dense_kv = zeros(dense + 1, kinds.count(False), *page, dtype=weight.dtype)
        routed_kv = zeros(routed + 1, *page, dtype=weight.dtype)
        self.last_keys = [
            zeros(rows, page[1], page[3], dtype=weight.dtype) if config.key_shift else None for _ in kinds
        ]
        self.tables = zeros(groups, rows, -(-config.context // size), dtype=torch.int32)
        self.lengths = zeros(groups, rows, dtype=torch.int32)
        self.token, self.pos, self.seeds, self.drawn = (zeros(rows) for _ in range(4))
        self.seen = zeros(rows, config.vocab, dtype=torch.bool)
        places, wide = (
            torch.arange(config.context, device=self.device),
            torch.promote_types(weight.dtype, torch.float32),
        )
        angles = rotation(places[None], attention.head_dim // 2, attention.rope_base, wide)
        self.cos, self.sin = (each[0, :, 0] for each in angles)  # (context, d/2)
        self.layers: list[_Layer] = []
        for n, (layer, block) in enumerate(zip(model.layers, blocks, strict=True)):
            before = sum(kinds[:n])
            where = (1 + before, routed_kv) if kinds[n] else (0, dense_kv[:, n - before])
            self.layers.append(_Layer(block, getattr(layer, "router", None), *where, _heads(block)))

    def put(
        self,
        caches: Sequence[LayerCache],
        of: int,
        tables: Sequence[Sequence[int]],
        lengths: Sequence[int],
        **state: Tensor,
    ) -> int:
        """Begin a row with what row `of` of some caches holds: so many entries in each group of layers, which go into
        the pages of the tables; and with its state. Returns the row."""
        row = self.live
        self.live += 1
        for group, pages in enumerate(tables):
            self.tables[group, row] = TRASH
            self.set_pages(row, group, 0, pages)
            self.lengths[group, row] = lengths[group]
        for layer, last_key, cache in zip(self.layers, self.last_keys, caches, strict=True):
            n = lengths[layer.group]
            if cache.store is None or not n:
                continue
            k, v = cache.store.k[of, :, :n], cache.store.v[of, :, :n]  # (G, n, d)
            if last_key is not None:
                last_key[row] = k[:, -1]
                k = with_half_of(k, torch.cat((k[:, :1], k[:, :-1]), 1))
            place = torch.arange(n, device=self.device)
            page = self.tables[layer.group, row].long()[place // self.size]
            layer.kv[page, 0, :, place % self.size] = k.transpose(0, 1)
            layer.kv[page, 1, :, place % self.size] = v.transpose(0, 1)
        self.pos[row] = lengths[0]
        for name, value in state.items():
            getattr(self, name)[row] = value
        return row

    def set_pages(self, row: int, group: int, first: int, pages: Sequence[int]) -> None:
        """Write pages into the table of a row, from place `first` on."""
        self.tables[group, row, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def drop(self, row: int) -> None:
        """End a row; the last one takes its place. Pages stay where they are."""
        self.live -= 1
        if row != self.live:
            state = [self.token, self.pos, self.seeds, self.drawn, self.seen]
            state += [self.tables.transpose(0, 1), self.lengths.T, *(k for k in self.last_keys if k is not None)]
            for each in state:
                each[row] = each[self.live]

    def step(self, filters: Filters, top: int | None) -> Taken:
        """Read the last token of every row, and pick the next. `top`: also find the log-probability of each token, and
        of so many of the likeliest."""
        B = self.live
        pos, token = self.pos[:B], self.token[:B]
        cos, sin = self.cos[pos], self.sin[pos]
        x = self.model.embed(token)
        if self.model.config.embed_norm:
            x = F.rms_norm(x, x.shape[-1:])
        entered = []
        for n, layer in enumerate(self.layers):
            rows, gates = None, None
            if layer.router is not None:
                wanted, gates = (each[:, 0] for each in layer.router.decide(x, pos))
                entered.append(wanted)
                places = wanted.nonzero()[:, 0]
                if not len(places):
                    continue
                rows, gates = Rows(places, torch.tensor(len(places))), gates[places]
            x = add_update(x, rows, self._update(n, x, rows, cos, sin), gates)
        ways = torch.stack(entered, 1).int() if entered else token.new_zeros(B, 0, dtype=torch.int32)
        self.lengths[:, :B] += torch.cat((torch.ones_like(token[:, None]), ways), 1).T
        logits = self.model.head(self.model.norm(x)).float()
        tokens = pick(logits, filters, self.seen[:B], uniform(self.seeds[:B], self.drawn[:B]))
        self.seen[:B].scatter_(1, tokens[:, None], True)
        token.copy_(tokens)
        pos += 1
        self.drawn[:B] += 1
        return Taken(tokens, ways, logits.amax(-1).isfinite(), likely(logits, tokens, top))

    def _update(self, n: int, x: Tensor, rows: Rows | None, cos: Tensor, sin: Tensor) -> Tensor:
        """The update of a layer's block for its rows."""
        layer, B, last_key = self.layers[n], self.live, self.last_keys[n]
        block, attention = layer.block, layer.block.attention
        last_key = None if last_key is None else last_key[:B]
        pages = Pages(layer.kv, self.tables[layer.group, :B], self.lengths[layer.group, :B], last_key)
        qkv = linear(x, rows, attention.qkv.weight, norm=block.attention_norm.weight, eps=block.attention_norm.eps)
        attended = linear(attend(qkv, rows, cos, sin, layer.heads, pages), None, attention.out.weight)
        norm = block.ffn_norm
        if isinstance(block.ffn, SwiGLU):
            hidden = linear(x, rows, block.ffn.up.weight, add=attended, norm=norm.weight, eps=norm.eps)
            return attended + linear(swiglu(hidden), None, block.ffn.down.weight)
        taken = x if rows is None else x[rows.taken]
        fed, _ = block.ffn(norm(taken + attended)[:, None], plain=True, causal=True)
        return attended + fed[:, 0]  # type: ignore[no-any-return]


def likely(logits: Tensor, tokens: Tensor, top: int | None) -> Likely | None:
    """Log-probabilities of the tokens (N,), and of the `top` likeliest; None where top is None."""
    if top is None:
        return None
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(top, logits.shape[1]), -1)
    return Likely(logprobs.gather(1, tokens[:, None])[:, 0], best.values, best.indices)


def _heads(block: nn.Module) -> Heads:
    attention: Any = block.attention
    q_norm, k_norm = (getattr(norm, "weight", None) for norm in (attention.q_norm, attention.k_norm))
    eps = getattr(attention.q_norm, "eps", None)
    return Heads(attention.heads, attention.kv_heads, attention.head_dim, q_norm, k_norm, eps)
