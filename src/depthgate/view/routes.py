"""Routing decisions as plain data: about a text that a model reads, or of plans alone."""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from depthgate.config import EXPERT_KINDS, ROUTED_KINDS
from depthgate.data.batches import windows
from depthgate.data.token_file import Documents
from depthgate.errors import DepthgateError, InvalidValueError, check_count
from depthgate.loading import LanguageModel
from depthgate.routing.plan import Groups, Plan, Plans, Slots, Soft

SHARES = ("routed_share", "top_k_share", "agreement", "rule_accuracy")
Grid = tuple[int, int]  # rows and columns of an image's patches


@dataclass(frozen=True)
class RoutedLayer:
    """One layer that tokens may skip; each list has a value for every token."""

    number: int  # from 1
    scores: list[float] = field(default_factory=list)
    gates: list[float] = field(default_factory=list)  # factors of the block's result; 0 where the token skips
    causal: list[bool] = field(default_factory=list)  # routed by the causal rule
    top_k: list[bool] = field(default_factory=list)  # routed by the top k, in a pass where all layers take the top k
    rule: list[bool] = field(default_factory=list)  # the causal rule in that same pass: what it is trained to get right

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the tokens: those that a causal pass routes, that one by the top k routes, that both route alike,
        and those for which the causal rule says what the top k says of the same hidden states."""
        alike, right = map(operator.eq, self.causal, self.top_k), map(operator.eq, self.rule, self.top_k)
        flags: tuple[Iterable[bool], ...] = (self.causal, self.top_k, alike, right)
        return {name: sum(each) / max(1, len(self.causal)) for name, each in zip(SHARES, flags, strict=True)}


@dataclass(frozen=True)
class ExpertLayer:
    """One layer whose tokens go to experts; those from `experts` on are null."""

    number: int
    experts: int
    null_experts: int
    choices: list[list[int]] = field(default_factory=list)  # the experts of each token; none where it skips the layer

    @property
    def used(self) -> int:
        """Number of tokens that went to any expert."""
        return sum(bool(chosen) for chosen in self.choices)

    @property
    def bars(self) -> dict[str, float]:
        """Share of all choices that each expert has, by its name; the null experts together are one."""
        counts = Counter(min(expert, self.experts) for chosen in self.choices for expert in chosen)
        names = [*map(str, range(self.experts)), *["null"] * bool(self.null_experts)]
        return {name: counts[expert] / max(1, counts.total()) for expert, name in enumerate(names)}

    @property
    def load(self) -> list[float]:
        """Share of all choices that each expert has, without the null experts."""
        return list(self.bars.values())[: self.experts]

    @property
    def effective(self) -> float:
        """Number of equally used experts that would be as spread as these: exp of the entropy of their load."""
        load = [share for share in self.load if share > 0]
        return math.exp(-sum(share / sum(load) * math.log(share / sum(load)) for share in load)) if load else 0.0


@dataclass(frozen=True)
class SlotLayer:
    """One Soft MoE layer: E experts with C slots each, over T tokens."""

    number: int
    slots: int  # of each expert
    into: list[list[float]]  # (E * C, T) how much of each token a slot holds: each row sums to one
    bars: dict[str, float]  # each expert's part in the tokens' results, the mean over tokens


@dataclass(frozen=True)
class Decisions:
    """Tokens of a text or of one row of a batch, and what layers decided about them. Layers are numbered from 1; where
    no model is known, by the place of their plan."""

    depth: int  # layers in all
    layers: list[RoutedLayer]
    tokens: list[str] = field(default_factory=list)  # bytes that are not text alone are escaped: see view.page
    losses: list[float] = field(default_factory=list)  # nats, given the tokens before; not a number where none is
    experts: list[ExpertLayer] = field(default_factory=list)
    slots: list[SlotLayer] = field(default_factory=list)

    def add(self, tokens: Sequence[str], losses: Sequence[float], causal: Plans, top_k: Plans, row: int) -> None:
        """Take in more tokens: the plans of a causal pass and of one by the top k over them, in a row of the batch.
        Padding is left out."""
        mine, best = ([plan for plan in plans if isinstance(plan, Slots)] for plans in (causal, top_k))
        valid = mine[0].valid if mine else None
        kept = [True] * len(tokens) if valid is None else valid[row].tolist()

        def values(of: Tensor) -> Iterator[Any]:
            return compress(of[row, :, 0].tolist(), kept)

        self.tokens.extend(compress(tokens, kept))
        self.losses.extend(compress(losses, kept))
        for layer, plan, other in zip(self.layers, mine, best, strict=True):
            layer.scores.extend(values(plan.scores))
            layer.gates.extend(values(torch.zeros_like(plan.scores).scatter(1, plan.tokens.mT, plan.gates.mT)))
            layer.causal.extend(values(plan.chosen if plan.causal else plan.causal_choice))
            layer.top_k.extend(values(other.chosen))
            layer.rule.extend(values(other.chosen if other.causal else other.causal_choice))

    @property
    def through(self) -> list[list[int]]:
        """For each token, the numbers of the routed layers that computed it, by the causal rule."""
        return [[layer.number for layer in self.layers if layer.causal[t]] for t in range(len(self.tokens))]

    @property
    def numbers(self) -> list[int]:
        return [layer.number for layer in self.layers]


def held_out_tokens(documents: Documents, most: int) -> list[int]:
    """The beginning of the first document with as many tokens, or else of the text."""
    number = next((i for i, length in enumerate(documents.bounds.diff().tolist()) if length > most), 0)
    start = int(documents.bounds[number])
    found: list[int] = windows(documents, [start], min(most, len(documents) - start)).tokens[0].tolist()
    return found


@torch.no_grad()
def read(model: LanguageModel, ids: Sequence[int]) -> Decisions:
    """The decisions of a model's routers and experts about a text, which is read a window at a time."""
    kinds = model.kinds
    layers = [RoutedLayer(i) for i, kind in enumerate(kinds, 1) if kind in ROUTED_KINDS]
    experts = [ExpertLayer(i, *model.experts) for i, kind in enumerate(kinds, 1) if kind in EXPERT_KINDS]
    found = Decisions(len(kinds), layers, experts=experts)
    for start in range(0, len(ids), model.context):
        part = ids[start : start + model.context]
        tokens = torch.tensor([part], device=model.device)
        logits, causal = model(tokens, causal=True)
        losses = torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:], reduction="none").tolist()
        del logits
        texts = [model.tokenizer.token_text(i) for i in part]
        found.add(texts, [math.nan, *losses], causal, model(tokens).plans, 0)
        for layer, choices in zip(experts, expert_choices(kinds, causal, len(part)), strict=True):
            layer.choices.extend(choices)
    return found


