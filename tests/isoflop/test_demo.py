"""The demo from the command line to its report. It is run with presets that are smaller still."""

import json
import os
import re
import signal
import threading
import time
from html import unescape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import depthgate as dg
from depthgate.cli import main
from depthgate.commands import demo as command
from depthgate.commands.eval import evaluate
from depthgate.config import DemoConfig, EvalConfig
from depthgate.data.batches import windows
from depthgate.errors import DepthgateError
from depthgate.flops import training_flops
from depthgate.isoflop import report
from depthgate.isoflop.study import Study
from depthgate.loading import text_of
from depthgate.recipes import PRESETS, train_config
from depthgate.routing import Slots
from depthgate.view.page import routed_text
from depthgate.view.routes import held_out_tokens, read
from tests.view.chromium import Browser

# Reads as markup, has characters of several bytes, and nothing about it is Python.
HOSTILE = "<script>alert('&amp;')</script> <b onclick=\"x\"> é ☃ \x00\x1b\t\u202e </pre></html> "
SMALL = {"model.dim": 32, "model.heads": 2, "model.context": 64, "batch": 2}
STEPS = 60
REAL = {name: PRESETS[name] for name in command.MODELS}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cache of our own, small models, short samples, and a text of hostile lines."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(command, "SAMPLED", 20)
        for name, options in REAL.items():
            patch.setitem(PRESETS, name, {**options, **SMALL})
        lines = [f"{HOSTILE}{i} {i * i}\n" for i in range(300)]
        texts = ["".join(lines[start : start + 10]) for start in range(0, 300, 10)]
        (folder / "<i>&.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        yield folder


def demo(home: Path, out: str, *options: str, steps: int = STEPS) -> int:
    data = str(home / "<i>&.jsonl")
    torch.set_num_threads(1)  # two wait for each other on a busy machine; the next test starts with two again
    return main(["demo", "--out", str(home / out), "--data", data, "--steps", str(steps), *options])


@pytest.fixture(scope="module")
def finished(home: Path) -> Path:
    """A demo that has been run."""
    assert demo(home, "a long <folder> & name") == 0
    return home / "a long <folder> & name"


@pytest.fixture(scope="module")
def mod(finished: Path) -> Path:
    """The run of its Mixture-of-Depths model."""
    return next(finished.glob("cells/*tiny-mod-*/"))


def figures(home: Path, out: str, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert demo(home, out, "--json", *options) == 0
    result = json.loads(capsys.readouterr().out)  # one object and nothing else
    assert result["report"] == str(home / out / "report.html")
    rows: list[dict[str, Any]] = result["rows"]
    assert all(row.pop("seconds") > 0 for row in rows)
    return sorted(rows, key=lambda row: -row["layers"])


def test_last_line_is_the_report_which_stands_alone(
    home: Path, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The worst that a model could write.
    monkeypatch.setattr(report, "generate", lambda *_, **__: [SimpleNamespace(tokens=list(HOSTILE.encode()))])
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("step-*/*")}
    (finished / "report.html").unlink()
    assert demo(home, finished.name) == 0  # finished before: nothing is trained again
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("step-*/*")} == before
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == str(finished / "report.html")
    text = Path(last).read_text()
    for name in command.MODELS:
        assert f'<th scope="col">{name}</th>' in text
        for line in ("training", "held out, causal"):
            assert f"{name}, {line}" in text
    body = text[text.index("<main>") : text.index("</main>")]
    for absent in ("http://", "https://", "<script", "<b ", "<folder>", "<i>&", "\0", "\x1b", "\u202e", "url(", "src="):
        assert absent not in body
    assert "&lt;folder&gt;" in text
    assert text.count("</pre>") == 2  # the text that the best model wrote, and the one that it read
    rows = [json.loads(line) for line in (finished / "results.jsonl").read_text().splitlines()]
    best = min(rows, key=lambda row: row["loss_causal"])
    assert (finished / "best").resolve() == (finished / "cells" / best["cell"]).resolve()
    assert f"<p>{best['variant']} goes on from the first 64 tokens" in text
    wrote, read_text = re.findall(r'<pre class="long".*?</pre>', text, re.S)
    assert wrote.count("data-t=") == 64 + len(HOSTILE.encode())
    assert wrote.count("data-t=", 0, wrote.index("</b>")) == 64
    assert 'class="token' in read_text
    assert text.count("</html>") == 1
    browser = Browser()
    try:
        for width in (390, 1280):
            browser.assert_report(finished / "report.html", width)
    finally:
        browser.close()


def test_one_seed_gives_one_result_and_an_interrupted_demo_the_same(
    home: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = figures(home, finished.name, capsys)
    out = home / "cut"

    def interrupt() -> None:
        while not any(path.read_text().count("\n") > 1 for path in out.glob("cells/*/metrics.jsonl")):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert demo(home, "cut") == 130
    thread.join()
    said = capsys.readouterr()
    assert said.out == ""
    assert "the same command goes on from here" in said.err
    assert not (out / "report.html").exists()
    b = figures(home, "cut", capsys)
    assert b == a
    samples = re.compile(r"<h2>What the best model wrote</h2>.*?</section>", re.S)
    assert samples.findall((out / "report.html").read_text()) == samples.findall((finished / "report.html").read_text())

    c = figures(home, "other", capsys, "--seed", "1")
    assert [row["loss_causal"] for row in a] != [row["loss_causal"] for row in c]
    assert demo(home, "other", "--seed", "2") == 2
    assert "seed: 1 there, 2 here" in capsys.readouterr().err


def test_equal_flops(home: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["variant"]: row for row in figures(home, finished.name, capsys)}
    assert set(found) == set(command.MODELS)
    assert found["tiny-dense"]["steps"] == STEPS
    for row in found.values():
        assert row["flops"] == pytest.approx(row["flops_per_token"] * row["tokens"])
        assert row["tokens"] == row["steps"] * 2 * 64
        assert len(row["held_out"]) == 4
        assert row["held_out"][-1] == [row["flops"], row["loss_causal"]]
        assert row["flops"] == pytest.approx(found["tiny-dense"]["flops"], rel=0.01)


def test_equal_flops_of_the_presets_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where nothing is: a demo of before may lie in runs/demo
    for name, options in REAL.items():
        monkeypatch.setitem(PRESETS, name, options)
    for steps in (61, 100, DemoConfig().steps, 12_345):
        cells = Study(command.study_config(DemoConfig(steps=steps))).cells
        assert [cell.variant for cell in cells] == list(command.MODELS)
        assert cells[0].training.steps == steps
        assert all(cell.flops == pytest.approx(cells[0].flops, rel=0.01) for cell in cells)
        for cell in cells:
            preset = train_config(cell.variant)
            assert cell.training.model == preset.model
            assert (cell.training.batch, cell.training.lr) == (preset.batch, preset.lr)
            tokens = cell.training.steps * preset.batch * preset.model.context
            assert cell.flops == pytest.approx(training_flops(preset.model) * tokens)
    # One step cannot be matched; the number that the message names can.
    with pytest.raises(DepthgateError, match=r"steps is 1: .* use --steps") as caught:
        command.study_config(DemoConfig(steps=1))
    named = int(str(caught.value).split()[-1])
    assert command.study_config(DemoConfig(steps=named)).variants == "tiny-dense,tiny-mod,tiny-mode"


SPAN = re.compile(
    r'<span class="(token|skipped)(?: part)?"[^>]* title="([^"]*): (?:no routed layer|layers ([\d, ]+))">'
)
PART = re.compile(r"byte (\d) of \d of (\S+)")


def test_coloured_tokens_agree_with_the_plans(home: Path, finished: Path, mod: Path) -> None:
    torch.set_num_threads(1)
    model = dg.load(mod)
    ids = held_out_tokens(text_of(mod, model.tokenizer), 768)
    rows = torch.tensor(ids).view(12, 64)
    # Real text: the beginning of a document.
    texts = [json.loads(line)["text"] for line in (home / "<i>&.jsonl").read_text().splitlines()]
    assert any(text.encode().startswith(bytes(ids)) for text in texts)

    def check(page: str) -> int:
        plans = model(rows, causal=True).plans
        chosen = [plan.chosen.flatten().tolist() for plan in plans if isinstance(plan, Slots)]
        spans = SPAN.findall(page)
        assert len(spans) == len(ids)
        assert len(chosen) == 2
        for n, (kind, shown, layers) in enumerate(spans):
            through = [layer for layer, at in zip((1, 3), chosen, strict=True) if at[n]]
            assert [int(layer) for layer in layers.split(", ") if layer] == through
            assert (kind == "token") == bool(through)
            if 32 < ids[n] < 127:
                assert unescape(shown) == chr(ids[n])
            elif ids[n] > 127 and (part := PART.search(shown)):
                char = chr(int(part[2][2:], 16)) if part[2].startswith("\\u") else part[2]
                assert char.encode()[int(part[1]) - 1] == ids[n]
            elif ids[n] > 127:  # of a character that is cut
                assert shown == f"\\x{ids[n]:02x}"
        return sum(map(sum, chosen))

    seen = read(model, ids)
    check(routed_text(seen.tokens, seen.through, 2, "routed layer"))
    # After a few steps the causal rule routes next to nothing: have it route about half, and look again.
    for _ in range(4):
        for i, plan in enumerate(model(rows, causal=True).plans):
            rule = model.layers[2 * i + 1].router.rule  # a little off the median: no decision lies within rounding of 0
            rule.average += (plan.decision.median() - 1e-4) * rule.weight
    seen = read(model, ids)
    assert 384 < check(routed_text(seen.tokens, seen.through, 2, "routed layer")) < 1.5 * 768


def test_losses_are_those_of_eval(finished: Path, mod: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = dg.load(mod)
    documents = text_of(mod, model.tokenizer)
    with (tmp_path / "held.jsonl").open("w") as file:
        for start, stop in pairwise(documents.bounds.tolist()):
            ids = windows(documents, [start], stop - start).tokens[0, :-1].tolist()
            file.write(json.dumps({"text": model.tokenizer.decode(ids)}) + "\n")
    found = evaluate(EvalConfig(str(mod), str(tmp_path / "held.jsonl"), device="cpu"))
    rows = [json.loads(line) for line in (finished / "results.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["variant"] == "tiny-mod"]
    assert row["measured_tokens"] == found["tokens"]
    assert row["bits_per_byte"] == pytest.approx(found["bits_per_byte"], rel=1e-5)
    assert row["loss_causal"] == pytest.approx(found["nats_per_token"], rel=1e-5)
    assert row["loss"] == pytest.approx(found["nats_per_token_top_k"], rel=1e-5)
    assert row["loss"] != row["loss_causal"]


def test_refused_before_training(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "file").write_text("")
    for out, options, said in (
        ("file/out", [], f"cannot write {home / 'file' / 'out'}"),
        ("out", ["--data", "nowhere.txt"], "nowhere.txt"),
    ):
        assert demo(home, out, *options) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert "loss" not in captured.err  # the progress bar of training has it
        assert captured.out == ""
