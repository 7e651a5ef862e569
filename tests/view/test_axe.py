"""Names, roles, keyboard and contrast of every kind of page, by axe-core. Where that lies is said in $AXE:

npm install --prefix /tmp axe-core && AXE=/tmp/node_modules/axe-core/axe.min.js pytest tests/view/test_axe.py
"""

import os
from pathlib import Path

import pytest
import torch

import depthgate as dg
from depthgate.isoflop.fit import curves
from depthgate.isoflop.report import _fitted
from depthgate.view import page as pages
from tests.view.pages import view, view_model

AXE = os.environ.get("AXE")
FOUND = "axe.run(document).then((told) => told.violations.map(({ impact, id, nodes }) => [impact, id, nodes[0].html]))"


def cells(variant, losses):
    shape = {"budget": 1e12, "variant": variant, "seed": 0, "forward_flops_per_token": 1.0}
    (curve,) = curves([{**shape, "params": 10**n, "loss_causal": loss} for n, loss in enumerate(losses, 3)])
    return curve


@pytest.mark.skipif(AXE is None, reason="the environment has no AXE, the path of axe.min.js")
def test_axe_finds_nothing_on_any_page_in_any_window_or_light(browser, runs, tmp_path):
    assert view_model(runs / "mod", tmp_path / "text.html") == 0
    assert view_model(runs / "integrated", tmp_path / "experts.html") == 0
    assert view(runs / "mod", runs / "mode", "--out", tmp_path / "runs.html") == 0
    model = torch.nn.Sequential(dg.MixtureOfDepths(torch.nn.Linear(8, 8), 8, 0.5, keep=1), dg.SoftMoE(8, 2))
    with dg.record(model) as plans:
        model(torch.randn(1, 13, 8))
    plans.save_page(tmp_path / "patches.html", grid=(3, 4), prefix=1, image=torch.rand(3, 24, 32))
    plans.save_page(tmp_path / "plans.html", causal_rule=True)
    sections = _fitted([cells("dense", [3.0, 2.0, 3.1]), cells("mod", [2.9, 2.1, 2.2])], [])
    wide = pages.table([*"abcdef"], [[*"abcdef"], [*"123456"]], "wide")
    text = pages.routed_text([*"ab c\n"], [[], [1], [1, 2], [1, 2, 3], []], 3, "expert", given=2)
    (tmp_path / "study.html").write_text(pages.page("study", sections | {"Table": wide, "Text": text}))
    for page in sorted(tmp_path.glob("*.html")):
        for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
            browser.open(page, width, dark=dark)
            browser.js(f"{Path(AXE).read_text()};0")
            assert (page.name, width, dark, browser.js(FOUND)) == (page.name, width, dark, [])
