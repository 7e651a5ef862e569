"""Run a function in several processes. They are forked from one server that has imported everything once."""

import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.forkserver import _forkserver
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from depthgate.device import World


def spawn(processes: int, work: Callable, *args) -> None:
    """`work(world, *args)` in processes that are connected; `work` must be a function of a module."""
    with tempfile.TemporaryDirectory() as folder:
        start(processes, _connected, processes, folder, work, args)


def start(processes: int, work: Callable, *args) -> None:
    """`work(rank, *args)` in every process."""
    _own_server()
    mp.start_processes(_worker, args=(work, args), nprocs=processes, start_method="forkserver")


@functools.cache
def _own_server() -> None:
    """One that has loaded what these tests need, whatever the server of earlier tests has loaded."""
    _forkserver._stop()
    multiprocessing.set_forkserver_preload(["tests.distributed.loaded"])


def _worker(rank: int, work: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    work(rank, *args)
    # Everything is asserted. Leave without the interpreter's farewell: about once in sixty, a thread of torch's that
    # outlives the process group ends it in "terminate called without an active exception".
    sys.stderr.flush()
    os._exit(0)


def _connected(rank: int, processes: int, folder: str, work: Callable, args: tuple) -> None:
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'init'}", rank=rank, world_size=processes)
    work(World(rank, processes), *args)
    dist.barrier()
