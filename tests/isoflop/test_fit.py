"""Curves and verdicts against parabolas that are known, and tables worked by hand."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthgate.isoflop import fit, grid
from depthgate.isoflop.config import baseline
from depthgate.isoflop.sentences import in_words


def curve(cells):
    """A curve that is fitted by itself."""
    (found,) = fit.curves(cells)
    return found


def rows(variant, budget, losses, seeds=1, cost=1.0):
    """params -> loss; a forward pass costs 2 FLOPs a parameter, times `cost`."""
    return [
        {
            "budget": budget,
            "variant": variant,
            "params": params,
            "seed": seed,
            "loss_causal": loss,
            "forward_flops_per_token": 2 * params * cost,
        }
        for params, loss in losses.items()
        for seed in range(seeds)
    ]


def fitted(points):
    """at, low and bend."""
    sizes, losses = zip(*points, strict=True)
    return fit.parabolas(sizes, torch.tensor([losses], dtype=torch.float64))[0].tolist()


def bowl(at, low, bend, sizes=(1e6, 2e6, 4e6, 8e6, 16e6)):
    return {size: low + bend * math.log(size / at) ** 2 for size in sizes}


@given(st.floats(1e4, 1e9), st.floats(0.5, 5), st.floats(1e-3, 1), st.integers(3, 7))
def test_a_parabola_is_found_again(at, low, bend, sizes):
    points = list(bowl(at, low, bend, [at * 2.0 ** (i - 1) for i in range(sizes)]).items())
    found = fitted(points)
    assert math.exp(found[0]) == pytest.approx(at, rel=1e-4)
    assert found[1] == pytest.approx(low, rel=1e-6)
    assert found[2] == pytest.approx(bend, rel=1e-4)


def test_a_curve_without_a_minimum_has_none():
    for losses in ((1.0, 1.2, 1.0), (1.0, 1.0, 1.0)):
        assert all(map(math.isnan, fitted(zip((1e6, 2e6, 4e6), losses, strict=True))))


@pytest.mark.parametrize(
    ("losses", "because"),
    [
        ({1e6: 1.2, 2e6: 1.0, 4e6: 1.1}, ""),
        ({1e6: 1.0, 2e6: 1.1, 4e6: 1.3}, "the smallest size has the lowest loss"),
        ({1e6: 1.3, 2e6: 1.1, 4e6: 1.0}, "the largest size has the lowest loss"),
        ({1e6: 1.0, 2e6: 1.1}, "2 sizes: a curve needs three"),
        ({1e6: 1.0, 2e6: 0.99, 4e6: 1.4, 8e6: 1.3, 16e6: 1.0}, "the fitted curve has no minimum"),
    ],
)
def test_a_minimum_is_bracketed_on_both_sides_or_it_is_said_why_not(losses, because):
    found = curve(rows("dense", 1e15, losses))
    assert found.open_because == because
    assert found.bracketed == (because == "")


def test_a_verdict_by_hand():
    # Dense: best loss 2 at 4M. The variant: best loss 1.98, 1% lower, at 8M of half the FLOPs a parameter.
    dense = curve(rows("dense", 1e15, bowl(4e6, 2.0, 0.02)))
    mod = curve(rows("mod", 1e15, bowl(8e6, 1.98, 0.02, (2e6, 4e6, 8e6, 16e6, 32e6)), cost=0.5))
    (found,) = fit.verdicts([dense, mod])
    assert found.refused == ""
    assert found.gain == pytest.approx(0.01)
    # It is as good as dense where 0.02 x^2 = 0.02, a factor e below 8M: 2 * 8M / e * 0.5 FLOPs against 2 * 4M.
    assert found.forward_saving == pytest.approx(1 - 1 / math.e, rel=1e-3)
    assert math.isnan(found.training_saving)  # one budget says nothing of it


def test_soft_moe_is_compared_with_its_controls_too():
    """Which are what says whether a learnt router does anything."""
    names = {"dense": 2.0, "soft_moe": 1.9, "uniform_dispatch": 1.95, "uniform_combine": 2.0}
    curves = [curve(rows(name, 1e15, bowl(4e6, lowest, 0.02))) for name, lowest in names.items()]
    found = {(each.variant, each.against): each.gain for each in fit.verdicts(curves)}
    wanted = {(name, "dense"): 1 - names[name] / 2.0 for name in names if name != "dense"}
    wanted |= {("soft_moe", name): 1 - 1.9 / names[name] for name in ("uniform_dispatch", "uniform_combine")}
    assert found == pytest.approx(wanted)
    for options in ("", ":experts=8"):
        two = [curve(rows(f"{kind}{options}", 1e15, bowl(4e6, 2.0, 0.02))) for kind in ("soft_moe", "uniform")]
        assert [each.against for each in fit.verdicts(two)] == [f"uniform{options}"]


def test_training_flops_saved_by_hand():
    # The variant is at every budget where dense is at twice the budget: loss falls by 0.1 with each doubling.
    curves = []
    for step, budget in enumerate((1e15, 2e15, 4e15)):
        curves.append(curve(rows("dense", budget, bowl(4e6, 2.0 - 0.1 * step, 0.02))))
        curves.append(curve(rows("mod", budget, bowl(4e6, 1.9 - 0.1 * step, 0.02))))
    first, second, third = fit.verdicts(curves)
    assert first.training_saving == pytest.approx(0.5)
    assert first.extrapolated
    assert second.training_saving == pytest.approx(0.5)
    assert not second.extrapolated
    assert third.training_saving == pytest.approx(0.5)


def test_a_worse_variant_saves_nothing_and_an_open_one_gets_no_verdict():
    dense = curve(rows("dense", 1e15, bowl(4e6, 2.0, 0.02)))
    worse = curve(rows("mod", 1e15, bowl(4e6, 2.1, 0.02)))
    (found,) = fit.verdicts([dense, worse])
    assert found.gain == pytest.approx(-0.05)
    assert math.isnan(found.forward_saving)
    opened = curve(rows("mod", 1e15, bowl(64e6, 1.5, 0.02)))
    (found,) = fit.verdicts([dense, opened])
    assert found.refused == "mod is not bracketed: the largest size has the lowest loss"
    assert math.isnan(found.gain)
    assert fit.verdicts([worse]) == []  # there is no dense to compare with


def test_intervals_hold_the_truth_and_shrink_with_seeds():
    def noisy(seed, seeds):
        draw = random.Random(seed)
        made = rows("dense", 1e15, bowl(4e6, 2.0, 0.02), seeds)
        for row in made:
            row["loss_causal"] += draw.gauss(0, 0.003)
        return curve(made)

    total = {}
    for seeds in (2, 4):
        found = [noisy(seed, seeds).loss_interval for seed in range(60)]
        assert sum(low <= 2.0 <= high for low, high in found) >= 53  # 95% of 60 is 57
        total[seeds] = sum(high - low for low, high in found)
    assert total[4] < total[2]
    few = [each for seed in range(60) if (each := noisy(seed, 1).loss_interval)]
    assert sum(low <= 2.0 <= high for low, high in few) >= 0.88 * len(few)
    assert curve(rows("dense", 1e15, bowl(4e6, 2.0, 0.02, (2e6, 4e6, 8e6)))).loss_interval is None


def test_curves_with_the_same_residuals_are_not_drawn_alike():
    def made(variant, low):
        losses = bowl(4e6, low, 0.02)
        shaken = {size: loss + 0.002 * (-1) ** i for i, (size, loss) in enumerate(losses.items())}
        return rows(variant, 1e15, shaken, 2)

    (found,) = fit.verdicts(fit.curves([*made("dense", 2.0), *made("mod", 1.97)]))
    low, high = found.gain_interval
    assert high - low > 0.0005  # of the same draws it would be a hundredth of that


def test_what_seeds_share_is_not_in_the_difference():
    """Each seed moves all losses by ten times the gain, and only a little of its own is left: paired, the gain is seen.
    Of models of different seeds it is not."""
    draw = random.Random(2)

    def made(variant, low, seeds):
        found = [row for row in rows(variant, 1e15, bowl(4e6, low, 0.02), 4) if row["seed"] in seeds]
        return [{**row, "loss_causal": row["loss_causal"] + shift[row["seed"]] + draw.gauss(0, 1e-4)} for row in found]

    shift = [0.0, 0.06, -0.04, 0.02]
    (found,) = fit.verdicts(fit.curves([*made("dense", 2.0, range(4)), *made("mod", 1.994, range(4))]))
    low, high = found.gain_interval
    assert 0.0025 < low < 0.003 < high < 0.0035
    (found,) = fit.verdicts(fit.curves([*made("dense", 2.0, (0, 1)), *made("mod", 1.994, (0,))]))
    assert found.gain == pytest.approx(0.003, abs=2e-4)  # the second seed of dense does not count against it


@pytest.mark.parametrize("mods", [0, 1, 2])
def test_the_calibration_holds_nothing_about_as_often_as_it_says(mods):
    """Losses that differ by chance alone: 0 lies in the interval of dense against dense, whatever seeds others have."""
    inside = 0
    for seed in range(60):
        draw = random.Random(seed)
        made = rows("dense", 1e15, bowl(4e6, 2.0, 0.02), 2) + rows("mod", 1e15, bowl(4e6, 1.9, 0.02), mods)
        (check,) = fit.calibrations([{**row, "loss_causal": row["loss_causal"] + draw.gauss(0, 0.002)} for row in made])
        inside += check.gain_interval[0] <= 0 <= check.gain_interval[1]
    assert inside >= 53  # 95% of 60 is 57


def test_the_calibration_is_dense_against_itself():
    made = rows("dense", 1e15, bowl(4e6, 2.0, 0.02), 2) + rows("mod", 1e15, bowl(4e6, 1.9, 0.02), 1)
    draw = random.Random(0)
    made = [{**row, "loss_causal": row["loss_causal"] + draw.gauss(0, 0.002)} for row in made]
    (check,) = fit.calibrations(made)
    assert check.variant == fit.AGAIN
    assert check.gain_interval[0] <= 0 <= check.gain_interval[1]
    assert fit.calibrations(rows("dense", 1e15, bowl(4e6, 2.0, 0.02)) + rows("mod", 1e15, bowl(4e6, 1.9, 0.02))) == []
    third = [{**row, "seed": 2} for row in made if row["variant"] == "dense"][2:3]  # more seeds of one size alone
    assert fit.calibrations(made + third)[0].gain == pytest.approx(check.gain, abs=0.002)
    (one,) = fit.calibrations([row for row in made if row["seed"] == 0 or row["params"] == third[0]["params"]])
    assert (one.refused, one.gain_interval) == ("only one size has other seeds", None)


def test_student_by_hand():
    """Differences of 1, 2 and 3: a deviation of 1, and 4.303 of it over the root of three. Many: nearly normal."""
    assert fit.paired([1.0, 2.0, 3.0]) == (
        2.0,
        (pytest.approx(2 - 2.4843, abs=1e-3), pytest.approx(2 + 2.4843, abs=1e-3)),
    )
    assert fit.paired([5.0]) == (5.0, None)
    _, (low, high) = fit.paired([0.0, 1.0] * 15)
    assert (high - low) / 2 == pytest.approx(2.0452 * 0.50855 / 30**0.5, rel=2e-3)


def test_a_saving_beyond_the_smallest_model_is_a_bound():
    """Dense's best loss is that of a model far smaller than those trained: all of them save at least this much."""
    sizes = {"dense": bowl(4e6, 2.0, 0.02), "mode": bowl(4e6, 1.8, 0.02), "mod": bowl(4e6, 1.99, 0.02)}
    draw, made = random.Random(0), []
    for name, losses in sizes.items():
        found = rows(name, 1e15, losses, 2)
        made += [{**row, "loss_causal": row["loss_causal"] + draw.gauss(0, 1e-4)} for row in found]
    found = {each.variant: each for each in fit.verdicts(fit.curves(made))}
    assert (found["mode"].forward_at_least, found["mod"].forward_at_least) == (True, False)


