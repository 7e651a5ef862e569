"""Soft MoE (Puigcerver et al. 2023, arXiv 2308.00951): experts see weighted means of tokens, in slots."""

from typing import Any

import torch
from torch import Tensor, nn

from depthgate.errors import InvalidValueError, check_count
from depthgate.layers.ffn import Experts
from depthgate.ops.rows import check_tokens, masked_positions
from depthgate.ops.soft import working_dtype
from depthgate.routing.plan import Plans
from depthgate.routing.routers import SoftSlots


class SoftMoE(nn.Module):
    """A fully differentiable feed-forward: Y = C experts(D^T X). Returns the update, without the residual.

    Experts are GELU networks with biases, four times as wide as `dim` unless `hidden` says otherwise.
    """

    def __init__(
        self, dim: int, num_experts: int, slots_per_expert: int = 1, *, hidden: int | None = None, **router: Any
    ) -> None:
        """router: further options of SoftSlots."""
        super().__init__()
        self.dim = check_count(dim, "dim")
        self.router = SoftSlots(dim, num_experts, slots_per_expert, **router)
        hidden = 4 * dim if hidden is None else check_count(hidden, "hidden")
        self.experts = Experts(num_experts, dim, hidden, activation="gelu", bias=True)

    def forward(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        doc: Tensor | None = None,
        cache: Any = None,  # noqa: ARG002
        causal: bool = False,
        plain: bool = False,
        max_documents: int | None = None,  # noqa: ARG002
        *,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Plans]:
        """x (B, T, D); mask (B, T), True at real tokens, in place of pos. Padding gets an update of 0."""
        check_tokens(x, self.dim)
        if mask is not None:
            pos, plain = masked_positions(mask, x), False
        if doc is not None:
            raise InvalidValueError("Soft MoE mixes all tokens of a row: pass one document a row, not doc")
        if working_dtype(x) is torch.bfloat16:
            x = x.to(torch.bfloat16)  # once, where autocast would do so time and again
        plan = self.router(x, None if plain else pos, causal)
        return plan.combine(self.experts(plan.dispatch(x))), (plan,)
