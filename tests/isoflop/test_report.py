"""What a report says in words."""

from depthgate.isoflop.fit import Verdict
from depthgate.isoflop.report import flops, said


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
    bad = Verdict(1e16, "random", "", -0.02, None, training_saving=-0.4, extrapolated=True)
    assert said(bad) == (
        "random against dense at 1e16 FLOPs: best loss 2.00% higher; no size of it reaches dense's best loss; to reach "
        "dense's best loss, training takes 40% more FLOPs, extrapolated beyond the budgets"
    )


def test_large_numbers_are_short():
    assert [flops(n) for n in (3e15, 1.25e16, 123456.0, 12.0)] == ["3e15", "1.25e16", "1.23e05", "12"]
