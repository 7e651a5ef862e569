"""The demo from the command line to its report, and the page it is written with."""

import json
import math
import re
import signal
import subprocess
import sys
import time
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import depthgate as dg
from depthgate.cli import main
from depthgate.commands.eval import evaluate
from depthgate.config import EvalConfig
from depthgate.data.batches import windows
from depthgate.demo import measure, report, runs
from depthgate.demo.config import DemoConfig
from depthgate.demo.results import measured
from depthgate.errors import DepthgateError
from depthgate.routing import Slots
from depthgate.view.page import routed_text
from depthgate.view.routes import held_out_tokens, read

# Reads as markup, has characters of several bytes, and nothing about it is Python.
HOSTILE = "<script>alert('&amp;')</script> <b onclick=\"x\"> é ☃ \x00\x1b\t\u202e </pre></html> "
STEPS = 10


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cache of our own, samples that are short, and a text of hostile lines."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")  # of children
        patch.setattr(measure, "SAMPLED", 20)
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


def figures(home: Path, out: str, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert demo(home, out, "--json", *options) == 0
    result = json.loads(capsys.readouterr().out)  # one object and nothing else
    assert result["report"] == str(home / out / "report.html")
    rows: list[dict[str, Any]] = result["rows"]
    assert all(row.pop("train_seconds") > 0 for row in rows)
    return rows


def test_last_line_is_the_report_which_stands_alone(
    home: Path, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "sample", lambda *_: HOSTILE)  # the worst that a model could write
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("step-*/*")}
    (finished / "report.html").unlink()
    assert demo(home, finished.name) == 0  # finished before: nothing is trained again
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("step-*/*")} == before
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == str(finished / "report.html")
    text = Path(last).read_text()
    for name in ("tiny-mod", "tiny-dense"):
        assert f'<th scope="col">{name}</th>' in text
        assert f"<h3>{name}</h3>" in text
    body = text[text.index("<main>") : text.index("</main>")]
    for absent in ("http://", "https://", "<script", "<b ", "<folder>", "<i>&", "\0", "\x1b", "\u202e", "url(", "src="):
        assert absent not in body
    assert "&lt;folder&gt;" in text
    assert text.count("</pre>") == 3  # the coloured text and two samples
    assert text.count("</html>") == 1


