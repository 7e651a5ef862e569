"""The parts of a decode step: one new token in each row of a batch, keys and values of those before it in pages.

Each is a function of tensors alone, and is its own specification; `decode_triton` has the kernels that do the same on
CUDA, and return at once where no row computes.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from depthgate.ops.attention import rope, with_half_of, without_cudnn


def tile_of(rows: int) -> int:
    """Rows of a tile of the kernels' products. A row's sums have one order in all batches that have one tile."""
    return 1 if rows == 1 else 16 if rows <= 16 else 64


class Rows(NamedTuple):
    """The rows of a batch that compute: the first `many` of `places`, ascending. Results have the rows in this order,
    and whatever lies beyond them is not computed."""

    places: Tensor  # (B,) int64
    many: Tensor  # () int32
    sure: bool = False  # True for all rows in use: no kernel of the step decides which they are
    turns: Tensor | None = None  # (n,) int32 zeros that kernels of this step count in

    @property
    def tile(self) -> int:
        """Rows of a tile of the kernels' products."""
        return tile_of(len(self.places))

    @property
    def taken(self) -> Tensor:
        """(N,) the rows themselves. Waits for the device."""
        return self.places[: int(self.many)]


class Heads(NamedTuple):
    """The way in which a projection (N, (H + 2 G) d) becomes queries, keys and values."""

    heads: int
    kv_heads: int
    dim: int
    q_norm: Tensor | None  # (d,)
    k_norm: Tensor | None
    eps: float | None


