"""`depthgate bench layers` and `bench generate`: right figures, one object, and no time for a wrong answer."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import depthgate as dg
from depthgate.bench import answers, layers
from depthgate.cache import LayerCache
from depthgate.cli import main
from depthgate.layers.ffn import swiglu_hidden
from tests.train.tiny import TEXT, train, write_data

B, T, D, E = 2, 16, 32, 8
SMALL = ["bench", "layers", "--dims", str(D), "--batch", str(B), "--seq", str(T), "--repeats", "1", "--json"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Thousands of tiny operators: on a busy machine threads that wait for each other take minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _rows(out: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["layer"], row.get("pass", "")): row for row in json.loads(out)["rows"]}


def test_flops_of_every_layer_are_those_worked_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    assert set(json.loads(out)) == {"machine", "config", "rows"}
    assert json.loads(out)["config"]["dims"] == str(D)
    rows = _rows(out)
    hidden = swiglu_hidden(D)

    def linear(tokens: int) -> int:
        return 2 * B * tokens * (3 * D * D + D * D + 3 * D * hidden)

    def product(tokens: int) -> int:  # one of attention's two
        return 2 * B * tokens * tokens * D

    slots = E * (T // E)
    mlp = 2 * B * T * 2 * 4 * D * D
    moe = 2 * B * T * (D * E + 2 * 3 * D * hidden)  # the router, and two experts a token
    soft = 2 * B * (3 * T * D * slots + slots * 2 * 4 * D * D)  # scores, dispatch and combine, and the experts
    forward = {"dense block": linear(T) + 2 * product(T), "dense MLP": mlp, "MoE token choice": moe}
    forward |= {"MoE expert choice": moe, "Soft MoE": soft}
    both = {name: 3 * flops for name, flops in forward.items()}
    both["dense block"] += product(T)  # attention's backward computes its weights again
    for name, k in (("MoD 12.5%", 2), ("MoD 50%", 8), ("MoD 100%", 16)):
        router = 2 * B * T * D
        forward[name] = linear(k) + 2 * product(k) + router
        both[name] = 3 * (linear(k) + router) + 7 * product(k)
    for name in forward:
        assert rows[name, "forward"]["flops"] == forward[name], name
        assert rows[name, "forward+backward"]["flops"] == both[name], name
        twin = "dense block" if name.startswith("MoD") else "dense MLP"
        if name != "dense block":
            assert rows[name, "forward"]["flop_ratio"] == forward[name] / forward[twin]
            assert rows[name, "forward+backward"]["flop_ratio"] == both[name] / both[twin]
    assert len(rows) == 2 * len(forward)
    assert all(row["ms"] > 0 for row in rows.values())


def test_a_wrong_answer_gets_no_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    truth = answers.soft_moe
    monkeypatch.setattr(answers, "soft_moe", lambda layer, x: truth(layer, x) * 1.001)
    assert main(SMALL) == 2
    captured = capsys.readouterr()
    rows = _rows(captured.out)
    assert rows["Soft MoE", ""] == {"dim": D, "layer": "Soft MoE", "against": "dense MLP", "error": "wrong answer"}
    assert ("Soft MoE", "forward") not in rows
    assert rows["MoD 50%", "forward"]["ms"] > 0
    assert "wrong answer, not timed: Soft MoE at width 32" in captured.err


def test_agreement_sees_gradients_and_nan() -> None:
    one = torch.ones(3)
    assert answers.agree([one], [one * (1 + 1e-6)], torch.float32)
    assert not answers.agree([one, one], [one, one * 1.01], torch.float32)
    assert answers.agree([one], [one * 1.01], torch.bfloat16)
    assert not answers.agree([one * torch.nan], [one * torch.nan], torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dims", "32,x"], "whole numbers separated by commas"),
        (["--dims", "8"], "dims is 8"),
        (["--dims", "32,33"], "even width"),
        (["--device", "tpu"], "cpu, cuda"),
        (["--dtype", "int8"], "bfloat16, float32"),
        (["--repeats", "0"], "repeats is 0"),
    ],
)
def test_bad_options_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *options]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_cuda_is_refused_before_anything_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(layers, "_width", lambda *_: pytest.fail("something was built"))
    assert main([*SMALL, "--device", "cuda"]) == 2
    assert "no CUDA device is available" in capsys.readouterr().err


DECODE = ["bench", "generate", "--new-tokens", "8", "--json"]
_KV = 2 * 2 * 8 * 4  # bytes of a token in a layer of the tiny run: keys and values, 2 heads of 8, float32


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that was really trained, a little, and the home it was trained in."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        options = ["--model.pattern=dense,mod", "--model.context=48", "--model.capacity=0.5", "--lr=0.02"]
        assert train(folder / "run", write_data(folder / "text.jsonl"), 60, *options) == 0
        yield folder


def _decoded(capsys: pytest.CaptureFixture[str], *options: str) -> dict[tuple[str, int, bool], dict[str, Any]]:
    capsys.readouterr()
    assert main([*DECODE, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"machine", "config", "rows"}
    return {(row["model"], row["batch"], row["cache"]): row for row in report["rows"]}


def test_a_trained_model_is_measured_as_it_is(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its routed share is that of its own uncached continuation; the twin's K/V are those worked by hand."""
    (home / "read.py").write_text(TEXT)
    options = ["--model", str(home / "run"), "--data", str(home / "read.py"), "--batches", "1,3", "--contexts", "24"]
    rows = _decoded(capsys, *options)
    assert set(rows) == {(name, batch, cache) for name in ("trained", "dense") for batch in (1, 3) for cache in (0, 1)}
    result = dg.generate(dg.load(home / "run"), TEXT[:25], max_new_tokens=8, temperature=0, cache=False)[0]
    assert len(result.depths) == 32  # 24 tokens that are read, and 8 that are timed
    for batch in (1, 3):
        trained, dense = rows["trained", batch, True], rows["dense", batch, True]
        assert trained["routed"] == pytest.approx(result.routed[0] / 32)
        assert "routed" not in dense
        # 24 tokens, then room for 30, by eights; one place more takes what is not stored
        assert dense["kv_bytes"] == 2 * batch * (32 + 1) * _KV
        stored = trained["kv_bytes"] / (batch * _KV) - (32 + 1) - 1  # places of the routed layer
        assert result.routed[0] <= stored < 1.25 * result.routed[0] + 8
        assert trained["kv_ratio"] == trained["kv_bytes"] / dense["kv_bytes"] <= 1
        assert all(
            rows[name, batch, cache]["tokens_per_second"] > 0 for name in ("trained", "dense") for cache in (0, 1)
        )
        assert "kv_bytes" not in rows["trained", batch, False]
    assert 0 < result.routed[0] < 32  # the test is about a model that skips


