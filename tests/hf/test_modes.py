"""`routing_mode`: one model in training and in evaluation, for trainers that compare the two."""

import json
import math
import warnings

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import AutoModelForCausalLM

import depthgate as dg
from depthgate.errors import DepthgateWarning
from depthgate.hf.layer import routed_layers
from tests.conftest import close
from tests.hf.words import save_tokenizer, texts
from tests.hf.zoo import dense, plans_of, routed, tokens


def mixed(rule="threshold"):
    """A model whose two ways of choosing give different logits."""
    return routed("llama", rule=rule, capacity=0.5)


@pytest.mark.parametrize("rule", ["scores", "predictor", "threshold"])
def test_the_mode_is_the_same_in_training_and_evaluation_and_is_saved(tmp_path, rule):
    model, ids = mixed(rule), tokens(2, 24)
    with torch.no_grad():
        causal, top_k = (model(ids, use_cache=False, causal_routing=each).logits for each in (True, False))
        assert (causal - top_k).abs().max() > 0.01
        for mode, want in (("auto", (causal, top_k)), ("causal", (causal, causal)), ("top_k", (top_k, top_k))):
            model.routing_mode = mode
            close(model.eval()(ids, use_cache=False).logits, want[0])
            close(model.train()(ids, use_cache=False).logits, want[1])
    model.routing_mode = "causal"
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert again.routing_mode == again.config.routing_mode == "causal"
    close(again.train()(ids, use_cache=False).logits, causal)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model", routing_mode="top_k").routing_mode == "top_k"
    with pytest.raises(dg.DepthgateError, match="routing_mode is 'both'"):
        model.routing_mode = "both"
    with pytest.raises(dg.DepthgateError, match="routing_mode is 'both'"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", routing_mode="both")
    with pytest.raises(dg.DepthgateError, match="routing_mode"):
        dg.hf.convert(dense("llama"), routing_mode="best")


@pytest.mark.parametrize("rule", ["predictor", "threshold"])
def test_the_rule_learns_in_causal_training_too(rule):
    """What the top k of the scores would have been: a threshold moves to the k-th, a predictor is told."""
    model, ids = mixed(rule).train(), tokens(4, 16)
    model.routing_mode = "causal"
    rules = [layer.depth_router.rule for layer in routed_layers(model)]
    with plans_of(model) as plans:
        loss = model(ids, labels=ids, use_cache=False).loss
    assert all(plan.causal for plan in plans)
    before = [float(each.weight) for each in rules] if rule == "threshold" else []
    averages = [each.average[0].clone() for each in rules] if rule == "threshold" else []
    loss.backward()
    if rule == "threshold":
        for each, plan, was in zip(rules, plans, before, strict=True):
            kth = plan.scores.flatten().sort(descending=True).values[31]
            assert float(each.weight) == pytest.approx(0.9 * was + 0.1)
            share = max(0.1, 12 / (12 + math.log(1 - was) / math.log(0.9)))  # it was moved before
            wanted = averages.pop(0) / was * (1 - share) + share * kth
            close(each.average[0] / each.weight, wanted)
    else:
        assert all(each.down.bias.grad.abs().max() > 0 for each in rules)


def trained(trainer):
    """The figures of each step."""
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def options(kind, folder, **more):
    return kind(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-3,
        **more,
    )


def tokenizer_in(folder):
    from transformers import AutoTokenizer

    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_preferences_begin_where_policy_and_reference_are_one_model(tmp_path):
    """The first loss of DPO is ln 2, its margin 0; in "auto" the policy is another model than its reference."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    tokenizer = tokenizer_in(tmp_path)
    words = [text.split() for text in texts(8, 24)]
    rows = [
        {"prompt": " ".join(w[:8]), "chosen": " " + " ".join(w[8:16]), "rejected": " " + " ".join(reversed(w[8:24]))}
        for w in words
    ]
    first, how = {}, {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    mixed().save_pretrained(tmp_path / "model")
    for mode in ("causal", "auto"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")  # and TRL loads the reference from there
        model.routing_mode = mode
        args = options(trl.DPOConfig, tmp_path / mode, max_length=48)
        first[mode] = trained(trl.DPOTrainer(model, args=args, **how))[0]
    with pytest.raises(
        OSError, match="a model changed in memory: save it"
    ):  # else the dense one would be its reference
        trl.DPOTrainer(dg.hf.convert(dg.hf.to_dense(model)), args=args, **how)
    assert first["causal"]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert first["causal"]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert abs(first["auto"]["loss"] - 0.6931) > 1e-3


def test_a_predictor_keeps_the_parts_of_a_step_alike(tmp_path):
    """It moves with the weights, when all parts have been added up; a threshold has moved before the second."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    mixed("predictor").save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", routing_mode="causal")
    words = [text.split() for text in texts(8, 16)]
    rows = [{"prompt": w[0], "chosen": " " + " ".join(w[1:9]), "rejected": " " + " ".join(w[9:])} for w in words]
    args = options(trl.DPOConfig, tmp_path / "out", max_length=48, gradient_accumulation_steps=4)
    how = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer_in(tmp_path)}
    assert trained(trl.DPOTrainer(model, args=args, **how))[0]["loss"] == pytest.approx(0.6931, abs=1e-4)


