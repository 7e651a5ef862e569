"""The demo's report and that of a study in a real browser: the same design, and as much alone."""

import pytest

from depthgate.cli import main
from tests.train.tiny import write_data
from tests.view.pages import view


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        data = write_data(folder / "text.jsonl")
        assert main(["demo", "--out", str(folder / "demo"), "--data", data, "--steps", "2"]) == 0
        small = ["--budgets", "1e9", "--sizes", "1", "--context", "32", "--measured", "500", "--device", "cpu"]
        assert main(["isoflop", "--data", data, "--out", str(folder / "study"), *small, "--parallel", "1"]) == 0
    return folder


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["demo", "study"])
def test_reports_load_fit_and_are_alone(browser, reports, tmp_path, name, width):
    page = reports / name / "report.html"
    if name == "study":
        assert view(reports / name, "--out", tmp_path / "page.html") == 0
        page = tmp_path / "page.html"
    browser.open(page, width, dark=width == 390)
    browser.assert_fits()
    browser.assert_alone()
    assert browser.js("document.querySelectorAll('pre .token, pre .skipped').length") > 100
    assert browser.js("document.querySelectorAll('svg[role=img]').length") >= 1
    assert browser.js("[...document.querySelectorAll('.wide, .long')].every((e) => e.tabIndex === 0)")