def test_one_seed_gives_one_result_and_an_interrupted_demo_the_same(
    home: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = figures(home, finished.name, capsys)
    command = [sys.executable, "-m", "depthgate", "demo", "--out", str(home / "cut"), "--steps", str(STEPS)]
    child = subprocess.Popen(
        [*command, "--data", str(home / "<i>&.jsonl")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = home / "cut" / "mod" / "metrics.jsonl"
    while child.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 1):
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    out, said = child.communicate()
    assert child.returncode == 130, said
    assert out == ""
    assert "the same command goes on from there" in said
    assert not (home / "cut" / "report.html").exists()
    assert figures(home, "cut", capsys) == a

    c = figures(home, "other", capsys, "--seed", "1")
    assert [row["nats_per_byte"] for row in a] != [row["nats_per_byte"] for row in c]
    assert demo(home, "other", "--seed", "2") == 2
    assert "seed: 1 there, 2 here" in capsys.readouterr().err


def test_equal_flops(home: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mod, dense = figures(home, finished.name, capsys)
    assert mod["steps"] == STEPS
    for row in (mod, dense):
        assert row["flops"] == pytest.approx(row["flops_per_token"] * row["tokens"])
        assert row["tokens"] == row["steps"] * 8 * 256
    assert dense["flops"] == pytest.approx(mod["flops"], rel=0.01)
    for steps in (46, 100, DemoConfig().steps, 12_345):
        a, b = (runs.total_flops(config) for config in runs.twins(DemoConfig(steps=steps)).values())
        assert b == pytest.approx(a, rel=0.01)
    # One step cannot be matched; the number that the message names can.
    with pytest.raises(DepthgateError, match=r"steps is 1: .* use --steps") as caught:
        runs.twins(DemoConfig(steps=1))
    named = int(str(caught.value).split()[-1])
    assert set(runs.twins(DemoConfig(steps=named))) == {"tiny-mod", "tiny-dense"}


SPAN = re.compile(
    r'<span class="(token|skipped)(?: part)?"[^>]* title="([^"]*): (?:no routed layer|layers ([\d, ]+))">'
)
PART = re.compile(r"byte (\d) of \d of (\S+)")


def test_coloured_tokens_agree_with_the_plans(home: Path, finished: Path) -> None:
    torch.set_num_threads(1)
    model = dg.load(finished / "mod")
    config = runs.twins(DemoConfig(out=str(finished), data=str(home / "<i>&.jsonl"), steps=STEPS))["tiny-mod"]
    ids = held_out_tokens(measure.held_out(config, model), 768)
    rows = torch.tensor(ids).view(3, 256)
    assert len(ids) == 768
    # Real text: the beginning of a document.
    texts = [json.loads(line)["text"] for line in (home / "<i>&.jsonl").read_text().splitlines()]
    assert any(text.encode().startswith(bytes(ids)) for text in texts)

    def check(page: str) -> int:
        plans = model(rows, causal=True).plans
        chosen = [plan.chosen.flatten().tolist() for plan in plans if isinstance(plan, Slots)]
        spans = SPAN.findall(page)
        assert len(spans) == len(ids)
        assert len(chosen) == 4
        for n, (kind, shown, layers) in enumerate(spans):
            through = [layer for layer, at in zip((2, 4, 6, 8), chosen, strict=True) if at[n]]
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

    check((finished / "report.html").read_text())
    # After ten steps the causal rule routes next to nothing: have it route about half, and look again.
    for _ in range(4):
        for i, plan in enumerate(model(rows, causal=True).plans):
            model.layers[2 * i + 1].router.rule.down.bias.data -= plan.decision.median()
    seen, _, _ = read(model, ids)
    assert 768 < check(routed_text(seen.tokens, seen.through, seen.layers)) < 3 * 768


def test_losses_are_those_of_eval(home: Path, finished: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = dg.load(finished / "mod")
    config = runs.twins(DemoConfig(out=str(finished), data=str(home / "<i>&.jsonl"), steps=STEPS))["tiny-mod"]
    documents = measure.held_out(config, model)
    with (tmp_path / "held.jsonl").open("w") as file:
        for start, stop in pairwise(documents.bounds.tolist()):
            ids = windows(documents, [start], stop - start).tokens[0, :-1].tolist()
            file.write(json.dumps({"text": model.tokenizer.decode(ids)}) + "\n")
    found = evaluate(EvalConfig(str(finished / "mod"), str(tmp_path / "held.jsonl"), device="cpu"))
    figures = measured("tiny-mod", config).figures
    assert figures["held_out_tokens"] == found["tokens"]
    assert figures["bits_per_byte"] == pytest.approx(found["bits_per_byte"], rel=1e-5)
    assert figures["bits_per_byte_top_k"] == pytest.approx(found["bits_per_byte_top_k"], rel=1e-5)
    assert figures["nats_per_byte"] == pytest.approx(found["bits_per_byte"] * math.log(2), rel=1e-5)
    assert figures["bits_per_byte"] != figures["bits_per_byte_top_k"]


def test_the_page_takes_no_side() -> None:
    rows = [{"model": "tiny-mod", "nats_per_byte": 1.5}, {"model": "tiny-dense", "nats_per_byte": 1.4}]
    assert report.verdict(rows) == "Here tiny-dense has the lower causal loss: 1.400 against 1.500 nats a byte"
    rows[1]["nats_per_byte"] = 1.6
    assert report.verdict(rows) == "Here tiny-mod has the lower causal loss: 1.500 against 1.600 nats a byte"
    rows[1]["nats_per_byte"] = 1.5001
    assert report.verdict(rows) == "Here both have the same causal loss: 1.500 nats a byte"


def test_smoothing_by_hand() -> None:
    nan = float("nan")
    assert report.smoothed([(1, 4.0), (2, nan), (3, 2.0)]) == [(1, 4.0), (2, 4.0), (3, 3.0)]
    line = [(float(x), float(x)) for x in range(100)]
    assert report.smoothed(line)[50] == (50.0, 40.5)  # the mean of 31 to 50


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
