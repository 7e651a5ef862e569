"""Routing decisions as plain data, and the pages that show them: of a text that a model reads, of plans alone."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

import depthgate.view.page as pages
from depthgate.data.batches import windows
from depthgate.data.token_file import Documents
from depthgate.errors import DepthgateError, InvalidValueError, check_count
from depthgate.loading import LanguageModel
from depthgate.routing.plan import Plan, Slots
from depthgate.view.experts import (
    ExpertLayer,
    Grid,
    SlotLayer,
    expert_layers,
    experts_section,
    plan_experts,
    slots_section,
)
from depthgate.view.page import Html, count, isolated, pieces, visible

_LAYERS = (
    "Rule right: for how many tokens the causal rule (the predictor, where that is the rule) says what the top k says "
    "of the same hidden states. Decided alike: how many tokens two whole passes, one causal and one by the top k, "
    "route alike; differences in earlier layers count too."
)


@dataclass(frozen=True)
class Routes:
    """T tokens and L routed layers; each list of lists is (L, T)."""

    tokens: list[str]  # bytes that are not text alone are escaped: see view.page
    layers: list[int]  # numbers of the routed layers, from 1
    depth: int  # layers in all
    scores: list[list[float]]
    gates: list[list[float]]  # factors of the block's result; 0 where the token skips
    causal: list[list[bool]]  # routed by the causal rule
    top_k: list[list[bool]]  # routed by the top k, in a pass where all layers take the top k
    rule: list[list[bool]]  # the causal rule's answer in that same pass: what it is trained to get right
    losses: list[float]  # nats of each token, given those before it; not a number where nothing is before it

    @classmethod
    def empty(cls, layers: Sequence[int], depth: int) -> "Routes":
        """No tokens yet."""

        def rows() -> list[list[Any]]:
            return [[] for _ in layers]

        return cls([], list(layers), depth, rows(), rows(), rows(), rows(), rows(), [])

    def add(
        self,
        tokens: Sequence[str],
        causal: Sequence[Plan],
        top_k: Sequence[Plan],
        losses: Sequence[float],
        row: int = 0,
    ) -> None:
        """Take in more tokens: the plans of a causal pass and of one by the top k over them, in a row of the batch.
        Padding is left out."""
        mine, best = ([plan for plan in plans if isinstance(plan, Slots)] for plans in (causal, top_k))
        if not len(mine) == len(best) == len(self.layers):
            raise DepthgateError(
                f"{len(mine)} and {len(best)} plans for {len(self.layers)} routed layers: they are of another model"
            )
        if any(plan.scores.shape[1:] != (len(tokens), 1) for plan in (*mine, *best)):
            raise DepthgateError("the plans are of another text: make them from the same tokens")
        valid = mine[0].valid if mine else None
        kept = torch.ones(len(tokens), dtype=torch.bool) if valid is None else valid[row].cpu()

        def values(of: Tensor) -> list[Any]:
            return of[row, :, 0].detach().cpu()[kept].tolist()

        real = kept.tolist()
        self.tokens.extend(token for token, on in zip(tokens, real, strict=True) if on)
        self.losses.extend(loss for loss, on in zip(losses, real, strict=True) if on)
        for layer, (plan, other) in enumerate(zip(mine, best, strict=True)):
            self.scores[layer] += values(plan.scores.float())
            self.gates[layer] += values(_token_gates(plan))
            self.causal[layer] += values(plan.chosen if plan.causal else plan.causal_choice)
            self.top_k[layer] += values(other.chosen)
            self.rule[layer] += values(other.chosen if other.causal else other.causal_choice)

    @property
    def through(self) -> list[list[int]]:
        """For each token, the routed layers that computed it, by the causal rule."""
        columns = zip(*self.causal, strict=True) if self.layers else [()] * len(self.tokens)
        return [[layer for layer, on in zip(self.layers, column, strict=True) if on] for column in columns]

    @property
    def depths(self) -> list[int]:
        """Number of layers that computed each token."""
        return [self.depth - len(self.layers) + len(layers) for layers in self.through]

    def shares(self, choice: list[list[bool]]) -> list[float]:
        """The share of the tokens that each layer took."""
        return [sum(row) / max(1, len(row)) for row in choice]

    @property
    def odd(self) -> int:
        """Number of scores and gates that are not finite."""
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


def _token_gates(plan: Slots) -> Tensor:
    """(B, T, E): the gate of each routed token, 0 where it is not routed."""
    return torch.zeros_like(plan.scores).scatter(1, plan.tokens.mT, plan.gates.float().mT)


def held_out_tokens(documents: Documents, most: int) -> list[int]:
    """The beginning of the first document with as many tokens, or else of the text."""
    lengths = documents.bounds.diff().tolist()
    number = next((i for i, length in enumerate(lengths) if length > most), 0)
    start = int(documents.bounds[number])
    found: list[int] = windows(documents, [start], min(most, len(documents) - start)).tokens[0].tolist()
    return found


class Seen(NamedTuple):
    """Tokens of a text or of one row of a batch, by kind of layer. Layers are numbered from 1; where no model is
    known, by the place of their plan."""

    routes: Routes  # without layers where none is routed
    experts: list[ExpertLayer]
    slots: list[SlotLayer]


@torch.no_grad()
def read(model: LanguageModel, ids: Sequence[int]) -> Seen:
    """The decisions of a model's routers and experts about a text, which is read a window at a time."""
    layers = [i for i, kind in enumerate(model.kinds, 1) if kind in ("mod", "mode", "random")]
    found, experts = Routes.empty(layers, len(model.kinds)), list[ExpertLayer]()
    for start in range(0, len(ids), model.context):
        part = ids[start : start + model.context]
        tokens = torch.tensor([part], device=model.device)
        logits, causal = model(tokens, causal=True)
        losses = torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:], reduction="none").tolist()
        del logits
        texts = [model.tokenizer.token_text(i) for i in part]
        found.add(texts, causal, model(tokens).plans, [math.nan, *losses])
        more = expert_layers(model.kinds, causal, len(part), model.experts)
        for known, new in zip(experts, more, strict=False):
            known.choices.extend(new.choices)
        experts = experts or more
    return Seen(found, experts, [])


