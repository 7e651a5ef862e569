"""Self-attention with grouped keys and values (GQA) and rotary positions. The mask comes from positions alone."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthgate.errors import InvalidValueError, check_count, check_divides, check_head, check_number
from depthgate.ops.attention import (
    cached_attention,
    can_pack,
    packed_attention,
    rope,
    rotation,
    token_before,
    with_half_of,
)
from depthgate.ops.rows import check_per_token, check_tokens, plain_positions, take_rows


class KeyValues(Protocol):
    """A layer's store of earlier keys and values, each (B, H, T, d), with their positions (B, T): see `cache`."""

    def append(self, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def at(self, rows: Tensor) -> "KeyValues": ...


class Attention(nn.Module):
    """Multi-head attention over the tokens it is given, at the positions they carry."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        qk_norm: bool = False,
        rope_base: float = 10_000.0,
        bidirectional: bool = False,
        head_dim: int | None = None,
        norm_eps: float | None = None,
        key_shift: bool = False,
    ) -> None:
        """key_shift: half of each key (the slower rotary pairs) is that of the token before, among those the layer is
        given, so that one layer can look for what followed a token. A document's first token has its own."""
        super().__init__()
        self.dim = check_count(dim, "dim")
        self.heads = check_count(heads, "heads")
        self.kv_heads = heads if kv_heads is None else check_count(kv_heads, "kv_heads", maximum=heads)
        self.head_dim = check_count(head_dim, "head_dim") if head_dim else check_divides(heads, dim, "heads", "dim")
        check_divides(self.kv_heads, heads, "kv_heads", "heads")
        check_head(self.head_dim, "head_dim" if head_dim else "dim / heads", key_shift)
        self.key_shift = key_shift
        self.rope_base = check_number(rope_base, "rope_base", "(0, inf)")
        self.bidirectional = bidirectional
        self.qkv = nn.Linear(dim, (heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, norm_eps) if qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        doc: Tensor | None = None,
        cache: KeyValues | None = None,
        plain: bool = False,
        max_documents: int | None = None,
    ) -> Tensor:
        check_tokens(x, self.dim)
        B, T, _ = x.shape
        if pos is None:
            pos, plain = plain_positions(x), doc is None and cache is None
        else:
            check_per_token(pos, x, "pos")
        if doc is not None:
            check_per_token(doc, x, "doc")
            if cache is not None:
                raise InvalidValueError("doc and cache are both given: a cache holds one document a row")
        H, G, d = self.heads, self.kv_heads, self.head_dim
        q, k, v = self.qkv(x).view(B, T, H + 2 * G, d).split((H, G, G), dim=2)
        cos, sin = rotation(pos, d // 2, self.rope_base, torch.promote_types(x.dtype, torch.float32))
        q, k = self.q_norm(q), self.k_norm(k)
        if x.is_cuda:
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        else:  # fewer operations, which is what small models wait for
            q, k = rope(torch.cat((q, k), 2), cos, sin).split((H, G), 2)  # type: ignore[no-untyped-call]
        if self.key_shift and cache is None:
            k = with_half_of(k, self._before(k, pos, doc, plain, max_documents))
        if doc is not None and max_documents is not None and can_pack(v) and not self.bidirectional:
            y = packed_attention(q, k, v, doc, max_documents)
            return self.out(y.reshape(B, T, H * d))  # type: ignore[no-any-return]
        q, k, v, key_pos = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), pos
        if cache is not None:
            k, v, key_pos = cache.append(k, v, pos)
            if self.key_shift:  # a row of the cache holds its tokens in order, without padding
                k = with_half_of(k, torch.cat((k[:, :, :1], k[:, :, :-1]), 2))
            y = cached_attention(q, k, v, self._mask(pos, key_pos, doc))
        else:
            mask = None if plain else self._mask(pos, key_pos, doc)
            causal = plain and not self.bidirectional
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=G != H)
        return self.out(y.transpose(1, 2).reshape(B, T, H * d))  # type: ignore[no-any-return]

    def _before(self, k: Tensor, pos: Tensor, doc: Tensor | None, plain: bool, max_documents: int | None) -> Tensor:
        """The keys (B, T, G, d) of the tokens before."""
        before = torch.cat((k[:, :1], k[:, :-1]), 1)
        if plain:
            return before
        if doc is not None and max_documents is not None:  # no padding stands between two tokens of a document
            first = torch.cat((torch.ones_like(doc[:, :1], dtype=torch.bool), doc[:, 1:] != doc[:, :-1]), 1)
            return torch.where(first[..., None, None], k, before)
        return take_rows(k, token_before(pos, doc))

    def _mask(self, query: Tensor, key: Tensor, doc: Tensor | None) -> Tensor:
        """Positions (B, Tq), (B, Tk) -> (B, 1, Tq, Tk), True where a query may look."""
        q, k = query[:, :, None], key[:, None, :]
        allowed = (k >= 0).expand(-1, q.shape[1], -1)
        if not self.bidirectional:
            allowed = allowed & (k <= q)
        if doc is not None:
            allowed = allowed & (doc[:, :, None] == doc[:, None, :])
        # Padding looks at everything: its result is thrown away, and looking at nothing would be 0/0.
        return (allowed | (q < 0))[:, None]
