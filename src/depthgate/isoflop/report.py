"""What a study found: report.html, results.csv, pictures, and the same on the terminal."""

import csv
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from depthgate.errors import DepthgateError
from depthgate.files import replace
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.estimate import Speed, duration
from depthgate.isoflop.fit import Curve, Interval, Verdict, verdicts
from depthgate.isoflop.grid import CELLS, Cell, described
from depthgate.isoflop.words import alone, flops, said
from depthgate.view import page as pages
from depthgate.view.page import Html

Row = Mapping[str, Any]
_NOTE = (
    "Losses are causal (each router decides from the token alone, as in generation), in nats a token of held-out text. "
    "FLOPs are those of the matrix products, forward and backward, counted from the configuration, attention without "
    "the saving of a causal mask. Best loss: the lowest point of the fitted curve; best size: the lowest mean of one. "
    "Intervals are of 95%, by a bootstrap of the residuals of each curve."
)


_SHAPE = ("budget", "variant", "layers x width", "parameters", "FLOPs a token", "tokens")


def _shape(row: Row) -> list[str]:
    """What a cell is, for the columns of _SHAPE."""
    size, weights, tokens = f"{row['layers']} x {row['dim']}", f"{row['params']:,}", f"{row['tokens']:,}"
    return [flops(row["budget"]), row["variant"], size, weights, flops(row["flops_per_token"]), tokens]


def print_grid(cells: Sequence[Cell], speed: Speed, as_json: bool, config: IsoflopConfig) -> None:
    """What would be run."""
    speed.probe(cells)
    seconds = [speed.seconds(cell) for cell in cells]
    rows = [{**described(cell), "estimated_seconds": _plain(s)} for cell, s in zip(cells, seconds, strict=True)]
    if as_json:
        told = {"flops": sum(cell.flops for cell in cells), "estimated_seconds": _plain(sum(seconds))}
        print(json.dumps({"cells": rows, **told}))
        return
    heads = (*_SHAPE, "steps", "lr", "time")
    lines = [
        (
            *_shape(row),
            f"{row['steps']:,}",
            f"{row['lr']:g}",
            duration(s),
        )
        for row, s in zip(rows, seconds, strict=True)
    ]
    _print_table(f"{len(cells)} cells, {sum(cell.flops for cell in cells):.3g} FLOPs", heads, lines)
    print(f"one after another: {duration(sum(seconds))}, about; nothing was trained")
    more = {
        "a sweep of learning rates at the smallest budget, which replaces those above (10 to 18 for each variant)": (
            config.lr_sweep
        ),
        f"sizes beyond open ends (up to {config.more_sizes} for each curve)": config.more_sizes,
        f"seeds of each minimum (up to {config.seeds_at_minimum})": config.seeds_at_minimum,
    }
    if asked := [what for what, wanted in more.items() if wanted]:
        print(f"more cells may come: {'; '.join(asked)}")


def write(out: Path, rows: Sequence[Row], curves: Sequence[Curve], commands: Sequence[str], as_json: bool) -> None:
    """All files of the report, and what they say on the terminal."""
    found = verdicts(curves)
    with (out / "results.csv").open("w", newline="", encoding="utf-8") as file:
        names = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list))
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    page = _page(out, rows, curves, found, commands)
    replace(out / "report.html", page)
    pictures = _pictures(out, curves)
    if as_json:
        best = [_summary(curve) for curve in curves]
        told = [{name: _plain(value) for name, value in asdict(v).items()} for v in found]
        print(json.dumps({"cells": len(rows), "best": best, "verdicts": told, "report": str(out / "report.html")}))
        return
    if curves:
        _print_table("The best of each variant", _BEST, [_best_line(curve) for curve in curves])
    for verdict in found:
        print(said(verdict))
    if not found:
        print(alone(curves))
    for name in ("results.jsonl", "results.csv", *pictures, "report.html"):
        print(out / name)


def _pictures(out: Path, curves: Sequence[Curve]) -> list[str]:
    from depthgate.isoflop.plots import draw

    names = ["curves.png", "curves.svg"]
    try:
        draw(curves, [out / name for name in names])
    except DepthgateError as error:
        print(f"no pictures for papers: {error}", file=sys.stderr)
        return []
    return names


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summary(curve: Curve) -> dict[str, Any]:
    return {
        "budget": curve.budget,
        "variant": curve.variant,
        "lowest": curve.lowest[1],
        "loss": curve.loss if curve.bracketed else None,
        "loss_interval": curve.loss_interval,
        "params": curve.params if curve.bracketed else None,
        "params_interval": curve.params_interval,
        "forward_flops_per_token": _forward(curve) if curve.bracketed else None,
        "bracketed": curve.bracketed,
        "why": curve.why,
        "no_interval": curve.no_interval,
    }


