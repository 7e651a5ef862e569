"""Experts and slot maps in a real browser."""

import pytest
import torch

import depthgate as dg
from depthgate.view.routes import image_of, plan_decisions
from depthgate.view.routes_page import images_page
from tests.view.pages import view_model

GRID = (6, 8)
TEXT = "the quick brown fox jumps over a lazy dog and sleeps"


@pytest.fixture(scope="module")
def soft():
    torch.manual_seed(0)
    with torch.no_grad():
        return dg.SoftMoE(16, num_experts=4, slots_per_expert=2)(3 * torch.randn(1, 48, 16), return_plans=True)[1]


@pytest.fixture(scope="module")
def page(soft, tmp_path_factory):
    out = tmp_path_factory.mktemp("soft") / "page.html"
    dg.view.save_page(soft, out, grid=GRID)
    return out


def test_slot_maps_have_all_patches_and_tell_their_weights(browser, page, soft):
    browser.open(page)
    assert browser.js("Number(document.querySelector('canvas.small').dataset.cells)") == 8 * 48
    box = browser.box("canvas.small")
    weights = soft[0].into[0].reshape(*GRID, 8)
    gap, label = 10, 16  # between maps, above them; all eight stand side by side
    cell = min(24, (box["width"] - gap * (8 - 1)) / 8 / 8)
    for slot, row, column in ((0, 0, 0), (3, 5, 7), (7, 2, 4)):
        browser.move(box["x"] + slot * (8 * cell + gap) + (column + 0.5) * cell, box["y"] + label + (row + 0.5) * cell)
        said = browser.text("#slots-0-said")
        wanted = float(f"{float(weights[row, column, slot]):.3g}")
        assert said.startswith(
            f"expert {slot // 2}, slot {slot % 2}, patch in row {row}, column {column}: weight {wanted}"
        )
    browser.assert_alone()


def test_slot_maps_by_keyboard(browser, page, soft):
    browser.open(page)
    browser.js("document.querySelector('canvas.small').focus()")
    browser.press("ArrowRight", "ArrowRight", "ArrowDown", "PageDown", "ArrowLeft")
    wanted = float(f"{float(soft[0].into[0, 9, 0, 1]):.3g}")
    assert browser.text("#slots-0-said").startswith(f"expert 0, slot 1, patch in row 1, column 1: weight {wanted}")


def test_weights_that_are_no_numbers_are_said_so(browser, soft, tmp_path):
    weights = soft[0].dispatching.clone()
    weights[0, :, 0, 0] = torch.tensor([1.0, *[torch.inf] * 47])
    dg.view.save_page([soft[0]._replace(dispatching=weights)], tmp_path / "page.html", grid=GRID)
    browser.open(tmp_path / "page.html")
    browser.js("document.querySelector('canvas.small').focus()")
    assert "weight 0" in browser.text("#slots-0-said")  # the focus reads where it is
    browser.press("ArrowRight")
    assert browser.text("#slots-0-said") == "expert 0, slot 0, patch in row 0, column 1: weight not a number"
    assert "47 of the weights are not numbers" in browser.text("main")
    browser.assert_alone()


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_of_experts_fit_and_are_alone(browser, page, runs, tmp_path, width):
    assert view_model(runs / "mode", tmp_path / "page.html", "--prompt", TEXT) == 0
    for each in (page, tmp_path / "page.html"):
        browser.open(each, width, dark=width == 390)
        browser.assert_fits()
        browser.assert_alone()
    charts = browser.js(
        "[...document.querySelectorAll('.chart')].map((e) => [e.getAttribute('aria-label'), e.chart.axes[0]._values])"
    )
    assert [names[-1] for title, names in charts if "load of its experts" in title] == ["null", "null"]


def test_tokens_without_a_grid_are_rows(browser, soft, tmp_path):
    dg.view.save_page(soft, tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.js("document.querySelector('canvas.small').focus()")
    browser.press("ArrowDown", "ArrowDown", "ArrowRight")
    assert browser.text("#slots-0-said").startswith("expert 1, slot 0, token 1: weight")
    browser.assert_alone()


def test_maps_of_several_images_lie_each_over_its_own(browser, soft, tmp_path):
    shown = []
    for n in (0, 1):
        image = torch.zeros(3, (6, 18)[n], 8)  # the second of patches three times as high as wide
        image[n] = 1.0  # red, then green
        shown.append((f"image {n}", plan_decisions(soft, None, GRID), image_of(GRID, 0, image)))
    (tmp_path / "page.html").write_text(images_page("images", "", shown))
    browser.open(tmp_path / "page.html")
    pixel = "document.querySelectorAll('canvas.small')[{}].getContext('2d').getImageData(20, 30, 1, 1).data[{}]"
    for n in (0, 1):
        colours = [browser.js(pixel.format(n, colour)) for colour in (0, 1)]
        assert colours[n] > colours[1 - n]
    high = [browser.js(f"document.querySelectorAll('canvas.small')[{n}].clientHeight") for n in (0, 1)]
    maps = browser.js(
        "Math.ceil(9 / Math.min(9, Math.floor((document.querySelector('canvas.small').clientWidth + 10) / 140)))"
    )
    cell = (high[1] - high[0]) / maps / (2 * GRID[0])
    assert high == [maps * (times * GRID[0] * cell + 26) for times in (1, 3)]
    browser.assert_alone()
