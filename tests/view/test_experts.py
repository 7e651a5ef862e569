"""Experts and slots, by hand and from plans: loads, null shares, slot maps; figures show the same."""

import base64
import json
import math
import re

import pytest
import torch

import depthgate as dg
from depthgate.errors import DepthgateError, DepthgateWarning
from depthgate.routing import Groups, Slots
from depthgate.view.figures import plans_figure
from depthgate.view.page import colour
from depthgate.view.routes import Decisions, ExpertLayer, Image, RoutedLayer, expert_choices, plan_decisions, read
from depthgate.view.routes_page import text_page
from tests.view.pages import large, page_data, view, view_model

TEXT = "the quick brown fox jumps over a lazy dog and sleeps"


def test_load_and_null_share_by_hand():
    layer = ExpertLayer(2, 2, 1, [[0, 1], [0, 2], [], [0, 2]])
    assert layer.load == [3 / 6, 1 / 6]
    assert layer.bars == {"0": 3 / 6, "1": 1 / 6, "null": 2 / 6}
    assert layer.effective == pytest.approx(math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))))
    assert ExpertLayer(1, 3, 0, [[0], [1], [2]]).effective == pytest.approx(3)
    assert ExpertLayer(1, 0, 0, [[]]).effective == 0


def test_experts_of_a_model_are_those_of_its_plans(runs):
    """Layer 0 is moe, layer 1 is mode_staged: there the experts see the tokens that enter, and no others."""
    model = dg.load(runs / "mode")
    ids = model.tokenizer.encode(TEXT)[:32]
    found = read(model, ids)
    moe, mode = found.experts
    outer, within = (p for p in model(torch.tensor([ids]), causal=True).plans[1:])
    first = model(torch.tensor([ids]), causal=True).plans[0]
    assert isinstance(first, Groups)
    assert (moe.name, moe.experts, moe.null_experts) == (0, 4, 2)
    assert moe.choices == first.choice[0].tolist()
    counts = torch.bincount(first.choice.flatten(), minlength=6).double() / first.choice.numel()
    assert moe.load == pytest.approx(counts[:4].tolist())
    assert moe.bars["null"] == pytest.approx(counts[4:].sum().item())
    assert isinstance(outer, Slots)
    entering = outer.chosen[0, :, 0].nonzero()[:, 0].tolist()
    assert 0 < len(entering) < len(ids)
    assert [t for t, chosen in enumerate(mode.choices) if chosen] == entering
    assert [mode.choices[t] for t in entering] == within.choice[0].tolist()[: len(entering)]
    assert found.names == [1]


def test_experts_without_a_token_are_counted_and_not_drawn(tmp_path):
    """A text so short that the layer routes none of its tokens has no plan of its experts."""
    config = dg.ModelConfig(
        **{"vocab": 257, "dim": 16, "layers": 2, "heads": 2, "context": 8, "pattern": "moe,mode_staged"},
        **{"experts": 4, "null_experts": 2, "capacity": 0.25},
    )
    plans = dg.Decoder(config)(torch.tensor([[1]])).plans
    choices = expert_choices(config.kinds, _without_entries(plans), 1)
    waiting, idle = (ExpertLayer(number, 4, 2, chosen) for number, chosen in enumerate(choices))
    layer = RoutedLayer(1, [0.0], [0.0], [True], [True], [True])
    found = Decisions(2, [layer], ["a"], [0.0], [waiting, idle])
    assert (waiting.used, idle.used) == (1, 0)
    page = text_page("t", "about", found)
    assert '<th scope="row">1</th><td>no token came</td><td>4</td><td>-</td>' in page
    assert "Layer 0, load of its experts" in page
    assert "Layer 1, load of its experts" not in page
    assert [axes.get_title() for axes in plans_figure(found, Image()).axes][2:] == ["layer 0: load of the experts"]
    with pytest.raises(DepthgateError, match="no token came to any expert"):
        plans_figure(Decisions(2, [], experts=[idle]), Image())


def _without_entries(plans):
    """The plans as they are where the routed layer takes no token: its experts have none."""
    outer = plans[1]
    empty = outer._replace(tokens=outer.tokens[..., :0], gates=outer.gates[..., :0])
    return (plans[0], empty if outer.filled is None else empty._replace(filled=outer.filled[..., :0]))


