"""Routers of drop-in layers train by themselves: the same gradients as with the losses added by hand, and thresholds
that move once in a forward pass."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import depthgate as dg
from depthgate.errors import DepthgateWarning
from depthgate.routing import causal_bce, load_balance, z_loss
from tests.conftest import close

D = 16


def encoder_layer():
    return nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, dropout=0.0)


# Each with its losses, added by hand.
LAYERS = {
    "depths": (
        lambda **options: dg.MixtureOfDepths(encoder_layer(), D, 0.5, **options),
        {"rule_loss": causal_bce, "z_loss": z_loss},
    ),
    "depths, predictor": (
        lambda **options: dg.MixtureOfDepths(nn.Linear(D, D), D, 0.5, rule="predictor", **options),
        {"rule_loss": causal_bce, "z_loss": z_loss},
    ),
    "depths, threshold": (
        lambda **options: dg.MixtureOfDepths(nn.Linear(D, D), D, 0.5, rule="threshold", **options),
        {"z_loss": z_loss},
    ),
    "token choice": (
        lambda **options: dg.MixtureOfExperts(D, 4, null_experts=1, hidden=8, **options),
        {"balance_loss": load_balance, "z_loss": z_loss},
    ),
    "expert choice": (
        lambda **options: dg.MixtureOfExperts(D, 4, choice="experts", hidden=8, rule="predictor", **options),
        {"rule_loss": causal_bce, "z_loss": z_loss},
    ),
}
WEIGHTS = {"rule_loss": 0.01, "balance_loss": 0.01, "z_loss": 0.001}


class Model(nn.Module):
    """A routed layer between two others."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(D, D), layer, nn.Linear(D, 1)

    def forward(self, x, reentrant=None, **call):
        h = self.first(x)
        h = self.layer(h, **call) if reentrant is None else checkpoint(self.layer, h, use_reentrant=reentrant)
        if isinstance(h, tuple):
            return self.last(h[0]), h[1]
        return self.last(h)


def build(name, **options):
    torch.manual_seed(0)
    return Model(LAYERS[name][0](**options)).double()


