"""The rows of an engine, on the device: what each has read, in pages, how it samples, and the step that all make.

Nothing is allocated for good after the start: rows come and go, pages are handed out by the engine. On CUDA a step is a
graph that is replayed, and nothing in it waits for the host: the engine can be some steps ahead.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from depthgate.config import ROUTED_KINDS
from depthgate.generation.config import Sampling
from depthgate.generation.sampling import Filters, as_numbers, pick, uniform, used_filters
from depthgate.layers import Attention, Block, MoD, MoE, SwiGLU
from depthgate.model import Decoder
from depthgate.ops.attention import rotation
from depthgate.ops.decode import (
    Heads,
    Layer,
    Pages,
    Rows,
    Span,
    add_linear,
    add_rows,
    attend,
    attend_span,
    begin,
    by_kernels,
    chosen_rows,
    decide,
    finish,
    finish_likeliest,
    linear,
    routed_layer,
    tile_of,
)
from depthgate.ops.select import compact
from depthgate.routing.causal import Scores, Threshold
from depthgate.routing.gates import GATES
from depthgate.routing.routers import Scorer, TopTokens

TRASH = 0  # the page of rows that hold nothing
_TURNS = 4096  # tiles of a product whose programs may take turns
RING = 16  # steps whose results are kept for the host
_WARMUP = 2  # steps before a capture, in which kernels are compiled


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
    """What a step found for each row; on its way to the host, or there."""

    record: Tensor  # (2 + L, B) int32: tokens that come next; 1 where logits are numbers; routed layers entered, 1 or 0
    likely: Likely | None
    ready: torch.cuda.Event | None

    def read(self) -> tuple[list[int], list[int], list[list[int]]]:
        """Tokens, whether their logits were numbers, and the routed layers that the tokens before them went through,
        row by row. Waits until they are there."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, finite, *_ = self.record.tolist()
        return tokens, finite, self.record[2:].T.tolist()


def _to_host(each: Tensor) -> Tensor:
    return torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)


class Unread(NamedTuple):
    """What is known of prompts that are not read to their ends."""

    last_keys: Tensor  # (layers, B, G, d) where keys take half from the token before
    seen: Tensor  # (B, V) tokens that were read


