"""Mixtures of experts, as plain data and as sections of a page: which experts tokens chose, what slots hold."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import depthgate.view.page as pages
from depthgate.errors import DepthgateError
from depthgate.routing.plan import Groups, Plan, Plans, Slots
from depthgate.view.page import Html, isolated, visible

Grid = tuple[int, int]  # rows and columns of an image's patches

_OTHER = "the plans are of another model: they do not fit its layers"
_FORMS = 4  # tokens named for each expert
_MOST_CELLS = 200_000  # of one layer's slot maps: more would make pages of many megabytes


@dataclass(frozen=True)
class ExpertLayer:
    """One layer whose tokens go to experts; those from `experts` on are null."""

    layer: int  # its number, from 1
    experts: int
    null_experts: int
    choices: list[list[int]]  # the experts of each token; none where it skipped the layer

    @property
    def used(self) -> int:
        """Number of tokens that went to any expert."""
        return sum(bool(chosen) for chosen in self.choices)

    @property
    def load(self) -> list[float]:
        """Share of all choices that each expert has; with that of the null experts they sum to one."""
        counts = Counter(expert for chosen in self.choices for expert in chosen)
        return [counts[expert] / max(1, counts.total()) for expert in range(self.experts)]

    @property
    def null_share(self) -> float:
        """Share of all choices that compute nothing."""
        chosen = [expert for choice in self.choices for expert in choice]
        return sum(expert >= self.experts for expert in chosen) / max(1, len(chosen))

    @property
    def effective(self) -> float:
        """Number of equally used experts that would be as spread as these: exp of the entropy of their load."""
        load = [share for share in self.load if share > 0]
        return math.exp(-sum(share / sum(load) * math.log(share / sum(load)) for share in load)) if load else 0.0


@dataclass(frozen=True)
class SlotLayer:
    """One Soft MoE layer: E experts with C slots each, over T tokens."""

    layer: int
    experts: int
    slots: int  # of each expert
    into: list[list[float]]  # (E * C, T) how much of each token a slot holds: each row sums to one
    load: list[float]  # each expert's part in the tokens' results, the mean over tokens


def expert_layers(
    kinds: Sequence[str], plans: Plans, tokens: int, experts: tuple[int, int] = (0, 0)
) -> list[ExpertLayer]:
    """Layers with experts, from the plans of one row of a batch by a model with layers of these kinds. Within a mode
    layer the experts see only the tokens that enter it; where none does there is no plan, and `experts` says how many
    experts compute and how many are null."""
    left = list(plans)
    found = []
    for number, kind in enumerate(kinds, 1):
        entering, empty = list(range(tokens)), False
        if kind in ("mod", "mode", "random"):
            outer = left.pop(0) if left else None
            if not isinstance(outer, Slots) or outer.scores.shape[:2] != (1, tokens):
                raise DepthgateError(_OTHER)
            entering = outer.chosen[0, :, 0].nonzero()[:, 0].tolist()
            empty = outer.tokens.shape[-1] == 0
        if kind == "mode" and empty:
            found.append(ExpertLayer(number, *experts, [[] for _ in range(tokens)]))
        elif kind in ("moe", "mode"):
            plan = left.pop(0) if left else None
            if not isinstance(plan, Groups):
                raise DepthgateError(_OTHER)
            found.append(_chosen(number, plan, entering, tokens))
    if left:
        raise DepthgateError(_OTHER)
    return found


def _chosen(number: int, plan: Groups, entering: Sequence[int], tokens: int, row: int = 0) -> ExpertLayer:
    experts = plan.ends.shape[0]
    choices: list[list[int]] = [[] for _ in range(tokens)]
    picked = plan.choice[row].tolist()
    for token, chosen in zip(entering, picked, strict=False):  # slots that are not filled come last
        choices[token] = [expert for expert in chosen if expert >= 0]
    return ExpertLayer(number, experts, plan.scores.shape[-1] - experts, choices)


def plan_experts(number: int, plan: Plan, row: int) -> ExpertLayer | SlotLayer | None:
    """The experts or slots of one plan, in a row of its batch; None for Mixture-of-Depths, which has none."""
    if isinstance(plan, Groups):
        return _chosen(number, plan, range(plan.choice.shape[1]), plan.choice.shape[1], row)
    if isinstance(plan, Slots):
        experts = plan.tokens.shape[1]
        choices = [[e for e, on in enumerate(token) if on] for token in plan.chosen[row].tolist()]
        return ExpertLayer(number, experts, 0, choices) if experts > 1 else None
    _, T, E, C = plan.into.shape
    into = plan.into[row].detach().float().reshape(T, E * C).mT
    back = plan.back[row].detach().float().sum(-1)
    if plan.valid is not None:
        back = back[plan.valid[row]]
    return SlotLayer(number, E, C, into.tolist(), back.mean(0).tolist())


def experts_section(layers: Sequence[ExpertLayer], tokens: Sequence[str] | None) -> Html:
    """Load, null share, and which tokens each expert is for."""
    heads = ("layer", "tokens", "experts", "busiest", "idlest", "as spread as", "null share")
    rows = []
    for e in layers:
        if not e.used:
            rows.append([e.layer, "no token came", e.experts, *["-"] * (len(heads) - 3)])
            continue
        busy = (f"{max(e.load):.1%}", f"{min(e.load):.1%}")
        null = f"{e.null_share:.1%}" if e.null_experts else "no null experts"
        rows.append([e.layer, f"{e.used:,}", e.experts, *busy, f"{e.effective:.1f} experts", null])
    about = (
        "Shares are of all choices of experts that tokens made. As spread as: how many experts, all used alike, would "
        "be as evenly used. Null share: choices that compute nothing."
    )
    used = [layer for layer in layers if layer.used]
    parts: list[object] = [pages.table(heads, rows, about), pages.row([_load(layer) for layer in used])]
    if tokens is not None:
        parts += [_forms(layer, tokens) for layer in used if len(layer.choices) == len(tokens)]
    return pages.join(parts)


def _load(layer: ExpertLayer) -> Html:
    bars = {str(expert): share for expert, share in enumerate(layer.load)}
    many = layer.experts + layer.null_experts
    about = f"The share of the choices that each expert has. The line: all {many} alike."
    if layer.null_experts:
        bars["null"] = layer.null_share
    if layer.null_experts > 1:
        about += f" The bar of the {layer.null_experts} null experts is that of all of them together."
    title = f"Layer {layer.layer}, load of its experts"
    return pages.bar_chart(title, about, bars, "share of the choices", x="expert", even=1 / many)


def _forms(layer: ExpertLayer, tokens: Sequence[str]) -> Html:
    """The tokens that choose each expert most, against how often they choose any."""
    chose: dict[int, Counter[str]] = {}
    times = Counter(token for token, chosen in zip(tokens, layer.choices, strict=True) if chosen)
    for token, chosen in zip(tokens, layer.choices, strict=True):
        for expert in {min(expert, layer.experts) for expert in chosen}:
            chose.setdefault(expert, Counter())[token] += 1
    lines = []
    for expert in sorted(chose):
        ranked = sorted(chose[expert].items(), key=lambda item: (-item[1] / (times[item[0]] + 3), item[0]))
        said = [f"{isolated(visible(token))} {n} of {times[token]}" for token, n in ranked[:_FORMS]]
        name = "null" if expert == layer.experts else str(expert)
        lines.append([name, f"{chose[expert].total():,}", *said, *[""] * (_FORMS - len(said))])
    about = f"Layer {layer.layer}: the tokens that most surely go to each expert, and how often they do."
    heads = ("expert", "tokens", *["token, times"] * _FORMS)
    return pages.table(heads, lines, about)


def slots_section(layers: Sequence[SlotLayer], grid: Grid | None) -> Html:
    """Load of the experts, and a map for each slot."""
    about = "Each expert's part in the tokens' results, the mean over tokens. The line: all alike."
    bars = []
    for layer in layers:
        load = {str(expert): share for expert, share in enumerate(layer.load)}
        title = f"Layer {layer.layer}, load of its experts"
        bars.append(pages.bar_chart(title, about, load, "share", x="expert", even=1 / layer.experts))
    parts: list[object] = [pages.row(bars)]
    if odd := sum(not math.isfinite(weight) for layer in layers for row in layer.into for weight in row):
        parts.insert(0, pages.note(f"{odd:,} of the weights are not numbers (NaN or infinite): grey on the maps."))
    drawn = [layer for layer in layers if len(layer.into) * len(layer.into[0]) <= _MOST_CELLS]
    parts += [_slot_map(layer, grid) for layer in drawn]
    if drawn:
        parts.append(pages.script("slots.js"))
    if len(drawn) < len(layers):
        parts.append(pages.paragraph(f"Layers with more than {_MOST_CELLS:,} weights are too large to draw."))
    return pages.join(parts)


def _slot_map(layer: SlotLayer, grid: Grid | None) -> Html:
    name, many, tokens = f"slots-{layer.layer}", len(layer.into), len(layer.into[0])
    rows, columns = grid or (1, tokens)
    what, each = ("token", "row") if grid is None else ("patch", "map")
    into = [[float(f"{weight:.3g}") if math.isfinite(weight) else None for weight in row] for row in layer.into]
    value = {"rows": rows, "columns": columns, "slots": layer.slots, "what": what, "into": into}
    shape = {"slots": many, "rows": rows, "columns": columns, "cells": many * tokens, "what": what, "each": each}
    return pages.fill("slots", layer=layer.layer, name=name, data=pages.data(name, value), **shape)