def expert_choices(kinds: Sequence[str], plans: Sequence[Plan], tokens: int) -> Iterator[list[list[int]]]:
    """The experts of each token, for one layer with experts after another. Within a mode layer the experts see only
    the tokens that enter it; where it has room for none there is no plan of its experts."""
    left = iter(plans)
    for kind in kinds:
        entering: Sequence[int] = range(tokens)
        plan = next(left) if kind != "dense" else None
        if isinstance(plan, Slots):
            entering = plan.chosen[0, :, 0].nonzero()[:, 0].tolist()
            plan = next(left) if kind == "mode" and plan.tokens.shape[-1] else None
        if kind in EXPERT_KINDS:
            picked = _choices(plan, 0) if isinstance(plan, Groups) else []
            found = dict(zip(entering, picked, strict=False))  # slots that are not filled come last
            yield [found.get(token, []) for token in range(tokens)]


def _choices(plan: Groups | Slots, row: int) -> list[list[int]]:
    if isinstance(plan, Groups):
        return [[expert for expert in chosen if expert >= 0] for chosen in plan.choice[row].tolist()]
    return [[expert for expert, on in enumerate(chosen) if on] for chosen in plan.chosen[row].tolist()]


def plan_decisions(plans: Sequence[Plan], tokens: Sequence[str] | None, grid: Grid | None, row: int) -> Decisions:
    """The decisions of plans about one row of their batch."""
    if not plans:
        raise DepthgateError("there are no plans: no layer of the model routes")
    check_count(row, "row", minimum=0, maximum=min(plan.scores.shape[0] for plan in plans) - 1)
    length = max(plan.scores.shape[1] for plan in plans)
    if tokens is not None and len(tokens) != length:
        raise DepthgateError(f"there are {len(tokens)} tokens, and plans for {length}: they are of another text")
    for side, name in zip(grid or (), ("rows of grid", "columns of grid"), strict=False):
        check_count(side, name)
    experts, slots, routed = [], [], {}
    for number, plan in enumerate(plans, 1):
        if isinstance(plan, Soft):
            back = plan.back[row].sum(-1)  # (T, E)
            load = (back if plan.valid is None else back[plan.valid[row]]).mean(0).tolist()
            bars = {str(expert): share for expert, share in enumerate(load)}
            slots.append(SlotLayer(number, plan.into.shape[-1], plan.into[row].flatten(1).mT.tolist(), bars))
        elif isinstance(plan, Groups) or plan.tokens.shape[1] > 1:
            many = plan.ends.shape[0] if isinstance(plan, Groups) else plan.tokens.shape[1]
            experts.append(ExpertLayer(number, many, plan.scores.shape[-1] - many, _choices(plan, row)))
        elif plan.scores.shape[1] == length:  # within a routed layer, others see the routed tokens alone
            routed[number] = plan
    if grid is not None and any(grid[0] * grid[1] != len(layer.into[0]) for layer in slots):
        raise InvalidValueError(f"grid is {grid}, but there are {length} tokens: rows * columns must be as many")
    found = Decisions(len(plans), [RoutedLayer(number) for number in routed], experts=experts, slots=slots)
    same = tuple(routed.values())
    found.add(tokens or list(map(str, range(length))), [math.nan] * length, same, same, row)
    return found
