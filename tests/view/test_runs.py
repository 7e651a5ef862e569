"""`depthgate view RUN_DIR...`: the page holds what metrics.jsonl says; what cannot be read is left out and named."""

import json
import math
import os
import re
import shutil
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from depthgate.errors import DepthgateError
from depthgate.view.runs import charts, curve, read_runs, runs_page, unit, write_report
from tests.train.tiny import rows
from tests.view.pages import a_run, view


@pytest.fixture
def copy(run, tmp_path):
    """A run that may be spoilt."""
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def test_missing_steps_are_noted_and_a_folder_of_runs_is_named(tmp_path):
    row = {"tokens": 1, "flops": 1.0, "seconds": 1.0, "loss": 2.0}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines = [json.dumps({**row, "step": step}) + "\n" for step in (1, 2, 5, 6, 9)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    assert "4 steps of the run have no line in metrics.jsonl" in read_runs([tmp_path / "a"])[0].notes
    with pytest.raises(DepthgateError, match=f"name some of them: {tmp_path / 'a'}, {tmp_path / 'b'}"):
        read_runs([tmp_path])


def test_rows_are_read_as_they_were_written_and_resumes_are_known(run):
    (found,) = read_runs([str(run)])
    wanted = rows(run)
    assert [row["step"] for row in found.rows] == list(range(1, 13))
    for mine, row in zip(found.rows, wanted, strict=True):
        assert {key: row[key] for key in mine if key not in ("resumed", "step")} == {
            key: mine[key] for key in mine if key not in ("resumed", "step")
        }
    assert [row["step"] for row in wanted if row.get("resumed")] == [6]
    assert found.notes == []
    told = found.summary
    assert told["resumed_after"] == [5]
    assert told["steps_asked"] == 12
    assert told["loss"] == pytest.approx(sum(row["loss"] for row in wanted) / 12)


def test_curves_by_hand():
    run = a_run()
    assert curve(run, "tokens", "loss")[0] == [(100.0 * n, 10.0 - n) for n in range(1, 11)]
    points, size = curve(run, "step", "loss", most=4)
    assert size == 3
    assert points == [(3.0, 8.0), (6.0, 5.0), (10.0, 1.5)]  # means of three, and of the last four, at the last of them
    run.rows[1]["loss"] = None
    assert curve(run, "step", "loss", most=4)[0][0] == (3.0, 8.0)  # of 9 and 7
    assert math.isnan(curve(run, "step", "loss")[0][1][1])
    assert curve(run, "step", "routed_share")[0][0] == (1.0, 0.375)
    assert curve(run, "step", "routed_share/1")[0][0] == (1.0, 0.5)
    assert unit([run], "tokens") == (1.0, "tokens")
    assert unit([a_run(steps=30)], "tokens") == (1e3, "thousand tokens")
    assert unit([run], "flops") == (1e9, "GFLOPs")
    assert unit([a_run(steps=60)], "seconds") == (60, "minutes")
    assert run.summary["bad_steps"] == 1
    assert [chart["title"] for chart in charts([run], "step")] == ["Training loss", "Routed share", "Throughput"]
    for n in (4, 8):
        run.rows[n - 1] |= {"held_out_loss": 3.0 - n / 8, "causal_share": [0.1, 0.3], "agreement": [0.5, 0.7]}
    _, held_out, share, _ = charts([run], "step")
    assert held_out["series"] == {"a": [(4, 2.5), (8, 2.0)]}
    assert share["series"] == {"layer 0": [(4, 0.1), (8, 0.1)], "layer 1": [(4, 0.3), (8, 0.3)]}
    run.asked.update(model={"pattern": "dense,mod", "first": None, "layers": 4})
    assert list(charts([run], "step")[2]["series"]) == ["layer 1", "layer 3"]  # as the model counts them
    assert charts([run, a_run("b")], "step")[2]["series"]["a"] == [(4, 0.2), (8, 0.2)]
    assert (run.summary["held_out_loss"], run.summary["agreement"]) == (2.0, [0.5, 0.7])
    assert "<td>2.0000</td>" in runs_page([run])
    assert "<td>0.60</td>" in runs_page([run])
    assert "Agreement: of the tokens" in runs_page([run])
    for absent in ("held-out loss", "Agreement:"):  # no column of nothing, and no word on it
        assert absent not in runs_page([a_run()])


def test_a_row_cut_short_is_left_out_and_named(copy, tmp_path, capfd):
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "loss": 1.')
    assert view(copy, "--out", tmp_path / "page.html", "--json") == 0
    told = json.loads(capfd.readouterr().out)["runs"][0]
    assert told["step"] == 12
    assert told["notes"] == ["the last line of metrics.jsonl is cut short, and left out"]
    assert "the last line of metrics.jsonl is cut short" in (tmp_path / "page.html").read_text()


def test_lines_that_are_no_rows_are_left_out_and_counted(copy):
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    strange = [b"\xff\xfe\n", b"[1]\n", b"null\n", b'{"step": "x"}\n', lines[2], b"[" * 5000 + b"\n", b'{"step":NaN}\n']
    path.write_bytes(b"".join([*lines[:4], *strange, *lines[4:]]))
    (copy / "config.json").write_text("{")
    (found,) = read_runs([str(copy)])
    assert [row["step"] for row in found.rows] == list(range(1, 13))
    assert "7 of the lines of metrics.jsonl cannot be read, and are left out: 5, 6, 7, 8, 9, ..." in found.notes
    assert any("config.json cannot be read" in note for note in found.notes)
    assert "unknown" in runs_page([found])


def test_odd_numbers_do_no_harm(copy, tmp_path, capfd):
    row = json.loads((copy / "metrics.jsonl").read_text().splitlines()[0]) | {"tokens": 512.0}
    losses = [2.5, 2.5000000000000004, 1e308, -1e308, 2.5]
    lines = [json.dumps(row | {"step": n, "loss": loss}) for n, loss in enumerate(losses, 1)]
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    config = json.loads((copy / "config.json").read_text()) | {"steps": "sixty"}
    (copy / "config.json").write_text(json.dumps(config))
    assert view(copy, "--out", tmp_path / "page.html", "--png", tmp_path / "a.png") == 0
    capfd.readouterr()
    assert view(copy, "--out", tmp_path / "page.html", "--json") == 0
    told = json.loads(capfd.readouterr().out)["runs"][0]
    assert (told["step"], told["tokens"], told["loss"], told["steps_asked"]) == (5, 512, 2.5, None)
    assert told["notes"] == [
        "2 of the lines of metrics.jsonl cannot be read, and are left out: 3, 4",
        "config.json does not say in a whole number how many steps were asked for",
    ]
    assert "left out: 3, 4" in (tmp_path / "page.html").read_text()


def test_links_are_written_through_and_devices_are_left_alone(run, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.html").symlink_to("folder/page.html")
    os.mkfifo("pipe")
    for _ in range(2):  # where the file is not there yet, and where it is
        assert view(run, "--out", "link.html") == 0
        assert (tmp_path / "link.html").is_symlink()
        assert (tmp_path / "folder/page.html").read_text().startswith("<!doctype html>")
    (tmp_path / "zero").symlink_to("/dev/null")
    outs = [("--out", odd) for odd in ("pipe", "/dev/null", "zero", "/dev/stdout", "/proc/self/fd/1")]
    for option, odd in [*outs, ("--png", "pipe"), ("--svg", "pipe")]:
        assert view(run, option, odd) == 2
        assert f"out is {odd}: it is not a regular file" in capfd.readouterr().err
    assert view(run, "--png", "a", "--svg", "./a") == 2
    assert "two outputs have the same name" in capfd.readouterr().err
    assert (tmp_path / "pipe").is_fifo()
    assert Path("/dev/null").is_char_device()
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "link.html", "pipe", "zero"}


def test_a_page_that_nobody_has_named_replaces_pages_alone(run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.html"
    page.write_text("<p>mine</p>")
    assert view(run) == 2
    said = "page.html is there, and is not a page of depthgate: name another file"
    assert said in capfd.readouterr().err
    assert page.read_text() == "<p>mine</p>"
    assert view(run, "--out", page) == 0  # named
    written = page.read_text()
    assert view(run, "--title", "another") == 0  # ours
    assert "another" in page.read_text() != written


def test_a_run_without_a_step_has_a_page(copy, tmp_path):
    (copy / "metrics.jsonl").write_text("")
    assert view(copy, "--out", tmp_path / "page.html", "--png", tmp_path / "a.png") == 0
    assert "no step is recorded yet" in (tmp_path / "page.html").read_text()


def test_runs_have_names_that_tell_them_apart(copy, tmp_path):
    for name in ("x/run", "y/run"):
        shutil.copytree(copy, tmp_path / name)
    found = read_runs([str(tmp_path / "x/run"), str(tmp_path / "y/run")])
    assert [run.name for run in found] == ["x/run", "y/run"]
    with pytest.raises(DepthgateError, match="named twice"):
        read_runs([str(copy), str(copy)])


def test_a_run_that_has_just_started_has_a_report_and_no_page(copy):
    (copy / "metrics.jsonl").unlink()
    with pytest.raises(DepthgateError, match="is not a run: it has no metrics"):
        read_runs([str(copy)])
    write_report(copy, live=True)
    assert "no step is recorded yet" in (copy / "report.html").read_text()


def test_names_of_folders_are_text_everywhere(copy, tmp_path, capfd):
    """Turned round, with an end of line, beyond XML, beyond UTF-8, and longer than any legend."""
    odd = ["_אב\u202eb\n", "\x01<b>--&$\\frac", "\udcff", "n" * 200, "n" * 100 + "m" + "n" * 99]
    for name in odd:
        shutil.copytree(copy, tmp_path / name)
    outs = ["--out", tmp_path / "page.html", "--svg", tmp_path / "a.svg", "--png", tmp_path / "\udcfe.png"]
    assert view(*(tmp_path / name for name in odd), *outs) == 0
    printed = capfd.readouterr().out
    assert len(printed.splitlines()) == 3
    page = (tmp_path / "page.html").read_text()
    shown = ["\u2068_אב\\u202eb↵\u2069", "␁&lt;b&gt;--&amp;$\\frac", "\\xff", "n" * 39 + "…" + "n" * 40]
    title = ", ".join([*shown, f"{shown[3]} (5)"])
    for part in ("<title>depthgate view: {}</title>", "<h1>depthgate view: {}</h1>"):
        assert part.format(title) in page
    for name in shown:
        assert f'<th scope="row">{name}</th>' in page
    drawn = [json.loads(unescape(chart)) for chart in re.findall(r'data-chart="(.*?)"', page)]
    assert {unescape(name) for name in shown} < {series["name"] for chart in drawn for series in chart["series"]}
    for absent in ("\u202e", "\x01", "<b>"):
        assert absent not in page
    ElementTree.parse(tmp_path / "a.svg")  # well-formed
    assert (tmp_path / "\udcfe.png").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["empty"], "empty is not a run: it has no metrics.jsonl"),
        (["absent"], "absent is not a folder"),
        (["run", "--out", "no/such/page.html"], "name a file in a folder that exists"),
        (["run", "--out", "empty"], "name a file"),
        (["run", "--prompt", "a"], "text, prompt and images are for --model"),
        (["run", "--images", "empty"], "text, prompt and images are for --model"),
        ([], "either folders of runs"),
        (["study"], "study has no report.html yet"),
        (["study", "run"], "study is a study of `depthgate isoflop`: give it alone"),
    ],
)
def test_bad_input_is_named(copy, tmp_path, monkeypatch, capfd, words, says):
    monkeypatch.chdir(tmp_path)
    copy.rename("run")
    for name in ("empty", "study"):
        (tmp_path / name).mkdir()
    (tmp_path / "study" / "grid.json").write_text("{}")
    assert view(*words) == 2
    assert says in capfd.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "empty", "study"}


