"""Routed models under the other Auto classes, the way back to dense ones, shares by layer, and calibration."""

import copy

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import numpy as np
import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    pipeline,
)

import depthgate as dg
from depthgate.hf.conversion import shared_out
from depthgate.hf.families import heads
from tests.conftest import close
from tests.hf.words import save_model, save_tokenizer, texts
from tests.hf.zoo import FAMILY_NAMES, ROUTED, dense, plans_of, routed, tokens


@pytest.mark.parametrize("kind", FAMILY_NAMES)
@torch.no_grad()
def test_every_head_of_a_family_is_routed_as_the_language_model_is(tmp_path, kind):
    model, ids = routed(kind), tokens(2, 12)
    model.save_pretrained(tmp_path / "model")
    want = model.base_model(ids, use_cache=False).last_hidden_state
    model.base_model.save_pretrained(tmp_path / "decoder")
    close(AutoModel.from_pretrained(tmp_path / "decoder")(ids, use_cache=False).last_hidden_state, want)
    for name in heads(kind):
        again = getattr(transformers, name).from_pretrained(tmp_path / "model")
        assert type(again).__name__ == f"MoD{heads(kind)[name]}"
        assert len(dg.hf.routed_layers(again)) == 2
        close(again.base_model(ids, use_cache=False).last_hidden_state, want)
        again.save_pretrained(tmp_path / name)
        twin = getattr(transformers, name).from_pretrained(tmp_path / name)
        close(twin.base_model(ids, use_cache=False).last_hidden_state, want)


