"""The grid: equal FLOPs, shapes that differ, and refusals before anything runs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.flops import parameters, training_flops
from depthgate.isoflop.config import VARIANTS, IsoflopConfig, parse_variant
from depthgate.isoflop.grid import WIDTHS, Grid, check_fits, ladder, total_flops
from depthgate.model import Decoder
from depthgate.routing import Slots, causal_bce

EVERY = ",".join([*VARIANTS, "mod:capacity=0.5", "mod:pattern=dense+dense+mod:rule=threshold", "mod:capacity_steps=10"])


def grid(**options):
    return Grid(IsoflopConfig(**options), "bytes", 257, "cpu", {})


def test_mixes_with_mod_are_as_deep_as_mod_whatever_their_options_name():
    """A capacity that is the default, named or not; and a first layer that is dense takes no kind's only layer."""
    for dim in (24, 96, 256):
        named, plain = (parse_variant(f"mode:pattern=mod+mode{more}") for more in (":capacity=0.125", ""))
        shape = plain.shape(dim, 257, 64)
        assert shape == named.shape(dim, 257, 64)
        assert {*shape.kinds} == {"dense", "mod", "mode"}
        assert shape.layers >= parse_variant("mod").shape(dim, 257, 64).layers


@settings(deadline=None, max_examples=25)
@given(st.floats(1e12, 1e19), st.integers(3, 6), st.floats(1.3, 2.5))
def test_every_cell_costs_its_budget(budget, sizes, spread):
    cells = grid(budgets=budget, sizes=sizes, spread=spread, variants=EVERY, context=64).cells()
    assert len({cell.name for cell in cells}) == len(cells) == sizes * (len(EVERY.split(",")) + 1)  # dense twice
    for cell in cells:
        assert abs(cell.flops / budget - 1) <= 0.03
        assert cell.flops == pytest.approx(total_flops(cell.training, cell.training.steps))
        assert "/" not in cell.name


def test_flops_of_a_cell_are_those_that_are_counted():
    for cell in grid(budgets=1e10, sizes=3, variants="dense,mod,moe,mode,random", context=32).cells():
        torch.manual_seed(0)
        model = Decoder(cell.training.model)
        tokens = torch.randint(257, (1, 32))
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            out = model(tokens)
            total = out.logits.sum()
            for plan in out.plans:
                if isinstance(plan, Slots) and not plan.of_experts and plan.decision.requires_grad:
                    total = total + causal_bce(plan)
            total.backward()
        assert counter.get_total_flops() / 32 == pytest.approx(cell.described()["flops_per_token"])


def test_a_falling_capacity_is_paid_for():
    (plain, *_), (falling, *_) = (
        grid(budgets=1e11, sizes=3, context=64, variants=name).cells() for name in ("mod", "mod:capacity_steps=50")
    )
    assert falling.training.steps < plain.training.steps
    assert falling.flops == pytest.approx(plain.flops, rel=0.03)


def test_a_batch_of_half_the_size_takes_twice_the_steps():
    whole, half = (grid(budgets=1e12, sizes=1, context=64, batch=size).cells()[0] for size in (32, 16))
    assert (whole.training.batch, half.training.batch) == (32, 16)
    assert half.training.steps == pytest.approx(2 * whole.training.steps, abs=1)
    assert half.flops == pytest.approx(whole.flops, rel=0.01)


def test_a_routed_variant_is_deeper_for_about_the_same_cost():
    dense, mod = (ladder(parse_variant(name), 257, 256) for name in ("dense", "mod"))
    for dim in (96, 192, 384):
        a, b = (next(shape for shape in shapes if shape.dim == dim) for shapes in (dense, mod))
        assert b.layers > a.layers
        assert 0.7 < training_flops(b) / training_flops(a) < 1.4


@pytest.mark.parametrize("name", EVERY.split(","))
def test_cost_and_parameters_rise_along_a_ladder(name):
    shapes = ladder(parse_variant(name), 257, 256)
    for measure in (training_flops, parameters):
        found = [measure(shape) for shape in shapes]
        assert found == sorted(set(found))


