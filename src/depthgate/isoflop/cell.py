"""Run cells, each from a fresh or interrupted training run to its row of results: in this process, in several, as tasks
of Ray, or as jobs of Slurm."""

import gc
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stderr, suppress
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch._inductor.config as inductor

from depthgate.checkpoint.store import METRICS
from depthgate.data.token_file import prepare
from depthgate.device import machine, resolve_device
from depthgate.errors import DepthgateError
from depthgate.files import write_json
from depthgate.flops import forward_flops
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.grid import Cell
from depthgate.loading import load
from depthgate.train import loop
from depthgate.train.evaluate import measure

RESULT = "result.json"
Row = dict[str, Any]
Outcome = tuple[Cell, Row | Exception]
_NUMBERS = ("budget", "params", "seed", "loss", "loss_causal", "seconds", "flops", "forward_flops_per_token")


def say(line: str) -> None:
    """Tell the user how far the study is."""
    print(line, file=sys.stderr, flush=True)


def is_row(value: object) -> bool:
    """True if a value has everything that a report reads from a cell's row."""
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(name), str) for name in ("cell", "variant"))
        and all(isinstance(value.get(name), float | int) and math.isfinite(value[name]) for name in _NUMBERS)
    )


def belongs(row: Row, cell: Cell) -> bool:
    """True if a row is the result of this very cell."""
    return all(row.get(name) == value for name, value in cell.described().items())


def finished(cell: Cell) -> Row | None:
    """The row of a cell that was run to its end."""
    path = cell.folder / RESULT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError:
        found = None
    if not is_row(found):
        raise DepthgateError(f"{path} is damaged: delete it to have the cell measured again")
    if not belongs(found, cell):
        raise DepthgateError(f"{path} belongs to another study: choose another --out")
    return dict(found)


def text_file(cell: Cell, what: str) -> Path:
    """The file next to the cell's folder for its log, or its error."""
    return cell.folder.parent / f"{cell.name}.{what}.txt"


def run_cell(cell: Cell, config: IsoflopConfig, threads: int | None = None) -> Row:
    """Train, or go on; measure; return the row of results. A failure is written to a file next to the run. `threads`:
    those of a worker process, whose training writes its progress into a file too."""
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    error = text_file(cell, "error")
    try:
        with ExitStack() as stack:
            if threads is not None:
                os.environ.setdefault("OMP_WAIT_POLICY", "passive")
                torch.set_num_threads(threads)
                inductor.compile_threads = threads  # cells that compile at once would each start one for every core
                stack.enter_context(redirect_stderr(stack.enter_context(text_file(cell, "log").open("a"))))
            row = _trained(cell, config)
    except Exception:
        error.write_text(traceback.format_exc(), encoding="utf-8")
        raise
    finally:
        gc.collect()  # the next cell may need all the memory
        if torch.cuda.is_available():
            torch.compiler.reset()
            torch.cuda.empty_cache()
    error.unlink(missing_ok=True)
    write_json(cell.folder / RESULT, row)
    return row


def _trained(cell: Cell, config: IsoflopConfig) -> Row:
    training, folder = cell.training, cell.folder
    last_step = folder / f"step-{training.steps}"
    try:
        model = load(last_step)
    except DepthgateError:  # it is not there yet, or damaged: training goes on from the newest whole checkpoint
        if loop.train(training, resume=True) == 130 or not last_step.is_dir():
            raise KeyboardInterrupt from None  # the process was asked to stop
        model = load(last_step)
    shards = prepare(training.data, model.tokenizer, validation=training.validation)
    metrics = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    held_out = []
    for row in metrics:
        kept, planned = folder / f"step-{row['step']}", row["step"] % training.checkpoint_every == 0
        if kept == last_step or (config.points > 1 and planned and kept.is_dir()):
            at = (model if kept == last_step else load(kept)).to(resolve_device(training.device))
            figures = measure(at, shards.validation, training.batch, config.measured)
            held_out.append([row["flops"], figures["nats_per_token"]])
    about, last, shares = machine(training.device), metrics[-1], figures["routed_share"]
    # In a causal pass routed layers take the share of the held-out text that they took, on average.
    taken = max(1e-6, fmean(shares)) if shares else model.config.capacity
    return {
        **cell.described(),
        "loss": figures["nats_per_token_top_k"],
        "loss_causal": figures["nats_per_token"],
        "bits_per_byte": figures["bits_per_byte"],
        "held_out": held_out,
        "train_loss": last["loss"],
        "flops": last["flops"],
        "passes": cell.tokens / len(shards.train),
        "forward_flops_per_token": forward_flops(replace(model.config, capacity=taken)),
        "seconds": last["seconds"],
        "routed_share": shares,
        "agreement": figures["agreement"],
        "measured_tokens": figures["tokens"],
        "device": training.device,
        "machine": f"{about['device']}, torch {about['torch']}, commit {about['commit'] or 'unknown'}",
    }


