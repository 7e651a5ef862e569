"""Pages and charts by hand: text is escaped, lines and bars stand where they should."""

import re
from itertools import pairwise

import pytest

from depthgate.view import charts
from depthgate.view import page as pages
from depthgate.view.tokens import headings, isolated, pieces, routed_text, short, visible


def test_text_is_escaped_and_markup_is_not() -> None:
    evil = '<b title="x">&'
    safe = "&lt;b title=&quot;x&quot;&gt;&amp;"
    for made in (
        pages.paragraph(evil),
        pages.code(evil),
        pages.table([evil], [[evil, evil]], evil),
        pages.page(evil, {evil: evil}),
        charts.line_chart(evil, evil, {evil: [(0, 1), (1, 2)]}, evil, evil),
        charts.svg(evil, evil, 1, 1, []),
    ):
        assert evil not in made
        assert safe in made
    assert pages.paragraph(pages.code("a")) == "<p><code>a</code></p>"


def test_line_chart_by_hand() -> None:
    points = [(0, 0), (5, 25), (10, 100)]
    chart = charts.line_chart("t", "d", {"a": points}, "x", "y")
    # The plot: x from 62 to 62 + 404, y from 14 down to 14 + 254.
    assert 'points="62.0,268.0 264.0,204.5 466.0,14.0"' in chart
    assert charts.linear_ticks([0, 5, 10]) == [0, 2, 4, 6, 8, 10]
    assert charts.linear_ticks([0, 25, 100]) == [0, 20, 40, 60, 80, 100]
    labels = re.findall(r'text-anchor="middle">([\d.]+)<', chart)
    assert labels == ["0", "2", "4", "6", "8", "10"]


def test_log_chart_by_hand() -> None:
    chart = charts.line_chart("t", "d", {"a": [(0, 100), (10, 1)]}, "x", "y", log_y=True)
    assert 'points="62.0,14.0 466.0,268.0"' in chart
    assert charts.log_ticks([0.03, 2.0]) == [0.01, 0.1, 1.0, 10.0]


def test_chart_leaves_gaps_and_shows_lone_points() -> None:
    nan = float("nan")
    points = [(0.0, 0.0), (1.0, 1.0), (2.0, nan), (3.0, 1.0), (4.0, nan), (5.0, 0.0), (6.0, 1.0)]
    chart = charts.line_chart("t", "d", {"a": points}, "x", "y")
    assert chart.count("<polyline") == 2
    assert chart.count("<circle") == 1
    assert "nan" not in chart
    charts.line_chart("t", "d", {"a": []}, "x", "y")  # nothing to draw is not an error
    assert charts.linear_ticks([3.0, 3.0])[0] < 3.0 < charts.linear_ticks([3.0, 3.0])[-1]


def test_marks_by_hand() -> None:
    marks = {"b": [(10.0, 100.0)], "<c>": [(0.0, 0.0), (5.0, float("nan"))]}
    chart = charts.line_chart("t", "d", {"a": [(0, 0), (5, 50)]}, "x", "y", marks=marks)
    # Marks count for the axes, are drawn over the lines and differ in shape; what cannot be drawn is left out.
    assert 'points="62.0,268.0 264.0,141.0"' in chart
    assert '<circle class="mark" fill="var(--c0)" cx="466.0" cy="14.0" r="4.5"><title>10, 100</title></circle>' in chart
    assert '<rect class="mark" fill="var(--c1)" x="58.0" y="264.0" width="8" height="8"><title>0, 0</title>' in chart
    assert chart.count("<title>") == 1 + 2  # the chart's own
    assert chart.count("<li>") == 3
    assert "&lt;c&gt;" in chart


def test_routed_text_by_hand() -> None:
    made = routed_text(["a", "<b>", "\n", "\u202e", "c"], [[], [2], [4], [2, 4], [2]], [2, 4])
    assert '<span class="skipped" data-t="0" title="a: no routed layer">a</span>' in made
    assert '<span class="token" data-t="1" style="--share:0.5" title="&lt;b&gt;: layers 2">&lt;b&gt;</span>' in made
    assert 'title="↵: layers 4"><span class="sign">↵</span></span>\n' in made
    assert 'style="--share:1" title="\\u202e: layers 2, 4"' in made
    assert "no routed layer: 1 of 5 tokens" in made
    assert "1 routed layer: 3 of 5 tokens" in made
    assert "2 routed layers: 1 of 5 tokens" in made


