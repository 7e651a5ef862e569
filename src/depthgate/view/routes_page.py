"""Pages of routing decisions: about a text that a model reads, or of plans alone."""

import base64
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress
from statistics import fmean

import depthgate.view.page as pages
from depthgate.view.page import Html, count, isolated, pieces, visible
from depthgate.view.routes import SHARES, Decisions, ExpertLayer, Image, SlotLayer

_FORMS = 4  # tokens named for each expert
_MOST_CELLS = 200_000  # of one layer's slot maps: more would make pages of many megabytes
_PARTS = "Each expert's part in the tokens' results, the mean over tokens. The line: all alike."
_LITTLE = 0.1  # mean gate below which a layer hardly counts


def text_page(title: str, about: object, found: Decisions) -> Html:
    """The page of a text: which tokens went deep, layer by layer, and which got more experts than others."""
    text, many = {"": pages.join([about, *warnings(found)])}, {len(each) for each in found.taken}
    if found.layers or len(many) < 2:
        text["The text, by depth"] = pages.routed_text(found.tokens, found.through, len(found.layers), "routed layer")
    if len(many) > 1:
        text["The text, by experts"] = pages.routed_text(found.tokens, found.taken, max(many), "expert")
    deep = {"Which tokens go deep": _deep(found)} if found.layers else {}
    if not (found.layers or found.experts or found.slots):
        deep = {"Routing": pages.fill("no_routing")}
    return pages.page(title, text | _routing(found, Image(), passes=2) | deep | _experts(found, found.tokens, Image()))


def plans_page(title: str, found: Decisions, image: Image, tokens: Sequence[str] | None) -> Html:
    """A page of plans alone: a section for each kind that there is."""
    what = f": what the layers computed, as chosen by {_chosen_by(found)}" if found.layers else ""
    top = [pages.paragraph(f"One row of a batch{what}."), *warnings(found)]
    if image.pixels is not None:
        top.append(_pixels(image))
    return pages.page(title, {"": pages.join(top)} | _routing(found, image, passes=1) | _experts(found, tokens, image))


def _pixels(image: Image, at: str = "") -> Html:
    """The image that maps lie over."""
    assert image.pixels is not None
    (high, wide, _), rgb = image.pixels.shape, base64.b64encode(bytes(image.pixels.flatten().tolist()))
    return pages.data(f"image{at}", {"width": wide, "height": high, "rgb": rgb.decode()})


def images_page(title: str, about: object, shown: Sequence[tuple[str, Decisions, Image]]) -> Html:
    """A page of images: over each of them what the slots of every Soft MoE layer hold, and the patches that other
    layers computed; then the load of the experts over all images."""
    sections: dict[str, object] = {"": about}
    for n, (name, found, image) in enumerate(shown):
        parts: list[object] = [_pixels(image, f"-{n}")]
        if found.layers:
            heading, names = "The patches that each layer computed, by their gates", [f"layer {x}" for x in found.names]
            gates = [layer.gates for layer in found.layers]
            parts.append(_small_maps(f"patches-{n}", heading, gates, image, names, None, f"-{n}"))
        parts += [*_slot_maps(found.slots, image, f"-{n}"), *warnings(found)]
        if len(parts) > 1:
            sections[f"{name} ({n + 1})" if name in sections else name] = pages.join(parts)
    if len(sections) == 1:  # no layer has a map over an image
        listed = pages.join([pages.paragraph(name) for name, _, _ in shown])
        none = [] if shown[0][1].experts else [pages.fill("no_routing")]
        sections["Images"] = pages.join([*none, listed])
    first, every = shown[0][1], [found for _, found, _ in shown]
    charts = []
    for place, layer in enumerate(first.slots):
        bars = {expert: fmean(found.slots[place].bars[expert] for found in every) for expert in layer.bars}
        charts.append(_load(layer.name, _PARTS, bars, "share", 1 / len(bars), "soft"))
    if charts:
        sections["Load of the experts, over all images"] = pages.row(charts)
    if first.experts:
        chosen = [[c for found in every for c in found.experts[i].choices] for i in range(len(first.experts))]
        whole = [replace(layer, choices=choices) for layer, choices in zip(first.experts, chosen, strict=True)]
        sections["Experts, over all images"] = _expert_layers(whole, None)
    return pages.page(title, sections)


