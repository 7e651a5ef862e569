"""The page of one text: which tokens went deep, layer by layer."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from importlib.resources import files
from statistics import fmean

from depthgate.view import page as pages
from depthgate.view.page import Html
from depthgate.view.routes import Routes
from depthgate.view.tokens import routed_text, visible

_BINS = 24
_MAP = (
    "Layers down, tokens across. Full cells: routed by the causal rule and by the top k. Orange: by the causal rule "
    "alone. Low green bars: by the top k alone. Point at a cell, or use the arrow keys; + and - or the wheel zoom, "
    "Home and End go to the ends, a click holds a cell, a click on a token of the text above shows it here."
)


def routes_page(title: str, about: str, found: Routes) -> Html:
    """The whole page."""
    sections: dict[str, object] = {"": pages.paragraph(about)}
    if not found.layers:
        sections["The text"] = pages.preformatted(visible("".join(found.tokens), kept=" \n"))
        sections["Routing"] = pages.paragraph("This model has no routed layers: every token goes through all of them.")
        return pages.page(title, sections)
    through = [found.through(t) for t in range(len(found.tokens))]
    sections["The text, by depth"] = routed_text(found.tokens, through, found.layers)
    sections["The map"] = _map(found)
    sections["Layers"] = _layers(found)
    sections["Router scores"] = _histograms(found)
    sections["Which tokens go deep"] = _deep(found)
    return pages.page(title, sections)


def _map(found: Routes) -> Html:
    data = {
        "tokens": [visible(token) for token in found.tokens],
        "layers": found.layers,
        "scores": found.scores,
        "gates": found.gates,
        "causal": ["".join(map(str, map(int, row))) for row in found.causal],
        "top_k": ["".join(map(str, map(int, row))) for row in found.top_k],
    }
    # Inside a script element only "<" could end it; JSON reads it back from its escape.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    cells = len(found.tokens) * len(found.layers)
    label = f"Map of {len(found.layers)} layers and {len(found.tokens)} tokens; arrow keys move, plus and minus zoom"
    script = files("depthgate.view").joinpath("map.js").read_text(encoding="utf-8")
    return Html(
        '<figure><p class="tools"><button id="closer">Zoom in</button> <button id="wider">Zoom out</button> '
        '<button id="whole">Whole text</button></p>'
        f'<div class="map"><canvas id="map" tabindex="0" role="application" aria-label="{pages.html(label)}" '
        f'aria-describedby="said" data-cells="{cells}" data-layers="{len(found.layers)}" '
        f'data-tokens="{len(found.tokens)}"></canvas></div>'
        '<p id="said" role="status" aria-live="polite">Point at a cell.</p>'
        f"<figcaption>{pages.html(_MAP)}</figcaption></figure>\n"
        f'<script type="application/json" id="routes">{text}</script>\n<script>{script}</script>'
    )


def _layers(found: Routes) -> Html:
    heads = ("layer", "routed causally", "routed by the top k", "decided alike", "mean score", "mean gate")
    rows = zip(found.layers, found.shares(found.causal), found.shares(found.top_k), found.agreement, strict=True)
    lines = []
    for i, (layer, causal, best, alike) in enumerate(rows):
        gates = [gate for gate, on in zip(found.gates[i], found.causal[i], strict=True) if on]
        mean = f"{fmean(gates):.3f}" if gates else "-"
        lines.append([layer, f"{causal:.1%}", f"{best:.1%}", f"{alike:.1%}", f"{fmean(found.scores[i]):.3f}", mean])
    about = "Decided alike: the share of the tokens for which the causal rule says what the top k says."
    return pages.table(heads, lines, about)


def _histograms(found: Routes) -> Html:
    return pages.row([_histogram(layer, scores) for layer, scores in zip(found.layers, found.scores, strict=True)])


def _histogram(layer: int, scores: Sequence[float]) -> Html:
    low, high = min(scores), max(scores)
    step = (high - low) / _BINS or 1.0
    counts = [0] * _BINS
    for score in scores:
        counts[min(_BINS - 1, int((score - low) / step))] += 1
    outline = [(low, 0.0)]
    for i, count in enumerate(counts):
        outline += [(low + i * step, float(count)), (low + (i + 1) * step, float(count))]
    about = f"How many of the {len(scores):,} tokens have which score."
    return pages.line_chart(f"Layer {layer}", about, {"tokens": [*outline, (high, 0.0)]}, "router score", "tokens")


def _deep(found: Routes) -> Html:
    depths = found.depths
    forms: dict[str, list[int]] = defaultdict(list)
    for token, depth in zip(found.tokens, depths, strict=True):
        forms[token].append(depth)
    known = sorted(((fmean(d), len(d), form) for form, d in forms.items() if len(d) >= 3), reverse=True)
    picked = known if len(known) <= 20 else [*known[:10], *known[-10:]]
    lines = [[visible(form), count, f"{mean:.2f}"] for mean, count, form in picked]
    about = "The ten deepest and the ten shallowest of those that occur at least three times."
    parts: list[object] = [pages.table(("token", "times", "layers, mean"), lines, about)] if lines else []
    size = max(1, len(depths) // 60)
    by_place = [(float(i), fmean(depths[i : i + size])) for i in range(0, len(depths), size)]
    parts.append(
        pages.line_chart("By position", f"Means of {size} tokens.", {"layers": by_place}, "token", "layers, mean")
    )
    losses = sorted((x, d) for x, d in zip(found.losses, depths, strict=True) if math.isfinite(x))
    if len(losses) >= 20:
        part = -(-len(losses) // 20)
        groups = [losses[i : i + part] for i in range(0, len(losses), part)]
        by_loss = [(fmean(x for x, _ in group), fmean(d for _, d in group)) for group in groups]
        said = "How many layers computed a token, by how hard it was to predict: groups of equal size."
        parts.append(pages.line_chart("By loss", said, {"layers": by_loss}, "loss of the token, nats", "layers, mean"))
    return pages.row(parts)
