"""Small things that users have met: what is said, what is left behind, and figures that are told apart."""

import json
import warnings

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import depthgate as dg
from depthgate.cli import main
from depthgate.commands.bench import _cells
from depthgate.errors import DepthgateWarning
from tests.conftest import close
from tests.hf.words import save_model, write_text
from tests.hf.zoo import dense, routed, tokens


def test_a_config_that_is_changed_by_hand_is_saved_as_the_model_is(tmp_path):
    model = dg.hf.convert(dense("llama"), 0.5)
    model.config.depthgate["capacity"] = 0.1
    with pytest.warns(DepthgateWarning, match=r"config\.depthgate was changed.*set_capacity"):
        model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {layer.depth_router.capacity for layer in dg.hf.routed_layers(again)} == {0.5}
    assert again.config.depthgate["capacity"] == 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error", DepthgateWarning)
        dg.hf.set_capacity(model, 0.25)
        model.save_pretrained(tmp_path / "other")


def test_capped_logits_are_said_when_a_model_is_converted(tmp_path, capsys):
    model = dense("gemma3_text")
    model.config.final_logit_softcapping = 30.0
    model.save_pretrained(tmp_path / "dense")
    assert main(["convert", "--model", str(tmp_path / "dense"), "--out", str(tmp_path / "out")]) == 0
    assert "depthgate finetune and eval refuse it" in capsys.readouterr().out


@pytest.mark.parametrize("more", [["--seq", "4096"], ["--data", "empty.txt"], ["--teacher", "gone"]])
def test_a_finetune_that_is_refused_leaves_nothing(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model", capacity=0.5)
    write_text(tmp_path / "text.txt")
    (tmp_path / "empty.txt").write_text("")
    command = ["finetune", "--model", "model", "--out", "new", "--data", "text.txt", "--seq", "32", "--steps", "1"]
    assert main([*command, *more]) == 2
    assert not (tmp_path / "new").exists()


def test_a_dense_model_is_trained_as_it_is_if_that_is_asked_for(tmp_path, capsys):
    """The control of a recovery: the same loop, loss and text."""
    write_text(tmp_path / "text.txt")
    save_model(tmp_path / "model")
    command = ["finetune", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--data"]
    command += [str(tmp_path / "text.txt"), "--seq", "32", "--batch", "2", "--steps", "3", "--loss", "text"]
    assert main(command) == 2
    assert "convert it first" in (said := capsys.readouterr().err)
    assert "--capacity 1 trains it as it is" in said
    assert main([*command, "--capacity", "1"]) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "out"))
    assert type(before) is type(after)
    assert before.state_dict().keys() == after.state_dict().keys()
    assert not torch.equal(before.model.layers[1].mlp.up_proj.weight, after.model.layers[1].mlp.up_proj.weight)


