"""The page of a text, in a real browser where there is one: what it shows is what the plans say."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import depthgate as dg
from depthgate.cli import main
from depthgate.errors import DepthgateError
from depthgate.routing import Slots
from depthgate.showing import read
from depthgate.view.routes import Routes, routes
from depthgate.view.routes_page import routes_page
from tests.train.tiny import train, write_data

HOSTILE = "<script>alert(1)</script> </script><img src=x onerror=alert(2)> &amp; \x00\x1b \u202eabc\u202c שלום 👩‍👩‍👧 é"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--enable-logging=stderr"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        data = write_data(folder / "text.jsonl")
        assert train(folder / "run", data, 6, "--model.pattern=dense,mod", "--model.layers=4") == 0
        yield folder / "run"


def view(run, out, *more):
    return main(["view", "--model", str(run), "--out", str(out), "--device", "cpu", *more])


def page_data(page: Path):
    found = re.search(r'<script type="application/json" id="routes">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_what_the_plans_say(run, tmp_path):
    text = "the quick brown fox jumps over a lazy dog"
    assert view(run, tmp_path / "page.html", "--prompt", text) == 0
    data = page_data(tmp_path / "page.html")
    model = dg.load(run)
    ids = torch.tensor([model.tokenizer.encode(text)])
    width = model.config.context
    assert len(data["tokens"]) == ids.shape[1] > width
    layer = [i + 1 for i in model.config.routed]
    assert data["layers"] == layer == [2, 4]
    for start in range(0, ids.shape[1], width):
        part = ids[:, start : start + width]
        for causal, name in ((True, "causal"), (False, "top_k")):
            plans = [p for p in model(part, causal=causal).plans if isinstance(p, Slots)]
            for shown, plan in zip(data[name], plans, strict=True):
                chosen = "".join(str(int(yes)) for yes in plan.chosen[0, :, 0].tolist())
                assert shown[start : start + width] == chosen
        plans = [p for p in model(part, causal=True).plans if isinstance(p, Slots)]
        for shown, plan in zip(data["scores"], plans, strict=True):
            scores = plan.scores[0, :, 0].tolist()
            assert shown[start : start + width] == pytest.approx(scores, abs=1e-3)


def test_losses_and_depths(run):
    model = dg.load(run)
    ids = model.tokenizer.encode("over a lazy dog")
    found = read(model, ids)
    logits = model(torch.tensor([ids]), causal=True).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none").tolist()
    assert math.isnan(found.losses[0])
    assert found.losses[1:] == pytest.approx(wanted, abs=1e-4)
    for t, depth in enumerate(found.depths):
        assert depth == 2 + len(found.through(t))
    assert "".join(found.tokens) == "over a lazy dog"


def test_hostile_text_is_shown_as_text(run, tmp_path):
    page = tmp_path / "page.html"
    assert view(run, page, "--prompt", HOSTILE) == 0
    text = page.read_text()
    assert text.count("<script") == 2  # ours: the data and the map
    assert "<img" not in text
    assert "\x00" not in text
    assert "\u202e" not in text
    assert "".join(page_data(page)["tokens"]).startswith("<script>alert(1)</script>")


def test_the_beginning_of_the_held_out_text_and_of_a_file(run, tmp_path, capfd):
    assert view(run, tmp_path / "a.html", "--tokens", "20", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert told["tokens"] == 20
    assert len(told["routed_share"]) == 2
    (tmp_path / "text.txt").write_text("some words " * 9)
    assert view(run, tmp_path / "b.html", "--text", str(tmp_path / "text.txt")) == 0
    assert len(page_data(tmp_path / "b.html")["tokens"]) == 99


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--text", "none.txt"], "none.txt"),
        (["--prompt", "a", "--text", "b"], "leave one out"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "a", "--out", "no/such/folder/page.html"], "name a file in a folder that exists"),
        (["--prompt", "a", "--tokens", "0"], "tokens is 0"),
    ],
)
def test_bad_input_is_named(run, tmp_path, monkeypatch, capfd, options, says):
    monkeypatch.chdir(tmp_path)
    assert main(["view", "--model", str(run), "--device", "cpu", *options]) == 2
    assert says in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run(tmp_path, capfd):
    assert main(["view", "--model", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert str(tmp_path) in capfd.readouterr().err


def test_plans_of_another_model_or_text_are_refused(run):
    model = dg.load(run)
    ids = torch.tensor([model.tokenizer.encode("abcdef")])
    plans = model(ids, causal=True).plans
    real = torch.ones(1, 6, dtype=torch.bool)
    with pytest.raises(DepthgateError, match="of another model"):
        routes(list("abcdef"), [2], 4, plans, plans, real, [0.0] * 6)
    with pytest.raises(DepthgateError, match="of another text"):
        routes(list("abc"), [2, 4], 4, plans, plans, real, [0.0] * 3)


def browser(page: Path, script: str, tmp_path: Path, size="1280,900") -> str:
    """What a script leaves as the page's title, after the page has loaded; no error may be on the console."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt install chromium")
    probe = tmp_path / "probe.html"
    ends = "window.addEventListener('load', () => { document.title = 'RESULT:' + (() => {" + script + "})(); });"
    fails = "window.addEventListener('error', (e) => { document.body.dataset.failed = e.message; });"
    probe.write_text(page.read_text().replace("<head>", f"<head><script>{fails}{ends}</script>", 1))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={size}", "--dump-dom"]
    done = subprocess.run([*command, f"file://{probe}"], capture_output=True, text=True, timeout=120)
    assert "data-failed" not in done.stdout
    assert "CONSOLE" not in done.stderr
    found = re.search(r"<title>RESULT:(.*?)</title>", done.stdout, re.S)
    assert found is not None, done.stdout[:500]
    return found[1]


