"""Self-contained HTML pages: text, tables and line charts as inline SVG. No network, no scripts, no dependencies.

Every function returns Html, and every plain string handed to one is escaped; Html goes in as it is.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

Points = Sequence[tuple[float, float]]

# A chart's drawing, in SVG units: the page shows it 340 to 580 pixels wide, so that the text stays readable.
WIDTH, HEIGHT = 480, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 52  # margins around the plot
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

# Series differ in colour and in dashes: nobody has to tell colours apart.
_DASHES = ("none", "9 4", "2 3", "9 4 2 4", "5 3", "12 3 2 3 2 3")

_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --quiet: #5a626b; --page: #fff; --line: #c9ced4; --band: #f3f5f7;
  --ink: 31 95 191; --deepest: .6;
  --c0: #1f5fbf; --c1: #b4480f; --c2: #187a4b; --c3: #9a2f86; --c4: #7a6200; --c5: #0f7283; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8ea; --quiet: #a3abb3; --page: #15181b; --line: #454c53; --band: #1f2429;
    --ink: 127 176 255; --deepest: .5;
    --c0: #7fb0ff; --c1: #ff9f66; --c2: #63d19a; --c3: #ee90da; --c4: #e0c14a; --c5: #5fcbe0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 1.25rem 1rem 3rem; color: var(--text); background: var(--page);
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 0; }
p, figcaption { max-width: 75ch; } figcaption { color: var(--quiet); font-size: .9rem; margin-top: .5rem; }
code { font-size: .9em; overflow-wrap: anywhere; background: var(--band); padding: .1em .3em; border-radius: 3px; }
.wide { overflow-x: auto; } .wide:focus-visible { outline: 2px solid var(--c0); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { white-space: normal; }
th:first-child, td:first-child { text-align: left; } thead th { vertical-align: bottom; background: var(--band); }
figure { margin: 0; min-width: 0; } figure svg { width: 100%; height: auto; max-width: 580px; display: block; }
figcaption strong { color: var(--text); }
.row { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
pre { font: .85rem/1.75 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; background: var(--band); border-radius: 4px; padding: .8rem 1rem; margin: .8rem 0; }
.token { background: rgb(var(--ink) / calc(var(--share) * var(--deepest))); padding-bottom: .1em;
  border-bottom: calc(var(--share) * .28em) solid var(--c0); }
.sign { color: var(--quiet); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .3rem 0 0; padding: 0;
  font-size: .9rem; }
.legend svg { display: inline-block; width: 36px; height: 12px; margin-right: .4rem; }
svg text { fill: var(--text); font: 14px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.map canvas { width: 100%; display: block; } .map canvas:focus-visible { outline: 2px solid var(--c0); }
.tools button { font: inherit; padding: .3rem .8rem; color: inherit; background: var(--band);
  border: 1px solid var(--line); border-radius: 4px; cursor: pointer; }
#said { min-height: 3.2em; margin: .4rem 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
pre [data-t] { cursor: pointer; }
.mark { stroke: var(--page); stroke-width: 1; }
.grid { stroke: var(--line); stroke-width: 1; } .series { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
"""


class Html(str):
    """Markup that is to be put on the page as it is."""

    __slots__ = ()


def html(value: object) -> Html:
    """A value as markup: Html unchanged, everything else as escaped text."""
    return value if isinstance(value, Html) else Html(escape(str(value), quote=True))


def join(parts: Sequence[object]) -> Html:
    """Parts one after another."""
    return Html("\n".join(html(part) for part in parts))


def paragraph(*parts: object) -> Html:
    """One paragraph; its parts follow each other without a gap."""
    return Html(f"<p>{''.join(html(part) for part in parts)}</p>")


def code(text: object) -> Html:
    """A command, name or path."""
    return Html(f"<code>{html(text)}</code>")


def preformatted(*parts: object) -> Html:
    """Text whose spaces and ends of lines are kept; long lines wrap."""
    return Html(f"<pre>{''.join(html(part) for part in parts)}</pre>")


def row(parts: Sequence[object]) -> Html:
    """Figures side by side where the window is wide enough."""
    return Html(f'<div class="row">{join(parts)}</div>')


