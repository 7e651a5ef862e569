"""Tokens of a text, coloured by how many routed layers each went through; and text with nothing invisible in it."""

from collections import Counter
from collections.abc import Sequence

from depthgate.view.page import Html, html, join

_SIGNS = {" ": "·", "\n": "↵", "\t": "⇥"}


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
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def routed_text(tokens: Sequence[str], through: Sequence[Sequence[int]], layers: Sequence[int]) -> Html:
    """The text of each token, and the numbers of those of the routed `layers` that it went through. Depth of colour
    and thickness of the line below both say how many; the legend counts them; hovering names them."""
    spans = [_span(t, token, at, len(layers)) for t, (token, at) in enumerate(zip(tokens, through, strict=True))]
    counts = Counter(len(at) for at in through)
    keys = [
        f"<li>{_swatch(n, len(layers))} {_layers(n)}: {counts[n]:,} of {len(tokens):,} tokens</li>"
        for n in range(len(layers) + 1)
    ]
    return join(
        [
            Html(f'<pre class="long" tabindex="0" role="region" aria-label="The text">{"".join(spans)}</pre>'),
            Html(f'<ul class="legend">{"".join(keys)}</ul>'),
        ]
    )


def _span(number: int, token: str, at: Sequence[int], most: int) -> str:
    shown = "".join(f'<span class="sign">{html(sign)}</span>' if (sign := _sign(c)) else html(c) for c in token)
    where = f"layers {', '.join(map(str, at))}" if at else "no routed layer"
    style = f' style="--share:{len(at) / most:.3g}"' if at else ""
    name = "token" if at else "skipped"
    # Outside the span, so that a token that ends a line has no coloured rest on the next one.
    end = "\n" * token.count("\n")
    return f'<span class="{name}" data-t="{number}"{style} title="{html(visible(token))}: {where}">{shown}</span>{end}'


def _swatch(n: int, most: int) -> str:
    return f'<span class="token" style="--share:{n / max(1, most):.3g}">&nbsp;abc&nbsp;</span>'


def _layers(n: int) -> str:
    return "no routed layer" if n == 0 else f"{n} routed layer{'s' * (n != 1)}"
