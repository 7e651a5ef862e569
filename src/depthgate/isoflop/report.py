"""Report what a study found: report.html, results.csv, pictures, and tables on the terminal."""

import csv
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from depthgate.console import print_table
from depthgate.device import interleaved
from depthgate.errors import DepthgateError
from depthgate.files import replace
from depthgate.flops import parameters, training_flops
from depthgate.generation.calls import generate
from depthgate.isoflop.config import baseline
from depthgate.isoflop.fit import Curve, calibrations, verdicts
from depthgate.isoflop.fit import curves as curves_of
from depthgate.isoflop.grid import CELLS, Row
from depthgate.isoflop.sentences import advice, compared, in_words, no_verdict, of_images, resolution, short_flops
from depthgate.isoflop.sentences import doubts as doubts_of
from depthgate.isoflop.study import Study, duration, speed
from depthgate.loading import load, text_of
from depthgate.model import Decoder
from depthgate.view import page as pages
from depthgate.view.figures import figure_bytes, study_figure
from depthgate.view.page import Html, kind_of, line_chart, routed_text
from depthgate.view.routes import held_out_tokens, read
from depthgate.view.runs import curve as metric_curve
from depthgate.view.runs import read_runs
from depthgate.vit import ViT

TITLE = "depthgate isoflop: models at equal training FLOPs"
BEST = "best"  # a link in the demo's folder
_LOSS = "causal loss, nats per token"
_ERROR = "error on held-out images, percent"
# Columns of the tables: heading -> name in a row.
_SHAPE = {
    **{"variant": "variant", "budget": "budget", "layers": "layers", "width": "dim", "parameters": "params"},
    **{"FLOPs per token": "flops_per_token", "tokens": "tokens", "steps": "steps", "lr": "lr", "seed": "seed"},
}
_CELL = {
    **{"variant": "variant", "budget": "budget", "causal loss": "loss_causal", "top-k loss": "loss"},
    **{"bits per byte": "bits_per_byte", "tokens in routed layers": "routed_share"},
    **{"experts per token": "experts_per_token", "layers": "layers", "width": "dim"},
    **{"parameters": "params", "tokens": "tokens", "passes over the text": "passes"},
    **{"held-out tokens": "measured_tokens", "lr": "lr", "seed": "seed", "seconds": "seconds"},
}
_IMAGE_CELL = {
    **{"variant": "variant", "budget": "budget", "error, percent": "loss_causal", "loss, nats": "loss"},
    **{"calibration error": "calibration_error", "layers": "layers", "width": "dim", "parameters": "params"},
    **{"images": "images", "passes over them": "passes", "held-out images": "measured_images"},
    **{"lr": "lr", "seed": "seed", "seconds": "seconds"},
}
_BEST = {
    label: {
        **{"variant": "variant", "budget": "budget", best: "loss", "95% interval": "loss_interval"},
        **{"best size, parameters": "params", "interval of the size": "params_interval"},
        **{"its forward FLOPs per token": "forward_flops_per_token", "open because": "open_because"},
    }
    for label, best in ((_LOSS, "best loss"), (_ERROR, "best error"))
}
_SHOWN = 768  # tokens of the coloured text
_PROMPT, _TEMPERATURE = 64, 0.7  # tokens of a held-out text that a sample continues


def _shown(value: Any) -> str:
    """A figure of a row or of a curve, for a table."""
    if isinstance(value, list):
        return f"{fmean(value):.1%}" if value else "-"
    if isinstance(value, tuple):
        return " to ".join(map(_shown, value))
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.0f}" if isinstance(value, int) or 1e4 <= value < 1e9 else f"{value:,.5g}".replace("e+", "e")


