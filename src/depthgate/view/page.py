"""Self-contained HTML pages: text and tables in one design. No network, no dependencies.

Every function returns Html, and every plain string handed to one is escaped; Html goes in as it is.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files


class Html(str):
    """Markup that is to be put on the page as it is."""

    __slots__ = ()


def html(value: object) -> Html:
    """A value as markup: Html unchanged, everything else as escaped text."""
    return value if isinstance(value, Html) else Html(escape(str(value), quote=True))


def join(parts: Sequence[object]) -> Html:
    """Parts one after another."""
    return Html("\n".join(html(part) for part in parts))


def note(*parts: object) -> Html:
    """Something that a reader should know before all else."""
    return paragraph(Html("<strong>Note.</strong> "), *parts)


def paragraph(*parts: object) -> Html:
    """One paragraph; its parts follow each other without a gap."""
    return Html(f"<p>{''.join(html(part) for part in parts)}</p>")


def code(text: object) -> Html:
    """A command, name or path."""
    return Html(f"<code>{html(text)}</code>")


def preformatted(*parts: object) -> Html:
    """Text whose spaces and ends of lines are kept; long lines wrap."""
    return Html(f'<pre class="long" tabindex="0">{"".join(html(part) for part in parts)}</pre>')


def row(parts: Sequence[object]) -> Html:
    """Figures side by side where the window is wide enough."""
    return Html(f'<div class="row">{join(parts)}</div>')


# Nothing is ever loaded, whatever a text or a name on the page may hold.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def page(title: str, sections: Mapping[str, object], live: bool = False) -> Html:
    """A whole document: heading -> body, in order. A body under the heading "" stands straight below the title. A
    `live` page asks whoever served it for news, and puts them in place of its own; it says so where it cannot."""
    body = join(
        [
            Html(f"<section>{f'<h2>{html(heading)}</h2>' if heading else ''}\n{html(content)}\n</section>")
            for heading, content in sections.items()
        ]
    )
    status = '<p id="live" role="status"></p>\n'
    policy = f"{_POLICY}; connect-src 'self'" if live else _POLICY
    return Html(
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html(title)}</title>\n'
        f"<style>{asset('style.css')}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html(title)}</h1>\n{status if live else ''}{body}\n</main>\n"
        f"{script('live.js') if live else ''}</body>\n</html>\n"
    )


def table(
    headers: Sequence[object], rows: Sequence[Sequence[object]], caption: object = "", name: str | None = None
) -> Html:
    """A table whose first column names its rows. A window narrower than the table scrolls it. `name` tells it from
    others of the same columns."""
    label = name or f"Table: {', '.join(str(header) for header in headers if not isinstance(header, Html) and header)}"
    head = "".join(f'<th scope="col">{html(header)}</th>' for header in headers)
    lines = [
        f'<tr><th scope="row">{html(first)}</th>{"".join(f"<td>{html(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    ]
    # Focusable, so that the keyboard can scroll it. The caption stays outside: it is to wrap, not to scroll.
    return Html(
        f'<figure><div class="wide" tabindex="0" role="region" aria-label="{html(label)}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody></table></div>\n"
        f"{f'<figcaption>{html(caption)}</figcaption>' if caption else ''}</figure>"
    )


def asset(name: str) -> str:
    """A file of this package that goes onto a page: its style, or a script."""
    return files("depthgate.view").joinpath(name).read_text(encoding="utf-8")


def script(name: str) -> Html:
    """A script of this package."""
    return Html(f"<script>{asset(name)}</script>")


def data(name: str, value: object) -> Html:
    """Plain data for a script. Inside a script element only "<" could end it; JSON reads it back from its escape."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{html(name)}">{text}</script>')
