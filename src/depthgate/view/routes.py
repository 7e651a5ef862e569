"""Routing decisions as plain data: about a text that a model reads, or of plans alone."""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgate.config import EXPERT_KINDS, ROUTED_KINDS
from depthgate.data.batches import windows
from depthgate.data.token_file import Documents
from depthgate.errors import DepthgateError, InvalidValueError, check_count, warn_once
from depthgate.loading import LanguageModel
from depthgate.routing.plan import Groups, Plan, Plans, Slots, Soft, depth_plans

SHARES = ("routed_share", "top_k_share", "decided_alike", "rule_accuracy")
Grid = tuple[int, int]  # rows and columns of an image's patches
_MOST_PIXELS = 160  # of a side of an image below maps


class Image(NamedTuple):
    """Where tokens lie that are patches of an image, after a `prefix` of other tokens; its pixels (H, W, 3), bytes."""

    grid: Grid | None = None
    prefix: int = 0
    pixels: Tensor | None = None


@dataclass(frozen=True)
class RoutedLayer:
    """One layer that tokens may skip; each list has a value for every token."""

    name: int | str
    scores: list[float] = field(default_factory=list)
    gates: list[float] = field(default_factory=list)  # factors of the block's result; 0 where the token skips
    causal: list[bool] = field(default_factory=list)  # routed by the causal rule
    top_k: list[bool] = field(default_factory=list)  # routed by the top k, in a pass where all layers take the top k
    rule: list[bool] = field(default_factory=list)  # the causal rule in that same pass: what it is trained to get right
    computed: str = "causal"  # the list that tells what the pass computed: causal or top_k
    compared: bool = True  # True if the other list tells what the other choice would be, and not the same
    lowest: list[float] = field(default_factory=list)  # of each window, the lowest score that the top k took

    def add(self, plan: Slots, best: Slots, row: int, kept: Sequence[bool], causal: Tensor, rule: Tensor) -> None:
        """Take in more tokens, of a row of the batch; `best` is the plan by the top k."""

        def values(of: Tensor) -> Iterator[Any]:
            return compress(of[row, :, 0].tolist(), kept)

        top_k = list(values(best.chosen))
        scores = [(score, on) for score, on in zip(values(best.scores), top_k, strict=True)]
        best_skipped = max((score for score, on in scores if not on), default=-math.inf)  # below it, tokens were kept
        self.lowest.extend(sorted(score for score, on in scores if on and score >= best_skipped)[:1])
        self.scores.extend(values(plan.scores))
        self.gates.extend(values(torch.zeros_like(plan.scores).scatter(1, plan.tokens.mT, plan.gates.mT)))
        self.causal.extend(values(causal))
        self.top_k.extend(top_k)
        self.rule.extend(values(rule))

    @property
    def routed(self) -> list[bool]:
        """For each token, whether the pass computed it."""
        return self.top_k if self.computed == "top_k" else self.causal

    @property
    def routed_share(self) -> float:
        """Share of the tokens that the pass computed."""
        return sum(self.routed) / max(1, len(self.routed))

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

    name: int | str
    experts: int
    null_experts: int
    choices: list[list[int]] = field(default_factory=list)  # the experts of each token; none where it skips the layer

    @property
    def kind(self) -> str:
        """The kind of layer whose colour it has: mode where tokens differ in how many experts compute them."""
        return "moe" if len({*map(len, self.choices)}) == 1 else "mode"

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

    name: int | str
    slots: int  # of each expert
    into: list[list[float]]  # (E * C, T) how much of each token a slot holds: each row sums to one
    even: float  # the weight of each token that the layer got, if all were alike
    bars: dict[str, float]  # each expert's part in the tokens' results, the mean over tokens


@dataclass(frozen=True)
class Decisions:
    """Tokens of a text or of one row of a batch, and what layers decided about them. Layers are named by their number
    in the model, from 0; where no model is known, by the number of their plan, or as they were recorded."""

    depth: int  # layers in all
    layers: list[RoutedLayer]
    tokens: list[str] = field(default_factory=list)  # bytes that are not text alone are escaped: see view.page
    losses: list[float] = field(default_factory=list)  # nats, given the tokens before; not a number where none is
    experts: list[ExpertLayer] = field(default_factory=list)
    slots: list[SlotLayer] = field(default_factory=list)

    def add(self, tokens: Sequence[str], losses: Sequence[float], causal: Plans, top_k: Plans, row: int) -> None:
        """Take in more tokens: the plans of a causal pass and of one by the top k over them, in a row of the batch.
        Padding is left out."""
        mine, best = (depth_plans(plans) for plans in (causal, top_k))
        kept = _kept(mine[0].valid if mine else None, row, len(tokens))
        self.tokens.extend(compress(tokens, kept))
        self.losses.extend(compress(losses, kept))
        for layer, plan, other in zip(self.layers, mine, best, strict=True):
            layer.add(plan, other, row, kept, plan.chosen, other.causal_choice)

    @property
    def compared(self) -> bool:
        """True if any layer tells what its other choice would be."""
        return any(layer.compared for layer in self.layers)

    @property
    def through(self) -> list[list[int | str]]:
        """For each token, the names of the routed layers that computed it."""
        return [[layer.name for layer in self.layers if layer.routed[t]] for t in range(len(self.tokens))]

    @property
    def taken(self) -> list[list[str]]:
        """For each token, the names of the experts that computed it; null experts compute nothing."""
        return [
            [f"{e} of layer {layer.name}" for layer in self.experts for e in layer.choices[t] if e < layer.experts]
            for t in range(len(self.tokens))
        ]

    @property
    def names(self) -> list[int | str]:
        return [layer.name for layer in self.layers]


