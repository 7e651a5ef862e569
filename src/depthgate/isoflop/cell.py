"""Run cells, each from a training run to its row of results: in processes, as tasks of Ray, or as jobs of Slurm."""

import json
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch._inductor.config as inductor

from depthgate.checkpoint.store import METRICS
from depthgate.config import EXPERT_KINDS
from depthgate.data.token_file import prepare
from depthgate.device import machine, resolve_device
from depthgate.errors import DepthgateError, installed
from depthgate.files import write_json
from depthgate.flops import forward_flops
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.grid import Cell, Row
from depthgate.loading import images_of, load
from depthgate.train import images, loop
from depthgate.train.evaluate import measure
from depthgate.vit import ViT

RESULT = "result.json"
Submit = Callable[[Sequence[Cell]], Sequence[Future[Row]]]
_MOST_JOBS = 2**14  # that are waited for, by a thread each
_EVERY = 15.0  # seconds between two words on a cell that runs beside others
_TEXTS = ("cell", "variant", "device")
_NUMBERS = ("budget", "params", "seed", "steps", "loss", "loss_causal", "seconds", "flops", "forward_flops_per_token")


def say(line: str) -> None:
    """Tell the user how far the study is."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)  # in one piece: other cells write there, too


def read_row(text: str, known: Mapping[str, Any], path: Path) -> Row:
    """A row of results from JSON; an error where it lacks what a report reads, or differs from what is `known`."""
    try:
        row: Row = json.loads(text)
        texts = all(isinstance(row[name], str) for name in _TEXTS)
        numbers = [*(row[name] for name in _NUMBERS), row.get("experts_per_token") or 0, *row["routed_share"]]
        if known.items() <= row.items() and texts and all(map(math.isfinite, numbers)):
            return row
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise DepthgateError(f"{path} belongs to another study, or is damaged: choose another --out, or delete it")


def finished(cell: Cell) -> Row | None:
    """The row of a cell that was run to its end."""
    path = cell.folder / RESULT
    return read_row(path.read_text(errors="replace"), cell.described(), path) if path.is_file() else None


def text_file(cell: Cell, what: str) -> Path:
    """The file next to the cell's folder for its log, or its error."""
    return cell.folder.parent / f"{cell.name}.{what}.txt"


def run_cell(cell: Cell, config: IsoflopConfig, threads: int, alone: bool = False) -> Row:
    """Train, or go on; measure; return the row of results. A failure is written to a file next to the run, and so is
    the progress of training, unless the cell runs alone."""
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    error = text_file(cell, "error")
    torch.set_num_threads(threads)
    inductor.compile_threads = threads  # cells that compile at once would each start one for every core
    try:
        with nullcontext(sys.stderr) if alone else text_file(cell, "log").open("a") as log, redirect_stderr(log):
            row = {**cell.described(), **_trained(cell, config)}
    except Exception:
        error.write_text(traceback.format_exc(), encoding="utf-8")
        raise
    error.unlink(missing_ok=True)
    write_json(cell.folder / RESULT, row)
    return row


