"""`depthgate eval --tasks`: lm-eval's own figures, of a task that is all local; `--card`, on tasks and on a text."""

import json
import sys

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import AutoModelForCausalLM

from depthgate.cli import main
from tests.hf.words import save_model, texts, write_text
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
    (folder / "README.md").write_text("# mine")
    assert main(["eval", "--model", str(folder), "--tasks", str(task), "--device", "cpu", "--card", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    right = 0
    for i, text in enumerate(texts(9, 12)):
        ids = torch.tensor([[1, *(int(word[1:]) for word in text.split())]])
        with torch.no_grad():
            right += int(model(ids).logits[0, -1, [5, 50, 95]].argmax() == i % 3)
    assert found["documents"] == 9
    assert found["metrics"] == {"acc": pytest.approx(right / 9)}
    card = (folder / "README.md").read_text()
    assert card.startswith(f"# mine\n\n## Measured on {task}\n\nBy `depthgate eval --model {folder} --tasks {task} ")
    assert f"| acc | {right / 9:.6g} |\n" in card


def test_a_model_that_takes_the_top_k_in_evaluation_is_judged_causally_too(tmp_path, task, capsys, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'depthgate[eval]'")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    rolling = TASK.format(data=tmp_path / "data.jsonl").partition("output_type")[0]
    rolling += 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    task.write_text(rolling + "metric_list:\n  - metric: word_perplexity\n")
    folder, model, figures = save_model(tmp_path / "model"), routed("llama"), []
    for mode in ("causal", "top_k"):
        model.routing_mode = mode
        model.save_pretrained(folder)
        assert main(["eval", "--model", str(folder), "--tasks", str(task), "--device", "cpu", "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"])
    assert figures[0] == figures[1]


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


def test_a_card_holds_what_was_measured_last_and_all_else_that_was_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "dense")
    write_text(tmp_path / "text.txt", documents=6, length=70)
    assert main(["convert", "--model", "dense", "--out", "routed"]) == 0
    card = tmp_path / "routed" / "README.md"
    made = card.read_bytes()

    def measured(*options):
        capsys.readouterr()
        asked = ["eval", "--model", "routed", "--data", "text.txt", "--device", "cpu", "--card", "--json", *options]
        assert main(asked) == 0
        return json.loads(capsys.readouterr().out)

    found = measured("--seq", "64")
    said = card.read_text()
    assert card.read_bytes().startswith(made)
    assert said.endswith(f"| flops per token | {found['flops_per_token']:.6g} |\n")
    assert "## Measured on text.txt\n\nBy `depthgate eval --model routed --data text.txt --card --seq 64 " in said
    assert f"| bits per byte | {found['bits_per_byte']:.6g} |\n" in said
    assert "| routed share | 1, 1 |\n" in said
    mine = "\r\nWhat I think of it: \xff \\1\n\n| my | table |\n|---|---|\n".encode("latin-1")
    card.write_bytes(card.read_bytes() + mine)
    found = measured("--tasks", "word,order", "--limit", "5")
    assert card.read_bytes() == said.encode() + mine + card.read_bytes()[len(said.encode() + mine) :]
    assert b"\n\n## Measured on word,order of text.txt\n\n" in card.read_bytes()
    assert f"| word | {found['metrics']['word']:.6g} |\n".encode() in card.read_bytes()
    before = card.read_bytes()
    measured("--seq", "64")
    assert card.read_bytes() == before  # the same figures, in the same place
    measured("--seq", "32")
    assert card.read_bytes() != before
    for text in (b"## Measured on text.txt\n", b"--seq 32", mine, b"## Measured on word,order of text.txt\n"):
        assert card.read_bytes().count(text) == 1
    assert b"--seq 64" not in card.read_bytes()
    assert [path.name for path in card.parent.glob("*.part")] == []


@pytest.mark.parametrize("there", ["nothing", "a folder", "no model"])
def test_a_folder_without_a_card_is_named_before_anything_is_computed(tmp_path, capsys, there):
    folder = tmp_path / "model"
    (folder / "README.md" if there == "a folder" else folder).mkdir(parents=True)
    if there != "no model":
        save_model(folder)
    assert main(["eval", "--model", str(folder), "--data", str(tmp_path / "gone.txt"), "--card"]) == 2
    assert f"{folder} has no README.md to add figures to: depthgate convert" in capsys.readouterr().err
