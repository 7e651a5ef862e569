"""Report what a study found: report.html, results.csv, pictures, and tables on the terminal."""

import csv
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from depthgate.console import print_table
from depthgate.device import interleaved
from depthgate.errors import DepthgateError
from depthgate.files import replace
from depthgate.flops import training_flops
from depthgate.generation.calls import generate
from depthgate.isoflop.config import baseline
from depthgate.isoflop.fit import Curve, Interval, Verdict, calibrations, verdicts
from depthgate.isoflop.grid import CELLS, Row
from depthgate.isoflop.study import Study, duration, speed
from depthgate.loading import load, text_of
from depthgate.model import Decoder
from depthgate.view import page as pages
from depthgate.view.figures import figure_bytes, new_figure
from depthgate.view.page import Html, line_chart, routed_text, visible
from depthgate.view.routes import held_out_tokens, read
from depthgate.view.runs import curve as metric_curve
from depthgate.view.runs import read_runs

TITLE = "depthgate isoflop: models at equal training FLOPs"
_LOSS = "causal loss, nats per token"
# Columns of the tables: heading -> name in a row.
_SHAPE = {
    "variant": "variant",
    "budget": "budget",
    "layers": "layers",
    "width": "dim",
    "parameters": "params",
    "FLOPs per token": "flops_per_token",
    "tokens": "tokens",
    "steps": "steps",
    "lr": "lr",
}
_CELL = {
    **_SHAPE,
    "seed": "seed",
    "causal loss": "loss_causal",
    "top-k loss": "loss",
    "bits per byte": "bits_per_byte",
    "FLOPs": "flops",
    "routed": "routed_share",
    "seconds": "seconds",
}
_BEST = {
    "variant": "variant",
    "budget": "budget",
    "best loss": "loss",
    "its interval": "loss_interval",
    "best size": "lowest",
    "parameters": "params",
    "their interval": "params_interval",
    "forward FLOPs per token": "forward_flops_per_token",
    "open because": "open_because",
}
_SHOWN = 768  # tokens of the coloured text
_PROMPT, _TEMPERATURE = 16, 0.8  # tokens of a held-out text that samples continue


def short_flops(number: float) -> str:
    """A large number in few characters: 3e15, not 3e+15."""
    return f"{number:.3g}".replace("e+", "e")


def _shown(value: Any) -> str:
    """A figure of a row or of a curve, for a table."""
    if isinstance(value, list):
        return ", ".join(f"{share:.1%}" for share in value) or "all"
    if isinstance(value, tuple):
        return " to ".join(map(_shown, value))
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}".replace("e+", "e")


