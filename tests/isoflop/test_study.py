"""Whole studies from the command line: run, run again, killed and gone on with, refused, and on Ray and submitit."""

import csv
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from depthgate.cli import main
from depthgate.data.token_file import prepare
from depthgate.flops import forward_flops, training_flops
from depthgate.isoflop.cell import text_file
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.fit import AGAIN
from depthgate.isoflop.grid import Grid, learning_rate
from depthgate.isoflop.study import Study
from depthgate.loading import load
from depthgate.train.evaluate import measure
from tests.train.tiny import write_data
from tests.view.chromium import Browser

HALF = '{"study": "KEY", "cell": "a", "loss_causal": null}\n'
NUMBERS = ("budget", "params", "seed", "steps", "loss", "loss_causal", "seconds", "flops", "forward_flops_per_token")
WHOLE = {
    **dict.fromkeys(("study", "cell", "variant", "device"), "KEY"),
    **dict.fromkeys(NUMBERS, 1.0),
    "routed_share": [],
}
LACKING = [
    ("results.jsonl", json.dumps({name: value for name, value in WHOLE.items() if name != lacks} | wrong) + "\n")
    for lacks, wrong in [("steps", {}), ("device", {}), ("routed_share", {}), ("", {"experts_per_token": "few"})]
]
# Budgets that all sizes come near to within few steps of 32 tokens.
BUDGETS = (1.38e8, 1.73e8)
GRID = [
    "--calibrate",
    "false",
    "--budgets",
    "1.38e8,1.73e8",
    "--sizes",
    "3",
    "--context",
    "32",
    "--batch",
    "1",
    "--measured",
    "500",
    "--device",
    "cpu",
]
NEEDED = {"budget", "variant", "params", "flops_per_token", "tokens", "loss", "loss_causal", "seed", "seconds", "lr"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("isoflop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        write_data(folder / "text.jsonl")
        yield folder


def study(home, out, *more, at_once="1"):
    torch.set_num_threads(1)
    options = [*GRID, "--parallel", at_once, *more]
    return main(["isoflop", "--data", str(home / "text.jsonl"), "--out", str(out), *options])


@pytest.fixture(scope="module")
def finished(home):
    """A study that was run to its end, two cells at a time. No test changes it."""
    said = io.StringIO()
    with redirect_stderr(said):
        assert study(home, home / "whole", at_once="2") == 0
    (home / "said.txt").write_text(said.getvalue())
    return home / "whole"


@pytest.fixture
def own(finished, tmp_path):
    """A copy of it that a test may change."""
    shutil.copytree(finished, tmp_path / "own")
    return tmp_path / "own"


def config_of(home, out, **more):
    options = {"budgets": "1.38e8,1.73e8", "sizes": 3, "context": 32, "batch": 1, "calibrate": False, **more}
    return IsoflopConfig(data=str(home / "text.jsonl"), out=str(out), device="cpu", **options)


def cells_of(home, out, **more):
    return Grid(config_of(home, out, **more), "bytes", 257, "cpu", {}).cells()


def rows(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_whole_study(finished):
    found = rows(finished)
    assert len(found) == 2 * 2 * 3
    for row in found:
        assert row.keys() >= NEEDED
        assert abs(row["flops_per_token"] * row["tokens"] / row["budget"] - 1) <= 0.03
        assert row["flops"] == pytest.approx(row["flops_per_token"] * row["tokens"])
        assert row["loss_causal"] > 0
        assert (row["loss"] == row["loss_causal"]) == (row["variant"] == "dense")
    with (finished / "results.csv").open() as file:
        assert [int(row["params"]) for row in csv.DictReader(file)] == [row["params"] for row in found]
    page = (finished / "report.html").read_text()
    assert page.count("<tr>") > 16
    assert "mod against dense at 1.38e08 FLOPs" in page
    assert 'src="' not in page
    assert "The best cell of each variant" in page
    assert "<th>passes over the text</th><th>held-out tokens</th>" in re.sub(r"<th[^>]*>", "<th>", page)
    few = "12 of 12 cells are measured on fewer than 5,000 held-out tokens ("
    assert few in page
    assert f"depthgate: warning: {few}" in (finished.parent / "said.txt").read_text()
    assert 'class="token"' in page or 'class="skipped"' in page  # the routed text
    for name in ("curves.png", "curves.svg"):
        assert (finished / name).stat().st_size > 5000


def test_its_report_opens_in_a_browser(finished, tmp_path):
    assert main(["view", str(finished), "--out", str(tmp_path / "page.html")]) == 0
    browser = Browser()
    try:
        for width in (390, 1280):
            browser.assert_report(tmp_path / "page.html", width)
    finally:
        browser.close()


def test_the_rows_are_those_of_the_grid(home, finished):
    cells = cells_of(home, finished)
    assert {cell.params for cell in cells} == {row["params"] for row in rows(finished)}
    for cell in cells:
        (row,) = [r for r in rows(finished) if (r["budget"], r["params"]) == (cell.budget, cell.params)]
        assert row["flops_per_token"] == pytest.approx(training_flops(cell.training.model))
        metrics = (cell.folder / "metrics.jsonl").read_text().splitlines()
        assert len(metrics) == row["steps"]
        model = cell.training.model
        taken = replace(model, capacity=fmean(row["routed_share"]) or 1e-6) if model.routed else model
        assert row["forward_flops_per_token"] == pytest.approx(forward_flops(taken))


@pytest.mark.parametrize("options", ["null_experts=48:top_k=2:balance_loss=0", "pattern=mode+mode_staged"])
def test_forward_flops_are_those_of_experts_that_computed(home, tmp_path, options):
    """Null choices of staged layers are not counted, nor is what experts that choose would take on average."""
    out, variant = tmp_path / "staged", f"mode_staged:{options}"
    assert study(home, out, "--variants", variant, "--budgets", "1.38e8", "--sizes", "1") == 0
    ((cell,), (row,)) = cells_of(home, out, variants=variant, budgets="1.38e8", sizes=1), rows(out)
    model, held_out = cell.training.model, prepare(cell.training.data, (run := load(cell.folder)).tokenizer).validation
    found = measure(run, held_out, cell.training.batch, 500)
    first, *middle, last = found["experts_per_token"]  # of layers 1 and 3, which are staged, and perhaps of 2
    entered = found["routed_share"]
    computed = (first * entered[0] + sum(middle) + last * entered[1]) / (sum(entered) + len(middle))
    assert row["experts_per_token"] == pytest.approx(computed)
    assert abs(computed - model.top_k * 16 / (16 + model.null_experts)) > 0.02  # what is assumed if nobody looks
    taken = replace(model, capacity=fmean(entered))
    share = computed / model.top_k
    assert row["forward_flops_per_token"] == pytest.approx(forward_flops(taken, expert_share=share))


def test_running_it_again_trains_nothing(home, own, capfd):
    before = {path: path.stat().st_mtime_ns for path in own.glob("cells/*/metrics.jsonl")}
    text = (own / "results.jsonl").read_text()
    capfd.readouterr()
    assert study(home, own, "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert told["cells"] == 12
    assert {(best["budget"], best["variant"]) for best in told["best"]} == {
        (budget, name) for budget in BUDGETS for name in ("dense", "mod")
    }
    assert len(told["verdicts"]) == 2
    assert {path: path.stat().st_mtime_ns for path in own.glob("cells/*/metrics.jsonl")} == before
    assert (own / "results.jsonl").read_text() == text


def test_a_dry_run_trains_nothing(home, tmp_path, capfd):
    assert study(home, tmp_path / "dry", "--dry-run", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert len(told["cells"]) == 12
    assert told["estimated_seconds"] > 0
    assert not (tmp_path / "dry").exists()
    assert study(home, tmp_path / "dry", "--dry-run") == 0
    said = capfd.readouterr().out
    assert "nothing was trained" in said
    assert "seconds are FLOPs at one speed" in said
    assert study(home, tmp_path / "dry", "--dry-run", "--lr_sweep", "true", "--more_sizes", "2") == 0
    said = capfd.readouterr().out
    assert "a sweep of learning rates" in said
    assert "up to 2 for each curve" in said


def test_a_dry_run_for_gpus_that_are_elsewhere(home, tmp_path, capfd):
    away = ["--launcher", "ray", "--gpus", "1", "--device", "cuda", "--dry-run"]
    assert study(home, tmp_path / "dry", *away) == 0
    assert ("unknown" in capfd.readouterr().out) is not torch.cuda.is_available()


def test_studies_of_other_contexts_are_others(home):
    data = str(home / "text.jsonl")
    keys = [Study(IsoflopConfig(data=data, budgets=budgets, device="cpu")).key for budgets in ("1e12", "2e12", "1e14")]
    assert keys[0] == keys[1] != keys[2]  # from 1e14 on a sequence is longer


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--budgets", "1.38e8"], "--extend"),
        (["--context", "64"], "context: 32 there, 64 here"),
        (["--variants", "dense,mod,moe"], "--extend"),
        (["--lr", "0.001"], "lr"),
    ],
)
def test_another_study_in_the_same_folder_is_refused(home, finished, capfd, options, says):
    before = (finished / "results.jsonl").read_bytes(), (finished / "grid.json").read_bytes()
    assert study(home, finished, *options) == 2
    error = capfd.readouterr().err
    assert "another study" in error
    assert says in error
    assert before == ((finished / "results.jsonl").read_bytes(), (finished / "grid.json").read_bytes())


def test_foreign_results_and_other_files_are_refused(home, own, tmp_path, capfd):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("kept")
    assert study(home, tmp_path / "notes") == 2
    assert "holds other files" in capfd.readouterr().err
    results = own / "results.jsonl"
    results.write_text(results.read_text().replace('"study": "', '"study": "x'))
    assert study(home, own) == 2
    assert f"{results} belongs to another study" in capfd.readouterr().err


def test_a_study_grows_when_asked_to(home, own):
    before = rows(own)
    assert study(home, own, "--variants", "random", "--budgets", "1.38e8", "--extend", "true") == 0
    assert len(rows(own)) == 15
    assert [row for row in rows(own) if row["variant"] != "random"] == before


def test_killed_and_gone_on_with(home, finished, tmp_path):
    out = tmp_path / "killed"
    data = ["--data", str(home / "text.jsonl"), "--out", str(out)]
    dense = ["--variants", "dense", "--budgets", "1.38e8"]
    command = [sys.executable, "-m", "depthgate", "isoflop", *data, *GRID, *dense, "--parallel", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    while process.poll() is None and not list(out.glob("cells/*/result.json")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/result.json")}
    assert 1 <= len(done) < 3
    moved = tmp_path / "moved"  # the same text in another place is the same text
    moved.mkdir()
    shutil.copy(home / "text.jsonl", moved)
    assert study(moved, out, *dense) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    whole = {(r["budget"], r["params"]): r["loss_causal"] for r in rows(finished)}
    assert len(rows(out)) == 3
    for row in rows(out):
        assert row["loss_causal"] == pytest.approx(whole[row["budget"], row["params"]], rel=1e-3)


def test_no_worker_outlives_a_study_that_is_terminated(home, tmp_path):
    out = tmp_path / "terminated"
    thread = signal_after(2, out, signal.SIGTERM)
    assert study(home, out, "--budgets", "1e12", at_once="2") == 130  # minutes of training
    thread.join()
    assert multiprocessing.active_children() == []
    assert len(list(out.glob("cells/*/step-*"))) >= 2  # each saved where it was


def test_no_worker_outlives_a_study_that_is_killed(home, tmp_path):
    out = tmp_path / "orphans"
    data = ["--data", str(home / "text.jsonl"), "--out", str(out)]
    command = [sys.executable, "-m", "depthgate", "isoflop", *data, *GRID, "--budgets", "1e12", "--parallel", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not len(list(out.glob("cells/*/metrics.jsonl"))) >= 2:
        time.sleep(0.05)
    process.kill()
    process.wait(60)
    last = time.monotonic() + 60
    while (left := _members(process.pid)) and time.monotonic() < last:
        time.sleep(0.2)
    assert left == []


def signal_after(count, out, how):
    """Send this process a signal once so many cells have written metrics."""

    def wait():
        while sum("\n" in path.read_text() for path in out.glob("cells/*/metrics.jsonl")) < count:
            time.sleep(0.02)
        os.kill(os.getpid(), how)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def _members(session: int) -> list[str]:
    """Processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its_session, *_ = path.read_text().rpartition(")")[2].split()
            if int(its_session) == session and state != "Z":
                found.append(path.parent.name)
    return found


def test_a_worker_that_dies_takes_no_other_cell_with_it(home, tmp_path, capfd):
    out = tmp_path / "dying"
    with Study(config_of(home, out, budgets="1.38e8", variants="dense", measured=500)).opened():
        bad = cells_of(home, out, budgets="1.38e8", variants="dense")[1]
        text_file(bad, "log").mkdir(parents=True)  # so that its process ends before it does anything
    capfd.readouterr()
    assert study(home, out, "--budgets", "1.38e8", "--variants", "dense", at_once="2") == 2
    assert "1 of 3 cells failed" in capfd.readouterr().err
    assert len(rows(out)) == 2


def test_a_damaged_last_checkpoint_is_trained_again(home, own):
    result = sorted(own.glob("cells/1.73e08-dense-*/result.json"))[0]
    before = json.loads(result.read_text())
    result.unlink()
    newest = result.parent / f"step-{before['steps']}" / "model.safetensors"
    newest.write_bytes(newest.read_bytes() + b"x")
    assert study(home, own) == 0
    assert json.loads(result.read_text())["loss_causal"] == pytest.approx(before["loss_causal"], rel=1e-4)


@pytest.mark.parametrize("content", [None, "", '{"step": 4, "lo'])
def test_a_cell_whose_metrics_are_damaged_is_named_with_the_remedy(home, own, capfd, content):
    result = sorted(own.glob("cells/1.73e08-dense-*/result.json"))[0]
    folder, metrics = result.parent, result.parent / "metrics.jsonl"
    result.unlink()
    metrics.unlink() if content is None else metrics.write_text(content)
    assert study(home, own) == 2
    assert f"{metrics} is damaged: delete its folder" in capfd.readouterr().err
    shutil.rmtree(folder)
    assert study(home, own) == 0
    assert result.is_file()


def test_a_report_needs_no_checkpoints_and_keeps_rows_it_is_not_asked_for(home, own):
    for folder in own.glob("cells/*/step-*"):
        shutil.rmtree(folder)
    count = len(rows(own))
    assert study(home, own, "--variants", "dense", "--extend", "true") == 0
    assert len(rows(own)) == count
    assert "What the best routed model computed" not in (own / "report.html").read_text()


def test_rows_outlive_the_folders_of_their_cells(home, own):
    shutil.rmtree(own / "cells")
    before = (own / "results.jsonl").read_bytes()
    assert study(home, own) == 0
    assert (own / "results.jsonl").read_bytes() == before
    assert not list(own.glob("cells/*/config.json"))


def test_a_folder_of_an_older_version_is_refused_with_a_remedy(home, own, capfd):
    """grid.json without a key, and rows whose key was made of other options."""
    known = json.loads((own / "grid.json").read_text())
    (own / "grid.json").write_text(json.dumps({k: v for k, v in known.items() if k not in ("study", "commands")}))
    before = (own / "results.jsonl").read_text().replace(known["study"], "0123456789abcdef")
    (own / "results.jsonl").write_text(before)
    assert study(home, own) == 2
    assert "choose another --out, or delete it" in capfd.readouterr().err
    assert (own / "results.jsonl").read_text() == before


def test_all_commands_of_a_study_are_told(home, own):
    for _ in range(2):
        assert study(home, own, "--variants", "dense", "--extend", "true") == 0
    page = (own / "report.html").read_text()
    assert page.count("Command: ") == len(json.loads((own / "grid.json").read_text())["commands"]) == 2


def test_a_study_that_never_began_leaves_its_folder_free(home, tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    small = ["--budgets", "1.38e8", "--sizes", "1", "--variants", "dense", "--context", "32", "--device", "cpu"]
    out = str(tmp_path / "out")
    assert main(["isoflop", "--data", str(tmp_path / "short.txt"), "--out", out, *small]) == 2
    assert main(["isoflop", "--data", str(home / "text.jsonl"), "--out", out, *small]) == 0


def test_a_validation_text_may_move_and_not_change(home, tmp_path, capfd):
    small = ["--budgets", "1.38e8", "--sizes", "1", "--variants", "dense", "--validation"]
    for name, text in (
        ("here.txt", "some words " * 99),
        ("there.txt", "some words " * 99),
        ("other.txt", "more " * 99),
    ):
        (tmp_path / name).write_text(text)
    assert study(home, tmp_path / "out", *small, str(tmp_path / "here.txt")) == 0
    (tmp_path / "here.txt").unlink()
    assert study(home, tmp_path / "out", *small, str(tmp_path / "there.txt")) == 0
    assert study(home, tmp_path / "out", *small, str(tmp_path / "other.txt")) == 2
    assert "validation_hash" in capfd.readouterr().err


def test_a_report_of_cells_that_ran_elsewhere_says_where(home, own):
    for path in (own / "results.jsonl", *own.glob("cells/*/result.json")):
        elsewhere = path.read_text().replace('"device": "cpu"', '"device": "cuda"')
        path.write_text(re.sub('"machine": "[^"]*"', '"machine": "another one"', elsewhere))
    assert study(home, own) == 0
    assert {(row["device"], row["machine"]) for row in rows(own)} == {("cuda", "another one")}
    assert f"{len(rows(own))} of {len(rows(own))} cells ran on: another one." in (own / "report.html").read_text()


def test_sizes_around_another_center_are_added(home, own):
    before = [row for row in rows(own) if (row["budget"], row["variant"]) == (1.38e8, "dense")]
    more = ["--budgets", "1.38e8", "--variants", "dense", "--sizes", "1", "--center", "320"]
    assert study(home, own, *more) == 2
    assert study(home, own, *more, "--extend", "true") == 0
    after = [row for row in rows(own) if (row["budget"], row["variant"]) == (1.38e8, "dense")]
    assert after[:-1] == before
    assert after[-1]["params"] > before[-1]["params"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("grid.json", content) for content in ("[]", "{", '{"commands": 5}', '{"commands": "ab"}', '{"study": 5}')),
        ("results.jsonl", "{}\n"),
        ("results.jsonl", HALF),
        *LACKING,
    ],
)
def test_damaged_files_of_a_study_are_named(home, own, capfd, name, content):
    (own / name).write_text(content.replace("KEY", rows(own)[0]["study"]))
    assert study(home, own) == 2
    assert re.search(f"{name} (is|belongs to another study, or is) damaged: choose another", capfd.readouterr().err)


def test_a_row_that_was_cut_off_is_built_again(home, own, capfd):
    path, before = own / "results.jsonl", (own / "results.jsonl").read_text()
    for end in (5, len(before.splitlines()[-1])):
        path.write_text(before[:-end])
        assert study(home, own) == 0
        assert path.read_text() == before
        assert f"{path}: its last line is cut off" in capfd.readouterr().err
    path.write_text(before[:-1])  # the line is whole
    assert study(home, own) == 0
    assert "cut off" not in capfd.readouterr().err


def test_a_cell_without_a_whole_checkpoint_is_named_with_the_remedy(home, own, capfd):
    result = sorted(own.glob("cells/1.73e08-dense-*/result.json"))[0]
    result.unlink()
    for weights in result.parent.glob("step-*/model.safetensors"):
        weights.write_bytes(weights.read_bytes() + b"x")
    assert study(home, own) == 2
    assert f"no complete checkpoint in {result.parent}: delete that folder to train again" in capfd.readouterr().err
    shutil.rmtree(result.parent)
    assert study(home, own) == 0
    assert result.is_file()


@pytest.mark.parametrize("scale", ["-0.01", "NaN", "Infinity", "0", "true", "1.5", '"much"', "null"])
def test_damaged_rates_are_named_with_the_remedy(home, tmp_path, capfd, scale):
    out, one = tmp_path / "out", ["--variants", "dense", "--lr_sweep", "true", "--budgets", "1.38e8", "--dry_run"]
    config = config_of(home, out, variants="dense", budgets="1.38e8", measured=500, lr_sweep=True)
    (home / "made").mkdir(exist_ok=True)
    out.mkdir()
    (out / "grid.json").write_text(json.dumps(Study(replace(config, out=str(home / "made"))).options))
    (out / "rates.json").write_text(f'{{"dense": {scale}}}')
    assert study(home, out, *one) == 2
    said = capfd.readouterr().err
    assert f"{out / 'rates.json'} is damaged" in said
    assert "delete it to have the rates found again" in said
    (out / "rates.json").write_text('{"dense": 0.01}')
    assert study(home, out, *one) == 0


def test_a_text_shorter_than_a_sequence_is_refused_before_any_cell(home, tmp_path, capfd):
    (tmp_path / "short.txt").write_text("fourteen bytes")
    out = tmp_path / "short"
    assert main(["isoflop", "--data", str(tmp_path / "short.txt"), "--out", str(out), *GRID]) == 2
    assert "give more text, or a smaller context" in capfd.readouterr().err
    assert not (out / "cells").exists()


def test_ctrl_c_stops_the_study_and_leaves_it_to_go_on(home, tmp_path, capfd):
    out = tmp_path / "stopped"
    thread = signal_after(1, out, signal.SIGINT)
    assert study(home, out, "--budgets", "1e12") == 130  # minutes of training
    thread.join()
    assert "the same command goes on from here" in capfd.readouterr().err
    assert len(list(out.glob("cells/*/step-*"))) == 1  # the cell that it was in is saved
    assert not (out / "report.html").exists()


def test_a_cell_that_fails_does_not_stop_the_others_and_is_tried_again(home, own, capfd):
    bad, good = cells_of(home, own)[:2]
    shutil.rmtree(bad.folder)
    (good.folder / "result.json").unlink()
    bad.folder.write_text("in the way")
    capfd.readouterr()
    assert study(home, own) == 2
    said = capfd.readouterr().err
    assert f"{bad.name} failed" in said
    assert "1 of 12 cells failed; the same command tries them again" in said
    left_out = f"Left out as failed: 1 cell of {bad.variant}."
    assert left_out in (own / "report.html").read_text()
    assert "which is not a folder" in text_file(bad, "error").read_text()
    assert (good.folder / "result.json").exists()
    bad.folder.unlink()
    assert study(home, own) == 0
    assert len(rows(own)) == 12
    assert left_out not in (own / "report.html").read_text()
    assert not text_file(bad, "error").exists()


def test_seeds_and_sizes_are_added_where_they_are_asked_for(home, tmp_path):
    out = tmp_path / "more"
    more = ["--more_sizes", "2", "--seeds_at_minimum", "2"]
    assert study(home, out, "--variants", "dense", "--budgets", "1.38e8", *more) == 0
    sizes = sorted({row["params"] for row in rows(out)})
    assert 3 <= len(sizes) <= 5
    again = {row["params"] for row in rows(out) if row["seed"] == 1}
    losses = {row["params"]: row["loss_causal"] for row in rows(out) if row["seed"] == 0}
    best = min(losses, key=losses.get)
    assert best in again


def test_a_sweep_finds_rates(home, tmp_path):
    out = tmp_path / "sweep"
    assert study(home, out, "--variants", "dense", "--lr_sweep", "true", "--budgets", "1.38e8") == 0
    fitted = json.loads((out / "rates.json").read_text())
    for row in rows(out):
        assert row["lr"] == pytest.approx(learning_rate("dense", row["dim"], fitted), rel=1e-2)
    tried = [json.loads(path.read_text()) for path in out.glob("sweep/*/result.json")]
    for dim in {row["dim"] for row in tried}:
        losses = {row["lr"]: row["loss_causal"] for row in tried if row["dim"] == dim}
        best = min(losses, key=losses.get)
        assert len(losses) >= 3
        assert min(losses) < best < max(losses) or len(losses) == 9


def test_later_variants_are_swept_at_the_budget_of_the_first_sweep(home, tmp_path):
    """Here rates.json, of an older version, does not name it."""
    out, shared = tmp_path / "out", ["--sizes", "1", "--lr_sweep", "true", "--extend", "true", "--budgets"]
    assert study(home, out, *shared, "1.73e8", "--variants", "dense") == 0
    rates = json.loads((out / "rates.json").read_text())
    assert rates.pop("budget") == 1.73e8
    (out / "rates.json").write_text(json.dumps(rates))
    assert study(home, out, *shared, "1.38e8,1.73e8", "--variants", "dense,moe") == 0
    assert json.loads((out / "rates.json").read_text())["budget"] == 1.73e8
    swept = [json.loads(path.read_text()) for path in out.glob("sweep/*/result.json")]
    assert {(row["variant"], row["budget"]) for row in swept} == {(name, 1.73e8) for name in ("dense", "moe")}


def test_dense_has_a_second_seed_that_calibrates_the_study(home, tmp_path, capsys):
    out = tmp_path / "calibrated"
    assert study(home, out, "--calibrate", "true", "--budgets", "1.38e8", "--json", at_once="2") == 0
    told = json.loads(capsys.readouterr().out)
    assert Counter((row["variant"], row["seed"]) for row in rows(out)) == {
        **{("dense", 0): 3, ("dense", 1): 3, ("mod", 0): 3}
    }
    (check,) = told["calibration"]
    assert check["variant"] == AGAIN
    assert [verdict["variant"] for verdict in told["verdicts"]] == ["mod"]


@pytest.mark.parametrize("launcher", ["ray", "submitit"])
def test_other_launchers_give_the_same_rows(home, finished, tmp_path, launcher):
    pytest.importorskip(launcher, reason=f"{launcher} is not installed: pip install 'depthgate[ray,sweep]'")
    out = tmp_path / launcher
    one = ["--sizes", "1", "--budgets", "1.38e8", "--variants", "mod"]
    assert study(home, out, "--launcher", launcher, *one) == 0
    whole = {(r["budget"], r["params"]): r for r in rows(finished)}
    assert [row["variant"] for row in rows(out)] == ["mod"]
    for row in rows(out):
        assert row["loss_causal"] == pytest.approx(whole[row["budget"], row["params"]]["loss_causal"], rel=1e-3)


def test_a_launcher_that_is_not_installed_is_named(home, tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert study(home, tmp_path / "none", "--launcher", "ray") == 2
    assert "pip install 'depthgate[ray]'" in capfd.readouterr().err


def test_a_missing_text_is_refused_before_a_folder_is_made(tmp_path, capfd):
    out = tmp_path / "out"
    assert main(["isoflop", "--data", str(tmp_path / "none.txt"), "--out", str(out), *GRID]) == 2
    assert "none.txt" in capfd.readouterr().err
    assert not Path(out).exists()
