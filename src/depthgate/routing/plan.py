"""Plans: where tokens are computed, and how they come back.

A plan is an immutable tuple of tensors with two methods: `dispatch(x)` takes tokens (B, T, ...) to rows,
`combine(rows)` takes computed rows back to an update (B, T, D), weighted by the gates.

    Slots   experts pick tokens: expert choice, and Mixture-of-Depths with E = 1     rows (B, E, C, ...)
    Groups  tokens pick experts: rows sorted by expert, none dropped                 rows (N, ...)
    Soft    every slot is a weighted mean of all tokens: Soft MoE                    rows (B, E, C, ...)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthgate.ops.rows import add_at, add_rows, inverse_for_gathering, put_rows, take_rows
from depthgate.ops.soft import weighted_means


class Slots(NamedTuple):
    """Each of E experts has C slots in every one of P pools of tokens, and a slot holds one token. A pool is a row of
    the batch (P = B), or the whole batch (P = 1), whose B * T tokens are counted through.

    The tokens of an expert's filled slots ascend. Where pools hold different numbers, the empty slots come last,
    point at other tokens (padding perhaps), and are computed and thrown away; `chosen` leaves them out.
    """

    tokens: Tensor  # (P, E, C) the token in each slot, counted within its pool; no token twice for one expert
    gates: Tensor  # (P, E, C) fp32, 0 in empty slots
    scores: Tensor  # (B, T, E) fp32 logits of the router
    decision: Tensor  # (B, T, E) fp32 logit of the causal rule: it routes a token where this is >= 0
    filled: Tensor | None = None  # (P, E, C) bool; None: every slot is filled
    valid: Tensor | None = None  # (B, T) bool; None: no padding
    causal: bool = False  # chosen by the causal rule instead of the top k
    slot: Tensor | None = None  # (B, T, E) the slot of each token, -1 for none: the inverse of `tokens`, where known
    keep: Tensor | None = None  # (B, T) bool: tokens that every choice takes first; None: there are none
    flat: Tensor | None = None  # (P * E * C,) `tokens` counted through all pools, where known
    taken: Tensor | None = None  # (B, C, D) the tokens in the slots, where the one expert's router has taken them
    rotary: tuple[Tensor, Tensor] | None = None  # (B, C, R) their rotary positions, where it has taken these, too

    def __repr__(self) -> str:
        how = "causal choice" if self.causal else "top k"
        return _summary("Slots", f"{how}, experts {self.scores.shape[-1]}", self.chosen.any(-1), self.valid)

    def dispatch(self, x: Tensor, fill: int | None = None) -> Tensor:
        """x (B, T, ...) -> (P, E, C, ...); empty slots hold `fill`, or without it the row of another token."""
        P, E, C = self.tokens.shape
        # Empty slots are masked below, or there are none: gradients flow to the tokens that have a slot alone.
        masked = fill is not None or self.filled is None
        inverse = inverse_for_gathering(self.slot, x) if masked and x.is_floating_point() else None
        rows = take_rows(self._pooled(x), self.tokens.reshape(P, E * C), inverse, self.flat)
        rows = rows.reshape(P, E, C, *x.shape[2:])
        if fill is None or self.filled is None:
            return rows
        return rows.masked_fill(~self.filled.reshape(P, E, C, *[1] * (x.ndim - 2)), fill)

    def combine(self, rows: Tensor) -> Tensor:
        """rows (P, E, C, D) -> update (B, T, D): the sum over a token's slots of gate * row, 0 where it has none."""
        (P, E, C, D), (B, T, _) = rows.shape, self.scores.shape
        tokens, inverse = self.tokens.reshape(P, E * C), inverse_for_gathering(self.slot, rows)
        update = add_rows(self._weighted(rows).reshape(P, E * C, D), tokens, B * T // P if P else T, inverse)
        return update if P == B else update.reshape(B, T, D)

    def sorted_by_expert(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, T, D) -> rows (N, D) of the filled slots alone, sorted by expert, and where those of each expert end
        (E,) int32. Waits for the device, to learn N."""
        expert, token = self._sorted()
        experts = torch.arange(self.tokens.shape[1], device=x.device)
        return take_rows(x.flatten(0, 1)[None], token[None])[0], torch.searchsorted(expert, experts, right=True).int()

    def combine_sorted(self, rows: Tensor) -> Tensor:
        """`combine` of rows (N, D) as `sorted_by_expert` gives them."""
        (B, T, _), gates = self.scores.shape, self.gates.transpose(0, 1)
        gates = gates.flatten() if self.filled is None else gates[self.filled.transpose(0, 1)]
        weighted = rows * gates[:, None].to(rows.dtype)
        return add_rows(weighted[None], self._sorted()[1][None], B * T).reshape(B, T, rows.shape[1])

    def _sorted(self) -> tuple[Tensor, ...]:
        """Expert and token (N,), counted through the whole batch, of every filled slot, by expert."""
        return self.chosen.flatten(0, 1).T.nonzero().unbind(1)

    def _pooled(self, x: Tensor) -> Tensor:
        """x (B, T, ...) -> (P, tokens of a pool, ...)."""
        return x if self.tokens.shape[0] == x.shape[0] else x.reshape(len(self.tokens), -1, *x.shape[2:])

    def add(self, x: Tensor, rows: Tensor) -> Tensor:
        """x (B, T, D), rows (B, 1, C, D) -> x + combine(rows), of which only the routed tokens are computed."""
        return add_at(x, self._weighted(rows)[:, 0], self.tokens[:, 0])

    def _weighted(self, rows: Tensor) -> Tensor:
        weighted = rows * self.gates[..., None].to(rows.dtype)
        return weighted if self.filled is None else torch.where(self.filled[..., None], weighted, 0.0)

    def merge(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rows that carry their own residual: x (B, T, D), rows (B, 1, C, D) -> x with each routed token taken from
        x (gate 0) to its row (gate 1). A gate of one gives the row itself, and an equal row gives x, bit for bit.
        """
        dtype = torch.promote_types(x.dtype, rows.dtype)
        wide = torch.promote_types(dtype, torch.float32)  # in fp16 the difference of two rows may overflow
        old, new = self.dispatch(x)[:, 0].to(wide), rows[:, 0].to(wide)
        step = (new - old).nan_to_num(0.0, 0.0, 0.0)  # inf - inf: as far as the row itself goes
        new = new + (self.gates[:, 0, :, None] - 1).to(wide) * step
        if self.filled is not None:
            new = torch.where(self.filled[:, 0, :, None], new, old)
        return put_rows(x.to(dtype), self.tokens[:, 0], new.to(dtype), self.flat)

    def first_experts(self, n: int) -> "Slots":
        """The slots of the first n experts alone (those after them are null: their slots hold no work)."""
        filled = None if self.filled is None else self.filled[:, :n]
        slot = None if self.slot is None else self.slot[..., :n]
        tokens, gates = self.tokens[:, :n], self.gates[:, :n]
        return self._replace(tokens=tokens, gates=gates, filled=filled, slot=slot, flat=None, taken=None, rotary=None)

    def rows(self, batch: Tensor, slots: int) -> "Slots":
        """The plan of some rows of the batch (N,), cut to their first slots."""
        tokens, gates = self.tokens[batch, :, :slots], self.gates[batch, :, :slots]
        filled = None if self.filled is None else self.filled[batch, :, :slots]
        valid = None if self.valid is None else self.valid[batch]
        keep = None if self.keep is None else self.keep[batch]
        return Slots(tokens, gates, self.scores[batch], self.decision[batch], filled, valid, self.causal, keep=keep)

    @property
    def chosen(self) -> Tensor:
        """(B, T, E) bool: the tokens this plan routes."""
        if self.slot is not None:
            return self.slot >= 0
        none, filled = torch.zeros_like(self.scores, dtype=torch.bool), True if self.filled is None else self.filled.mT
        return self._pooled(none).scatter(1, self.tokens.mT, filled).view_as(none)

    @property
    def of_experts(self) -> bool:
        """True if several experts choose tokens: one alone is a whole layer, as in Mixture-of-Depths."""
        return self.scores.shape[-1] > 1

    @property
    def causal_choice(self) -> Tensor:
        """(B, T, E) bool: the tokens a causal pass would route, by the rule or because they are kept."""
        wanted = self.decision >= 0 if self.keep is None else (self.decision >= 0) | self.keep[..., None]
        return wanted if self.valid is None else wanted & self.valid[..., None]


class Groups(NamedTuple):
    """Each token goes to K experts. Rows are sorted by expert; rows of null experts and of padding come last and
    are not computed."""

    order: Tensor  # (N,) which (token, k) pair, counted over (B, T, K), sits in each row
    ends: Tensor  # (E,) int32: the rows of expert e end here; those from ends[-1] on belong to none
    row: Tensor  # (B, T, K) the row of each pair: the inverse of `order`
    gates: Tensor  # (B, T, K) fp32, 0 for null experts and padding
    choice: Tensor  # (B, T, K) the expert of each pair; from E on they are null, -1 is padding
    scores: Tensor  # (B, T, E + null) fp32 logits of the router
    valid: Tensor | None = None  # (B, T) bool; None: no padding

    def __repr__(self) -> str:
        null = self.scores.shape[-1] - self.ends.shape[0]
        experts = f"experts {self.ends.shape[0]}, null experts {null}, experts a token {self.gates.shape[-1]}"
        return _summary("Groups", experts, self.computed.any(-1), self.valid)

    @property
    def complete(self) -> bool:
        """True if every row surely has an expert: no padding, no null experts. Known without looking at the data."""
        return self.valid is None and self.scores.shape[-1] == self.ends.shape[0]

    @property
    def computed(self) -> Tensor:
        """(B, T, K) bool: the choices that an expert computes."""
        return self.row < self.ends[-1]

    def dispatch(self, x: Tensor) -> Tensor:
        """x (B, T, ...) -> (N, ...), one row for each (token, k) pair."""
        B, T, K = self.gates.shape
        return take_rows(x.reshape(1, B * T, *x.shape[2:]), (self.order // K)[None])[0]

    def combine(self, rows: Tensor) -> Tensor:
        """rows (N, D) -> update (B, T, D): the sum over a token's K rows of gate * row."""
        B, T, K = self.gates.shape
        picked = take_rows(rows[None], self.row.reshape(1, B * T * K))[0].reshape(B, T, K, rows.shape[-1])
        weighted = picked * self.gates[..., None].to(rows.dtype)
        if not self.complete:
            weighted = torch.where(self.computed[..., None], weighted, 0.0)
        return weighted.sum(2)


class Soft(NamedTuple):
    """Each of E experts has C slots, and every token has a share in every slot: D and C of the Soft MoE paper.

    Both come from weights that are not normalised yet: a learnt router's are one matrix, exp(scores - bound).
    """

    dispatching: Tensor  # (B, T, E, C) weights of tokens in slots, at least 0
    combining: Tensor  # (B, T, E, C) weights of slots in tokens, at least 0
    bound: Tensor | None = None  # (1,) what the largest score can be
    valid: Tensor | None = None  # (B, T) bool; None: no padding

    def __repr__(self) -> str:
        B, T, E, C = self.dispatching.shape
        tokens = self.dispatching.new_ones(B, T, dtype=torch.bool)
        return _summary("Soft", f"experts {E}, slots an expert {C}", tokens, self.valid)

    def dispatch(self, x: Tensor) -> Tensor:
        """x (B, T, D) -> (B, E, C, D): slot inputs, D^T X."""
        B, T, E, C = self.dispatching.shape
        if self.valid is not None:  # whatever lies in padding, NaN included, weighs nothing
            x = torch.where(self.valid[..., None], x, 0.0)
        weights = self.dispatching.reshape(B, T, E * C)
        means = weighted_means(weights.mT, x.to(weights.dtype))
        return means.to(x.dtype).reshape(B, E, C, x.shape[-1])

    def combine(self, rows: Tensor) -> Tensor:
        """rows (B, E, C, D) -> update (B, T, D): C Y."""
        B, T, E, C = self.combining.shape
        weights, rows = self.combining.reshape(B, T, E * C), rows.reshape(B, E * C, rows.shape[-1])
        return weighted_means(weights, rows.to(weights.dtype)).to(rows.dtype)

    @property
    def into(self) -> Tensor:
        """(B, T, E, C) fp32 dispatch weights: they sum to one over the tokens."""
        return _normalised(self.dispatching, (1,))

    @property
    def back(self) -> Tensor:
        """(B, T, E, C) fp32 combine weights: they sum to one over the slots."""
        return _normalised(self.combining, (2, 3))

    @property
    def scores(self) -> Tensor:
        """(B, T, E, C) fp32 logits of the router, 0 at padding."""
        weights = _wide(self.combining)
        logits = weights.clamp(min=torch.finfo(weights.dtype).tiny).log() + (0.0 if self.bound is None else self.bound)
        return logits if self.valid is None else torch.where(self.valid[..., None, None], logits, 0.0)


def _wide(weights: Tensor) -> Tensor:
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def _normalised(weights: Tensor, dims: tuple[int, ...]) -> Tensor:
    wide = _wide(weights)
    return wide / wide.sum(dims, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)


def _summary(kind: str, what: str, routed: Tensor, valid: Tensor | None) -> str:
    """One line: the kind of plan, tokens in, tokens routed (B, T), share. Padding does not count."""
    tokens, many = (routed.numel(), routed.sum()) if valid is None else (valid.sum(), (routed & valid).sum())
    return f"{kind}({what}, {int(tokens)} tokens in, {int(many)} routed, share {int(many) / max(1, int(tokens)):.3g})"


Plan = Slots | Groups | Soft
Plans = tuple[Plan, ...]  # those of one pass, in the order of the layers


def depth_plans(plans: Sequence[Plan]) -> list[Slots]:
    """The plans of layers that tokens go through or skip, of Mixture-of-Depths."""
    return [plan for plan in plans if isinstance(plan, Slots) and not plan.of_experts]