def test_heads_of_the_ladder_are_such_as_kernels_take():
    for dim in WIDTHS[:40]:
        shape = parse_variant("dense").shape(dim, 257, 256)
        assert (shape.dim // shape.heads) % 8 == 0
        assert shape.dim // shape.heads <= 80


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budgets": "0"}, "budgets is 0"),
        ({"budgets": "1e12,x"}, "give FLOPs"),
        ({"budgets": "1e12,1e12"}, "stands twice"),
        ({"budgets": "nan"}, "budgets is nan"),
        ({"sizes": 0}, "sizes is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"variants": "dense,mdo"}, "did you mean mod"),
        ({"variants": "dense,dense"}, "stands twice"),
        ({"variants": "mod:capacity=2"}, "capacity is 2"),
        ({"variants": "mod:dim=64"}, "not an option that a variant can set"),
        ({"variants": "mod:capacity=much"}, "capacity is 'much'"),
        ({"variants": "mod:capacity=nan"}, "capacity is 'nan'"),
        ({"variants": "mod:capacity=0.5:capacity=0.25"}, "capacity stands twice"),
        ({"variants": "mode:top_k=0"}, "top_k is 0"),
        ({"variants": "mode:rule=predictor"}, "no layer of it reads rule, which is for mod, mode_staged"),
        ({"variants": "mode:capacity=0.5"}, "no layer of it reads capacity"),
        ({"variants": "mode:balance_loss=0.1"}, "no layer of it reads balance_loss"),
        ({"variants": "moe:choice=experts"}, "no layer of it reads choice, which is for mode;"),
        ({"variants": "mode:choice=tokens:pool=sequence"}, "reads pool, which is for mode where experts choose;"),
        ({"variants": "tiny-mod:experts=4"}, "no layer of it reads experts"),
        ({"task": "images", "variants": "moe:slots=2"}, "no layer of it reads slots"),
        ({"task": "images", "variants": "dense:pattern=mod"}, "it has mod layers; name it mod:pattern=mod"),
        ({"variants": "dense:pattern=mode,mod"}, "'dense:pattern=mode': .* name it mode:pattern=mode"),
        ({"variants": "dense:first=mode"}, "name it mode:pattern=dense:first=mode"),
        ({"variants": "tiny-dense:pattern=dense+mod"}, r"name it tiny-mod:pattern=dense\+mod"),
        ({"variants": "dense:rule_loss=0.1"}, "no layer of it reads rule_loss"),
        ({"variants": "mod,mod:capacity=0.125"}, "'mod' and 'mod:capacity=0.125': the same, leave one out"),
        ({"variants": "mode:pattern=dense,dense"}, "'mode:pattern=dense' and 'dense': the same"),
        ({"variants": "mod:schedule=linear,mod"}, "'mod:schedule=linear' and 'mod': the same"),
        ({"variants": "mode-1b,mode-770m"}, "'mode-1b' and 'mode-770m': the same"),
        ({"task": "images", "variants": "moe:experts=16,moe"}, "'moe:experts=16' and 'moe': the same"),
        ({"variants": "mode:experts=1"}, "experts is 1: it must be a whole number from 2 to 16384"),
        ({"variants": "mod:pattern=3"}, "pattern is 3"),
        ({"variants": "tiny-mdo"}, "variants has 'tiny-mdo'"),
        ({"variants": "tiny-mod:layers=2"}, "not an option that a variant can set"),
        ({"launcher": "ray", "device": "cuda"}, "give --gpus 1"),
        ({"variants": "mod:pattern=dense+soft_moe"}, "Soft MoE"),
        ({"seeds": 0}, "seeds is 0"),
        ({"launcher": "cloud"}, "launcher"),
        ({"spread": 1.0}, "spread is 1.0"),
        ({"lr": 1e-3, "lr_sweep": True}, "give one of them"),
        ({"tokenizer": "bpe"}, "without a size"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(InvalidValueError, match=says):
        IsoflopConfig(**options)


@pytest.mark.parametrize(
    "variant",
    [
        "dense:key_shift=false",
        "mode:pattern=mod+mode:rule=scores",
        "mode:choice=tokens:balance_loss=0.1",
        "mode:first=moe:z_loss=0",
        "mode-1b",
    ],
)
def test_options_that_a_layer_reads_are_taken(variant):
    (found,) = IsoflopConfig(variants=variant).variant_list
    assert found.name == variant


def test_budgets_too_small_for_a_step_and_sizes_too_large_for_memory():
    with pytest.raises(InvalidValueError, match=r"budgets has 1e\+06: a step .* raise the budget"):
        grid(budgets=1e6, sizes=3).cells()
    with pytest.raises(DepthgateError, match=r"needs about .* GiB"):
        check_fits(grid(budgets=1e24, sizes=3).cells(), "cpu")
    with pytest.raises(DepthgateError, match="no model of"):
        grid(budgets=1e30, sizes=3).cells()


def test_a_preset_is_a_variant_of_one_size():
    dense, mod = grid(budgets=1e12, sizes=1, variants="tiny-dense,tiny-mod:capacity=0.25", context=64).cells()
    assert (dense.training.model.layers, mod.training.model.layers) == (2, 4)
    assert mod.training.model.capacity == 0.25
    assert dense.training.model.context == mod.training.model.context == 64
    assert dense.flops == pytest.approx(mod.flops, rel=0.03)
    with pytest.raises(InvalidValueError, match=r"tiny-dense .*lower --budgets, --sizes"):
        grid(budgets=1e12, sizes=3, variants="tiny-dense").cells()


def test_the_first_seed_of_all_cells_comes_first():
    seeds = [cell.seed for cell in grid(sizes=3, seeds=2).cells()]
    assert seeds == sorted(seeds)
    assert math.isclose(sum(seeds), len(seeds) / 2)
