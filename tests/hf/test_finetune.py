"""`depthgate finetune`: what is trained, that it recovers, and that it goes on exactly where it stopped."""

import json
import os
import re
import shutil
import signal
import sys
from functools import partial

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import depthgate as dg
from depthgate.cli import main
from depthgate.data.batches import Packed
from depthgate.data.token_file import Documents, tokenize
from depthgate.hf.adapter import HFLanguageModel, collected_plans, tokenizer_of
from depthgate.hf.recover import calibrate_rows, falling_steps, scale_routers
from depthgate.train import optim, run_folder
from tests.conftest import close
from tests.hf.words import save_model, write_text
from tests.hf.zoo import tokens


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A converted model, and a text that it reads."""
    folder = tmp_path_factory.mktemp("made")
    save_model(folder / "model", capacity=0.5, rule="threshold", gate="straight_through")
    write_text(folder / "text")
    return folder


@pytest.fixture
def home(made, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def finetune(home, out="out", *options, model="model", data="text"):
    names = ["--model", str(home / model), "--data", str(home / data), "--out", str(home / out)]
    fixed = ["--batch", "4", "--seq", "48", "--lr", "0.003", "--workers", "0", "--device", "cpu", "--warmup", "2"]
    fixed += ["--calibrate", "960"]  # twenty sequences
    return main(["finetune", *names, *fixed, *options])


def weights(folder):
    return load_file(folder / "model.safetensors")


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_recovers_what_routing_lost_and_leaves_the_model_alone(home, capsys):
    before = {path.name: path.read_bytes() for path in (home / "model").iterdir()}
    assert finetune(home, "out", "--steps", "48", "--calibrate", "16384", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert {path.name: path.read_bytes() for path in (home / "model").iterdir()} == before
    found = rows(home / "out")
    assert printed == found[-1]
    assert [row["step"] for row in found] == list(range(1, 49))
    capacities = [row["capacity"] for row in found]
    assert capacities[:4] == [1.0, 0.875, 0.75, 0.625]  # over a tenth of the steps
    assert capacities[4:] == [0.5] * 44
    assert found[0]["loss"] < 1e-6  # at capacity 1 the student is its teacher
    assert found[-1]["loss"] < 0.7 * max(row["loss"] for row in found)
    assert found[-1]["flops"] - found[-2]["flops"] == 170348544 / 3  # routed tokens are scored twice
    assert "The run has ended." in (home / "out" / "report.html").read_text()
    model = AutoModelForCausalLM.from_pretrained(home / "out").eval()
    assert model.config.depthgate["capacity"] == 0.5
    assert all(0.3 < layer.depth_router.capacity < 0.7 for layer in dg.hf.routed_layers(model))
    assert (home / "out" / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    ids = tokens(2, 12)
    with torch.no_grad():  # evaluation is causal
        close(model(ids[:, :7]).logits, model(ids).logits[:, :7])


def test_flops_are_those_of_the_capacity_however_training_chooses(home):
    """Before it has learnt anything, a causal rule routes all tokens."""
    told = {}
    for mode in ("auto", "causal"):
        save_model(home / mode, capacity=0.5, routing_mode=mode)
        assert finetune(home, f"of-{mode}", "--steps", "2", "--loss", "text", model=mode) == 0
        told[mode] = [row["flops"] for row in rows(home / f"of-{mode}")]
    assert told["auto"] == told["causal"]


@pytest.mark.parametrize(
    ("steps", "share", "want"),
    [(3, 0.1, [1.0, 0.5, 0.5]), (3, 1.0, [1.0, 0.75, 0.5]), (2, 0.0, [0.5, 0.5]), (1, 0.1, [0.5])],
)
def test_short_runs_begin_dense_and_end_at_the_goal(steps, share, want):
    assert [optim.capacity(0.5, step, falling_steps(share, steps)) for step in range(steps)] == want


@pytest.mark.parametrize("train", ["full", "router", "lora"])
def test_what_is_asked_for_is_trained(home, train):
    if train == "lora":
        pytest.importorskip("peft", reason="peft is not installed: pip install 'depthgate[finetune]'")
    assert finetune(home, "out", "--steps", "2", "--train", train, "--capacity_share", "0") == 0
    old, new = weights(home / "model"), weights(home / "out")
    assert old.keys() == new.keys()  # LoRA is merged
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    routers = {name for name in old if "depth_router" in name}
    assert routers <= changed
    linear = {name for name in old if "proj" in name and name not in routers}
    assert changed - routers == {"full": set(old) - routers, "router": set(), "lora": linear}[train]


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(home, train):
    if train == "lora":
        pytest.importorskip("peft", reason="peft is not installed: pip install 'depthgate[finetune]'")
    options = ("--train", train, "--schedule_steps", "4", "--accumulate", "2")
    assert finetune(home, "whole", *options, "--steps", "4") == 0
    assert finetune(home, "parts", *options, "--steps", "2") == 0
    assert main(["finetune", "--out", str(home / "parts"), "--steps", "4", "--resume"]) == 0  # with its own options
    whole, parts = weights(home / "whole"), weights(home / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    timeless = [
        {k: v for k, v in row.items() if "second" not in k and k != "utilisation"} for row in rows(home / "whole")
    ]
    for row, twin in zip(rows(home / "parts"), timeless, strict=True):
        assert {key: row[key] for key in twin} == twin


def test_an_interrupted_run_saves_a_model_and_goes_on(home, monkeypatch, capsys):
    real = run_folder.Metrics.add

    def add(self, row):
        real(self, row)
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run_folder.Metrics, "add", add)
    assert finetune(home, "out", "--steps", "400") == 130
    assert "go on with --resume" in capsys.readouterr().err
    assert len(rows(home / "out")) == 2
    AutoModelForCausalLM.from_pretrained(home / "out")
    assert finetune(home, "out", "--steps", "4", "--schedule_steps", "400", "--resume") == 2  # another schedule
    assert "schedule_steps" in capsys.readouterr().err


def test_layers_that_are_checkpointed_or_compiled_learn_the_same(home, monkeypatch):
    """Compiled as far as graphs and their gradients: the C++ of them is torch's."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    options = ("--steps", "2", "--capacity_share", "0")
    assert finetune(home, "plain", *options) == 0
    assert finetune(home, "again", *options, "--checkpointing", "true") == 0
    torch._dynamo.utils.counters.clear()
    assert finetune(home, "compiled", *options, "--compile", "true") == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 3  # a dense layer, a routed one, the teacher's
    assert finetune(home, "both", *options, "--checkpointing", "true", "--compile", "true") == 0
    for name in ("again", "compiled", "both"):
        for row, twin in zip(rows(home / "plain"), rows(home / name), strict=True):
            close(torch.tensor(row["loss"]), torch.tensor(twin["loss"]))
            close(torch.tensor(row["gradient_norm"]), torch.tensor(twin["gradient_norm"]))