class _Layer(NamedTuple):
    block: Block
    router: Any  # None in a layer that every token goes through
    group: int  # whose table and lengths it has: 0 in those, and in routed layers one of its own
    kv: Tensor  # (P, 2, G, size, d)
    heads: Heads
    rule: tuple[Any, ...] | None  # what a kernel needs to decide
    whole: Layer | None  # for a kernel that is a routed layer


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
        self.last_keys = zeros(len(kinds) * config.key_shift, rows, page[1], page[3], dtype=weight.dtype)
        self.tables = zeros(groups, rows, -(-config.context // size), dtype=torch.int32)
        self.lengths = zeros(groups, rows, dtype=torch.int32)
        self.alive, self.all_rows = zeros(dtype=torch.int32), torch.arange(rows, device=self.device)
        self.token, self.pos, self.seeds, self.drawn = (zeros(rows) for _ in range(4))
        self.seen = zeros(rows, config.vocab, dtype=torch.bool)
        # In rows that are not in use, too, filters are in range.
        self.options = torch.tensor(
            [as_numbers(Sampling(temperature=0.0))], dtype=torch.float64, device=self.device
        ).repeat(rows, 1)
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
            router = getattr(layer, "router", None)
            rule = simple_rule(router) if router is not None and by_kernels(weight) else None
            self.layers.append(_Layer(block, router, *where, _heads(block), rule, _whole(block, rule)))
        self.turns = zeros(_TURNS, dtype=torch.int32)
        self.ring = torch.zeros(RING, (1 + groups) * rows, dtype=torch.int32, pin_memory=weight.is_cuda)
        self.steps, self.begun = zeros(), 0  # on the device, and as the host counts
        self.waits = not weight.is_cuda  # True where to ask the device for a number costs nothing
        self._graphs: dict[tuple[Any, ...], Callable[[], Likely | None]] = {}

    def unread(self, prompts: int) -> Unread:
        """The state of so many prompts before anything is read of them."""
        keys, seen = self.last_keys.shape, self.seen.shape[1]
        return Unread(self.last_keys.new_zeros(keys[0], prompts, *keys[2:]), self.seen.new_zeros(prompts, seen))

    def read(
        self,
        parts: Sequence[Sequence[int]],
        tables: Sequence[Sequence[Sequence[int]]],
        past: Sequence[int],
        state: Unread,
    ) -> tuple[Tensor, Tensor]:
        """Read the next tokens of prompts, whose entries go into the pages of the tables, of each group of layers.
        `past`: entries of one prompt in each group before; 0 where there are several. Returns logits (B, V) after the
        last tokens, and (L, B, T) on the host: 1 where a token entered a routed layer. Waits for the device once; again
        only where more tokens entered a layer than there were slots for."""
        T, groups, device = max(map(len, parts)), range(len(past)), self.device
        tokens = torch.tensor([[*ids, *ids[-1:] * (T - len(ids))] for ids in parts]).to(device)
        most = max(len(pages) for table in tables for pages in table)
        padded = [[[*table[g], *[TRASH] * (most - len(table[g]))] for table in tables] for g in groups]
        where, sizes = torch.tensor(padded).to(device), torch.tensor([len(ids) for ids in parts]).to(device)
        state.seen.scatter_(1, tokens, True)
        keys, few = state.last_keys.clone(), min(T, int(2 * self.model.config.capacity * T) + 64)
        for slots in (None,) if self.waits else (few, T):
            state.last_keys.copy_(keys)
            x, entered = self._through(tokens, sizes, where, past, state.last_keys, slots)
            host = entered.cpu()
            if slots is None or not len(host) or host.sum(2).max() <= slots:
                break
        last = x.view(*tokens.shape, -1)[torch.arange(len(parts), device=device), sizes - 1]
        norm = self.model.norm
        return linear(last, None, self.model.head.weight, norm=norm.weight, eps=norm.eps, wide=True), host

    def _through(
        self, tokens: Tensor, sizes: Tensor, where: Tensor, past: Sequence[int], last_keys: Tensor, slots: int | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream (B T, D) after all layers, and who entered the routed ones (L, B, T). With `slots` nothing
        waits for the device, and tokens beyond them are left out."""
        (B, T), model = tokens.shape, self.model
        place = torch.arange(T, device=self.device)
        real, pos = (place < sizes[:, None]).flatten(), (place + past[0]).repeat(B)
        x, cos, sin = model.embed(tokens.flatten()), self.cos[pos], self.sin[pos]
        x = F.rms_norm(x, x.shape[-1:]) if model.config.embed_norm else x
        all_of_them, record = self._span(where[0], past[0], sizes, T), [torch.zeros(0, B, T, dtype=torch.bool)]
        for n, layer in enumerate(self.layers):
            own = last_keys[n] if len(last_keys) else None
            pages, group = Pages(layer.kv, where[layer.group], sizes, own), layer.group
            if layer.router is None:
                around = partial(attend_span, cos=cos, sin=sin, heads=layer.heads, pages=pages, span=all_of_them)
                self._add_update(layer, x, None, None, around)
                continue
            wanted, gates = (each[:, 0] for each in layer.router.decide(x, pos))
            wanted = (wanted & real).view(B, T)
            record.append(wanted[None])
            many = wanted.sum(1)
            C = int(many.max()) if slots is None else slots
            if C == 0:
                continue
            index, filled = compact(wanted, C)
            flat = (index + T * torch.arange(B, device=self.device)[:, None]).flatten()
            taken, span = x[flat], self._span(where[group], past[group], many, C)
            around = partial(attend_span, cos=cos[flat], sin=sin[flat], heads=layer.heads, pages=pages, span=span)
            self._add_update(layer, taken, None, gates[flat], around)
            x.index_copy_(0, flat, torch.where(filled.view(-1, 1), taken, x[flat]))
        return x, torch.cat([each.to(self.device) for each in record])

    def _span(self, table: Tensor, past: int, many: Tensor, C: int) -> Span:
        """Places in the pages of a table (B, n) for C entries of each row, after those that are there."""
        place = torch.arange(C, device=self.device)
        entry = place + past
        page = table[:, (entry // self.size).clamp(max=table.shape[1] - 1)]
        page = torch.where(place < many[:, None], page, TRASH)
        return Span(page, (entry % self.size).expand_as(page), many, past)

    def begin(
        self,
        logits: Tensor,
        tables: Sequence[Sequence[Sequence[int]]],
        lengths: Sequence[Sequence[int]],
        seeds: Sequence[int],
        drawn: Sequence[int],
        samplings: Sequence[Sampling],
        state: Unread,
    ) -> Tensor:
        """Begin rows with prompts that were read, and pick their first tokens, which are returned."""
        rows = slice(self.live, self.live + len(logits))
        self._set_live(rows.stop)
        padded = [
            [[*table[g], *[TRASH] * (self.tables.shape[2] - len(table[g]))] for table in tables]
            for g in range(len(self.tables))
        ]
        self.tables[:, rows] = torch.tensor(padded, dtype=torch.int32)
        self.lengths[:, rows] = torch.tensor(lengths, dtype=torch.int32).T
        self.pos[rows] = self.lengths[0, rows]
        numbers = [as_numbers(each) for each in samplings]
        self.options[rows] = torch.tensor(numbers, dtype=torch.float64)
        self.seeds[rows], self.drawn[rows] = torch.tensor(seeds), torch.tensor(drawn)
        self.seen[rows] = state.seen
        self.last_keys[:, rows] = state.last_keys
        tokens = self._picked(logits, rows, used_filters(samplings))
        self.token[rows] = tokens
        self.drawn[rows] += 1
        self.seen[rows].scatter_(1, tokens[:, None], True)
        return tokens

    def _picked(self, logits: Tensor, rows: slice, used: tuple[bool, ...]) -> Tensor:
        numbers = uniform(self.seeds[rows], self.drawn[rows]) if used[0] else None
        return pick(logits, Filters.of(self.options[rows], used), self.seen[rows], numbers)

    def set_pages(self, row: int, group: int, first: int, pages: Sequence[int]) -> None:
        """Write pages into the table of a row, from place `first` on."""
        self.tables[group, row, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def drop(self, row: int) -> None:
        """End a row; the last one takes its place. Pages stay where they are."""
        self._set_live(self.live - 1)
        if row != self.live:
            state = [self.token, self.pos, self.seeds, self.drawn, self.seen, self.options]
            state += [self.tables.transpose(0, 1), self.lengths.T, self.last_keys.transpose(0, 1)]
            for each in state:
                each[row] = each[self.live]

    def _set_live(self, rows: int) -> None:
        self.live = rows
        self.alive.fill_(rows)

    def step(self, used: tuple[bool, ...], top: int | None) -> Taken:
        """Read the last token of every row, and pick the next. `used`: the filters that a row has. `top`: also find the
        log-probability of each token, and of so many of the likeliest. What it found is kept for RING steps."""
        B = self._rows()
        if self.device.type == "cuda":
            key = (B, used, top)
            if key not in self._graphs:
                self._graphs[key] = self._captured(*key)
            likely, ready = self._graphs[key](), torch.cuda.Event()  # type: ignore[no-untyped-call]
            likely = None if likely is None else Likely(*map(_to_host, likely))
            ready.record()
        else:
            likely, ready = self._body(B, used, top), None
        record = self.ring[self.begun % RING, : (1 + len(self.lengths)) * B].view(-1, B)
        self.begun += 1
        return Taken(record, likely, ready)

    def _rows(self) -> int:
        """Rows of a step: there are graphs for powers of two."""
        return min(1 << (self.live - 1).bit_length(), len(self.all_rows)) if self.all_rows.is_cuda else self.live

    def _captured(self, B: int, used: tuple[bool, ...], top: int | None) -> Callable[[], Likely | None]:
        """The step of the first B rows as a CUDA graph."""
        kept = [self.token, self.pos, self.drawn, self.lengths, self.seen, self.steps, self.last_keys]
        before = [each.clone() for each in kept]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP):
                self._body(B, used, top)
                for each, old in zip(kept, before, strict=True):
                    each.copy_(old)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self._body(B, used, top)

        def replay() -> Likely | None:
            graph.replay()
            return found

        return replay

    def _body(self, B: int, used: tuple[bool, ...], top: int | None) -> Likely | None:
        """A step of the first B rows. On a CPU all of them are live; on CUDA the device knows which are."""
        model, pos, token, lengths = self.model, self.pos[:B], self.token[:B], self.lengths[:, :B]
        x, cos, sin = begin(model.embed.weight, token, model.config.embed_norm, pos, self.cos, self.sin)
        all_rows = Rows(self.all_rows[:B], self.alive, sure=True, turns=self.turns) if by_kernels(x) else None
        record = lengths.new_empty(1 + len(lengths), B)
        for n, layer in enumerate(self.layers):
            if layer.router is None:
                self._step_through(n, x, all_rows, None, cos, sin)
                continue
            entered = record[1 + layer.group]
            if B == 1 and layer.whole is not None:
                pages = self._pages(n, B)
                turns, splits = self.turns[-1:], _splits(B, routed=True)
                routed_layer(x, self.alive, entered, turns, layer.whole, cos, sin, layer.heads, pages, splits)
                continue
            rows, gates = self._decide(layer, x, pos, entered)
            if len(rows.places):
                self._step_through(n, x, rows, gates, cos, sin)
        logits = linear(x, all_rows, model.head.weight, norm=model.norm.weight, eps=model.norm.eps, wide=True)
        state = record, self.ring, self.steps, token, pos, self.drawn[:B], lengths, self.seen[:B]
        if any(used):
            tokens = self._picked(logits, slice(B), used)
            record[1] = logits.amax(-1).isfinite()
            finish(tokens, self.alive, *state)
        else:
            tokens = finish_likeliest(logits, self.turns, self.alive, *state)
        return likely(logits, tokens, top)

    def _decide(self, layer: _Layer, x: Tensor, pos: Tensor, entered: Tensor) -> tuple[Rows, Tensor]:
        """The rows of x that a routed layer takes, and their gates; `entered` (B,) gets 1 or 0."""
        if layer.rule is not None:
            rows, gates = decide(x, self.alive, entered, *layer.rule)
            return rows._replace(turns=self.turns), gates
        wanted, gates = (each[:, 0] for each in layer.router.decide(x, pos))
        wanted = wanted & (self.all_rows[: len(x)] < self.alive)
        entered.copy_(wanted)
        rows, gates = chosen_rows(wanted, gates)
        return rows._replace(turns=self.turns), gates

    def _pages(self, n: int, B: int) -> Pages:
        layer = self.layers[n]
        last_key = self.last_keys[n, :B] if len(self.last_keys) else None
        return Pages(layer.kv, self.tables[layer.group, :B], self.lengths[layer.group, :B], last_key)

    def _step_through(
        self, n: int, x: Tensor, rows: Rows | None, gates: Tensor | None, cos: Tensor, sin: Tensor
    ) -> None:
        """Add the update of a layer to its rows of x, one token each."""
        layer, splits = self.layers[n], _splits(len(x), gates is not None)
        call = {"rows": rows, "cos": cos, "sin": sin, "heads": layer.heads, "pages": self._pages(n, len(x))}
        self._add_update(layer, x, rows, gates, partial(attend, **call, splits=splits))

    def _add_update(
        self, layer: _Layer, x: Tensor, rows: Rows | None, gates: Tensor | None, attend: Callable[[Tensor], Tensor]
    ) -> None:
        """Add the update of a layer to its rows of x; `attend` has the keys and values of those before them."""
        block, attention, norm = layer.block, layer.block.attention, layer.block.attention_norm
        qkv = linear(x, rows, attention.qkv.weight, norm=norm.weight, eps=norm.eps)
        attended = linear(attend(qkv), rows, attention.out.weight, gather=False)
        norm, ffn = block.ffn_norm, block.ffn
        if isinstance(ffn, SwiGLU):
            hidden = linear(x, rows, ffn.up.weight, add=attended, norm=norm.weight, eps=norm.eps, glu=True)
            add_linear(x, rows, ffn.down.weight, hidden, attended, gates)
        else:
            taken = x if rows is None else x[rows.places]
            hidden = norm(taken + attended)
            assert isinstance(ffn, MoE)
            fed = ffn.each_alone(hidden) if by_kernels(x) else ffn(hidden[:, None], plain=True, causal=True)[0][:, 0]
            add_rows(x, rows, attended + fed, gates)


def likely(logits: Tensor, tokens: Tensor, top: int | None) -> Likely | None:
    """Log-probabilities of the tokens (N,), and of the `top` likeliest; None where top is None."""
    if top is None:
        return None
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(top, logits.shape[1]), -1)
    return Likely(logprobs.gather(1, tokens[:, None])[:, 0], best.values, best.indices)


def _splits(rows: int, routed: bool) -> int:
    """Parts of a row's entries that are read side by side: more where few rows of a batch compute."""
    return {1: (64, 64), 16: (8, 32), 64: (2, 8)}[tile_of(rows)][routed]


def _whole(block: Block, rule: tuple[Any, ...] | None) -> Layer | None:
    attention, ffn, norm, up_norm = block.attention, block.ffn, block.attention_norm, block.ffn_norm
    if rule is None or not isinstance(ffn, SwiGLU):
        return None
    norms = (norm.weight, norm.eps), (up_norm.weight, up_norm.eps)
    return Layer(rule, norms[0], attention.qkv.weight, attention.out.weight, norms[1], ffn.up.weight, ffn.down.weight)


def _heads(block: Block) -> Heads:
    attention = block.attention
    q_norm, k_norm = (getattr(norm, "weight", None) for norm in (attention.q_norm, attention.k_norm))
    eps = getattr(attention.q_norm, "eps", None)
    return Heads(attention.heads, attention.kv_heads, attention.head_dim, q_norm, k_norm, eps)


def simple_rule(router: TopTokens) -> tuple[Tensor, Tensor, Tensor, bool, str] | None:
    """Weight, bias and threshold of a router's score, True where it reads normalised tokens, and the name of its gate;
    None for a router that is more than that."""
    known, rule = isinstance(router.proj, Scorer), router.rule
    name = next((name for name, gate in GATES.items() if gate is router.gate), None)
    if not known or name is None or not isinstance(rule, Scores | Threshold):
        return None
    weight, bias = router.proj.weight[0].detach().float().contiguous(), router.proj.bias.detach().float()
    threshold = rule.threshold.float() if isinstance(rule, Threshold) else torch.zeros_like(bias)
    return weight, bias, threshold, router.normed, name
