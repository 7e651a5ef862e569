"""`depthgate bench`: right figures, one object, and no time for a wrong answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import depthgate as dg
from depthgate.cache import LayerCache
from depthgate.cli import main
from tests.train.tiny import TEXT, train, write_data

BENCH = ["bench", "--new-tokens=8", "--repeats=1", "--device=cpu"]
_KV = 2 * 2 * 8 * 4  # bytes of a token in a layer of the tiny run: keys and values, 2 heads of 8, float32


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that was really trained, a little, and its dense form; the home they were trained in."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        data = write_data(folder / "text.jsonl")
        options = ["--model.context=48", "--model.capacity=0.5", "--lr=0.02"]
        assert train(folder / "mod", data, 60, "--model.pattern=dense,mod", *options) == 0
        assert train(folder / "dense", data, 1, "--model.pattern=dense", *options) == 0
        (folder / "read.py").write_text(TEXT)
        patch.chdir(folder)
        yield folder


def measured(capsys: pytest.CaptureFixture[str], *options: str) -> dict[tuple[str, int, int], dict[str, Any]]:
    capsys.readouterr()
    assert main([*BENCH, "--json", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"machine", "config", "rows"}
    both = {path: [row for row in report["rows"] if row["path"] == path] for path in ("plain", "engine")}
    found = [{(row["model"], row["batch"], row["context"]): row for row in rows} for rows in both.values()]
    assert found[0].keys() == found[1].keys()
    for plain, engine in zip(both["plain"], both["engine"], strict=True):
        assert engine["kv_bytes"] > 0
        assert min(engine["bandwidth_share"], plain["bandwidth_share"]) > 0
    return found[0]


def test_runs_are_measured_as_they_are(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The memory of keys and values is that of the tokens which a run's own uncached continuation routes."""
    rows = measured(capsys, "--models=dense,mod", "--data=read.py", "--batch=1,3", "--context=24")
    assert set(rows) == {(name, batch, 24) for name in ("dense", "mod") for batch in (1, 3)}
    result = dg.generate(dg.load("mod"), TEXT[:25], max_new_tokens=8, temperature=0, cache=False)[0]
    assert 0 < result.routed[0] < 32  # the test is about a model that skips
    for batch in (1, 3):
        dense, mod = rows["dense", batch, 24], rows["mod", batch, 24]
        # 24 tokens, then room for 30, by eights; one place more takes what is not stored
        assert dense["kv_bytes"] == 2 * batch * (32 + 1) * _KV
        if batch == 1:  # the text that `result` goes on from
            stored = mod["kv_bytes"] / _KV - (32 + 1) - 1  # places of the routed layer
            assert result.routed[0] <= stored < 1.25 * result.routed[0] + 8
        for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "memory_bytes", "kv_bytes"):
            assert mod["ratios"][name] == mod[name] / dense[name]
            assert dense["ratios"][name] == 1
            assert mod[name] > 0
        weights = 4 * sum(p.numel() for p in dg.load("dense").parameters())
        assert dense["memory_bytes"] == weights + 2 * batch * (24 + 8 + 1) * _KV


def test_held_out_text_is_read_as_far_as_the_context_goes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(capsys, "--models=mod", "--batch=2")
    assert set(rows) == {(name, 2, 48 - 8) for name in ("dense twin", "mod")}  # a run alone is compared with its twin
    assert rows["mod", 2, 40]["kv_bytes"] < rows["dense twin", 2, 40]["kv_bytes"]
    assert main([*BENCH, "--models=dense,mod", "--batch=1", "--dtype=bfloat16"]) == 0
    table = capsys.readouterr().out
    shown = [line.split()[:2] for line in table.splitlines() if " 40 " in line]
    assert shown == [[name, path] for name in ("dense", "mod") for path in ("plain", "engine")]
    assert table.count("1.00x") >= 4


def test_pages_of_the_engine_are_counted_by_hand(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page holds a context of 48 tokens of a layer: every row has one in each of two layers."""
    capsys.readouterr()
    assert main([*BENCH, "--json", "--models=dense", "--data=read.py", "--batch=3", "--context=24"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["kv_bytes"] for row in rows if row["path"] == "engine"] == [3 * 2 * 48 * _KV]


def test_a_cache_that_is_wrong_gets_no_time(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LayerCache.append
    monkeypatch.setattr(LayerCache, "append", lambda self, k, v, *at: real(self, k, -3 * v, *at))
    assert main([*BENCH, "--json", "--models=mod"]) == 2
    captured = capsys.readouterr()
    wrong = {"error": "logits with and without a cache differ"}
    assert json.loads(captured.out)["rows"] == [{"model": name, **wrong} for name in ("dense twin", "mod")]
    assert "wrong answer, not timed: dense twin, mod" in captured.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--models=mod", "--context=24,41"], "a model has room for 48"),
        (["--models=mod", "--new-tokens=48"], "a model has room for 48"),
        (["--models=mod", "--context=0"], "context is 0"),
        (["--models=mod", "--batch=a,b"], "batch is 'a,b'"),
        (["--models=mod", "--data=short.txt"], "the text has 6 tokens"),
        (["--models=nowhere"], "nowhere is not a folder"),
        (["--models=mod,"], "models is 'mod,': a name is empty"),
        (["--models=mod", "--dtype=int8"], "auto, bfloat16, float32"),
        ([], "models"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    home: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("short.txt").write_text("short")
    capsys.readouterr()
    assert main([*BENCH, "--json", *options]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