def test_a_trained_model_reads_what_was_held_out_as_far_as_its_context_goes(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _decoded(capsys, "--model", str(home / "run"), "--batches", "2", "--uncached", "false")
    assert set(rows) == {("trained", 2, True), ("dense", 2, True)}
    assert {row["context"] for row in rows.values()} == {48 - 8}
    assert main([*DECODE[:-1], "--model", str(home / "run"), "--batches", "1", "--uncached", "false"]) == 0
    table = capsys.readouterr().out
    assert "dense with random weights" in " ".join(table.split())
    assert [line.split()[0] for line in table.splitlines() if " 40 " in line] == ["trained", "dense"]


def test_random_weights_are_measured_at_their_configured_share(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _decoded(capsys, "--contexts", "64", "--batches", "1")
    assert set(rows) == {(name, 1, cache) for name in ("dense", "MoD") for cache in (True, False)}
    dense, mod = rows["dense", 1, True], rows["MoD", 1, True]
    assert 0.5 < mod["kv_ratio"] == mod["kv_bytes"] / dense["kv_bytes"] < 0.6


def test_a_cache_that_is_wrong_gets_no_time(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LayerCache.append
    monkeypatch.setattr(LayerCache, "append", lambda self, k, v, pos: real(self, k, -3 * v, pos))
    assert main([*DECODE, "--model", str(home / "run")]) == 2
    captured = capsys.readouterr()
    assert {"model": "trained", "error": "cached and uncached tokens differ"} in json.loads(captured.out)["rows"]
    assert "wrong answer, not timed: trained" in captured.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "run", "--contexts", "24,41"], "the model's context is 48"),
        (["--model", "run", "--new-tokens", "48"], "the model's context is 48"),
        (["--model", "run", "--contexts", "0"], "contexts is 0"),
        (["--model", "run", "--data", "short.txt"], "the text has 6 tokens"),
        (["--model", "nowhere"], "nowhere is not a folder"),
        (["--data", "stdlib"], "name a --model"),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    home: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    Path("short.txt").write_text("short")
    capsys.readouterr()
    assert main([*DECODE, *options]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert "tokens_per_second" not in captured.err


def test_llama_without_transformers_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    assert main([*DECODE, "--llama", "true"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "pip install 'depthgate[hf]'" in captured.err
