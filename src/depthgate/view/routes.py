"""Routing decisions as plain data, and the pages that show them: of a text that a model reads, of plans alone."""

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
    "Decided alike: how many tokens two whole passes, one causal and one by the top k, route alike; differences in "
    "earlier layers count too. Rule right: for how many tokens the causal rule (the predictor, where that is the rule) "
    "says what the top k says of the same hidden states."
)


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
        kinds: dict[str, Iterable[bool]] = {
            "routed_share": self.causal,
            "top_k_share": self.top_k,
            "agreement": map(operator.eq, self.causal, self.top_k),
            "rule_accuracy": map(operator.eq, self.rule, self.top_k),
        }
        return {name: sum(flags) / max(1, len(self.causal)) for name, flags in kinds.items()}


@dataclass(frozen=True)
class Routes:
    """Tokens, and the layers that they may skip."""

    depth: int  # layers in all
    layers: list[RoutedLayer]
    tokens: list[str] = field(default_factory=list)  # bytes that are not text alone are escaped: see view.page
    losses: list[float] = field(default_factory=list)  # nats, given the tokens before; not a number where none is

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

        for token, loss, real in zip(tokens, losses, kept.tolist(), strict=True):
            if real:
                self.tokens.append(token)
                self.losses.append(loss)
        for layer, plan, other in zip(self.layers, mine, best, strict=True):
            layer.scores.extend(values(plan.scores.float()))
            layer.gates.extend(values(_token_gates(plan)))
            layer.causal.extend(values(plan.chosen if plan.causal else plan.causal_choice))
            layer.top_k.extend(values(other.chosen))
            layer.rule.extend(values(other.chosen if other.causal else other.causal_choice))

    @property
    def through(self) -> list[list[int]]:
        """For each token, the numbers of the routed layers that computed it, by the causal rule."""
        return [[layer.number for layer in self.layers if layer.causal[t]] for t in range(len(self.tokens))]

    @property
    def numbers(self) -> list[int]:
        """The numbers of the routed layers."""
        return [layer.number for layer in self.layers]

    @property
    def depths(self) -> list[int]:
        """Number of layers that computed each token."""
        return [self.depth - len(self.layers) + len(layers) for layers in self.through]


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


class Decisions(NamedTuple):
    """Tokens of a text or of one row of a batch, by kind of layer. Layers are numbered from 1; where no model is
    known, by the place of their plan."""

    routes: Routes  # without layers where none is routed
    experts: list[ExpertLayer]
    slots: list[SlotLayer]


@torch.no_grad()
def read(model: LanguageModel, ids: Sequence[int]) -> Decisions:
    """The decisions of a model's routers and experts about a text, which is read a window at a time."""
    layers = [RoutedLayer(i) for i, kind in enumerate(model.kinds, 1) if kind in ("mod", "mode", "random")]
    found, experts = Routes(len(model.kinds), layers), list[ExpertLayer]()
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
    return Decisions(found, experts, [])


def plan_decisions(plans: Sequence[Plan], tokens: Sequence[str] | None, grid: Grid | None, row: int) -> Decisions:
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
    routes, routed = Routes(len(plans), [RoutedLayer(i) for i in depth]), list(depth.values())
    routes.add(tokens or list(map(str, range(length))), routed, routed, [math.nan] * length, row)
    return Decisions(routes, [each for each in found if isinstance(each, ExpertLayer)], slots)


def text_page(title: str, about: object, found: Decisions) -> Html:
    """The page of a text: which tokens went deep, layer by layer."""
    routes = found.routes
    if routes.layers:
        text = {"The text, by depth": pages.routed_text(routes.tokens, routes.through, routes.numbers)}
        rest = {"Which tokens go deep": _deep(routes)}
    else:
        plain = "".join(piece.text for piece in pieces(routes.tokens))
        text = {"The text": pages.preformatted(visible(plain, kept=" \n"))}
        rest = {"Routing": pages.paragraph("This model has no routed layers: every token goes through all of them.")}
    return pages.page(title, {"": about} | text | _sections(found, rest, routes.tokens))


def plans_page(found: Decisions, grid: Grid | None, tokens: Sequence[str] | None) -> Html:
    """A page of plans alone: a section for each kind that there is."""
    about = "What the routers of a model did with one row of a batch. Layers are numbered by their plans, from 1."
    return pages.page("depthgate: plans", {"": pages.paragraph(about)} | _sections(found, {}, tokens, grid))


def _sections(
    found: Decisions, more: dict[str, Html], tokens: Sequence[str] | None, grid: Grid | None = None
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
        "layers": found.numbers,
        "scores": [_packed(layer.scores) for layer in found.layers],
        "gates": [_packed(layer.gates) for layer in found.layers],
        "causal": ["".join(str(int(on)) for on in layer.causal) for layer in found.layers],
        "top_k": ["".join(str(int(on)) for on in layer.top_k) for layer in found.layers],
    }
    layers, tokens = count(len(found.layers), "layer"), count(len(found.tokens), "token")
    cells = len(found.layers) * len(found.tokens)
    parts = {"data": pages.data("routes", data), "script": pages.script("map.js")}
    return pages.join([*_odd(found), pages.fill("map", layers=layers, tokens=tokens, cells=cells, **parts)])


def _packed(row: Sequence[float]) -> list[int | None]:
    """Ten-thousandths, which are shorter than decimals; None where a value is not finite."""
    return [round(x * 10_000) if math.isfinite(x) else None for x in row]


def _finite(values: Sequence[float]) -> list[float]:
    return [x for x in values if math.isfinite(x)]


def _mean(values: Sequence[float]) -> str:
    known = _finite(values)
    return f"{fmean(known):.3f}" if known else "-"


def _odd(found: Routes) -> list[object]:
    """A note where scores or gates are not finite."""
    odd = sum(len(values) - len(_finite(values)) for layer in found.layers for values in (layer.scores, layer.gates))
    said = "of the scores and gates is not a number" if odd == 1 else "of the scores and gates are not numbers"
    return [pages.note(f"{odd:,} {said} (NaN or infinite): no mean and no histogram counts them.")] if odd else []


def _layers(found: Routes) -> Html:
    shares = ("routed causally", "routed by the top k", "decided alike", "rule right")
    lines = []
    for layer in found.layers:
        shown = [f"{share:.1%}" for share in layer.shares.values()]
        gates = [gate for gate, on in zip(layer.gates, layer.causal, strict=True) if on]
        lines.append([layer.number, *shown, _mean(layer.scores), _mean(gates)])
    routed = {str(layer.number): layer.shares["routed_share"] for layer in found.layers}
    title, about = "Routed share of each layer", "Under the causal choice."
    bars = pages.bar_chart(title, about, routed, "share of the tokens", x="layer")
    return pages.join([pages.table(("layer", *shares, "mean score", "mean gate"), lines, _LAYERS), bars])


def _histograms(found: Routes) -> Html:
    drawn = []
    for layer in found.layers:
        if scores := _finite(layer.scores):
            counts, edges = torch.histogram(torch.tensor(scores, dtype=torch.float64), bins=24)
            bars = dict(zip((edges[:-1] + edges.diff() / 2).tolist(), counts.tolist(), strict=True))
            about = f"How many of {count(len(scores), 'token')} have which score."
            drawn.append(pages.bar_chart(f"Layer {layer.number}", about, bars, "tokens", x="router score"))
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
