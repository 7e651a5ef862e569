"""MoDEncoder next to its own gating="soft" form, which computes every timestep; and the FLOPs that capacity saves.

    python benchmarks/encoder_speed.py [--json] [--repeats 20]

hidden_size 256, windows of 256 timesteps. The encoder is timed only after, with the neutral gate of a zeroed router
and capacity 1, it gave the answer of the same blocks without a router.
"""

import argparse
import json
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import answers
from depthgate import MoDEncoder
from depthgate.device import count_flops, interleaved, machine

HIDDEN, WINDOW, BATCH, WARMUP = 256, 256, 16, 3
SPEED_TARGET, FLOP_TARGET = 1.5, 0.35


def encoder(capacity: float, gating: str = "hard") -> MoDEncoder:
    """The same weights for the same gating; without dropout, which costs both forms alike."""
    torch.manual_seed(0)
    return MoDEncoder(HIDDEN, HIDDEN, capacity_ratio=capacity, window_size=WINDOW, dropout=0.0, gating=gating)


def check(x: Tensor) -> None:
    """With capacity 1 and a gate of one the encoder is its blocks, one after the other."""
    routed = encoder(1.0)
    for layer in routed.layers:
        torch.nn.init.zeros_(layer.router.proj.weight)
    pos = torch.arange(WINDOW).expand(len(x), WINDOW)
    hidden = routed.project(x) + routed.age.weight.flip(0)  # the oldest timestep comes first
    for layer in routed.layers:
        hidden = hidden + layer.block(hidden, pos, plain=True)[0]
    if not answers.agree([routed(x)], [routed.norm(hidden)[:, -1]], torch.float32):
        raise SystemExit("wrong answer: nothing timed")


def infer(model: MoDEncoder, x: Tensor) -> None:
    with torch.inference_mode():
        model(x)


def train(model: MoDEncoder, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def times(repeats: int) -> dict[str, Any]:
    x = torch.randn(BATCH, WINDOW, HIDDEN)
    check(x[:2])
    cases = {}
    for gating in ("hard", "soft"):
        model = encoder(0.25, gating)
        cases[f"{gating} inference"] = partial(infer, model, x)
        # A model of its own, so that what is inferred from stays as it is.
        model = encoder(0.25, gating)
        cases[f"{gating} training"] = partial(train, model, torch.optim.AdamW(model.parameters()), x)
    ms = {name: 1000 * median(taken) for name, taken in interleaved(cases, repeats, WARMUP, "cpu").items()}
    return {
        what: {
            "hard_ms": ms[f"hard {what}"],
            "soft_ms": ms[f"soft {what}"],
            "times_faster": ms[f"soft {what}"] / ms[f"hard {what}"],
            "target": SPEED_TARGET,
        }
        for what in ("inference", "training")
    }


def flops() -> dict[str, float]:
    """FLOPs at capacity 12.5% over those at 100%, attention included, and by PyTorch's counter as it comes, which
    does not know attention on CPU."""
    x = torch.randn(1, WINDOW, HIDDEN)
    few, all_ = encoder(0.125), encoder(1.0)

    def plainly(model: MoDEncoder) -> int:
        with FlopCounterMode(display=False) as counter:
            model(x)
        return counter.get_total_flops()

    return {
        "counted": count_flops(lambda: few(x)) / count_flops(lambda: all_(x)),
        "counted_by_torch_alone": plainly(few) / plainly(all_),
        "target": FLOP_TARGET,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds")
    options = parser.parse_args()
    ratio, rows = flops(), times(options.repeats)
    if options.json:
        print(json.dumps({"machine": machine(), "flop_ratio": ratio, "times": rows}))
        return
    print(f"MoDEncoder, hidden {HIDDEN}, window {WINDOW}, batch {BATCH}, capacity 0.25: medians of {options.repeats}")
    print(f"{'':>10} {'hard ms':>9} {'soft ms':>9} {'times faster':>13} {'target':>7}")
    for what, row in rows.items():
        figures = f"{row['hard_ms']:>9.1f} {row['soft_ms']:>9.1f} {row['times_faster']:>13.2f} {row['target']:>7}"
        print(f"{what:>10} {figures}")
    counted = f"{ratio['counted']:.3f} ({ratio['counted_by_torch_alone']:.3f} by torch's counter alone)"
    print(f"FLOPs at capacity 0.125 over 1.0: {counted}, target {ratio['target']}")
    print(", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    main()
