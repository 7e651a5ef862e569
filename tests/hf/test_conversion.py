"""`dg.hf.convert`: what it refuses, what it leaves alone, and which layers it picks."""

import copy
import pickle

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import numpy as np
import torch
import transformers
from torch import nn

import depthgate as dg
from depthgate.config import NEUTRAL_GATES
from depthgate.routing import GATES
from tests.conftest import close
from tests.hf.zoo import dense, plans_of, routed, tokens

ONE_LAYER = {
    "vocab_size": 8,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": 1.5}, "capacity is 1.5"),
        ({"capacity": "half"}, "capacity is 'half'"),
        ({"layers": [4]}, "a layer is 4: it must be a whole number from 0 to 3"),
        ({"layers": [0, 0]}, "each layer once"),
        ({"layers": []}, "layers is empty"),
        ({"layers": "odd"}, "layers is 'odd'"),
        ({"layers": 3}, "layers is 3"),
        ({"layers": "auto"}, "calibration go together"),
        ({"calibration": torch.ones(1, 4).long()}, "calibration go together"),
        ({"layers": "auto", "calibration": "text"}, "needs token ids"),
        ({"layers": "auto", "calibration": torch.zeros(0, 4).long()}, "needs token ids"),
        ({"layers": "auto", "calibration": torch.tensor([[3, 96]])}, "has the id 96, but the model's ids are 0 to 95"),
        ({"layers": "auto", "calibration": torch.tensor([[3, -1]])}, "has the id -1"),
        ({"gate": "relu"}, "gate is 'relu'"),
        ({"gate": "sigmoid"}, "gate is 'sigmoid', which is not 1 .*: use one_plus_tanh or straight_through"),
        ({"gate": "raw"}, "gate is 'raw', which is not 1"),
        ({"rule": "magic"}, "rule is 'magic'"),
        ({"rule_loss": 2}, "rule_loss is 2"),
        ({"capacity": (0.9, 0.3), "capacity_by": "change"}, "each layer its share of one capacity: give one"),
    ],
)
def test_a_wrong_option_is_refused_and_the_model_is_as_before(options, why):
    model = dense("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(dg.DepthgateError, match=why):
        dg.hf.convert(model, **options)
    assert type(model) is transformers.LlamaForCausalLM
    assert model.config.model_type == "llama"
    assert model.state_dict().keys() == before.keys()


def test_models_that_cannot_be_routed_are_refused_by_name():
    tiny = ONE_LAYER
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**tiny, is_decoder=True))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=8, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    )
    head = transformers.LlamaForQuestionAnswering(transformers.LlamaConfig(**tiny))
    cross = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, add_cross_attention=True)
    )
    both_ways = dense("gemma3_text")
    both_ways.config.use_bidirectional_attention = True
    quantised = dense("llama")
    quantised.config.quantization_config = {"quant_method": "bitsandbytes"}
    for model, why in [
        (nn.Linear(2, 2), "model is a Linear"),
        (bert, r"BertLMHeadModel \(bert\) cannot be routed: its layers do not take .*position_embeddings"),
        (t5, "reads an encoder's output"),
        (cross, "reads an encoder's output"),
        (head, "LlamaForQuestionAnswering cannot be routed, only a LlamaForCausalLM"),
        (both_ways, "looks at later tokens"),
        (quantised, "quantised weights"),
        (routed("llama"), "routed already"),
    ]:
        with pytest.raises(dg.DepthgateError, match=why):
            dg.hf.convert(model)