def seen(plans: Sequence[Plan], tokens: Sequence[str] | None, grid: Grid | None, row: int) -> Seen:
    """The decisions of plans about one row of their batch."""
    if not plans:
        raise DepthgateError("there are no plans: no layer of the model routes")
    check_count(row, "row", minimum=0, maximum=min(plan.scores.shape[0] for plan in plans) - 1)
    length = max(plan.scores.shape[1] for plan in plans)
    if tokens is not None and len(tokens) != length:
        raise DepthgateError(f"there are {len(tokens)} tokens, and plans for {length}: they are of another text")
    found = [plan_experts(i, plan, row) for i, plan in enumerate(plans, 1)]
    slots = [each for each in found if isinstance(each, SlotLayer)]
    if grid is not None:
        for number, side in zip(grid, ("rows of grid", "columns of grid"), strict=True):
            check_count(number, side)
        if any(grid[0] * grid[1] != len(layer.into[0]) for layer in slots):
            raise InvalidValueError(f"grid is {grid}, but there are {length} tokens: rows * columns must be as many")
    # Within a routed layer, others see the routed tokens alone; those plans have no place on a map of all tokens.
    depth = {i: p for i, p in enumerate(plans, 1) if isinstance(p, Slots) and p.scores.shape[1:] == (length, 1)}
    routes, routed = Routes.empty(list(depth), len(plans)), list(depth.values())
    routes.add(tokens or list(map(str, range(length))), routed, routed, [math.nan] * length, row)
    return Seen(routes, [each for each in found if isinstance(each, ExpertLayer)], slots)


def text_page(title: str, about: object, found: Seen) -> Html:
    """The page of a text: which tokens went deep, layer by layer."""
    routes = found.routes
    if routes.layers:
        text = {"The text, by depth": pages.routed_text(routes.tokens, routes.through, routes.layers)}
        rest = {"Which tokens go deep": _deep(routes)}
    else:
        plain = "".join(piece.text for piece in pieces(routes.tokens))
        text = {"The text": pages.preformatted(visible(plain, kept=" \n"))}
        rest = {"Routing": pages.paragraph("This model has no routed layers: every token goes through all of them.")}
    return pages.page(title, {"": about} | text | _sections(found, rest, routes.tokens))


def plans_page(found: Seen, grid: Grid | None, tokens: Sequence[str] | None) -> Html:
    """A page of plans alone: a section for each kind that there is."""
    about = "What the routers of a model did with one row of a batch. Layers are numbered by their plans, from 1."
    return pages.page("depthgate: plans", {"": pages.paragraph(about)} | _sections(found, {}, tokens, grid))


def _sections(
    found: Seen, more: dict[str, Html], tokens: Sequence[str] | None, grid: Grid | None = None
) -> dict[str, object]:
    """The map, the figures of routed layers, `more` about them, and experts."""
    routes, sections = found.routes, dict[str, object]()
    if routes.layers:
        sections |= {"The map": _map(routes), "Layers": _layers(routes), "Router scores": _histograms(routes)}
    sections |= more
    if found.experts:
        sections["Experts"] = experts_section(found.experts, tokens)
    if found.slots:
        sections["Soft MoE"] = slots_section(found.slots, grid)
    return sections


