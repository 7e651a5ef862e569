"""Bad input: a DepthgateError that names the value and what is allowed, at construction or call."""

import math

import pytest
import torch
from torch import nn

import depthgate as dg
from depthgate.layers import Attention, Block, Experts, MoD, SoftMoE, SwiGLU
from depthgate.routing import Threshold, TopTokens, has_nan, routed_share

D = 16
X = torch.randn(2, 6, D)
LINEAR = nn.Linear(D, D)

CONSTRUCTION = {
    **{
        f"capacity {c!r}": (lambda c=c: dg.MixtureOfDepths(LINEAR, D, capacity=c), repr(c))
        for c in (0, 0.0, -0.1, 1.5, 2, math.nan, math.inf, "0.5", None, True, [0.5])
    },
    "capacity_ratio 0": (lambda: dg.MoDEncoder(8, 16, capacity_ratio=0), "capacity_ratio is 0"),
    "capacity_ratio nan": (lambda: dg.MoDEncoder(8, 16, capacity_ratio=math.nan), "nan"),
    "expert capacity": (lambda: dg.MixtureOfExperts(D, 4, choice="experts", capacity=2.0), "2.0"),
    "capacity without use": (lambda: dg.MixtureOfExperts(D, 4, capacity=0.5), "choice='experts'"),
    "top_k": (lambda: dg.MixtureOfExperts(D, 4, top_k=5), "top_k is 5.*from 1 to 4"),
    "top_k 0": (lambda: dg.MixtureOfExperts(D, 4, top_k=0), "top_k is 0"),
    "no experts": (lambda: dg.MixtureOfExperts(D, 0), "num_experts is 0"),
    "no soft experts": (lambda: dg.SoftMoE(D, 0), "num_experts is 0"),
    "no encoder experts": (lambda: dg.SoftMoEEncoder(8, 16, num_experts=0), "num_experts is 0"),
    "no slots": (lambda: dg.SoftMoE(D, 4, slots_per_expert=0), "slots_per_expert is 0"),
    "negative null": (lambda: dg.MixtureOfExperts(D, 4, null_experts=-1), "null_experts is -1"),
    "fractional experts": (lambda: dg.MixtureOfExperts(D, 2.5), "2.5"),
    "choice": (lambda: dg.MixtureOfExperts(D, 4, choice="everyone"), "'everyone'.*experts, tokens"),
    "capacity 10**400": (lambda: dg.MixtureOfDepths(LINEAR, D, capacity=10**400), "1000000"),
    "unhashable gate": (lambda: TopTokens(D, 0.5, gate=[]), r"gate is \[\]"),
    "unhashable rule": (lambda: TopTokens(D, 0.5, rule={}), "rule is {}"),
    "rule without use": (lambda: dg.MixtureOfExperts(D, 4, rule="scores"), "choice='experts'"),
    "rule of expert choice": (lambda: dg.MixtureOfExperts(D, 4, choice="experts", rule=[]), "threshold"),
    "huge dim": (lambda: dg.SoftMoE(10**30, 4), "dim is 1000"),
    "huge experts": (lambda: dg.MixtureOfExperts(D, 10**12), "num_experts is 1000000000000"),
    "window with seq_len": (lambda: dg.SoftMoEEncoder(8, 16, window_size=-5, seq_len=10), "window_size is -5"),
    "parts of two widths": (lambda: Block(D, Attention(2 * D, 2), SwiGLU(D)), "attention has dim 32"),
    "threshold experts": (lambda: Threshold(-1), "experts is -1"),
    "scores of expert choice": (lambda: dg.MixtureOfExperts(D, 4, choice="experts", rule="scores"), "never above 0"),
    "per_token names": (lambda: dg.MixtureOfDepths(LINEAR, D, per_token=[3]), "per_token"),
    "padding_keyword": (lambda: dg.MixtureOfDepths(LINEAR, D, padding_keyword=3), "padding_keyword is 3"),
    "an update as block": (lambda: dg.MixtureOfDepths(SwiGLU(D), D), "without the residual"),
    "parts of MoD": (lambda: MoD(LINEAR, "router"), "TopTokens"),
    "per_token": (lambda: dg.MixtureOfDepths(LINEAR, D, per_token="pos"), "'pos'"),
    "heads": (lambda: dg.MoDEncoder(8, 30, num_heads=4), "hidden_size 30 .* num_heads 4"),
    "attention heads": (lambda: Attention(30, 4), "dim 30 .* heads 4"),
    "kv heads": (lambda: Attention(32, 4, 3), "heads 4 .* kv_heads 3"),
    "odd head": (lambda: Attention(12, 4), "even head size"),
    "odd encoder head": (lambda: dg.MoDEncoder(8, 12, num_heads=4), "even head size"),
    "rope base": (lambda: Attention(32, 4, rope_base=0), "rope_base is 0"),
    "dim 0": (lambda: dg.MixtureOfDepths(LINEAR, 0), "dim is 0"),
    "hidden": (lambda: SwiGLU(D, 0), "hidden is 0"),
    "activation": (lambda: Experts(2, D, D, activation="tanh"), "'tanh'.*gelu, swiglu"),
    "dropout": (lambda: dg.MoDEncoder(8, 16, dropout=1.0), "dropout is 1.0"),
    "block dropout": (lambda: Block(D, Attention(D, 2), SwiGLU(D), dropout=-1), "dropout is -1"),
    "layers": (lambda: dg.MoDEncoder(8, 16, num_layers=0), "num_layers is 0"),
    "window": (lambda: dg.SoftMoEEncoder(8, 16, window_size=0), "window_size is 0"),
    "seq_len": (lambda: dg.SoftMoEEncoder(8, 16, seq_len=0), "seq_len is 0"),
    "embed_dim": (lambda: dg.MoDEncoder(embed_dim=0), "embed_dim is 0"),
    "gating": (lambda: dg.MoDEncoder(8, 16, gating="maybe"), "'maybe'.*hard, soft"),
    "gate": (lambda: TopTokens(D, 0.5, gate="relu"), "'relu'.*one_plus_tanh, raw, sigmoid, straight_through"),
    "rule": (lambda: TopTokens(D, 0.5, rule="luck"), "'luck'.*predictor, scores, threshold"),
    "decay": (lambda: Threshold(decay=1.0), "decay is 1.0"),
    "batch_first": (lambda: dg.MixtureOfDepths(nn.TransformerEncoderLayer(D, 2), D), "batch_first=True"),
    "block": (lambda: dg.MixtureOfDepths("block", D), "block is a str"),
}