def parallel(config: IsoflopConfig, device: str) -> int:
    """Number of cells that run at once on this machine. Small models are fastest on a processor core each."""
    return config.parallel or (1 if device == "cuda" else len(os.sched_getaffinity(0)))


def launch(cells: Sequence[Cell], config: IsoflopConfig, at_once: int) -> Iterator[Outcome]:
    """Run cells; yield each with its row, or with its error."""
    if config.launcher == "ray":
        return _ray(cells, config)
    if config.launcher == "submitit":
        return _submitit(cells, config)
    return _processes(cells, config, at_once) if at_once > 1 else _one_by_one(cells, config)


def _outcome(result: Callable[..., Row], *args: Any) -> Row | Exception:
    """A result, or the error in its place: the other cells are worth having."""
    try:
        return result(*args)
    except Exception as error:
        return error


def _one_by_one(cells: Sequence[Cell], config: IsoflopConfig) -> Iterator[Outcome]:
    for cell in cells:
        say(f"{cell.name}: {cell.training.steps:,} steps, {cell.params:,} weights")
        yield cell, _outcome(run_cell, cell, config)


def _processes(cells: Sequence[Cell], config: IsoflopConfig, at_once: int) -> Iterator[Outcome]:
    """A process for each cell, so that one that dies harms no other."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["depthgate.isoflop.cell"])  # torch is loaded once
    threads = max(1, len(os.sched_getaffinity(0)) // at_once)
    waiting, running = list(cells), dict[Any, tuple[Any, Cell]]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                cell = waiting.pop(0)
                process = context.Process(target=_in_process, args=(cell, config, threads, os.getpid()))
                process.start()
                running[process.sentinel] = process, cell
            for sentinel in wait(list(running)):
                process, cell = running.pop(sentinel)
                process.join()
                if process.exitcode == 130:
                    raise KeyboardInterrupt
                yield cell, _outcome(_left_behind, cell, process.exitcode)
    finally:
        for process, _ in running.values():
            process.terminate()  # each saves where it is, if it has anything to save
        for process, _ in running.values():
            process.join(60)
            process.kill()


def _in_process(cell: Cell, config: IsoflopConfig, threads: int, study: int) -> None:
    """Run a cell as all that a process does: its exit code and the cell's files tell the rest. It saves and stops when
    the process of the study is gone."""

    def watch() -> None:
        with suppress(ProcessLookupError):
            while True:
                os.kill(study, 0)
                time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    try:
        run_cell(cell, config, threads)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception:
        os._exit(1)


def _left_behind(cell: Cell, code: int | None) -> Row:
    """The row that a process wrote, or its error."""
    if code == 0 and (row := finished(cell)):
        return row
    lines = text_file(cell, "error").read_text(encoding="utf-8").strip().splitlines() if code == 1 else []
    raise DepthgateError(lines[-1] if lines else f"its process died (exit code {code}): it may need more memory")


def _installed(launcher: str, extra: str) -> Any:
    try:
        return import_module(launcher)
    except ImportError:
        how = f"pip install 'depthgate[{extra}]'"
        raise DepthgateError(f"launcher is {launcher!r}, which is not installed: {how}") from None


def _ray(cells: Sequence[Cell], config: IsoflopConfig) -> Iterator[Outcome]:
    ray = _installed("ray", "ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    resources = ray.cluster_resources()
    for name, need, have in (("cpus", config.cpus, "CPU"), ("gpus", config.gpus, "GPU")):
        if need > resources.get(have, 0):
            raise DepthgateError(f"{name} is {need:g}, but Ray has {resources.get(have, 0):g} in all: ask for less")
    task = ray.remote(num_cpus=config.cpus, num_gpus=config.gpus, max_retries=0)(run_cell)
    running = {task.remote(cell, config, config.cpus): cell for cell in cells}
    try:
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            yield running.pop(done), _outcome(ray.get, done)
    finally:
        for future in running:
            ray.cancel(future, force=True)
        if ours:
            ray.shutdown()


def _submitit(cells: Sequence[Cell], config: IsoflopConfig) -> Iterator[Outcome]:
    submitit = _installed("submitit", "sweep")
    executor = submitit.AutoExecutor(folder=Path(config.out).absolute() / "jobs")
    resources = {"cpus_per_task": config.cpus, "gpus_per_node": int(config.gpus)}
    executor.update_parameters(name="depthgate", timeout_min=config.minutes, **resources)
    with executor.batch():
        jobs = [executor.submit(run_cell, cell, config, config.cpus) for cell in cells]
    running = dict(zip(jobs, cells, strict=True))
    try:
        while running:
            for job in [job for job in running if job.done()]:
                yield running.pop(job), _outcome(job.result)
            time.sleep(0.5)
    finally:
        for job in running:
            job.cancel()
