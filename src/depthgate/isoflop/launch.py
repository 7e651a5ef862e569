"""Where cells run: in this process, in several, as tasks of Ray, or as jobs of Slurm. All give rows as they come."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from depthgate.errors import DepthgateError
from depthgate.isoflop.cell import alone, beside, finished, in_worker, run_cell
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.grid import Cell

Outcome = tuple[Cell, dict[str, Any] | Exception]


def launch(
    cells: Sequence[Cell], config: IsoflopConfig, parallel: int, begins: Callable[[Cell], None]
) -> Iterator[Outcome]:
    """Run cells; each with its row, or with what went wrong. Where they run one after another, each `begins`."""
    if config.launcher == "ray":
        return _ray(cells, config)
    if config.launcher == "submitit":
        return _submitit(cells, config)
    return _processes(cells, config, parallel) if parallel > 1 else _here(cells, config, begins)


def parallel(config: IsoflopConfig, device: str) -> int:
    """How many cells run at the same time here. Models of a processor's size are faster on a core each."""
    return config.parallel or (1 if device == "cuda" else len(os.sched_getaffinity(0)))


def _here(cells: Sequence[Cell], config: IsoflopConfig, begins: Callable[[Cell], None]) -> Iterator[Outcome]:
    for cell in cells:
        try:
            begins(cell)
            yield cell, run_cell(cell, config.measured, quiet=False)
        except Exception as error:  # the other cells are worth having
            yield cell, error


def _processes(cells: Sequence[Cell], config: IsoflopConfig, parallel: int) -> Iterator[Outcome]:
    """A process for each cell: what one of them does to itself, no other feels."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["depthgate.isoflop.cell"])  # torch is loaded once
    threads = max(1, len(os.sched_getaffinity(0)) // parallel)
    waiting, running = deque(cells), dict[Any, tuple[Any, Cell]]()
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                cell = waiting.popleft()
                process = context.Process(target=alone, args=(cell, config.measured, threads, os.getpid()))
                process.start()
                running[process.sentinel] = process, cell
            for sentinel in wait(list(running)):
                process, cell = running.pop(sentinel)
                process.join()
                if process.exitcode == 130:
                    raise KeyboardInterrupt
                yield cell, _ended(cell, process.exitcode)
    finally:
        for process, _ in running.values():
            process.terminate()  # each saves where it is, if it has anything to save
        for process, _ in running.values():
            process.join(60)
            process.kill()


def _ended(cell: Cell, code: int | None) -> dict[str, Any] | Exception:
    """What a process left behind."""
    try:
        if code == 0 and (row := finished(cell)):
            return row
        lines = beside(cell, "error").read_text(encoding="utf-8").strip().splitlines() if code == 1 else []
    except (DepthgateError, OSError) as error:
        return error
    return DepthgateError(lines[-1] if lines else f"its process died (exit code {code}): it may need more memory")


def _ray(cells: Sequence[Cell], config: IsoflopConfig) -> Iterator[Outcome]:
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise DepthgateError("launcher is 'ray', which is not installed: pip install 'depthgate[ray]'") from None
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    resources: Any = ray.cluster_resources()  # type: ignore[no-untyped-call, unused-ignore]
    for name, need, have in (
        ("cpus", config.cpus, resources.get("CPU", 0)),
        ("gpus", config.gpus, resources.get("GPU", 0)),
    ):
        if need > have:
            raise DepthgateError(f"{name} is {need:g}, but Ray has {have:g} in all: ask for less")
    task = ray.remote(num_cpus=config.cpus, num_gpus=config.gpus, max_retries=0)(in_worker)
    under_way = {task.remote(cell, config.measured, config.cpus): cell for cell in cells}
    try:
        while under_way:
            ready, _ = ray.wait(list(under_way), num_returns=1)
            yield under_way.pop(ready[0]), _outcome(lambda done=ready[0]: ray.get(done))
    finally:
        for future in under_way:
            ray.cancel(future, force=True)
        if ours:
            ray.shutdown()


def _submitit(cells: Sequence[Cell], config: IsoflopConfig) -> Iterator[Outcome]:
    try:
        import submitit  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise DepthgateError("launcher is 'submitit', which is not installed: pip install 'depthgate[sweep]'") from None
    executor = submitit.AutoExecutor(folder=Path(config.out).absolute() / "jobs")
    executor.update_parameters(
        name="depthgate", timeout_min=config.minutes, cpus_per_task=config.cpus, gpus_per_node=int(config.gpus)
    )
    with executor.batch():
        jobs = [executor.submit(in_worker, cell, config.measured, config.cpus) for cell in cells]
    waiting = dict(zip(jobs, cells, strict=True))
    try:
        while waiting:
            for job in [job for job in waiting if job.done()]:
                yield waiting.pop(job), _outcome(job.result)
            time.sleep(0.5)
    finally:
        for job in waiting:
            job.cancel()


def _outcome(result: Any) -> dict[str, Any] | Exception:
    try:
        return result()  # type: ignore[no-any-return]
    except Exception as error:
        return error
