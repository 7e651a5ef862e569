"""Mixture-of-Depths (Raposo et al. 2024, arXiv 2404.02258): only the tokens a router picks go through a block."""

from typing import Any

import torch
from torch import Tensor, nn

from depthgate.errors import InvalidValueError
from depthgate.ops.rows import check_tokens, plain_positions
from depthgate.routing.plan import Plans, Slots
from depthgate.routing.routers import TopTokens
from depthgate.routing.scores import Scorer, sigmoid


class MoD(nn.Module):
    """Equation 1 as an update: combine(block(dispatch(x))), over tokens that keep their own positions.

    `block` is an Update. At capacity 1 and gate 1 this is the block itself, bit for bit. A Decoder calls `add_to`,
    which gives x plus the update and leaves the tokens that skip alone.
    """

    def __init__(self, block: nn.Module, router: TopTokens) -> None:
        super().__init__()
        if not isinstance(block, nn.Module) or not isinstance(router, TopTokens):
            raise InvalidValueError(
                f"MoD got a {type(block).__name__} and a {type(router).__name__}: it needs a module and a TopTokens"
            )
        self.router = router
        self.block = block

    def forward(self, x: Tensor, *args: Any, **call: Any) -> tuple[Tensor, Plans]:
        """The arguments of an Update, and keep (B, T) bool: tokens routed before all others, whatever their score."""
        plan, rows, plans = self._computed(x, *args, **call)
        return plan.combine(rows), plans

    def add_to(self, x: Tensor, *args: Any, **call: Any) -> tuple[Tensor, Plans]:
        """x plus the update, and the plans. Only the routed tokens are added up; the others are not touched."""
        plan, rows, plans = self._computed(x, *args, **call)
        return plan.add(x, rows), plans

    def _computed(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        doc: Tensor | None = None,
        cache: Any = None,
        causal: bool = False,
        plain: bool = False,
        max_documents: int | None = None,
        keep: Tensor | None = None,
    ) -> tuple[Slots, Tensor, Plans]:
        """The plan; the block's update (B, 1, C, D) of the rows that it takes; the plan and those within the block."""
        check_tokens(x, self.router.dim)
        if pos is None:
            pos, plain = plain_positions(x), doc is None and cache is None
        plan = self.router(x, None if plain else pos, causal, doc=doc, keep=keep, max_documents=max_documents)
        rows, row_pos = plan.dispatch(x, fill=0)[:, 0], plan.dispatch(pos, fill=-1)[:, 0]
        if rows.shape[1] == 0:  # no token enters: nothing is computed, nothing is cached
            return plan, rows[:, None], (plan,)
        if cache is None or plan.filled is None or torch.compiler.is_compiling():
            row_doc = None if doc is None else plan.dispatch(doc, fill=-1)[:, 0]
            call = {"plain": plain and plan.filled is None, "max_documents": max_documents}
            update, inner = self.block(rows, pos=row_pos, doc=row_doc, cache=cache, causal=causal, **call)
            return plan, update[:, None], (plan, *inner)
        # Only the sequences (N,) that enter are computed, and only they are cached.
        batch = plan.filled[:, 0].any(1).nonzero()[:, 0]
        if len(batch) == 0:
            return plan, torch.zeros_like(rows)[:, None], (plan,)
        update, inner = self.block(rows[batch], pos=row_pos[batch], cache=cache.at(batch), causal=causal)
        update = update.new_zeros(len(rows), *update.shape[1:]).index_copy(0, batch, update)
        return plan, update[:, None], (plan, *inner)


class SoftMoD(nn.Module):
    """The blended form, over all tokens: g block(x) + (1 - g) x with g = sigmoid(r), for a block with its residual.
    As an update that is g times the block's own. Saves nothing; has no plan to show."""

    def __init__(self, block: nn.Module, dim: int) -> None:
        super().__init__()
        self.router = Scorer(dim, 1, bias=True)
        self.block = block

    def forward(self, x: Tensor, **call: Any) -> tuple[Tensor, Plans]:
        update, inner = self.block(x, **call)
        return update * sigmoid(self.router(x)).to(update.dtype), inner