def warnings(found: Decisions) -> list[Html]:
    """What a reader should know of routers that take no token, and of layers whose results hardly count."""
    nobody = [layer for layer in found.layers if not any(layer.routed)]
    little = [layer for layer in found.layers if abs(_mean(compress(layer.gates, layer.routed))) < _LITTLE]
    named = [", ".join(isolated(str(layer.name)) for layer in of) for of in (nobody, little)]
    notes = zip(("routes_nobody", "little_gate"), named, strict=True)
    return [pages.note(pages.fill(template, layers=names, little=_LITTLE)) for template, names in notes if names]


def _chosen_by(found: Decisions) -> str:
    causal = [isolated(str(layer.name)) for layer in found.layers if layer.computed == "causal"]
    if len(causal) in (0, len(found.layers)):
        return "the causal rule" if causal else "the top k"
    return f"the causal rule in layer{'s' * (len(causal) > 1)} {', '.join(causal)}, and by the top k in the others"


def _routing(found: Decisions, image: Image, passes: int) -> dict[str, Html]:
    if not found.layers:
        return {}
    patches = {}
    if image.grid is not None:  # a small image for each layer, of the gates of the patches that it computed
        names = [f"layer {layer.name}, {layer.routed_share:.0%}" for layer in found.layers]
        heading, gates = "The patches that each layer computed, by their gates", [layer.gates for layer in found.layers]
        patches["Patches"] = _small_maps("patches", heading, gates, image, names, even=None)
    drawn = [pages.chart(f"Layer {layer.name}", "", scores=n) for n, layer in enumerate(found.layers)]
    scores = [pages.fill("about_scores"), pages.row(drawn)]
    return patches | {"The map": _map(found), "Layers": _layers(found, passes), "Router scores": pages.join(scores)}


def _experts(found: Decisions, tokens: Sequence[str] | None, image: Image) -> dict[str, Html]:
    sections = {"Experts": _expert_layers(found.experts, tokens)} if found.experts else {}
    return sections | ({"Soft MoE": _slot_layers(found.slots, image)} if found.slots else {})


def _map(found: Decisions) -> Html:
    shown, layers = pieces(found.tokens), found.layers
    scores, gates = [_packed(layer.scores) for layer in layers], [_packed(layer.gates) for layer in layers]
    data = {
        "tokens": [piece.label for piece in shown],
        "heads": {t: piece.heading for t, piece in enumerate(shown) if piece.heading != piece.label},
        "layers": found.names,
        "scores": scores,
        "gates": gates,
        "lowest": [None if math.isnan(lowest := _mean(layer.lowest)) else lowest for layer in layers],
        "computed": [layer.computed if layer.compared else "" for layer in layers],
        "causal": ["".join(str(int(on)) for on in layer.causal) for layer in layers],
        "top_k": ["".join(str(int(on)) for on in layer.top_k) for layer in layers],
    }
    size = {"layers": count(len(layers), "layer"), "tokens": count(len(shown), "token")}
    parts = {"data": pages.data("routes", data), "script": pages.script("map.js")}
    key = pages.fill("map_compared" if found.compared else "map_computed")
    if found.compared and not all(layer.compared for layer in layers):
        key = pages.join([key, pages.fill("map_unknown")])
    drawn = pages.fill("map", key=key, cells=len(layers) * len(shown), **size, **parts)
    odd = sum(row.count(None) for row in scores + gates)
    said = "of the scores and gates is not a number" if odd == 1 else "of the scores and gates are not numbers"
    note = pages.note(f"{odd:,} {said} (NaN or infinite): no mean and no histogram counts them.")
    return pages.join([note, drawn]) if odd else drawn


