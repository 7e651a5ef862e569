"""The page of a text holds what the plans say; what cannot be shown is named."""

import json
import math
import re

import pytest
import torch

import depthgate as dg
from depthgate.cli import main
from depthgate.routing import Slots, predictor_accuracy
from depthgate.view.routes import read
from depthgate.view.routes_page import text_page
from tests.view.pages import HOSTILE, large, page_data, view_model


def test_the_page_holds_what_the_plans_say(run, tmp_path):
    text = "the quick brown fox jumps over a lazy dog"
    assert view_model(run, tmp_path / "page.html", "--prompt", text) == 0
    data = page_data(tmp_path / "page.html")
    model = dg.load(run)
    ids = torch.tensor([model.tokenizer.encode(text)])
    width = model.config.context
    assert len(data["tokens"]) == ids.shape[1] > width
    assert data["layers"] == [1, 3]
    lowest = []
    for start in range(0, ids.shape[1], width):
        part = ids[:, start : start + width]
        for causal, name in ((True, "causal"), (False, "top_k")):
            plans = [p for p in model(part, causal=causal).plans if isinstance(p, Slots)]
            for shown, plan in zip(data[name], plans, strict=True):
                chosen = "".join(str(int(yes)) for yes in plan.chosen[0, :, 0].tolist())
                assert shown[start : start + width] == chosen
            if not causal:
                lowest.append([plan.scores[0, plan.tokens[0, 0], 0].min().item() for plan in plans])
        plans = [p for p in model(part, causal=True).plans if isinstance(p, Slots)]
        for i, plan in enumerate(plans):
            assert data["scores"][i][start : start + width] == pytest.approx(plan.scores[0, :, 0].tolist(), abs=1e-3)
            gates = dict(zip(plan.tokens[0, 0].tolist(), plan.gates[0, 0].tolist(), strict=True))
            for t, gate in enumerate(data["gates"][i][start : start + width]):
                wanted = gates[t] if plan.chosen[0, t, 0] else 0.0
                assert gate == pytest.approx(wanted, abs=1e-3)
    assert data["lowest"] == pytest.approx(torch.tensor(lowest).mean(0).tolist(), abs=1e-4)  # of each window


def test_losses_depths_and_the_accuracy_of_the_rule(run):
    model = dg.load(run)
    ids = model.tokenizer.encode("over a lazy dog")
    found = read(model, ids)
    assert found.experts == []
    logits = model(torch.tensor([ids]), causal=True).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none").tolist()
    assert math.isnan(found.losses[0])
    assert found.losses[1:] == pytest.approx(wanted, abs=1e-4)
    assert (found.depth, found.names) == (4, [1, 3])
    wanted = [[n for n, layer in zip((1, 3), found.layers, strict=True) if layer.causal[t]] for t in range(len(ids))]
    assert found.through == wanted
    assert "".join(found.tokens) == "over a lazy dog"
    plans = model(torch.tensor([ids])).plans
    right = [float(predictor_accuracy(plan)) for plan in plans]
    assert [layer.shares["rule_accuracy"] for layer in found.layers] == pytest.approx(right)


def test_hostile_text_is_shown_as_text(run, tmp_path):
    page = tmp_path / "page.html"
    assert view_model(run, page, "--prompt", HOSTILE) == 0
    text = page.read_text()
    assert text.count("<script") == 5  # ours: the data, the map, the page's own, uPlot, and what calls it
    for absent in ("<img", "\x00", "\u202e"):
        assert absent not in text
    assert "".join(page_data(page)["tokens"]).startswith("<script>alert(1)</script>")


def test_the_beginning_of_the_held_out_text_and_of_a_file(run, tmp_path, capfd):
    assert view_model(run, tmp_path / "a.html", "--tokens", "20", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert told["tokens"] == 20
    assert len(told["routed_share"]) == len(told["rule_accuracy"]) == 2
    (tmp_path / "text.txt").write_text("some words " * 9)
    assert view_model(run, tmp_path / "b.html", "--text", str(tmp_path / "text.txt")) == 0
    assert len(page_data(tmp_path / "b.html")["tokens"]) == 99
    (tmp_path / "text.txt").write_bytes(b"some \xff\xfe words")
    assert view_model(run, tmp_path / "c.html", "--text", str(tmp_path / "text.txt")) == 0
    assert "2 bytes of the file are not UTF-8: � stands for each." in (tmp_path / "c.html").read_text()
    assert "not UTF-8" not in (tmp_path / "b.html").read_text()
    (tmp_path / "text.txt").write_bytes(b"")
    assert view_model(run, tmp_path / "d.html", "--text", str(tmp_path / "text.txt")) == 2
    assert view_model(run, tmp_path / "d.html", "--prompt", "a") == 0
    assert "reads 1 token of the prompt" in (tmp_path / "d.html").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--text", "none.txt"], "none.txt"),
        (["--prompt", "a", "--text", "b"], "leave one out"),
        (["--prompt", ""], "prompt is empty"),
        (["--images", "."], "is not a run of images"),
        (["--prompt", "a", "--out", "no/such/folder/page.html"], "name a file in a folder that exists"),
        (["--prompt", "a", "--png", "no/such/folder/page.png"], "name a file in a folder that exists"),
        (["--prompt", "a", "--tokens", "0"], "tokens is 0"),
        (["some_run"], "either folders of runs"),
    ],
)
def test_bad_input_is_named(run, tmp_path, monkeypatch, capfd, options, says):
    monkeypatch.chdir(tmp_path)
    assert main(["view", "--model", str(run), "--device", "cpu", *options]) == 2
    assert says in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run(tmp_path, capfd):
    assert view_model(tmp_path, tmp_path / "page.html") == 2
    assert str(tmp_path) in capfd.readouterr().err


def test_what_is_no_number_is_said_so():
    found = large(40, 2)
    one, two = found.layers
    one.scores[3], one.gates[3] = math.nan, math.inf
    two.scores[:] = [math.nan] * 40
    page = text_page("odd", "about", found)
    assert "42 of the scores and gates are not numbers (NaN or infinite)" in page
    known = [score for score in one.scores if score == score]
    assert f"<td>{sum(known) / 39:.3f}</td>" in page  # the mean of the others
    assert "nan" not in page.lower().replace("(nan or infinite)", "")


def test_a_large_page_is_small_and_requests_nothing():
    text = text_page("a large text", "about", large(1000, layers=48))
    assert len(text.encode()) < 780_000
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org|github\.com/leeoniya)", text)
