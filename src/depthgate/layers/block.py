"""The pre-norm transformer block as an update, without the residual."""

from typing import Any

from torch import Tensor, nn

from depthgate.errors import InvalidValueError, check_count, check_number
from depthgate.layers.attention import Attention
from depthgate.ops.rows import check_tokens
from depthgate.routing.plan import Plans


class Block(nn.Module):
    """update = a + ffn(norm(x + a)), a = attention(norm(x)). The feed-forward is any Update: SwiGLU, MoE, Soft MoE."""

    def __init__(
        self, dim: int, attention: Attention, ffn: nn.Module, dropout: float = 0.0, norm_eps: float | None = None
    ) -> None:
        super().__init__()
        self.dim = check_count(dim, "dim")
        for name, part in (("attention", attention), ("ffn", ffn)):
            if getattr(part, "dim", dim) != dim:
                raise InvalidValueError(f"{name} has dim {part.dim}, the block {dim}: give both the same")
        self.attention_norm = nn.RMSNorm(dim, norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(dim, norm_eps)
        self.ffn = ffn
        self.dropout = nn.Dropout(check_number(dropout, "dropout", "[0, 1)"))

    def forward(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        doc: Tensor | None = None,
        cache: Any = None,
        causal: bool = False,
        plain: bool = False,
        max_documents: int | None = None,
    ) -> tuple[Tensor, Plans]:
        check_tokens(x, self.dim)
        attended = self.attention(self.attention_norm(x), pos, doc, cache, plain, max_documents)
        attended = self.dropout(attended)
        call = {"pos": pos, "doc": doc, "causal": causal, "plain": plain, "max_documents": max_documents}
        fed, plans = self.ffn(self.ffn_norm(x + attended), **call)
        return attended + self.dropout(fed), plans

    def add_to(self, x: Tensor, **call: Any) -> tuple[Tensor, Plans]:
        """x plus the update, and the plans."""
        update, plans = self(x, **call)
        return x + update, plans
