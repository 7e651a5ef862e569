"""Soft MoE next to a dense MLP and to the Soft MoE packages of PyPI: forward and backward in one run, interleaved.

    pip install soft-moe-pytorch==0.1.9 soft-moe==0.0.1 soft-mixture-of-experts==0.2.0
    python benchmarks/soft_moe_peers.py --device cuda

On CUDA that is 8 x 196 x 384 and a B/16 with 64, 256 and 1,024 images, each with weights in bfloat16 and with weights
in float32 under autocast; on a CPU two small shapes in float32. Experts are GELU networks four times as wide as the
model, with one slot each. Ours is timed only after it gave the answer, and the gradients, of the paper's einsums in
float32. Each layer is timed as it is, compiled, and on CUDA as a graph of the compiled one, and counts with its best
time. `floor` is the time to read all experts' weights twice and to write their gradients once, at the speed of a copy:
with few rows for each expert no layer can be faster.
Packages that are not installed are looked for unpacked, in --peers; those that cannot be imported are left out.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import answers
import measure
from depthgate.device import copy_rate, count_flops, interleaved
from depthgate.errors import DepthgateError
from depthgate.layers import SoftMoE

_WARMUP = 6  # first touches of memory mislead by ten times


_SHAPES = {"cuda": "8x196x384,64x196x768,256x196x768,1024x196x768", "cpu": "8x196x64,4x49x96"}


def _module(folder: str, name: str, file: str) -> ModuleType:
    """A module of a package, without loading the package: some ask for more than the layer needs."""
    path = Path(folder, name, file) if folder else None
    if path is None or not path.is_file():
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise DepthgateError(f"{name} is missing: pip install it, or name a folder that holds it by --peers")
        path = Path(found.origin).parent / file
    spec = importlib.util.spec_from_file_location(f"peer_{name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _soft_moe_pytorch(dim: int, experts: int, folder: str) -> nn.Module:
    return _module(folder, "soft_moe_pytorch", "soft_moe.py").SoftMoE(dim=dim, num_experts=experts, num_slots=1)  # type: ignore[no-any-return]


def _soft_moe(dim: int, experts: int, folder: str) -> nn.Module:
    wrapper = _module(folder, "soft_moe", "soft_moe.py").SoftMoELayerWrapper
    return wrapper(dim, experts, 1, partial(_mlp, dim))  # type: ignore[no-any-return]


def _soft_mixture_of_experts(dim: int, experts: int, folder: str) -> nn.Module:
    """Its experts are single products: two of them with GELU in between are as ours."""
    layer = _module(folder, "soft_mixture_of_experts", "soft_moe.py").SoftMoE(dim, dim, experts, 1)
    each = type(layer.experts)
    up, down = each(dim, 4 * dim, experts, bias=True), each(4 * dim, dim, experts, bias=True)
    layer.experts = nn.Sequential(up, nn.GELU(), down)
    return layer  # type: ignore[no-any-return]


_PEERS = {
    "soft-moe-pytorch": _soft_moe_pytorch,
    "soft-moe": _soft_moe,
    "soft-mixture-of-experts": _soft_mixture_of_experts,
}
_LOOPS = ("soft-moe-pytorch", "soft-moe")  # loops over modules, which take minutes to compile


def _mlp(dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


def _step(layer: nn.Module, call: Callable[[Tensor], Any], x: Tensor, grad: Tensor, autocast: bool) -> None:
    for weight in (x, *layer.parameters()):
        weight.grad = None
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        answer = answers.update_of(call(x))
    answer.backward(grad.to(answer.dtype))  # type: ignore[no-untyped-call]


def _ways(name: str, layer: nn.Module, options: argparse.Namespace, x: Tensor, grad: Tensor) -> dict[str, Any]:
    """The ways in which a layer can be run; those that fail are told and left out."""
    plain = partial(_step, layer, layer, x, grad, options.autocast)
    ways: dict[str, Callable[[], Callable[[], None]]] = {"plain": lambda: plain}
    if name not in _LOOPS and options.compile:
        compiled = torch.compile(layer, dynamic=False)
        ways["compiled"] = lambda: partial(_step, layer, compiled, x, grad, options.autocast)
    if x.is_cuda:
        ways["graph"] = lambda: measure.graph(ways["compiled"]() if "compiled" in ways else plain)
    found = {}
    for way, make in ways.items():
        try:
            step = make()
            step()
            found[way] = step
        except Exception as error:
            measure.say(f"{name}, {way}: left out, {type(error).__name__}: {str(error)[:300]}")
    return found


def _checked(layer: SoftMoE, shape: tuple[int, ...], device: str) -> None:
    """Refuse to time a layer with a wrong answer: in float32, and in bfloat16 as it is timed on CUDA."""
    x = torch.randn(2, shape[1], shape[2], device=device)
    grad = torch.randn_like(x)
    wanted = answers.with_gradients(layer, partial(answers.soft_moe, layer), x, grad)
    if not answers.agree(answers.with_gradients(layer, layer, x, grad), wanted, torch.float32):
        raise DepthgateError(f"wrong answer in float32 at {shape}: nothing timed")
    with torch.autocast(device, torch.bfloat16):
        found = answers.with_gradients(layer, layer, x, grad)
    if not answers.agree(*map(answers.weights_as_one, (found, wanted)), torch.bfloat16):
        raise DepthgateError(f"wrong answer in bfloat16 at {shape}: nothing timed")


def _peers(dim: int, options: argparse.Namespace) -> dict[str, nn.Module]:
    """The layers of other packages; those that cannot be imported are told and left out."""
    found = {}
    for name, make in _PEERS.items():
        try:
            found[name] = make(dim, options.experts, options.peers)
        except (ImportError, DepthgateError) as error:
            measure.say(f"{name}: left out, {error}")
    return found


def _measured(shape: tuple[int, ...], way_of_weights: str, options: argparse.Namespace) -> list[measure.Row]:
    device, dim = options.device, shape[2]
    options.autocast = way_of_weights == "autocast"
    torch.manual_seed(options.seed)
    ours = SoftMoE(dim, options.experts).to(device)
    _checked(ours, shape, device)
    weights = torch.float32 if options.autocast else getattr(torch, way_of_weights)
    x = torch.randn(*shape, device=device, dtype=weights, requires_grad=True)
    grad = torch.randn(*shape, device=device, dtype=weights)
    layers = {"dense MLP": _mlp(dim), "depthgate": ours}
    layers |= _peers(dim, options)
    flops, floor, rows = {}, 0.0, []
    for name, layer in layers.items():
        layer.to(device, weights)
        flops[name] = count_flops(partial(_step, layer, layer, x, grad, options.autocast))
        layer.zero_grad(set_to_none=True)
    if device == "cuda":
        each = sum(weight.nbytes for weight in ours.experts.parameters())
        floor = 1e3 * 3 * each / (copy_rate(device))
    cases = {(n, way): step for n, layer in layers.items() for way, step in _ways(n, layer, options, x, grad).items()}
    named = {f"{name}|{way}": step for (name, way), step in cases.items()}
    seconds = interleaved(named, options.repeats, _WARMUP, device)
    best = {n: min((1e3 * median(seconds[f"{n}|{w}"]), w) for m, w in cases if m == n) for n in layers}
    for name in layers:
        memory = _memory(cases[name, "plain"]) if device == "cuda" else None
        rows.append(
            {
                "layer": name,
                "shape": "x".join(map(str, shape)),
                "weights": way_of_weights,
                "ms": best[name][0],
                "way": best[name][1],
                "all_ms": {way: 1e3 * median(seconds[f"{n}|{way}"]) for n, way in cases if n == name},
                "gflops": flops[name] / 1e9,
                "flop_ratio": flops[name] / flops["dense MLP"],
                "time_ratio": best[name][0] / best["dense MLP"][0],
                "ours_faster": best[name][0] / best["depthgate"][0],
                "floor_ms": floor if name != "dense MLP" else None,
                "memory_mib": memory,
            }
        )
        rows[-1]["over"] = rows[-1]["time_ratio"] / rows[-1]["flop_ratio"]
    return rows


def _memory(step: Callable[[], None]) -> float:
    """Most memory that a step takes above what is there, in MiB."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def run(options: argparse.Namespace) -> None:
    """Measure all shapes."""
    if options.peers:
        sys.path.insert(0, options.peers)
    if options.device == "cpu":
        torch.set_num_threads(2)
    shapes = [tuple(map(int, shape.split("x"))) for shape in (options.shapes or _SHAPES[options.device]).split(",")]
    weights = (options.weights or {"cuda": "bfloat16,autocast", "cpu": "float32"}[options.device]).split(",")
    rows = []
    for shape, each in product(shapes, weights):
        found = _measured(shape, each, options)
        rows += found
        for row in found:  # in case that what follows takes too long
            measure.say(
                f"{row['shape']} {row['weights']} {row['layer']}: {row['all_ms']}, time/FLOPs {row['over']:.3f}"
            )
    columns: dict[str, Callable[[measure.Row], str]] = {
        "layer": lambda row: row["layer"],
        "batch x tokens x width": lambda row: row["shape"],
        "weights": lambda row: row["weights"],
        "ms": measure.figure("ms", 3),
        "plain": lambda row: measure.figure("plain", 3)(row["all_ms"]),
        "compiled": lambda row: measure.figure("compiled", 3)(row["all_ms"]),
        "graph": lambda row: measure.figure("graph", 3)(row["all_ms"]),
        "FLOPs": measure.figure("flop_ratio", 3),
        "time": measure.figure("time_ratio", 3),
        "time / FLOPs": measure.figure("over", 3),
        "we are faster": measure.figure("ours_faster", 2),
        "floor, ms": measure.figure("floor_ms", 3),
        "MiB": measure.figure("memory_mib"),
    }
    title = f"{options.experts} experts of one slot, forward and backward; ratios to the dense MLP"
    measure.report(options, rows, title, columns)


if __name__ == "__main__":
    parser = measure.parser(__doc__ or "")
    parser.add_argument("--shapes", help="batch x tokens x width, separated by commas")
    parser.add_argument("--weights", help="float32, bfloat16 or autocast (float32, products in bfloat16), or several")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peers", default="", help="folder with the unpacked packages")
    measure.main(run, parser.parse_args())