def _trained(cell: Cell, config: IsoflopConfig) -> Row:
    """Train a cell, unless that is done, and measure it."""
    training, folder = cell.training, cell.folder
    last_step = folder / f"step-{training.steps}"
    train = images.train if config.images else loop.train
    try:
        model = load(last_step)
    except DepthgateError:  # it is not there yet, or damaged: training goes on from the newest whole checkpoint
        if train(training, resume=True) == 130 or not last_step.is_dir():
            raise KeyboardInterrupt from None  # the process was asked to stop
        model = load(last_step)
    if config.images:
        return _classified(cell, model, last_step)
    shards = prepare(training.data, model.tokenizer, training.validation)
    held_out = []
    for row in (metrics := _metrics(cell)):
        kept, planned = folder / f"step-{row['step']}", row["step"] % training.checkpoint_every == 0
        if kept == last_step or (config.points > 1 and planned and kept.is_dir()):
            at = (model if kept == last_step else load(kept)).to(resolve_device(training.device))
            found = measure(at, shards.validation, training.batch, config.most_measured)
            held_out.append([row["flops"], found["nats_per_token"]])
    last, shares = metrics[-1], found["routed_share"]
    # In a causal pass routed layers take the share of the held-out text that they took, on average.
    taken = max(1e-6, fmean(shares)) if shares else model.config.capacity
    # Experts of staged layers compute the tokens that entered, those of others all.
    used, entered = found["experts_per_token"], dict(zip(model.config.routed, shares, strict=True))
    given = [entered.get(i, 1.0) for i, kind in enumerate(model.config.kinds) if kind in EXPERT_KINDS]
    experts = fmean(used, given) if any(given) else None
    share = experts and experts / model.config.top_k
    return {
        "loss": found["nats_per_token_top_k"],
        "loss_causal": found["nats_per_token"],
        "bits_per_byte": found["bits_per_byte"],
        "held_out": held_out,
        "passes": last["tokens"] / len(shards.train),
        "forward_flops_per_token": forward_flops(replace(model.config, capacity=taken), expert_share=share),
        "routed_share": shares,
        "agreement": found["agreement"],
        "experts_per_token": experts,
        "measured_tokens": found["tokens"],
        **_common(training, last),
    }


def _classified(cell: Cell, model: ViT, last_step: Path) -> Row:
    """The row of a vision transformer. What counts, and is fitted, is its error on held-out images, in percent."""
    training = cell.training
    last = _metrics(cell)[-1]
    device, data = resolve_device(training.device), images_of(model, last_step)
    found = images.measure(model.to(device), data, training.batch, device)
    error = 100 * (1 - found["accuracy"])
    names = ("loss", "accuracy", "calibration_error", "routed_share")
    row = {name: found[name] for name in names} | {"loss_causal": error, "held_out": [[last["flops"], error]]}
    row |= {"images": training.steps * training.batch, "measured_images": found["images"]}
    return row | {"forward_flops_per_token": forward_flops(model.config)} | _common(training, last)


def _metrics(cell: Cell) -> list[Row]:
    """The rows of metrics of a run that was made to its end."""
    path = cell.folder / METRICS
    try:
        rows: list[Row] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if rows[-1]["step"] == cell.training.steps:
            return rows
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise DepthgateError(f"{path} is damaged: delete its folder to train the cell again")


def _common(training: Any, last: Row) -> Row:
    """What all cells tell of their last step, and of their machine."""
    about = machine(training.device)
    return {
        "train_loss": last["loss"],
        "flops": last["flops"],
        "seconds": last["seconds"],
        "device": training.device,
        "machine": f"{about['device']}, torch {about['torch']}, commit {about['commit'] or 'unknown'}",
    }


def launch(
    cells: Sequence[Cell], config: IsoflopConfig, at_once: int, more: Callable[[], Sequence[Cell]] = tuple
) -> Iterator[tuple[Cell, Row | Exception]]:
    """Run cells; yield each with its row, or with its error: the other cells are worth having. After each, `more` gives
    further ones, which begin beside those that are running."""
    start = {"local": _processes, "ray": _ray, "submitit": _submitit}[config.launcher]
    with start(config, at_once) as submit:
        cell_of = dict(zip(submit(cells), cells, strict=True))
        waiting = {*cell_of}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                try:
                    yield cell_of[future], future.result()
                except Exception as error:
                    yield cell_of[future], error
            if further := more():
                begun = dict(zip(submit(further), further, strict=True))
                cell_of, waiting = cell_of | begun, waiting | {*begun}


