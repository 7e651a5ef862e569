"""The demo's table, and the page that shows what was measured."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from depthgate.config import TrainConfig
from depthgate.demo.config import DemoConfig
from depthgate.demo.measure import PROMPT, SAMPLED, TEMPERATURE
from depthgate.demo.results import Result
from depthgate.view import page as pages
from depthgate.view.page import Html, routed_text, visible

Row = dict[str, Any]
SMOOTHED = 20  # steps that a point of the training curve is the mean of

NOTE = (
    "Causal: every router decides from the token alone, as in generation; this is the figure that counts. Top k: it "
    "looks at the whole sequence, as in training. The dense model has no routers."
)
_LINES: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("causal loss, nats a byte", lambda r: f"{r['nats_per_byte']:.4f}"),
    ("causal loss, bits a byte", lambda r: f"{r['bits_per_byte']:.4f}"),
    ("top-k loss, nats a byte", lambda r: f"{r['nats_per_byte_top_k']:.4f}"),
    ("top-k loss, bits a byte", lambda r: f"{r['bits_per_byte_top_k']:.4f}"),
    ("training FLOPs in all", lambda r: f"{r['flops']:.4g}"),
    ("training FLOPs a token", lambda r: f"{r['flops_per_token']:,.0f}"),
    ("tokens trained on", lambda r: f"{r['tokens']:,}"),
    ("steps", lambda r: f"{r['steps']:,}"),
    ("training seconds", lambda r: f"{r['train_seconds']:.1f}"),
    ("parameters", lambda r: f"{r['parameters']:,}"),
)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table: a line for each figure, a column for each model."""
    lines = [[label, *(shown(row) for row in rows)] for label, shown in _LINES]
    for layer in sorted({layer for row in rows for layer in row["routed_share"]}):
        shares = [f"{row['routed_share'][layer]:.1%}" if layer in row["routed_share"] else "all" for row in rows]
        lines.append([f"routed causally, layer {layer}", *shares])
    return lines


def command(config: DemoConfig) -> str:
    """The command line that gives this configuration."""
    options = [f"--{f.name} {shlex.quote(str(getattr(config, f.name)))}" for f in fields(config)]
    return " ".join(["depthgate demo", *options])


