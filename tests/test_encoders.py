"""The sequence encoders: their shape contract, padding, window, gating, and that skipping is real."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import depthgate as dg
from tests.conftest import close

BOTH = [dg.MoDEncoder, dg.SoftMoEEncoder]


def small(kind, **kwargs):
    return kind(embed_dim=6, hidden_size=16, num_layers=2, window_size=10, **kwargs).eval()


def test_options_and_defaults_are_those_of_the_design():
    def options(kind):
        return {n: p.default for n, p in inspect.signature(kind.__init__).parameters.items() if n != "self"}

    assert options(dg.MoDEncoder) == {
        "embed_dim": 287,
        "hidden_size": 256,
        "num_heads": 4,
        "capacity_ratio": 0.5,
        "num_layers": 4,
        "dropout": 0.1,
        "window_size": 60,
        "gating": "hard",
    }
    assert options(dg.SoftMoEEncoder) == {
        "embed_dim": 256,
        "hidden_size": 256,
        "num_experts": 4,
        "num_layers": 4,
        "dropout": 0.1,
        "window_size": 60,
        "seq_len": None,
    }


@pytest.mark.parametrize("kind", BOTH)
def test_recommended_defaults_build_an_encoder(kind):
    defaults = kind.recommended_defaults()
    signature = inspect.signature(kind.__init__).parameters
    assert all(signature[name].default == value for name, value in defaults.items())
    encoder = kind(embed_dim=7, **{**defaults, "hidden_size": 32})
    assert encoder.output_size == 32
    assert encoder(torch.randn(3, 11, 7)).shape == (3, 32)
    defaults["hidden_size"] = -1
    assert kind.recommended_defaults()["hidden_size"] == 256


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("T", [1, 2, 9, 10, 11, 37])
def test_any_length_works_and_the_last_step_is_returned(kind, T):
    encoder = small(kind)
    x = torch.randn(3, T, 6)
    features, plans = encoder.features(x)
    assert torch.equal(encoder(x), features[:, -1])
    assert len(plans) == 2
    if T > 1:
        changed = x.clone()
        changed[:, 0] += 1
        moved = (encoder(changed) != encoder(x)).any(-1)
        assert kind is dg.MoDEncoder or moved.all()


@pytest.mark.parametrize("make", [dg.MoDEncoder, lambda **k: dg.MoDEncoder(gating="soft", **k), dg.SoftMoEEncoder])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_valid_step_of_a_masked_row_equals_the_row_alone(make, side):
    encoder = make(embed_dim=6, hidden_size=16, num_layers=2, window_size=10).eval().double()
    x = torch.randn(4, 12, 6, dtype=torch.float64)
    lengths = [12, 7, 1, 0]
    t = torch.arange(12)
    mask = torch.stack([(t >= 12 - n) if side == "left" else (t < n) for n in lengths])
    x[~mask] = torch.nan  # whatever lies in padding
    out = encoder(x, mask)
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())
    for b, n in enumerate(lengths[:3]):
        close(out[b], encoder(x[b : b + 1, mask[b]])[0])
        assert n == mask[b].sum()
    assert (out[3] == 0).all()


def test_order_matters():
    for kind in BOTH:
        encoder = small(kind)
        x = torch.randn(1, 8, 6)
        swapped = x[:, [1, 0, 2, 3, 4, 5, 6, 7]]
        if kind is dg.MoDEncoder:
            encoder = dg.MoDEncoder(6, 16, capacity_ratio=1.0, num_layers=2).eval()
        assert not torch.allclose(encoder(x), encoder(swapped))


def test_only_the_top_share_goes_through_each_block_and_the_last_step_is_in_it():
    encoder = dg.MoDEncoder(6, 16, capacity_ratio=0.25, num_layers=3).eval()
    seen = []
    for layer in encoder.layers:
        layer.block.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    _, plans = encoder.features(torch.randn(5, 20, 6))
    assert seen == [(5, 5, 16)] * 3
    for plan in plans:
        assert plan.chosen[:, -1].all()
        others = plan.scores[:, :-1, 0].topk(4, dim=1).indices
        assert plan.chosen[..., 0].gather(1, others).all()


def test_the_output_always_depends_on_the_sequence():
    """Even at the smallest capacity: what is read out was in every block."""
    encoder = dg.MoDEncoder(6, 16, capacity_ratio=0.5, num_layers=2).eval()
    x = torch.randn(8, 12, 6, requires_grad=True)
    encoder(x).pow(2).sum().backward()
    assert (x.grad[:, :-1].abs().sum((1, 2)) > 0).all()


def test_soft_gating_is_the_blend_over_all_tokens():
    """g*block(x) + (1-g)*x, written out."""
    encoder = dg.MoDEncoder(6, 16, num_layers=1, gating="soft").eval()
    layer = encoder.layers[0]
    x = torch.randn(2, 5, 16)
    gate = torch.sigmoid(x @ layer.router.weight[0])[..., None]
    pos = torch.arange(5).expand(2, 5)
    block = x + layer.block(x, pos=pos, plain=True)[0]
    close(x + layer(x, pos=pos, plain=True)[0], gate * block + (1 - gate) * x)


def test_flops_really_fall():
    def flops(ratio):
        encoder = dg.MoDEncoder(capacity_ratio=ratio).eval()
        with FlopCounterMode(display=False) as counter:
            encoder(torch.randn(2, 60, 287))
        return counter.get_total_flops()

    full = flops(1.0)
    assert flops(0.125) <= 0.35 * full
    assert flops(0.125) < flops(0.5) < full


@pytest.mark.parametrize("kind", BOTH)
def test_empty_batches_and_sequences(kind):
    encoder = small(kind)
    assert encoder(torch.randn(0, 5, 6)).shape == (0, 16)
    assert torch.equal(encoder(torch.randn(2, 0, 6)), torch.zeros(2, 16))


@pytest.mark.parametrize("kind", BOTH)
def test_every_parameter_learns(kind):
    encoder = small(kind).train()
    encoder(torch.randn(4, 10, 6)).pow(3).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())
    assert any("router" in n for n, _ in encoder.named_parameters())


def test_soft_moe_block_has_its_residual():
    block = dg.SoftMoEBlock(16, num_experts=3).eval()
    x = torch.randn(2, 5, 16)
    close(block(x), x + block.moe(block.norm(x))[0])
    nn.init.zeros_(block.moe.experts.down)
    nn.init.zeros_(block.moe.experts.down_bias)
    assert torch.equal(block(x), x)


def test_soft_moe_block_takes_a_mask():
    block = dg.SoftMoEBlock(16, num_experts=3).eval()
    x = torch.randn(2, 5, 16)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    y = block(x, mask=mask)
    close(y[1, :3], block(x[1:, :3])[0])
    assert torch.equal(y[1, 3:], x[1, 3:])
    x[~mask] = torch.nan
    z = block(x, mask=mask)
    close(z[mask], y[mask])
    z[mask].pow(2).sum().backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())


def test_dropout_acts_in_training_only():
    for kind in BOTH:
        encoder = small(kind, dropout=0.5)
        x = torch.randn(2, 8, 6)
        assert torch.equal(encoder(x), encoder(x))
        encoder.train()
        assert not torch.equal(encoder(x), encoder(x))


def test_seq_len_counts_ages():
    assert dg.SoftMoEEncoder(6, 16, window_size=10).age.num_embeddings == 10
    assert dg.SoftMoEEncoder(6, 16, window_size=10, seq_len=7).age.num_embeddings == 7
