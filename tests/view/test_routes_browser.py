"""The page of a text in a real browser: what it shows is what the plans say, by mouse and by keyboard."""

import re

import pytest

from depthgate.view.page import visible
from depthgate.view.routes_page import text_page
from tests.view.pages import HOSTILE, large, page_data, view_model

# Of the signs in the text against what is behind them, as WCAG has it.
CONTRASTS = """[...document.querySelectorAll('pre .sign')].map((sign) => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((x) => x / 255)
    .map((x) => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
  const [r, g, b, a = 1] = rgb(getComputedStyle(sign.parentElement).backgroundColor);
  const band = rgb(getComputedStyle(document.querySelector('pre')).backgroundColor);
  const [p, q] = [light(rgb(getComputedStyle(sign).color)), light([r, g, b].map((x, i) => a * x + (1 - a) * band[i]))];
  return (Math.max(p, q) + .05) / (Math.min(p, q) + .05);
})"""


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    page = tmp_path_factory.mktemp("big") / "page.html"
    page.write_text(text_page("a large text", "about", large()))
    return page


def sizes(browser):
    """Of the map: where its cells begin, and how high a row of them is."""
    return (int(browser.js(f"document.getElementById('map').dataset.{name}")) for name in ("left", "top", "row"))


def hover(browser, token, row):
    """Point at the middle of a cell."""
    box, (left, top, high) = browser.box("#map"), sizes(browser)
    start, stop = span(browser)
    x = box["x"] + left + (token - start + 0.5) * (box["width"] - left) / (stop - start)
    browser.move(x, box["y"] + top + (row + 0.5) * high)
    return browser.text("#said")


def test_the_map_has_all_cells_and_hovering_shows_their_numbers(browser, big):
    found = large()
    browser.open(big)
    assert browser.js("Number(document.getElementById('map').dataset.cells)") == 4000 * 8
    assert browser.js("document.querySelectorAll('pre [data-t]').length") == 4000
    third = found.layers[2]
    kinds = {both: t for t, both in enumerate(zip(third.causal, third.top_k, strict=True))}
    assert len(kinds) == 4  # all that two rules can say
    for t, row in ((3, 0), (2000, 3), (3999, 7), *((t, 2) for t in kinds.values())):
        browser.click("#whole")
        browser.click(f'pre [data-t="{t}"]')
        browser.js("for (let i = 0; i < 12; i++) document.getElementById('closer').click()")
        line = hover(browser, t, row)
        layer = found.layers[row]
        on, best = layer.causal[t], layer.top_k[t]
        assert line.startswith(f'Token {t} "')
        assert f"layer {layer.name}:" in line
        assert f"score {layer.scores[t]}" in line
        assert ("skipped" in line) != on
        assert ("not by the top k" in line) == (on and not best)
        assert ("but in the top k" in line) == (best and not on)
        assert (f"gate {layer.gates[t]}" in line) if on else ("gate" not in line)
    browser.assert_alone()


def test_what_is_drawn_is_what_was_decided(browser, big):
    """The colour in the middle of cells of the zoomed map: full where routed causally, the band's where skipped."""
    found = large()
    browser.open(big)
    middle = sum(span(browser)) / 2
    browser.js("for (let i = 0; i < 12; i++) document.getElementById('closer').click()")
    start, end = span(browser)
    assert (end - start, (start + end) / 2) == (8, pytest.approx(middle, abs=2))  # no cell was looked at
    left, top, high = sizes(browser)
    band, both, odd = "243,245,247", "31,95,191", "196,33,63"
    upper, lower = (
        {(0, 0): band, (0, 1): band, (1, 0): odd, (1, 1): both},
        {(0, 0): band, (0, 1): odd, (1, 0): band, (1, 1): both},
    )
    for row in range(8):
        for t in range(start, end):
            for down, wanted in ((0.25, upper), (0.75, lower)):
                place = f"{left} + ({t - start} + .5) * (c.clientWidth - {left}) / 8, {top + (row + down) * high}, 1, 1"
                pixel = f"[...c.getContext('2d').getImageData({place}).data].slice(0, 3).join()"
                seen = browser.js(f"((c) => {pixel})(document.getElementById('map'))")
                assert seen == wanted[(found.layers[row].causal[t], found.layers[row].top_k[t])]


def test_histograms_count_the_scores_and_mark_where_the_top_k_begins(browser, big):
    browser.open(big)
    found = large().layers[0]
    first = "(e) => e.getAttribute('aria-label').startsWith('Layer 2.')"
    xs, tokens, computed = browser.js(f"[...document.querySelectorAll('.chart')].find({first}).chart.data")
    assert (len(xs), sum(tokens), sum(computed)) == (24, 4000, sum(found.causal))
    wide = (max(found.scores) - min(found.scores)) / 24
    assert xs[0] == pytest.approx(min(found.scores) + wide / 2)
    assert tokens[11] == sum(11 <= (score - min(found.scores)) / wide < 12 for score in found.scores)
    assert [count for x, count in zip(xs, computed, strict=True) if x < 1.1 - wide] == [0] * sum(
        x < 1.1 - wide for x in xs
    )


