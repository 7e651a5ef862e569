"""The causal rules inside a transformers model: each generates as it computes, and learns from ordinary training."""

import warnings

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch

import depthgate as dg
from depthgate.hf.families import decoder_layers
from depthgate.hf.layer import routed_layers
from depthgate.routing import causal_bce
from tests.conftest import close
from tests.hf.zoo import dense, plans_of, routed, tokens

checkpointing = pytest.mark.parametrize("reentrant", [None, False, True])


def training(model, reentrant: bool | None):
    model.train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("rule", ["scores", "predictor", "threshold"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_every_rule_generates_with_a_cache_as_without(kind, rule):
    model, ids = routed(kind, rule=rule), tokens(3, 8)
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **how), model.generate(ids, **how, use_cache=False))


@checkpointing
def test_the_rule_learns_by_its_own_loss_and_nothing_else_does(reentrant):
    """The gradients of a predictor are those of weight * causal_bce, and all others as if there were no such loss."""
    ids = tokens(2, 12)
    found = {}
    for weight in (0.0, 0.5):
        model = training(dg.hf.convert(dense("llama"), 0.25, [0, 3], rule="predictor", rule_loss=weight), reentrant)
        with torch.no_grad():
            for layer in routed_layers(model):
                for parameter in layer.depth_router.parameters():
                    parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))
        model(ids, labels=ids, use_cache=False).loss.backward()
        found[weight] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.gradient_checkpointing_disable()
    model.zero_grad()
    with plans_of(model) as plans:
        model(ids, use_cache=False)
    (0.5 * sum(causal_bce(plan) for plan in plans)).backward()
    for name, parameter in model.named_parameters():
        if ".rule." in name:
            assert name not in found[0.0]
            close(found[0.5][name], parameter.grad)
        else:
            close(found[0.5][name], found[0.0][name])


def test_a_call_may_give_the_loss_of_the_rule_another_weight():
    """As where the gradients of several batches are added up."""
    model, ids = training(dg.hf.convert(dense("llama"), 0.25, [0, 3], rule_loss=0.5), None), tokens(2, 12)
    found = []
    for call in ({}, {"rule_loss": 0.125}):
        model.zero_grad()
        model(ids, labels=ids, use_cache=False, **call).loss.backward()
        found.append([layer.depth_router.rule.down.bias.grad for layer in routed_layers(model)])
    assert len(found[0]) == 2
    for whole, part in zip(*found, strict=True):
        close(4 * part, whole)
        assert whole.abs().max() > 0


@pytest.mark.parametrize("rule", ["scores", "predictor", "threshold"])
def test_float16_is_warned_of_where_a_scaler_would_shrink_the_loss_of_the_rule(rule):
    """It divides all gradients by its scale, and the rule's loss was never multiplied by it."""
    model, ids = routed("llama", rule=rule).train(), tokens(2, 8)
    for dtype, wanted in ((torch.bfloat16, False), (torch.float16, rule != "threshold")):
        with warnings.catch_warnings(record=True) as said, torch.autocast("cpu", dtype):
            warnings.simplefilter("always")
            model(ids, labels=ids, use_cache=False)
        assert any("gradient scaler" in str(each.message) for each in said) == wanted


@checkpointing
def test_a_threshold_moves_once_a_step_towards_the_kth_score(reentrant):
    model = training(dg.hf.convert(dense("llama"), 0.25, [0, 3], rule="threshold"), reentrant)
    ids = tokens(4, 12)
    with torch.no_grad():
        for layer in routed_layers(model):
            layer.depth_router.proj.weight.copy_(torch.linspace(-1, 1, 32)[None])
    with plans_of(model) as plans:
        loss = model(ids, labels=ids, use_cache=False).loss
        rules = [layer.depth_router.rule for layer in routed_layers(model)]
        assert [float(rule.weight) for rule in rules] == [0, 0]  # a forward pass moves nothing
        loss.backward()
    for rule, plan in zip(rules, plans[:2], strict=True):
        assert float(rule.weight) == pytest.approx(0.1)
        kth = plan.scores.flatten().sort(descending=True).values[int(0.25 * 48) - 1]
        close(rule.threshold[0], kth)


@pytest.mark.parametrize("rule", ["predictor", "threshold"])
def test_a_compiled_step_of_training_is_one_graph_and_the_same_step(rule):
    ids, mask = tokens(2, 12), (torch.arange(12) < torch.tensor([[12], [9]])).long()
    found = []
    for compiled in (False, True):
        model = routed("llama", rule=rule).train()
        del decoder_layers(model)[1:3]  # the dense ones
        model.config.num_hidden_layers = 2
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        loss = call(ids, labels=ids, attention_mask=mask, use_cache=False).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **grads, **{n: b for n, b in model.named_buffers() if ".rule." in n}})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        close(found[1][name], value)


def test_steps_of_training_teach_the_rule_what_training_picks():
    """At first the rule routes every token; after some steps on one batch, nearly those that the top k picks."""
    model, ids = dg.hf.convert(dense("llama"), 0.25, [1, 2]).train(), tokens(4, 16)
    with torch.no_grad():
        for layer in routed_layers(model):
            layer.depth_router.proj.weight.normal_()
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if ".rule." in name], lr=1e-2)
    agreed = []
    for _ in range(60):
        with plans_of(model) as plans:
            model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        agreed.append(min(float(dg.routing.agreement(plan)) for plan in plans))
    assert agreed[0] == pytest.approx(0.25)
    assert agreed[-1] > 0.9