def _table(rows: Sequence[Row], columns: Mapping[str, str], turned: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings and lines; `turned`, a column for each row."""
    lines = [list(columns), *([_shown(row[name]) for name in columns.values()] for row in rows)]
    first, *others = [list(line) for line in zip(*lines, strict=True)] if turned else lines
    return ["", *first[1:]] if turned else first, others


def print_grid(study: Study, as_json: bool) -> None:
    """Print the cells that the study would run, and how long they would take."""
    config, cells = study.config, study.cells
    rate, flops = _speed(study), sum(cell.flops for cell in cells)
    rows = [{**cell.described(), "estimated_seconds": _finite(float(f"{cell.flops / rate:.2g}"))} for cell in cells]
    if as_json:
        print(json.dumps({"cells": rows, "flops": flops, "estimated_seconds": _finite(flops / rate)}))
        return
    columns = {**_SHAPE, "seconds at one speed": "estimated_seconds"}
    print_table(*_table(rows, columns), f"{len(cells)} cells, {short_flops(flops)} FLOPs")
    print(f"one after another: {duration(flops / rate)}, about; nothing was trained")
    print("(seconds are FLOPs at one speed, of finished cells or of the middle model: smaller models are slower)")
    if config.lr_sweep:
        print("first, a sweep of learning rates at the smallest budget: 3 to 9 cells of each variant")
    if config.more_sizes:
        print(f"more cells may come: sizes beyond open ends, up to {config.more_sizes} for each curve")
    if config.seeds_at_minimum:
        print(f"more cells may come: seeds of each minimum, up to {config.seeds_at_minimum}")


def _speed(study: Study) -> float:
    """FLOPs per second: of the finished cells, else of a few steps of the middle model; nan if its device is away."""
    known = speed([row for row in study.rows if row["device"] == study.device])
    if not math.isnan(known) or (study.device == "cuda" and not torch.cuda.is_available()):
        return known
    model = study.cells[len(study.cells) // 2].training.model
    net = Decoder(model).to(study.device)
    tokens = torch.randint(model.vocab, (1, model.context), device=study.device)
    step = {"step": lambda: torch.autograd.backward(net.loss(tokens, tokens)[0])}
    return training_flops(model) * model.context / min(interleaved(step, 3, 1, study.device)["step"])


def write(study: Study, as_json: bool, title: str = TITLE, lead: Html | None = None) -> None:
    """Write all files of the report, and print the findings. `lead`: the beginning of the page."""
    out, rows, curves = study.out, study.rows, study.curves
    found, best = verdicts(curves), [_summary(curve) for curve in curves]
    checks = calibrations(rows)
    one_size = all(len(curve.costs) == 1 for curve in curves)  # then there is nothing to fit
    verdict = [*map(in_words, found), *map(resolution, checks)] or [no_verdict(curves)]
    sentences = compared(curves) if one_size else verdict
    names = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list))
    writer = csv.DictWriter(results := StringIO(newline=""), names, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    strong = [Html(f"<p><strong>{pages.html(sentence)}</strong></p>") for sentence in sentences]
    table = _table(rows, _CELL, turned=one_size)
    cells = pages.table(*table, pages.fill("study_cells"))
    sections: dict[str, object] = {"": pages.join([*([lead] if lead else []), *strong])}
    sections |= {"Results": cells} if one_size else _fitted(curves, best)
    sections |= _trained(study) | ({} if one_size else {"All cells": cells}) | {"How this was made": _making(study)}
    replace(out / "results.csv", results.getvalue())
    replace(out / "report.html", pages.page(title, sections))
    pictures = [] if one_size else _pictures(out, curves)
    if as_json:
        told, checked = ([{n: _finite(x) for n, x in asdict(v).items()} for v in each] for each in (found, checks))
        report = {"cells": len(rows), "best": best, "verdicts": told, "calibration": checked, "rows": rows}
        print(json.dumps({**report, "report": str(out / "report.html")}))
        return
    print_table(*(table if one_size else _table(best, _BEST)))
    print(*sentences, *(out / name for name in ("results.jsonl", "results.csv", *pictures, "report.html")), sep="\n")


def compared(curves: Sequence[Curve]) -> list[str]:
    """Sentences on the variant with the lowest loss at each budget of a study of single sizes, whichever it is."""
    found = []
    for budget in sorted({curve.budget for curve in curves}):
        best, *others = sorted((c for c in curves if c.budget == budget), key=lambda c: c.loss)
        losses = [f"{each.loss:.3f}" for each in others]
        said = f"{best.variant} has the lowest causal loss: {best.loss:.3f}"
        if losses and losses[0] == f"{best.loss:.3f}":
            said = f"{best.variant} and {others[0].variant} have the same causal loss: {losses[0]}"
        elif losses:
            said += f" against {' and '.join(losses)}"
        found.append(f"At {short_flops(budget)} FLOPs {said} nats per token.")
    return found


def in_words(verdict: Verdict) -> str:
    """A verdict as a sentence."""
    start = f"{verdict.variant} against dense at {short_flops(verdict.budget)} FLOPs"
    if verdict.refused:
        return f"{start}: no verdict, {verdict.refused}."
    lower, sure = "lower" if verdict.gain >= 0 else "higher", verdict.gain_interval
    gain = f"{start}: best loss {abs(verdict.gain):.2%} {lower}{_between(sure, 'gain', '.2%')}"
    if verdict.gain_may_be_zero:
        return f"{gain}: the difference is not significant."
    parts, about = [gain], "" if sure else "as an estimate alone, "
    if not sure:
        parts.append(f"no interval: {verdict.no_interval}")
    if less := _fewer(verdict.forward_saving, verdict.forward_interval):
        parts.append(f"{about}the same loss as dense's best at {less} in a forward pass")
    else:
        parts.append("no size of it reaches dense's best loss")
    if less := _fewer(verdict.training_saving, verdict.training_interval):
        beyond = ", extrapolated beyond the budgets" if verdict.extrapolated else ""
        parts.append(f"{about}to reach dense's best loss, training takes {less}{beyond}")
    return f"{'; '.join(parts)}."


def resolution(check: Verdict) -> str:
    """The comparison of dense with itself as a sentence."""
    start = f"Dense against dense with other seeds at {short_flops(check.budget)} FLOPs"
    if check.refused or check.gain_interval is None:
        return f"{start}: no interval, {check.refused or check.no_interval}."
    low, high = check.gain_interval
    said = f"{start}: {check.gain:+.2%} ({low:+.2%} to {high:+.2%})"
    if low > 0 or high < 0:
        return f"{said}, which leaves 0 out: the intervals of this study are too narrow, train more seeds."
    return f"{said}: the study tells differences from about {(high - low) / 2:.2%} on."


def no_verdict(curves: Sequence[Curve]) -> str:
    dense = baseline({curve.variant for curve in curves})
    return f"No verdict: {'there is only dense' if dense else 'there is no dense to compare with'}."


def _fewer(saving: float, found: Interval) -> str:
    """A saving in words; nothing where there is none."""
    said = f"{abs(saving):.0%} {'fewer' if saving >= 0 else 'more'} FLOPs{_between(found, 'saving', '.0%')}"
    return said if math.isfinite(saving) else ""


def _between(found: Interval, what: str, form: str) -> str:
    return "" if found is None else f" ({what} {found[0]:{form}} to {found[1]:{form}})"


def _finite(value: Any) -> Any:
    """A value that JSON can hold: None for nan and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summary(curve: Curve) -> Row:
    names = ("budget", "variant", "lowest", "loss", "loss_interval", "params", "params_interval", "bracketed")
    found = {name: getattr(curve, name) for name in (*names, "open_because", "no_interval")}
    size = torch.tensor([curve.params], dtype=torch.float64)
    found["forward_flops_per_token"] = float(curve.forward_flops(size.log()))
    return found if curve.bracketed else found | dict.fromkeys(("loss", "params", "forward_flops_per_token"))


def _fitted(curves: Sequence[Curve], best: Sequence[Row]) -> dict[str, object]:
    """The sections with fitted curves."""
    about = pages.fill("study_best", cells=pages.fill("study_cells"))
    sections: dict[str, object] = {
        "Loss against parameters": pages.row([_chart(b, curves) for b in sorted({c.budget for c in curves})]),
        "The best of each variant": pages.table(*_table(best, _BEST), about),
    }
    names = dict.fromkeys(curve.variant for curve in curves)
    lines = {name: [(c.budget / 1e12, c.loss) for c in curves if c.variant == name and c.bracketed] for name in names}
    if any(len(line) > 1 for line in lines.values()):
        which = "The lowest point of each fitted curve that is bracketed on both sides."
        marks = {f"{name}, minima": line for name, line in lines.items()}
        chart = line_chart("Best loss", which, lines, "training TFLOPs", _LOSS, log_x=True, marks=marks)
        sections["The best loss against the budget"] = chart
    return sections


def _chart(budget: float, curves: Sequence[Curve]) -> Html:
    mine = [curve for curve in curves if curve.budget == budget]
    lines = {c.variant: [(size / 1e6, loss) for size, loss in c.line()] for c in mine}
    marks = {f"{c.variant}, cells": [(size / 1e6, loss) for size, loss in c.points] for c in mine}
    about, title = "Lines: the fitted parabolas. Marks: one for each cell.", f"{short_flops(budget)} FLOPs"
    return line_chart(title, about, lines, "million parameters", _LOSS, log_x=True, marks=marks)


def _making(study: Study) -> Html:
    machines = Counter(row.get("machine", "an unknown machine") for row in study.rows)
    ran = (f"{count} of {len(study.rows)} cells ran on: {name}." for name, count in machines.items())
    commands = [Html(f"<p>Command: <code>{pages.html(each)}</code></p>") for each in study.commands]
    parts = {"commands": pages.join(commands), "machines": pages.join([pages.paragraph(each) for each in ran])}
    return pages.fill("study_made", **parts, training=study.cells[0].training)


def _trained(study: Study) -> dict[str, object]:
    """The sections that need the runs of cells: training curves, a routed text and samples of the best cell of each
    variant at the largest budget. Without their folders, there are none."""
    best: dict[str, Row] = {}
    for row in sorted(study.rows, key=lambda row: (-row["budget"], row["loss_causal"])):
        folder = study.out / CELLS / row["cell"]
        if (folder / f"step-{row['steps']}").is_dir():
            best.setdefault(row["variant"], {**row, "folder": folder})
    routed = next((row for row in best.values() if row["routed_share"]), None)
    sections: dict[str, object] = {}
    try:
        if best:
            sections["Loss against training FLOPs"] = _training_chart(best)
        if routed:
            sections["What the best routed model computed"] = _routed(routed)
        if study.config.samples and best:
            sections["Samples"] = _samples(study, best)
    except (DepthgateError, OSError):
        pass  # damaged checkpoints: the figures are what matters
    return sections


def _training_chart(best: Mapping[str, Row]) -> Html:
    lines, marks, steps = {}, {}, 1
    for name, row in best.items():
        points, steps = metric_curve(read_runs([row["folder"]])[0], "flops", "loss", 60)
        lines[f"{name}, training"] = [(flops / 1e12, loss) for flops, loss in points]
        marks[f"{name}, held out, causal"] = [(flops / 1e12, loss) for flops, loss in row.get("held_out", [])]
    about = pages.fill("study_curves", steps=steps)
    return line_chart("The best cell of each variant", about, lines, "training TFLOPs", "nats per token", marks=marks)


def _routed(row: Row) -> Html:
    """The beginning of a held-out document, each token coloured by the routed layers that computed it."""
    model = load(row["folder"])
    found = read(model, held_out_tokens(text_of(row["folder"], model.tokenizer), _SHOWN))
    text = routed_text(found.tokens, found.through, len(found.layers), "routed layer")
    routed = ", ".join(map(str, found.names))
    return pages.fill("study_routed", budget=short_flops(row["budget"]), routed=routed, text=text, cell=row)


def _samples(study: Study, best: Mapping[str, Row]) -> Html:
    most, seed, shown = study.config.samples, study.config.seed, []
    for name, row in best.items():
        model = load(row["folder"])
        prompt = held_out_tokens(text_of(row["folder"], model.tokenizer), _SHOWN)[:_PROMPT]
        found = generate(model, [prompt], max_new_tokens=most, temperature=_TEMPERATURE, seed=seed)[0]
        text = visible(model.tokenizer.decode([*prompt, *found.tokens]), kept=" \n")
        shown.append(pages.fill("study_sample", variant=name, text=text))
    how = {"prompt": _PROMPT, "most": most, "temperature": _TEMPERATURE, "seed": seed}
    return pages.fill("study_samples", samples=pages.row(shown), **how)


def _pictures(out: Path, curves: Sequence[Curve]) -> list[str]:
    """Draw the curves for papers: a panel for each budget, cells as marks, parabolas as lines, minima as crosses."""
    budgets, names = sorted({c.budget for c in curves}), list(dict.fromkeys(c.variant for c in curves))
    try:
        figure = new_figure(4.6 * len(budgets), 3.6)
    except DepthgateError as error:
        print(f"no pictures for papers: {error}", file=sys.stderr)
        return []
    from matplotlib import ticker

    panels = figure.subplots(1, len(budgets), squeeze=False)[0]
    for curve in curves:
        axes, number = panels[budgets.index(curve.budget)], names.index(curve.variant)
        look: dict[str, Any] = {"color": f"C{number}"}
        axes.plot(*zip(*curve.points, strict=True), "osD^vP*X"[number % 8], ms=5, label=curve.variant, **look)
        if line := curve.line():
            axes.plot(*zip(*line, strict=True), "-", lw=1.4, **look)
        if curve.bracketed:
            axes.plot([curve.params], [curve.loss], "x", ms=9, mew=2, **look)
    for axes, budget in zip(panels, budgets, strict=True):
        axes.set(xscale="log", xlabel="parameters", title=f"{short_flops(budget)} training FLOPs")
        axes.xaxis.set(major_locator=ticker.LogLocator(subs=(1.0, 2.0, 5.0)), major_formatter=ticker.EngFormatter())
        axes.xaxis.set(minor_formatter=ticker.NullFormatter())  # major ones are 20 k, 50 k, 100 k ...
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(_LOSS)
    panels[0].legend(frameon=False)
    for kind in ("png", "svg"):
        replace(out / f"curves.{kind}", figure_bytes(figure, kind))
    return ["curves.png", "curves.svg"]
