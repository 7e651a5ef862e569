"""Tokens of a text, coloured by how many routed layers each went through; and text with nothing invisible in it.

A token may be a part of a character. Its bytes that are no text alone are then characters from U+DC80 to U+DCFF, as
Python's "surrogateescape" has them.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from depthgate.view.page import Html, html, join

_SIGNS = {" ": "·", "\n": "↵", "\t": "⇥"}
PART = "▏"  # for a token that is the beginning of a character, where nothing thinner can be drawn


def visible(text: str, kept: str = "") -> str:
    """The text with a sign for every character that would not be seen, those of `kept` excepted."""
    return "".join(c if c in kept else _sign(c) or c for c in text)


def _sign(c: str) -> str:
    if c in _SIGNS:
        return _SIGNS[c]
    if c.isprintable():
        return ""
    code = ord(c)
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's pictures of control characters
    if _is_byte(c):
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def short(name: str, most: int = 80) -> str:
    """A name as it can be shown: nothing invisible, and no longer than there is room for."""
    shown = visible(name, kept=" ")
    return shown if len(shown) <= most else f"{shown[: most // 2 - 1]}…{shown[-most // 2 :]}"


def isolated(text: str) -> str:
    """For places that take no markup: text that runs from right to left between signs that keep its order its own."""
    turns = any(unicodedata.bidirectional(c) in ("R", "AL", "AN") for c in text)
    return f"\u2068{text}\u2069" if turns else text


class Piece(NamedTuple):
    """What a token shows and is called."""

    text: str  # its characters; one that several tokens make stands with the last of them
    label: str  # with nothing invisible in it
    part: bool  # whether it shows nothing, as the character that it begins comes later


class _Byte(NamedTuple):
    """One of the bytes of a character."""

    number: int  # from 1
    of: int
    char: str


def pieces(tokens: Sequence[str]) -> list[Piece]:
    """Tokens as parts of their text: bytes are put together to characters, over the bounds of tokens."""
    found: list[list[str | _Byte]] = [[] for _ in tokens]
    chars = ((t, c) for t, token in enumerate(tokens) for c in token)
    for are_bytes, group in groupby(chars, lambda pair: _is_byte(pair[1])):
        run = list(group)
        signs = [c for _, c in run]
        for (t, _), part in zip(run, _bytes(signs) if are_bytes else signs, strict=True):
            found[t].append(part)
    return [_piece(parts) for parts in found]


def _is_byte(c: str) -> bool:
    return "\udc80" <= c <= "\udcff"


def _bytes(run: Sequence[str]) -> list[str | _Byte]:
    """Bytes as those of characters, or as they are where they make none."""
    found: list[str | _Byte] = []
    while len(found) < len(run):
        for size in (2, 3, 4):
            part = run[len(found) : len(found) + size]
            char = "".join(part).encode(errors="surrogateescape").decode(errors="ignore")
            if len(part) == size and len(char) == 1:
                found += [_Byte(n, size, char) for n in range(1, size + 1)]
                break
        else:
            found.append(run[len(found)])
    return found


def _piece(parts: Sequence[str | _Byte]) -> Piece:
    text = "".join(p if isinstance(p, str) else p.char if p.number == p.of else "" for p in parts)
    labels = []
    for is_text, group in groupby(parts, lambda p: isinstance(p, str)):
        if is_text:
            labels.append(visible("".join(map(str, group))))
            continue
        run = [p for p in group if isinstance(p, _Byte)]
        starts = [i for i, p in enumerate(run) if i == 0 or p.number == 1]
        labels += [_named(run[i:j]) for i, j in zip(starts, [*starts[1:], len(run)], strict=True)]
    return Piece(text, ", ".join(labels), bool(parts) and not text)


def _named(run: Sequence[_Byte]) -> str:
    """Bytes of one character."""
    first, last = run[0], run[-1]
    which = f"byte {first.number}" if len(run) == 1 else f"bytes {first.number} to {last.number}"
    return f"{which} of {first.of} of {visible(first.char)}"


def headings(tokens: Sequence[str]) -> list[str]:
    """What fits above a column: the characters that a token shows, or a sign that it begins one."""
    return [PART if piece.part else visible(piece.text) for piece in pieces(tokens)]


def routed_text(tokens: Sequence[str], through: Sequence[Sequence[int]], layers: Sequence[int]) -> Html:
    """The text of each token, and the numbers of those of the routed `layers` that it went through. Depth of colour
    and thickness of the line below both say how many; the legend counts them; hovering names them."""
    shown = enumerate(zip(pieces(tokens), through, strict=True))
    spans = [_span(t, piece, at, len(layers)) for t, (piece, at) in shown]
    counts = Counter(len(at) for at in through)
    keys = [
        f"<li>{_swatch(n, len(layers))} {_layers(n)}: {counts[n]:,} of {count(len(tokens), 'token')}</li>"
        for n in range(len(layers) + 1)
    ]
    return join(
        [
            Html(f'<pre class="long" tabindex="0" role="region" aria-label="The text">{"".join(spans)}</pre>'),
            Html(f'<ul class="legend">{"".join(keys)}</ul>'),
        ]
    )


def _span(number: int, piece: Piece, at: Sequence[int], most: int) -> str:
    shown = "".join(f'<span class="sign">{html(sign)}</span>' if (sign := _sign(c)) else html(c) for c in piece.text)
    where = f"layers {', '.join(map(str, at))}" if at else "no routed layer"
    style = f' style="--share:{len(at) / most:.3g}"' if at else ""
    name = ("token" if at else "skipped") + " part" * piece.part
    # Outside the span, so that a token that ends a line has no coloured rest on the next one.
    end = "\n" * piece.text.count("\n")
    title = f"{html(isolated(piece.label))}: {where}"
    return f'<span class="{name}" data-t="{number}"{style} title="{title}">{shown}</span>{end}'


def _swatch(n: int, most: int) -> str:
    return f'<span class="token" style="--share:{n / max(1, most):.3g}">&nbsp;abc&nbsp;</span>'


def _layers(n: int) -> str:
    return "no routed layer" if n == 0 else count(n, "routed layer")


def count(n: int, what: str) -> str:
    """So many of something."""
    return f"{n:,} {what}{'s' * (n != 1)}"
