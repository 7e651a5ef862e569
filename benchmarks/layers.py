"""Every layer and its dense twin in one run: times and FLOPs, forward and backward.

    python benchmarks/layers.py --widths 256,1024 --device cuda --dtype bfloat16 --compile

A layer is timed only after it gave the right answer: gradients included, against plain loops in float32 on a short
sequence, and then as it is timed (dtype, shape, compiled) against itself without the compiler.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import answers
import measure
from depthgate.device import count_flops, interleaved
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.layers import Attention, Block, MoD, MoE, SoftMoE, SwiGLU
from depthgate.routing import TopTokens

_WARMUP = 3
_CAPACITIES = (0.125, 0.5, 1.0)
_CHECK_TOKENS = 16


@dataclass
class _Case:
    """A layer, the dense twin it is measured against, and what it must answer."""

    name: str
    against: str
    layer: nn.Module
    reference: Callable[[Tensor], Tensor]


def _heads(dim: int) -> int:
    """Heads of 64, or the next number of heads down that leaves each an even size."""
    for heads in range(max(1, dim // 64), 0, -1):
        if dim % (2 * heads) == 0:
            return heads
    raise InvalidValueError(f"dims has {dim}: rotary positions need an even width")


def _cases(dim: int, config: argparse.Namespace) -> Iterator[_Case]:
    """All layers of one width; every block starts from the same weights."""
    block = Block(dim, Attention(dim, _heads(dim)), SwiGLU(dim))
    yield _Case("dense block", "dense block", block, partial(answers.plain_block, block))
    for capacity in _CAPACITIES:
        mod = MoD(copy.deepcopy(block), TopTokens(dim, capacity))
        yield _Case(f"MoD {100 * capacity:g}%", "dense block", mod, partial(answers.mod, mod))

    mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
    yield _Case("dense MLP", "dense MLP", mlp, mlp)
    top_k = min(2, config.experts)
    tokens = MoE(dim, config.experts, top_k)
    yield _Case("MoE token choice", "dense MLP", tokens, partial(answers.token_choice, tokens, top_k=top_k))
    experts = MoE(dim, config.experts, top_k, "experts")
    share = top_k / config.experts
    yield _Case("MoE expert choice", "dense MLP", experts, partial(answers.expert_choice, experts, capacity=share))
    soft = SoftMoE(dim, config.experts, max(1, config.seq // config.experts))
    yield _Case("Soft MoE", "dense MLP", soft, partial(answers.soft_moe, soft))


def _right(case: _Case, dim: int, config: argparse.Namespace) -> bool:
    """True if the layer answers as its reference does, on two short rows."""
    layer = case.layer
    dtype = torch.float32
    if config.device == "cuda" and case.name == "MoE token choice":
        dtype = torch.bfloat16  # all that grouped products on CUDA offer
        layer = layer.to(dtype)
    x = torch.randn(2, min(_CHECK_TOKENS, config.seq), dim, device=config.device, dtype=dtype)
    grad = torch.randn_like(x)
    wanted = answers.with_gradients(layer, case.reference, x, grad)
    if not answers.agree(answers.with_gradients(layer, layer, x, grad), wanted, dtype):
        return False
    if not isinstance(layer, MoD) or layer.router.capacity < 1:
        return True
    # All tokens through a gate of one: the dense block itself.
    neutral = MoD(layer.block, TopTokens(dim, 1.0, gate="straight_through")).to(config.device)
    return torch.equal(neutral(x)[0], layer.block(x)[0])


def _forward(layer: Callable[[Tensor], object], x: Tensor, _: Tensor) -> object:
    return layer(x)


def _step(layer: Callable[[Tensor], object], x: Tensor, grad: Tensor) -> None:
    answers.update_of(layer(x)).backward(grad)  # type: ignore[no-untyped-call]


def _captured(run: Callable[[], object], clear: Callable[[], None]) -> Callable[[], object]:
    """The replay of one run as a CUDA graph: one launch for all its kernels."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # libraries set themselves up before a capture, not in it
            run()
            clear()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _memory(fn: Callable[[], object], device: str) -> float | None:
    """MiB that `fn` allocates at most; None where it is not counted."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = fn()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def _width(dim: int, config: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one width: a right layer has one forward and one with its backward, a wrong one a single error."""
    torch.manual_seed(config.seed)
    dtype = getattr(torch, config.dtype)
    x = torch.randn(config.batch, config.seq, dim, device=config.device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    pos = torch.arange(config.seq, device=config.device).repeat(config.batch, 1)
    rows: list[dict[str, Any]] = []
    runs: dict[str, Callable[[], object]] = {}
    layers: list[nn.Module] = []

    def clear() -> None:
        x.grad = None
        for layer in layers:
            layer.zero_grad(set_to_none=True)

    for case in list(_cases(dim, config)):  # all built first: blocks are copied before the first is converted
        measure.say(f"width {dim}: {case.name}")
        layer = case.layer.to(config.device)
        about = {"dim": dim, "layer": case.name, "against": case.against}
        right = _right(case, dim, config)
        layer = layer.to(dtype)
        # Every shape here is fixed: dynamic ones would only cost.
        fast = torch.compile(layer, fullgraph=True, dynamic=False) if config.compile else layer
        # Positions as a model hands them to its blocks: to make them inside costs the compiled dense block a tenth.
        given = {"pos": pos, "plain": True} if isinstance(layer, Block | MoD) else {}
        eager, timed = partial(layer, **given), partial(fast, **given)
        if right and config.compile:
            wanted = answers.weights_as_one(answers.with_gradients(layer, eager, x, grad))
            got = answers.weights_as_one(answers.with_gradients(layer, timed, x, grad))
            right = answers.agree(got, wanted, dtype)
            del wanted, got
        if not right:
            rows.append({**about, "error": "wrong answer"})
            continue
        layers.append(layer)
        # The forward pass is that of training: what the backward needs is kept. It is compiled once, for both.
        for name, once in (("forward", _forward), ("forward+backward", _step)):
            flops = count_flops(partial(once, eager, x, grad))
            clear()
            run = partial(once, timed, x, grad)
            run()  # memory that is allocated once, and the compiler's first call, are no part of a step
            clear()
            rows.append({**about, "pass": name, "flops": flops, "memory_mib": _memory(run, config.device)})
            clear()
            runs[f"{case.name}, {name}"] = _captured(run, clear) if config.cuda_graphs else run
            clear()

    seconds = interleaved(runs, config.repeats, _WARMUP, config.device, clear)
    for row in rows:
        if "error" not in row:
            row["ms"] = 1000 * median(seconds[f"{row['layer']}, {row['pass']}"])
            row["tflop_per_s"] = row["flops"] / row["ms"] / 1e9
    return _with_ratios(rows)


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the ratios to the dense twin; None where the twin was wrong."""
    timed = {(row["layer"], row["pass"]): row for row in rows if "error" not in row}
    for (_, which), row in timed.items():
        twin = timed.get((row["against"], which))
        row["time_ratio"] = row["ms"] / twin["ms"] if twin else None
        row["flop_ratio"] = row["flops"] / twin["flops"] if twin else None
    return rows


@contextmanager
def _compiler(config: argparse.Namespace) -> Iterator[None]:
    """The compiler with an empty cache, and room in it: each layer is one more entry for the same function."""
    if not config.compile:  # and so need not load it
        yield
        return
    with torch._dynamo.config.patch(recompile_limit=64):
        torch.compiler.reset()
        yield


def options() -> argparse.ArgumentParser:
    found = measure.parser(__doc__)
    found.add_argument("--widths", type=measure.whole_numbers, default=[256])
    found.add_argument("--batch", type=int, default=8)
    found.add_argument("--seq", type=int, default=256, help="tokens in a sequence")
    found.add_argument("--experts", type=int, default=8, help="experts of MoE and Soft MoE")
    found.add_argument("--compile", action="store_true", help="compile every layer with torch.compile")
    found.add_argument("--cuda_graphs", action="store_true", help="capture each pass on cuda, and time its replay")
    found.add_argument("--repeats", type=int, default=10, help="timed rounds, each of every layer")
    return found


def run(config: argparse.Namespace) -> None:
    """Measure every width, and report."""
    if config.cuda_graphs and config.device != "cuda":
        raise DepthgateError("cuda_graphs needs --device cuda")
    for dim in config.widths:
        _heads(dim)
    rows: list[dict[str, Any]] = []
    for dim in config.widths:
        with _compiler(config):
            rows += _width(dim, config)
        if config.device == "cuda":
            torch.cuda.empty_cache()
    columns = {
        "layer": lambda row: f"{row['layer']}, width {row['dim']}",
        "pass": lambda row: row["pass"],
        "ms": measure.figure("ms", 2),
        "time x": measure.figure("time_ratio", 3),
        "FLOP x": measure.figure("flop_ratio", 3),
        "GFLOP": measure.figure("flops", 2, 1e-9),
        "TFLOP/s": measure.figure("tflop_per_s", 3),
        "MiB": measure.figure("memory_mib"),
    }
    how = f"{config.dtype}{', compiled' * config.compile}{', CUDA graphs' * config.cuda_graphs}"
    title = (
        f"batch {config.batch}, seq {config.seq}, {how}: medians of {config.repeats}; x: against the dense block (MoD) "
        "or the dense MLP (MoE); MiB: what a pass needs on top of the weights"
    )
    measure.report(config, rows, title, columns)


if __name__ == "__main__":
    measure.main(run, options().parse_args())