def verdict(rows: Sequence[Row]) -> str:
    """Which model predicts the held-out text better, whichever it is."""
    best, other = sorted(rows, key=lambda row: row["nats_per_byte"])
    low, high = best["nats_per_byte"], other["nats_per_byte"]
    if f"{low:.3f}" == f"{high:.3f}":
        return f"Here both have the same causal loss: {low:.3f} nats a byte"
    return f"Here {best['model']} has the lower causal loss: {low:.3f} against {high:.3f} nats a byte"


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each value as the mean of itself and up to SMOOTHED - 1 before it, those that are not finite left out."""
    out = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i + 1 - SMOOTHED) : i + 1] if y - y == 0]
        out.append((x, sum(near) / len(near) if near else float("nan")))
    return out


def report_page(config: DemoConfig, results: Sequence[Result], about: dict[str, Any]) -> Html:
    """The whole report."""
    rows = [result.figures for result in results]
    mod, dense = results
    return pages.page(
        "depthgate demo: Mixture-of-Depths and dense at equal training FLOPs",
        {
            "": _introduction(config, mod, dense),
            "Results": pages.table(["", *(row["model"] for row in rows)], cells(rows), NOTE),
            "Loss against training FLOPs": _charts(results),
            f"What {mod.figures['model']} computed": _routing(mod),
            "Samples": _samples(rows, config),
            "How this was made": _making(config, mod.config, dense.config, rows, about),
        },
    )


def _introduction(config: DemoConfig, routed: Result, plain: Result) -> Html:
    mod, dense = rows = routed.figures, plain.figures
    ratio = mod["flops_per_token"] / dense["flops_per_token"]
    layers = ", ".join(map(str, mod["routed_share"]))
    return pages.join(
        [
            pages.paragraph(
                f"Two byte-level language models, trained on {config.data} with the same FLOPs. {mod['model']} has "
                f"{routed.config.model.layers} layers; routers let only a small share of the tokens through layers "
                f"{layers}, and the others pass by and cost almost nothing there. {dense['model']} has "
                f"{plain.config.model.layers} layers, and every token goes through all of them. A token costs "
                f"{mod['model']} {ratio:.2f} times as much, so {dense['model']} is trained on "
                f"{dense['steps'] / mod['steps']:.2f} times as many."
            ),
            pages.paragraph(
                Html(f"<strong>{pages.html(verdict(rows))}.</strong> "),
                f"That is one seed, two tiny models and minutes of training, measured on {mod['held_out_tokens']:,} "
                f"tokens, spread over {mod['held_out_documents']} held-out documents. It shows the machinery at work, "
                "and is no evidence of which design is better at another size, length of training or seed. Nor are "
                f"equal FLOPs equal time: {mod['train_seconds']:.0f} seconds of training here for {mod['model']}, "
                f"{dense['train_seconds']:.0f} for {dense['model']}.",
            ),
        ]
    )


def _charts(results: Sequence[Result]) -> Html:
    def tera(points: Sequence[tuple[float, float]], start: float) -> list[tuple[float, float]]:
        return [(x / 1e12, y) for x, y in points if x >= start]

    def chart(title: str, about: str, start: float) -> Html:
        lines = {f"{r.figures['model']}, training": tera(smoothed(r.losses), start) for r in results}
        marks = {f"{r.figures['model']}, held out, causal": tera(r.validation, start) for r in results}
        return pages.line_chart(title, about, lines, "training TFLOPs", "nats a byte", marks=marks)

    half = results[0].losses[-1][0] / 2
    said = (
        f"Lines: training loss (top k), each point the mean of the last {SMOOTHED} steps. Marks: causal loss on "
        "held-out text, other text than that trained on, so marks and lines are not to be compared with each other."
    )
    return pages.row(
        [
            chart("The whole training", said, 0.0),
            chart("Its second half, closer", "The same, from the middle on.", half),
        ]
    )


def _routing(mod: Result) -> Html:
    layers = ", ".join(map(str, mod.routed_layers))
    text = (
        f"The beginning of a held-out document, {mod.config.model.context} tokens at a time, as the model was trained. "
        f"A token is a byte. The deeper its colour and the thicker the line below it, the more of the routed layers "
        f"({layers}) computed it under the causal choice; hovering names them. All other layers compute every token. "
        "· is a space, ↵ the end of a line."
    )
    return pages.join([pages.paragraph(text), routed_text(mod.tokens, mod.through, mod.routed_layers)])


def _samples(rows: Sequence[Row], config: DemoConfig) -> Html:
    text = (
        f"{SAMPLED} tokens after the prompt {PROMPT!r}, temperature {TEMPERATURE}, seed {config.seed}, routers "
        "deciding causally. One sample of each, the first that was drawn."
    )

    def one(row: Row) -> Html:
        shown = visible(row["sample"], kept=" \n")
        return pages.join([Html(f"<h3>{pages.html(row['model'])}</h3>"), pages.preformatted(shown)])

    return pages.join([pages.paragraph(text), pages.row([Html(f"<div>{one(row)}</div>") for row in rows])])


def _making(
    config: DemoConfig, mod: TrainConfig, dense: TrainConfig, rows: Sequence[Row], about: dict[str, Any]
) -> Html:
    gap = rows[1]["flops"] / rows[0]["flops"] - 1
    return pages.join(
        [
            pages.paragraph("Command: ", pages.code(command(config))),
            pages.paragraph(
                "Trained on: ", ", ".join(f"{key} {value or 'unknown'}" for key, value in about.items()), "."
            ),
            pages.paragraph(
                f"Presets {mod.preset} ({mod.model.layers} layers, capacity {mod.model.capacity:g}) and {dense.preset} "
                f"({dense.model.layers} layers), width {mod.model.dim}, context {mod.model.context}, batches of "
                f"{mod.batch}. Optimizer {mod.optimizer}, learning rate {mod.lr:g} after {mod.warmup} warm-up steps, "
                f"{mod.schedule} to {mod.lowest_lr:.0%} of it at each run's last step. FLOPs are those of the matrix "
                f"products, forward and backward, counted from the configuration; the two runs differ by {gap:+.2%}. "
                "Seconds are those of this machine, whatever else it was doing; the other figures repeat with the "
                "seed on the same machine and the same text."
            ),
        ]
    )
