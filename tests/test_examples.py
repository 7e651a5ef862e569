"""The examples run, in small: each learns what it is to learn, and says what it routed."""

import json
import runpy
from pathlib import Path

import pytest
import torch

import depthgate as dg
from depthgate.device import count_flops
from tests.conftest import close
from tests.vision import package

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_all_are_short():
    for script in EXAMPLES.glob("*.py"):
        assert len(script.read_text().splitlines()) < 80, script.name


def test_transformer_encoder_learns_with_padding(capsys):
    accuracy, plans = example("transformer_encoder")["main"](110)
    assert accuracy > 0.9
    assert plans.names == ["encoder.layers.2"]
    assert not (plans[0].chosen[..., 0] & ~plans[0].valid).any()
    assert "accuracy" in capsys.readouterr().out


def test_a_timm_vit_with_both_layers(tmp_path, monkeypatch):
    package("timm")
    monkeypatch.chdir(tmp_path)
    accuracy, plans = example("timm_vit")["main"](4)
    assert 0 <= accuracy <= 1
    assert plans.names == ["blocks.1", "blocks.2.mlp", "blocks.3.mlp"]
    assert plans["blocks.1"].chosen[:, 0].all()  # the class token
    assert (tmp_path / "timm_vit.html").stat().st_size > 10_000


def test_the_cells_of_the_notebook_run_in_order(capsys):
    cells = json.loads((EXAMPLES / "first_minute.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    scope: dict[str, object] = {}
    for source in code[:-1]:
        exec(source.replace("steps = 600", "steps = 2"), scope)
    figure = eval(code[-1], scope)
    chosen = [plan.chosen[0, :, 0].int() for plan in scope["plans"]]
    assert [int(each.sum()) for each in chosen] == [8, 8]
    cells = torch.tensor(figure.subfigs[0].axes[0].images[0].get_array())  # two rows a layer, colours
    assert len(cells) == 2 * len(chosen)
    for half, each in zip(cells, (each for each in chosen for _ in range(2)), strict=True):
        (taken,), (skipped,) = (half[each == way].unique(dim=0).tolist() for way in (1, 0))
        assert taken != skipped
    assert "encoder.layers.1: Slots(top k" in capsys.readouterr().out


def test_accelerate_accumulates_and_learns():
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'depthgate[hf]'")
    first, *_, last = example("accelerate_loop")["main"](3)
    assert last < first / 2


def test_a_causal_language_model_sees_no_future_and_spends_equal_flops(capsys):
    found = example("causal_lm")
    torch.manual_seed(0)
    model = found["LM"](0.25, dim=32, heads=2, layers=4).double().eval()
    tokens = torch.randint(256, (2, 40))
    other = tokens.clone()
    other[:, 25:] = torch.randint(256, (2, 15))
    with torch.no_grad(), dg.record(model) as plans:
        close(model(tokens)[:, :25], model(other)[:, :25])
    assert all(plan.causal and 0 < plan.chosen.sum() < plan.chosen.numel() for plan in plans)
    with torch.no_grad():  # by the top k a later token may take an earlier one's place
        assert not torch.allclose(model.train()(tokens)[:, :25], model(other)[:, :25])
    text = torch.randint(97, 123, (4000,), dtype=torch.uint8)
    spent = {}
    for capacity in (None, 0.25):
        model = found["LM"](capacity, dim=32, heads=2, layers=2)
        step = count_flops(lambda model=model: model.loss(text, [0] * 8).backward())
        found["train"]("model", model, text, text[:600], 3e10)
        steps = int(capsys.readouterr().out.splitlines()[-1].split()[1])
        spent[capacity] = steps * step
        assert abs(spent[capacity] - 3e10) <= step