def _forward(curve: Curve) -> float:
    return curve.forward_flops(curve.params) if len(curve.costs) > 1 else curve.costs[0][1]


_BEST = (
    "budget",
    "variant",
    "best loss",
    "95%",
    "best size",
    "parameters",
    "95% ",
    "forward FLOPs a token",
    "bracketed",
)


def _best_line(curve: Curve) -> list[str]:
    def span(found: Interval, form: str) -> str:
        return "-" if found is None else f"{found[0]:{form}} to {found[1]:{form}}"

    return [
        flops(curve.budget),
        curve.variant,
        *(
            [
                f"{curve.loss:.4f}",
                span(curve.loss_interval, ".4f"),
                f"{curve.lowest[1]:.4f}",
                f"{curve.params:,.0f}",
                span(curve.params_interval, ",.0f"),
                flops(_forward(curve)),
                "both sides",
            ]
            if curve.bracketed
            else [f"below {curve.lowest[1]:.4f}", "-", f"{curve.lowest[1]:.4f}", "-", "-", "-", "no"]
        ),
    ]


def _print_table(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="left" if head in ("variant", "bracketed") else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    Console(width=max(140, Console().width)).print(table)


def _page(
    out: Path, rows: Sequence[Row], curves: Sequence[Curve], found: Sequence[Verdict], commands: Sequence[str]
) -> Html:
    sections: dict[str, object] = {
        "": pages.join([pages.paragraph(said(verdict), ".") for verdict in found] or [pages.paragraph(alone(curves))]),
        "Loss against parameters": pages.row([_chart(b, curves) for b in sorted({c.budget for c in curves})]),
        "The best of each variant": pages.table(_BEST, [_best_line(curve) for curve in curves], _NOTE),
    }
    bracketed = [curve.variant for curve in curves if curve.bracketed]
    if len(bracketed) > len(set(bracketed)):
        sections["The best loss against the budget"] = _trend(curves)
    if picture := _routing(out, rows):
        sections["What the best routed model computed"] = picture
    sections["All cells"] = _cells(rows)
    machines = Counter(row.get("machine", "an unknown machine") for row in rows)  # other ones than this, perhaps
    told = [
        *(pages.paragraph("Command: ", pages.code(each)) for each in commands),
        *(pages.paragraph(f"{count} of {len(rows)} cells ran on: {name}.") for name, count in machines.items()),
    ]
    sections["How this was made"] = pages.join(told)
    return pages.page("depthgate isoflop: models at equal training FLOPs", sections)


def _chart(budget: float, curves: Sequence[Curve]) -> Html:
    mine = [curve for curve in curves if curve.budget == budget]
    lines, marks = {}, {}
    for curve in mine:
        low, high = curve.costs[0][0], curve.costs[-1][0]
        steps = [low * (high / low) ** (i / 40) for i in range(41)] if curve.best else []
        lines[curve.variant] = [(params / 1e6, curve.best(params)) for params in steps] if curve.best else []
        marks[f"{curve.variant}, cells"] = [(params / 1e6, loss) for params, loss in curve.points]
    about = "Lines: the fitted parabolas. Marks: one for each cell."
    return pages.line_chart(
        f"{flops(budget)} FLOPs",
        about,
        lines,
        "million parameters",
        "causal loss, nats a token",
        log_x=True,
        marks=marks,
    )


def _trend(curves: Sequence[Curve]) -> Html:
    names = dict.fromkeys(curve.variant for curve in curves)
    lines = {name: [(c.budget / 1e12, c.loss) for c in curves if c.variant == name and c.bracketed] for name in names}
    about = "The lowest point of each fitted curve that is bracketed on both sides."
    return pages.line_chart(
        "Best loss", about, lines, "training TFLOPs", "causal loss, nats a token", log_x=True, marks=lines
    )


def _cells(rows: Sequence[Row]) -> Html:
    heads = (*_SHAPE, "lr", "seed", "causal loss", "top-k loss", "routed", "seconds")
    lines = [
        [
            *_shape(row),
            f"{row['lr']:g}",
            row["seed"],
            f"{row['loss_causal']:.4f}",
            f"{row['loss']:.4f}",
            f"{sum(row['routed_share']) / len(row['routed_share']):.1%}" if row["routed_share"] else "all",
            f"{row['seconds']:.1f}",
        ]
        for row in rows
    ]
    about = (
        "Seconds are those of the training steps, on whatever ran them. Routed: the mean share of the routed layers."
    )
    return pages.table(heads, lines, about)


def _routing(out: Path, rows: Sequence[Row]) -> Html | None:
    """A held-out text in the colours of the best cell that routes, at the largest budget that has one."""
    from depthgate.isoflop.picture import routed_piece

    routed = [row for row in rows if row["routed_share"]]
    if not routed:
        return None
    best = min(routed, key=lambda row: (-row["budget"], row["loss_causal"]))
    return routed_piece(out / CELLS, best)