def test_calibrated_routers_take_their_share_and_what_their_layer_adds_most_to(home, tmp_path):
    folder = home / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    language = HFLanguageModel(model, tokenizer_of(folder), 48)
    packed = Packed(Documents(tokenize(str(home / "text"), language.tokenizer, tmp_path)), 48)
    batch = packed.rows(range(16))
    assert not any(layer.depth_router.proj.weight.any() for layer in language.routed)
    seen = []
    for layer in language.routed:
        layer.register_forward_hook(lambda _, args, out: seen.append((out - args[0]).norm(dim=-1)))
    scale_routers(language.routed)
    calibrate_rows(language, batch)
    assert all(layer.depth_router.proj.weight.any() for layer in language.routed)
    sizes = [torch.cat(seen[i :: len(language.routed)]) for i in range(len(language.routed))]
    model.eval()
    with torch.no_grad(), collected_plans(model) as plans:
        language.hidden(batch.tokens, batch.pos, causal=True)
    first = batch.pos == 0
    chosen, added = plans[0][0].chosen[..., 0], sizes[0]  # of the first routed layer: its tokens are as they were
    assert chosen.float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert chosen[first].all()
    assert added[chosen & ~first].mean() > added[~chosen].mean()


def test_documents_begin_as_the_tokenizer_begins_them(home):
    assert tokenizer_of(home / "model").encode("w7 w8") == [1, 7, 8]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--data", "nowhere"], "'nowhere' does not exist"),
        (["--seq", "500"], "room for 128 tokens"),
        (["--out", "model"], "which stays as it is"),
        (["--out", "model/inside"], "which stays as it is"),
        (["--teacher", "damaged"], "damaged/config.json cannot be loaded"),
        (["--model", "dense"], "no routed layers"),
        (["--teacher", "wide"], "they must have one vocabulary"),
        (["--loss", "text", "--teacher", "dense"], "needs no teacher: leave --teacher out"),
        (["--loss", "text", "--text_share", "0.5"], "needs no teacher: leave --text_share out"),
        (["--loss", "text", "--temperature", "2"], "needs no teacher: leave --temperature out"),
        (["--model", "dense", "--capacity", "1", "--train", "router"], "no routed layers"),
        (["--loss", "guess"], "loss is 'guess'"),
        (["--capacity", "2"], "capacity is 2"),
        (["--lr", "-1"], "lr is -1"),
        (["--seq", "1"], "seq is 1"),
        (["--rank", "4", "--train", "router"], "rank is 4, and train is 'router'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_left(home, capsys, monkeypatch, options, why):
    monkeypatch.chdir(home)
    save_model(home / "dense")
    if "wide" in options:
        model = AutoModelForCausalLM.from_pretrained(home / "dense")
        model.resize_token_embeddings(100)
        model.save_pretrained(home / "wide")
    (home / "damaged").mkdir()
    (home / "damaged" / "config.json").write_text("{")
    before = {path: path.stat().st_mtime_ns for path in (home / "model").iterdir()}
    assert finetune(home, "out", "--steps", "2", *options) == 2
    assert re.search(re.escape(why), capsys.readouterr().err)
    assert {path: path.stat().st_mtime_ns for path in (home / "model").iterdir()} == before
    assert not [path for path in (home / "out").glob("*") if not path.name.startswith(".")]


def test_a_folder_without_a_run_is_named_where_one_is_to_go_on(tmp_path, capsys):
    assert main(["finetune", "--out", str(tmp_path / "typo"), "--resume"]) == 2
    assert "typo, which holds no run to resume" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()
    with pytest.raises(SystemExit, match="0"):
        main(["finetune", "--resume", "--help"])


def test_without_peft_lora_says_what_to_install(home, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert finetune(home, "out", "--steps", "1", "--train", "lora") == 2
    assert "pip install 'depthgate[finetune]'" in capsys.readouterr().err


def test_steps_without_a_finite_loss_change_nothing_and_end_the_run(home, capsys):
    held = load_file(home / "model" / "model.safetensors")
    held["model.layers.1.mlp.up_proj.weight"].fill_(torch.nan)
    from safetensors.torch import save_file

    save_file(held, home / "model" / "model.safetensors", {"format": "pt"})
    assert finetune(home, "out", "--steps", "9", "--most_bad_steps", "3", "--calibrate", "0") == 2
    assert "bad step 3 in a row" in capsys.readouterr().err
    assert [row["loss"] for row in rows(home / "out")] == [None, None]
    assert not (home / "out" / "config.json").exists()