def test_caches_of_nearly_the_same_size_are_told_apart_and_empty_names_are_refused(tmp_path, capsys):
    row = {"model": "m", "path": "plain", "batch": 1, "context": 256, "ratios": {}}
    names = ("prefill_tokens_per_second", "decode_tokens_per_second", "memory_bytes", "kv_bytes", "bandwidth_share")
    row |= dict.fromkeys(names, 300_000) | {"ratios": dict.fromkeys(names, 1.0)}
    assert _cells(row)[-2] != _cells(row | {"kv_bytes": 290_000})[-2]
    assert main(["bench", "--models", f"{tmp_path},,{tmp_path}"]) == 2
    assert "a name is empty" in capsys.readouterr().err
    save_model(tmp_path / "model")
    write_text(tmp_path / "text.txt")
    full = ["bench", "--models", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt"), "--context", "128"]
    assert main([*full, "--batch", "1", "--device", "cpu"]) == 2
    assert "context is 128, and 32 new tokens follow, but a model has room for 128" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["eval", "--model", "", "--data", "text.txt"], "model is empty: give the folder of a run"),
        (["finetune", "--model", "", "--data", "text.txt", "--out", "o"], "model is empty"),
        (["finetune", "--model", "m", "--data", "text.txt", "--out", ""], "out is empty"),
        (["convert", "--model", "m", "--out", ""], "out is empty: give the folder to write"),
        (["view", "--model", ""], "model is empty"),
        (["eval", "--model", "owner/name", "--data", "text.txt"], "hf download owner/name --local-dir name"),
        (["finetune", "--model", "owner/name", "--data", "text.txt", "--out", "o"], "hf download owner/name"),
    ],
)
def test_names_that_are_empty_or_of_the_hub(command, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    assert main(command) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[1]", '{"model_type": "depthgate_ll'])
def test_a_damaged_config_is_named_and_not_taken_for_a_run_that_has_not_ended(content, tmp_path, capsys):
    folder = save_model(tmp_path / "model", capacity=0.5)
    write_text(tmp_path / "text.txt")
    (tmp_path / "model" / "finetune.json").write_text("{}")
    (tmp_path / "model" / "config.json").write_text(content)
    for command in (["eval", "--data", str(tmp_path / "text.txt")], ["generate", "--prompt", "a"]):
        assert main([command[0], "--model", str(folder), *command[1:]]) == 2
        assert "config.json cannot be loaded" in capsys.readouterr().err


def test_a_rule_and_a_dtype_that_the_weights_do_not_have_are_named(tmp_path, capsys):
    folder = save_model(tmp_path / "model", capacity=0.5)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    rule = "predictor" if config["depthgate"]["rule"] != "predictor" else "threshold"
    for changes, says in (
        ({"depthgate": {**config["depthgate"], "rule": rule}}, f"says that the rule is '{rule}': it was another"),
        ({"dtype": "torch.float32"}, "dtype is 'torch.float32': it must be one such as bfloat16"),
    ):
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | changes))
        assert main(["generate", "--model", str(folder), "--prompt", "a"]) == 2
        assert says in capsys.readouterr().err


def test_a_threshold_keeps_the_share_of_itself_that_is_asked_for_also_when_it_is_loaded(tmp_path):
    dg.hf.convert(dense("llama"), rule="threshold", decay=0.5).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {layer.depth_router.rule.decay for layer in dg.hf.routed_layers(model)} == {0.5}
    assert {layer.depth_router.rule.decay for layer in dg.hf.routed_layers(routed("llama", rule="threshold"))} == {0.9}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_lora_in_all_linear_layers_leaves_experts_alone_as_the_documents_say(kind):
    peft = pytest.importorskip("peft")
    kinds = {"target_modules": "all-linear", "exclude_modules": ".*depth_router.*", "modules_to_save": ["depth_router"]}
    found = peft.get_peft_model(routed(kind), peft.LoraConfig(r=2, **kinds)).base_model.targeted_module_names
    assert {name.split(".")[-2] for name in found} == {"self_attn"}


@torch.no_grad()
def test_a_ragged_cache_has_little_more_room_than_its_fullest_row_needs():
    model, ids = routed("llama"), tokens(4, 100)
    cache = DynamicCache()
    for piece in ids.split((40, *[1] * 60), 1):
        model(piece, past_key_values=cache)
        for i in (0, 3):
            layer = cache.layers[i]
            fullest = int((layer.slots >= 0).sum(1).max())
            assert layer.keys.shape[2] <= fullest + max(1, min(64, fullest // 4)) + 1


@torch.no_grad()
def test_one_mask_for_all_rows_and_packed_positions_are_taken_as_dense_takes_them():
    model, ids = routed("llama"), tokens(3, 12)
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, :3] = 0
    close(model(ids, attention_mask=mask).logits[:, 3:], model(ids, attention_mask=mask.expand(3, -1)).logits[:, 3:])
    packed = torch.cat([torch.arange(5), torch.arange(7)])[None]
    want = [model(part, use_cache=False).logits for part in ids[:1].split((5, 7), 1)]
    close(model(ids[:1], position_ids=packed, labels=ids[:1]).logits, torch.cat(want, 1))
