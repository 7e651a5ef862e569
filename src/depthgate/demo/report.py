"""The demo's figures, and the page that shows them."""

import shlex
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F

from depthgate.bench.measure import count_flops
from depthgate.config import DemoConfig
from depthgate.demo.training import (
    BATCH,
    EXPERTS,
    LEARNING_RATE,
    PICTURED,
    ROWS,
    WARMUP_SHARE,
    WEIGHT_DECAY,
    Digits,
    Run,
)
from depthgate.routing import Slots
from depthgate.routing.metrics import routed_share
from depthgate.view import page as pages
from depthgate.view.page import Html

HEADERS = ("encoder", "test accuracy", "MFLOPs", "FLOPs / dense", "parameters", "training seconds", "routed share")
NOTE = (
    "MFLOPs: millions of operations in the matrix products of one forward pass over one sequence, head included, "
    "counted as they run. "
    "Routed share: pixel rows that enter a block, over all layers; Soft MoE mixes every row into its slots."
)


def cells(row: dict[str, Any]) -> list[str]:
    return [
        row["encoder"],
        f"{row['accuracy']:.1%}",
        f"{row['flops'] / 1e6:.2f}",
        f"{row['flops_ratio']:.2f}",
        f"{row['parameters']:,}",
        f"{row['train_seconds']:.1f}",
        f"{row['routed_share']:.0%}",
    ]


def command(config: DemoConfig) -> str:
    """The command line that gives this configuration."""
    options = [f"--{f.name} {shlex.quote(str(getattr(config, f.name)))}" for f in fields(config)]
    return " ".join(["depthgate demo", *options])


@torch.no_grad()
def figures(runs: list[Run], digits: Digits) -> list[dict[str, Any]]:
    """One row of plain numbers for each model."""
    one = digits.test_x[:1]
    rows: list[dict[str, Any]] = []
    for run in runs:
        model = run.model
        _, plans = model.encoder.features(digits.test_x)
        flops = count_flops(lambda model=model: model(one))  # type: ignore[misc]
        rows.append(
            {
                "encoder": run.name,
                "accuracy": run.accuracies[-1],
                "flops": flops,
                "flops_ratio": flops / rows[0]["flops"] if rows else 1.0,
                "parameters": sum(p.numel() for p in model.parameters()),
                "train_seconds": run.seconds,
                "routed_share": torch.stack([routed_share(plan) for plan in plans]).mean().item(),
            }
        )
    return rows


def _training_flops(run: Run, digits: Digits) -> float:
    """FLOPs of training on one sequence: forward and backward of a batch, shared among its sequences."""
    x, y = digits.train_x[:BATCH], digits.train_y[:BATCH]

    def step() -> None:
        F.cross_entropy(run.model(x), y).backward()  # type: ignore[no-untyped-call]

    return count_flops(step) / len(x)


def report_page(
    config: DemoConfig, runs: list[Run], rows: list[dict[str, Any]], digits: Digits, about: dict[str, Any]
) -> Html:
    seen = len(digits.train_x)  # sequences an epoch
    cost = {run.name: _training_flops(run, digits) * seen / 1e9 for run in runs}
    losses = {run.name: [(cost[run.name] * n, loss) for n, loss in enumerate(run.losses, 1)] for run in runs}
    accuracies = {run.name: [(n, 100 * a) for n, a in enumerate(run.accuracies, 1)] for run in runs}
    tested = len(digits.test_x)
    explanation = pages.paragraph(
        f"Each digit is an image of 8 by 8 pixels, read as a sequence of {ROWS} pixel rows. "
        "In a Mixture-of-Depths (MoD) encoder, a router in every layer scores the rows and only the best share of them "
        "goes through the layer; the others pass by unchanged and cost almost nothing. The last row always goes "
        "through, because the answer is read from it. The number behind MoD is that share; the dense twin is the same "
        "network at a share of 1, where every row goes through every layer. "
        f"In the Soft MoE encoder, {EXPERTS} experts each compute one weighted mean of all rows; it has no attention. "
        f"All were trained on the same {seen:,} digits in the same order and tested on {tested} others, once, with one "
        f"seed. One test digit is {1 / tested:.2%}, and another seed (another split, other weights) can move a routed "
        "encoder by several percentage points: small differences here mean little."
    )
    charts = pages.row(
        [
            pages.line_chart(
                "Training loss against training FLOPs",
                "Mean loss of each epoch, with dropout, against the FLOPs of all forward and backward passes so far. "
                "Lower at the same FLOPs is better.",
                losses,
                "training GFLOPs",
                "loss (log scale)",
                log_y=True,
            ),
            pages.line_chart(
                "Test accuracy by epoch",
                "Share of test digits named rightly after each epoch.",
                accuracies,
                "epoch",
                "test accuracy, %",
            ),
        ]
    )
    made = [
        pages.paragraph("Command: ", pages.code(command(config))),
        pages.paragraph("Machine: ", ", ".join(f"{key} {value}" for key, value in about.items())),
        pages.paragraph(
            f"AdamW, learning rate {LEARNING_RATE:g} with a warm-up over {WARMUP_SHARE:.0%} of the steps and then a "
            f"cosine to 0, weight decay {WEIGHT_DECAY:g}, batches of {BATCH}. Times are those of this machine, "
            "whatever else it was doing; the other figures repeat with the seed on the same machine."
        ),
    ]
    return pages.page(
        "depthgate demo: digits, row by row",
        {
            "": explanation,
            "Results": pages.table(HEADERS, [cells(row) for row in rows], NOTE),
            "Training": charts,
            f"What {PICTURED} computed": _routing(runs, digits, config.num_layers),
            "How this was made": pages.join(made),
        },
    )


@torch.no_grad()
def _routing(runs: list[Run], digits: Digits, layers: int) -> Html:
    """The first test digit of each class, with the layers that each of its rows went through."""
    model = next(run.model for run in runs if run.name == PICTURED).eval()
    labels = digits.test_y.tolist()
    x = digits.test_x[[labels.index(label) for label in sorted(set(labels))]]
    _, plans = model.encoder.features(x)
    routed = torch.stack([plan.chosen[..., 0] for plan in plans if isinstance(plan, Slots)], -1)  # (B, T, layers)
    guesses = model(x).argmax(-1).tolist()
    pictures = [
        pages.routed_image(f"digit {label}, read as {guess}", image.tolist(), through.tolist())
        for image, through, label, guess in zip(x, routed, sorted(set(labels)), guesses, strict=True)
    ]
    text = (
        f"The first test digit of each kind. Beside each pixel row: the {layers} layers, from the first at the left; a "
        "filled square is a layer that computed this row, an outline one that let it pass. The last row is always "
        f"computed; a quarter of {ROWS} rows is two, so each layer "
        "adds one other row at most to what the answer knows."
    )
    return pages.join([pages.paragraph(text), pages.tiles(pictures)])