def test_the_page_of_experts(runs, tmp_path, capfd):
    assert view_model(runs / "mode", tmp_path / "page.html", "--prompt", TEXT, "--json") == 0
    told = json.loads(capfd.readouterr().out)["experts"]
    assert [layer["layer"] for layer in told] == [0, 1]
    for layer in told:
        assert sum(layer["load"]) + layer["null_share"] == pytest.approx(1)
    text = (tmp_path / "page.html").read_text()
    assert "Layer 0, load of its experts" in text
    assert f"{told[0]['null_share']:.1%}" in text


@torch.no_grad()
def test_the_page_of_integrated_mode_says_which_experts_take_each_token(runs, tmp_path, capfd):
    """A score that reaches its threshold, worked out from the weights and the input of the experts' layer."""
    assert view_model(runs / "integrated", tmp_path / "page.html", "--prompt", TEXT, "--json") == 0
    told = json.loads(capfd.readouterr().out)
    model, inputs = dg.load(runs / "integrated"), []
    assert model.kinds == ("dense", "mode")
    router = model.layers[1].ffn.router
    model.layers[1].ffn.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    ids = model.tokenizer.encode(TEXT)
    for start in range(0, len(ids), model.context):
        model(torch.tensor([ids[start : start + model.context]]), causal=True)
    x = torch.cat(inputs)
    scores = x @ router.proj.weight.T + router.proj.bias
    takes = scores >= router.rule.average / router.rule.weight
    assert takes.sum(1).unique().tolist()[:2] == [0, 1]  # some tokens get no expert, and others get one
    wanted = []
    for row in takes.tolist():
        names = ", ".join(f"{e} of layer 1" for e, on in enumerate(row) if on)
        wanted.append(f"experts {names}" if names else "no expert")
    page = (tmp_path / "page.html").read_text()
    section = page.split("<h2>The text, by experts</h2>")[1].split("</section>")[0]
    assert re.findall(r'title=".[^:]*: ([^"]*)"', section) == wanted
    for n, times in zip(*takes.sum(1).unique(return_counts=True), strict=True):
        name = f"{n} expert{'s' * (n > 1)}" if n else "no expert"
        assert f"{name}: {times} of {len(ids)} tokens</li>" in section
    assert told["experts"] == [
        {"layer": 1, "load": pytest.approx((takes.sum(0) / takes.sum()).tolist()), "null_share": 0}
    ]
    assert f'<th scope="row">1</th><td>{takes.any(1).sum()}</td><td>4</td>' in page


def test_slots_are_those_of_the_plan_and_patches_must_fit(tmp_path):
    layer = dg.SoftMoE(8, num_experts=3, slots_per_expert=2)
    _, plans = layer(torch.randn(2, 12, 8), return_plans=True)
    (found,) = plan_decisions(plans, None, None, row=1).slots
    assert torch.allclose(torch.tensor(found.into), plans[0].into[1].reshape(12, 6).T)
    assert torch.tensor(found.into).sum(1).tolist() == pytest.approx([1.0] * 6, abs=1e-5)
    load = list(found.bars.values())
    assert load == pytest.approx(plans[0].back[1].sum(-1).mean(0).tolist())
    assert sum(load) == pytest.approx(1, abs=1e-5)
    dg.view.save_page(plans, tmp_path / "page.html", grid=(3, 4), row=1)
    data = page_data(tmp_path / "page.html", "slots-0")
    assert (data["rows"], data["columns"]) == (3, 4)
    assert data["names"] == [f"expert {e}, slot {s}" for e in range(3) for s in range(2)]
    for shown, row in zip(data["weights"], found.into, strict=True):
        assert shown == pytest.approx(row, rel=5e-3)
    with pytest.raises(DepthgateError, match=r"grid is \(5, 5\), prefix 0, but there are 12 tokens"):
        dg.view.plot(plans, grid=(5, 5))
    with pytest.raises(DepthgateError, match="rows of grid is -3"):
        dg.view.plot(plans, grid=(-3, -4))
    with pytest.raises(DepthgateError, match="row is 2"):
        dg.view.plot(plans, row=2)
    with pytest.raises(DepthgateError, match="3 tokens, and plans for 12"):
        dg.view.plot(plans, tokens=["a", "b", "c"])


def painted(*rows):
    """Rows of a picture in numbers: 0 skipped, 1 computed, 2 one choice alone, 3 computed, the other choice unknown."""
    colours = [colour(*look) for look in (("band",), ("mod",), ("odd",), ("mod", -0.55))]
    return [[list(bytes.fromhex(colours[cell][1:])) for cell in row.tolist()] for row in rows]