def test_classifiers_in_pipelines_and_as_reward_models(tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    folder = save_model(tmp_path / "model", capacity=0.5, rule="threshold")
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, routing_mode="causal")
    model.config.pad_token_id = 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model.save_pretrained(tmp_path / "scores")
    save_tokenizer(tmp_path / "scores")
    short, long = (pipeline("text-classification", str(tmp_path / "scores"))(each)[0]["score"] for each in texts(2, 9))
    assert short != long
    found = pipeline(
        "token-classification", model=AutoModelForTokenClassification.from_pretrained(folder), tokenizer=tokenizer
    )
    assert len(found("w3 w4 w5")) == 3
    features = pipeline("feature-extraction", model=AutoModel.from_pretrained(folder), tokenizer=tokenizer)("w3 w4")
    assert torch.tensor(features).shape == (1, 3, 32)
    rows = [{"chosen": a, "rejected": b} for a, b in zip(texts(4, 9), texts(4, 12, seed=5), strict=True)]
    how = {"per_device_train_batch_size": 2, "max_steps": 2, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    args = trl.RewardConfig(output_dir=str(tmp_path / "out"), logging_steps=1, disable_tqdm=True, **how)
    trainer = trl.RewardTrainer(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    assert torch.tensor([row["loss"] for row in trainer.state.log_history if "loss" in row]).isfinite().all()


@torch.no_grad()
def test_the_way_back_to_a_dense_model_and_on(tmp_path):
    dense("mistral").save_pretrained(tmp_path / "source")
    ids, plain = tokens(2, 12), AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    want, kind = plain(ids).logits, type(plain)
    model = dg.hf.convert(plain, 0.5)
    assert model.config.model_type == "depthgate_mistral"
    with pytest.raises(dg.DepthgateError, match="routed already"):
        dg.hf.convert(model, 0.5)
    # PEFT and TRL look there for the model without an adapter, and for a reference.
    assert str(tmp_path) not in model.name_or_path + model.config._name_or_path
    assert dg.hf.to_dense(model) is model
    assert model.config.model_type == "mistral"
    assert type(model) is kind
    assert not dg.hf.routed_layers(model)
    assert not any("depth_router" in name for name in model.state_dict())
    close(model(ids).logits, want)
    model.save_pretrained(tmp_path / "dense")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")) is kind
    assert dg.hf.convert(model, 0.25, [0]).config.depthgate["layers"] == [0]
    with pytest.raises(dg.DepthgateError, match="nothing to take out"):
        dg.hf.to_dense(dense("llama"))
    routed("llama").save_pretrained(tmp_path / "routed")
    half = LlamaForCausalLM.from_pretrained(tmp_path / "routed")  # transformers warns, and leaves the routers out
    assert len(dg.hf.routed_layers(dg.hf.convert(half, 0.5))) == 2
    with pytest.raises(dg.DepthgateError, match="of a depthgate_llama, and was read as a depthgate_mistral"):
        dg.hf.classes.MoDMistralForCausalLM.from_pretrained(tmp_path / "routed")


@torch.no_grad()
def test_each_layer_may_have_a_capacity_of_its_own(tmp_path):
    model, ids = dg.hf.convert(dense("llama"), [0.25, 0.75], [1, 2]), tokens(2, 16)
    with plans_of(model.train()) as plans:
        model(ids, use_cache=False)
    assert [plan.tokens.shape[-1] for plan in plans] == [4, 12]
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert [layer.depth_router.capacity for layer in dg.hf.routed_layers(again)] == [0.25, 0.75]
    dg.hf.set_capacity(again, 0.5)
    assert again.config.depthgate["capacity"] == 0.5
    dg.hf.set_capacity(again, np.float32(0.25))
    assert again.config.depthgate["capacity"] == 0.25
    assert dg.hf.convert(dense("llama"), np.float32(0.25)).config.depthgate["capacity"] == 0.25
    changes = dg.hf.layer_changes(dense("llama"), ids)
    by_change = dg.hf.convert(dense("llama"), 0.4, [0, 1, 2], capacity_by="change", calibration=ids)
    shares = by_change.config.depthgate["capacity"]
    assert sum(shares) / 3 == pytest.approx(0.4, abs=1e-3)
    assert sorted(range(3), key=lambda i: shares[i]) == sorted(range(3), key=lambda i: changes[i]) or len({*shares}) < 3
    for wrong in ([0.5], [0.5, 2.0], "half", None, [0.5, 0.5, 0.5]):
        with pytest.raises(dg.DepthgateError, match="capacity"):
            dg.hf.convert(dense("llama"), wrong, [1, 2])
        if wrong != [0.5]:
            with pytest.raises(dg.DepthgateError, match="capacity"):
                dg.hf.set_capacity(model, wrong)


def test_a_classifier_without_a_padding_token_is_measured_and_calibrated():
    """As those of Llama are, which transformers lets classify one row at a time: the head has no say."""
    ids, model = tokens(4, 24), dense("llama")
    model.config.pad_token_id = None
    changes = dg.hf.layer_changes(model, ids)
    classifier = transformers.LlamaForSequenceClassification(model.config)
    classifier.model.load_state_dict(model.model.state_dict())
    assert dg.hf.layer_changes(classifier.eval(), {"input_ids": ids, "labels": torch.ones(4)}) == changes
    dg.hf.convert(classifier, 0.5, "auto", rule="threshold", calibration=ids)
    dg.hf.calibrate(classifier, ids)
    with torch.no_grad(), plans_of(classifier) as plans:
        classifier.model(ids, use_cache=False)
    assert [int(plan.chosen.sum()) for plan in plans] == [48, pytest.approx(48, abs=5)]  # of 96


@pytest.mark.parametrize("changes", [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.1, 0.2, 0.3], [3.0]])
def test_shared_out_capacities_have_the_mean_that_was_asked_for(changes):
    """Also where layers change nothing, as those that are added to a model to be trained (their last weights are 0)."""
    for mean in (0.01, 0.5, 0.9, 1.0):
        shares = shared_out(mean, changes)
        assert sum(shares) / len(shares) == pytest.approx(mean, abs=1e-4)
        assert all(mean / 2 <= share <= min(1.0, 2 * mean) for share in shares)


def test_capacities_go_with_the_layers_that_they_are_given_for(tmp_path):
    """In whatever order these are named: they are sorted."""
    wanted = {"layers": [0, 1, 3], "capacity": [0.5, 0.25, 0.75]}
    model = dg.hf.convert(dense("llama"), [0.75, 0.5, 0.25], [3, 0, 1])
    assert {name: model.config.depthgate[name] for name in wanted} == wanted
    assert [layer.depth_router.capacity for layer in dg.hf.routed_layers(model)] == wanted["capacity"]
    model.save_pretrained(tmp_path)
    given = {"layers": [1, 3, 0], "capacity": [0.25, 0.75, 0.5]}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, depthgate=given)
    assert {name: again.config.depthgate[name] for name in wanted} == wanted
    assert [layer.depth_router.capacity for layer in dg.hf.routed_layers(again)] == wanted["capacity"]


@torch.no_grad()
def test_a_decoder_has_the_capacity_of_each_layer():
    """So that models with several are generated from and served by the engine, as others are."""
    model, ids = routed("llama"), tokens(2, 16)
    dg.hf.set_capacity(model, [0.25, 0.75])
    decoder = dg.hf.to_decoder(model)
    for causal in (False, True):
        close(decoder(ids, causal=causal).logits, model(ids, use_cache=False, causal_routing=causal).logits)


