"""What a study found, in sentences: verdicts, the resolution, and what is still to be done."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from depthgate.isoflop.config import baseline
from depthgate.isoflop.fit import Curve, Interval, Verdict, seed_by_seed
from depthgate.isoflop.grid import Row
from depthgate.view.page import count

_FEW, _MANY_PASSES = {"tokens": 5_000, "images": 1_000}, 10


def short_flops(number: float) -> str:
    """A large number in few characters: 3e15, not 3e+15."""
    return f"{number:.3g}".replace("e+", "e")


def of_images(sentence: str) -> str:
    """A sentence on losses as one on errors."""
    sentence = sentence.replace("causal loss", "error").replace("nats per token", "percent")
    return re.sub(r"\bloss\b", "error", sentence)  # and not in the name of a variant, such as moe:balance_loss=0


def compared(rows: Sequence[Row]) -> list[str]:
    """Sentences on the variant with the lowest loss at each budget of a study of single sizes, over the seeds that
    all of them have, and on differences seed by seed where there are several."""
    found = []
    for budget in sorted({row["budget"] for row in rows}):
        mine = [row for row in rows if row["budget"] == budget]
        used = {name: {row["seed"] for row in mine if row["variant"] == name} for name in {r["variant"] for r in mine}}
        seeds = set.intersection(*used.values()) or set.union(*used.values())
        means = {n: fmean(r["loss_causal"] for r in mine if r["variant"] == n and r["seed"] in seeds) for n in used}
        best, *others = sorted(means, key=lambda name: (means[name], name))
        said = f"{best} has the lowest causal loss: {means[best]:.3f} nats per token"
        if others and f"{means[others[0]]:.3f}" == f"{means[best]:.3f}":
            said = f"{best} and {others[0]} have the same causal loss: {means[best]:.3f} nats per token"
        elif others:
            said += f", against {' and '.join(f'{means[name]:.3f} ({name})' for name in others)}"
        found.append(f"At {short_flops(budget)} training FLOPs {said}.")
        for name, (seeds_of, gain, sure) in seed_by_seed(mine).items():
            if sure:
                lower = f"{abs(gain):.2%} {'lower' if gain >= 0 else 'higher'}{_between(sure, 'gain', '.2%')}"
                doubt = ": the difference is not significant" * (sure[0] <= 0 <= sure[1])
                found.append(f"{name}, seed by seed over {seeds_of} of them: {lower}{doubt}.")
    return found


def in_words(verdict: Verdict) -> str:
    """A verdict as a sentence."""
    start = f"{verdict.variant} against {verdict.against} at {short_flops(verdict.budget)} FLOPs"
    if verdict.refused:
        return f"{start}: no verdict, {verdict.refused}."
    lower, sure = "lower" if verdict.gain >= 0 else "higher", verdict.gain_interval
    gain = f"{start}: best loss {abs(verdict.gain):.2%} {lower}{_between(sure, 'gain', '.2%')}"
    if verdict.gain_may_be_zero:
        return f"{gain}: the difference is not significant."
    parts, about = [gain], "" if sure else "as an estimate alone, "
    same = f"the same loss as {verdict.against}'s best"
    if not sure:
        parts.append(f"no interval: {verdict.no_interval}")
    if verdict.forward_at_least:
        least = _fewer((verdict.forward_interval or [verdict.forward_saving])[0], None)
        parts.append(f"{about}{same} with at least {least} in a forward pass")
    elif less := _fewer(verdict.forward_saving, verdict.forward_interval):
        parts.append(f"{about}{same} with {less} in a forward pass")
    else:
        parts.append(f"no size of it reaches {verdict.against}'s best loss")
    if less := _fewer(verdict.training_saving, None):
        beyond = ", extrapolated beyond the budgets" if verdict.extrapolated else ""
        parts.append(f"as an estimate alone, training takes {less} to reach {verdict.against}'s best loss{beyond}")
    return f"{'; '.join(parts)}."


def resolution(check: Verdict) -> str:
    """The comparison of dense with itself as a sentence."""
    start = f"{check.against} against {check.against} with other seeds at {short_flops(check.budget)} FLOPs"
    if check.gain_interval is None:
        return f"{start}: no interval, {check.refused}."
    low, high = check.gain_interval
    said = f"{start}: {check.gain:+.2%} ({low:+.2%} to {high:+.2%})"
    tells = f"the study tells differences from about {(high - low) / 2:.2%} on"
    if low > 0 or high < 0:
        others = f"between models of the same seeds, and from {max(-low, high):.2%} on between others"
        return f"{said}, which leaves 0 out, since seeds move all sizes alike: {tells} {others}."
    return f"{said}: {tells}."


def advice(
    curves: Sequence[Curve], rows: Sequence[Row], smallest: Mapping[str, int], more_sizes: int = 0, seeds: int = 1
) -> list[str]:
    """What to do about minima that are not bracketed and missing intervals, and which cells' routers take no token, in
    a study with so many more sizes and seeds at minima. `smallest`: parameters of the smallest model of a variant."""
    short = any(len(curve.costs) < 3 for curve in curves)
    ends = [each for each in curves if each.ends_below and each.costs[0][0] == smallest.get(each.variant)]
    closed = all(curve.bracketed or curve in ends for curve in curves)
    options = ["`--sizes 3`"] * short + [f"`--more_sizes {more_sizes + 2}`"] * (not short and not closed)
    options += [f"`--seeds_at_minimum {max(3, seeds + 1)}`"] * any(curve.no_interval for curve in curves)
    again = f"give the same command again with `--extend` {' '.join(options)}; finished cells are kept."
    found = Counter(row["variant"] for row in rows if _takes_nothing(row))
    what = "the causal rule routes no token: a model of the other layers alone, whose loss says nothing of routing"
    said = [f"In {count(many, 'cell')} of {variant} {what}." for variant, many in found.items()]
    names = ", ".join(dict.fromkeys(curve.variant for curve in ends))
    larger = [f"There are no smaller models of {names}: give larger `--budgets`."] * bool(ends)
    return [*larger, *[f"To mend what is missing, {again}"] * bool(options), *said]


def _takes_nothing(row: Row) -> bool:
    """True if no routed layer of a cell, or none of its experts, took a token that was measured."""
    used = row.get("experts_per_token")
    return any(each and max(each) < 0.001 for each in (row["routed_share"], [] if used is None else [used]))


def doubts(rows: Sequence[Row], guesses: int, images: bool = False) -> list[str]:
    """Why losses say little. `guesses`: tokens, or classes, that a model that has learnt nothing guesses among."""
    fewest = _FEW[what := "images" if images else "tokens"]
    few = [found for row in rows if (found := row.get(f"measured_{what}", fewest)) < fewest]
    many = [found for row in rows if (found := row.get("passes") or 0) > _MANY_PASSES and not images]
    bad = Counter(row["variant"] for row in rows if row["loss" if images else "loss_causal"] > math.log(guesses))
    said = {
        f"measured on fewer than {fewest:,} held-out {what} ({min(few, default=0):,}): others may turn a verdict": few,
        f"of more than {_MANY_PASSES} passes over the text (up to {max(many, default=0):,.0f}): it is little": many,
    }
    found = [
        f"{len(cells)} of {count(len(rows), 'cell')} are {why}; give more." for why, cells in said.items() if cells
    ]
    above = f"have a loss above that of guessing, ln {guesses:,} = {math.log(guesses):.2f}."
    return [*found, *(f"{n} of {count(len(rows), 'cell')}, of {name}, {above}" for name, n in bad.items())]


def no_verdict(curves: Sequence[Curve]) -> str:
    names = {curve.variant for curve in curves}
    several = sum(name.startswith("dense:") for name in names) > 1
    why = f"there is only {dense}" if (dense := baseline(names)) else "there is no dense to compare with"
    return f"No verdict: {'of several kinds of dense none is plain: add dense' if several else why}."


def _fewer(saving: float, found: Interval) -> str:
    """A saving in words; nothing where there is none."""
    said = f"{abs(saving):.0%} {'fewer' if saving >= 0 else 'more'} FLOPs{_between(found, 'saving', '.0%')}"
    return said if math.isfinite(saving) else ""


def _between(found: Interval, what: str, form: str) -> str:
    return "" if found is None else f" ({what} {found[0]:{form}} to {found[1]:{form}})"