def test_plans_of_every_layer_can_be_plotted(runs):
    x = torch.randn(2, 16, 8)
    block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = torch.arange(16) < torch.tensor([[16], [5]])
    model = dg.load(runs / "mode")
    made = [
        dg.MixtureOfDepths(block, 8, 0.25)(x, mask=mask, return_plans=True)[1],
        dg.MixtureOfExperts(8, 4, null_experts=2)(x, return_plans=True)[1],
        dg.MixtureOfExperts(8, 4, choice="experts")(x, return_plans=True)[1],
        dg.SoftMoE(8, 4)(x, return_plans=True)[1],
        dg.MoDEncoder(8, 16, num_layers=2).features(x)[1],
        dg.SoftMoEEncoder(8, 16, num_layers=2).features(x)[1],
        model(torch.tensor([model.tokenizer.encode(TEXT)[:16]])).plans,
    ]
    for number, plans in enumerate(made):
        figure = dg.view.plot(plans)
        assert number % 2 or figure._repr_png_().startswith(b"\x89PNG")  # one of each kind: slow
    figure = dg.view.plot(made[0], row=1)
    assert figure.subfigs[0].axes[0].images[0].get_array().shape == (2, 5, 3)  # without the padding; two halves
    chosen = dg.view.plot(made[4]).subfigs[0].axes[0].images[0].get_array()
    assert chosen.tolist() == painted(*(plan.chosen[0, :, 0].int() for plan in made[4] for _ in range(2)))


def test_pictures_show_what_the_pass_computed_and_the_rule_where_asked(tmp_path):
    layer = dg.MixtureOfDepths(torch.nn.Linear(8, 8), 8, 0.25)
    x = torch.randn(2, 16, 8)
    for causal in (False, True):
        _, plans = layer(x, causal=causal, return_plans=True)
        chosen = plans[0].chosen[1, :, 0].int()
        assert causal or chosen.sum() == 4
        figure = plans.plot(row=1)
        cells, bars = figure.subfigs[0].axes
        assert cells.images[0].get_array().tolist() == painted(chosen, chosen)
        assert [bar.get_width() for bar in bars.patches] == pytest.approx([chosen.sum().item() / 16])
        assert [text.get_text() for text in figure.subfigs[0].legends[0].get_texts()] == ["skipped", "computed"]
        plans.save_page(tmp_path / "page.html", row=1, title="my layer")
        page, data = (tmp_path / "page.html").read_text(), page_data(tmp_path / "page.html")
        assert data["causal"] == data["top_k"] == ["".join(map(str, chosen.tolist()))]
        assert "<title>my layer</title>" in page
        assert ">routed by the causal rule<" not in page
        assert f"<td>{chosen.sum().item() / 16:.1%}</td>" in page
    _, plans = layer(x, return_plans=True)
    rule = plans[0].causal_choice[1, :, 0].int()
    assert rule.tolist() != plans[0].chosen[1, :, 0].int().tolist()
    cells = plans.plot(row=1, causal_rule=True).subfigs[0].axes[0].images[0].get_array()
    best = plans[0].chosen[1, :, 0].int()  # 1 where both choose a token, 2 where one does, in its half
    assert cells.tolist() == painted(2 * rule - rule * best, 2 * best - rule * best)
    plans.save_page(tmp_path / "page.html", row=1, causal_rule=True)
    assert page_data(tmp_path / "page.html")["causal"] == ["".join(map(str, rule.tolist()))]
    page = (tmp_path / "page.html").read_text()
    right = (rule == plans[0].chosen[1, :, 0]).double().mean().item()
    assert f"<td>{rule.double().mean().item():.1%}</td><td>25.0%</td><td>{right:.1%}</td>" in page
    assert ">rule right<" in page
    assert "two whole passes" not in page  # there was one