def _kept(valid: Tensor | None, row: int, tokens: int) -> list[bool]:
    """For each token of a row, whether it is not padding."""
    return [True] * tokens if valid is None else valid[row].tolist()


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
    layers = [RoutedLayer(i) for i, kind in enumerate(kinds) if kind in ROUTED_KINDS]
    experts = [ExpertLayer(i, *model.experts) for i, kind in enumerate(kinds) if kind in EXPERT_KINDS]
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
    """The experts of each token, for one layer with experts after another. In a mode_staged layer the experts see only
    the tokens that enter it; where it has room for none there is no plan of its experts."""
    left = iter(plans)
    for kind in kinds:
        entering: Sequence[int] = range(tokens)
        plan = next(left) if kind != "dense" else None
        if kind in ROUTED_KINDS and isinstance(plan, Slots):
            entering = plan.chosen[0, :, 0].nonzero()[:, 0].tolist()
            plan = next(left) if kind == "mode_staged" and plan.tokens.shape[-1] else None
        if kind in EXPERT_KINDS:
            picked = _choices(plan, 0) if isinstance(plan, Groups | Slots) else []
            found = dict(zip(entering, picked, strict=False))  # slots that are not filled come last
            yield [found.get(token, []) for token in range(tokens)]


def _choices(plan: Groups | Slots, row: int) -> list[list[int]]:
    if isinstance(plan, Groups):
        return [[expert for expert in chosen if expert >= 0] for chosen in plan.choice[row].tolist()]
    return [[expert for expert, on in enumerate(chosen) if on] for chosen in plan.chosen[row].tolist()]


def plan_decisions(
    plans: Sequence[Plan],
    tokens: Sequence[str] | None = None,
    grid: Grid | None = None,
    row: int = 0,
    prefix: int = 0,
    causal_rule: bool = False,
    names: Sequence[str] | None = None,
) -> Decisions:
    """The decisions of plans about one row of their batch: see `depthgate.view.plot`."""
    if not plans:
        raise DepthgateError("there are no plans: no layer of the model routes")
    if not all(plan.scores.shape[0] * plan.scores.shape[1] for plan in plans):
        raise DepthgateError("the plans are of an empty batch: there is nothing to show")
    length = max(plan.scores.shape[1] for plan in plans)
    rows = min(plan.scores.shape[0] for plan in plans if plan.scores.shape[1] == length)
    check_count(row, "row", minimum=0, maximum=rows - 1)
    if tokens is not None and len(tokens) != length:
        raise DepthgateError(f"there are {len(tokens)} tokens, and plans for {length}: they are of another text")
    if tokens is not None and not all(isinstance(token, str) for token in tokens):
        raise InvalidValueError("tokens are not all texts: give a str for each")
    check_grid(grid, prefix, length)
    experts, slots, routed = [], [], {}
    labels: Sequence[int | str] = _each_once(names) if names and all(names) else range(len(plans))
    for number, (name, plan) in enumerate(zip(labels, plans, strict=True)):
        outer = _outer(plans[:number], names[: number + 1]) if names else None
        whole = row < len(plan.scores) and (outer is None or len(plan.scores) == len(outer.scores))
        if whole and isinstance(plan, Soft) and (held := _slot_layer(name, plan, outer, row, length)):
            slots.append(held)
        elif whole and (isinstance(plan, Groups) or (isinstance(plan, Slots) and plan.of_experts)):
            many = plan.ends.shape[0] if isinstance(plan, Groups) else plan.tokens.shape[1]
            experts.append(ExpertLayer(name, many, plan.scores.shape[-1] - many, _choices(plan, row)))
        elif whole and isinstance(plan, Slots) and plan.scores.shape[1] == length:
            routed[name] = plan
        else:  # such as one within a routed layer, which sees the routed tokens alone, or not all rows in one call
            had = f"{len(plan.scores)} x {plan.scores.shape[1]} tokens"
            warn_once(f"layer {name} had {had}, where others had {rows} x {length}: it is not shown")
    layers = [
        RoutedLayer(name, computed="causal" if plan.causal else "top_k", compared=causal_rule and not plan.causal)
        for name, plan in routed.items()
    ]
    found = Decisions(len(plans), layers, experts=experts, slots=slots)
    valid = next((plan.valid for plan in plans if plan.scores.shape[1] == length), None)
    kept = _kept(None if grid else valid, row, length)  # patches have places, padding or not
    found.tokens.extend(compress(tokens or map(str, range(length)), kept))
    found.losses.extend([math.nan] * len(found.tokens))
    for layer, plan in zip(found.layers, routed.values(), strict=True):
        rule = plan.causal_choice if layer.compared else plan.chosen
        layer.add(plan, plan, row, kept, rule, rule)
    return found


