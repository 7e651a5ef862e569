"""Where cells run: in this process, in several, as tasks of Ray, or as jobs of Slurm. All give rows as they come."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from depthgate.errors import DepthgateError
from depthgate.isoflop.cell import in_worker, run_cell
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
        begins(cell)
        try:
            yield cell, run_cell(cell, config.measured, quiet=False)
        except Exception as error:  # the other cells are worth having
            yield cell, error


def _processes(cells: Sequence[Cell], config: IsoflopConfig, parallel: int) -> Iterator[Outcome]:
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    threads = max(1, len(os.sched_getaffinity(0)) // parallel)
    pool = ProcessPoolExecutor(min(parallel, max(1, len(cells))), mp_context=get_context("spawn"))
    try:
        under_way = {pool.submit(in_worker, cell, config.measured, threads): cell for cell in cells}
        for future in as_completed(under_way):
            yield under_way[future], _outcome(future.result)
    finally:
        for process in list((pool._processes or {}).values()):
            process.terminate()  # each saves where it is, if it has anything to save
        pool.shutdown(wait=True, cancel_futures=True)


def _ray(cells: Sequence[Cell], config: IsoflopConfig) -> Iterator[Outcome]:
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise DepthgateError("launcher is 'ray', which is not installed: pip install 'depthgate[ray]'") from None
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
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