class Residual(torch.nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return x + self.branch(x)


class Mixed(torch.nn.Module):
    """One layer decides causally, the other by the top k."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (dg.MixtureOfDepths(torch.nn.Linear(8, 8), 8, 0.25) for _ in range(2))

    def forward(self, x):
        return self.b(self.a(x, causal=True))


def test_each_layer_is_shown_as_it_chose(tmp_path):
    model = Mixed().eval()
    with dg.record(model) as plans:
        model(torch.randn(1, 16, 8))
    a, b = (plan.chosen[0, :, 0].int() for plan in plans)
    rule = plans["b"].causal_choice[0, :, 0].int()
    assert 0 < a.sum() != 4
    for compared in (False, True):
        figure = plans.plot(causal_rule=compared).subfigs[0]
        cells, bars = figure.axes
        halves = [3 * a, 3 * a, 2 * rule - rule * b, 2 * b - rule * b] if compared else [a, a, b, b]
        assert cells.images[0].get_array().tolist() == painted(*halves)
        assert [bar.get_width() for bar in bars.patches] == pytest.approx([a.sum().item() / 16, 4 / 16])
        named = [text.get_text() for text in figure.legends[0].get_texts()]
        assert ("computed causally, top k not known" in named) is compared
        plans.save_page(tmp_path / "page.html", causal_rule=compared)
        page, data = (tmp_path / "page.html").read_text(), page_data(tmp_path / "page.html")
        assert data["computed"] == (["", "top_k"] if compared else ["", ""])
        assert data["top_k"] == ["".join(map(str, each.tolist())) for each in (a, b)]
        assert data["causal"] == ["".join(map(str, each.tolist())) for each in (a, rule if compared else b)]
        assert "chosen by the causal rule in layer a, and by the top k in the others" in page
        assert (f"<td>{a.sum().item() / 16:.1%}</td><td>-</td><td>-</td>" in page) is compared


def test_slots_within_a_routed_layer_are_those_of_its_tokens(tmp_path):
    model = torch.nn.Sequential(dg.MixtureOfDepths(Residual(dg.SoftMoE(8, 2)), 8, 0.5, keep=1)).eval()
    for net, name in ((model, "0.block.branch"), (model[0], "block.branch")):
        with dg.record(net) as plans:
            net(torch.randn(2, 17, 8))
        outer, inner = plans
        wanted = torch.zeros(2, 17)
        wanted[:, outer.tokens[1, 0]] = inner.into[1].flatten(1).mT
        assert inner.into.shape[1] == 8
        figure = plans.plot(grid=(4, 4), prefix=1, row=1).subfigs[1]
        for axes, weights in zip(figure.axes, wanted, strict=False):
            assert torch.allclose(torch.tensor(axes.images[0].get_array().tolist()), weights[1:].reshape(4, 4))
        image = plans.plot(row=1).subfigs[1].axes[0].images[0].get_array()
        assert torch.allclose(torch.tensor(image.tolist()), wanted)
        plans.save_page(tmp_path / "page.html", grid=(4, 4), prefix=1, row=1)
        data = page_data(tmp_path / "page.html", f"slots-{name if net is model else 1}")
        assert data["even"] == 1 / 8
        for shown, weights in zip(data["weights"], wanted[:, 1:].tolist(), strict=True):
            assert shown == pytest.approx(weights, rel=5e-3)


def test_slots_of_rows_that_differ_are_left_out_and_that_is_said():
    """A block without padding gets rows of each length in calls of their own."""
    layer = dg.MixtureOfDepths(Residual(dg.SoftMoE(8, 2)), 8, 0.5).eval()
    with dg.record(layer) as plans:
        layer(torch.randn(3, 8, 8), mask=torch.arange(8) < torch.tensor([[8], [4], [8]]))
    assert [plan.scores.shape[:2] for plan in plans] == [(3, 8), (1, 2), (2, 4)]
    with (
        pytest.warns(DepthgateWarning, match="layer 1 had 1 x 2 tokens, where others had 3 x 8: it is not shown"),
        pytest.warns(DepthgateWarning, match="layer 2 had 2 x 4 tokens, where others had 3 x 8: it is not shown"),
    ):
        assert plan_decisions(plans, names=plans.names, row=2).slots == []
    with pytest.warns(DepthgateWarning, match="layer 1 had 2 x 4 tokens, where others had 3 x 8: it is not shown"):
        assert plan_decisions([plans[0], plans[2]], row=1).slots == []


def test_pictures_of_slots_are_scaled_by_patches_alone():
    """As pages are: not by a class token, which is all that these slots want."""
    layer = dg.SoftMoE(8, 2)
    x = torch.randn(1, 13, 8)
    with torch.no_grad():
        layer.router.scale.fill_(20.0)
        x[0, 0] = layer.router.phi.sum(1)
        _, plans = layer(x, return_plans=True)
    figure = dg.view.plot(plans, grid=(3, 4), prefix=1, image=torch.rand(3, 6, 8))
    into = plans[0].into[0]
    assert into[0].max() > 2 * into[1:].max()
    assert f"clear: {float(into[1:].max()):.3g} " in figure.subfigs[0].get_supxlabel()


def test_patches_after_a_prefix(tmp_path):
    """A class token before 3 x 4 patches, in a model whose layers are named."""
    blocks = [dg.MixtureOfDepths(torch.nn.Linear(8, 8), 8, 0.5, keep=1), dg.SoftMoE(8, 2)]
    model = torch.nn.Sequential(*blocks)
    with dg.record(model) as plans:
        model(torch.randn(2, 13, 8))
    routed, slots = plans.plot(grid=(3, 4), prefix=1).subfigs
    chosen = plans["0"].chosen[0, :, 0].int()
    assert chosen[0] == 1
    rows = chosen[1:].reshape(3, 4)
    assert routed.axes[0].images[0].get_array().tolist() == painted(*rows.repeat_interleave(2, 0))  # two halves
    assert routed.axes[0].get_title() == "layer 0: 46%, prefix 1 of 1"
    shown = torch.tensor(slots.axes[1].images[0].get_array().tolist())
    assert torch.allclose(shown, plans["1"].into[0, 1:, 1, 0].reshape(3, 4))
    assert [axes.get_label() for axes in slots.axes][-1] == "<colorbar>"
    plans.save_page(tmp_path / "page.html", grid=(3, 4), prefix=1)
    data = page_data(tmp_path / "page.html", "patches")
    assert [weight > 0 for weight in data["weights"][0]] == chosen[1:].bool().tolist()
    image = torch.linspace(-2, 2, 3 * 24 * 320).reshape(3, 24, 320)  # normalised, and larger than a page needs
    plans.save_page(tmp_path / "page.html", grid=(3, 4), prefix=1, image=image, title="my image")
    data = page_data(tmp_path / "page.html", "image")
    assert (data["width"], data["height"], len(base64.b64decode(data["rgb"]))) == (160, 12, 160 * 12 * 3)
    dark = torch.randint(3, 60, (3, 6, 8), dtype=torch.uint8)  # bytes are shown as they are
    plans.save_page(tmp_path / "page.html", grid=(3, 4), prefix=1, image=dark)
    assert [*base64.b64decode(page_data(tmp_path / "page.html", "image")["rgb"])] == dark.movedim(
        0, -1
    ).flatten().tolist()
    figure = plans.plot(grid=(3, 4), prefix=1, image=image, title="my image")
    assert figure.get_suptitle() == "my image"
    assert [len(axes.images) for axes in figure.axes[:3]] == [2, 2, 2]  # the image, and what lies over it
    assert [axes.get_aspect() for axes in figure.axes[:3]] == [pytest.approx((12 / 3) / (160 / 4))] * 3  # of a patch
    for wrong in (torch.zeros(2, 24, 32), torch.zeros(24), torch.zeros(3, 0, 4)):
        with pytest.raises(DepthgateError, match="image has the shape"):
            plans.plot(grid=(3, 4), prefix=1, image=wrong)
    for wrong in (14, (3,), (4, 4), "ab"):
        with pytest.raises(DepthgateError, match="grid"):
            plans.plot(grid=wrong, prefix=1)


def test_a_picture_drops_no_token_and_says_which_layers_do_not_count(tmp_path):
    """Of 1,200 tokens each has two pixels at least: three lines of 400."""
    found = large(1200, 2)
    for n, layer in enumerate(found.layers):
        layer.gates[:] = [0.01 * on for on in layer.causal]
        layer.causal[:] = [on and n == 0 for on in layer.causal]
    figure = plans_figure(found, Image())
    *lines, _ = figure.subfigs[0].axes
    assert [axes.images[0].get_array().shape for axes in lines] == [(4, 400, 3)] * 3
    figure.canvas.draw()
    assert min(axes.get_window_extent().width / 400 for axes in lines) * 1.6 > 1.5  # saved with 160 dots an inch
    page = text_page("t", "about", found)
    assert "The mean gate is below 0.1 in these layers: 2." in page
    assert "No token passes the router of these layers: 4." in page
    assert "hardly counts" not in text_page("t", "about", large(100, 2))


def test_pictures_are_written_and_odd_tokens_do_not_harm(run, runs, tmp_path):
    text = "a$b$^{x \\frac</svg><script>" + "\u202e\x00é"
    assert view("--model", run, "--prompt", text, "--png", tmp_path / "a.png", "--svg", tmp_path / "a.svg") == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<script" not in (tmp_path / "a.svg").read_text()
    assert view(run, runs / "mode", "--png", tmp_path / "b.png", "--svg", tmp_path / "b.svg") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a.svg", "b.png", "b.svg"}  # and no page