def large(tokens: int = 4000, layers: int = 8) -> Routes:
    """A text as long as pages must stay smooth with."""
    torch.manual_seed(0)
    scores = [[round(x, 4) for x in torch.randn(tokens).tolist()] for _ in range(layers)]
    causal = [[score > 1.1 for score in row] for row in scores]
    top_k = [[score > 1.2 for score in row] for row in scores]
    gates = [[round(1 + math.tanh(score), 4) if score > 1.1 else 0.0 for score in row] for row in scores]
    words = ["the", " quick", " brown", "\n", " fox", ".", " <b>"]
    texts = [words[i % 7] for i in range(tokens)]
    return Routes(texts, [2 * i + 2 for i in range(layers)], 2 * layers, scores, gates, causal, top_k, [1.0] * tokens)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    page = tmp_path_factory.mktemp("big") / "page.html"
    page.write_text(routes_page("a large text", "about", large()))
    return page


def test_a_large_page_is_small_and_asks_nobody(big):
    text = big.read_text()
    assert len(text.encode()) < 3_000_000
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org)", text)


def test_the_map_has_all_cells_and_hovering_shows_their_numbers(big, tmp_path):
    found = large()
    script = """
      const c = document.getElementById('map'), out = [c.dataset.cells, c.width > 0];
      for (const [t, l] of [[0, 0], [2000, 3], [3999, 7]]) {
        document.getElementById('whole').click();
        document.querySelector(`pre [data-t="${t}"]`).click();
        for (let i = 0; i < 12; i++) document.getElementById('closer').click();
        const box = c.getBoundingClientRect(), from = Number(c.dataset.from), to = Number(c.dataset.to);
        const x = box.left + 44 + (t - from + .5) * (box.width - 44) / (to - from), y = box.top + 22 + (l + .5) * 22;
        c.dispatchEvent(new MouseEvent('mousemove', {clientX: x, clientY: y}));
        out.push(document.getElementById('said').textContent);
      }
      return JSON.stringify(out);"""
    cells, drawn, *said = json.loads(browser(big, script, tmp_path).replace("&lt;", "<").replace("&gt;", ">"))
    assert int(cells) == 4000 * 8
    assert drawn
    for (t, row), line in zip([(0, 0), (2000, 3), (3999, 7)], said, strict=True):
        assert line.startswith(f"Token {t} ")
        assert f"layer {found.layers[row]}:" in line
        assert f"score {found.scores[row][t]}" in line
        assert ("gate" in line) == found.causal[row][t]
        assert ("skipped" in line) != found.causal[row][t]


def test_the_keyboard_moves_and_zooms(big, tmp_path):
    script = """
      const c = document.getElementById('map'), said = document.getElementById('said'), out = [];
      const press = (key) => { c.dispatchEvent(new KeyboardEvent('keydown', {key, cancelable: true})); };
      c.focus(); out.push(document.activeElement === c);
      press('ArrowRight'); press('ArrowRight'); press('ArrowDown'); out.push(said.textContent);
      press('End'); out.push(said.textContent); press('+'); press('+'); press('ArrowLeft'); out.push(said.textContent);
      press('Home'); out.push(said.textContent);
      document.querySelector('pre [data-t=\\"77\\"]').click(); out.push(said.textContent);
      return JSON.stringify(out);"""
    focused, *said = json.loads(browser(big, script, tmp_path).replace("&lt;", "<").replace("&gt;", ">"))
    assert focused
    for line, start in zip(said, ("Token 2 ", "Token 3999 ", "Token 3998 ", "Token 0 ", "Token 77 "), strict=True):
        assert line.startswith(start)
    assert "layer 4:" in said[0]


def test_it_loads_in_two_seconds_and_fits_a_telephone(big, tmp_path):
    script = """
      const t = performance.timing, n = performance.getEntriesByType('navigation')[0];
      return JSON.stringify([n.domComplete, performance.getEntriesByType('resource').length,
        document.documentElement.scrollWidth, window.innerWidth]);"""
    loaded, resources, wide, window = json.loads(browser(big, script, tmp_path, "500,900"))
    assert loaded < 2000
    assert resources == 0
    assert wide <= window


def test_hostile_text_runs_nothing_in_a_browser(run, tmp_path):
    page = tmp_path / "page.html"
    assert view(run, page, "--prompt", HOSTILE) == 0
    script = """
      const spans = [...document.querySelectorAll('pre [data-t]')];
      const text = spans.map((span) => span.textContent).join('').slice(0, 8);
      return JSON.stringify([spans.length, document.images.length, text]);"""
    spans, images, begins = json.loads(browser(page, script, tmp_path).replace("&lt;", "<").replace("&gt;", ">"))
    assert spans == len(page_data(page)["tokens"])
    assert images == 0
    assert begins == "<script>"
