"""Line and bar charts as inline SVG: nothing to load, and sharp on paper."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from depthgate.view.page import Html, html, join
from depthgate.view.tokens import isolated

Points = Sequence[tuple[float, float]]

# A chart's drawing, in SVG units: the page shows it 340 to 580 pixels wide, so that the text stays readable.
WIDTH, HEIGHT = 480, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 52  # margins around the plot
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

_MOST = 1e100  # what a chart can draw
# Series differ in colour and in dashes: nobody has to tell colours apart.
_DASHES = ("none", "9 4", "2 3", "9 4 2 4", "5 3", "12 3 2 3 2 3")


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
    from_zero: bool = False,
    readable: bool = False,
) -> Html:
    """One line for each series (name -> points), with axes, ticks and a legend; a series without points keeps its
    colour from others, and is not drawn. `marks` are drawn as single points:
    their first series in the colour of the first line, and so on. `from_zero` has 0 on the upright axis.
    `readable`: the page has charts.js, which reads numbers off the lines.

    `description` is the figure's caption, and what a screen reader says. Points that cannot be drawn (not finite,
    beyond all bounds, or not above 0 on a log axis) leave a gap.
    """
    lines = {name: _drawable(points, log_x, log_y) for name, points in series.items()}
    dots = {name: _drawable(points, log_x, log_y) for name, points in (marks or {}).items()}
    drawn = [point for pieces in (*lines.values(), *dots.values()) for piece in pieces for point in piece]
    x_ticks = (log_ticks if log_x else linear_ticks)([x for x, _ in drawn])
    y_ticks = (log_ticks if log_y else linear_ticks)([y for _, y in drawn] + [0.0] * from_zero)

    def across(x: float) -> float:
        return LEFT + PLOT_WIDTH * _share(x, x_ticks, log_x)

    def down(y: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - _share(y, y_ticks, log_y))

    parts: list[str] = []
    bottom = TOP + PLOT_HEIGHT
    for tick in x_ticks:
        x = f"{across(tick):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{LEFT + PLOT_WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html(x_label)}</text>')
    parts += _scale(y_ticks, down, y_label)
    for number, (name, pieces) in enumerate(lines.items()):
        for piece in pieces:
            at = [f"{across(x):.1f},{down(y):.1f}" for x, y in piece]
            if len(at) == 1:  # a line needs two ends, and a lone value is to be seen
                cx, cy = at[0].split(",")
                parts.append(f'<circle cx="{cx}" cy="{cy}" r="4" fill="{_colour(number)}"/>')
            else:
                told = f' data-name="{html(isolated(name))}" data-values="{_values(piece)}"' if readable else ""
                parts.append(f'<polyline class="series" {_stroke(number)} points="{" ".join(at)}"{told}/>')
    for number, pieces in enumerate(dots.values()):
        parts += [_mark(number, across(x), down(y), f"{x:.4g}, {y:.4g}") for piece in pieces for x, y in piece]
    keys = [
        _key(f'<line class="series" x1="0" x2="36" y1="6" y2="6" {_stroke(number)}/>', name)
        for number, (name, pieces) in enumerate(lines.items())
        if pieces
    ]
    keys += [_key(_mark(number, 18, 6, ""), name) for number, (name, pieces) in enumerate(dots.items()) if pieces]
    drawing = svg(title, description, WIDTH, HEIGHT, parts, _room(y_ticks))
    if readable:
        drawing = Html(drawing.replace("<svg ", f'<svg tabindex="0" data-plot="{TOP} {TOP + PLOT_HEIGHT}" ', 1))
        drawing = join([drawing, Html('<p class="said" role="status" aria-live="polite"></p>')])
    return Html(
        f'<figure>{drawing}\n<ul class="legend">'
        f"{''.join(keys)}</ul>\n"
        f"<figcaption><strong>{html(title)}.</strong> {html(description)}</figcaption></figure>"
    )


def bar_chart(title: str, description: str, bars: Mapping[str, float], label: str, even: float | None = None) -> Html:
    """One bar for each name, of a height from 0 up, and a line at `even`: where all would end if they were alike."""
    ticks = linear_ticks([0.0, *filter(math.isfinite, bars.values()), *([] if even is None else [even])])
    bottom, right, wide = TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH, PLOT_WIDTH / max(1, len(bars))

    def down(y: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - _share(y, ticks, False))

    parts, foot = _scale(ticks, down, label), down(0)
    every = -(-len(bars) // 16)  # names that find room
    for number, (name, value) in enumerate(bars.items()):
        if not math.isfinite(value):
            continue
        x, y = LEFT + number * wide, down(value)
        parts.append(
            f'<rect class="bar" x="{x + wide * 0.1:.1f}" y="{y:.1f}" width="{wide * 0.8:.1f}" '
            f'height="{foot - y:.1f}"><title>{html(name)}: {value:.4g}</title></rect>'
        )
        if number % every == 0:
            parts.append(f'<text x="{x + wide / 2:.1f}" y="{bottom + 20}" text-anchor="middle">{html(name)}</text>')
    if even is not None:
        y = down(even)
        parts.append(f'<line class="even" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return Html(
        f"<figure>{svg(title, description, WIDTH, HEIGHT - 24, parts, _room(ticks))}\n"
        f"<figcaption><strong>{html(title)}.</strong> {html(description)}</figcaption></figure>"
    )


def _scale(ticks: Sequence[float], down: Callable[[float], float], label: str) -> list[str]:
    """The axis at the left, with lines across the plot."""
    parts = []
    for tick in ticks:
        y = down(tick)
        parts.append(f'<line class="grid" x1="{LEFT - 5}" x2="{LEFT + PLOT_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 9}" y="{y + 5:.1f}" text-anchor="end">{tick:g}</text>')
    x, middle = 15 - _room(ticks), TOP + PLOT_HEIGHT / 2
    parts.append(f'<text transform="translate({x:g} {middle}) rotate(-90)" text-anchor="middle">{html(label)}</text>')
    return parts


def _room(ticks: Sequence[float]) -> float:
    """What long numbers at the left need beyond the margin that there is."""
    return 8.0 * max(0, max(len(f"{tick:g}") for tick in ticks) - 3)


def svg(title: str, description: str, width: float, height: float, parts: Sequence[str], left: float = 0) -> Html:
    """A drawing that says what it shows; `parts` are its elements, some of which may stand `left` of 0."""
    return Html(
        f'<svg role="img" viewBox="{-left:g} 0 {width + left:g} {height:g}"><title>{html(title)}</title>'
        f"<desc>{html(description)}</desc>\n{chr(10).join(parts)}\n</svg>"
    )


def linear_ticks(values: Sequence[float]) -> list[float]:
    """Round numbers, about five steps apart, that enclose the values; none is below 0 unless a value is."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # alike, as far as a chart can tell
        wider = max(0.5, 1e-3 * abs(high))
        low, high = low - wider if low < 0 else max(0.0, low - wider), high + wider
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((1, 2, 5, 10), key=lambda m: abs(math.log(m * power / raw)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


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
    fine = [_fine(x, log_x) and _fine(y, log_y) for x, y in points]
    cuts = [-1, *(i for i, good in enumerate(fine) if not good), len(points)]
    return [points[a + 1 : b] for a, b in pairwise(cuts) if b - a > 1]


def _fine(value: float, log: bool) -> bool:
    """Whether a value can be drawn: beyond these bounds differences overflow, and not a number is within none."""
    return (1 / _MOST if log else -_MOST) < value < _MOST


def _values(points: Points) -> str:
    """The numbers of a line, as a reader wants them."""
    return " ".join(f"{x:.6g},{y:.5g}" for x, y in points)


def _colour(number: int) -> str:
    return f"var(--c{number % 6})"


def _stroke(number: int) -> str:
    return f'stroke="{_colour(number)}" stroke-dasharray="{_DASHES[(number + number // 6) % 6]}"'


def _mark(number: int, x: float, y: float, says: str) -> str:
    """A point that stands out from the lines; marks differ in shape as well."""
    title = f"<title>{html(says)}</title>" if says else ""
    look = f'class="mark" fill="{_colour(number)}"'
    if number % 2:
        return f'<rect {look} x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8">{title}</rect>'
    return f'<circle {look} cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'


def _key(drawing: str, name: str) -> str:
    return f'<li><svg viewBox="0 0 36 12" aria-hidden="true">{drawing}</svg>{html(isolated(name))}</li>'
