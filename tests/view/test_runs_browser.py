"""The page of runs in a real browser, and a server that follows a run while it goes on."""

import pytest

from depthgate.view.figures import runs_figure
from depthgate.view.runs import read_runs
from depthgate.view.runs_page import runs_page
from tests.train.tiny import rows
from tests.view.pages import a_run, view


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "page.html"
    assert view(runs / "mod", runs / "mode", "--out", out) == 0
    return out


def shown(browser):
    """The axes of the charts that are to be seen."""
    visible = "[...document.querySelectorAll('.by')].filter((e) => e.offsetParent !== null)"
    return browser.js(f"{visible}.map((e) => e.dataset.axis)")


def test_runs_lie_over_each_other_against_what_is_chosen(browser, page, run):
    browser.open(page)
    assert shown(browser) == ["step"]
    assert browser.js("document.querySelectorAll('.by[data-axis=step] figure').length") == 3
    legend = browser.js(
        "[...document.querySelectorAll('.by[data-axis=step] figure:first-child li')].map((e) => e.textContent)"
    )
    assert legend == ["mod", "mode", "mod, resumed"]
    mark = rows(run)[5]
    assert browser.text(".by[data-axis=step] .mark title") == f"6, {mark['loss']:.4g}"
    for axis in ("tokens", "flops", "seconds"):
        browser.click(f"#axis-{axis}")
        assert shown(browser) == [axis]
    browser.js("document.getElementById('axis-step').focus()")
    browser.press("ArrowRight")  # by keyboard
    assert shown(browser) == ["tokens"]
    browser.assert_alone()


def test_numbers_can_be_read_off_the_charts(browser, page, run, runs):
    browser.open(page)
    losses, others = ([row["loss"] for row in rows(runs / name)] for name in ("mod", "mode"))
    chart = ".by[data-axis=step] svg"
    box = browser.box(chart)
    line = browser.js(f"document.querySelector('{chart} polyline').getBoundingClientRect().toJSON()")
    browser.move(line["x"] + line["width"] * 8 / 11, box["y"] + box["height"] / 2)  # step 9 of 12
    said = ".by[data-axis=step] .said"
    assert browser.text(said) == f"mod {losses[8]:.5g} at 9; mode {others[5]:.5g} at 6"
    browser.js(f"document.querySelector('{chart}').focus()")
    browser.press("ArrowRight", "ArrowRight")
    assert browser.text(said).startswith(f"mod {losses[10]:.5g} at 11")
    browser.assert_alone()


def test_a_run_has_one_colour_in_all_charts(browser, tmp_path):
    """Though the first routes nobody, and has no line in the chart of routed shares."""
    dense, mod = a_run("dense"), a_run("mod")
    for row in dense.rows:
        row["routed_share"] = []
    (tmp_path / "page.html").write_text(runs_page([dense, mod]))
    browser.open(tmp_path / "page.html")
    found = browser.js(
        """[...document.querySelectorAll('.by[data-axis=step] polyline')].map(
        (line) => line.dataset.name + ' ' + getComputedStyle(line).stroke)"""
    )
    assert len(found) == 5
    assert len(set(found)) == 2
    legends = browser.js("[...document.querySelectorAll('.by[data-axis=step] ul')].map((list) => list.innerText)")
    assert legends[1] == "mod"
    picture = runs_figure([dense, mod])
    share = picture.axes[2]
    assert [line.get_color() for line in share.lines] == ["C1"]
    assert share.get_ylim()[1] > max(share.lines[0].get_ydata())  # not on the border
    assert [axes.get_legend() for axes in picture.axes] == [None] * 4  # below the charts, not over them
    assert [text.get_text().strip() for text in picture.legends[0].get_texts()] == ["dense", "mod"]


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_any_window(browser, page, width):
    browser.open(page, width, dark=width == 390)
    browser.assert_fits()
    browser.assert_alone()
    assert browser.box("thead")["height"] < (75 if width == 390 else 100)  # two lines of headings, or three


def test_a_hostile_name_runs_nothing(browser, run, tmp_path):
    (found,) = read_runs([str(run)])
    evil = "</title><script>document.title = 'run'</script><img src=x onerror=alert(1)>"
    (tmp_path / "page.html").write_text(runs_page([type(found)(evil, found.rows)]))
    browser.open(tmp_path / "page.html")
    assert browser.js("document.title") == f"depthgate view: {evil}"
    assert browser.js("[document.images.length, document.scripts.length]") == [0, 1]  # ours
    browser.assert_alone()
