"""Whole steps of `depthgate train` (forward, head, loss, backward, optimizer): dense, MoD and MoDE, time and FLOPs.

    python benchmarks/train.py --widths 256,2048 --steps 6 --rounds 2 --llama 2048 --json

A model is timed only after its loss and gradient norm over two steps were those of the plain step: not compiled, no
graph, attention by masks, a few rows at a time.
"""

import argparse
import gc
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch

import measure
from depthgate.config import RULE_NAMES, ModelConfig, TrainConfig
from depthgate.data.batches import Rows
from depthgate.device import World, matmul_rate
from depthgate.flops import parameters, training_flops
from depthgate.recipes import EXPERTS, MOD
from depthgate.train import optim
from depthgate.train.loop import Pretraining
from depthgate.train.step import Figures, Step

_LLAMA = "Llama, transformers"
_MODELS: dict[str, dict[str, Any]] = {"dense": {}, "MoD": MOD, "MoDE": {**EXPERTS, "pattern": "mode"}, _LLAMA: {}}
_BATCHES = 4
_PART = 2**26  # tokens times width that are computed at once
_CHECKED = 2  # steps
_ROWS = 8  # computed at once by the plain step
_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


def _model(dim: int, config: argparse.Namespace, name: str) -> ModelConfig:
    heads = dim // (128 if dim >= 1024 else 64)  # as the presets have them
    return ModelConfig(
        vocab=config.vocab,
        dim=dim,
        layers=config.layers,
        heads=heads,
        kv_heads=max(1, heads // 4),
        context=config.seq,
        **{**_MODELS[name], "capacity": config.capacity, "rule": config.rule},
    )


def _parts(dim: int, config: argparse.Namespace) -> int:
    """Parts a step is computed in: as few as fit, a large model's being smaller."""
    for parts in range(1, config.batch):
        if config.batch % parts == 0 and config.batch * config.seq * dim <= parts * _PART:
            return parts
    return config.batch


def _training(model: ModelConfig, config: argparse.Namespace) -> TrainConfig:
    return TrainConfig(
        model=model,
        batch=config.batch,
        accumulate=_parts(model.dim, config),
        dtype=config.dtype,
        compile=config.compile,
        cuda_graph=config.cuda_graph,
        max_documents=config.documents,
        device=config.device,
        seed=config.seed,
    )


def _batches(config: argparse.Namespace) -> list[Rows]:
    """Random tokens, packed as training data is."""
    torch.manual_seed(config.seed)
    shape = (config.batch, config.seq)
    size = -(-config.seq // config.documents)
    place = torch.arange(config.seq).expand(shape)
    batches = []
    for _ in range(_BATCHES):
        tokens, targets = torch.randint(config.vocab, shape), torch.randint(config.vocab, shape)
        batches.append(Rows(tokens, targets, (place % size).contiguous(), (place // size).contiguous()))
    return batches


def _step(training: TrainConfig) -> Step:
    """A fresh model's step, as `depthgate train` makes it."""
    world = World(device=training.device)
    task = Pretraining(training, world)
    optimizers = optim.build(task.model, training, world)
    optim.set_rate(optimizers, 1e-4)
    return Step(task, optimizers, training, world)


def _plain_figures(training: TrainConfig, batches: list[Rows]) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first steps, computed plainly."""
    # Experts choose out of what is computed at once.
    parts = training.accumulate if "mode" in training.model.kinds else max(1, training.batch // _ROWS)
    step = _step(replace(training, compile=False, cuda_graph=False, accumulate=parts, max_documents=None))
    return [step(rows).read()[:2] for rows in batches[:_CHECKED]]


def _agree(got: list[tuple[float, float]], wanted: list[tuple[float, float]], tolerance: float) -> bool:
    return torch.allclose(torch.tensor(got), torch.tensor(wanted), rtol=tolerance, atol=0.0)


def _seconds_a_step(step: Callable[[Rows], Figures], batches: list[Rows], steps: int) -> float:
    """Wall time of steps one after another; as in training, one is under way while the last one's figures are read."""
    under_way = deque([step(batches[0])])
    while under_way:
        under_way.popleft().read()
    start = time.perf_counter()
    for rows in islice(cycle(batches), steps):
        under_way.append(step(rows))
        if len(under_way) > 1:
            under_way.popleft().read()
    while under_way:
        under_way.popleft().read()
    return (time.perf_counter() - start) / steps


@contextmanager
def _peak(device: str) -> Iterator[dict[str, float | None]]:
    """Peak memory in MiB of what is done here, everything included; None where it is not counted."""
    found: dict[str, float | None] = {"mib": None}
    _free(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield found
    if device == "cuda":
        found["mib"] = torch.cuda.max_memory_allocated() / 2**20


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _timed(
    make: Callable[[], Callable[[Rows], Figures]],
    wanted: list[tuple[float, float]] | None,
    config: argparse.Namespace,
    batches: list[Rows],
) -> dict[str, Any]:
    """Build, check against the `wanted` figures, time; as often as there are rounds."""
    seconds, memory = [], None
    for _ in range(config.rounds):
        with _peak(config.device) as peak:
            step = make()
            got = [step(rows).read()[:2] for rows in batches[:_CHECKED]]
            if wanted is not None and not _agree(got, wanted, _TOLERANCE[config.dtype]):
                return {"error": f"loss and gradient norm are {got}, they should be {wanted}"}
            seconds.append(_seconds_a_step(step, batches, config.steps))
            del step
        memory = peak["mib"]
    return {"ms": 1000 * median(seconds), "spread": max(seconds) / min(seconds) - 1, "memory_mib": memory}


def _row(dim: int, name: str, config: argparse.Namespace, ceiling: float) -> dict[str, Any]:
    """One model of one width."""
    measure.say(f"width {dim}: {name}")
    if config.compile:
        torch.compiler.reset()
    model = _model(dim, config, name)
    training, batches, tokens = _training(model, config), _batches(config), config.batch * config.seq
    flops = training_flops(model) * tokens
    row: dict[str, Any] = {"dim": dim, "model": name, "parameters": parameters(model), "flops": flops}
    if name == _LLAMA:
        row |= _timed(partial(measure.LlamaStep, training), None, config, batches)
    else:
        row |= _timed(partial(_step, training), _plain_figures(training, batches), config, batches)
    if "error" not in row:
        row["tokens_per_second"] = 1000 * tokens / row["ms"]
        row["tflop_per_s"] = flops / row["ms"] / 1e9
        row["of_ceiling"] = 1000 * flops / row["ms"] / ceiling
    _free(config.device)
    return row


def _with_ratios(row: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """Add the ratios to the dense model of the same width, if both were right."""
    if "error" not in row and "error" not in dense:
        row["time_ratio"], row["flop_ratio"] = row["ms"] / dense["ms"], row["flops"] / dense["flops"]
        row["time_over_flops"] = row["time_ratio"] / row["flop_ratio"]
    return row


def options() -> argparse.ArgumentParser:
    found = measure.parser(__doc__)
    found.set_defaults(device="cuda", dtype="bfloat16")
    found.add_argument(
        "--widths",
        type=measure.whole_numbers,
        default=[256, 512, 1024, 2048],
        help="heads are of 64, and of 128 from width 1024, four to one of keys",
    )
    found.add_argument("--routed", nargs="+", choices=("MoD", "MoDE"), default=["MoD", "MoDE"])
    found.add_argument("--layers", type=int, default=16)
    found.add_argument("--seq", type=int, default=2048, help="tokens in a sequence")
    found.add_argument("--batch", type=int, default=128, help="sequences in a step; wide models compute it in parts")
    found.add_argument("--vocab", type=int, default=32768)
    found.add_argument("--capacity", type=float, default=0.125, help="share of tokens in every other layer")
    found.add_argument("--rule", choices=RULE_NAMES, default="predictor")
    found.add_argument("--documents", type=int, default=1, help="documents packed into every sequence")
    found.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    found.add_argument("--cuda_graph", action=argparse.BooleanOptionalAction, default=True)
    found.add_argument("--steps", type=int, default=20, help="timed steps")
    found.add_argument("--rounds", type=int, default=2, help="how often every model is built and timed")
    found.add_argument("--llama", type=measure.whole_numbers, default=[], help="widths at which to time Llama as well")
    return found


def run(config: argparse.Namespace) -> None:
    """Measure every width, and report."""
    if config.llama:
        measure.check_transformers()
    ceiling = matmul_rate(config.device, getattr(torch, config.dtype))
    cases = [(dim, name) for dim in config.widths for name in ["dense", *config.routed]]
    rows: list[dict[str, Any]] = []
    for dim, name in [*cases, *((dim, _LLAMA) for dim in config.llama)]:
        row = _row(dim, name, config, ceiling)
        rows.append(_with_ratios(row, next((r for r in rows if r["dim"] == dim), row)))
        measure.say(json.dumps(row))  # a long run that is cut short has not been for nothing
    how = "".join([", compiled" * config.compile, ", CUDA graph" * (config.cuda_graph and config.device == "cuda")])
    shape = f"{config.layers} layers, batch {config.batch} x {config.seq}, vocabulary {config.vocab}"
    columns = {
        "model": lambda row: f"{row['model']} {row['dim']}",
        "M params": measure.figure("parameters", 1, 1e-6),
        "ms": measure.figure("ms", 2),
        "tokens/s": measure.figure("tokens_per_second"),
        "TFLOP/s": measure.figure("tflop_per_s", 1),
        "% of ceiling": measure.figure("of_ceiling", 1, 100),
        "GiB": measure.figure("memory_mib", 1, 1 / 1024),
        "time x": measure.figure("time_ratio", 3),
        "FLOP x": measure.figure("flop_ratio", 3),
        "time/FLOP": measure.figure("time_over_flops", 3),
    }
    title = f"Whole training steps: {shape}, {config.dtype}{how}"
    measure.report(config, rows, title, columns, matmul_tflop_per_s=ceiling / 1e12)


if __name__ == "__main__":
    measure.main(run, options().parse_args())
