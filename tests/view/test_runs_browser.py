"""The page of runs in a real browser, and the report that follows a run while it goes on."""

import json
import re

import pytest

from depthgate.view import page as pages
from depthgate.view.figures import runs_figure
from depthgate.view.runs import read_runs, runs_page, write_report
from tests.train.tiny import rows
from tests.view.pages import a_run, view

LIVE = 'id="pause"'


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
        "[...document.querySelectorAll('.by[data-axis=step] figure:first-child .u-label')].map((e) => e.textContent)"
    )
    assert legend[1:] == ["mod", "mode", "mod, resumed"]
    mark = rows(run)[5]
    marks = browser.js("((u) => u.data[0].map((x, i) => [x, u.data[3][i]]))(document.querySelector('.chart').chart)")
    assert [point for point in marks if len(point) > 1 and point[1] is not None] == [[6, float(f"{mark['loss']:.6g}")]]
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
    chart = "document.querySelector('.by[data-axis=step] .chart')"
    browser.js(f"{chart}.scrollIntoView({{block: 'center'}})")
    box = browser.js(f"{chart}.chart.over.getBoundingClientRect().toJSON()")
    browser.move(box["x"] + browser.js(f"{chart}.chart.valToPos(9, 'x')"), box["y"] + box["height"] / 2)
    said = f"[...{chart}.querySelectorAll('.u-value')].map((e) => e.textContent)"
    assert browser.js(said)[1:3] == [f"{losses[8]:.5g} at 9", f"{others[5]:.5g} at 6"]
    browser.js(f"{chart}.focus()")
    browser.press("ArrowRight", "ArrowRight")
    assert browser.js(said)[1] == f"{losses[10]:.5g} at 11"
    browser.assert_alone()


def test_a_run_has_one_colour_in_all_charts(browser, tmp_path):
    """Though the first has no routed layers, and no line in the chart of routed shares."""
    dense, mod = a_run("dense"), a_run("mod")
    for row in dense.rows:
        row["routed_share"] = []
    (tmp_path / "page.html").write_text(runs_page([dense, mod]))
    browser.open(tmp_path / "page.html")
    series = "[...document.querySelectorAll('.by[data-axis=step] .chart')].map((e) => e.chart.series.slice(1))"
    found = browser.js(f"{series}.map((each) => each.map((s) => s.label + ' ' + s.stroke()))")
    assert [len(chart) for chart in found] == [2, 1, 2]
    assert len({line for chart in found for line in chart}) == 2
    assert found[1][0].startswith("mod ")
    picture = runs_figure([dense, mod])
    share = picture.axes[2]
    assert [line.get_color() for line in share.lines] == [pages.colour("mod")]
    assert [line.get_color() for line in picture.axes[0].lines] == [pages.colour("dense"), pages.colour("mod")]
    assert share.get_ylim()[1] > max(share.lines[0].get_ydata())  # not on the border
    assert [axes.get_legend() for axes in picture.axes] == [None] * 4  # below the charts, not over them
    assert [text.get_text().strip() for text in picture.legends[0].get_texts()] == ["dense", "mod"]


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_any_window(browser, page, width):
    browser.open(page, width, dark=width == 390)
    browser.assert_fits()
    browser.assert_alone()
    table = "document.querySelector('table')"
    assert browser.js(f"{table}.scrollWidth <= {table}.parentElement.clientWidth")  # no column is cut off
    assert width == 390 or browser.box("thead")["height"] < 100  # three lines of headings


def test_lines_are_smoothed_axes_are_logarithmic_and_the_first_steps_left_out(browser, tmp_path):
    run = a_run(steps=200)
    for n, row in enumerate(run.rows):
        row["loss"] = 9.0 if n < 5 else 3.0 + n % 2
    (tmp_path / "page.html").write_text(runs_page([run]))
    browser.open(tmp_path / "page.html")
    of = "document.querySelector('.chart').chart"
    assert 4 < browser.js(f"{of}.scales.y.max") < 5
    browser.click("#first-steps")
    assert browser.js(f"{of}.scales.y.max") > 9
    browser.js("(e => { e.value = 0.9; e.dispatchEvent(new Event('input')); })(document.getElementById('smooth'))")
    end = browser.js(f"{of}.data[1].slice(-2)")
    assert end == pytest.approx([3.5, 3.5], abs=0.06)  # a running mean
    for box, scale in (("log-x", "x"), ("log-y", "y")):
        assert browser.js(f"{of}.scales.{scale}.distr") == 1
        browser.click(f"#{box}")
        assert browser.js(f"{of}.scales.{scale}.distr") == 3
    assert browser.js("document.querySelectorAll('.by[data-axis=step] .chart')[2].chart.scales.y.distr") == 1
    browser.assert_alone()


def test_a_hostile_name_runs_nothing(browser, run, tmp_path):
    (found,) = read_runs([str(run)])
    evil = "</title><script>document.title = 'run'</script><img src=x onerror=alert(1)>"
    (tmp_path / "page.html").write_text(runs_page([type(found)(evil, found.rows)]))
    browser.open(tmp_path / "page.html")
    assert browser.js("document.title") == f"depthgate view: {evil}"
    assert browser.js("[document.images.length, document.scripts.length]") == [0, 3]  # ours, uPlot, what calls it
    browser.assert_alone()


def test_the_report_of_a_run_reloads_itself_while_the_run_is_live(browser, run, tmp_path):
    folder = tmp_path / "live"
    folder.mkdir()
    report = folder / "report.html"
    (folder / "config.json").write_bytes((run / "config.json").read_bytes())
    lines = [json.dumps(row) + "\n" for row in rows(run)]
    write_report(folder, live=True)  # before the first step
    assert "no step is recorded yet" in report.read_text()
    (folder / "metrics.jsonl").write_text("".join(lines[:4]))
    write_report(folder, live=True)
    browser.open(report)
    assert "4 of 12" in browser.text("main .wide")
    assert "The run is going on, and this page reloads itself every 15 seconds." in browser.text("main")
    assert re.search(r"Written \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", browser.text("main"))
    report.write_text(report.read_text().replace("}, 15000);", "}, 2000);"))  # sooner, for the test
    browser.open(report)
    browser.js("document.getElementById('log-y').checked = true")
    (folder / "metrics.jsonl").write_text("".join(lines))
    write_report(folder, live=False)
    assert LIVE not in report.read_text()
    browser.wait_for_load()
    while "12 of 12" not in browser.text("main .wide"):  # loaded again before the report was written
        browser.wait_for_load()
    assert "The run has ended." in browser.text("main")
    assert browser.js("JSON.parse(sessionStorage.getItem('chosen'))['log-y']")  # a page that reloads takes it up
    assert {path.name for path in folder.iterdir()} == {"config.json", "metrics.jsonl", "report.html"}
    assert browser.errors == []
