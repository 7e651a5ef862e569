"""The page of runs in a real browser, and a server that follows a run while it goes on."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from depthgate.view.figures import runs_figure
from depthgate.view.runs import read_runs
from depthgate.view.runs_page import runs_page
from depthgate.view.watch import Page
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


@pytest.fixture
def watched(run, tmp_path):
    """A run of which three rows are written, and the server that watches it."""
    live = tmp_path / "live"
    live.mkdir()
    (live / "config.json").write_bytes((run / "config.json").read_bytes())
    (live / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(run)[:3]))
    (tmp_path / "secret.txt").write_text("secret")
    with serving(live) as (url, process):
        yield live, url, process


@contextmanager
def serving(live):
    command = [sys.executable, "-m", "depthgate", "view", str(live), "--watch", "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        yield process.stdout.readline().split()[0], process
    finally:
        process.kill()
        process.communicate()


def wait(browser, selector, text):
    """Until an element says something."""
    end = time.monotonic() + 10
    while text not in browser.text(selector) and time.monotonic() < end:
        time.sleep(0.1)
    assert text in browser.text(selector)


def ask(url, path="/", method="GET", **headers):
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


def test_a_live_run_is_followed_without_loading_again(browser, run, watched):
    live, url, process = watched
    assert url.startswith("http://127.0.0.1:")
    browser.open(url)
    browser.js("window.kept = 1")
    browser.click("#axis-tokens")
    assert "3 of 12" in browser.text("table")
    with (live / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(run)[3:])
    wait(browser, "table", "12 of 12")
    assert browser.js("window.kept") == 1  # the same page
    assert shown(browser) == ["tokens"]  # and what was chosen stays
    browser.assert_alone(url)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")
    assert "ended" in out


def test_a_page_that_follows_says_where_it_stands_and_keeps_a_readers_place(browser, run, tmp_path):
    live, away = tmp_path / "live", tmp_path / "away"
    live.mkdir()
    (live / "config.json").write_bytes((run / "config.json").read_bytes())
    lines = [json.dumps(row) + "\n" for row in rows(run)]
    chart, said = ".by[data-axis=step] svg", ".by[data-axis=step] .said"
    with serving(live) as (url, process):  # just started: no metrics yet
        browser.open(url)
        assert "no step is recorded yet" in browser.text("main")
        (live / "metrics.jsonl").write_text("".join(lines[:4]))
        wait(browser, "table", "4 of 12")
        browser.js(f"document.querySelector('{chart}').focus()")
        browser.press("ArrowRight", "ArrowRight", "ArrowRight")
        told = browser.text(said)
        assert told == f"live {rows(run)[2]['loss']:.5g} at 3"
        (live / "metrics.jsonl").write_text("".join(lines))
        wait(browser, "table", "12 of 12")
        assert browser.text(said) == told  # the same number, though it stands elsewhere now
        assert browser.js(f"document.activeElement === document.querySelector('{chart}')")
        browser.press("ArrowRight")
        assert browser.text(said) == f"live {rows(run)[3]['loss']:.5g} at 4"
        assert browser.text("#live") == ""
        live.rename(away)
        wait(browser, "#live", f"cannot be read at the moment: {live} is no folder")
        assert browser.js("document.getElementById('live').getAttribute('role')") == "status"
        assert "12 of 12" in browser.text("table")  # what was there stays
        assert ask(url)[0] == 503
        away.rename(live)
        end = time.monotonic() + 10
        while browser.text("#live") and time.monotonic() < end:
            time.sleep(0.1)
        assert browser.text("#live") == ""
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert err.startswith(f"cannot be read at the moment: {live} is no folder")
        assert err.count("\n") == 1
        wait(browser, "#live", "has ended, or cannot be reached")


def test_any_failure_is_told_and_the_server_lives_on(capfd):
    """Whatever goes wrong, once, in a line; and the page is back when it is mended."""
    fails = [ZeroDivisionError("division\nby zero"), ZeroDivisionError("division\nby zero"), None]

    def made():
        if error := fails.pop(0):
            raise error
        return "fine"

    page = Page(lambda: 0, made)
    for _ in range(2):
        body, _, wrong = page.now()
        assert wrong == "cannot be read at the moment: ZeroDivisionError: division↵by zero"
        assert wrong in body.decode()
        page.rest = 0.0
    assert page.now()[0::2] == (b"fine", "")
    assert capfd.readouterr().err == "cannot be read at the moment: ZeroDivisionError: division↵by zero\n"


def test_nothing_but_the_page_is_served(watched):
    live, url, _ = watched
    status, body, headers = ask(url)
    assert status == 200
    assert body.startswith(b"<!doctype html>")
    assert ask(url, **{"If-None-Match": headers["ETag"]})[:2] == (304, b"")
    for path in (
        "/metrics.jsonl",
        "/../secret.txt",
        "//etc/passwd",
        "/%2e%2e/secret.txt",
        f"{live}/metrics.jsonl",
        "/?x",
    ):
        status, body, _ = ask(url, path)
        assert status == 404
        assert b"secret" not in body
        assert b"step" not in body
    for method in ("POST", "PUT", "DELETE"):
        assert ask(url, method=method)[0] == 501
    assert ask(url, Host="evil.example:80")[0] == 403
    port = str(urlsplit(url).port)
    taken = subprocess.run(
        [sys.executable, "-m", "depthgate", "view", str(live), "--watch", "--port", port],
        capture_output=True,
        text=True,
    )
    assert taken.returncode == 2
    assert "--port 0 takes any" in taken.stderr
