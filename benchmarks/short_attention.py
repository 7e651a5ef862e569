"""Attention in short rows of narrow heads: our kernels and those of PyTorch, forward and forward with backward.

    python benchmarks/short_attention.py --device cuda --dtype bfloat16

Shapes are batch x tokens x heads x width of a head, with "doc" packed documents (three a row), else all tokens look at
all. PyTorch's: flash attention over runs of tokens for documents, as it was used before, else what
scaled_dot_product_attention picks. Ours are timed after they gave the same as the written-out softmax. Medians of
CUDA graphs of ten calls.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import measure
from depthgate.device import interleaved
from depthgate.errors import DepthgateError
from depthgate.ops import attention, reference

SHAPES = "32x512x10x32doc,32x64x10x32doc,16x512x6x32doc,32x1024x12x64doc,16x2048x16x64doc"
SHAPES += ",512x64x6x32,256x64x12x16,64x196x12x64"
_CALLS = 10


def ways(shape: str, seed: int) -> dict[str, Callable[[], Any]]:
    """Calls of attention over the same tensors, by their names."""
    sizes, packed = shape.removesuffix("doc"), shape.endswith("doc")
    B, T, H, d = map(int, sizes.split("x"))
    torch.manual_seed(seed)
    qkv = torch.randn(B, T, 3 * H, d, device="cuda", dtype=torch.bfloat16)
    q, k, v = (
        each.requires_grad_() for each in (qkv[:, :, :H].clone(), qkv[:, :, H : 2 * H].clone(), qkv[:, :, 2 * H :])
    )
    ends = torch.randint(1, T, (B, 2), device="cuda").sort(1).values
    doc = (torch.arange(T, device="cuda")[None, :, None] >= ends[:, None]).sum(2) if packed else None
    grad = torch.randn_like(q)

    def theirs() -> torch.Tensor:
        if doc is not None:
            starts = attention.run_starts(doc, 5)
            flat = [each.reshape(B * T, H, d) for each in (q, k, v)]
            y = torch.ops.aten._flash_attention_forward(*flat, starts, starts, T, T, 0.0, True, False)[0]
            return y.view(q.shape)
        return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)

    def ours() -> torch.Tensor:
        return attention.short_attention(q, k, v, doc, packed)

    def both(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(call(), (q, k, v), grad)

    if B * H * T * T < 2**28:
        wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
        want = reference.short_attention(*wide, doc, packed)
        exact = want, *torch.autograd.grad(want, wide, grad.double())
        for name, mine, right in zip("yqkv", (ours(), *both(ours)), exact, strict=True):
            if not (apart := float((mine.double() - right).norm() / right.norm())) < 1e-2:
                raise DepthgateError(f"{shape}: {name} is {apart:.1e} of its size from the written-out softmax")
    calls = {"ours": ours, "theirs": theirs}
    return calls | {f"{name}, both": lambda call=call: both(call) for name, call in calls.items()}


def run(asked: argparse.Namespace) -> None:
    if asked.device != "cuda" or asked.dtype != "bfloat16":
        raise DepthgateError("the kernels need a GPU and halves: give --device cuda --dtype bfloat16")
    rows = []
    for shape in asked.shapes.split(","):
        graphs = {name: measure.graph(call, _CALLS) for name, call in ways(shape, asked.seed).items()}
        taken = interleaved(graphs, asked.repeats, 3, "cuda")
        rows.append({"layer": shape, **{name: 1e6 * sorted(t)[len(t) // 2] / _CALLS for name, t in taken.items()}})
    names = ("theirs", "ours", "theirs, both", "ours, both")
    columns = {"shape": lambda row: row["layer"], **{f"{name}, us": measure.figure(name, 1) for name in names}}
    columns["times as fast"] = lambda row: f"{row['theirs, both'] / row['ours, both']:.2f}"
    measure.report(asked, rows, "Attention in short rows", columns)


if __name__ == "__main__":
    options = measure.parser(__doc__)
    options.add_argument("--shapes", default=SHAPES)
    options.add_argument("--repeats", type=int, default=20)
    measure.main(run, options.parse_args())
