"""The page of one text: which tokens went deep, layer by layer."""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from depthgate.view import page as pages
from depthgate.view.experts import ExpertLayer, SlotLayer
from depthgate.view.experts_page import experts_section, slots_section
from depthgate.view.page import Html, count, isolated, pieces, routed_text, visible
from depthgate.view.routes import Routes

_BINS = 24
_MAP = (
    "Layers down, tokens across. Full cells: routed by the causal rule and by the top k. Orange: by the causal rule "
    "alone. Low green bars: by the top k alone. Point at a cell, or use the arrow keys; + and - or the wheel zoom, "
    "dragging or a sideways wheel moves along, Home and End go to the ends, a click holds a cell, a click on a token "
    "of the text above shows it here."
)


def routes_page(title: str, about: object, found: Routes, experts: Sequence[ExpertLayer] = ()) -> Html:
    """The whole page of a text."""
    sections: dict[str, object] = {"": pages.join([about, *_odd(found)])}
    if found.layers:
        through = [found.through(t) for t in range(len(found.tokens))]
        sections["The text, by depth"] = routed_text(found.tokens, through, found.layers)
        sections |= _routing(found)
        sections["Which tokens go deep"] = _deep(found)
    else:
        text = "".join(piece.text for piece in pieces(found.tokens))
        sections["The text"] = pages.preformatted(visible(text, kept=" \n"))
        sections["Routing"] = pages.paragraph("This model has no routed layers: every token goes through all of them.")
    if experts:
        sections["Experts"] = experts_section(experts, found.tokens)
    return pages.page(title, sections)


def plans_page(
    found: Routes | None,
    experts: Sequence[ExpertLayer],
    slots: Sequence[SlotLayer],
    grid: tuple[int, int] | None,
    tokens: Sequence[str] | None,
) -> Html:
    """A page of plans alone: whatever kinds there are."""
    about = "What the routers of a model did with one row of a batch. Layers are numbered by their plans, from 1."
    sections: dict[str, object] = {"": pages.paragraph(about)}
    if found is not None:
        sections |= {"": pages.join([sections[""], *_odd(found)]), **_routing(found)}
    if experts:
        sections["Experts"] = experts_section(experts, tokens)
    if slots:
        sections["Soft MoE"] = slots_section(slots, grid)
    return pages.page("depthgate: plans", sections)


def _routing(found: Routes) -> dict[str, object]:
    return {"The map": _map(found), "Layers": _layers(found), "Router scores": _histograms(found)}


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
    cells = len(found.tokens) * len(found.layers)
    size = f"{count(len(found.layers), 'layer')} and {count(len(found.tokens), 'token')}"
    label = f"Map of {size}; arrow keys move, plus and minus zoom"
    return Html(
        '<figure><p class="tools"><button id="closer">Zoom in</button> <button id="wider">Zoom out</button> '
        '<button id="whole">Whole text</button></p>'
        f'<div class="map"><canvas id="map" tabindex="0" role="application" aria-label="{pages.html(label)}" '
        f'aria-describedby="said" data-cells="{cells}" data-layers="{len(found.layers)}" '
        f'data-tokens="{len(found.tokens)}"></canvas></div>'
        '<p class="said" id="said" role="status" aria-live="polite">Point at a cell.</p>'
        f"<figcaption>{pages.html(_MAP)}</figcaption></figure>\n"
        f"{pages.data('routes', data)}\n{pages.script('map.js')}"
    )


def _packed(row: Sequence[float]) -> list[int | None]:
    """Ten-thousandths, which are shorter than decimals; nothing where there is no number."""
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
    heads = (
        "layer",
        "routed causally",
        "routed by the top k",
        "rule right",
        "decided alike",
        "mean score",
        "mean gate",
    )
    shares = (found.shares(found.causal), found.shares(found.top_k), found.accuracy, found.agreement)
    lines = []
    for i, (layer, *figures) in enumerate(zip(found.layers, *shares, strict=True)):
        gates = [gate for gate, on in zip(found.gates[i], found.causal[i], strict=True) if on]
        lines.append([layer, *(f"{figure:.1%}" for figure in figures), _mean(found.scores[i]), _mean(gates)])
    about = (
        "Rule right: for how many tokens the causal rule (the predictor, where that is the rule) says what the top k "
        "says of the same hidden states. Decided alike: how many tokens two whole passes, one causal and one by the "
        "top k, route alike; differences in earlier layers count too."
    )
    bars = pages.bar_chart(
        "Routed share of each layer",
        "Under the causal choice.",
        {str(layer): share for layer, share in zip(found.layers, shares[0], strict=True)},
        "share of the tokens",
    )
    return pages.join([pages.table(heads, lines, about), bars])


def _histograms(found: Routes) -> Html:
    known = [[score for score in scores if math.isfinite(score)] for scores in found.scores]
    drawn = [(layer, scores) for layer, scores in zip(found.layers, known, strict=True) if scores]
    return pages.row([_histogram(*each) for each in drawn] or [pages.paragraph("No score is a finite number.")])


def _histogram(layer: int, scores: Sequence[float]) -> Html:
    low, high = min(scores), max(scores)
    if low == high:
        low, high = low - 0.5, high + 0.5
    step = (high - low) / _BINS
    counts = [0] * _BINS
    for score in scores:
        counts[min(_BINS - 1, int((score - low) / step))] += 1
    bars = {low + (i + 0.5) * step: float(many) for i, many in enumerate(counts)}
    about = f"How many of {count(len(scores), 'token')} have which score."
    return pages.bar_chart(f"Layer {layer}", about, bars, "tokens", x="router score")


def _deep(found: Routes) -> Html:
    depths = found.depths
    by_form: dict[str, list[int]] = defaultdict(list)
    for token, depth in zip(found.tokens, depths, strict=True):
        by_form[token].append(depth)
    known = sorted(((fmean(d), len(d), form) for form, d in by_form.items() if len(d) >= 3), reverse=True)
    picked = known if len(known) <= 20 else [*known[:10], *known[-10:]]
    lines = [[isolated(visible(form)), times, f"{mean:.2f}"] for mean, times, form in picked]
    about = "The ten deepest and the ten shallowest of those that occur at least three times."
    forms: list[object] = [pages.table(("token", "times", "layers, mean"), lines, about)] if lines else []
    size = max(1, len(depths) // 60)
    by_place = [(float(i), fmean(depths[i : i + size])) for i in range(0, len(depths), size)]
    parts = [
        pages.line_chart(
            "By position", f"Means of {count(size, 'token')}.", {"layers": by_place}, "token", "layers, mean"
        )
    ]
    losses = sorted((x, d) for x, d in zip(found.losses, depths, strict=True) if math.isfinite(x))
    if len(losses) >= 20:
        part = -(-len(losses) // 20)
        groups = [losses[i : i + part] for i in range(0, len(losses), part)]
        by_loss = [(fmean(x for x, _ in group), fmean(d for _, d in group)) for group in groups]
        said = "How many layers computed a token, by how hard it was to predict: groups of equal size."
        parts.append(pages.line_chart("By loss", said, {"layers": by_loss}, "loss of the token, nats", "layers, mean"))
    return pages.join([*forms, pages.row(parts)])