def test_a_curve_that_does_not_reach_dense_saves_nothing_whatever_others_drawn_around_it_do():
    found = {}
    for name, best in (("dense", 2.0), ("mod", 2.001)):
        fits = torch.tensor([[math.log(4e6), best, 0.02]], dtype=torch.float64).repeat(1 + fit.DRAWS, 1)
        if name == "mod":
            fits[1:, 1] = 1.5
        found[name] = fit.Curve(rows(name, 1e15, bowl(4e6, best, 0.02)), fits, 9)
    verdict = fit._verdict(found["dense"], found["mod"], [found["mod"]])
    assert (verdict.forward_at_least, math.isnan(verdict.forward_saving)) == (False, True)
    assert "no size of it reaches dense's best loss" in in_words(replace(verdict, gain_interval=(-0.01, -0.001)))


def test_no_saving_is_claimed_where_losses_do_not_fall_or_lie_too_far():
    def pair(budget, dense, mod):
        return [curve(rows(n, budget, bowl(4e6, low, 0.02))) for n, low in (("dense", dense), ("mod", mod))]

    rising = fit.verdicts([*pair(1e15, 2.0, 2.1), *pair(2e15, 1.9, 2.2)])
    assert all(math.isnan(found.training_saving) for found in rising)
    nearly_flat = fit.verdicts([*pair(1e15, 2.0, 2.1001), *pair(2e15, 1.9, 2.1)])
    assert all(math.isnan(found.training_saving) for found in nearly_flat)
    opened = curve(rows("mod", 2e15, bowl(64e6, 1.5, 0.02)))
    first, second = fit.verdicts([*pair(1e15, 2.0, 1.9), pair(2e15, 1.9, 1.8)[0], opened])
    assert math.isnan(first.training_saving)  # an open curve's minimum is no minimum
    assert second.refused


