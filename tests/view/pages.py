"""Pages that several tests open, and what is on them."""

import json
import math
import re
from pathlib import Path

import torch

from depthgate.cli import main
from depthgate.view.routes import Decisions, RoutedLayer
from depthgate.view.runs import Run

HOSTILE = "<script>alert(1)</script> </script><img src=x onerror=alert(2)> &amp; \x00\x1b \u202eabc\u202c שלום 👩‍👩‍👧 é"


def view(*words) -> int:
    return main(["view", *map(str, words)])


def view_model(model, out, *more) -> int:
    return view("--model", model, "--out", out, "--device", "cpu", *more)


def page_data(page: Path, name: str = "routes"):
    """The plain data that a page hands to its script."""
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    data = json.loads(found[1])
    for key in ("scores", "gates"):  # ten-thousandths there
        if key in data:
            data[key] = [[None if x is None else x / 10_000 for x in row] for row in data[key]]
    return data


def large(tokens: int = 4000, layers: int = 8) -> Decisions:
    """A text as long as pages must stay smooth with."""
    torch.manual_seed(0)
    scores = [[round(x, 4) for x in torch.randn(tokens).tolist()] for _ in range(layers)]
    causal = [[score > 1.1 for score in row] for row in scores]
    top_k = [[score > 1.2 or 0.8 < score < 1 for score in row] for row in scores]
    gates = [[round(1 + math.tanh(score), 4) if score > 1.1 else 0.0 for score in row] for row in scores]
    words = ["the", " quick", " brown", "\n", " fox", ".", " <b>"]
    texts = [words[i % 7] for i in range(tokens)]
    layers = [
        RoutedLayer(2 * i + 2, *each, each[-2]) for i, each in enumerate(zip(scores, gates, causal, top_k, strict=True))
    ]
    return Decisions(2 * len(layers), layers, texts, [1.0] * tokens)


def a_run(name="a", steps=10, **more) -> Run:
    """A run by hand: the loss of step n is 10 - n."""
    made = [
        {
            "step": n,
            "tokens": 100 * n,
            "flops": 1e9 * n,
            "seconds": 2.0 * n,
            "loss": 10.0 - n,
            "routed_share": [0.25, 0.5],
            "tokens_per_second": 50.0,
            "resumed": False,
        }
        for n in range(1, steps + 1)
    ]
    return Run(name, made, **more)