def test_the_keyboard_moves_and_zooms(browser, big):
    browser.open(big)
    browser.js("document.getElementById('whole').focus()")
    browser.press("Tab")  # to the map, which comes after its buttons
    assert browser.js("document.activeElement.id") == "map"
    assert browser.text("#said").startswith('Token 0 "the", layer 2:')  # the focus reads where it is
    said = []
    for keys in (["ArrowRight", "ArrowRight", "ArrowDown"], ["End"], ["+", "+", "ArrowLeft"], ["Home"]):
        browser.press(*keys)
        said.append(browser.text("#said"))
    for line, start in zip(said, ("Token 2 ", "Token 3999 ", "Token 3998 ", "Token 0 "), strict=True):
        assert line.startswith(start)
    assert "layer 4:" in said[0]
    assert browser.js("document.getElementById('said').getAttribute('aria-live')") == "polite"
    assert browser.js("document.getElementById('map').getAttribute('aria-label')").startswith("Map of 8 layers")
    assert browser.js(
        "[...document.querySelectorAll('.chart')].every((e) => e.getAttribute('aria-label') && e.tabIndex === 0)"
    )
    names = browser.js("[...document.querySelectorAll('[role=region]')].map((e) => e.getAttribute('aria-label'))")
    assert len(names) == len(set(names)) == 3


def test_pointing_at_a_large_map_does_not_draw_its_cells_again(browser, big):
    """Sixty moves over the whole text: each draws one picture and a frame at most, whatever the number of cells."""
    browser.open(big)
    browser.js("""(() => {
      window.drawn = { fillRect: 0, drawImage: 0, strokeRect: 0 };
      const draws = CanvasRenderingContext2D.prototype;
      for (const name in drawn) {
        const before = draws[name];
        draws[name] = function (...given) { drawn[name]++; return before.apply(this, given); };
      }
    })()""")
    browser.click("#whole")
    box, nodes = browser.box("#map"), browser.js("document.querySelectorAll('*').length")
    browser.js("for (const name in drawn) drawn[name] = 0")
    _, top, _ = sizes(browser)
    for i in range(60):
        browser.move(box["x"] + 60 + 10 * i, box["y"] + top + 5 + i % 150)
    browser.js("new Promise((done) => requestAnimationFrame(done))")
    drawn = browser.js("drawn")
    assert drawn["fillRect"] == 0  # no cell
    assert 0 < drawn["drawImage"] <= 61
    assert drawn["strokeRect"] == drawn["drawImage"]
    assert (
        browser.js("document.querySelectorAll('*').length") <= nodes + 3
    )  # the token and what is around it, in the line below
    browser.click("#closer")
    assert browser.js("drawn.fillRect") > 1000  # a zoom does


def span(browser):
    return tuple(int(browser.js(f"document.getElementById('map').dataset.{name}")) for name in ("from", "to"))


def test_wheels_and_drags_move_along_and_the_window_scrolls_where_the_map_cannot(browser, big):
    browser.open(big)
    browser.click("#whole")
    box, (left, top, _) = browser.box("#map"), sizes(browser)
    x, y = box["x"] + left + 100, box["y"] + top + 30

    browser.js("window.wheels = 0; addEventListener('wheel', () => wheels++, { capture: true, passive: true })")

    def wheel(dx, dy, **more):
        before = browser.js("wheels")
        browser.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=dx, deltaY=dy, **more)
        browser.wait(f"wheels > {before}")
        return span(browser)

    def drag(kind, far):
        """Pressed, moved in three steps, let go; by mouse or by finger."""
        for i in range(5):
            at = {"x": x + 200 + far * min(3, i) / 3, "y": y}
            if kind == "mouse":
                name = ("mousePressed", *["mouseMoved"] * 3, "mouseReleased")[i]
                browser.call(
                    "Input.dispatchMouseEvent", type=name, button="left", buttons=int(i < 4), clickCount=1, **at
                )
            else:
                name = ("touchStart", *["touchMove"] * 3, "touchEnd")[i]
                browser.call("Input.dispatchTouchEvent", type=name, touchPoints=[at] if i < 4 else [])
        return span(browser)

    scrolled = "window.scrollY"
    # An event that was made up scrolls nothing: the map leaves it to the window until it was clicked on.
    place = f"clientX: b.left + {left} + 100, clientY: b.top + {top} + 30"
    up = f"new WheelEvent('wheel', {{ deltaY: -100, cancelable: true, {place} }})"
    turned = (
        f"((c, b) => c.dispatchEvent({up}))(...((c) => [c, c.getBoundingClientRect()])(document.getElementById('map')))"
    )
    assert browser.js(turned)
    assert span(browser) == (0, 4000)
    browser.js("document.getElementById('map').focus({ preventScroll: true })")
    at = browser.js(scrolled)
    assert wheel(200, 0) == (0, 4000)  # sideways over the whole text: nothing to zoom, nowhere to go
    browser.js("for (let i = 0; i < 4; i++) document.getElementById('closer').click()")
    first = span(browser)
    assert first == (0, 250)
    moved = wheel(300, 0)
    assert moved[0] > 0
    assert moved[1] - moved[0] == 250
    again = wheel(0, 300, modifiers=8)  # shift
    assert again[0] > moved[0]
    assert again[1] - again[0] == 250
    line = browser.text("#said")
    for kind in ("mouse", "touch"):
        before = span(browser)
        after = drag(kind, -300)
        step = (box["width"] - left) / 250
        assert after[0] - before[0] == pytest.approx(
            300 / step, abs=30 if kind == "touch" else 1
        )  # fingers slip at first
        assert after[1] - after[0] == 250
    assert hover(browser, span(browser)[0] + 9, 1) != line  # a drag holds no cell
    zoomed = wheel(0, -100)
    assert zoomed[1] - zoomed[0] == 200
    assert browser.js(scrolled) == at
    browser.js("document.getElementById('whole').click()")
    wheel(0, 100)  # cannot zoom out further: the window scrolls
    browser.wait(f"{scrolled} > {at}")
    browser.assert_alone()


