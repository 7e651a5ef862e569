"""What a report says in words and in legends."""

import json
import re
from dataclasses import replace
from html import unescape

import pytest

from depthgate.isoflop.fit import AGAIN, Verdict
from depthgate.isoflop.fit import curves as fitted
from depthgate.isoflop.report import _fitted
from depthgate.isoflop.sentences import advice, compared, doubts, in_words, no_verdict, resolution, short_flops

COST = {"forward_flops_per_token": 1.0}


def test_verdicts_in_words():
    assert in_words(Verdict(3e15, "mod", "dense is not bracketed: 2 sizes: a curve needs three")) == (
        "mod against dense at 3e15 FLOPs: no verdict, dense is not bracketed: 2 sizes: a curve needs three."
    )
    good = Verdict(1e16, "mod", "", 0.0151, (0.012, 0.018), 0.5, (0.4, 0.6), training_saving=0.31)
    gain = (
        "mod against dense at 1e16 FLOPs: best loss 1.51% lower (gain 1.20% to 1.80%); the same loss as dense's best "
    )
    trained = "in a forward pass; as an estimate alone, training takes 31% fewer FLOPs to reach dense's best loss."
    assert in_words(good) == f"{gain}with 50% fewer FLOPs (saving 40% to 60%) {trained}"
    assert in_words(replace(good, forward_at_least=True)) == f"{gain}with at least 40% fewer FLOPs {trained}"
    control = in_words(replace(good, variant="soft_moe", against="uniform_combine"))
    assert control == in_words(good).replace("dense", "uniform_combine").replace("mod", "soft_moe")
    bad = Verdict(1e16, "random", "", -0.02, None, training_saving=-0.4, extrapolated=True, no_interval="3 cells")
    assert in_words(bad) == (
        "random against dense at 1e16 FLOPs: best loss 2.00% higher; no interval: 3 cells; no size of it reaches "
        "dense's best loss; as an estimate alone, training takes 40% more FLOPs to reach dense's best loss, "
        "extrapolated beyond the budgets."
    )
    unsure = Verdict(1e16, "mod", "", 0.001, (-0.008, 0.012), 0.32)
    assert in_words(unsure) == (
        "mod against dense at 1e16 FLOPs: best loss 0.10% lower (gain -0.80% to 1.20%): the difference is not "
        "significant."
    )


def test_the_resolution_in_words():
    assert resolution(Verdict(1e15, AGAIN, "", 0.001, (-0.002, 0.004))) == (
        "dense against dense with other seeds at 1e15 FLOPs: +0.10% (-0.20% to +0.40%): the study tells differences "
        "from about 0.30% on."
    )
    assert resolution(Verdict(1e15, AGAIN, "", 0.01, (0.002, 0.018))) == (
        "dense against dense with other seeds at 1e15 FLOPs: +1.00% (+0.20% to +1.80%), which leaves 0 out, since "
        "seeds move all sizes alike: the study tells differences from about 0.80% on between models of the same seeds, "
        "and from 1.80% on between others."
    )
    assert "from about 0.20% on between models of the same seeds, and from 0.50% on" in resolution(
        Verdict(1e15, AGAIN, "", -0.003, (-0.005, -0.001))
    )
    options = resolution(Verdict(1e15, AGAIN, "", 0.001, (-0.002, 0.004), against="dense:key_shift=false"))
    assert options.startswith("dense:key_shift=false against dense:key_shift=false with other seeds at 1e15 FLOPs: ")
    assert resolution(Verdict(1e15, AGAIN, "only one size has other seeds")) == (
        "dense against dense with other seeds at 1e15 FLOPs: no interval, only one size has other seeds."
    )


def test_no_verdict_says_why():
    def made(variant):
        return fitted([{"budget": 1.0, "variant": variant, "params": 1, "seed": 0, "loss_causal": 2.0} | COST])[0]

    assert no_verdict([made("dense")]) == "No verdict: there is only dense."
    assert no_verdict([made("dense:key_shift=false")]) == "No verdict: there is only dense:key_shift=false."
    assert no_verdict([made("mod")]) == "No verdict: there is no dense to compare with."
    several = [made("dense:qk_norm=false"), made("dense:key_shift=false"), made("mod")]
    assert no_verdict(several) == "No verdict: of several kinds of dense none is plain: add dense."


def test_single_sizes_are_compared_without_taking_a_side():
    def made(variant, loss, seed=0):
        return {"budget": 1e9, "variant": variant, "params": 1, "seed": seed, "loss_causal": loss} | COST

    dense = made("tiny-dense", 1.4)
    assert compared([made("tiny-mod", 1.5), dense]) == [
        "At 1e09 training FLOPs tiny-dense has the lowest causal loss: 1.400 nats per token, against 1.500 (tiny-mod)."
    ]
    assert compared([made("tiny-mod", 1.3), dense]) == [
        "At 1e09 training FLOPs tiny-mod has the lowest causal loss: 1.300 nats per token, against 1.400 (tiny-dense)."
    ]
    assert compared([made("tiny-mod", 1.4001), dense]) == [
        "At 1e09 training FLOPs tiny-dense and tiny-mod have the same causal loss: 1.400 nats per token."
    ]
    assert compared([dense]) == ["At 1e09 training FLOPs tiny-dense has the lowest causal loss: 1.400 nats per token."]
    more = [dense, made("tiny-dense", 1.6, 1), made("tiny-mod", 1.41)]  # only the seed that both have counts
    assert compared(more) == [
        "At 1e09 training FLOPs tiny-dense has the lowest causal loss: 1.400 nats per token, against 1.410 (tiny-mod)."
    ]
    more[2:] = [made("tiny-mod", 1.26), made("tiny-mod", 1.472, 1)]  # 10% and 8% lower: 9% by 12.7 * 1% each way
    assert compared(more)[1:] == [
        "tiny-mod, seed by seed over 2 of them: 9.00% lower (gain -3.71% to 21.71%): the difference is not significant."
    ]
    alone = [made("mode", 2.0, n) for n in (0, 1)] + [made("mode:pool=sequence", 2.02 + n / 1000, n) for n in (0, 1)]
    assert compared(alone)[1].startswith("mode:pool=sequence, seed by seed over 2 of them: 1.02% higher (gain -1.")


