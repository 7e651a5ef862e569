"""Charts in a real browser: uPlot draws them without a network; values are read by mouse and keyboard; a drag zooms."""

import json
import math

import pytest

from depthgate.view import page as pages

NAN = math.nan
TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
LINES = {
    "one": [(float(n), 10.0 - n) for n in range(1, 10)],
    "two": [(1.5, 1.0), (2.5, NAN), (3.5, 3.0), (4.5, NAN), (5.5, 5.0), (6.5, 6.0)],
    "none": [],
    "<b>four</b>": [(1.0, 2.0), (9.0, 2.0)],
}
KINDS = {name: [(20_000_000.0, 2.0), (40_000_000.0, 2.5)] for name in ("dense", "mod", "mod:capacity=0.25")}
MINIMA = {"dense, best": [(30_000_000.0, 1.9, (25_000_000.0, 35_000_000.0), (1.0, 2.0))], "mod, best": []}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    made = [
        pages.line_chart("Lines", "d", LINES, "steps", "loss", marks={"seeds": [(3.0, 1.0), (3.0, 2.0)]}),
        pages.bar_chart("Bars", "d", {"a": 0.5, "<i>": 0.25, "null": NAN}, "share", even=0.25),
        pages.bar_chart("Histogram", "d", {-1.0: 3.0, 0.0: 4.0, 1.0: 0.0}, "tokens", x="score"),
        pages.line_chart("Log", "d", {"a": [(0.5, 3.0), (1.0, 2.0), (4.0, 3.0)]}, "size", "loss", axis="log_x"),
        pages.line_chart("Empty", "d", {}, "x", "y"),
        *(
            pages.line_chart(f"Odd {n}", "d", {"a": [(float(i), y) for i, y in enumerate(values)]}, "x", "y")
            for n, values in enumerate([[2.5], [2.5, 2.5000000000000004], [-1e99, 1e99], [1e-15, 3e-15], [0.0, 0.0]])
        ),
        pages.line_chart("Late", "d", {"a": [(5_000_001.0, 7.0), (5_000_002.0, 8.0)]}, "x", "y"),
        pages.line_chart("From zero", "d", {"a": [(0.0, 7.0), (1.0, 8.0)]}, "x", "y", axis="from_zero"),
        pages.line_chart("Small", "d", {"a": [(0.011, 3.0), (0.034, 2.0)]}, "size", "loss", axis="log_x"),
        pages.line_chart("Kinds", "d", KINDS, "parameters", "loss", kinds=("dense", "mod", "mod"), marks=MINIMA),
    ]
    out = tmp_path_factory.mktemp("charts") / "page.html"
    out.write_text(pages.page("charts", {"": pages.row(made)}))
    return out


def chart(browser, number, expression):
    """An expression of `u`, the uPlot of the page's chart of that number."""
    return browser.js(f"((u) => {expression})(document.querySelectorAll('.chart')[{number}].chart)")


def legend(browser, number):
    rows = f"document.querySelectorAll('.chart')[{number}].querySelectorAll('.u-series')"
    return browser.js(f"[...{rows}].slice(1).map((row) => [...row.children].map((e) => e.textContent).join(': '))")


def point(browser, number, x, y=None):
    """Move the mouse to a place of a chart; returns where that is."""
    browser.js(f"document.querySelectorAll('.chart')[{number}].scrollIntoView({{block: 'center'}})")
    box = chart(browser, number, "u.over.getBoundingClientRect().toJSON()")
    left = chart(browser, number, f"u.valToPos({x}, 'x')")
    at = {"x": box["x"] + left, "y": box["y"] + box["height"] / 2}
    browser.move(**at)
    return at


def test_all_charts_are_drawn_and_names_are_text(browser, page):
    browser.open(page)
    assert browser.js("[...document.querySelectorAll('.chart')].every((e) => e.querySelector('canvas').width > 300)")
    assert legend(browser, 0) == ["one: ", "two: ", "<b>four</b>: ", "seeds: "]
    assert browser.js("document.querySelectorAll('.chart b, .chart i').length") == 0
    strokes = chart(browser, 0, "u.series.slice(1).map((s) => s.stroke())")
    dark, blue = (pages.colour("mod", shade)[1:] for shade in (0.5, 0.0))
    shades = [f"#{blue}", f"rgb({' '.join(map(str, bytes.fromhex(dark)))})", f"#{blue}", f"#{blue}"]
    assert strokes == shades  # the one without points keeps its shade, the third; marks have that of the first line
    assert len({json.dumps(dash) for dash in chart(browser, 0, "u.series.slice(1, 4).map((s) => s.dash)")}) == 3
    browser.assert_alone()


def test_numbers_are_drawn_where_they_belong(browser, page):
    browser.open(page)
    xs, one, two, four, seeds = chart(browser, 0, "u.data.map((row) => row.map((y) => y === undefined ? 'no' : y))")
    assert xs == [1, 1.5, 2, 2.5, 3, 3, 3.5, 4, 4.5, 5, 5.5, 6, 6.5, 7, 8, 9]
    assert [(x, y) for x, y in zip(xs, one, strict=True) if y != "no"] == LINES["one"]
    assert two.count(None) == 2  # gaps; where another series has a place of its own the line goes on
    assert [y for y in four if y != "no"] == [2, 2]
    assert [(x, y) for x, y in zip(xs, seeds, strict=True) if y != "no"] == [(3, 1), (3, 2)]
    lone = chart(browser, 0, "[1, 2].map((n) => u.series[n].points.filter(u, n).map((i) => u.data[0][i]))")
    assert lone == [[], [1.5, 3.5]]  # nothing but a point can show them
    for number, low in ((1, 0), (9, 0), (11, 0)):  # bars, zeros, from_zero: nothing below 0
        assert chart(browser, number, "u.scales.y.min") == low
    low, high = chart(browser, 3, "[u.scales.x.min, u.scales.x.max]")
    assert low < 0.5
    assert high > 4
    thirds = chart(browser, 3, "[1, 2, 4].map((x) => u.valToPos(x, 'x'))")
    assert thirds[2] - thirds[1] == pytest.approx(thirds[1] - thirds[0])
    assert [t for t in chart(browser, 3, "u.axes[0]._values") if t] == ["0.5", "1", "2"]
    for low, high in ((0.61, 0.67), (1.1, 1.95), (0.55, 3.9)):  # some numbers wherever one zooms to
        browser.js(f"document.querySelectorAll('.chart')[3].chart.setScale('x', {{min: {low}, max: {high}}})")
        assert 3 <= chart(browser, 3, "u.axes[0]._values.length") <= 6
    assert chart(browser, 1, "u.axes[0]._values") == ["a", "<i>", "null"]