def _outer(before: Sequence[Plan], names: Sequence[str]) -> Slots | None:
    """The plan of the routed layer that the last of these names lies within; None if it lies in none."""
    *others, mine = names
    within = [mine != name and mine.startswith(f"{name}." if name else "") for name in others]
    held = [plan for plan in compress(before, within) if isinstance(plan, Slots) and plan.tokens.shape[1] == 1]
    return held[-1] if held else None


def _slot_layer(name: int | str, plan: Soft, outer: Slots | None, row: int, length: int) -> SlotLayer | None:
    """The slots over all tokens of a row, of which the layer got those of `outer`; None if it is not known which."""
    many, got = plan.scores.shape[1], torch.arange(length, device="cpu")
    if many != length:
        if outer is None or outer.scores.shape[1] != length or outer.chosen[row].sum() != many:
            return None
        got = outer.tokens[row, 0, :many].cpu()
    back = plan.back[row] if plan.valid is None else plan.back[row][plan.valid[row]]
    bars = {str(expert): share for expert, share in enumerate(back.sum(-1).mean(0).tolist())}
    held = plan.into[row].flatten(1).float().cpu()  # (tokens that the layer got, E * C)
    into = held.new_zeros(length, held.shape[1]).index_copy(0, got, held)
    return SlotLayer(name, plan.into.shape[-1], into.mT.tolist(), 1 / max(1, len(back)), bars)


def _each_once(names: Sequence[str]) -> list[str]:
    """Names in which those of layers that ran several times have the number of the call."""
    names, many = list(names), Counter(names)
    return [f"{name}, call {names[:i].count(name)}" if many[name] > 1 else name for i, name in enumerate(names)]


def image_of(grid: Grid | None, prefix: int, image: Any) -> Image:
    """Where tokens lie, and the image itself, a tensor (3 or 1, H, W): smaller, its floats stretched to bytes."""
    if image is None:
        return Image(grid, prefix)
    given = torch.as_tensor(image).detach()
    found = given.float().cpu().nan_to_num(0.0, 0.0, 0.0)
    if grid is None or found.dim() != 3 or found.shape[0] not in (1, 3) or not found.numel():
        raise InvalidValueError(f"image has the shape {tuple(found.shape)}: give (3, height, width), and a grid")
    low, high = found.new_tensor([0, 255]) if given.dtype is torch.uint8 else found.aminmax()
    share = min(1.0, _MOST_PIXELS / max(found.shape[1:]))  # of both sides: an image keeps its shape
    size = [max(1, round(side * share)) for side in found.shape[1:]]
    small = torch.nn.functional.interpolate(((found - low) / (high - low).clamp(min=1e-9))[None], size, mode="area")[0]
    return Image(grid, prefix, (255 * small).round().to(torch.uint8).expand(3, -1, -1).movedim(0, -1))


def check_grid(grid: Any, prefix: Any, tokens: int) -> None:
    """Refuse a grid that is not rows and columns of as many patches as there are tokens after the prefix."""
    check_count(prefix, "prefix", minimum=0)
    if grid is None and prefix:
        raise InvalidValueError(f"prefix is {prefix}, but there is no grid: give both, such as grid=(14, 14), prefix=1")
    if grid is None:
        return
    if not isinstance(grid, Sequence) or len(grid) != 2:
        raise InvalidValueError(f"grid is {grid!r}: it must be rows and columns, such as (14, 14)")
    rows, columns = check_count(grid[0], "rows of grid"), check_count(grid[1], "columns of grid")
    if rows * columns + prefix != tokens:
        what = f"grid is {grid}, prefix {prefix}, but there are {tokens} tokens"
        raise InvalidValueError(f"{what}: rows * columns + prefix must be as many")
