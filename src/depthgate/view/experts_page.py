"""Sections of a page: which experts tokens chose, and how the slots of Soft MoE look at tokens or patches."""

import math
from collections import Counter
from collections.abc import Sequence

from depthgate.view import page as pages
from depthgate.view.experts import ExpertLayer, SlotLayer
from depthgate.view.page import Html, isolated, visible

_FORMS = 4  # tokens named for each expert
_MOST_CELLS = 200_000  # of one layer's slot maps: more would make pages of many megabytes
_MAPS = (
    "One small map for each slot: the lighter a patch, the more of it the slot holds. All maps of a layer share one "
    "scale. Point at a patch, or use the arrow keys; Page Up and Page Down go to other slots."
)


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
    parts: list[object] = [pages.table(heads, rows, about)]
    parts.append(pages.row([_load(layer) for layer in layers if layer.used]))
    if tokens is not None:
        parts += [_forms(layer, tokens) for layer in layers if len(layer.choices) == len(tokens) and layer.used]
    return pages.join(parts)


def _load(layer: ExpertLayer) -> Html:
    bars = {str(expert): share for expert, share in enumerate(layer.load)}
    if layer.null_experts:
        bars["null"] = layer.null_share
    about = f"The share of the choices that each expert has. The line: all {layer.experts + layer.null_experts} alike."
    even = 1 / (layer.experts + layer.null_experts)
    if layer.null_experts > 1:
        about += f" The bar of the {layer.null_experts} null experts is that of all of them together."
    return pages.bar_chart(f"Layer {layer.layer}, load of its experts", about, bars, "share of the choices", even=even)


def _forms(layer: ExpertLayer, tokens: Sequence[str]) -> Html:
    """For each expert, the tokens that choose it most, against how often they choose any."""
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
    return pages.table(heads, lines, about, f"Table: tokens of the experts of layer {layer.layer}")


def slots_section(layers: Sequence[SlotLayer], grid: tuple[int, int] | None) -> Html:
    """Load of the experts, and a map for each slot."""
    even = {layer.layer: 1 / layer.experts for layer in layers}
    bars = [
        pages.bar_chart(
            f"Layer {layer.layer}, load of its experts",
            "Each expert's part in what tokens get back, the mean over tokens. The line: all alike.",
            {str(expert): share for expert, share in enumerate(layer.load)},
            "share",
            even=even[layer.layer],
        )
        for layer in layers
    ]
    odd = sum(not math.isfinite(weight) for layer in layers for row in layer.into for weight in row)
    parts: list[object] = [pages.row(bars)]
    if odd:
        parts.insert(0, pages.note(f"{odd:,} of the weights are not numbers (NaN or infinite): grey on the maps."))
    drawn = [layer for layer in layers if len(layer.into) * len(layer.into[0]) <= _MOST_CELLS]
    for layer in drawn:
        parts.append(_slot_map(layer, grid or (1, len(layer.into[0])), patches=grid is not None))
    if drawn:
        parts.append(pages.script("slots.js"))
    if len(drawn) < len(layers):
        parts.append(pages.paragraph(f"Layers with more than {_MOST_CELLS:,} weights are too large to draw."))
    return pages.join(parts)


def _slot_map(layer: SlotLayer, grid: tuple[int, int], patches: bool) -> Html:
    name = f"slots-{layer.layer}"
    value = {
        "rows": grid[0],
        "columns": grid[1],
        "slots": layer.slots,
        "what": "patch" if patches else "token",
        "into": [[float(f"{weight:.3g}") if math.isfinite(weight) else None for weight in row] for row in layer.into],
    }
    cells = len(layer.into) * len(layer.into[0])
    label = f"Slot maps of layer {layer.layer}: {len(layer.into)} slots over {grid[0]} by {grid[1]}"
    about = _MAPS if patches else _MAPS.replace("patch", "token").replace("map ", "row ").replace("maps", "rows")
    return Html(
        f"<figure><h3>Layer {layer.layer}, what its slots hold</h3>"
        f'<div class="map"><canvas class="slots" data-from="{name}" data-cells="{cells}" '
        f'tabindex="0" role="application" aria-label="{label}" aria-describedby="{name}-said"></canvas></div>'
        f'<p class="said" id="{name}-said" role="status" aria-live="polite">Point at a {value["what"]}.</p>'
        f"<figcaption>{pages.html(about)}</figcaption></figure>\n{pages.data(name, value)}"
    )