def test_dense_with_options_is_what_others_are_compared_with():
    curves = [curve(rows(n, 1e15, bowl(4e6, 2.0, 0.02))) for n in ("dense:qk_norm=true", "mod:qk_norm=true")]
    (found,) = fit.verdicts(curves)
    assert (found.variant, found.against) == ("mod:qk_norm=true", "dense:qk_norm=true")
    (check,) = fit.calibrations(rows("dense:qk_norm=true", 1e15, bowl(4e6, 2.0, 0.02), 2))
    assert check.against == "dense:qk_norm=true"
    assert baseline(["dense:a=1", "dense:b=2", "mod"]) is None
    assert baseline(["dense:a=1", "dense"]) == "dense"


def test_rates_by_hand():
    assert grid.best_rate({1e-3: 2.0, 2e-3: 1.0, 4e-3: 2.0}) == pytest.approx(2e-3)
    assert grid.best_rate({1e-3: 1.0, 2e-3: 2.0, 4e-3: 3.0}) == 1e-3
    assert 2e-3 < grid.best_rate({1e-3: 2.0, 2e-3: 1.0, 4e-3: 1.5}) < 4e-3
    assert grid.further_rates({1e-3: 2.0, 2e-3: 1.0, 4e-3: 1.5}, [1e-3, 2e-3, 4e-3]) == []
    assert grid.further_rates({1e-3: 1.0, 2e-3: 2.0}, [1e-3, 2e-3]) == [5e-4]
    # 4e-3 failed, and is not tried for ever.
    assert grid.further_rates({1e-3: 2.0, 2e-3: 1.0}, [2e-3, 4e-3]) == [4e-3]
    assert grid.further_rates({1e-3: 2.0, 2e-3: 1.0}, [4e-3]) == []
    assert grid.further_rates({}, [1e-3]) == []
    assert grid.further_rates({2.0**i: -float(i) for i in range(9)}, [256.0]) == []
    found = {"mod": grid.scale_of_rates(2e-3, 128)}
    assert grid.learning_rate("mod", 128, found) == pytest.approx(2e-3)
    assert grid.learning_rate("mod", 2048, found) == pytest.approx(2e-3 / 8)  # 16 ** 0.75
    assert grid.learning_rate("mod:capacity=0.5", 256, found) == grid.learning_rate("mod", 256, {})
    few, many = (grid.learning_rate("dense", 128, {}, images) for images in (128, 512))
    assert many == pytest.approx(2 * few)
    assert grid.learning_rate("mod", 128, found, 64) == pytest.approx(2e-3)  # as it was found
    elsewhere = {"mod": grid.scale_of_rates(3e-3, 320)}
    assert grid.learning_rate("mod", 320, elsewhere) == pytest.approx(3e-3)
