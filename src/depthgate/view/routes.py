"""What routers did with one text, as plain data: the bridge from plans to pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthgate.errors import DepthgateError
from depthgate.routing import Plans, Slots


@dataclass(frozen=True)
class Routes:
    """T tokens and L routed layers; each list of lists is (L, T)."""

    tokens: list[str]
    layers: list[int]  # the numbers of the routed layers, from 1
    depth: int  # layers in all
    scores: list[list[float]]
    gates: list[list[float]]  # what the block's result is multiplied by; 0 where the token skips
    causal: list[list[bool]]  # routed by the causal rule
    top_k: list[list[bool]]  # routed by the top k
    losses: list[float]  # nats of each token, given those before it; not a number where nothing is before it

    def through(self, token: int) -> list[int]:
        """The routed layers that computed a token, by the causal rule."""
        return [layer for layer, row in zip(self.layers, self.causal, strict=True) if row[token]]

    @property
    def depths(self) -> list[int]:
        """How many layers computed each token."""
        everywhere = self.depth - len(self.layers)
        return [everywhere + sum(row[t] for row in self.causal) for t in range(len(self.tokens))]

    def shares(self, choice: list[list[bool]]) -> list[float]:
        """The share of the tokens that each layer took."""
        return [sum(row) / max(1, len(row)) for row in choice]

    @property
    def agreement(self) -> list[float]:
        """The share of the tokens that the causal rule decides as the top k does, in each layer."""
        return [
            sum(a == b for a, b in zip(mine, best, strict=True)) / max(1, len(mine))
            for mine, best in zip(self.causal, self.top_k, strict=True)
        ]


def routes(
    tokens: Sequence[str],
    layers: Sequence[int],
    depth: int,
    causal: Plans,
    top_k: Plans,
    real: Tensor,
    losses: Sequence[float],
) -> Routes:
    """From the plans of two passes over the same rows, of which `real` (B, T) are tokens of the text."""
    mine, best = ([plan for plan in plans if isinstance(plan, Slots)] for plans in (causal, top_k))
    if not len(mine) == len(best) == len(layers):
        raise DepthgateError(
            f"{len(mine)} and {len(best)} plans for {len(layers)} routed layers: they are of another model"
        )
    if any(plan.scores.shape[:2] != real.shape for plan in (*mine, *best)) or int(real.sum()) != len(tokens):
        raise DepthgateError("the plans are of another text: make them from the same tokens")
    return Routes(
        list(tokens),
        list(layers),
        depth,
        [_numbers(plan.scores[..., 0][real]) for plan in mine],
        [_numbers(_gates(plan)[real]) for plan in mine],
        [plan.chosen[..., 0][real].tolist() for plan in mine],
        [plan.chosen[..., 0][real].tolist() for plan in best],
        list(losses),
    )


def _gates(plan: Slots) -> Tensor:
    """(B, T): the gate of each routed token."""
    return torch.zeros_like(plan.scores[..., 0]).scatter(1, plan.index[:, 0], plan.gates[:, 0].float())


def _numbers(values: Tensor) -> list[float]:
    return [round(float(value), 4) if math.isfinite(value) else 0.0 for value in values.float().tolist()]