@contextmanager
def _processes(config: IsoflopConfig, at_once: int) -> Iterator[Submit]:
    """A process for each cell, so that one that dies harms no other, and a thread that waits for it."""
    context, stopping = get_context("forkserver"), threading.Event()
    context.set_forkserver_preload(["depthgate.isoflop.cell"])  # torch is loaded once
    threads = max(1, torch.get_num_threads() // at_once)

    def run(cell: Cell) -> Row:
        say(f"{cell.name}: {cell.training.steps:,} steps, {cell.params:,} weights")
        failure, told = context.Pipe(duplex=False)
        process = context.Process(target=_in_process, args=(cell, config, threads, at_once == 1, told))
        process.start()
        said = time.monotonic()
        while process.is_alive() and not stopping.is_set():
            process.join(0.2)
            if at_once > 1 and time.monotonic() - said > _EVERY and (step := _last_step(cell)):
                said = time.monotonic()
                say(f"{cell.name}: {step}")
        if process.is_alive():
            process.terminate()  # it saves where it is, if it has anything to save
            process.join(60)
            process.kill()
        if process.exitcode == 130:
            raise KeyboardInterrupt
        if process.exitcode == 0 and (row := finished(cell)):
            return row
        died = f"its process died (exit code {process.exitcode}): it may need more memory"
        raise DepthgateError(failure.recv() if failure.poll() else died)

    pool = ThreadPoolExecutor(at_once)
    try:
        yield lambda cells: [pool.submit(run, cell) for cell in cells]
    finally:
        stopping.set()
        pool.shutdown(cancel_futures=True)


def _last_step(cell: Cell) -> str:
    """How far a cell's training is; nothing if it has not begun, or is done."""
    try:
        row = json.loads((cell.folder / METRICS).read_text(encoding="utf-8").splitlines()[-1])
        return f"step {row['step']:,} of {cell.training.steps:,}, loss {row['loss']:.3f}"
    except (OSError, ValueError, IndexError, TypeError):  # a line may be half written
        return ""


def _in_process(cell: Cell, config: IsoflopConfig, threads: int, alone: bool, told: Connection) -> None:
    """Run a cell as all that a process does: its exit code, the cell's files and what it says of a failure tell the
    rest. It saves and stops when the process of the study is gone."""

    def watch() -> None:
        if study := parent_process():
            study.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    try:
        run_cell(cell, config, threads, alone)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        told.send(str(error) if isinstance(error, DepthgateError) else f"{type(error).__name__}: {error}")
        os._exit(1)


@contextmanager
def _ray(config: IsoflopConfig, _: int) -> Iterator[Submit]:
    ray = installed("ray", "ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    resources = ray.cluster_resources()
    for name, need, have in (("cpus", config.cpus, "CPU"), ("gpus", config.gpus, "GPU")):
        if need > resources.get(have, 0):
            raise DepthgateError(f"{name} is {need:g}, but Ray has {resources.get(have, 0):g} in all: ask for less")
    task = ray.remote(num_cpus=config.cpus, num_gpus=config.gpus, max_retries=0)(run_cell)
    running: list[Any] = []

    def submit(cells: Sequence[Cell]) -> list[Future[Row]]:
        begun = [task.remote(cell, config, config.cpus) for cell in cells]
        running.extend(begun)
        return [each.future() for each in begun]

    try:
        yield submit
    finally:
        for each in running:
            ray.cancel(each, force=True)
        if ours:
            ray.shutdown()


@contextmanager
def _submitit(config: IsoflopConfig, _: int) -> Iterator[Submit]:
    executor = installed("submitit", "sweep").AutoExecutor(folder=Path(config.out).absolute() / "jobs")
    resources = {"cpus_per_task": config.cpus, "gpus_per_node": int(config.gpus)}
    executor.update_parameters(name="depthgate", timeout_min=config.minutes, **resources)
    jobs: list[Any] = []
    pool = ThreadPoolExecutor(_MOST_JOBS)

    def submit(cells: Sequence[Cell]) -> list[Future[Row]]:
        with executor.batch():
            begun = [executor.submit(run_cell, cell, config, config.cpus) for cell in cells]
        jobs.extend(begun)
        return [pool.submit(job.result) for job in begun]

    try:
        yield submit
    finally:
        for job in jobs:
            if not job.done():
                job.cancel()
        pool.shutdown(wait=False, cancel_futures=True)