@pytest.mark.parametrize(("make", "says"), CONSTRUCTION.values(), ids=CONSTRUCTION.keys())
def test_refused_at_construction(make, says):
    with pytest.raises(dg.DepthgateError, match=says.replace("[0.5]", r"\[0.5\]")) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 250


LAYERS = {
    "mod": dg.MixtureOfDepths(LINEAR, D, 0.5),
    "moe": dg.MixtureOfExperts(D, 4),
    "expert choice": dg.MixtureOfExperts(D, 4, choice="experts"),
    "soft moe": dg.SoftMoE(D, 4),
    "mod encoder": dg.MoDEncoder(D, 16, num_layers=1),
    "soft encoder": dg.SoftMoEEncoder(D, 16, num_layers=1),
    "soft block": dg.SoftMoEBlock(D),
    "router": TopTokens(D, 0.5),
    "attention": Attention(D, 2),
    "block": Block(D, Attention(D, 2), SwiGLU(D)),
    "native mod": MoD(Block(D, Attention(D, 2), SwiGLU(D)), TopTokens(D, 0.5)),
    "swiglu": SwiGLU(D),
}
UNMASKED = ("router", "attention", "block", "native mod", "swiglu")


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.randn(6, D), r"\(6, 16\)"),
        (torch.randn(2, 3, 6, D), r"\(2, 3, 6, 16\)"),
        (torch.randn(2, 6, D + 1), r"\(2, 6, 17\).*16"),
        (torch.ones(2, 6, D, dtype=torch.long), "int64"),
        ([[0.0] * D], "list"),
    ],
)
def test_wrong_rank_width_or_type_of_x(layer, x, says):
    with pytest.raises(dg.DepthgateError, match=says):
        layer(x)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in UNMASKED])
