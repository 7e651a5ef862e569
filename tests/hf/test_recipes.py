"""The recipes of docs/huggingface.md, a real step each: HF Trainer, TRL SFT, PEFT LoRA."""

import inspect
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainerState, TrainingArguments

import depthgate as dg
from tests.hf.words import save_model, texts
from tests.hf.zoo import tokens


class Anneal(TrainerCallback):
    """The capacity falls from 1 to `goal` over the first tenth of the steps."""

    def __init__(self, goal):
        self.goal = goal

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        done = min(1.0, 10 * state.global_step / state.max_steps)
        dg.hf.set_capacity(model, 1 + (self.goal - 1) * done)


@pytest.fixture
def folder(tmp_path):
    return save_model(tmp_path / "model", capacity=0.5)


def arguments(tmp_path, kind=TrainingArguments, **more):
    return kind(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )


def test_the_capacity_falls_over_a_tenth_of_the_steps_as_the_document_has_it(folder):
    document = Path(__file__).parents[2] / "docs" / "huggingface.md"
    assert inspect.getsource(Anneal) in document.read_text(encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for step, want in [(0, 1.0), (5, 0.75), (10, 0.5), (11, 0.5), (99, 0.5)]:
        Anneal(0.5).on_step_begin(None, TrainerState(global_step=step, max_steps=100), None, model)
        assert model.config.depthgate["capacity"] == want


def moved(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_trainer(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = copied(model)
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(4, 24)]
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows, callbacks=[Anneal(0.5)])
    assert trainer.train().training_loss > 0
    assert [layer.depth_router.capacity for layer in dg.hf.routed_layers(model)] == [0.5, 0.5]
    changed = moved(before, model.state_dict())
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.1.depth_router.proj.weight"} <= changed
    assert "model.layers.1.depth_router.rule.down.weight" in changed  # the causal rule learns with it
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not moved(model.state_dict(), again.state_dict())


def lora():
    from peft import LoraConfig

    return LoraConfig(
        r=4,
        target_modules="all-linear",
        exclude_modules=".*depth_router.*",
        modules_to_save=["depth_router"],
        task_type="CAUSAL_LM",
    )


@pytest.mark.parametrize("rule", ["predictor", "threshold"])
def test_peft(tmp_path, rule):
    folder = save_model(tmp_path / "model", capacity=0.5, rule=rule)
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'depthgate[finetune]'")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora())
    before = copied(model)
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(4, 24)]
    Trainer(model, arguments(tmp_path), train_dataset=rows, callbacks=[Anneal(0.5)]).train()
    changed = moved(before, model.state_dict())
    assert all("lora_" in name or "depth_router.modules_to_save" in name for name in changed)
    assert any("lora_" in name for name in changed)
    assert any("depth_router" in name and "proj.weight" in name for name in changed)
    router = dg.hf.routed_layers(model)[0].depth_router.modules_to_save["default"]
    assert any(f"rule.{'average' if rule == 'threshold' else 'down.weight'}" in name for name in changed)
    dg.hf.set_capacity(model, 0.4)
    assert router.capacity == 0.4
    assert model.config.depthgate["capacity"] == 0.4
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    ids = tokens(1, 10)
    with torch.no_grad():
        expected = model.eval()(ids).logits
        torch.testing.assert_close(again.eval()(ids).logits, expected)
        merged = again.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_trl_sft(folder, tmp_path, packing):
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install 'depthgate[finetune]'")
    from datasets import Dataset

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    before = copied(model)
    trainer = trl.SFTTrainer(
        model,
        args=arguments(tmp_path, trl.SFTConfig, max_length=48, packing=packing, bf16=False),
        train_dataset=Dataset.from_dict({"text": texts(8, 20)}),
        processing_class=tokenizer,
        callbacks=[Anneal(0.5)],
    )
    assert trainer.train().training_loss > 0
    assert "model.layers.1.depth_router.proj.weight" in moved(before, model.state_dict())


def test_transformers_serve_loads_a_model_whose_class_it_is_shown(folder, monkeypatch):
    """As in the document's serve.py; without it, `transformers serve` finds no such class."""
    model_manager = pytest.importorskip("transformers.cli.serving.model_manager", exc_type=ImportError)
    from depthgate.hf.classes import MoDLlamaForCausalLM

    monkeypatch.setattr(model_manager.transformers, "MoDLlamaForCausalLM", MoDLlamaForCausalLM, raising=False)
    server = object.__new__(model_manager.ModelManager)  # what it is started with needs a web server
    server.attn_implementation, server.dtype, server.device, server.trust_remote_code = None, "auto", "cpu", False
    server.get_quantization_config = lambda: None
    assert type(server._load_model(f"{folder}@main")) is MoDLlamaForCausalLM
