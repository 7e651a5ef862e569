"""Feed-forwards: SwiGLU for every token, and stacked experts for rows that a plan has sorted."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthgate.errors import InvalidValueError, check_choice, check_count
from depthgate.flops import swiglu_hidden
from depthgate.ops.matmul import expert_matmul, grouped_matmul
from depthgate.ops.rows import check_tokens
from depthgate.routing.plan import Plans


def swiglu(gate_and_up: Tensor) -> Tensor:
    """silu(g) * u of the two halves (Shazeer 2020, GLU variants)."""
    gate, up = gate_and_up.chunk(2, -1)
    return F.silu(gate) * up


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), token by token."""

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        self.dim = check_count(dim, "dim")
        self.hidden = swiglu_hidden(dim) if hidden is None else check_count(hidden, "hidden")
        self.up = nn.Linear(dim, 2 * self.hidden, bias=False)
        self.down = nn.Linear(self.hidden, dim, bias=False)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Plans]:
        check_tokens(x, self.dim)
        return self.down(swiglu(self.up(x))), ()


class MLP(nn.Module):
    """down(gelu(up x)), with biases, token by token: the feed-forward of vision transformers."""

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        self.dim = check_count(dim, "dim")
        self.hidden = 4 * dim if hidden is None else check_count(hidden, "hidden")
        self.up = nn.Linear(dim, self.hidden)
        self.down = nn.Linear(self.hidden, dim)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Plans]:
        check_tokens(x, self.dim)
        return self.down(F.gelu(self.up(x))), ()


# name -> (how many times `hidden` the first product is wide, what follows it)
_ACTIVATIONS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {"swiglu": (2, swiglu), "gelu": (1, F.gelu)}


class Experts(nn.Module):
    """E two-layer networks with stacked weights: one batched or grouped product per layer, never a loop."""

    def __init__(
        self, num_experts: int, dim: int, hidden: int, *, activation: str = "swiglu", bias: bool = False
    ) -> None:
        super().__init__()
        self.num_experts = check_count(num_experts, "num_experts")
        self.dim = check_count(dim, "dim")
        self.hidden = check_count(hidden, "hidden")
        self.activation = check_choice(activation, "activation", _ACTIVATIONS)
        width = _ACTIVATIONS[activation][0] * hidden
        self.up = nn.Parameter(torch.empty(num_experts, dim, width))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.up_bias = nn.Parameter(torch.empty(num_experts, width)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(inputs), as in nn.Linear."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, dim={self.dim}, hidden={self.hidden}, activation={self.activation!r}"

    def forward(self, rows: Tensor) -> Tensor:
        """rows (B, E, C, D), each expert its own -> the same shape."""
        if rows.ndim != 4 or (rows.shape[1], rows.shape[3]) != (self.num_experts, self.dim):
            raise InvalidValueError(
                f"rows has shape {tuple(rows.shape)}: it must be (batch, {self.num_experts}, slots, {self.dim})"
            )
        B, E, C, D = rows.shape
        activation = _ACTIVATIONS[self.activation][1]
        x = rows.transpose(0, 1).reshape(E, B * C, D)
        h = activation(_add(expert_matmul(x, self.up), self.up_bias))
        y = _add(expert_matmul(h, self.down), self.down_bias)
        return y.reshape(E, B, C, D).transpose(0, 1)

    def grouped(self, rows: Tensor, ends: Tensor, complete: bool = False) -> Tensor:
        """rows (N, D) sorted by expert, those of expert e ending at ends[e] -> (N, D); later rows are not computed,
        and `complete` promises that there are none."""
        activation = _ACTIVATIONS[self.activation][1]
        h = grouped_matmul(rows, self.up, ends, complete)
        if self.up_bias is not None:
            h = h + _per_row(self.up_bias, ends, len(rows))
        y = grouped_matmul(activation(h), self.down, ends, complete)
        if self.down_bias is not None:
            y = y + _per_row(self.down_bias, ends, len(rows))
        return y


def _add(x: Tensor, bias: Tensor | None) -> Tensor:
    """x (E, N, F) + bias (E, F)."""
    return x if bias is None else x + bias[:, None].to(x.dtype)


def _per_row(bias: Tensor, ends: Tensor, N: int) -> Tensor:
    """bias (E, F) -> (N, F): each row its expert's; rows past the last expert get the last one's, unread."""
    expert = torch.searchsorted(ends, torch.arange(N, device=ends.device, dtype=ends.dtype), right=True)
    return bias[expert.clamp(max=len(bias) - 1)]