def batch(B=4, seed=3):
    return torch.randn(B, 12, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def main_loss(y):
    return 1e-2 * y.square().mean()


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def loss_by_hand(name, model, x, weights=WEIGHTS):
    """The loss of a model with losses=None, those of its router added."""
    y, (plan,) = model(x, return_plans=True)
    return main_loss(y) + sum(weights[key] * loss(plan) for key, loss in LAYERS[name][1].items())


def by_hand(name, x, weights=WEIGHTS):
    model = build(name, losses=None)
    loss_by_hand(name, model, x, weights).backward()
    return gradients(model)


def alone(name, x):
    """Gradients of the main loss alone, where there are any."""
    model = build(name, losses=None)
    main_loss(model(x)).backward()
    return gradients(model)


def same(grads, expected):
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        close(grads[name], grad)


def differ(grads, others):
    name = "layer.router.proj.weight"
    return not torch.allclose(grads[name], others[name], rtol=1e-3)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed reentrant"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_equal_those_of_losses_added_by_hand(name, reentrant):
    model, x = build(name), batch()
    main_loss(model(x, reentrant)).backward()
    grads, expected = gradients(model), by_hand(name, x)
    same(grads, expected)
    assert differ(grads, alone(name, x))


@pytest.mark.parametrize("name", LAYERS)
def test_with_padding_only_real_tokens_count(name):
    model, x = build(name), batch()
    mask = torch.arange(12) < torch.tensor([[12], [7], [3], [1]])
    main_loss(model(x, mask=mask)).backward()
    plain = build(name, losses=None)
    y, (plan,) = plain(x, mask=mask, return_plans=True)
    (main_loss(y) + sum(WEIGHTS[key] * loss(plan) for key, loss in LAYERS[name][1].items())).backward()
    same(gradients(model), gradients(plain))


@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_zero_turn_each_loss_off(name):
    x = batch()
    for key in LAYERS[name][1]:
        model = build(name, **{key: 0})
        main_loss(model(x)).backward()
        grads = gradients(model)
        expected = by_hand(name, x, {**WEIGHTS, key: 0})
        same(grads, {n: expected[n] for n in grads})
        assert all(not expected[n].any() for n in expected.keys() - grads.keys())
    for options in (dict.fromkeys(WEIGHTS, 0), {"losses": None}):
        model = build(name, **options)
        main_loss(model(x)).backward()
        grads, expected = gradients(model), alone(name, x)
        same({n: g for n, g in grads.items() if n in expected or g.any()}, expected)


@pytest.mark.parametrize("options", [{}, {"rule_loss": 0}, {"rule_loss": 0, "z_loss": 0}])
@pytest.mark.parametrize("name", ["depths, predictor", "expert choice"])
def test_a_predictor_without_a_loss_gets_a_gradient_of_zero(name, options):
    """DDP waits for a gradient of every parameter."""
    for causal in (True,) if not options else (False, True):
        model, hand = build(name, **options), build(name, losses=None)
        main_loss(model(batch(), causal=causal)).backward()
        grads = {n: g for n, g in gradients(model).items() if ".rule." in n}
        assert grads.keys() == {n for n, _ in hand.named_parameters() if ".rule." in n}
        assert not any(g.any() for g in grads.values())


@pytest.mark.parametrize("name", LAYERS)
def test_evaluation_and_no_grad_add_no_loss(name):
    model, x = build(name), batch()
    main_loss(model.eval()(x)).backward()
    same(gradients(model), alone(name, x))
    model.train()
    with torch.no_grad():
        y = model.layer(x)
    assert not y.requires_grad
    close(y, build(name, losses=None).layer(x))
    # a block that is frozen, and x too: the router still trains
    for p in model.parameters():
        p.requires_grad_(False)
    model.layer.router.requires_grad_(True)
    main_loss(model(x)).backward()
    expected = by_hand(name, x)
    same(gradients(model), {n: g for n, g in expected.items() if "router" in n})


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed reentrant"])
@pytest.mark.parametrize("name", LAYERS)
def test_under_autocast(name, reentrant):
    model, hand, x = build(name).float(), build(name, losses=None).float(), batch().float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = main_loss(model(x, reentrant))
        expected = loss_by_hand(name, hand, x)
    loss.backward()
    expected.backward()
    grads = gradients(model)
    same(grads, gradients(hand))
    assert differ(grads, {n: g.float() for n, g in alone(name, x.double()).items()})


@pytest.mark.parametrize("name", LAYERS)
def test_accumulation_with_the_scale_of_a_part(name):
    model, hand, parts = build(name), build(name, losses=None), batch().chunk(4)
    dg.set_loss_scale(model, 1 / 4)
    for part in parts:
        (main_loss(model(part)) / 4).backward()
        (loss_by_hand(name, hand, part) / 4).backward()
    same(gradients(model), gradients(hand))


@pytest.mark.parametrize("name", LAYERS)
def test_gradient_scaler_whose_scale_changes(name):
    model, hand = build(name).float(), build(name, losses=None).float()
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, hand)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=4.0, growth_interval=1)
    scales = []
    for step in range(3):
        x = batch(seed=step).float()
        scales.append(scaler.get_scale())
        dg.set_loss_scale(model, scaler.get_scale())
        scaler.scale(main_loss(model(x))).backward()
        loss_by_hand(name, hand, x).backward()
        scaler.unscale_(optimizers[0])
        for p, q in zip(model.parameters(), hand.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                close(p.grad, q.grad)
        scaler.step(optimizers[0])
        optimizers[1].step()
        scaler.update()
        model.zero_grad()
        hand.zero_grad()
    assert scales == [8.0, 32.0, 128.0]
    for p, q in zip(model.parameters(), hand.parameters(), strict=True):
        close(p, q)


@pytest.mark.parametrize("name", ["depths, predictor", "token choice", "expert choice"])
def test_compiled_with_scales_that_change(name):
    model, x = build(name), batch()
    model.compile(backend="aot_eager", fullgraph=True)
    expected = by_hand(name, x)
    main_loss(model(x)).backward()
    same(gradients(model), expected)
    for scale in (0.5, torch.tensor(64.0)):
        dg.set_loss_scale(model, scale)
        (scale * main_loss(model(x))).backward()
        same(gradients(model), {n: scale * g for n, g in expected.items()})


def test_compiled_with_a_checkpoint_inside():
    """Gradients as by hand, and the threshold moves once."""
    name = "depths, threshold"
    model, other, x = build(name), build(name), batch()
    model.compile(backend="aot_eager")
    main_loss(model(x, False)).backward()
    same(gradients(model), by_hand(name, x))
    other(x)
    same(thresholds(model.layer), thresholds(other.layer))


def test_two_layers_in_one_model_add_two_losses():
    """Each its own, exactly once, though the gradient of the first passes through the second."""

    def model(**options):
        torch.manual_seed(0)
        layers = [LAYERS[name][0](**options) for name in ("depths", "token choice")]
        return nn.Sequential(nn.Linear(D, D), *layers, nn.Linear(D, 1)).double()

    x, layers, hand = batch(), model(), model(losses=None)
    main_loss(layers(x)).backward()
    with dg.record(hand) as plans:
        y = hand(x)
    rule, balance = 0.01 * causal_bce(plans[0]), 0.01 * load_balance(plans[1])
    (main_loss(y) + rule + balance + 0.001 * (z_loss(plans[0]) + z_loss(plans[1]))).backward()
    same(gradients(layers), gradients(hand))


@pytest.mark.parametrize("name", ["depths", "token choice"])
def test_fp16_without_a_scale_warns_once(name):
    model, x = build(name).float(), batch().float()
    with torch.autocast("cpu", torch.float16):
        with pytest.warns(DepthgateWarning, match="set_loss_scale") as caught:
            model(x)
        assert len(caught) == 1
        other = build(name).float()
        dg.set_loss_scale(other, 2.0**16)
        off = build(name, losses=None).float()
        with warnings.catch_warnings():
            warnings.simplefilter("error", DepthgateWarning)
            for quiet in (model, other, off, build(name).float().eval()):
                quiet(x)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error", DepthgateWarning)
        build(name).float()(x)


def test_bad_options_of_losses_and_scales_are_named():
    linear = nn.Linear(D, D)
    for options, text in (
        ({"losses": "forward"}, "losses is 'forward'"),
        ({"rule_loss": -1}, "rule_loss is -1"),
        ({"z_loss": "much"}, "z_loss is 'much'"),
    ):
        with pytest.raises(dg.DepthgateError, match=text):
            dg.MixtureOfDepths(linear, D, **options)
    with pytest.raises(dg.DepthgateError, match="balance_loss is nan"):
        dg.MixtureOfExperts(D, 4, balance_loss=float("nan"))
    with pytest.raises(dg.DepthgateError, match="model is a int"):
        dg.set_loss_scale(3, 1)
    with pytest.raises(dg.DepthgateError, match="this Linear has no drop-in layer"):
        dg.set_loss_scale(linear, 0.5)
    for scale in (0, -1, float("nan"), "half", None):
        with pytest.raises(dg.DepthgateError, match=f"scale is {scale!r}"):
            dg.set_loss_scale(dg.MixtureOfDepths(linear, D), scale)


# Thresholds.
MOVING = {
    "depths": lambda: dg.MixtureOfDepths(nn.Linear(D, D), D, 0.5, rule="threshold"),
    "expert choice": lambda: dg.MixtureOfExperts(D, 4, choice="experts", hidden=8),
}


def thresholds(layer):
    return {name: b.clone() for name, b in layer.router.rule.named_buffers()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed reentrant"])
@pytest.mark.parametrize("name", MOVING)
def test_thresholds_move_once_in_a_forward_pass(name, reentrant, compiled):
    layer = MOVING[name]().double()
    by_hand = copy.deepcopy(layer)
    model = Model(layer).double()
    if compiled:
        layer.compile(backend="aot_eager", fullgraph=True)
    for step in range(3):
        x = batch(seed=step)
        with torch.no_grad():
            (plan,) = by_hand.eval()(model.first(x), return_plans=True)[1]
        by_hand.router.update(plan)
        y = model(x, reentrant)
        same(thresholds(layer), thresholds(by_hand))
        y.sum().backward()
        same(thresholds(layer), thresholds(by_hand))
    assert thresholds(by_hand)["weight"] > 0


@pytest.mark.parametrize("name", MOVING)
def test_thresholds_stay_in_evaluation_and_move_without_gradients_in_training_mode(name):
    layer = MOVING[name]()
    x = torch.randn(2, 8, D)
    start = thresholds(layer)
    layer.eval()(x)
    same(thresholds(layer), start)
    by_hand = copy.deepcopy(layer)
    by_hand.router.update(by_hand(x, return_plans=True)[1][0])
    with torch.no_grad():
        layer.train()(x)
    same(thresholds(layer), thresholds(by_hand))
    assert thresholds(layer)["weight"] != start["weight"]