def test_a_study_opens_its_report(tmp_path, capfd):
    study = tmp_path / "study"
    study.mkdir()
    (study / "grid.json").write_text("{}")
    (study / "report.html").write_text("<!doctype html>")
    assert view(study) == 0
    assert capfd.readouterr().out.strip() == str(study / "report.html")
    assert view(study, "--out", tmp_path / "copy.html", "--json") == 0
    assert json.loads(capfd.readouterr().out) == {"page": str(tmp_path / "copy.html")}
    assert (tmp_path / "copy.html").read_text() == "<!doctype html>"
    assert view(study, "--png", tmp_path / "a.png") == 2


def test_a_page_of_long_runs_stays_small_and_hostile_names_are_text():
    evil = "</title><script>alert(1)</script>"
    page = runs_page([a_run(evil, 4_800), a_run("b", 2_000), a_run("c", 10)])
    assert len(page.encode()) < 1_000_000
    assert page.count("<script") == 3  # ours: the page's own, uPlot, and what calls it
    assert "Each point is the mean of 20 steps." in page


def test_a_finetuned_model_says_what_it_was_asked_in_a_file_of_its_own(copy):
    """Its config.json is that of a Hugging Face model."""
    (copy / "config.json").write_text('{"model_type": "llama"}')
    (copy / "finetune.json").write_text('{"model": "some/routed", "steps": 12}')
    (found,) = read_runs([str(copy)])
    assert (found.notes, found.model, found.summary["steps_asked"]) == ([], "some/routed", 12)
