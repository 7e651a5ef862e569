"""Pages and charts by hand: text is escaped, charts hold their numbers, tokens make characters."""

import json
import math
import re
from html import unescape
from typing import Any

from depthgate.view import page as pages
from depthgate.view.page import Html, isolated, pieces, routed_text, short, visible


def test_text_is_escaped_and_markup_is_not() -> None:
    evil = '<b title="x">&'
    safe = "&lt;b title=&quot;x&quot;&gt;&amp;"
    for made in (
        pages.paragraph(evil),
        pages.note(evil),
        pages.table([evil], [[evil, evil]], evil),
        pages.page(evil, {evil: evil}),
        pages.line_chart(evil, evil, {evil: [(0, 1), (1, 2)]}, evil, evil),
        pages.bar_chart(evil, evil, {evil: 1.0}, evil),
    ):
        assert evil not in made
        assert safe in made
    assert pages.paragraph(pages.html("<"), Html("<b>")) == "<p>&lt;<b></p>"


def chart_data(figure: str) -> dict[str, Any]:
    """The plain data that a chart hands to its script."""
    (found,) = re.findall(r'data-chart="(.*?)"', figure)
    return json.loads(unescape(found))


def look(kind: str, shade: float, dash: int) -> dict[str, Any]:
    return {"kind": kind, "colour": "mod", "shade": shade, "dash": dash}


def test_line_charts_hold_their_points() -> None:
    """In order of x; what cannot be drawn is a gap, or left out where it has no place."""
    nan = math.nan
    points = [(5.0, 25.0), (0.0, 0.0), (6.0, nan), (7.0, 1e308), (nan, 1.0), (10.0, 100.0)]
    marks = {"b": [(10.0, 100.0)], "<c>": [(5.0, 1.0), (5.0, 2.0)], "none": []}
    made = pages.line_chart("t", "d", {"empty": [], "a": points}, "x", "y", marks=marks, axis="from_zero")
    assert chart_data(made) == {
        **{"x": "x", "y": "y", "axis": "from_zero"},
        "series": [
            {**look("line", 0.5, 1), "name": "a", "points": [[0, 0], [5, 25], [6, None], [7, None], [10, 100]]},
            {**look("mark", 0, 0), "name": "b", "points": [[10, 100]]},
            {**look("mark", 0.5, 1), "name": "<c>", "points": [[5, 1], [5, 2]]},
        ],
    }
    (line,) = chart_data(pages.line_chart("t", "d", {"a": points}, "x", "y", axis="log_x"))["series"]
    assert line["points"][0] == [5, 25]  # 0 has no place on a log axis
    assert chart_data(pages.line_chart("t", "d", {"a": []}, "x", "y"))["series"] == []  # not an error


def test_bar_charts_hold_their_bars() -> None:
    made = chart_data(pages.bar_chart("t", "d", {"a": 1.0, "<b>": 0.5, "c": math.nan}, "share", even=0.5))
    assert made["names"] == ["a", "<b>", "c"]
    bars, even = made["series"]
    assert bars["points"] == [[0, 1], [1, 0.5], [2, None]]
    assert even["points"] == [[0, 0.5], [1, 0.5], [2, 0.5]]
    made = chart_data(pages.bar_chart("t", "d", {-1.5: 3.0, 0.0: 4.0}, "tokens", x="score"))
    assert (made["names"], made["series"][0]["points"]) == ([], [[-1.5, 3], [0, 4]])
    pages.bar_chart("t", "d", {}, "share")  # nothing to draw is not an error


def test_a_kind_has_one_colour_everywhere() -> None:
    names = {"dense": "dense", "tiny-mod": "mod", "mod:capacity=0.25": "mod", "mode": "mode", "dense,mod": "mod"}
    names |= {
        "4 x 48, dense,mode_staged, capacity 0.5": "mode_staged",
        "moe-124m": "moe",
        "random": "random",
        "x": "dense",
    }
    names |= dict.fromkeys(("soft_moe", "uniform", "uniform_dispatch", "uniform_combine:slots=2"), "soft")
    assert {name: pages.kind_of(name) for name in names} == names
    assert pages.looks(["mod", "dense", "mod", "mod"]) == [("mod", 0), ("dense", 0), ("mod", 0.5), ("mod", -0.3)]
    assert len({pages.colour(kind) for kind in pages.KINDS}) == len(pages.KINDS)


def test_a_page_carries_what_draws_its_charts_with_its_licence() -> None:
    chart = pages.line_chart("t", "d", {"a": [(0.0, 1.0)]}, "x", "y")
    text = pages.page("t", {"": chart})
    assert text.count("<script") == 3
    assert "var uPlot=" in text
    assert "The MIT License" in text
    assert "Leon Sorokin" in text
    assert "uPlot" not in pages.page("t", {"": 'data-chart="x"'})  # only where it is needed
    assert "location.reload" not in text
    assert "location.reload" in pages.page("t", {}, live=True)


def test_routed_text_by_hand() -> None:
    made = routed_text(["a", "<b>", "\n", "\u202e", "c"], [[], [2], [4], [2, 4], [2]], 2, "routed layer")
    assert '<span class="skipped" data-t="0" title="a: no routed layer">a</span>' in made
    assert '<span class="token" data-t="1" style="--share:0.5" title="&lt;b&gt;: layers 2">&lt;b&gt;</span>' in made
    assert 'title="↵: layers 4"><span class="sign">↵</span></span>\n' in made
    assert 'style="--share:1" title="\\u202e: layers 2, 4"' in made
    assert "no routed layer: 1 of 5 tokens" in made
    # The rest of a token after the end of a line stands on the next one.
    assert '<span class="sign">↵</span>\n<span class="sign">·</span>x</span>' in routed_text(
        ["\n x"], [[1]], 1, "expert"
    )
    assert "<b><span" in routed_text(["a", "b"], [[], []], 1, "expert", given=1)
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
    assert [piece.heading for piece in found] == ["a", "é", "é·", "▏", "▏", "😀b"]
    # Bytes that make no character are named: a lone one, a cut one, an overlong one, half a surrogate pair.
    for bad in (b"\xff", smile[:3], b"\xc0\xaf", b"\xed\xa0\x80"):
        found = pieces(cut(*(bytes([byte]) for byte in bad), b"z"))
        assert "".join(piece.label for piece in found) == "".join(f"\\x{byte:02x}" for byte in bad) + "z"
    assert pieces(["", "\ud800"])[1].label == "\\ud800"
    # One that is cut is followed by a whole one.
    assert [piece.text for piece in pieces(cut(smile[:1], e[:1], e[1:]))] == ["\udcf0", "", "é"]


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