def _map(found: Routes) -> Html:
    shown = pieces(found.tokens)
    data = {
        "tokens": [piece.label for piece in shown],
        "heads": {t: piece.heading for t, piece in enumerate(shown) if piece.heading != piece.label},
        "layers": found.layers,
        "scores": [_packed(row) for row in found.scores],
        "gates": [_packed(row) for row in found.gates],
        "causal": ["".join(map(str, map(int, row))) for row in found.causal],
        "top_k": ["".join(map(str, map(int, row))) for row in found.top_k],
    }
    layers, tokens = count(len(found.layers), "layer"), count(len(found.tokens), "token")
    cells = len(found.layers) * len(found.tokens)
    parts = {"data": pages.data("routes", data), "script": pages.script("map.js")}
    return pages.join([*_odd(found), pages.fill("map", layers=layers, tokens=tokens, cells=cells, **parts)])


def _packed(row: Sequence[float]) -> list[int | None]:
    """Ten-thousandths, which are shorter than decimals; None where a value is not finite."""
    return [round(x * 10_000) if math.isfinite(x) else None for x in row]


def _mean(values: Sequence[float]) -> str:
    known = [x for x in values if math.isfinite(x)]
    return f"{fmean(known):.3f}" if known else "-"


def _odd(found: Routes) -> list[object]:
    if not found.odd:
        return []
    said = "of the scores and gates is not a number" if found.odd == 1 else "of the scores and gates are not numbers"
    return [pages.note(f"{found.odd:,} {said} (NaN or infinite): no mean and no histogram counts them.")]


def _layers(found: Routes) -> Html:
    decided = ("routed causally", "routed by the top k", "rule right", "decided alike")
    heads = ("layer", *decided, "mean score", "mean gate")
    shares = (found.shares(found.causal), found.shares(found.top_k), found.accuracy, found.agreement)
    lines = []
    for i, (layer, *figures) in enumerate(zip(found.layers, *shares, strict=True)):
        gates = [gate for gate, on in zip(found.gates[i], found.causal[i], strict=True) if on]
        lines.append([layer, *(f"{figure:.1%}" for figure in figures), _mean(found.scores[i]), _mean(gates)])
    routed = dict(zip(map(str, found.layers), shares[0], strict=True))
    title, about = "Routed share of each layer", "Under the causal choice."
    bars = pages.bar_chart(title, about, routed, "share of the tokens", x="layer")
    return pages.join([pages.table(heads, lines, _LAYERS), bars])


def _histograms(found: Routes) -> Html:
    drawn = []
    for layer, row in zip(found.layers, found.scores, strict=True):
        if scores := [score for score in row if math.isfinite(score)]:
            counts, edges = torch.histogram(torch.tensor(scores, dtype=torch.float64), bins=24)
            bars = dict(zip((edges[:-1] + edges.diff() / 2).tolist(), counts.tolist(), strict=True))
            about = f"How many of {count(len(scores), 'token')} have which score."
            drawn.append(pages.bar_chart(f"Layer {layer}", about, bars, "tokens", x="router score"))
    return pages.row(drawn or [pages.paragraph("No score is a finite number.")])


def _deep(found: Routes) -> Html:
    depths = found.depths
    by_form: dict[str, list[int]] = defaultdict(list)
    for token, depth in zip(found.tokens, depths, strict=True):
        by_form[token].append(depth)
    known = sorted(((fmean(d), len(d), form) for form, d in by_form.items() if len(d) >= 3), reverse=True)
    picked = known if len(known) <= 20 else [*known[:10], *known[-10:]]
    lines = [[isolated(visible(form)), times, f"{mean:.2f}"] for mean, times, form in picked]
    about = "The ten deepest and the ten shallowest of those that occur at least three times."
    forms = [pages.table(("token", "times", "layers, mean"), lines, about)] if lines else []
    size = max(1, len(depths) // 60)
    by_place = {"layers": [(float(i), fmean(depths[i : i + size])) for i in range(0, len(depths), size)]}
    charts = [pages.line_chart("By position", f"Means of {count(size, 'token')}.", by_place, "token", "layers, mean")]
    losses = sorted((x, d) for x, d in zip(found.losses, depths, strict=True) if math.isfinite(x))
    if len(losses) >= 20:
        part = -(-len(losses) // 20)
        groups = [losses[i : i + part] for i in range(0, len(losses), part)]
        by_loss = {"layers": [(fmean(x for x, _ in group), fmean(d for _, d in group)) for group in groups]}
        about = "How many layers computed a token, by how hard it was to predict: groups of equal size."
        charts.append(pages.line_chart("By loss", about, by_loss, "loss of the token, nats", "layers, mean"))
    return pages.join([*forms, pages.row(charts)])