class Pages(NamedTuple):
    """Keys and values of one layer: entry i of row r lies in page table[r, i // size], at place i % size."""

    kv: Tensor  # (P, 2, G, size, d)
    table: Tensor  # (B, n) int32
    lengths: Tensor  # (B,) int32 entries of each row
    last_key: Tensor | None  # (B, G, d) the last key of each row, where keys take half from the token before

    def stored(self, rows: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
        """Keys and values (N, G, most, d) of the first entries of some rows."""
        table = self.table if rows is None else self.table[rows]
        table = table[:, : -(-most // self.kv.shape[3])]
        first, (N, n) = int(table[0, 0]), table.shape
        if n == 1 and table[:, 0].tolist() == list(range(first, first + N)):  # as they lie: nothing is copied
            kv = self.kv[first : first + N]
        else:
            pages = self.kv.index_select(0, table.flatten()).view(N, n, *self.kv.shape[1:]).unbind(1)
            kv = pages[0] if n == 1 else torch.cat(pages, 3)
        return kv[:, 0, :, :most], kv[:, 1, :, :most]


class Layer(NamedTuple):
    """Weights of a routed layer with a SwiGLU; norms with their eps."""

    router: tuple[Tensor, Tensor, Tensor, bool, str]  # as `decide` takes it
    norm: tuple[Tensor, float | None]
    qkv: Tensor
    out: Tensor
    up_norm: tuple[Tensor, float | None]
    up: Tensor
    down: Tensor


def begin(
    embedding: Tensor, token: Tensor, normed: bool, pos: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows (B, D) of the tokens (B,), normalised with `normed`, and the rows of cos and sin (T, d/2) of their
    positions (B,)."""
    if by_kernels(embedding):
        return kernels().begin(embedding, token, normed, pos, cos, sin)  # type: ignore[no-any-return]
    x = F.embedding(token, embedding)
    return F.rms_norm(x, x.shape[-1:]) if normed else x, cos[pos], sin[pos]


def finish(
    tokens: Tensor,
    live: Tensor,
    record: Tensor,
    ring: Tensor,
    steps: Tensor,
    token: Tensor,
    pos: Tensor,
    drawn: Tensor,
    lengths: Tensor,
    seen: Tensor,
) -> None:
    """Write a step down, for the first `live` rows: the tokens (B,) that come next, also in `seen` (B, V); positions,
    numbers drawn (B,) and `lengths` (1 + L, B) grow by one, those of routed layers where they were entered.

    The second row of `record` (2 + L, B) has 0 where logits are not numbers, those after it 1 where a routed layer was
    entered. With the tokens as its first row it goes to the host: into place `steps` of a `ring` (R, n), round and
    round. Then `steps` () grows by one."""
    if by_kernels(tokens):
        kernels().finish(tokens, live, record, ring, steps, token, pos, drawn, lengths, seen)
        return
    record[0] = tokens
    ring[int(steps) % len(ring), : record.numel()] = record.flatten()
    token.copy_(tokens)
    seen.scatter_(1, tokens[:, None], True)
    lengths[1:] += record[2:]
    for each in (steps, pos, drawn, lengths[0]):
        each += 1


def finish_likeliest(
    logits: Tensor,
    turns: Tensor,
    live: Tensor,
    record: Tensor,
    ring: Tensor,
    steps: Tensor,
    token: Tensor,
    pos: Tensor,
    drawn: Tensor,
    lengths: Tensor,
    seen: Tensor,
) -> Tensor:
    """`finish` with the first of the largest of each row of logits (B, V), which are returned. The second row of
    `record` gets 0 where the logits have NaN or +inf, or no finite number: there it is some id in range. A kernel
    counts in the first of `turns`, which is 0."""
    state = ring, steps, token, pos, drawn, lengths, seen
    if by_kernels(logits):
        return kernels().finish_likeliest(logits, turns, live, record, *state)  # type: ignore[no-any-return]
    tokens = logits.argmax(-1)  # NaN is larger than all
    record[1] = logits.gather(1, tokens[:, None])[:, 0].isfinite()
    finish(tokens, live, record, *state)
    return tokens


def linear(
    x: Tensor,
    rows: Rows | None,
    weight: Tensor,
    *,
    gather: bool = True,
    add: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float | None = None,
    glu: bool = False,
    wide: bool = False,
) -> Tensor:
    """weight (F, K) times rows of x (B, K), None: all; or, where `gather` is False, times x itself, which holds those
    rows already. First `add` (N, K) is added, and the sum normalised where there is a norm (K,); in the end, with
    `glu`, the halves are gate and value of a SwiGLU. In float32 with `wide`."""
    if rows is not None and by_kernels(x):
        return kernels().linear(x, rows, weight, gather=gather, add=add, norm=norm, eps=eps, glu=glu, wide=wide)  # type: ignore[no-any-return]
    y = x if rows is None or not gather else x[rows.taken]
    y = y if add is None else y + add
    y = y if norm is None else F.rms_norm(y, y.shape[-1:], norm, eps)
    y = F.linear(y, weight)
    if glu:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up
    return y.float() if wide else y


def add_linear(x: Tensor, rows: Rows | None, weight: Tensor, hidden: Tensor, add: Tensor, gates: Tensor | None) -> None:
    """Add an update to the rows of x (B, D): `add` (N, D) plus weight (D, F) times `hidden` (N, F), each row times its
    gate (N,)."""
    if rows is not None and by_kernels(x):
        kernels().add_linear(x, rows, weight, hidden, add, gates)
        return
    add_rows(x, rows, add + F.linear(hidden, weight), gates)


def add_rows(x: Tensor, rows: Rows | None, update: Tensor, gates: Tensor | None) -> None:
    """Add updates (N, D) to the rows of x (B, D), each times its gate (N,). Where the device alone knows how many rows
    there are, updates beyond them are left out."""
    update = update if gates is None else update * gates[:, None].to(update.dtype)
    if rows is None:
        x += update
    elif by_kernels(x):
        real = torch.arange(len(update), device=x.device) < rows.many
        x.index_add_(0, rows.places, torch.where(real[:, None], update, 0.0).to(x.dtype))
    else:
        x.index_add_(0, rows.taken, update.to(x.dtype))


def attend(
    qkv: Tensor, rows: Rows | None, cos: Tensor, sin: Tensor, heads: Heads, pages: Pages, splits: int = 1
) -> Tensor:
    """Attention of the new token of each row to those before it and itself, (N, (H + 2 G) d) -> (N, H d). Queries and
    keys are turned by cos and sin (B, d/2). The key and value are stored in the row's pages, which have room for them;
    `lengths` stay as they are until the step is over. A kernel makes `splits` parts of each row's entries."""
    if rows is not None and by_kernels(qkv):
        return kernels().attend(qkv, rows, cos, sin, heads, pages, splits)  # type: ignore[no-any-return]
    index, size = None if rows is None else rows.taken, pages.kv.shape[3]
    lengths = pages.lengths
    if index is not None:
        cos, sin, lengths = cos[index], sin[index], lengths[index]
    q, k, v = _turned(qkv, cos, sin, heads)
    place = slice(None) if index is None else index
    if pages.last_key is not None:
        before = torch.where((lengths > 0)[:, None, None], pages.last_key[place], k)
        pages.last_key[place] = k
        k = with_half_of(k, before)
    page = pages.table[place].gather(1, (lengths // size)[:, None].long())[:, 0]
    pages.kv[page, 0, :, lengths % size] = k.to(pages.kv.dtype)
    pages.kv[page, 1, :, lengths % size] = v.to(pages.kv.dtype)
    most = int(lengths.max()) + 1
    keys, values = pages.stored(index, most)
    allowed = None
    if len(q) > 1:
        allowed = (torch.arange(most, device=qkv.device) <= lengths[:, None])[:, None, None]
    grouped = q.view(-1, heads.kv_heads, heads.heads // heads.kv_heads, heads.dim)
    return F.scaled_dot_product_attention(grouped, keys, values, allowed).reshape(len(q), -1)


def _turned(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (N, H, d), keys and values (N, G, d) of a projection (N, (H + 2 G) d), turned by cos and sin (N, d/2)."""
    H, G, d = heads.heads, heads.kv_heads, heads.dim
    q, k, v = qkv.view(-1, H + 2 * G, d).split((H, G, G), dim=1)  # type: ignore[no-untyped-call]
    q = q if heads.q_norm is None else F.rms_norm(q, (d,), heads.q_norm, heads.eps)
    k = k if heads.k_norm is None else F.rms_norm(k, (d,), heads.k_norm, heads.eps)
    return rope(q, cos[:, None], sin[:, None]), rope(k, cos[:, None], sin[:, None]), v


class Span(NamedTuple):
    """Pages of B rows, and where C new entries of each go, of which the first `many` are real."""

    kv: Tensor  # (P, 2, G, size, d)
    table: Tensor  # (B, n)
    past: int  # entries before the new ones; 0 where there is more than one row
    many: Tensor  # (B,)
    page: Tensor | slice  # (B, C) the page of each entry, or B pages that hold those of one row each
    place: Tensor | slice  # (B, C) its place within the page
    last_key: Tensor | None  # (B, G, d) as in Pages; it becomes that of the last real entry


def attend_span(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, span: Span) -> Tensor:
    """`attend` of many new tokens, (B C, (H + 2 G) d) -> (B C, H d), at the angles of cos and sin (B C, d/2): each to
    the entries before it in its row and to itself."""
    B, (H, G, d) = len(span.many), heads[:3]
    q, k, v = (each.view(B, -1, each.shape[1], d) for each in _turned(qkv, cos, sin, heads))
    if span.last_key is not None:
        before = torch.cat((span.last_key[:, None] if span.past else k[:, :1], k), 1)
        span.last_key.copy_(before[torch.arange(B, device=k.device), span.many])
        k = with_half_of(k, before[:, :-1])
    entries = span.kv.transpose(2, 3)
    entries[span.page, 0, span.place], entries[span.page, 1, span.place] = k, v
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    if span.past:
        stored = span.kv.index_select(0, span.table[0, : -(-span.past // span.kv.shape[3])])
        past = stored.permute(1, 2, 0, 3, 4).reshape(2, 1, G, -1, d)[:, :, :, : span.past]
        k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
    if G != H:
        k, v = k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)
    with without_cudnn(q.is_cuda, SDPBackend.FLASH_ATTENTION):
        mask = causal_lower_right(q.shape[2], k.shape[2]) if span.past else None
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not span.past)
    return y.transpose(1, 2).reshape(len(qkv), H * d)


def decide(
    x: Tensor, live: Tensor, entered: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor, normed: bool, gate: str
) -> tuple[Rows, Tensor]:
    """Rows of x (B, D), of the first `live`, whose score is at least the threshold: weight (D,) times the row, or the
    normalised row, plus bias; and their gates in that order, by the name of a gate. `entered` (B,) gets 1 or 0."""
    if by_kernels(x):
        rows, gates = kernels().decide(x, live, entered, weight, bias, threshold, normed, gate)
        return Rows(*rows), gates
    wide = x.float()
    wide = F.rms_norm(wide, wide.shape[-1:]) if normed else wide
    score = wide @ weight + bias
    wanted = (score >= threshold) & (torch.arange(len(x), device=x.device) < live)
    safe = score.nan_to_num(0.0, 1e4, -1e4)
    gates = {"one_plus_tanh": 1 + safe.tanh(), "sigmoid": safe.sigmoid(), "raw": safe}.get(gate, torch.ones_like(safe))
    entered.copy_(wanted)
    return chosen_rows(wanted, gates)


def routed_layer(
    x: Tensor,
    live: Tensor,
    entered: Tensor,
    turns: Tensor,
    layer: Layer,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    pages: Pages,
    splits: int,
) -> None:
    """Decide on the one row of x (1, D), and add the layer's update where it enters. `entered` (1,) gets 1 or 0. In
    `turns` (1,) programs of a kernel wait for each other."""
    if by_kernels(x):
        kernels().routed_layer(x, live, entered, turns, layer, cos, sin, heads, pages, splits)
        return
    rows, gates = decide(x, live, entered, *layer.router)
    if len(rows.places):
        qkv = linear(x, rows, layer.qkv, norm=layer.norm[0], eps=layer.norm[1])
        attended = linear(attend(qkv, rows, cos, sin, heads, pages, splits), rows, layer.out, gather=False)
        hidden = linear(x, rows, layer.up, add=attended, norm=layer.up_norm[0], eps=layer.up_norm[1], glu=True)
        add_linear(x, rows, layer.down, hidden, attended, gates)


def chosen_rows(wanted: Tensor, gates: Tensor) -> tuple[Rows, Tensor]:
    """wanted (B,) bool and gates (B,) -> the rows that are wanted, and their gates in that order."""
    if not by_kernels(wanted):
        places = wanted.nonzero()[:, 0]
        return Rows(places, torch.tensor(len(places))), gates[places]
    places = torch.argsort(~wanted, stable=True)  # without waiting for the device
    return Rows(places, wanted.sum(dtype=torch.int32)), gates[places]


def by_kernels(x: Tensor) -> bool:
    """True where kernels compute, and the device alone knows how many rows there are."""
    return x.is_cuda


def kernels() -> Any:
    """The module of the kernels, for those that have triton."""
    from depthgate.ops import decode_triton

    return decode_triton
