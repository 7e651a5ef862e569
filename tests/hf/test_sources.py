"""What `depthgate convert`, `finetune` and `eval` say to odd folders and names: one line, exit code 2, nothing left."""

import json
from fnmatch import fnmatch

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import huggingface_hub
import torch
from safetensors.torch import load_file

from depthgate.cli import main
from tests.hf.words import save_model, write_text


def convert(source, out, *more):
    return main(["convert", "--model", str(source), "--out", str(out), *more])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"output_attentions": True}, "output_attentions is true"),
        ({"return_dict": False}, "return_dict is false"),
        ({"dtype": "os"}, "dtype is 'os'"),
        ({"auto_map": None}, "auto_map is null"),
        (None, "it does not hold names with values"),
    ],
)
def test_configs_that_ask_for_what_commands_cannot_use(tmp_path, capsys, change, why):
    path = save_model(tmp_path / "model") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change} if change else change))
    assert convert(tmp_path / "model", tmp_path / "out") == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_shards_outside_the_folder_and_texts_of_a_word(tmp_path, capsys):
    folder = save_model(tmp_path / "model")
    (tmp_path / "short.txt").write_text("w5")
    assert convert(folder, tmp_path / "out", "--layers", "auto", "--text", str(tmp_path / "short.txt")) == 2
    assert "makes 1 tokens of" in capsys.readouterr().err
    assert convert("", tmp_path / "out") == 2
    assert "model is empty" in capsys.readouterr().err
    assert convert(folder, "") == 2
    assert "out is empty" in capsys.readouterr().err
    for names in (["model.norm.weight"], {"model.norm.weight": "../outside.safetensors"}, {"model.norm.weight": 3}):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
        assert convert(folder, tmp_path / "out") == 2
        assert f"does not say which file in {folder} holds which weight" in capsys.readouterr().err


def test_leftovers_of_a_killed_conversion_are_cleared_and_empty_auto_maps_are_none(tmp_path):
    path = save_model(tmp_path / "model") / "config.json"
    (tmp_path / "model" / "LICENSE").write_text("free")
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {}}))
    (tmp_path / ".out.0badcafe.part").mkdir()
    (tmp_path / ".out.0badcafe.part" / "model.safetensors").write_text("half")
    assert convert(tmp_path / "model", tmp_path / "out", "--capacity", "0.25,0.75") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["depthgate"]["capacity"] == [0.25, 0.75]
    write_text(tmp_path / "text.txt")
    more = ["--capacity_by", "change", "--text", str(tmp_path / "text.txt"), "--routing_mode", "causal"]
    assert convert(tmp_path / "model", tmp_path / "spread", *more) == 0
    written = json.loads((tmp_path / "spread" / "config.json").read_text())
    assert written["routing_mode"] == "causal"
    assert sum(written["depthgate"]["capacity"]) == pytest.approx(1.0, abs=1e-3)


def test_a_conversion_leaves_alone_what_another_one_is_writing(tmp_path):
    save_model(tmp_path / "model")
    others = [tmp_path / name for name in (".a.25.0badcafe.part", ".a[1].25.0badcafe.part", ".b.0badcafe.part")]
    for each in (*others, tmp_path / ".a[1].0badcafe.part"):
        each.mkdir()
    for name in ("a", "a[1]"):
        assert convert(tmp_path / "model", tmp_path / name) == 0
    assert sorted(tmp_path.glob(".*")) == sorted(others)


def test_a_config_with_layers_alone_is_finetuned_and_an_unfinished_run_is_named(tmp_path, capsys):
    path = save_model(tmp_path / "model", capacity=0.5) / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "depthgate": {"layers": [1, 3], "capacity": [0.5, 0.25]}}))
    write_text(tmp_path / "text.txt")
    how = ["--data", str(tmp_path / "text.txt"), "--steps", "2", "--seq", "32", "--batch", "2", "--calibrate", "64"]
    assert main(["finetune", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "done"), *how]) == 0
    assert json.loads((tmp_path / "done" / "config.json").read_text())["depthgate"]["capacity"] == [0.5, 0.25]
    card = (tmp_path / "done" / "README.md").read_text()
    assert "base_model: " in card
    assert "| step | 2 |" in card
    (tmp_path / "done" / "config.json").unlink()  # as where the run was killed before its end
    capsys.readouterr()
    look = ["--data", str(tmp_path / "text.txt"), "--seq", "32"]
    assert main(["eval", "--model", str(tmp_path / "done"), *look]) == 2
    assert "has not finished" in (said := capsys.readouterr().err)
    assert "--resume" in said
    assert main(["eval", "--model", str(tmp_path / "done" / "step-2"), *look]) == 2
    assert "a checkpoint of one" in capsys.readouterr().err
    for part, said in (("done", "has not finished"), ("done/step-2", "a checkpoint of one")):
        assert main(["finetune", "--model", str(tmp_path / part), "--out", str(tmp_path / "next"), *how]) == 2
        assert said in capsys.readouterr().err
    assert main(["eval", "--model", str(tmp_path / "gone"), *look]) == 2
    assert "gone is not a folder" in capsys.readouterr().err


def test_the_folder_of_an_adapter_is_named_as_one(tmp_path, capsys):
    """What Trainer and TRL save where PEFT trains: the model is elsewhere."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    write_text(tmp_path / "text.txt")
    look, out = ["--data", str(tmp_path / "text.txt")], ["--out", str(tmp_path / "out")]
    model = ["--model", str(tmp_path / "adapter")]
    for command in (["convert", *out], ["finetune", *out, *look], ["eval", *look], ["generate", "--prompt", "w3"]):
        assert main([*command, *model]) == 2
        assert "is an adapter of PEFT, and no model: merge it first" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_name_on_the_hub_is_fetched_or_the_way_to_fetch_it_is_named(tmp_path, capsys, monkeypatch):
    """From its cache, as where there is no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert convert("someone/tiny", tmp_path / "out") == 2
    assert "hf download someone/tiny --local-dir tiny" in capsys.readouterr().err
    cached = tmp_path / "hub" / "models--someone--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    save_model(cached / "snapshots" / ("0" * 40))
    how = {"cache_dir": str(tmp_path / "hub"), "local_files_only": True}
    found = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **more: found(name, **{**more, **how}))
    assert convert("someone/tiny", tmp_path / "out") == 0
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_what_is_fetched_from_the_hub_is_all_that_is_read(tmp_path, monkeypatch):
    """Templates and vocabularies of any kind; weights as safetensors, or else as they are."""
    made = save_model(tmp_path / "hub") / "model.safetensors"
    (made.parent / "chat_template.jinja").write_text("{{ messages[0].content }}")
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda _, **how: asked.append(how) or made.parent)

    def fetches(name):
        return any(fnmatch(name, pattern) for pattern in asked[-1]["allow_patterns"])

    assert convert("someone/tiny", tmp_path / "out") == 0
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
    names = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "merges.txt"]
    names += [
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "tokenizer.model",
        "qwen.tiktoken",
        "LICENSE",
    ]
    assert all(map(fetches, names))
    assert not fetches("pytorch_model.bin")
    torch.save(load_file(made), made.with_name("pytorch_model.bin"))
    made.unlink()
    assert convert("someone/tiny", tmp_path / "from-bin") == 0
    assert len(asked) == 3
    assert fetches("pytorch_model.bin")