def test_the_map_starts_with_what_can_be_read_and_a_strip_of_the_rest(browser, big, tmp_path):
    for width, words, letters in ((1280, 103, 200), (390, 28, 58)):
        browser.open(big, width)
        start, stop = span(browser)
        assert (start, stop - start) == (0, pytest.approx(words, abs=4))
        assert browser.js("document.getElementById('overview').clientHeight") == 40
        strip = browser.box("#overview")
        at = {"x": strip["x"] + strip["width"] - 3, "y": strip["y"] + 20}
        browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[at])
        browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        browser.wait("Number(document.getElementById('map').dataset.to) > 3900")
        browser.js("document.getElementById('map').focus()")
        browser.press("Home")
        assert span(browser)[0] == 0
        found = large()
        (tmp_path / "page.html").write_text(
            text_page("t", "about", type(found)(found.depth, found.layers, ["a"] * 4000, found.losses))
        )
        browser.open(tmp_path / "page.html", width)
        assert span(browser) == (0, pytest.approx(letters, abs=4))
        assert hover(browser, 40, 2).endswith("a" * 49)  # and what is around it
    browser.click("#whole")
    assert browser.js("document.getElementById('overview').hidden")


def test_a_tap_on_a_token_says_what_computed_it(browser, big):
    browser.open(big, 390)
    found, token = large(), browser.box('pre [data-t="11"]')
    at = {"x": token["x"] + 4, "y": token["y"] + 8}
    browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[at])
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.wait("document.querySelector('.at')")
    layers = ", ".join(map(str, found.through[11])) or "no routed layer"
    assert browser.text(".text .said").startswith("Token 11: ·fox: ")
    assert browser.text(".text .said").endswith(layers)
    browser.js("document.querySelector('pre').focus()")
    browser.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert browser.text(".text .said").startswith("Token 12: ")
    table = "document.querySelector('table.cards')"
    assert browser.js(f"{table}.scrollWidth <= {table}.parentElement.clientWidth")  # no cell is cut off
    heads = browser.js(f"[...{table}.querySelector('tbody tr').children].map((cell) => cell.dataset.head)")
    assert heads[:2] == ["layer", "routed by the causal rule"]


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_it_fits_any_window_and_any_light(browser, big, width, dark):
    browser.open(big, width, dark=dark)
    browser.assert_fits()
    browser.assert_alone()
    assert min(browser.js(CONTRASTS)) > 4.5
    assert browser.js("getComputedStyle(document.body).backgroundColor") == (
        "rgb(21, 24, 27)" if dark else "rgb(255, 255, 255)"
    )


def test_hostile_text_runs_nothing(browser, run, tmp_path):
    page = tmp_path / "page.html"
    assert view_model(run, page, "--prompt", HOSTILE) == 0
    browser.open(page)
    tokens = page_data(page)["tokens"]
    text = browser.js("document.querySelector('pre').innerText")
    assert text == visible(HOSTILE)  # what would not be seen, or turn the text round, as a sign
    for part in ("שלום", "👩", "é", "<script>alert(1)</script>"):
        assert part in text
    spans = browser.js("[...document.querySelectorAll('pre [data-t]')].map((span) => span.textContent)")
    for t, (span, token) in enumerate(zip(spans, tokens, strict=True)):
        if not (found := re.fullmatch(r"byte (\d) of (\d) of (.+)", token)):
            assert span == token
            continue
        number, of, char = found.groups()  # each byte is a token; the last of a character shows it
        assert span == (char if number == of else "")
        assert browser.box(f'pre [data-t="{t}"]')["width"] > 1  # and the others can be seen too
    assert tokens[-2:] == ["byte 1 of 2 of é", "byte 2 of 2 of é"]
    assert browser.js("document.images.length") == 0
    browser.js("document.getElementById('map').focus()")
    browser.press("End")
    assert browser.text("#said").startswith(f'Token {len(tokens) - 1} "byte 2 of 2 of é", layer 1')
    browser.click('pre [data-t="3"]')
    assert browser.text("#said").startswith(f'Token 3 "{tokens[3]}", layer 1')
    browser.assert_alone()