def test_values_are_read_by_mouse_and_by_keyboard(browser, page):
    browser.open(page)
    point(browser, 0, 5.1)
    assert legend(browser, 0) == ["one: 5 at 5", "two: 5 at 5.5", "<b>four</b>: 2 at 1", "seeds: 2 at 3"]
    browser.js("document.querySelector('.chart').focus()")
    browser.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert legend(browser, 0)[1] == "two: 6 at 6.5"
    browser.press("ArrowLeft")
    assert legend(browser, 0)[:2] == ["one: 4 at 6", "two: 5 at 5.5"]
    assert browser.js("document.querySelector('.u-legend').getAttribute('aria-live')") == "polite"
    point(browser, 10, 5_000_002)
    assert legend(browser, 10) == ["a: 8 at 5000002"]  # to the step
    point(browser, 1, 0)
    assert legend(browser, 1) == ["share: 0.5 at a", "all alike: 0.25 at a"]
    browser.assert_alone()


def test_a_drag_zooms_a_double_click_ends_it_and_a_click_hides(browser, page):
    browser.open(page)
    span = "[u.scales.x.min, u.scales.x.max]"
    whole = chart(browser, 0, span)
    start = point(browser, 0, 3)
    mouse = {"button": "left", "buttons": 1, "clickCount": 1}
    browser.call("Input.dispatchMouseEvent", type="mousePressed", **start, **mouse)
    stop = point(browser, 0, 6)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", **stop, **mouse)
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", **stop, **mouse)
    assert chart(browser, 0, span) == pytest.approx([3, 6], abs=0.1)
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            browser.call("Input.dispatchMouseEvent", type=kind, **stop, **mouse | {"clickCount": clicks})
    assert chart(browser, 0, span) == whole
    browser.js("document.querySelector('.chart').focus()")
    browser.press("+")
    near = chart(browser, 0, span)
    assert near[1] - near[0] < 0.6 * (whole[1] - whole[0])
    browser.press("-", "-")
    assert chart(browser, 0, span) == whole
    browser.click(".chart .u-series:nth-child(2) th")
    assert chart(browser, 0, "u.series.map((s) => s.show)") == [True, False, True, True, True]
    browser.assert_alone()


@pytest.mark.parametrize("width", [390, 1280])
def test_charts_fit_any_window_and_follow_its_light(browser, page, width):
    browser.open(page, width, dark=width == 390)
    browser.assert_fits()
    browser.assert_alone()
    assert chart(browser, 0, "u.axes[0].stroke()") == ("#e6e8ea" if width == 390 else "#1c2024")
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    browser.js(TWO_FRAMES)
    assert chart(browser, 0, "u.axes[0].stroke()") == "#1c2024"
    browser.call("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
    browser.js(TWO_FRAMES)
    assert chart(browser, 0, "u.width") == browser.js("document.querySelector('.chart').clientWidth")
    browser.assert_fits()


def test_kinds_have_their_colours_minima_their_intervals_and_large_numbers_are_short(browser, page):
    browser.open(page)
    strokes = chart(browser, 13, "u.series.slice(1).map((s) => s.stroke())")
    wanted = [pages.colour("dense"), pages.colour("mod"), "rgb(30 64 114)", pages.colour("dense")]
    assert strokes == wanted  # the second of a kind is darker: half way to the colour of text
    assert pages.colour("mod", 0.5) == "#1e4072" == "#" + bytes((30, 64, 114)).hex()
    low, high = chart(browser, 13, "[u.scales.y.min, u.scales.y.max]")
    assert low < 1.0 < 2.5 < high  # all of the interval is to be seen
    assert "30 M" in chart(browser, 13, "u.axes[0]._values")
    # The key of a line is drawn in its dashes, of 9 and of 2 pixels.
    drawn = "getComputedStyle(m).backgroundImage + getComputedStyle(m).backgroundClip"
    keys = chart(browser, 13, f"[...u.root.querySelectorAll('.line .u-marker')].map((m) => {drawn})")
    assert keys[0] == "noneborder-box"
    assert [chart(browser, 13, f"u.series[{n}].dash") for n in (2, 3)] == [[9, 4], [2, 3]]
    assert "rgb(31, 95, 191) 9px, rgba(0, 0, 0, 0) 9px, rgba(0, 0, 0, 0) 13px)border-box" in keys[1]
    assert "rgb(30, 64, 114) 2px, rgba(0, 0, 0, 0) 2px, rgba(0, 0, 0, 0) 5px)border-box" in keys[2]
    browser.assert_alone()


def test_a_chart_is_read_by_touch(browser, page):
    browser.open(page, 390)
    at = point(browser, 0, 5)
    browser.move(0, 0)
    browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[at])
    browser.wait("document.querySelector('.chart').querySelectorAll('.u-value')[1].textContent === '5 at 5'")
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.assert_alone()