def _packed(row: Sequence[float]) -> list[int | None]:
    """Ten-thousandths, which are shorter than decimals; None where a value is not finite."""
    return [round(x * 10_000) if math.isfinite(x) else None for x in row]


def _mean(values: Iterable[float]) -> float:
    known = [x for x in values if math.isfinite(x)]
    return fmean(known) if known else math.nan


def _layers(found: Decisions, passes: int) -> Html:
    """A table of shares. A single pass tells what the rule would choose, but not what a causal pass would compute."""
    names = ("routed by the causal rule", "routed by the top k", "decided alike", "rule right")
    heads = {share: name for share, name in zip(SHARES, names, strict=True) if passes == 2 or share != "decided_alike"}
    heads = heads if found.compared else {"routed_share": "routed"}
    lines = []
    for layer in found.layers:
        known = heads if layer.compared else {"routed_share"}
        shares = [f"{layer.shares[name]:.1%}" if name in known else "-" for name in heads]
        means = [_mean(of) for of in (layer.scores, compress(layer.gates, layer.routed))]
        lines.append([layer.name, *shares, *(f"{mean:.3f}".replace("nan", "-") for mean in means)])
    about = pages.join([pages.fill(share) for share in SHARES[2:] if share in heads])
    return pages.table(("layer", *heads.values(), "mean score", "mean gate"), lines, about)


def _deep(found: Decisions) -> Html:
    depths = [found.depth - len(found.layers) + len(layers) for layers in found.through]
    by_form: dict[str, list[int]] = defaultdict(list)
    for token, depth in zip(found.tokens, depths, strict=True):
        by_form[token].append(depth)
    known = sorted(((fmean(d), len(d), form) for form, d in by_form.items() if len(d) >= 3), reverse=True)
    lines = [[isolated(visible(form)), times, f"{mean:.2f}"] for mean, times, form in known]
    ends = {"deepest": lines[:10], "shallowest": lines[10:][-10:]}
    heads, often = ("token", "times", "layers, mean"), "of those that occur at least three times."
    forms = [pages.table(heads, part, f"The {len(part)} {end} {often}") for end, part in ends.items() if part]
    about, by_place = "Means of parts of the text, 60 at most.", _means(list(enumerate(depths)), 60)
    charts = [pages.line_chart("By position", about, by_place, "token", "layers, mean")]
    losses = sorted((x, d) for x, d in zip(found.losses, depths, strict=True) if math.isfinite(x))
    if len(losses) >= 20:
        about = "How many layers computed a token, by how hard it was to predict: groups of equal size."
        charts.append(pages.line_chart("By loss", about, _means(losses, 20), "loss of the token, nats", "layers, mean"))
    return pages.join([pages.row(forms), pages.row(charts)])


