"""benchmarks/layers.py: FLOPs worked by hand, and no time for a wrong answer."""

import json
from typing import Any

import pytest
import torch

import answers
import layers
import measure
from depthgate.errors import DepthgateError
from depthgate.layers.ffn import swiglu_hidden

B, T, D, E = 2, 16, 32, 8
SMALL = ["--widths", str(D), "--batch", str(B), "--seq", str(T), "--repeats", "1", "--json"]


def timed(capsys: pytest.CaptureFixture[str]) -> str:
    layers.run(layers.options().parse_args(SMALL))
    return capsys.readouterr().out


def _rows(out: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["layer"], row.get("pass", "")): row for row in json.loads(out)["rows"]}


def test_flops_of_every_layer_are_those_worked_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    out = timed(capsys)
    assert set(json.loads(out)) == {"machine", "config", "rows"}
    assert json.loads(out)["config"]["widths"] == [D]
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
    with pytest.raises(DepthgateError, match="wrong answer, not timed: Soft MoE"):
        layers.run(layers.options().parse_args(SMALL))
    rows = _rows(capsys.readouterr().out)
    assert rows["Soft MoE", ""] == {"dim": D, "layer": "Soft MoE", "against": "dense MLP", "error": "wrong answer"}
    assert ("Soft MoE", "forward") not in rows
    assert rows["MoD 50%", "forward"]["ms"] > 0


def test_agreement_sees_gradients_and_nan() -> None:
    one = torch.ones(3)
    assert answers.agree([one], [one * (1 + 1e-6)], torch.float32)
    assert not answers.agree([one, one], [one, one * 1.01], torch.float32)
    assert answers.agree([one], [one * 1.01], torch.bfloat16)
    assert not answers.agree([one * torch.nan], [one * torch.nan], torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--widths", "32,x"], "invalid whole_numbers value"),
        (["--widths", "0"], "invalid whole_numbers value"),
        (["--widths", "32,33"], "even width"),
        (["--device", "tpu"], "'cpu', 'cuda'"),
        (["--dtype", "int8"], "'float32', 'bfloat16'"),
        (["--cuda_graphs"], "--device cuda"),
    ],
)
def test_bad_options_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        measure.main(layers.run, layers.options().parse_args([*SMALL, *options]))
    captured = capsys.readouterr()
    assert (caught.value.code, captured.out) == (2, "")
    assert said in captured.err.replace("choose from cpu, cuda", "'cpu', 'cuda'").replace(
        "choose from float32, bfloat16", "'float32', 'bfloat16'"
    )


def test_cuda_is_refused_before_anything_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(layers, "_width", lambda *_: pytest.fail("something was built"))
    with pytest.raises(SystemExit):
        measure.main(layers.run, layers.options().parse_args([*SMALL, "--device", "cuda"]))
    assert "no CUDA device is available" in capsys.readouterr().err