def page(title: str, sections: Mapping[str, object]) -> Html:
    """A whole document: heading -> body, in order. A body under the heading "" stands straight below the title."""
    body = join(
        [
            Html(f"<section>{f'<h2>{html(heading)}</h2>' if heading else ''}\n{html(content)}\n</section>")
            for heading, content in sections.items()
        ]
    )
    return Html(
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{html(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(headers: Sequence[object], rows: Sequence[Sequence[object]], caption: object = "") -> Html:
    """A table whose first column names its rows. A window narrower than the table scrolls it."""
    head = "".join(f'<th scope="col">{html(header)}</th>' for header in headers)
    lines = [
        f'<tr><th scope="row">{html(first)}</th>{"".join(f"<td>{html(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    ]
    # Focusable, so that the keyboard can scroll it. The caption stays outside: it is to wrap, not to scroll.
    return Html(
        f'<figure><div class="wide" tabindex="0" role="region" aria-label="Table"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody></table></div>\n"
        f"{f'<figcaption>{html(caption)}</figcaption>' if caption else ''}</figure>"
    )


def line_chart(
    title: str,
    description: str,
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    marks: Mapping[str, Points] | None = None,
) -> Html:
    """One line for each series (name -> points), with axes, ticks and a legend. `marks` are drawn as single points:
    their first series in the colour of the first line, and so on.

    `description` is the figure's caption, and what a screen reader says. Points that cannot be drawn (not finite, or
    not above 0 on a log axis) leave a gap.
    """
    lines = {name: _drawable(points, log_x, log_y) for name, points in series.items()}
    dots = {name: _drawable(points, log_x, log_y) for name, points in (marks or {}).items()}
    drawn = [point for pieces in (*lines.values(), *dots.values()) for piece in pieces for point in piece]
    x_ticks = (log_ticks if log_x else linear_ticks)([x for x, _ in drawn])
    y_ticks = (log_ticks if log_y else linear_ticks)([y for _, y in drawn])

    def across(x: float) -> float:
        return LEFT + PLOT_WIDTH * _share(x, x_ticks, log_x)

    def down(y: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - _share(y, y_ticks, log_y))

    parts: list[str] = []
    bottom, right = TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH
    for tick in x_ticks:
        x = f"{across(tick):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{tick:g}</text>')
    for tick in y_ticks:
        y = down(tick)
        parts.append(f'<line class="grid" x1="{LEFT - 5}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 9}" y="{y + 5:.1f}" text-anchor="end">{tick:g}</text>')
    middle = TOP + PLOT_HEIGHT / 2
    parts.append(f'<text x="{LEFT + PLOT_WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html(x_label)}</text>')
    parts.append(f'<text transform="translate(15 {middle}) rotate(-90)" text-anchor="middle">{html(y_label)}</text>')
    for number, pieces in enumerate(lines.values()):
        for piece in pieces:
            at = [f"{across(x):.1f},{down(y):.1f}" for x, y in piece]
            if len(at) == 1:  # a line needs two ends, and a lone value is to be seen
                cx, cy = at[0].split(",")
                parts.append(f'<circle cx="{cx}" cy="{cy}" r="4" fill="{_colour(number)}"/>')
            else:
                parts.append(f'<polyline class="series" {_stroke(number)} points="{" ".join(at)}"/>')
    for number, pieces in enumerate(dots.values()):
        parts += [_mark(number, across(x), down(y), f"{x:.4g}, {y:.4g}") for piece in pieces for x, y in piece]
    keys = [_key(f'<line class="series" x1="0" x2="36" y1="6" y2="6" {_stroke(n)}/>', s) for n, s in enumerate(lines)]
    keys += [_key(_mark(number, 18, 6, ""), name) for number, name in enumerate(dots)]
    return Html(
        f'<figure>{svg(title, description, WIDTH, HEIGHT, parts)}\n<ul class="legend">'
        f"{''.join(keys)}</ul>\n"
        f"<figcaption><strong>{html(title)}.</strong> {html(description)}</figcaption></figure>"
    )


def svg(title: str, description: str, width: float, height: float, parts: Sequence[str]) -> Html:
    """A drawing that says what it shows; `parts` are its elements."""
    return Html(
        f'<svg role="img" viewBox="0 0 {width:g} {height:g}"><title>{html(title)}</title>'
        f"<desc>{html(description)}</desc>\n{chr(10).join(parts)}\n</svg>"
    )


def linear_ticks(values: Sequence[float]) -> list[float]:
    """Round numbers, about five steps apart, that enclose the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((1, 2, 5, 10), key=lambda m: abs(math.log(m * power / raw)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def log_ticks(values: Sequence[float]) -> list[float]:
    """Powers of ten that enclose the values, all above 0; where that is one or two of them, 2 and 5 times them too."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    if last - first > 2:
        return [10.0**n for n in range(first, last + 1)]
    fine = [float(f"{m}e{n}") for n in range(first, last + 1) for m in (1, 2, 5)]
    start = max(i for i, tick in enumerate(fine) if tick <= low * (1 + 1e-9))
    stop = min((i for i, tick in enumerate(fine) if tick >= high * (1 - 1e-9)), default=len(fine) - 1)
    return fine[start : max(stop, start + 1) + 1]


def _share(value: float, ticks: Sequence[float], log: bool) -> float:
    """Where a value lies between the first and the last tick, from 0 to 1."""
    low, high, at = (math.log10(v) if log else v for v in (ticks[0], ticks[-1], value))
    return (at - low) / (high - low)


def _drawable(points: Points, log_x: bool, log_y: bool) -> list[Points]:
    """Unbroken pieces of a series."""
    fine = [math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y) for x, y in points]
    cuts = [-1, *(i for i, good in enumerate(fine) if not good), len(points)]
    return [points[a + 1 : b] for a, b in pairwise(cuts) if b - a > 1]


def _colour(number: int) -> str:
    return f"var(--c{number % 6})"


def _stroke(number: int) -> str:
    return f'stroke="{_colour(number)}" stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'


def _mark(number: int, x: float, y: float, says: str) -> str:
    """A point that stands out from the lines; marks differ in shape as well."""
    title = f"<title>{html(says)}</title>" if says else ""
    look = f'class="mark" fill="{_colour(number)}"'
    if number % 2:
        return f'<rect {look} x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8">{title}</rect>'
    return f'<circle {look} cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'


def _key(drawing: str, name: str) -> str:
    return f'<li><svg viewBox="0 0 36 12" aria-hidden="true">{drawing}</svg>{html(name)}</li>'
