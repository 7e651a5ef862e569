"""`depthgate bench layers`: every layer beside its dense twin in one run, times and FLOPs, forward and backward.

A layer is timed only after it gave the right answer: gradients included, against plain loops in float32 on a short
sequence, and then as it is timed (dtype, shape, compiled) against itself without the compiler.
"""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.bench import answers
from depthgate.bench.measure import count_flops, interleaved, machine
from depthgate.config import BenchLayersConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.layers import Attention, Block, MixtureOfExperts, MoD, SoftMoE, SwiGLU
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


def _cases(dim: int, config: BenchLayersConfig) -> Iterator[_Case]:
    """All layers of one width; every block starts from the same weights."""
    block = Block(dim, Attention(dim, _heads(dim)), SwiGLU(dim))
    yield _Case("dense block", "dense block", block, lambda x: answers.plain_block(block, x))
    for capacity in _CAPACITIES:
        mod = MoD(copy.deepcopy(block), TopTokens(dim, capacity))
        yield _Case(f"MoD {capacity:.1%}", "dense block", mod, lambda x, mod=mod: answers.mod(mod, x))

    mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
    yield _Case("dense MLP", "dense MLP", mlp, mlp)
    top_k = min(2, config.experts)
    tokens = MixtureOfExperts(dim, config.experts, top_k)
    yield _Case("MoE, tokens choose", "dense MLP", tokens, lambda x: answers.token_choice(tokens, x, top_k))
    experts = MixtureOfExperts(dim, config.experts, top_k, "experts")
    capacity = top_k / config.experts
    yield _Case("MoE, experts choose", "dense MLP", experts, lambda x: answers.expert_choice(experts, x, capacity))
    soft = SoftMoE(dim, config.experts, max(1, config.seq // config.experts))
    yield _Case("Soft MoE", "dense MLP", soft, lambda x: answers.soft_moe(soft, x))


def _right(case: _Case, dim: int, config: BenchLayersConfig) -> bool:
    """Whether the layer answers as its reference does, on two short rows."""
    layer = case.layer
    dtype = torch.float32
    if config.device == "cuda" and case.name == "MoE, tokens choose":
        dtype = torch.bfloat16  # all that grouped products on CUDA offer
        layer = layer.to(dtype)
    x = torch.randn(2, min(_CHECK_TOKENS, config.seq), dim, device=config.device, dtype=dtype)
    wanted = answers.with_gradients(layer, case.reference, x)
    if not answers.agree(answers.with_gradients(layer, layer, x), wanted, dtype):
        return False
    if not isinstance(layer, MoD) or layer.router.capacity < 1:
        return True
    # Everybody through a gate of one: the dense block itself.
    neutral = MoD(layer.block, TopTokens(dim, 1.0, gate="straight_through")).to(config.device)
    return torch.equal(neutral(x)[0], layer.block(x)[0])


def _step(layer: Callable[[Tensor], object], x: Tensor, grad: Tensor) -> None:
    answers.update_of(layer(x)).backward(grad)


def _memory(fn: Callable[[], object], device: str) -> float | None:
    """MiB that `fn` needs beyond what was held before it; None where nobody keeps count."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = fn()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def _width(dim: int, config: BenchLayersConfig) -> list[dict[str, Any]]:
    """The rows of one width: a right layer has one forward and one with its backward, a wrong one a single error."""
    torch.manual_seed(config.seed)
    dtype = getattr(torch, config.dtype)
    x = torch.randn(config.batch, config.seq, dim, device=config.device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    rows: list[dict[str, Any]] = []
    runs: dict[str, Callable[[], object]] = {}
    layers: list[nn.Module] = []

    def clear() -> None:
        x.grad = None
        for layer in layers:
            layer.zero_grad(set_to_none=True)

    for case in _cases(dim, config):
        _say(f"width {dim}: {case.name}")
        layer = case.layer.to(config.device)
        about = {"dim": dim, "layer": case.name, "against": case.against}
        right = _right(case, dim, config)
        layer = layer.to(dtype)
        # Dynamic shapes are for those who need them: every shape here is fixed.
        fast = torch.compile(layer, fullgraph=True, dynamic=False) if config.compile else layer
        if right and config.compile:
            plain = answers.with_gradients(layer, layer, x)
            right = answers.agree(answers.with_gradients(layer, fast, x), plain, dtype)
            del plain
        if not right:
            rows.append({**about, "error": "wrong answer"})
            continue
        layers.append(layer)
        # The forward pass is that of training: what the backward needs is kept. It is compiled once, for both.
        for name, run, eager in (
            ("forward", lambda fast=fast: fast(x), lambda layer=layer: layer(x)),
            ("forward+backward", lambda fast=fast: _step(fast, x, grad), lambda layer=layer: _step(layer, x, grad)),
        ):
            flops = count_flops(eager)
            clear()
            run()  # memory that is allocated once, and the compiler's first call, are no part of a step
            clear()
            rows.append({**about, "pass": name, "flops": flops, "memory_mib": _memory(run, config.device)})
            runs[f"{case.name}, {name}"] = run
            clear()

    seconds = interleaved(runs, config.repeats, _WARMUP, config.device, clear)
    for row in rows:
        if "error" not in row:
            row["ms"] = 1000 * median(seconds[f"{row['layer']}, {row['pass']}"])
            row["tflop_per_s"] = row["flops"] / row["ms"] / 1e9
    return _with_ratios(rows)


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row beside its dense twin; None where the twin was wrong."""
    timed = {(row["layer"], row["pass"]): row for row in rows if "error" not in row}
    for (_, which), row in timed.items():
        twin = timed.get((row["against"], which))
        row["time_ratio"] = row["ms"] / twin["ms"] if twin else None
        row["flop_ratio"] = row["flops"] / twin["flops"] if twin else None
    return rows


def run(config: BenchLayersConfig, as_json: bool) -> None:
    """Measure every width, print one table or one JSON object; raises at the end if any layer was wrong."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DepthgateError("device is 'cuda', but no CUDA device is available: use --device cpu")
    for dim in config.widths:
        _heads(dim)
    about = machine(config.device)
    rows: list[dict[str, Any]] = []
    # Each layer is one more entry of the compiler's cache for the same forward function.
    with torch._dynamo.config.patch(recompile_limit=64):
        for dim in config.widths:
            rows += _width(dim, config)
            torch.compiler.reset()
            if config.device == "cuda":
                torch.cuda.empty_cache()
    if as_json:
        print(json.dumps({"machine": about, "config": asdict(config), "rows": rows}))
    else:
        _print_table(about, config, rows)
    wrong = [f"{row['layer']} at width {row['dim']}" for row in rows if "error" in row]
    if wrong:
        raise DepthgateError(f"wrong answer, not timed: {', '.join(wrong)}")


def _say(text: str) -> None:
    """Progress, on stderr so that stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


def _print_table(about: dict[str, Any], config: BenchLayersConfig, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    shape = f"batch {config.batch}, seq {config.seq}, {config.dtype}{', compiled' if config.compile else ''}"
    table = Table(title=f"Medians of {config.repeats} rounds, {shape}; ratios against the dense twin")
    table.add_column("width", justify="right")
    table.add_column("layer")
    table.add_column("pass")
    for name in ("ms", "time ratio", "GFLOP", "FLOP ratio", "TFLOP/s", "memory MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(str(row["dim"]), row["layer"], "", row["error"], style="red")
            continue
        table.add_row(
            str(row["dim"]),
            row["layer"],
            row["pass"],
            f"{row['ms']:.3f}",
            _number(row["time_ratio"]),
            f"{row['flops'] / 1e9:.3f}",
            _number(row["flop_ratio"]),
            f"{row['tflop_per_s']:.3f}",
            _number(row["memory_mib"]),
        )
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