def test_bytes_of_tokens_make_characters() -> None:
    """Hand-worked: tokens are cut within characters, as byte-level tokenizers cut them."""

    def cut(*parts: bytes) -> list[str]:
        return [part.decode(errors="surrogateescape") for part in parts]

    e, smile = "é".encode(), "😀".encode()
    tokens = cut(b"a" + e[:1], e[1:] + e[:1], e[1:] + b" ", smile[:1], smile[1:3], smile[3:] + b"b")
    found = pieces(tokens)
    assert [piece.text for piece in found] == ["a", "é", "é ", "", "", "😀b"]
    assert "".join(piece.text for piece in found) == "aéé 😀b"
    assert [piece.label for piece in found] == [
        "a, byte 1 of 2 of é",
        "byte 2 of 2 of é, byte 1 of 2 of é",
        "byte 2 of 2 of é, ·",
        "byte 1 of 4 of 😀",
        "bytes 2 to 3 of 4 of 😀",
        "byte 4 of 4 of 😀, b",
    ]
    assert [piece.part for piece in found] == [False, False, False, True, True, False]
    assert headings(tokens) == ["a", "é", "é·", "▏", "▏", "😀b"]
    # Bytes that make no character are named: a lone one, a cut one, an overlong one, half a surrogate pair.
    for bad in (b"\xff", smile[:3], b"\xc0\xaf", b"\xed\xa0\x80"):
        found = pieces(cut(*(bytes([byte]) for byte in bad), b"z"))
        assert "".join(piece.label for piece in found) == "".join(f"\\x{byte:02x}" for byte in bad) + "z"
    assert pieces(["", "\ud800"])[1].label == "\\ud800"


def test_names_are_shown_whole_or_cut_in_the_middle() -> None:
    assert short("a b") == "a b"
    assert short("\udcff\u202e\n") == "\\xff\\u202e↵"
    assert short("a" * 50 + "b" * 50) == "a" * 39 + "…" + "b" * 40
    assert isolated("אב") == "\u2068אב\u2069"
    assert isolated("é") == "é"


def test_nothing_stays_invisible() -> None:
    assert visible(" a\tb\n") == "·a⇥b↵"
    assert visible("\0\x1b\x7f\u200b\U000e0001") == "␀␛\\x7f\\u200b\\U000e0001"
    assert visible(" \n\0é", kept=" \n") == " \n␀é"


def test_ticks_enclose_the_values() -> None:
    for low, high in ((0.0, 0.3), (-7.0, 13.0), (0.97, 0.994), (1e-9, 3e-9), (12.0, 4.5e7)):
        ticks = charts.linear_ticks([low, high])
        assert ticks[0] <= low + 1e-9 * (high - low)
        assert ticks[-1] >= high - 1e-9 * (high - low)
        assert 3 <= len(ticks) <= 9
        steps = [b - a for a, b in pairwise(ticks)]
        assert max(steps) == pytest.approx(min(steps))


def test_bars_by_hand() -> None:
    chart = charts.bar_chart("t", "d", {"a": 1.0, "<b>": 0.5, "c": 0.0}, "share", even=0.5)
    heights = re.findall(r'<rect class="bar"[^>]*height="([\d.]+)"', chart)
    assert [float(h) / charts.PLOT_HEIGHT for h in heights] == [1.0, 0.5, 0.0]
    assert "<title>&lt;b&gt;: 0.5</title>" in chart
    y = charts.TOP + charts.PLOT_HEIGHT / 2
    assert f'class="even" x1="62" x2="466" y1="{y:.1f}" y2="{y:.1f}"' in chart
    charts.bar_chart("t", "d", {}, "share")  # nothing to draw is not an error


def test_what_is_never_below_zero_has_an_axis_from_zero() -> None:
    for values in ([0.0, 0.0], [0.2, 0.2], [0.0], [7.0, 7.0]):
        assert charts.linear_ticks(values)[0] >= 0
    chart = charts.bar_chart("t", "d", {"1": 0.0, "2": 0.0}, "share")
    assert re.findall(r'<rect class="bar"[^>]*height="([\d.]+)"', chart) == ["0.0", "0.0"]
    assert 'text-anchor="end">-' not in chart
    below = charts.bar_chart("t", "d", {"1": -1.0, "2": 1.0, "3": float("nan")}, "share", even=0.5)
    assert below.count('class="bar"') == 2  # what is no number has no bar


@pytest.mark.parametrize("values", [[2.5, 2.5000000000000004], [1e20, 1e20], [-1e99, 1e99], [1e-15, 3e-15], [1e308]])
def test_any_numbers_can_be_drawn(values) -> None:
    points = [(float(i), y) for i, y in enumerate(values)]
    chart = charts.line_chart("t", "d", {"a": [*points, (9.0, 1e308), (10.0, -1e308)]}, "x", "y")
    assert "nan" not in chart
    assert "inf" not in chart
    for tick in charts.linear_ticks([y for y in values if abs(y) < 1e100]):
        assert abs(tick) < 1e101


def test_long_numbers_find_room() -> None:
    chart = charts.line_chart("t", "d", {"a": [(0.0, 0.12495), (1.0, 0.125)]}, "x", "y")
    longest = max(len(tick) for tick in re.findall(r'text-anchor="end">([\d.]+)<', chart))
    assert longest > 5
    assert f'viewBox="-{8 * (longest - 3)} 0 ' in chart