def test_a_model_with_an_adapter_has_its_mode_in_the_config():
    """PEFT's model hands reading on, and keeps what is written to it."""
    peft = pytest.importorskip("peft")
    ids = tokens(2, 24)
    model = peft.get_peft_model(mixed(), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["depth_router"]))
    model.config.routing_mode = "causal"
    assert model.routing_mode == "causal"
    with torch.no_grad():
        close(model.train()(ids, use_cache=False).logits, model.eval()(ids, use_cache=False).logits)


def test_supervised_and_group_relative_steps_begin_at_the_models_own_numbers(tmp_path):
    """The first loss of SFT is the model's own in evaluation; the first ratios of GRPO are 1."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    tokenizer, model = tokenizer_in(tmp_path), mixed()
    model.routing_mode = "causal"
    rows = [{"text": text} for text in texts(2, 24)]
    ids = tokenizer([row["text"] for row in rows], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        want = float(model(ids, labels=ids, use_cache=False).loss)
    args = options(trl.SFTConfig, tmp_path / "sft", max_length=48)
    data = Dataset.from_list(rows)
    sft = trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
    assert trained(sft)[0]["loss"] == pytest.approx(want, rel=0.05)  # TRL may add an end
    model = mixed()
    model.routing_mode = "causal"
    model.save_pretrained(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")  # and the reference, which TRL loads
    how = {"num_generations": 2, "max_completion_length": 8, "beta": 0.04, "num_iterations": 2}
    args = options(trl.GRPOConfig, tmp_path / "grpo", **how)
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(c) % 5) for c in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": row["text"][:20]} for row in rows]),
        processing_class=tokenizer,
    )
    assert trained(trainer)[0]["kl"] == pytest.approx(0, abs=1e-4)


def test_frozen_routers_are_warned_of_once_training_begins():
    peft = pytest.importorskip("peft")
    ids = tokens(2, 8)
    model = peft.get_peft_model(mixed(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")).train()
    with pytest.warns(DepthgateWarning, match=r"routers do not learn.*modules_to_save=\['depth_router'\]"):
        model(ids, labels=ids)
    lora = {"target_modules": ["q_proj"], "modules_to_save": ["depth_router"], "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", DepthgateWarning)
        peft.get_peft_model(mixed(), peft.LoraConfig(**lora)).train()(ids, labels=ids)
        with torch.no_grad():
            model.eval()(ids)


def test_config_values_that_are_not_given_have_their_defaults(tmp_path):
    model = dg.hf.convert(dense("llama"), 0.5, [1, 3])
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "depthgate": {"layers": [1, 3]}}))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert again.config.depthgate == model.config.depthgate
    given = {"layers": [1, 3], "capacity": 0.9}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", depthgate=given)
    assert again.config.depthgate == {**model.config.depthgate, "capacity": 0.9}
