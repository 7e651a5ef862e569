"""`record`: the plans of every routed layer of any model, by name and in order; and their lines."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import depthgate as dg
from depthgate.errors import DepthgateWarning
from tests.conftest import close

D = 8


class Branch(nn.Module):
    """Layers that are built in another order than they run in, some of them nested."""

    def __init__(self):
        super().__init__()
        self.late = dg.SoftMoE(D, 2)
        self.inner = nn.ModuleDict(
            {
                "depths": dg.MixtureOfDepths(
                    nn.Sequential(nn.Linear(D, D), dg.MixtureOfExperts(D, 2, hidden=4)), D, 0.5
                ),
                "plain": nn.Linear(D, D),
            }
        )

    def forward(self, x):
        x = self.inner["plain"](x)
        if self.training and x.requires_grad:
            x = checkpoint(self.inner["depths"], x, use_reentrant=False)
        else:
            x = self.inner["depths"](x)
        return self.late(x)


def equal(a, b):
    assert type(a) is type(b)
    for left, right in zip(a, b, strict=True):
        assert type(left) is type(right)
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right)
        else:
            assert left == right


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_names_and_order_are_those_of_the_pass():
    model, x = Branch().eval(), torch.randn(2, 6, D)
    with dg.record(model) as plans:
        model(x)
    assert plans.names == ["inner.depths", "inner.depths.block.1", "late"]
    assert len(plans) == 3
    h = model.inner["plain"](x)
    h, depths = model.inner["depths"](h, return_plans=True)
    _, soft = model.late(h, return_plans=True)
    equal(plans["inner.depths"], depths[0])
    equal(plans[-1], soft[0])
    equal(plans["late"], plans[2])
    assert isinstance(plans[1], dg.Groups)
    assert [type(plan) for plan in plans] == [dg.Slots, dg.Groups, dg.Soft]
    assert [type(plan) for plan in plans[1:]] == [dg.Groups, dg.Soft]


def test_two_passes_are_recorded_one_after_the_other_and_none_outside():
    model, x = Branch().eval(), torch.randn(2, 6, D)
    model(x)
    with dg.record(model) as plans:
        model(x)
        model(2 * x)
    model(3 * x)
    assert plans.names == 2 * ["inner.depths", "inner.depths.block.1", "late"]
    with dg.record(model) as second:
        model(2 * x)
    equal(plans[3], second[0])
    assert plans["late"] is plans[2]


def test_a_checkpoint_that_runs_again_is_not_recorded_again():
    model, x = Branch().train(), torch.randn(2, 6, D)
    with dg.record(model) as plans:
        model(x).sum().backward()
    assert plans.names == ["inner.depths", "inner.depths.block.1", "late"]
    assert all(p.grad is not None for p in model.parameters())


def test_hooks_leave_with_the_context():
    model, x = Branch().eval(), torch.randn(2, 6, D)
    before, y = hooks(model), model(x)
    with dg.record(model):
        assert hooks(model) == before + 3
        close(model(x), y)
    assert hooks(model) == before
    with pytest.raises(dg.DepthgateError, match="x has shape"), dg.record(model):
        model.late(x[0])
    assert hooks(model) == before


def test_one_layer_is_named_after_itself():
    layer, x = dg.MixtureOfDepths(nn.Linear(D, D), D, 0.5), torch.randn(2, 6, D)
    with dg.record(layer) as plans:
        _, returned = layer(x, return_plans=True)
    assert plans.names == [""]
    equal(plans[0], returned[0])


SMALL = {"vocab": 50, "dim": 32, "layers": 3, "heads": 4, "context": 24, "capacity": 0.25, "experts": 4}


def test_decoder_and_encoders():
    tokens = torch.randint(50, (2, 24))
    decoder = dg.Decoder(dg.ModelConfig(**SMALL, pattern="dense,mod,moe")).eval()
    with dg.record(decoder) as plans:
        expected = decoder(tokens).plans
    assert plans.names == ["layers.1", "layers.2.ffn"]
    for plan, other in zip(plans, expected, strict=True):
        equal(plan, other)
    x = torch.randn(2, 12, D)
    mask = torch.arange(12) < torch.tensor([[12], [5]])
    encoders = {
        "layers.{}": dg.MoDEncoder(D, 16, 2, num_layers=2).eval(),
        "layers.{}.moe": dg.SoftMoEEncoder(D, 16, 2, num_layers=2).eval(),
    }
    for name, encoder in encoders.items():
        with dg.record(encoder) as plans:
            encoder(x, mask)
        assert plans.names == [name.format(i) for i in range(2)]
        for plan, other in zip(plans, encoder.features(x, mask)[1], strict=True):
            equal(plan, other)


def test_a_converted_model_of_transformers():
    zoo = pytest.importorskip("tests.hf.zoo")
    model = zoo.routed("llama")
    tokens = torch.randint(3, 90, (2, 9))
    with torch.no_grad(), dg.record(model) as plans:
        model(tokens)
    assert plans.names == [f"model.layers.{i}" for i in zoo.ROUTED]
    # the first routed layer is the first of the model, and scores embeddings
    router = model.model.layers[0].depth_router
    close(plans[0].scores, router.proj(model.model.embed_tokens(tokens)))


def test_what_cannot_be_recorded_is_said():
    with pytest.raises(dg.DepthgateError, match="no layer of this Linear routes"), dg.record(nn.Linear(D, D)):
        pass
    for model in ("model", None):
        with pytest.raises(dg.DepthgateError, match=f"model is a {type(model).__name__}"):
            dg.record(model)
    model = Branch().eval()
    with dg.record(model) as plans:
        pass
    model(torch.randn(2, 6, D))
    assert len(plans) == 0
    assert repr(plans) == "no plans"
    for use in (
        lambda: plans[0],
        lambda: list(plans),
        lambda: plans["late"],
        lambda: plans.plot(),
        lambda: plans.save_page("none.html"),
    ):
        with pytest.raises(dg.DepthgateError, match=r"no plan was recorded: call the model inside `with dg\.record"):
            use()
    with dg.record(model) as plans:
        model(torch.randn(2, 6, D))
    with pytest.raises(dg.DepthgateError, match=r"no plan of 'lat': there are those of 'inner.depths', .*'late'"):
        plans["lat"]
    with pytest.raises(IndexError):
        plans[3]


def test_plans_without_gradients_and_elsewhere():
    model = nn.Sequential(dg.MixtureOfDepths(nn.Linear(8, 8), 8, capacity=0.5), dg.SoftMoE(8, 2))
    with dg.record(model) as plans:
        model(torch.randn(2, 6, 8))
    for found in (plans.detach(), plans.to("cpu")):
        assert found.names == plans.names
        assert plans[0].gates.requires_grad
        for before, after in zip(plans, found, strict=True):
            assert type(after) is type(before)
            for old, new in zip(before, after, strict=True):
                assert old == new if not isinstance(old, torch.Tensor) else not new.requires_grad and old.equal(new)
    assert {each.device.type for each in plans.to("meta")[1] if isinstance(each, torch.Tensor)} == {"meta"}


def test_a_plan_is_one_line():
    """Counted by hand: kind, tokens in, routed, share."""
    x = torch.randn(2, 8, D)
    mask = torch.arange(8) < torch.tensor([[8], [4]])
    depths = dg.MixtureOfDepths(nn.Linear(D, D), D, 0.25)
    plan = depths(x, return_plans=True)[1][0]  # 2 of 8 in both rows
    assert repr(plan) == "Slots(top k, experts 1, 16 tokens in, 4 routed, share 0.25)"
    plan = depths(x, mask=mask, return_plans=True)[1][0]  # 2 of 8, and 1 of 4
    assert repr(plan) == "Slots(top k, experts 1, 12 tokens in, 3 routed, share 0.25)"
    with torch.no_grad():
        depths.router.proj.weight.zero_()  # every score is 0, and passes
    plan = depths(x, mask=mask, causal=True, return_plans=True)[1][0]
    assert repr(plan) == "Slots(causal choice, experts 1, 12 tokens in, 12 routed, share 1)"
    experts = dg.MixtureOfExperts(D, 2, top_k=1, null_experts=1, hidden=4)
    with torch.no_grad():  # scores are x[0], x[1] and x[2]; the third is the null expert
        experts.router.proj.weight.copy_(torch.eye(3, D))
    x = torch.eye(3, D)[torch.tensor([[0, 1, 2, 2, 1], [2, 2, 2, 0, 0]])]
    plan = experts(x, return_plans=True)[1][0]
    assert repr(plan) == "Groups(experts 2, null experts 1, experts a token 1, 10 tokens in, 5 routed, share 0.5)"
    soft = dg.SoftMoE(D, 3, 2)
    plan = soft(torch.randn(2, 8, D), mask=mask, return_plans=True)[1][0]
    assert repr(plan) == "Soft(experts 3, slots an expert 2, 12 tokens in, 12 routed, share 1)"
    chosen = dg.MixtureOfExperts(D, 2, choice="experts", capacity=0.25, hidden=4)
    # Each of two takes one of 4 tokens, of which one's first is the other's last.
    plan = chosen(torch.randn(1, 4, D), return_plans=True)[1][0]
    assert repr(plan) == "Slots(top k, experts 2, 4 tokens in, 2 routed, share 0.5)"
    model = nn.Sequential(depths, soft).eval()
    with dg.record(model) as plans:
        model(torch.randn(2, 8, D))
    assert repr(plans) == (
        "0: Slots(top k, experts 1, 16 tokens in, 4 routed, share 0.25)\n"
        "1: Soft(experts 3, slots an expert 2, 16 tokens in, 16 routed, share 1)"
    )


def test_a_compiled_model_is_recorded_at_any_time():
    model, x = nn.Sequential(nn.Linear(D, D), dg.MixtureOfDepths(nn.Linear(D, D), D, 0.5)), torch.randn(2, 6, D)
    with dg.record(model) as expected:
        model(x)
        model(2 * x)
    y = model(x)
    model.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):  # before it is called for the first time, and after
        with dg.record(model) as plans:
            model(x)
            model(2 * x)
        close(model(x), y)
        assert plans.names == ["1", "1"]
        for plan, other in zip(plans, expected, strict=True):
            assert torch.equal(plan.chosen, other.chosen)
            close(plan.gates, other.gates)
    compiled = torch.compile(model[1], backend="aot_eager", fullgraph=True)
    compiled(x)
    with dg.record(nn.Sequential(compiled)) as plans:
        compiled(x)
    assert plans.names == ["0._orig_mod"]


def test_a_copy_made_while_recording_is_not_recorded():
    model, x = nn.Sequential(dg.MixtureOfDepths(nn.Linear(D, D), D, 0.5)).eval(), torch.randn(2, 6, D)
    with torch.no_grad(), dg.record(model) as plans:
        other = copy.deepcopy(model)
        other(x)
        model(x)
    other(x)
    assert plans.names == ["0"]


def test_a_pass_of_another_length_is_not_shown_and_that_is_said():
    model = nn.Sequential(dg.MixtureOfDepths(nn.Linear(D, D), D, 0.5))
    with dg.record(model) as plans:
        model(torch.randn(2, 6, D))
        model(torch.randn(2, 9, D))
    with pytest.warns(DepthgateWarning, match="layer 0, call 0 had 2 x 6 tokens, where others had 2 x 9"):
        plans.plot()


def test_plans_of_a_call_record_nothing():
    _, plans = dg.MixtureOfDepths(nn.Linear(D, D), D)(torch.randn(2, 6, D), return_plans=True)
    with pytest.raises(dg.DepthgateError, match=r"a call that is over.*dg\.record"), plans:
        pass


def test_what_cannot_be_shown_is_said():
    layer = dg.MixtureOfDepths(nn.Linear(D, D), D)
    for shape in ((0, 6, D), (2, 0, D)):
        with pytest.raises(dg.DepthgateError, match="of an empty batch"):
            layer(torch.randn(shape), return_plans=True)[1].plot()
    _, plans = layer(torch.randn(2, 6, D), return_plans=True)
    for tokens in (range(6), torch.arange(6)):
        with pytest.raises(dg.DepthgateError, match="tokens are not all texts"):
            plans.plot(tokens=tokens)
    for show in (plans.plot, lambda prefix: plans.save_page("none.html", prefix=prefix)):
        with pytest.raises(dg.DepthgateError, match="prefix is 2, but there is no grid"):
            show(prefix=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_slots_are_drawn_whatever_the_default_dtype(dtype):
    layer = dg.SoftMoE(D, 2)
    _, plans = layer(torch.randn(1, 6, D), return_plans=True)
    torch.set_default_dtype(dtype)
    try:
        assert plans.plot() is not None
    finally:
        torch.set_default_dtype(torch.float32)


def test_plans_add_up_and_pages_replace_pages_alone(tmp_path):
    layer, x = dg.MixtureOfDepths(nn.Linear(8, 8), 8, 0.5), torch.randn(1, 4, 8)
    _, first = layer(x, return_plans=True)
    plans = ()
    plans += first
    assert list(plans + first) == [*first, *first]
    assert (plans + first).names == ["", ""]
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(dg.DepthgateError, match=r"mine\.txt is there, and is not a page of depthgate"):
        first.save_page(tmp_path / "mine.txt")
    for name in ("new", "page.html"):
        (tmp_path / "page.html").write_text("somebody's")
        for _ in range(2):  # the second time it is a page of ours
            first.save_page(tmp_path / name)
        assert 'content="depthgate"' in (tmp_path / name).read_text()
