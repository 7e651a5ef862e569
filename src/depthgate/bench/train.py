"""`depthgate bench train`: whole steps of `depthgate train` (forward, head, loss, backward, optimizer), dense and MoD.

A model is timed only after its loss and gradient norm over two steps were those of the plain step: not compiled, no
graph, attention by masks, a few rows at a time.
"""

import gc
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch

from depthgate.bench.config import BenchTrainConfig
from depthgate.bench.llama import LlamaStep, check_transformers
from depthgate.config import ModelConfig, TrainConfig
from depthgate.data.batches import Rows
from depthgate.device import World, machine, matmul_rate
from depthgate.errors import DepthgateError
from depthgate.flops import parameters, training_flops
from depthgate.train import optim
from depthgate.train.parallel import build_decoder
from depthgate.train.step import Figures, Step

_LLAMA = "Llama, transformers"
_PATTERNS = {"dense": "dense", "MoD": "dense,mod", _LLAMA: "dense"}
_BATCHES = 4
_PART = 2**26  # tokens times width that are computed at once
_CHECKED = 2  # steps
_ROWS = 8  # computed at once by the plain step
_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


def _model(dim: int, config: BenchTrainConfig, pattern: str) -> ModelConfig:
    heads = dim // (128 if dim >= 1024 else 64)  # as the presets have them
    return ModelConfig(
        vocab=config.vocab,
        dim=dim,
        layers=config.layers,
        heads=heads,
        kv_heads=max(1, heads // 4),
        context=config.seq,
        pattern=pattern,
        capacity=config.capacity,
        rule=config.rule,
    )


def _parts(dim: int, config: BenchTrainConfig) -> int:
    """Parts a step is computed in: as few as fit, a large model's being smaller."""
    for parts in range(1, config.batch):
        if config.batch % parts == 0 and config.batch * config.seq * dim <= parts * _PART:
            return parts
    return config.batch


def _training(model: ModelConfig, config: BenchTrainConfig) -> TrainConfig:
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


def _batches(config: BenchTrainConfig) -> list[Rows]:
    """Random tokens, packed as training data is."""
    torch.manual_seed(config.seed)
    shape = (config.batch, config.seq)
    size = -(-config.seq // config.documents)
    place = torch.arange(config.seq).expand(shape)
    batches = []
    for _ in range(_BATCHES):
        tokens, targets = torch.randint(config.vocab, shape), torch.randint(config.vocab, shape)
        dropped = torch.zeros(config.batch, dtype=torch.int64)
        batches.append(Rows(tokens, targets, (place % size).contiguous(), (place // size).contiguous(), dropped))
    return batches


def _step(training: TrainConfig) -> Step:
    """A fresh model's step, as `depthgate train` makes it."""
    world = World(device=training.device)
    torch.manual_seed(training.seed)
    model = build_decoder(training.model, training.compile, world)
    optimizers = optim.build(model, training, world)
    optim.set_rate(optimizers, 1e-4)
    return Step(model, optimizers, training, world)


def _plain_figures(training: TrainConfig, batches: list[Rows]) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first steps, computed plainly."""
    parts = max(1, training.batch // _ROWS)
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
    """Peak memory in MiB of what is done here, everything included; None where nobody keeps count."""
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
    config: BenchTrainConfig,
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


def _row(dim: int, name: str, config: BenchTrainConfig, ceiling: float) -> dict[str, Any]:
    """One model of one width."""
    _say(f"width {dim}: {name}")
    if config.compile:
        torch.compiler.reset()
    model = _model(dim, config, _PATTERNS[name])
    training, batches, tokens = _training(model, config), _batches(config), config.batch * config.seq
    flops = training_flops(model) * tokens
    row: dict[str, Any] = {"dim": dim, "model": name, "parameters": parameters(model), "flops": flops}
    if name == _LLAMA:
        row |= _timed(partial(LlamaStep, training), None, config, batches)
    else:
        row |= _timed(partial(_step, training), _plain_figures(training, batches), config, batches)
    if "error" not in row:
        row["tokens_per_second"] = 1000 * tokens / row["ms"]
        row["tflop_per_s"] = flops / row["ms"] / 1e9
        row["of_ceiling"] = 1000 * flops / row["ms"] / ceiling
    _free(config.device)
    return row


def _with_ratios(row: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """A row beside that of the dense model of its width; both must have been right."""
    if "error" not in row and "error" not in dense:
        row["time_ratio"], row["flop_ratio"] = row["ms"] / dense["ms"], row["flops"] / dense["flops"]
        row["time_over_flops"] = row["time_ratio"] / row["flop_ratio"]
    return row


def run(config: BenchTrainConfig, as_json: bool) -> None:
    """Measure every width, print one table or one JSON object; raises at the end if any model was wrong."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DepthgateError("device is 'cuda', but no CUDA device is available: use --device cpu")
    if config.llama_widths:
        check_transformers()
    ceiling = matmul_rate(config.device, getattr(torch, config.dtype))
    cases = [(dim, name) for dim in config.widths for name in ("dense", "MoD")]
    rows: list[dict[str, Any]] = []
    for dim, name in [*cases, *((dim, _LLAMA) for dim in config.llama_widths)]:
        row = _row(dim, name, config, ceiling)
        rows.append(_with_ratios(row, next((r for r in rows if r["dim"] == dim), row)))
        _say(json.dumps(row))  # a long run that is cut short has not been for nothing
    about = {**machine(config.device), "matmul_tflop_per_s": ceiling / 1e12}
    if as_json:
        print(json.dumps({"machine": about, "config": asdict(config), "rows": rows}))
    else:
        _print_table(about, config, rows)
    if wrong := [f"{row['model']} at width {row['dim']}: {row['error']}" for row in rows if "error" in row]:
        raise DepthgateError("wrong answer, not timed: " + "; ".join(wrong))


def _say(text: str) -> None:
    """Progress, on stderr so that stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


def _print_table(about: dict[str, Any], config: BenchTrainConfig, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    how = "".join([", compiled" * config.compile, ", CUDA graph" * (config.cuda_graph and config.device == "cuda")])
    shape = (
        f"{config.layers} layers, batch {config.batch} x {config.seq}, vocabulary {config.vocab}, {config.dtype}{how}"
    )
    table = Table(title=f"Whole training steps: {shape}", box=box.SIMPLE, padding=(0, 1, 0, 0))
    names = (
        "dim",
        "model",
        "M params",
        "ms",
        "tokens/s",
        "TFLOP/s",
        "of ceiling",
        "GiB",
        "time x",
        "FLOP x",
        "time/FLOP",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for row in rows:
        if "error" in row:
            table.add_row(str(row["dim"]), row["model"], "wrong answer", style="red")
            continue
        table.add_row(
            str(row["dim"]),
            row["model"],
            f"{row['parameters'] / 1e6:.1f}",
            f"{row['ms']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tflop_per_s']:.1f}",
            f"{row['of_ceiling']:.1%}",
            "-" if row["memory_mib"] is None else f"{row['memory_mib'] / 1024:.1f}",
            f"{row.get('time_ratio', float('nan')):.3f}",
            f"{row.get('flop_ratio', float('nan')):.3f}",
            f"{row.get('time_over_flops', float('nan')):.3f}",
        )
    console = Console(width=max(140, Console().width))
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), soft_wrap=True)
