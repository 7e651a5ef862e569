"""What mixtures of experts did, as plain data: which experts each token chose, and how slots look at tokens."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from depthgate.errors import DepthgateError, InvalidValueError, check_count
from depthgate.routing import Groups, Plan, Plans, Slots, Soft

_OTHER = "the plans are of another model: they do not fit its layers"


@dataclass(frozen=True)
class ExpertLayer:
    """One layer whose tokens go to experts; those from `experts` on are null."""

    layer: int  # its number, from 1
    experts: int
    null_experts: int
    choices: list[list[int]]  # of each token, the experts that it went to; none where it skipped the layer

    @property
    def used(self) -> int:
        """How many tokens came."""
        return sum(bool(chosen) for chosen in self.choices)

    @property
    def counts(self) -> Counter[int]:
        """How many tokens went to each expert."""
        return Counter(expert for chosen in self.choices for expert in chosen)

    @property
    def load(self) -> list[float]:
        """The share of all choices that each expert has; with that of the null experts they sum to one."""
        counts = self.counts
        return [counts[expert] / max(1, counts.total()) for expert in range(self.experts)]

    @property
    def null_share(self) -> float:
        """The share of all choices that compute nothing."""
        counts = self.counts
        return sum(n for expert, n in counts.items() if expert >= self.experts) / max(1, counts.total())

    @property
    def effective(self) -> float:
        """How many experts, all used alike, would be as spread as these: exp of the entropy of their load."""
        load = [share for share in self.load if share > 0]
        return math.exp(-sum(share / sum(load) * math.log(share / sum(load)) for share in load)) if load else 0.0


@dataclass(frozen=True)
class SlotLayer:
    """One Soft MoE layer: E experts with C slots each, over T tokens."""

    layer: int
    experts: int
    slots: int  # of each expert
    into: list[list[float]]  # (E * C, T) how much of each token a slot holds: each row sums to one
    load: list[float]  # of each expert, its share in what the tokens get back, the mean over tokens


def expert_layers(
    kinds: Sequence[str], plans: Plans, tokens: int, experts: tuple[int, int] = (0, 0)
) -> list[ExpertLayer]:
    """From the plans of one row of a batch by a model with layers of these kinds. Within a mode layer the experts see
    only the tokens that enter it; where none does there is no plan, and `experts` says how many wait, and how many of
    them are null."""
    left = list(plans)
    found = []
    for number, kind in enumerate(kinds, 1):
        entering, outer = list(range(tokens)), None
        if kind in ("mod", "mode", "random"):
            outer = left.pop(0) if left else None
            if not isinstance(outer, Slots) or outer.scores.shape[:2] != (1, tokens):
                raise DepthgateError(_OTHER)
            entering = [t for t, on in zip(*_row(outer, 0), strict=True) if on]
        if kind in ("moe", "mode") and not (kind == "mode" and _nobody(outer)):
            plan = left.pop(0) if left else None
            if not isinstance(plan, Groups):
                raise DepthgateError(_OTHER)
            found.append(_chosen(number, plan, entering, tokens))
        elif kind == "mode":
            found.append(ExpertLayer(number, *experts, [[] for _ in range(tokens)]))
    if left:
        raise DepthgateError(_OTHER)
    return found


def _nobody(plan: Plan | None) -> bool:
    return isinstance(plan, Slots) and plan.tokens.shape[-1] == 0


def _row(plan: Slots, row: int) -> tuple[list[int], list[bool]]:
    """The tokens in the slots of the first expert, and whether each is really there."""
    index = plan.tokens[row, 0].tolist()
    return index, [True] * len(index) if plan.filled is None else plan.filled[row, 0].tolist()


def _chosen(number: int, plan: Groups, entering: Sequence[int], tokens: int, row: int = 0) -> ExpertLayer:
    experts = plan.ends.shape[0]
    choices: list[list[int]] = [[] for _ in range(tokens)]
    picked = plan.choice[row].tolist()
    for token, chosen in zip(entering, picked, strict=False):  # slots that are not filled come last
        choices[token] = [expert for expert in chosen if expert >= 0]
    return ExpertLayer(number, experts, plan.scores.shape[-1] - experts, choices)


def joined_experts(parts: Sequence[Sequence[ExpertLayer]]) -> list[ExpertLayer]:
    """Layers of one model over consecutive pieces of a text."""
    return [
        ExpertLayer(
            layers[0].layer,
            max(layer.experts for layer in layers),
            max(layer.null_experts for layer in layers),
            [chosen for layer in layers for chosen in layer.choices],
        )
        for layers in zip(*parts, strict=True)
    ]


def plan_experts(number: int, plan: Plan, row: int) -> ExpertLayer | SlotLayer | None:
    """What one plan says of experts in a row of its batch; None for Mixture-of-Depths, which has none."""
    if isinstance(plan, Groups):
        return _chosen(number, plan, range(plan.choice.shape[1]), plan.choice.shape[1], row)
    if isinstance(plan, Slots):
        if plan.tokens.shape[1] == 1:
            return None
        chosen = plan.chosen[row].tolist()
        experts = plan.tokens.shape[1]
        return ExpertLayer(number, experts, 0, [[e for e, on in enumerate(token) if on] for token in chosen])
    _, T, E, C = plan.into.shape
    into = plan.into[row].detach().float().reshape(T, E * C).mT
    back = plan.back[row].detach().float().sum(-1)
    if plan.valid is not None:
        back = back[plan.valid[row]]
    return SlotLayer(number, E, C, into.tolist(), back.mean(0).tolist())


def check_grid(grid: tuple[int, int] | None, plans: Sequence[Soft | SlotLayer]) -> tuple[int, int] | None:
    """Rows and columns of an image's patches, which must be as many as there are tokens."""
    for number, side in zip(grid or (), ("rows of grid", "columns of grid"), strict=False):
        check_count(number, side)
    for plan in plans:
        tokens = plan.into.shape[1] if isinstance(plan, Soft) else len(plan.into[0])
        if grid is not None and grid[0] * grid[1] != tokens:
            raise InvalidValueError(f"grid is {grid}, but there are {tokens} tokens: rows * columns must be as many")
    return grid