class Louder(transformers.LlamaModel):
    """A decoder of somebody's own."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.last_hidden_state = 1.5 * out.last_hidden_state
        return out


def test_a_decoder_of_ones_own_is_refused_rather_than_lost():
    model, ids = dense("llama"), tokens(1, 6)
    model.model.__class__ = Louder
    before = model(ids).logits
    with pytest.raises(dg.DepthgateError, match="the decoder of LlamaForCausalLM is a Louder, not a LlamaModel"):
        dg.hf.convert(model)
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)
    model = dense("llama")
    model.model.forward = lambda *args, **kwargs: None
    with pytest.raises(dg.DepthgateError, match="the decoder of LlamaForCausalLM has a forward of its own"):
        dg.hf.convert(model)


def test_layers_that_the_config_does_not_know_of_are_refused():
    model, ids = dense("llama"), tokens(1, 6)
    del model.model.layers[3]
    with pytest.raises(dg.DepthgateError, match=r"has 3 layers, and its config says 4: set config\.num_hidden_layers"):
        dg.hf.convert(model, layers=[1, 3])
    assert type(model) is transformers.LlamaForCausalLM
    model.config.num_hidden_layers = 3
    before = model.eval()(ids).logits
    close(dg.hf.convert(model)(ids).logits, before)


def test_layers_of_arrays_and_of_a_model_with_one():
    for layers in (np.array([1, 3]), torch.tensor([1, 3])):
        assert dg.hf.convert(dense("llama"), layers=layers).config.depthgate["layers"] == [1, 3]
    with pytest.raises(dg.DepthgateError, match=r"'every_other', and the model has one layer: give layers=\[0\]"):
        dg.hf.convert(transformers.LlamaForCausalLM(transformers.LlamaConfig(**ONE_LAYER)))


def test_a_model_with_an_adapter_is_refused_with_what_to_do():
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'depthgate[finetune]'")
    model = peft.get_peft_model(dense("llama"), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    with pytest.raises(dg.DepthgateError, match=r"PeftModelForCausalLM: call merge_and_unload\(\)"):
        dg.hf.convert(model)
    assert dg.hf.convert(model.merge_and_unload()).config.depthgate["layers"] == [1, 3]


def test_another_model_of_the_same_config_stays_dense():
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1
    )
    one, other = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    dg.hf.convert(one)
    assert one.config.depthgate["layers"] == [1]
    assert all(getattr(part, "config", one.config) is one.config for part in one.modules())
    assert other.config is config
    assert config.model_type == "llama"
    assert not hasattr(config, "depthgate")


def test_auto_picks_the_layers_that_change_their_tokens_least():
    model, ids = dense("llama"), tokens(3, 12)
    with torch.no_grad():
        for i, share in enumerate((0.05, 1.0, 1.0, 0.01)):
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                model.get_submodule(f"model.layers.{i}.{name}").weight.mul_(share)
        states = model(ids, output_hidden_states=True).hidden_states
    changes = dg.hf.layer_changes(model, ids)
    for i in range(3):  # the last of the recorded states is behind the norm
        want = ((states[i + 1] - states[i]).norm(dim=-1) / states[i].norm(dim=-1)).mean()
        close(torch.tensor(changes[i]), want)
    assert dg.hf.convert(model, layers="auto", calibration=ids).config.depthgate["layers"] == [0, 3]


def test_padding_has_no_say_in_how_much_layers_change():
    model, ids = dense("llama"), tokens(2, 9)
    longer = torch.cat([ids, tokens(2, 5, seed=3)], 1)
    mask = (torch.arange(14) < 9).long().expand(2, 14)
    padded = dg.hf.layer_changes(model, {"input_ids": longer, "attention_mask": mask})
    close(torch.tensor(padded), torch.tensor(dg.hf.layer_changes(model, ids)))


def test_gates_that_are_taken_are_those_that_are_one_at_first():
    found = [name for name, gate in GATES.items() if torch.equal(gate(torch.zeros(1)), torch.ones(1))]
    assert sorted(found) == sorted(NEUTRAL_GATES)


@pytest.mark.parametrize("rule", ["scores", "predictor", "threshold"])
def test_a_new_model_evaluates_as_the_dense_one_at_any_capacity(rule):
    model, ids = dense("llama"), tokens(2, 12)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        dg.hf.convert(model, 0.25, rule=rule)
        assert torch.equal(model(ids, use_cache=False).logits, want)
        assert not torch.allclose(model.train()(ids, use_cache=False).logits, want)


def test_training_routes_the_share_that_capacity_says_and_evaluation_what_the_rule_says():
    model, ids = routed("llama"), tokens(2, 12)
    with torch.no_grad(), plans_of(model) as plans:
        for training, causal, asked in [(True, False, None), (False, True, None), (False, False, False)]:
            plans.clear()
            model.train(training)(ids, causal_routing=asked)
            assert [plan.causal for plan in plans] == [causal, causal]
            if not causal:
                assert all((plan.chosen.sum(1) == 3).all() for plan in plans)
        plans.clear()
        dg.hf.set_capacity(model, 0.5)
        model.train()(ids)
        assert all((plan.chosen.sum(1) == 6).all() for plan in plans)
    assert model.config.depthgate["capacity"] == 0.5
    with pytest.raises(dg.DepthgateError, match="capacity is 2"):
        dg.hf.set_capacity(model, 2)
    with pytest.raises(dg.DepthgateError, match="no routed layers"):
        dg.hf.set_capacity(dense("llama"), 0.5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_copies_and_pickles_are_the_same_model(kind):
    model, ids = routed(kind), tokens(2, 9)
    with torch.no_grad():
        want = model(ids).logits
        assert torch.equal(copy.deepcopy(model)(ids).logits, want)
        assert torch.equal(pickle.loads(pickle.dumps(model))(ids).logits, want)
