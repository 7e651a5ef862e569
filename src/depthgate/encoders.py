"""Sequence encoders: (batch, seq, embed_dim) -> one vector a sequence, (batch, hidden_size).

Input projection, `num_layers` routed blocks, final norm, last valid timestep. Any length works: steps are told apart
by their age, counted back from the last valid one, and those older than the window share the oldest age.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.errors import check_capacity, check_choice, check_count, check_divides, check_head, check_number
from depthgate.layers import Attention, Block, MoD, SoftMoE, SwiGLU
from depthgate.layers.mod import SoftMoD
from depthgate.ops.rows import check_tokens, masked_positions, plain_positions
from depthgate.routing import Plans, TopTokens


class _SequenceEncoder(nn.Module):
    """Shared parts of both encoders; a subclass fills `layers` and says how one is run."""

    def __init__(self, embed_dim: int, hidden_size: int, window: int) -> None:
        super().__init__()
        self.embed_dim = check_count(embed_dim, "embed_dim")
        self.hidden_size = self.output_size = check_count(hidden_size, "hidden_size")
        self.project = nn.Linear(embed_dim, hidden_size)
        self.age = nn.Embedding(window, hidden_size)
        nn.init.normal_(self.age.weight, std=0.02)
        self.layers = nn.ModuleList()
        self.norm = nn.RMSNorm(hidden_size)

    @classmethod
    def recommended_defaults(cls) -> dict[str, Any]:
        """Good first values of the constructor's options; `embed_dim` is not among them, since the data decides it."""
        options = inspect.signature(cls).parameters.values()
        common = [option for option in options if option.kind is option.POSITIONAL_OR_KEYWORD]
        return {option.name: option.default for option in common if option.name not in ("embed_dim", "seq_len")}

    def features(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Plans]:
        """Every timestep after the final norm (batch, seq, hidden_size), and the plans of all layers."""
        check_tokens(x, self.embed_dim, dim_name="embed_dim")
        pos = plain_positions(x) if mask is None else masked_positions(mask, x)
        if mask is not None:
            x = torch.where(mask[..., None], x, 0.0)  # whatever lies in padding, NaN included
        plans: Plans = ()
        hidden = self.project(x)
        if x.shape[0] and x.shape[1]:
            age = pos.max(1, keepdim=True).values - pos
            hidden = hidden + self.age(age.clamp(max=self.age.num_embeddings - 1))
            last = (age == 0) & (pos >= 0)
            for layer in self.layers:
                update, more = self._run(layer, hidden, pos, mask is None, last)
                hidden, plans = hidden + update, plans + more
        return self.norm(hidden), plans

    def _run(self, layer: nn.Module, x: Tensor, pos: Tensor, plain: bool, last: Tensor) -> tuple[Tensor, Plans]:
        """The update of one layer; `last` (batch, seq) marks the timestep that the encoder returns."""
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (batch, seq, embed_dim); mask (batch, seq), True at real timesteps -> (batch, hidden_size).
        A sequence without a real timestep gives zeros."""
        hidden, _ = self.features(x, mask)
        if mask is None:
            return hidden[:, -1:].sum(1)  # 0 where there is none
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        return torch.where(last[..., None], hidden, 0.0).sum(1)


class MoDEncoder(_SequenceEncoder):
    """Mixture-of-Depths encoder: of each sequence only the top `capacity_ratio` of the timesteps go through each
    transformer block, the rest ride the residual.

    The last valid timestep is always among them: it is what the encoder returns, and a token that skips every block
    has seen nothing of the sequence. gating="soft" computes every timestep and blends: g*block(x) + (1-g)*x.
    """

    def __init__(
        self,
        embed_dim: int = 287,
        hidden_size: int = 256,
        num_heads: int = 4,
        capacity_ratio: float = 0.5,
        num_layers: int = 4,
        dropout: float = 0.1,
        window_size: int = 60,
        *,
        gating: str = "hard",
    ) -> None:
        check_count(num_heads, "num_heads")
        head_size = check_divides(num_heads, check_count(hidden_size, "hidden_size"), "num_heads", "hidden_size")
        check_head(head_size, "hidden_size / num_heads")
        check_capacity(capacity_ratio, "capacity_ratio")
        check_choice(gating, "gating", ("hard", "soft"))
        super().__init__(embed_dim, hidden_size, check_count(window_size, "window_size"))
        self.gating = gating
        for _ in range(check_count(num_layers, "num_layers")):
            attention = Attention(hidden_size, num_heads, bidirectional=True)
            block = Block(hidden_size, attention, SwiGLU(hidden_size), dropout)
            if gating == "soft":
                self.layers.append(SoftMoD(block, hidden_size))
            else:
                self.layers.append(MoD(block, TopTokens(hidden_size, capacity_ratio)))

    def _run(self, layer: nn.Module, x: Tensor, pos: Tensor, plain: bool, last: Tensor) -> tuple[Tensor, Plans]:
        kept = {"keep": last} if self.gating == "hard" else {}
        return layer(x, pos=pos, plain=plain, **kept)  # type: ignore[no-any-return]


class SoftMoEBlock(nn.Module):
    """x + dropout(SoftMoE(norm(x))), one slot an expert."""

    def __init__(self, hidden_size: int, num_experts: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(check_count(hidden_size, "hidden_size"))
        self.moe = SoftMoE(hidden_size, num_experts)
        self.dropout = nn.Dropout(check_number(dropout, "dropout", "[0, 1)"))

    def update(self, x: Tensor, pos: Tensor | None = None) -> tuple[Tensor, Plans]:
        """The update of x (B, T, D), and its plan."""
        if pos is not None:
            x = torch.where((pos >= 0)[..., None], x, 0.0)  # whatever lies in padding, NaN included
        update, plans = self.moe(self.norm(x), pos)
        return self.dropout(update), plans

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, T, D); mask (B, T), True at real tokens -> (B, T, D)."""
        check_tokens(x, self.moe.dim, dim_name="hidden_size")
        return x + self.update(x, None if mask is None else masked_positions(mask, x))[0]


class SoftMoEEncoder(_SequenceEncoder):
    """Soft MoE encoder: `num_layers` SoftMoEBlocks, in which timesteps meet in the experts' slots."""

    def __init__(
        self,
        embed_dim: int = 256,
        hidden_size: int = 256,
        num_experts: int = 4,
        num_layers: int = 4,
        dropout: float = 0.1,
        window_size: int = 60,
        seq_len: int | None = None,
    ) -> None:
        """seq_len: number of ages that are told apart; window_size unless given."""
        check_count(window_size, "window_size")
        seq_len = window_size if seq_len is None else check_count(seq_len, "seq_len")
        super().__init__(embed_dim, hidden_size, seq_len)
        for _ in range(check_count(num_layers, "num_layers")):
            self.layers.append(SoftMoEBlock(hidden_size, num_experts, dropout))

    def _run(self, layer: nn.Module, x: Tensor, pos: Tensor, plain: bool, last: Tensor) -> tuple[Tensor, Plans]:  # noqa: ARG002
        return layer.update(x, None if plain else pos)  # type: ignore[operator, no-any-return]
