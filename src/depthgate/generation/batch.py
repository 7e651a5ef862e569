"""The rows of an engine, on the device: what each has read, in pages, how it samples, and the step that all make.

Nothing is allocated for good after the start: rows come and go, pages are handed out by the engine. On CUDA a step is a
graph that is replayed, and nothing in it waits for the host: the engine can be some steps ahead.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgate.config import ROUTED_KINDS
from depthgate.generation.config import Sampling
from depthgate.generation.sampling import Filters, Likely, as_numbers, likely, pick, uniform, used_filters
from depthgate.layers import Attention, Block, MoD, MoE, SwiGLU
from depthgate.model import Decoder
from depthgate.ops import decode as ops
from depthgate.ops.attention import rotation
from depthgate.routing.causal import Scores, Threshold
from depthgate.routing.routers import TopTokens
from depthgate.routing.scores import Scorer, gate_name

TRASH = 0  # the page of rows that hold nothing
_TURNS = 4096  # tiles of a product whose programs may take turns
RING = 16  # steps whose results are kept for the host
_WARMUP = 2  # steps before a capture, in which kernels are compiled


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


Table = list[list[int]]  # the pages of one row, of each group of layers


def padded(tables: Sequence[Table], width: int) -> Tensor:
    """(groups, B, width) int32, with TRASH after the pages of each."""
    each = [[[*pages, *[TRASH] * (width - len(pages))] for pages in group] for group in zip(*tables, strict=True)]
    return torch.tensor(each, dtype=torch.int32)


class Unread(NamedTuple):
    """What is known of prompts that are not read to their ends."""

    last_keys: Tensor  # (layers, B, G, d) where keys take half from the token before
    seen: Tensor  # (B, V) tokens that were read


class _Layer(NamedTuple):
    block: Block
    router: Any  # None in a layer that every token goes through
    group: int  # whose table and lengths it has: 0 in those, and in routed layers one of its own
    kv: Tensor  # (P, 2, G, size, d)
    heads: ops.Heads
    rule: tuple[Any, ...] | None  # what a kernel needs to decide
    whole: ops.Layer | None  # for a kernel that is a routed layer


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
        greedy = as_numbers(Sampling(temperature=0.0))
        self.options = torch.tensor([greedy] * rows, dtype=torch.float64, device=self.device)
        places, wide = (
            torch.arange(config.context)[None].to(self.device),
            torch.promote_types(weight.dtype, torch.float32),
        )
        angles = rotation(places, attention.head_dim // 2, attention.rope_base, wide)
        self.cos, self.sin = (each[0, :, 0] for each in angles)  # (context, d/2)
        self.layers: list[_Layer] = []
        for n, (layer, block) in enumerate(zip(model.layers, blocks, strict=True)):
            before = sum(kinds[:n])
            where = (1 + before, routed_kv) if kinds[n] else (0, dense_kv[:, n - before])
            router = getattr(layer, "router", None)
            rule = simple_rule(router) if router is not None and ops.by_kernels(weight) else None
            self.layers.append(_Layer(block, router, *where, _heads(block), rule, _whole(block, rule)))
        self.turns = zeros(_TURNS, dtype=torch.int32)
        self.ring = torch.zeros(RING, (1 + groups) * rows, dtype=torch.int32, pin_memory=weight.is_cuda)
        self.steps, self.begun = zeros(), 0  # on the device, and as the host counts
        self._graphs: dict[tuple[Any, ...], Callable[[], Likely | None]] = {}

    def begin(self, logits: Tensor, state: Unread, tables: Any, lengths: Any, draws: Any, samplings: Any) -> Tensor:
        """Begin rows with prompts that were read, and pick their first tokens, which are returned. Of each: its table,
        entries in each group, seed and how many numbers were drawn, options."""
        rows = slice(self.live, self.live + len(logits))
        self._set_live(rows.stop)
        self.tables[:, rows] = padded(tables, self.tables.shape[2])
        self.lengths[:, rows] = torch.tensor(lengths, dtype=torch.int32).T
        self.options[rows] = torch.tensor([as_numbers(each) for each in samplings], dtype=torch.float64)
        self.seeds[rows], self.drawn[rows] = torch.tensor(draws).T
        self.pos[rows], self.seen[rows], self.last_keys[:, rows] = self.lengths[0, rows], state.seen, state.last_keys
        self.token[rows] = tokens = self._picked(logits, rows, used_filters(samplings))
        self.seen[rows].scatter_(1, tokens[:, None], True)
        self.drawn[rows] += 1
        return tokens

    def _picked(self, logits: Tensor, rows: slice, used: tuple[bool, ...]) -> Tensor:
        numbers = uniform(self.seeds[rows], self.drawn[rows]) if used[0] else None
        return pick(logits, Filters.of(self.options[rows], used), self.seen[rows], numbers)

    def set_pages(self, row: int, group: int, first: int, pages: Sequence[int]) -> None:
        """Write pages into the table of a row, from place `first` on."""
        self.tables[group, row, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def clean(self, pages: Table) -> None:
        """Forget what pages of a row hold: masked or not, NaN would spread to the row that has them next."""
        for layer in self.layers:
            layer.kv[[TRASH, *pages[layer.group]]] = 0

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
        x, cos, sin = ops.begin(model.embed.weight, token, model.config.embed_norm, pos, self.cos, self.sin)
        all_rows = ops.Rows(self.all_rows[:B], self.alive, sure=True, turns=self.turns) if ops.by_kernels(x) else None
        record = lengths.new_empty(1 + len(lengths), B)
        for n, layer in enumerate(self.layers):
            if layer.router is None:
                self.add_update(layer, x, all_rows, None, cos, sin, self._pages(n, B))
                continue
            entered = record[1 + layer.group]
            if B == 1 and layer.whole is not None:
                pages = self._pages(n, B)
                turns, splits = self.turns[-1:], _splits(B, routed=True)
                ops.routed_layer(x, self.alive, entered, turns, layer.whole, cos, sin, layer.heads, pages, splits)
                continue
            rows, gates = self._decide(layer, x, pos, entered)
            if len(rows.places):
                self.add_update(layer, x, rows, gates, cos, sin, self._pages(n, B))
        logits = ops.linear(x, all_rows, model.head.weight, norm=model.norm.weight, eps=model.norm.eps, wide=True)
        state = record, self.ring, self.steps, token, pos, self.drawn[:B], lengths, self.seen[:B]
        if any(used):
            tokens = self._picked(logits, slice(B), used)
            record[1] = logits.amax(-1).isfinite()
            ops.finish(tokens, self.alive, *state)
        else:
            tokens = ops.finish_likeliest(logits, self.turns, self.alive, *state)
        return likely(logits, tokens, top)

    def _decide(self, layer: _Layer, x: Tensor, pos: Tensor, entered: Tensor) -> tuple[ops.Rows, Tensor]:
        """The rows of x that a routed layer takes, and their gates; `entered` (B,) gets 1 or 0."""
        if layer.rule is not None:
            rows, gates = ops.decide(x, self.alive, entered, *layer.rule)
            return rows._replace(turns=self.turns), gates
        wanted, gates = (each[:, 0] for each in layer.router.decide(x, pos))
        wanted = wanted & (self.all_rows[: len(x)] < self.alive)
        entered.copy_(wanted)
        rows, gates = ops.chosen_rows(wanted, gates)
        return rows._replace(turns=self.turns), gates

    def _pages(self, n: int, B: int) -> ops.Pages:
        layer = self.layers[n]
        last_key = self.last_keys[n, :B] if len(self.last_keys) else None
        return ops.Pages(layer.kv, self.tables[layer.group, :B], self.lengths[layer.group, :B], last_key)

    def add_update(
        self,
        layer: _Layer,
        x: Tensor,
        rows: ops.Rows | None,
        gates: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        kv: ops.Pages | ops.Span,
    ) -> None:
        """Add the update of a layer to its rows of x."""
        block, attention, norm = layer.block, layer.block.attention, layer.block.attention_norm
        qkv = ops.linear(x, rows, attention.qkv.weight, norm=norm.weight, eps=norm.eps)
        if isinstance(kv, ops.Span):
            attended = ops.attend_span(qkv, cos, sin, layer.heads, kv)
        else:
            attended = ops.attend(qkv, rows, cos, sin, layer.heads, kv, _splits(len(x), gates is not None))
        attended = ops.linear(attended, rows, attention.out.weight, gather=False)
        norm, ffn = block.ffn_norm, block.ffn
        if isinstance(ffn, SwiGLU):
            hidden = ops.linear(x, rows, ffn.up.weight, add=attended, norm=norm.weight, eps=norm.eps, glu=True)
            ops.add_linear(x, rows, ffn.down.weight, hidden, attended, gates)
        else:
            taken = x if rows is None else x[rows.places]
            hidden = norm(taken + attended)
            assert isinstance(ffn, MoE)
            alone = ops.by_kernels(x) and rows is not None  # a step; a prompt may wait for the device
            fed = ffn.each_alone(hidden) if alone else ffn(hidden[:, None], plain=True, causal=True)[0][:, 0]
            ops.add_rows(x, rows, attended + fed, gates)


def _splits(rows: int, routed: bool) -> int:
    """Parts of a row's entries that are read side by side: more where few rows of a batch compute."""
    return {1: (64, 64), 16: (8, 32), 64: (2, 8)}[ops.tile_of(rows)][routed]