def _means(points: Sequence[tuple[float, int]], groups: int) -> dict[str, list[tuple[float, float]]]:
    """The means of as many groups, at most, of points that follow each other."""
    size = max(1, -(-len(points) // groups))
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return {"layers": [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]}


def _expert_layers(layers: Sequence[ExpertLayer], tokens: Sequence[str] | None) -> Html:
    """Load, null share, and which tokens each expert is for."""
    heads = ("layer", "tokens", "experts", "busiest", "idlest", "as spread as", "null share")
    rows, charts, forms = [], [], []
    for layer in layers:
        if not layer.used:
            rows.append([layer.name, "no token came", layer.experts, *["-"] * (len(heads) - 3)])
            continue
        busy = (f"{max(layer.load):.1%}", f"{min(layer.load):.1%}", f"{layer.effective:.1f} experts")
        null = f"{layer.bars['null']:.1%}" if layer.null_experts else "no null experts"
        rows.append([layer.name, f"{layer.used:,}", layer.experts, *busy, null])
        even = 1 / (layer.experts + layer.null_experts)
        charts.append(_load(layer.name, pages.fill("about_load"), layer.bars, "share of the choices", even, layer.kind))
        if tokens is not None and len(layer.choices) == len(tokens):
            forms.append(_expert_tokens(layer, tokens))
    return pages.join([pages.table(heads, rows, pages.fill("about_experts")), pages.row(charts), *forms])


def _load(layer: int | str, about: str, bars: dict[str, float], y: str, even: float, kind: str) -> Html:
    return pages.bar_chart(f"Layer {layer}, load of its experts", about, bars, y, x="expert", even=even, kind=kind)


def _expert_tokens(layer: ExpertLayer, tokens: Sequence[str]) -> Html:
    """The tokens that choose each expert most, against how often they choose any."""
    chose: dict[int, Counter[str]] = defaultdict(Counter)
    times = Counter(token for token, chosen in zip(tokens, layer.choices, strict=True) if chosen)
    for token, chosen in zip(tokens, layer.choices, strict=True):
        for expert in {min(expert, layer.experts) for expert in chosen}:
            chose[expert][token] += 1
    lines = []
    for expert in sorted(chose):
        ranked = sorted(chose[expert].items(), key=lambda item: (-item[1] / (times[item[0]] + 3), item[0]))
        said = [f"{isolated(visible(token))} {n} of {times[token]}" for token, n in ranked[:_FORMS]]
        name = "null" if expert == layer.experts else str(expert)
        lines.append([name, f"{chose[expert].total():,}", *said, *[""] * (_FORMS - len(said))])
    about = f"Layer {layer.name}: the tokens that most surely go to each expert, and how often they do."
    return pages.table(("expert", "tokens", *["token, times"] * _FORMS), lines, about)


def _slot_layers(layers: Sequence[SlotLayer], image: Image) -> Html:
    """Load of the experts, and a map for each slot."""
    charts = [_load(layer.name, _PARTS, layer.bars, "share", 1 / len(layer.bars), "soft") for layer in layers]
    return pages.join([*_slot_maps(layers, image), pages.row(charts)])


def _slot_maps(layers: Sequence[SlotLayer], image: Image, at: str = "") -> list[object]:
    parts: list[object] = []
    if odd := sum(not math.isfinite(weight) for layer in layers for row in layer.into for weight in row):
        parts.append(pages.note(f"{odd:,} of the weights are not numbers (NaN or infinite): grey on the maps."))
    drawn = [layer for layer in layers if len(layer.into) * len(layer.into[0]) <= _MOST_CELLS]
    for layer in drawn:
        names = [f"expert {slot // layer.slots}, slot {slot % layer.slots}" for slot in range(len(layer.into))]
        heading = f"Layer {layer.name}, what its slots hold"
        parts.append(_small_maps(f"slots-{layer.name}{at}", heading, layer.into, image, names, layer.even, at))
    if len(drawn) < len(layers):
        parts.append(pages.paragraph(f"Layers with more than {_MOST_CELLS:,} weights are too large to draw."))
    return parts


def _small_maps(
    key: str,
    heading: str,
    rows: Sequence[Sequence[float]],
    image: Image,
    names: Sequence[str],
    even: float | None,
    at: str = "",
) -> Html:
    """A small map for each row of weights, of patches or of tokens, all on one scale. even: the weight of each if all
    were alike; None for gates. at: which image of the page they lie over."""
    down, across = image.grid or (1, len(rows[0]))
    what, each = ("token", "row") if image.grid is None else ("patch", "map")
    shown = [[float(f"{x:.3g}") if math.isfinite(x) else None for x in row[image.prefix :]] for row in rows]
    shape = {"rows": down, "columns": across}
    data = pages.data(key, {**shape, "what": what, "names": names, "even": even, "weights": shown})
    size = {**shape, "many": len(rows), "cells": len(rows) * len(shown[0])}
    said = {"what": what, "each": each, "weight": "weight" if even else "gate"}
    said |= {"light": "lighter", "kind": ""} if image.pixels is None else {"light": "clearer", "kind": "light"}
    return pages.fill("small_maps", key=key, at=at, heading=heading, data=data, **said, **size)