def test_names_stand_once_in_a_legend():
    def made(budget):
        shape = {"budget": budget, "variant": "mod", "seed": 0} | COST
        return fitted([{**shape, "params": 10**n, "loss_causal": 2.0 + abs(n - 4)} for n in range(3, 6)])[0]

    sections = _fitted([made(1e12), made(2e12)], [])
    drawn = re.findall(r'data-chart="([^"]*)"', sections["Loss against parameters and FLOPs"])
    first, _, best = (json.loads(unescape(chart))["series"] for chart in drawn)
    assert [each["name"] for each in best] == ["mod", "mod, best"]
    assert [each["name"] for each in first] == ["mod", "mod, cells", "mod, best"]
    assert {each["colour"] for each in first + best} == {"mod"}
    assert first[-1]["points"] == [[pytest.approx(10**4, rel=1e-3), pytest.approx(1.94, abs=0.1), None, None]]


def test_a_study_names_its_remedy_and_routers_that_take_nobody():
    def curves(losses, seeds=1, shift=0.0):
        rows = [
            {
                "budget": 1e12,
                "variant": "mod",
                "seed": seed,
                "params": 10 ** (n + 3),
                "loss_causal": loss + shift * seed,
            }
            | COST
            for n, loss in enumerate(losses)
            for seed in range(seeds)
        ]
        return fitted(rows)

    again = "To mend what is missing, give the same command again with `--extend` {}; finished cells are kept."
    sizes = {"mod": 10**3}  # parameters of the smallest model there is
    assert advice(curves([3.0, 2.0]), [], sizes) == [again.format("`--sizes 3` `--seeds_at_minimum 3`")]
    assert advice(curves([3.0, 2.5, 2.0]), [], sizes) == [again.format("`--more_sizes 2` `--seeds_at_minimum 3`")]
    assert advice(curves([3.0, 2.5, 2.0]), [], sizes, 2, 3) == [again.format("`--more_sizes 4` `--seeds_at_minimum 4`")]
    assert advice(curves([3.0, 2.0, 3.1]), [], sizes) == [again.format("`--seeds_at_minimum 3`")]
    fine = curves([3.0, 2.0, 3.1], seeds=3, shift=0.001)
    assert advice(fine, [], sizes) == []
    open_below = curves([2.0, 2.5, 3.1], seeds=3, shift=0.001)
    assert advice(open_below, [], sizes) == ["There are no smaller models of mod: give larger `--budgets`."]
    for known in ({"mod": 500}, {}):  # rows may be of variants that are no longer asked for
        assert advice(open_below, [], known, 2) == [again.format("`--more_sizes 4`")]
    rows = [{"variant": "mod", "routed_share": share} for share in ([0.0, 0.0], [0.0, 0.1], [0.0, 0.0])]
    (said,) = advice(fine, [*rows, {"variant": "dense", "routed_share": []}], sizes)
    assert said.startswith("In 2 cells of mod the causal rule routes no token")
    rows = [{"variant": "mode", "routed_share": [], "experts_per_token": used} for used in (0.0, 0.9, None)]
    (said,) = advice(fine, rows, sizes)
    assert said.startswith("In 1 cell of mode the causal rule routes no token")


def test_what_little_text_a_verdict_rests_on_is_said():
    good = {"variant": "mod", "measured_tokens": 131_072, "passes": 0.5, "loss_causal": 1.5, "loss": 1.4}
    assert doubts([good, {"variant": "dense", "loss_causal": 1.5}], 257) == []  # older rows do not know
    little = good | {"measured_tokens": 500, "passes": 40.2, "loss_causal": 5.56}
    assert doubts([good, little], 257) == [
        "1 of 2 cells are measured on fewer than 5,000 held-out tokens (500): others may turn a verdict; give more.",
        "1 of 2 cells are of more than 10 passes over the text (up to 40): it is little; give more.",
        "1 of 2 cells, of mod, have a loss above that of guessing, ln 257 = 5.55.",
    ]
    seen = {"variant": "dense", "measured_images": 10_000, "passes": 100.0, "loss_causal": 90.0, "loss": 2.2}
    assert doubts([seen], 10, images=True) == []  # images are changed whenever they are seen
    assert len(doubts([seen | {"measured_images": 90, "loss": 2.4}], 10, images=True)) == 2


def test_large_numbers_are_short():
    assert [short_flops(n) for n in (3e15, 1.25e16, 123456.0, 12.0)] == ["3e15", "1.25e16", "1.23e05", "12"]
