"""What a report says in words."""

from depthgate.isoflop.fit import Verdict, curve
from depthgate.isoflop.words import alone, flops, said

COST = {"forward_flops_per_token": 1.0}


def test_verdicts_in_words():
    assert said(Verdict(3e15, "mod", "dense is not bracketed: 2 sizes: a curve needs three")) == (
        "mod against dense at 3e15 FLOPs: no verdict, dense is not bracketed: 2 sizes: a curve needs three"
    )
    good = Verdict(1e16, "mod", "", 0.0151, (0.012, 0.018), 0.5, (0.4, 0.6), 0.31, (0.2, 0.4), False)
    assert said(good) == (
        "mod against dense at 1e16 FLOPs: best loss 1.51% lower (gain 1.20% to 1.80%); a forward pass of its smallest "
        "model with dense's best loss takes 50% fewer FLOPs (saving 40% to 60%); to reach dense's best loss, training "
        "takes 31% fewer FLOPs (saving 20% to 40%)"
    )
    bad = Verdict(1e16, "random", "", -0.02, None, training_saving=-0.4, extrapolated=True, no_interval="3 cells")
    assert said(bad) == (
        "random against dense at 1e16 FLOPs: best loss 2.00% higher; no interval: 3 cells; no size of it reaches "
        "dense's best loss; as an estimate alone, to reach dense's best loss, "
        "training takes 40% more FLOPs, extrapolated beyond the budgets"
    )
    unsure = Verdict(1e16, "mod", "", 0.001, (-0.008, 0.012), 0.32)
    assert said(unsure) == (
        "mod against dense at 1e16 FLOPs: best loss 0.10% lower (gain -0.80% to 1.20%): no difference can be told"
    )


def test_no_verdict_says_why():
    def made(variant):
        return curve([{"budget": 1.0, "variant": variant, "params": 1, "seed": 0, "loss_causal": 2.0} | COST])

    assert alone([made("dense")]) == "No verdict: there is only dense."
    assert alone([made("mod")]) == "No verdict: there is no dense to compare with."


def test_large_numbers_are_short():
    assert [flops(n) for n in (3e15, 1.25e16, 123456.0, 12.0)] == ["3e15", "1.25e16", "1.23e05", "12"]
