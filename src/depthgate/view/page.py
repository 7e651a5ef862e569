"""Self-contained HTML pages in one design: text, tables, charts, and tokens coloured by depth. No page needs a network.

Every function returns Html, and every plain string handed to one is escaped; Html goes in as it is. A token may be part
of a character: its bytes that are not text alone are characters from U+DC80 to U+DCFF, as Python's "surrogateescape"
writes them.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from depthgate.errors import DepthgateError

Points = Sequence[tuple[float, float]]
Kinds = Sequence[str]
Lines = Mapping[str, Sequence[tuple[Any, ...]]]  # name -> points: x and y, and two intervals where they are minima

_SIGNS = {chr(n): chr(0x2400 + n) for n in range(0x20)} | {" ": "·", "\n": "↵", "\t": "⇥"}  # first Unicode's own
LARGEST = 1e100  # beyond it sums and differences of numbers may overflow
# Kinds of models. Each has one colour on all pages and pictures, --NAME in style.css.
KINDS = ("mode_staged", "mode", "moe", "soft", "random", "mod", "dense")
_SHADES = (0.0, 0.5, -0.3)  # of one kind: as it is, nearer to the colour of text, nearer to that of the page


class Html(str):
    """Markup that goes onto the page as it is."""


def html(value: object) -> Html:
    """A value as markup: Html unchanged, everything else as escaped text."""
    return value if isinstance(value, Html) else Html(escape(str(value), quote=True))


def join(parts: Sequence[object]) -> Html:
    """Parts one after another."""
    return Html("\n".join(html(part) for part in parts))


def note(*parts: object) -> Html:
    """A paragraph that a reader should see before all else."""
    return paragraph(Html("<strong>Note.</strong> "), *parts)


def paragraph(*parts: object) -> Html:
    """One paragraph; its parts follow each other without a gap."""
    return Html(f"<p>{''.join(html(part) for part in parts)}</p>")


def row(parts: Sequence[object]) -> Html:
    """Figures side by side where the window is wide enough."""
    return Html(f'<div class="row">{join(parts)}</div>')


def page(title: str, sections: Mapping[str, object], live: bool = False) -> Html:
    """A whole document from heading -> body, in order. A body under the heading "" stands straight below the title. A
    `live` page, which has a button to stop that, reloads itself."""
    body = join([fill("section", heading=heading, content=content) for heading, content in sections.items()])
    style, charts = _asset("style.css"), ""
    if " data-chart=" in body:
        style = join([_asset("vendor/uPlot.min.css"), style])
        licence, uplot = _asset("vendor/uPlot.LICENSE"), _asset("vendor/uPlot.iife.min.js")
        charts = fill("charts", licence=licence, uplot=uplot, script=script("charts.js"))
    own = script("page.js", "small_maps.js", *["live.js"] * live)
    return fill("page", title=title, style=style, body=body, script=own, charts=charts)


def check_replaces(path: Path, named: bool = True) -> None:
    """Refuse to write a page over a file that is not a page of ours; where the user has named it, over one that is not
    called a page either."""
    page = named and path.suffix in (".html", ".htm")
    if not page and path.is_file() and b'content="depthgate"' not in path.read_bytes()[:500]:
        raise DepthgateError(f"{path} is there, and is not a page of depthgate: name another file")


@cache
def _asset(name: str) -> Html:
    """A file of this package that goes onto a page."""
    return Html(files("depthgate.view").joinpath(name).read_text(encoding="utf-8"))


class _Filler(Formatter):
    def format_field(self, value: Any, form: str) -> Html:
        return html(format(value, form) if form else value)


def fill(template: str, **values: object) -> Html:
    """A file of templates/ with values in place of their names, as in an f-string."""
    return Html(_Filler().vformat(_asset(f"templates/{template}.html"), (), values))


def script(*names: str) -> Html:
    """Scripts of this package."""
    return Html(f"<script>{''.join(map(_asset, names))}</script>")


def data(name: str, value: object) -> Html:
    """Plain data for a script. Inside a script element only "<" could end it; JSON reads it back from its escape."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{html(name)}">{text}</script>')


