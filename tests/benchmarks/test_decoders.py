"""benchmarks/engine.py and benchmarks/train.py on models of a few thousand weights."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import engine
import measure
import train
from depthgate.errors import DepthgateError
from depthgate.flops import training_flops

ROOT = Path(__file__).parents[2]
STEPS = "--widths 128 --layers 2 --seq 16 --batch 2 --vocab 64 --steps 1 --rounds 1 --device cpu --dtype float32"
STEPS = [*STEPS.split(), "--no-compile", "--json"]


def report(module: Any, options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    module.run(module.options().parse_args(options))
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", "config", "rows"}
    return found


def test_random_weights_are_measured_at_their_configured_share(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--contexts", "64", "--batches", "1,4", "--steps", "24", "--transformers", "--json"]
    options += ["--out", str(tmp_path / "rows.jsonl")]
    rows = {(row["model"], row["batch"]): row for row in report(engine, options, capsys)["rows"]}
    names = ("dense", "mod", "transformers, dynamic cache", "transformers, static cache")
    assert set(rows) == {(name, batch) for name in names for batch in (1, 4)}
    assert 0.02 < rows["mod", 4]["entered"] < 0.3
    assert rows["dense", 1]["first_token_ms"] > 0
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    assert 0 < rows["dense", 1]["bytes"] < rows["dense", 4]["bytes"]
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["tokens_per_second"] for row in written] == [row["tokens_per_second"] for row in rows.values()]
    assert rows["mod", 1]["speed_ratio"] == rows["mod", 1]["tokens_per_second"] / rows["dense", 1]["tokens_per_second"]


def test_rows_that_came_in_time_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--contexts", "64", "--batches", "1", "--seconds", "0.001", "--json"]
    assert report(engine, options, capsys)["rows"] == []


def test_a_wrong_engine_gets_no_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine.dg.generate

    def wrong(*given: Any, **how: Any) -> Any:
        found = right(*given, **how)
        found[0].tokens[-1] += how["engine"]
        return found

    monkeypatch.setattr(engine.dg, "generate", wrong)
    with pytest.raises(DepthgateError, match="not those of the plain path"):
        engine.run(engine.options().parse_args(["--contexts", "64", "--json"]))
    assert capsys.readouterr().out == ""


def test_steps_are_timed_with_their_flops(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(train, STEPS, capsys)
    dense, mod, mode = found["rows"]
    assert [row["model"] for row in found["rows"]] == ["dense", "MoD", "MoDE"]
    config = train.options().parse_args(STEPS)
    assert mod["flops"] == 2 * 16 * training_flops(train._model(128, config, "MoD"))
    assert mod["flop_ratio"] == mod["flops"] / dense["flops"] < 1
    assert mode["flop_ratio"] == pytest.approx(1, rel=0.02)  # experts are as wide as makes them cost the same
    assert mod["time_over_flops"] == pytest.approx(mod["ms"] / dense["ms"] / mod["flop_ratio"])
    assert found["machine"]["matmul_tflop_per_s"] > 0


def test_a_wrong_step_gets_no_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_plain_figures", lambda *_: [(1.0, 1.0)] * 2)
    with pytest.raises(DepthgateError, match="wrong answer, not timed: dense"):
        train.run(train.options().parse_args(STEPS))
    assert all("ms" not in row and "error" in row for row in json.loads(capsys.readouterr().out)["rows"])


def test_llama_without_transformers_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    with pytest.raises(SystemExit) as caught:
        measure.main(engine.run, engine.options().parse_args(["--transformers", "--json"]))
    captured = capsys.readouterr()
    assert (caught.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert "pip install 'depthgate[hf]'" in captured.err


def test_scripts_load_where_the_command_line_is_not_installed() -> None:
    missing = ("jsonargparse", "docstring_parser", "yaml", "transformers")
    code = (
        f"import sys, runpy; sys.modules.update(dict.fromkeys({missing})); runpy.run_path('train.py', None, '__main__')"
    )
    options = {"cwd": ROOT / "benchmarks", "capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", code, "--help"], **options)
    assert done.returncode == 0, done.stderr
    assert "--widths" in done.stdout