def _table(rows: Sequence[Row], columns: Mapping[str, str], turned: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings and lines; `turned`, a column for each row."""
    columns = {head: name for head, name in columns.items() if not turned or name != "budget"}
    # No column of experts where there are none; studies that are older do not know how many compute a token.
    columns = {h: n for h, n in columns.items() if n != "experts_per_token" or any(row.get(n) for row in rows)}
    lines = [list(columns), *([_shown(row.get(name)) for name in columns.values()] for row in rows)]
    first, *others = [list(line) for line in zip(*lines, strict=True)] if turned else lines
    return ["model", *first[1:]] if turned else first, others


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
    if study.config.images:
        vit, pixels = ViT(model).to(study.device), torch.randn(1, model.channels, *model.size, device=study.device)
        step = {"step": lambda: torch.autograd.backward(vit(pixels).logits.sum())}
    else:
        net = Decoder(model).to(study.device)
        tokens = torch.randint(model.vocab, (1, model.context), device=study.device)
        step = {"step": lambda: torch.autograd.backward(net.loss(tokens, tokens)[0])}
    return training_flops(model) * float(model.context) / min(interleaved(step, 3, 1, study.device)["step"])


def write(study: Study, as_json: bool, title: str = TITLE, lead: Html | None = None) -> None:
    """Write all files of the report, and print the findings. `lead`: the beginning of the page."""
    out, rows, curves = study.out, study.rows, curves_of(study.rows)
    found, best, checks = verdicts(curves), [curve.summary() for curve in curves], calibrations(rows)
    one_size = all(len(curve.costs) == 1 for curve in curves)  # then there is nothing to fit
    ranked = sorted(found, key=lambda v: (bool(v.refused), not baseline([v.against]), -v.budget, -v.gain))
    verdict = [*map(in_words, ranked), *map(resolution, checks)] or [no_verdict(curves)]
    more, seeds = study.config.more_sizes, study.config.seeds_at_minimum or study.config.seeds
    smallest = {name: parameters(shapes[0]) for name, shapes in study.grid.ladders.items()}
    mend = advice(curves, rows, smallest, more, seeds)
    sentences = compared(rows) if one_size else [verdict[0], *mend, *verdict[1:]]
    left_out = Counter(cell.variant for cell in study.failed)
    sentences += [f"Left out as failed: {pages.count(n, 'cell')} of {name}." for name, n in left_out.items()]
    label, columns, about, guesses = _LOSS, _CELL, "study_cells", study.grid.vocab
    if study.config.images:
        rows, guesses = [{**row, "passes": row["images"] / study.trained_on} for row in rows], guesses["classes"]
        label, columns, about = _ERROR, _IMAGE_CELL, "study_image_cells"
        sentences = [of_images(sentence) for sentence in sentences]
        best = [row | {"open_because": of_images(row["open_because"])} for row in best]
    names = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list))
    writer = csv.DictWriter(results := StringIO(newline=""), names, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    doubts = doubts_of(rows, guesses, study.config.images)
    marked = [re.sub("`(.+?)`", r"<code>\1</code>", pages.html(sentence)) for sentence in (*sentences, *doubts)]
    said = pages.join([pages.paragraph(Html(sentence)) for sentence in marked])
    table = _table(rows, columns, turned=one_size)
    cells, trained = pages.table(*table, pages.fill(about)), _trained(study)
    sections: dict[str, object] = {"": pages.join([Html(f'<div class="verdict">{said}</div>'), lead or ""])}
    training = trained.pop("training", "")
    fitted = {} if one_size else _fitted(curves, best, label, pages.fill(about), training)
    sections |= fitted or {"Results": pages.row([cells, training])}
    sections |= trained | ({} if one_size else {"All cells": cells}) | {"How this was made": _making(study)}
    replace(out / "results.csv", results.getvalue())
    replace(out / "report.html", pages.page(title, sections))
    pictures = [] if one_size else _pictures(out, curves, label)
    for sentence in doubts:
        print(f"depthgate: warning: {sentence}", file=sys.stderr)
    if as_json:
        told, checked = ([{n: _finite(x) for n, x in asdict(v).items()} for v in each] for each in (found, checks))
        report = {"cells": len(rows), "best": best, "verdicts": told, "calibration": checked, "rows": rows}
        print(json.dumps({**report, "report": str(out / "report.html")}))
        return
    print_table(*(table if one_size else _table(best, _BEST[label])))
    print(*sentences, *(out / name for name in ("results.jsonl", "results.csv", *pictures, "report.html")), sep="\n")


def _finite(value: Any) -> Any:
    """A value that JSON can hold: None for nan and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fitted(
    curves: Sequence[Curve], best: Sequence[Row], label: str = _LOSS, cells: object = "", training: object = ""
) -> dict[str, object]:
    """The sections with fitted curves; `label` is what they are of."""
    charts: list[object] = [_chart(budget, curves, label) for budget in sorted({c.budget for c in curves})]
    names = dict.fromkeys(curve.variant for curve in curves)
    known = {name: [c for c in curves if c.variant == name and c.bracketed] for name in names}
    lines = {name: [(c.budget, c.loss) for c in of] for name, of in known.items()}
    if any(len(line) > 1 for line in lines.values()):
        which = "The lowest point of each fitted curve that is bracketed on both sides, with its interval of 95%."
        minima = {f"{n}, best": [(c.budget, c.loss, None, c.loss_interval) for c in of] for n, of in known.items()}
        look: Any = {"kinds": [*map(kind_of, names)], "marks": minima, "axis": "log_x"}
        charts.append(line_chart("The lowest of each", which, lines, "training FLOPs", label, **look))
    about = pages.fill("study_best", cells=cells)
    return {
        f"{'Error' if label == _ERROR else 'Loss'} against parameters and FLOPs": pages.row([*charts, training]),
        "The best of each variant": pages.table(*_table(best, _BEST[label]), about),
    }


def _chart(budget: float, curves: Sequence[Curve], label: str) -> Html:
    mine = [curve for curve in curves if curve.budget == budget]
    lines, marks = {c.variant: c.line() for c in mine}, {f"{c.variant}, cells": c.points for c in mine}
    sure = [(c.params, c.loss, c.params_interval, c.loss_interval) for c in mine]
    minima = {f"{c.variant}, best": [at] if c.bracketed else [] for c, at in zip(mine, sure, strict=True)}
    about = "Lines: the fitted parabolas. Dots: one for each cell. Rings: the minima, with intervals of 95%."
    look: Any = {"kinds": [kind_of(c.variant) for c in mine], "marks": marks | minima, "axis": "log_x"}
    return line_chart(f"{short_flops(budget)} FLOPs", about, lines, "parameters", label, **look)


def _making(study: Study) -> Html:
    machines = Counter(row.get("machine", "an unknown machine") for row in study.rows)
    ran = (f"{count} of {len(study.rows)} cells ran on: {name}." for name, count in machines.items())
    commands = [Html(f"<p>Command: <code>{pages.html(each)}</code></p>") for each in study.commands]
    parts = {"commands": pages.join(commands), "machines": pages.join([pages.paragraph(each) for each in ran])}
    return pages.fill("study_made", **parts, training=study.cells[0].training)


def best_cells(study: Study) -> dict[str, Row]:
    """The best cell of each variant at the largest budget whose run is there, the best of all first."""
    best: dict[str, Row] = {}
    for row in sorted(study.rows, key=lambda row: (-row["budget"], row["loss_causal"])):
        folder = study.out / CELLS / row["cell"]
        if (folder / f"step-{row['steps']}").is_dir():
            best.setdefault(row["variant"], {**row, "folder": folder})
    return best


def _trained(study: Study) -> dict[str, object]:
    """The sections that need the runs of cells: training curves, and what the best model wrote and computed. Without
    their folders, there are none."""
    best, sections = best_cells(study), dict[str, object]()
    routed = next((row for name, row in best.items() if kind_of(name) != "dense"), None)
    try:
        if best:
            sections["training"] = _training_chart(best, study.config.images)
        if study.config.images:
            return sections
        if study.config.samples and best:
            sections["What the best model wrote"] = _text(study, next(iter(best.values())), wrote=True)
        if routed:
            sections["What the best routed model computed"] = _text(study, routed, wrote=False)
    except (DepthgateError, OSError):
        pass  # damaged checkpoints: the figures are what matters
    return sections


def _training_chart(best: Mapping[str, Row], images: bool) -> Html:
    lines, marks, steps, causal = dict[str, Any](), dict[str, Any](), 1, "" if images else ", causal"
    for name, row in best.items():
        points, steps = metric_curve(read_runs([row["folder"]])[0], "flops", "loss", 60)
        lines[f"{name}, training"] = points
        # The figures that count are errors in percent for images: not for an axis in nats.
        marks[f"{name}, held out{causal}"] = [[row["flops"], row["loss"]]] if images else row.get("held_out", [])
    of = ("of changed images", "loss on held-out images") if images else ("(top k)", "causal loss on held-out text")
    axes = ("training FLOPs", "nats per image" if images else "nats per token")
    about = pages.fill("study_curves", steps=steps, lines=of[0], dots=of[1])
    look: Any = {"kinds": [*map(kind_of, best)], "marks": marks, "axis": "loss"}
    return line_chart("The best cell of each variant", about, lines, *axes, **look)


def _text(study: Study, row: Row, wrote: bool) -> Html:
    """The beginning of a held-out document, or a text that the model wrote, coloured by what computed each token: its
    routed layers, or else experts."""
    model, most, given = load(row["folder"]), study.config.samples, 0
    ids = held_out_tokens(text_of(row["folder"], model.tokenizer), _SHOWN)
    if wrote:
        ids, given = ids[:_PROMPT], len(ids[:_PROMPT])
        ids += generate(model, [ids], max_new_tokens=most, temperature=_TEMPERATURE, seed=study.config.seed)[0].tokens
    found = read(model, ids)
    what, link = "expert" if found.experts and not found.layers else "routed layer", study.out / BEST
    taken: Any = found.taken if what == "expert" else found.through
    deepest = max(map(len, taken)) if what == "expert" else len(found.layers)
    text = routed_text(found.tokens, taken, max(1, deepest), what, given)
    said = {"what": f"{what}s", "budget": short_flops(row["budget"]), "temperature": _TEMPERATURE, "text": text}
    said |= {"folder": link if link.exists() else row["folder"], "given": given, "most": most}
    return pages.fill("study_wrote" if wrote else "study_routed", cell=row, **said)


def _pictures(out: Path, curves: Sequence[Curve], label: str) -> list[str]:
    """Draw the curves for papers."""
    try:
        figure = study_figure(curves, label, short_flops)
    except DepthgateError as error:
        print(f"no pictures for papers: {error}", file=sys.stderr)
        return []
    for kind in ("png", "svg"):
        replace(out / f"curves.{kind}", figure_bytes(figure, kind))
    return ["curves.png", "curves.svg"]