@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.ones(2, 5, dtype=torch.bool), r"\(2, 5\).*\(2, 6\)"),
        (torch.ones(2, 6, 1, dtype=torch.bool), r"\(2, 6, 1\)"),
        (torch.ones(2, 6), "float32.*bool"),
        ([[True] * 6] * 2, "list"),
    ],
)
def test_wrong_masks(name, mask, says):
    with pytest.raises(dg.DepthgateError, match=says):
        LAYERS[name](X, mask=mask)


def test_wrong_positions_and_documents():
    with pytest.raises(dg.DepthgateError, match=r"pos .*float32"):
        LAYERS["router"](X, torch.zeros(2, 6))
    with pytest.raises(dg.DepthgateError, match=r"doc .*\(2, 5\)"):
        LAYERS["router"](X, torch.zeros(2, 6).long(), doc=torch.zeros(2, 5).long())
    with pytest.raises(dg.DepthgateError, match=r"keep .*float32"):
        LAYERS["router"](X, keep=torch.zeros(2, 6))
    with pytest.raises(dg.DepthgateError, match=r"doc .*\(2, 5\)"):
        LAYERS["attention"](X, doc=torch.zeros(2, 5).long())
    with pytest.raises(dg.DepthgateError, match="doc and cache"):
        LAYERS["attention"](X, doc=torch.zeros(2, 6).long(), cache=object())
    with pytest.raises(dg.DepthgateError, match=r"\(2, 3, 4\)"):
        Experts(2, D, D)(torch.randn(2, 3, 4))
    with pytest.raises(dg.DepthgateError, match="one document a row"):
        SoftMoE(D, 2)(X, doc=torch.zeros(2, 6).long())


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (lambda x: x[..., :-1], r"\(2, 3, 15\).*\(2, 3, 16\)"),
        (lambda x: x[:, :1], r"\(2, 1, 16\)"),
        (lambda x: (x, x), "a tuple"),
        (lambda x: None, "a NoneType"),
        (lambda x: x.long(), "int64"),
    ],
)
def test_a_block_that_changes_the_shape(what, says):
    with pytest.raises(dg.DepthgateError, match=says):
        dg.MixtureOfDepths(Returns(what), D, 0.5)(X)


class Odd(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x, scores):
        return self.what(scores)


@pytest.mark.parametrize("what", [lambda s: s[:1], lambda s: s[..., 0], lambda s: None, lambda s: s > 0])
def test_gates_and_rules_of_ones_own_must_return_one_number_a_score(what):
    with pytest.raises(dg.DepthgateError, match="rule returned"):
        TopTokens(D, 0.5, rule=Odd(what))(X)
    with pytest.raises(dg.DepthgateError, match="gate returned"):
        TopTokens(D, 0.5, gate=what)(X)


def test_metrics_want_one_plan():
    _, plans = LAYERS["moe"](X, return_plans=True)
    for function in (routed_share, has_nan):
        assert function(plans[0]).ndim == 0
        with pytest.raises(dg.DepthgateError, match=r"plans\[0\]"):
            function(plans)


def test_soft_moe_refuses_causal():
    with pytest.raises(dg.DepthgateError, match="causal"):
        LAYERS["soft moe"](X, causal=True)


def test_a_message_names_value_and_remedy():
    with pytest.raises(dg.DepthgateError) as caught:
        dg.MixtureOfDepths(LINEAR, D, capacity=1.5)
    assert str(caught.value) == "capacity is 1.5: it must be a number in (0, 1], where 1 routes every token"
