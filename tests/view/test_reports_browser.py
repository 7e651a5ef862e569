"""Reports in a real browser: the same design as the other pages, and as much alone."""

import pytest

from depthgate.demo.config import DemoConfig
from depthgate.demo.report import report_page
from depthgate.demo.results import Result
from depthgate.presets import train_config
from tests.view.pages import HOSTILE


def result(name: str, routed: list[int]) -> Result:
    """What a demo could have measured; the figures are nobody's."""
    figures = {
        **{"model": name, "parameters": 123456, "flops_per_token": 1e6, "steps": 50, "tokens": 1000, "flops": 1e9},
        **{"train_seconds": 12.0, "held_out_documents": 3, "held_out_tokens": 900, "sample": HOSTILE},
        **dict.fromkeys(("nats_per_byte", "bits_per_byte", "nats_per_byte_top_k", "bits_per_byte_top_k"), 2.0),
        "routed_share": dict.fromkeys(routed, 0.125),
    }
    losses = [(1e9 * n, 5.0 / n) for n in range(1, 51)]
    through = [routed[: i % 3] for i in range(300)]
    return Result(train_config(name), figures, losses, losses[::10], list("abc" * 100), through, routed)


@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_of_the_demo_loads_fits_and_is_alone(browser, tmp_path, width):
    made = report_page(DemoConfig(), [result("tiny-mod", [2, 4]), result("tiny-dense", [])], {"device": HOSTILE})
    (tmp_path / "demo.html").write_text(made)
    check_report(browser, tmp_path / "demo.html", width)


def check_report(browser, page, width):
    """What must hold for reports; that of a study is looked at where one is run."""
    browser.open(page, width, dark=width == 390)
    browser.assert_fits()
    browser.assert_alone()
    assert browser.js("document.querySelectorAll('pre .token, pre .skipped').length") > 50
    assert browser.js("document.querySelectorAll('.chart canvas').length") >= 1
    assert browser.js("[document.images.length, document.scripts.length]") == [0, 2]  # uPlot, and what calls it
    assert browser.js("[...document.querySelectorAll('.wide, .long')].every((e) => e.tabIndex === 0)")
