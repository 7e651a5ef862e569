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
from depthgate.layers import Block, MoD, SwiGLU
from depthgate.layers.ffn import swiglu
from depthgate.model import Decoder
from depthgate.ops.attention import with_half_of
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
    """What a step found for each live row, in the order of the rows."""

    tokens: Tensor  # (N,) the tokens that come next
    entered: Tensor  # (N, L) the routed layers that the tokens before them went through: 1 or 0
    finite: Tensor  # (N,) bool: False where the logits are not numbers
    likely: Likely | None


class _Layer(NamedTuple):
    block: Block
    router: Any  # None in a layer that every token goes through
    group: int  # whose table and lengths it has: 0 in those, and in routed layers one of its own
    kv: Tensor  # (P, 2, G, size, d)
    last_key: Tensor | None
    heads: Heads


class Batch:
    """Rows for sequences of a model, with pages for their keys and values: `dense` pages, each for all the layers that
    every token goes through, and `routed` pages, each for one routed layer."""

    def __init__(self, model: Decoder, rows: int, dense: int, routed: int, size: int) -> None:
        config = model.config
        weight = model.embed.weight
        self.model, self.size, self.device = model, size, weight.device
        kinds = [kind in ROUTED_KINDS for kind in config.kinds]
        blocks: list[Any] = [layer.block if isinstance(layer, MoD) else layer for layer in model.layers]
        attention = blocks[0].attention
        page = (2, attention.kv_heads, size, attention.head_dim)
        groups = 1 + sum(kinds)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        all_kv = zeros(dense + 1, kinds.count(False), *page, dtype=weight.dtype)
        routed_kv = zeros(routed + 1, *page, dtype=weight.dtype)
        last_keys = (
            zeros(len(kinds), rows, page[1], page[3], dtype=weight.dtype) if config.key_shift else [None] * len(kinds)
        )
        self.tables = zeros(groups, rows, -(-config.context // size), dtype=torch.int32)
        self.lengths = zeros(groups, rows, dtype=torch.int32)
        self.token, self.pos, self.seeds, self.drawn = (zeros(rows) for _ in range(4))
        self.live = zeros(rows, dtype=torch.bool)
        self.seen = zeros(rows, config.vocab, dtype=torch.bool)
        self.layers: list[_Layer] = []
        for n, (layer, block) in enumerate(zip(model.layers, blocks, strict=True)):
            before = sum(kinds[:n])
            where = (1 + before, routed_kv) if kinds[n] else (0, all_kv[:, n - before])
            self.layers.append(_Layer(block, getattr(layer, "router", None), *where, last_keys[n], _heads(block)))

    def put(
        self,
        row: int,
        caches: Sequence[LayerCache],
        of: int,
        lengths: Sequence[int],
        token: Tensor,
        seen: Tensor,
        seed: Tensor,
        drawn: Tensor,
    ) -> None:
        """Let a row begin with what row `of` of some caches holds, so many entries in each group of layers, and with
        its first token. Its pages stand in the tables."""
        for group, length in enumerate(lengths):
            self.lengths[group, row] = length
        for layer, cache in zip(self.layers, caches, strict=True):
            n = lengths[layer.group]
            if cache.store is None or not n:
                continue
            k, v = cache.store.k[of, :, :n], cache.store.v[of, :, :n]  # (G, n, d)
            if layer.last_key is not None:
                layer.last_key[row] = k[:, -1]
                k = with_half_of(k, torch.cat((k[:, :1], k[:, :-1]), 1))
            place = torch.arange(n, device=self.device)
            page = self.tables[layer.group, row].long()[place // self.size]
            layer.kv[page, 0, :, place % self.size] = k.transpose(0, 1)
            layer.kv[page, 1, :, place % self.size] = v.transpose(0, 1)
        state = {"token": token, "pos": lengths[0], "seen": seen, "seeds": seed, "drawn": drawn, "live": True}
        for name, value in state.items():
            getattr(self, name)[row] = value

    def step(self, filters: Filters, top: int | None) -> Taken:
        """Read the last token of every live row, and pick the next. `filters` are those of the live rows. `top`: also
        find the log-probability of each token, and of so many of the likeliest."""
        index = self.live.nonzero()[:, 0]
        rows = _rows(index)
        x = self.model.embed(self.token)
        if self.model.config.embed_norm:
            x = F.rms_norm(x, x.shape[-1:])
        entered = []
        for layer in self.layers:
            taken, gates = rows, None
            if layer.router is not None:
                wanted, gates = (each[:, 0] for each in layer.router.decide(x[index], self.pos[index]))
                entered.append(wanted)
                taken, gates = _rows(index[wanted]), gates[wanted]
            if len(taken.places):
                add_update(x, taken, self._update(layer, x, taken), gates)
                if layer.router is not None:
                    self.lengths[layer.group, taken.places] += 1
        self.lengths[0, index] += 1
        logits = self.model.head(self.model.norm(x[index])).float()
        seen = None if filters.repetition_penalty is None else self.seen[index]
        tokens = pick(logits, filters, seen, uniform(self.seeds[index], self.drawn[index]))
        self.token[index] = tokens
        self.seen[index, tokens] = True
        self.pos[index] += 1
        self.drawn[index] += 1
        ways = torch.stack(entered, 1).int() if entered else index.new_zeros(len(index), 0)
        return Taken(tokens, ways, logits.amax(-1).isfinite(), likely(logits, tokens, top))

    def _update(self, layer: _Layer, x: Tensor, rows: Rows) -> Tensor:
        """The update of a layer's block for its rows."""
        block, attention = layer.block, layer.block.attention
        pages = Pages(layer.kv, self.tables[layer.group], self.lengths[layer.group], layer.last_key)
        qkv = linear(x, rows, attention.qkv.weight, norm=block.attention_norm.weight, eps=block.attention_norm.eps)
        attended = F.linear(attend(qkv, rows, self.pos, layer.heads, pages), attention.out.weight)
        norm = block.ffn_norm
        if isinstance(block.ffn, SwiGLU):
            hidden = linear(x, rows, block.ffn.up.weight, add=attended, norm=norm.weight, eps=norm.eps)
            return attended + F.linear(swiglu(hidden), block.ffn.down.weight)
        fed, _ = block.ffn(norm(x[rows.taken] + attended)[:, None], plain=True, causal=True)
        return attended + fed[:, 0]  # type: ignore[no-any-return]


def likely(logits: Tensor, tokens: Tensor, top: int | None) -> Likely | None:
    """Log-probabilities of the tokens (N,), and of the `top` likeliest; None where top is None."""
    if top is None:
        return None
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(top, logits.shape[1]), -1)
    return Likely(logprobs.gather(1, tokens[:, None])[:, 0], best.values, best.indices)


def _rows(index: Tensor) -> Rows:
    return Rows(index, torch.tensor(len(index)))


def _heads(block: nn.Module) -> Heads:
    attention: Any = block.attention
    q_norm, k_norm = (getattr(norm, "weight", None) for norm in (attention.q_norm, attention.k_norm))
    eps = getattr(attention.q_norm, "eps", None)
    return Heads(attention.heads, attention.kv_heads, attention.head_dim, q_norm, k_norm, eps, attention.rope_base)
