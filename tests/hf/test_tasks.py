"""`depthgate eval --tasks`: lm-eval's own figures, of a task that is all local."""

import json
import sys

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import AutoModelForCausalLM

from depthgate.cli import main
from tests.hf.words import save_model, texts
from tests.hf.zoo import routed

TASK = """
task: words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["w5", "w50", "w95"]
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


@pytest.fixture
def task(tmp_path):
    lines = [json.dumps({"text": text, "answer": i % 3}) for i, text in enumerate(texts(9, 12))]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "words.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    return tmp_path / "words.yaml"


def test_a_converted_model_is_judged_by_its_causal_choice(tmp_path, task, capsys, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'depthgate[eval]'")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = save_model(tmp_path / "model")
    routed("llama").save_pretrained(folder)
    assert main(["eval", "--model", str(folder), "--tasks", str(task), "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    right = 0
    for i, text in enumerate(texts(9, 12)):
        ids = torch.tensor([[1, *(int(word[1:]) for word in text.split())]])
        with torch.no_grad():
            right += int(model(ids).logits[0, -1, [5, 50, 95]].argmax() == i % 3)
    assert found["documents"] == 9
    assert found["metrics"]["acc"] == pytest.approx(right / 9)


def test_what_is_wrong_is_said(tmp_path, task, capsys, monkeypatch):
    folder = save_model(tmp_path / "model")
    (tmp_path / "none.yaml").write_text("dataset_path: json\n")
    for file, why in ((tmp_path / "none.yaml", "no line `task: NAME`"), (tmp_path / "gone.yaml", "cannot be read")):
        assert main(["eval", "--model", str(folder), "--tasks", str(file)]) == 2
        assert why in capsys.readouterr().err
    (tmp_path / "other.yaml").write_text(task.read_text())
    assert main(["eval", "--model", str(folder), "--tasks", str(task)]) == 2
    assert "both name the task" in capsys.readouterr().err
    (tmp_path / "other.yaml").unlink()
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", "--model", str(folder), "--tasks", str(task)]) == 2
    assert "pip install 'depthgate[eval]'" in capsys.readouterr().err