def table(headers: Sequence[object], rows: Sequence[Sequence[object]], caption: str) -> Html:
    """A table whose first column names its rows. Where it does not fit, the rows stand below each other, and each
    cell has its heading."""
    head = "".join(f'<th scope="col">{html(header)}</th>' for header in headers)
    lines = [
        f'<tr><th scope="row">{html(first)}</th>{"".join(f"<td>{html(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    ]
    return fill("table", head=Html(head), body=Html("\n".join(lines)), caption=caption)


def kind_of(text: str) -> str:
    """The kind of a model, by its name or by the pattern of its layers; dense where there is no other word in it."""
    words = {*re.split("[^a-z_]+", re.sub("soft_moe|uniform(_dispatch|_combine)?", "soft", text))}
    return next((kind for kind in KINDS if kind in words), "dense")


def looks(kinds: Sequence[str]) -> list[tuple[str, float]]:
    """The colour of each series and its shade, which tells those of one kind apart."""
    return [(kind, _SHADES[kinds[:n].count(kind) % 3]) for n, kind in enumerate(kinds)]


def colour(name: str, shade: float = 0.0) -> str:
    """A colour of light pages, for pictures: see `looks`."""
    known = dict(re.findall(r"--(\w+): #(\w{6})", _asset("style.css").partition("@media")[0]))
    other = known["text" if shade > 0 else "page"]
    pairs = ((int(each[i : i + 2], 16) for each in (known[name], other)) for i in (0, 2, 4))
    return "#" + "".join(f"{round(a + abs(shade) * (b - a)):02x}" for a, b in pairs)


def line_chart(
    title: str,
    about: str,
    series: Lines,
    x: str,
    y: str,
    axis: str = "",
    kinds: Kinds = (),
    marks: Lines | None = None,
    **more: Any,
) -> Html:
    """One line for each series, in the colours of their `kinds`. `marks` are single points: those of their first series
    in the colour of the first line, and so on, and once more from the first; with intervals (across, upright, or None)
    they are rings. A series without points is not drawn, and keeps its colour from others. A value that is not finite
    leaves a gap. The axis may be log_x, from_zero (upright), or loss, which leaves out the first steps of runs. More:
    smooth (the reader may smooth its lines), named (a single line has its name, too), span (the ends of the x axis)."""
    found = looks(kinds or ["mod"] * max(1, len(series)))
    drawn = [_series("line", found[n], n, *each, axis == "log_x") for n, each in enumerate(series.items())]
    for n, each in enumerate((marks or {}).items()):
        drawn.append(_series("mark", found[n % len(found)], n, *each, axis == "log_x"))
    return chart(title, about, x=x, y=y, axis=axis, series=[each for each in drawn if each["points"]], **more)


def bar_chart(title: str, about: str, bars: Mapping[Any, float], y: str, **more: Any) -> Html:
    """One bar for each name, or for each number at its place on the x axis. More: x, its name; kind; even, where all
    would end if they were alike."""
    names, look = [key for key in bars if isinstance(key, str)], (more.get("kind", "mod"), 0.0)
    places = [float(place) for place in (range(len(names)) if names else bars)]
    drawn = [_series("bar", look, 0, y, list(zip(places, bars.values(), strict=True)))]
    if even := more.get("even"):
        drawn.append(_series("even", ("text", 0.0), 1, "all alike", [(place, even) for place in places]))
    return chart(title, about, x=more.get("x", ""), y=y, names=names, axis="from_zero", series=drawn)


def _series(
    kind: str, look: tuple[str, float], dash: int, name: str, points: Any, log_x: bool = False
) -> dict[str, Any]:
    low = 1 / LARGEST if log_x else -LARGEST
    known = sorted((x, n, y if abs(y) < LARGEST else None) for n, (x, y, *_) in enumerate(points) if low < x < LARGEST)
    found = [(float(f"{x:.10g}"), None if y is None else float(f"{y:.6g}"), *points[n][2:]) for x, n, y in known]
    return {"kind": kind, "colour": look[0], "shade": look[1], "dash": dash, "name": isolated(name), "points": found}


def chart(title: str, about: str, **chart: Any) -> Html:
    """A figure that charts.js fills when it is first seen; with scores=n, of the scores of the map's layer n."""
    text = json.dumps(chart, separators=(",", ":"), allow_nan=False)
    return fill("chart", title=title, about=about, chart=text)


def visible(text: str, kept: str = "") -> str:
    """The text with a sign for every character that would not be seen, those of `kept` excepted."""
    return "".join(c if c in kept else _sign(c) or c for c in text)


def _sign(c: str) -> str:
    if c in _SIGNS or c.isprintable():
        return _SIGNS.get(c, "")
    code = ord(c) - 0xDC00 if "\udc80" <= c <= "\udcff" else ord(c)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def short(name: str, most: int = 80) -> str:
    """A name that can be shown: nothing invisible, and no longer than there is room for."""
    shown = visible(name, kept=" ")
    return shown if len(shown) <= most else f"{shown[: most // 2 - 1]}…{shown[-most // 2 :]}"


def isolated(text: str) -> str:
    """Text for places without markup: what runs from right to left stands between signs that keep its order its own."""
    turns = any(unicodedata.bidirectional(c) in ("R", "AL", "AN") for c in text)
    return f"\u2068{text}\u2069" if turns else text


def count(n: int, what: str) -> str:
    """A number of things: "1 token", "2 tokens"."""
    return f"{n:,} {what}{'s' * (n != 1)}"


class Piece(NamedTuple):
    """A token as part of its text."""

    text: str  # its characters; one that several tokens make stands with the last of them
    label: str  # its name, with nothing invisible in it
    part: bool  # True: it shows nothing, as the character that it begins comes later

    @property
    def heading(self) -> str:
        """Text that fits above a column: the characters of the token, or a thin sign that it begins one."""
        return "▏" if self.part else visible(self.text)


def pieces(tokens: Sequence[str]) -> list[Piece]:
    """Tokens as parts of their text: bytes are put together to characters, over the bounds of tokens."""
    owners = [t for t, token in enumerate(tokens) for _ in token]
    texts, labels, start = [""] * len(tokens), [""] * len(tokens), 0
    cut = [False] * len(tokens)  # True: the label ends with bytes of a character
    for char, size in _characters("".join(tokens)):
        for t, places in groupby(range(start, start + size), owners.__getitem__):
            first, *rest = (place - start + 1 for place in places)
            which = f"bytes {first} to {rest[-1]}" if rest else f"byte {first}"
            label = visible(char) if size == 1 else f"{which} of {size} of {visible(char)}"
            labels[t] += ", " + label if labels[t] and (size > 1 or cut[t]) else label
            cut[t] = size > 1
        start += size
        texts[owners[start - 1]] += char
    return [Piece(text, label, bool(label) and not text) for text, label in zip(texts, labels, strict=True)]


def _characters(signs: str) -> Iterator[tuple[str, int]]:
    """Characters, and how many signs make each: several where they are its bytes."""
    for other, part in re.findall("([^\udc80-\udcff])|([\udc80-\udcff]+)", signs):
        for char in part.encode(errors="surrogateescape").decode(errors="surrogateescape"):
            yield char, len(char.encode(errors="surrogateescape"))
        if other:
            yield other, 1


def routed_text(
    tokens: Sequence[str], through: Sequence[Sequence[int | str]], most: int, what: str, given: int = 0
) -> Html:
    """The text, where token t went through[t], `most` at most: routed layers, or whatever `what` is. Depth of colour
    and thickness of the line below both say how many; the legend counts them; pointing at a token, or a tap, names
    them. The first tokens, `given` ones, are set off as those that a model went on from."""
    spans = [_span(t, *each, most, what) for t, each in enumerate(zip(pieces(tokens), through, strict=True))]
    keys = []
    for n, times in sorted(Counter(map(len, through)).items()):
        name = count(n, what) if n else f"no {what}"
        swatch = f'<span class="token" style="--share:{n / max(1, most):.3g}">&nbsp;abc&nbsp;</span>'
        keys.append(f"<li>{swatch} {name}: {times:,} of {count(len(tokens), 'token')}</li>")
    start = f"<b>{''.join(spans[:given])}</b>" if given else ""
    text, kind = Html(start + "".join(spans[given:])), what.split()[-1]
    return fill("text", text=text, keys=Html("".join(keys)), kind=kind, more=", continued" * bool(given))


def _span(number: int, piece: Piece, at: Sequence[int | str], most: int, what: str) -> str:
    signs = [f'<span class="sign">{html(sign)}</span>' if (sign := _sign(c)) else html(c) for c in piece.text]
    lines = "".join(sign + "\n" * (c == "\n") for sign, c in zip(signs, piece.text, strict=True))
    shown = lines.rstrip("\n")
    where = f"{what.split()[-1]}s {', '.join(map(str, at))}" if at else f"no {what}"
    style = f' style="--share:{len(at) / most:.3g}"' if at else ""
    name = ("token" if at else "skipped") + " part" * piece.part
    # Outside the span, so that a token that ends a line has no coloured rest on the next one.
    end = lines[len(shown) :]
    title = f"{html(isolated(piece.label))}: {where}"
    return f'<span class="{name}" data-t="{number}"{style} title="{title}">{shown}</span>{end}'
