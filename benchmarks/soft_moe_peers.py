"""Soft MoE next to soft-moe-pytorch 0.1.9: forward and backward on two CPU threads, interleaved in one process.

    pip install soft-moe-pytorch==0.1.9
    python benchmarks/soft_moe_peers.py [--json] [--repeats 20]

Both layers have 128 experts with one slot each, GELU experts four times as wide as the model. Ours is timed only
after it gave the answer, and the gradients, of the paper's einsums.
"""

import argparse
import json
from functools import partial
from statistics import median

import torch
from soft_moe_pytorch import SoftMoE as PeerSoftMoE
from torch import Tensor, nn

import answers
from depthgate.device import interleaved, machine
from depthgate.layers import SoftMoE

BATCH, TOKENS, EXPERTS = 8, 196, 128
TARGETS = {64: 2.0, 384: 1.0}  # width -> how many times as fast as the peer we mean to be
WARMUP = 6  # first touches of memory mislead by ten times


def step(layer: nn.Module, x: Tensor, grad: Tensor) -> None:
    answers.update_of(layer(x)).backward(grad)


def measure(dim: int, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, dim, requires_grad=True)
    grad = torch.randn_like(x)
    ours = SoftMoE(dim, EXPERTS, slots_per_expert=1, hidden=4 * dim)
    peer = PeerSoftMoE(dim=dim, num_experts=EXPERTS, num_slots=1)
    wanted = answers.with_gradients(ours, partial(answers.soft_moe, ours), x, grad)
    if not answers.agree(answers.with_gradients(ours, ours, x, grad), wanted, torch.float32):
        raise SystemExit(f"wrong answer at width {dim}: nothing timed")
    del wanted

    def clear() -> None:
        x.grad = None
        ours.zero_grad(set_to_none=True)
        peer.zero_grad(set_to_none=True)

    cases = {"ours": partial(step, ours, x, grad), "peer": partial(step, peer, x, grad)}
    seconds = interleaved(cases, repeats, WARMUP, "cpu", clear)
    ms = {name: 1000 * median(times) for name, times in seconds.items()}
    best = {name: 1000 * min(times) for name, times in seconds.items()}
    return {
        "dim": dim,
        "ours_ms": ms["ours"],
        "peer_ms": ms["peer"],
        "times_faster": ms["peer"] / ms["ours"],
        "ours_best_ms": best["ours"],
        "peer_best_ms": best["peer"],
        "target": TARGETS[dim],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds")
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = [measure(dim, options.repeats) for dim in TARGETS]
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print(f"x ({BATCH}, {TOKENS}, dim), {EXPERTS} experts of one slot, forward + backward, median (best) of ms")
    print(f"{'dim':>5} {'depthgate':>18} {'soft-moe-pytorch':>18} {'times faster':>13} {'target':>7}")
    for row in rows:
        ours = f"{row['ours_ms']:.1f} ({row['ours_best_ms']:.1f})"
        peer = f"{row['peer_ms']:.1f} ({row['peer_best_ms']:.1f})"
        print(f"{row['dim']:>5} {ours:>18} {peer:>18} {row['times_faster']:>13.2f} {row['target']:>7}")
    print(", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    main()