@pytest.mark.parametrize("rule", ["scores", "threshold"])
@torch.no_grad()
def test_calibrated_routers_take_their_share_of_the_batch(rule):
    model, ids = dg.hf.convert(dense("llama"), 0.25, rule=rule), tokens(8, 32)
    mask = (torch.arange(32) < torch.tensor([32] * 6 + [8] * 2)[:, None]).long()
    dg.hf.calibrate(model, {"input_ids": ids, "attention_mask": mask})
    with plans_of(model.eval()) as plans:
        model(ids, attention_mask=mask, use_cache=False)
    for plan in plans:  # later layers see what earlier ones left
        assert float(plan.chosen.sum() / mask.sum()) == pytest.approx(0.25, abs=0.04)
    assert bool(plans[0].chosen[:, 0].all())
    with pytest.raises(dg.DepthgateError, match="no routed layers"):
        dg.hf.calibrate(dense("llama"), ids)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(dg.DepthgateError, match="texts of one token"):
        dg.hf.calibrate(model, ids[:, :1])
    with pytest.raises(dg.DepthgateError, match="attention_mask is"):
        dg.hf.calibrate(model, {"input_ids": ids, "attention_mask": mask[:, None]})
    with pytest.raises(dg.DepthgateError, match="is_causal"):  # by the model itself
        dg.hf.calibrate(model, {"input_ids": ids, "is_causal": False})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {layer.depth_router.capacity for layer in dg.hf.routed_layers(model)} == {0.25}


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "smollm3"])
@torch.no_grad()
def test_every_calibrated_layer_takes_its_share(kind):
    model, ids = dg.hf.convert(dense(kind), [0.3, 0.5, 0.2, 0.4], [0, 1, 2, 3], rule="threshold"), tokens(8, 64)
    dg.hf.calibrate(model, {"input_ids": ids})
    with plans_of(model.eval()) as plans:
        model(ids, use_cache=False)
    shares = [float(plan.chosen.float().mean()) for plan in plans]
    assert shares == pytest.approx([0.3, 0.5, 0.2, 0.4], abs=0.07)


@pytest.mark.parametrize("kind", ["phi3", "smollm3"])
@torch.no_grad()
def test_rounding_decides_nothing_in_a_calibrated_model(kind):
    """Equal tokens are equal in the first layer: one of them at the threshold would enter with a cache alone."""
    model, ids = dg.hf.convert(dense(kind), 0.5, [0, 1, 3], rule="scores"), tokens(4, 40)
    dg.hf.calibrate(model, ids)
    with plans_of(model.eval()) as plans:
        model(ids, use_cache=False)
    assert float(plans[0].decision.abs().min()) > 1e-6
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    texts = [model.generate(tokens(2, 9, seed=5), use_cache=cached, **how) for cached in (True, False)]
    assert torch.equal(*texts)


@torch.no_grad()
def test_packed_documents_are_calibrated_each_with_its_first_token():
    model, ids = dg.hf.convert(dense("llama"), 0.4, ROUTED, rule="threshold"), tokens(4, 60)
    pos = torch.cat([torch.arange(20), torch.arange(40)]).expand(4, 60)
    dg.hf.calibrate(model, {"input_ids": ids, "position_ids": pos})
    with plans_of(model.eval()) as plans:
        model(ids, position_ids=pos, use_cache=False)
    assert all(bool(plan.chosen[:, [0, 20]].all()) for plan in plans)


@torch.no_grad()
def test_calibration_on_one_word_or_with_broken_weights():
    model = dg.hf.convert(dense("llama"), 0.4, ROUTED, rule="threshold")
    dg.hf.calibrate(model, {"input_ids": torch.full((2, 50), 5), "use_cache": True})  # which is left out
    layers = dg.hf.routed_layers(model)
    assert max(float(layer.depth_router.proj.weight.abs().max()) for layer in layers) < 1e3
    layers[1].mlp.down_proj.weight[0, 0] = torch.inf
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(dg.DepthgateError, match="layer 3 gives numbers that are not finite"):
        dg.hf.calibrate(model, tokens(4, 30))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_a_model_is_not_is_refused_or_said(tmp_path):
    """A layer class of one's own, a config that was written into, prefix tuning, masks of one row, packed documents."""
    model, ids = dense("llama"), tokens(2, 8)
    own = type("Mine", (type(model.model.layers[1]),), {})
    model.model.layers[1].__class__ = own
    with pytest.raises(dg.DepthgateError, match="layer 1 of LlamaForCausalLM is a Mine"):
        dg.hf.convert(model)
    model = routed("llama")
    model.config.depthgate["capacity"] = 0.1
    with pytest.warns(UserWarning, match="dg.hf.set_capacity"):
        model.save_pretrained(tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.depthgate["capacity"] == 0.25
    peft = pytest.importorskip("peft")
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(dg.DepthgateError, match="prefix tuning is not supported"):
        peft.get_peft_model(copy.deepcopy(routed("llama")), prefix)(ids)
    with torch.no_grad():
        model, mask = routed("llama"), (torch.arange(8) > 1).long()[None]
        close(model(ids, attention_mask=mask).logits, model(ids, attention_mask=mask.expand(2, 8)).logits)
        pos = torch.arange(8)[None] % 4
        apart = model(ids.view(4, 4), use_cache=False).logits.view(2, 8, -1)
        close(model(ids, position_ids=pos).logits, apart)