def _whole(block: Block, rule: tuple[Any, ...] | None) -> ops.Layer | None:
    attention, ffn, norm, up_norm = block.attention, block.ffn, block.attention_norm, block.ffn_norm
    if rule is None or not isinstance(ffn, SwiGLU):
        return None
    norms = (norm.weight, norm.eps), (up_norm.weight, up_norm.eps)
    return ops.Layer(
        rule, norms[0], attention.qkv.weight, attention.out.weight, norms[1], ffn.up.weight, ffn.down.weight
    )


def _heads(block: Block) -> ops.Heads:
    attention = block.attention
    q_norm, k_norm = (getattr(norm, "weight", None) for norm in (attention.q_norm, attention.k_norm))
    eps = getattr(attention.q_norm, "eps", None)
    return ops.Heads(attention.heads, attention.kv_heads, attention.head_dim, q_norm, k_norm, eps)


def simple_rule(router: TopTokens) -> tuple[Tensor, Tensor, Tensor, bool, str] | None:
    """Weight, bias and threshold of a router's score, True where it reads normalised tokens, and the name of its gate;
    None for a router that is more than that."""
    known, rule = isinstance(router.proj, Scorer), router.rule
    name = gate_name(router.gate)
    if not known or name is None or not isinstance(rule, Scores | Threshold):
        return None
    weight, bias = router.proj.weight[0].detach().float().contiguous(), router.proj.bias.detach().float()
    threshold = rule.threshold.float() if isinstance(rule, Threshold) else torch.zeros_like(bias)
    return weight, bias, threshold, router.normed, name
