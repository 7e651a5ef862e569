"""`depthgate convert`, from a folder to a folder."""

import json
import pickle
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import depthgate as dg
from depthgate.cli import main
from depthgate.hf import conversion
from tests.hf.words import save_tokenizer
from tests.hf.zoo import dense, tokens


@pytest.fixture
def folder(tmp_path):
    dense("qwen3").save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def convert(folder, *options):
    return main(["convert", "--model", str(folder), "--out", str(folder.parent / "routed"), *options])


def test_it_writes_a_folder_that_loads_and_leaves_the_first_alone(folder, capsys):
    save_tokenizer(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    assert convert(folder, "--capacity", "0.3", "--layers", "0,2", "--rule", "threshold") == 0
    printed = capsys.readouterr().out
    assert "    2           30%\n    3           100%\n" in printed
    out = folder.parent / "routed"
    assert {path.name for path in out.iterdir()} == {*before, "modeling_depthgate.py", "README.md"}
    card = (out / "README.md").read_text()
    assert "--capacity 0.3 --layers 0,2 --rule threshold" in card
    assert "| largest difference at capacity 1 | 0 |" in card
    assert {name: (folder / name).read_bytes() for name in before} == before
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.depthgate == {
        "layers": [0, 2],
        "capacity": 0.3,
        "gate": "one_plus_tanh",
        "rule": "threshold",
        "decay": 0.9,
        "rule_loss": 0.01,
    }
    with torch.no_grad():
        assert torch.equal(model(tokens(2, 9)).logits, dense("qwen3")(tokens(2, 9)).logits)


def test_a_folder_that_loads_as_another_model_is_not_written(folder, capsys, monkeypatch):
    def other_positions(path):
        model = load(path)
        if path.name.endswith(".part"):
            model.model.rotary_emb.inv_freq *= 2  # which is not among the weights
        return model

    load = conversion.load
    monkeypatch.setattr(conversion, "load", other_positions)
    assert convert(folder) == 2
    assert "not what was in memory" in capsys.readouterr().err
    assert list(folder.parent.iterdir()) == [folder]


def test_json_is_one_object(folder, capsys):
    assert convert(folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["routing"]["layers"] == [1, 3]
    assert found["difference"] < 1e-5


def test_a_gate_that_is_not_neutral_fails_and_writes_nothing(folder, capsys):
    assert convert(folder, "--gate", "sigmoid") == 2
    assert "gate is 'sigmoid', which is not 1 before" in capsys.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == ["dense"]


def test_auto_measures_on_a_text_and_prints_it(folder, capsys, tmp_path):
    words = {f"w{i}": i for i in range(96)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    ids = tokens(1, 40)
    (tmp_path / "text").write_text(" ".join(f"w{i}" for i in ids[0].tolist()))
    assert convert(folder, "--layers", "auto", "--text", str(tmp_path / "text")) == 0
    changes = dg.hf.layer_changes(dense("qwen3"), ids)
    best = sorted(sorted(range(4), key=lambda i: changes[i])[:2])
    lines = capsys.readouterr().out.splitlines()[1:5]
    assert [line.split() for line in lines] == [
        [str(i), f"{changes[i]:.4f}", "50%" if i in best else "100%"] for i in range(4)
    ]
    assert AutoModelForCausalLM.from_pretrained(folder.parent / "routed").config.depthgate["layers"] == best


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])


def lose(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def spoil(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def lose_shard(folder):
    (folder / "model.safetensors").unlink()
    dense("qwen3").save_pretrained(folder, max_shard_size="20KB")
    next(folder.glob("model-00002*")).unlink()


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("ran-by-a-pickle"),)


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Evil()}, 2))


def rewrite(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("damage", "options", "why"),
    [
        (cut, [], "are cut or damaged"),
        (lose, [], "has missing weights .model.layers.1.mlp.up_proj.weight"),
        (lambda f: (f / "config.json").unlink(), [], "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), [], "cannot be loaded"),
        (lambda f: rewrite(f, hidden_size=48), [], "weights have other sizes than its config.json says"),
        (lambda f: rewrite(f, hidden_size=2**20, vocab_size=2**28), [], "weights have other sizes"),
        (lambda f: rewrite(f, hidden_size="32"), [], "cannot be loaded: .*hidden_size.*expected int"),
        (lambda f: rewrite(f, num_hidden_layers=0), [], "cannot be loaded: .*num_hidden_layers"),
        (lambda f: rewrite(f, max_position_embeddings=0), [], "max_position_embeddings is 0: it must be"),
        (lambda f: rewrite(f, hidden_act="os.system"), [], "does not know 'os.system', which its config.json names"),
        (
            lambda f: rewrite(f, attn_implementation="evil/repo"),
            [],
            r"names code to run \(attn_implementation is evil/",
        ),
        (lambda f: rewrite(f, num_hidden_layers=-1), [], "num_hidden_layers is -1: it must be a whole number from 1"),
        (lambda f: None, ["--out", "/proc/x"], r"cannot write /proc/x \(.*\): give --out a folder"),
        (lambda f: None, ["--out", f"{__file__}/x/y"], r"cannot write .*/x/y \(.*\): give --out a folder"),
        (spoil, [], "not finite: its weights are damaged"),
        (lose_shard, [], "cannot be loaded: .*model-00002"),
        (pickled, [], "a pickle that is damaged or names code, which is never run: take safetensors"),
        (lambda f: None, ["--out", "{source}/routed"], "is within .*dense, which stays as it is"),
        (
            lambda f: rewrite(f, model_type="bert"),
            [],
            r"dense \(bert\) cannot be routed: .*position_embeddings",
        ),
        (
            lambda f: rewrite(f, model_type="none_such"),
            [],
            "none_such.* transformers has no decoder language",
        ),
        (lambda f: rewrite(f, model_type="qwen2_moe"), [], "but the family has not been tested"),
        (lambda f: None, ["--layers", "[]"], r"layers is \[\]"),
        (
            lambda f: (f / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "x.Y"}}'),
            [],
            "names code",
        ),
        (lambda f: rewrite(f, model_type=3), [], "does not name a model_type"),
        (lambda f: rewrite(f, model_type="t5", is_encoder_decoder=True), [], "reads an encoder's output"),
        (lambda f: rewrite(f, model_type="depthgate_qwen3"), [], "routed already: .* depthgate finetune --capacity"),
        (lambda f: rewrite(f, auto_map={"AutoModelForCausalLM": "evil.Evil"}), [], "names code to run"),
        (lambda f: rewrite(f, quantization_config={"quant_method": "gptq"}), [], "has quantised weights"),
        (lambda f: (f.parent / "routed").mkdir(), [], "is there already"),
        (lambda f: None, ["--layers", "7"], "a layer is 7"),
        (lambda f: None, ["--layers", "some"], "layers is 'some'"),
        (lambda f: None, ["--layers", "auto"], "go together"),
        (lambda f: None, ["--layers", "auto", "--text", "nowhere"], "'nowhere' does not exist"),
        (lambda f: None, ["--layers", "auto", "--text", __file__], "tokenizer"),
        (lambda f: None, ["--capacity", "0"], "capacity is 0"),
        (lambda f: None, ["--rule", "none"], "rule is 'none'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(folder, capsys, monkeypatch, damage, options, why):
    monkeypatch.chdir(folder.parent)
    damage(folder)
    options = [option.format(source=folder) for option in options]
    there = sorted(folder.parent.iterdir())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert convert(folder, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("depthgate: error: ")
    assert re.search(why, error), error
    assert sorted(folder.parent.iterdir()) == there
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
