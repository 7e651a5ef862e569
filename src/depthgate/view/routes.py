"""What routers did with one text, as plain data: the bridge from plans to pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthgate.errors import DepthgateError
from depthgate.routing import Plans, Slots


@dataclass(frozen=True)
class Routes:
    """T tokens and L routed layers; each list of lists is (L, T)."""

    tokens: list[str]  # bytes that are no text alone are escaped: see view.tokens
    layers: list[int]  # the numbers of the routed layers, from 1
    depth: int  # layers in all
    scores: list[list[float]]
    gates: list[list[float]]  # what the block's result is multiplied by; 0 where the token skips
    causal: list[list[bool]]  # routed by the causal rule
    top_k: list[list[bool]]  # routed by the top k, in a pass where all layers take the top k
    rule: list[list[bool]]  # what the causal rule says in that same pass: what it is trained to get right
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
    def odd(self) -> int:
        """How many scores and gates are no finite numbers."""
        return sum(not math.isfinite(x) for rows in (self.scores, self.gates) for row in rows for x in row)

    @property
    def agreement(self) -> list[float]:
        """The share of the tokens that a causal pass routes as one by the top k does, in each layer."""
        return _alike(self.causal, self.top_k)

    @property
    def accuracy(self) -> list[float]:
        """The share of the tokens for which the causal rule says what the top k says of the same hidden states."""
        return _alike(self.rule, self.top_k)


def _alike(one: list[list[bool]], other: list[list[bool]]) -> list[float]:
    pairs = zip(one, other, strict=True)
    return [sum(a == b for a, b in zip(x, y, strict=True)) / max(1, len(x)) for x, y in pairs]


def routes(
    tokens: Sequence[str], layers: Sequence[int], depth: int, causal: Plans, top_k: Plans, losses: Sequence[float]
) -> Routes:
    """From the plans of two passes over the same tokens, one row of a batch."""
    mine, best = ([plan for plan in plans if isinstance(plan, Slots)] for plans in (causal, top_k))
    if not len(mine) == len(best) == len(layers):
        raise DepthgateError(
            f"{len(mine)} and {len(best)} plans for {len(layers)} routed layers: they are of another model"
        )
    if any(plan.scores.shape != (1, len(tokens), 1) for plan in (*mine, *best)):
        raise DepthgateError("the plans are of another text: make them from the same tokens")
    return Routes(
        list(tokens),
        list(layers),
        depth,
        [_numbers(plan.scores[0, :, 0]) for plan in mine],
        [_numbers(token_gates(plan)[0, :, 0]) for plan in mine],
        [plan.chosen[0, :, 0].tolist() for plan in mine],
        [plan.chosen[0, :, 0].tolist() for plan in best],
        [plan.causal_choice[0, :, 0].tolist() for plan in best],
        list(losses),
    )


def joined(parts: Sequence[Routes]) -> Routes:
    """Routes of one model over consecutive pieces of a text."""

    def over(name: str) -> list[list[Any]]:
        rows = zip(*(getattr(part, name) for part in parts), strict=True)
        return [[value for piece in row for value in piece] for row in rows]

    return Routes(
        [token for part in parts for token in part.tokens],
        parts[0].layers,
        parts[0].depth,
        over("scores"),
        over("gates"),
        over("causal"),
        over("top_k"),
        over("rule"),
        [loss for part in parts for loss in part.losses],
    )


def token_gates(plan: Slots) -> Tensor:
    """(B, T, E): the gate of each routed token, 0 where it is not routed."""
    return torch.zeros_like(plan.scores).scatter(1, plan.tokens.mT, plan.gates.float().mT)


def _numbers(values: Tensor) -> list[float]:
    return [round(float(value), 4) for value in values.float().tolist()]


def routes_of_plans(
    layers: Sequence[int], plans: Sequence[Slots], tokens: Sequence[str] | None, depth: int, row: int
) -> Routes:
    """From the plans of one pass, of one row of its batch. Plans of a causal pass do not know the top k: both choices
    are then the causal one."""
    valid = plans[0].valid
    kept = torch.ones(plans[0].scores.shape[1], dtype=torch.bool) if valid is None else valid[row].cpu()

    def of(values: Tensor) -> Tensor:
        return values[row, :, 0].detach().cpu()[kept]

    names = [str(t) for t in range(len(kept))] if tokens is None else list(tokens)
    names = [name for name, real in zip(names, kept.tolist(), strict=True) if real]
    causal = [of(plan.chosen if plan.causal else plan.causal_choice).tolist() for plan in plans]
    return Routes(
        names,
        list(layers),
        depth,
        [_numbers(of(plan.scores)) for plan in plans],
        [_numbers(of(token_gates(plan))) for plan in plans],
        causal,
        [of(plan.chosen).tolist() for plan in plans],
        causal,
        [math.nan] * len(names),
    )
