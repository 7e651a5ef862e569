"""What torch's own safetensors writer and reader do, for docs/decisions/005-sharded-checkpoints.md.

python tests/distributed/dcp_facts.py
"""

import json
import os
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from depthgate.checkpoint import store as checkpoint
from tests.distributed.spawn import spawn

PIECES = {  # values and first rows of two pieces of six numbers
    "gap": (([1.0, 1.0], 0), ([3.0, 3.0], 4)),
    "overlap": (([1.0] * 4, 0), ([3.0] * 4, 2)),
    "negative": (([1.0] * 4, -2), ([3.0] * 4, 2)),
    "twice": (([1.0] * 6, 0), ([3.0] * 6, 0)),
}


def say(world, *words) -> None:
    if world.first:
        print(*words, flush=True)


def writer(path: Path) -> HuggingFaceStorageWriter:
    return HuggingFaceStorageWriter(str(path), save_distributed=True)


def facts(world, folder: Path) -> None:
    say(world, f"torch {torch.__version__}")
    mesh = init_device_mesh("cpu", (2,))
    sync(world, folder / "sync", mesh)
    weight = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
    try:
        dcp.save({"a": weight, "b": weight.detach()}, storage_writer=writer(folder / "tied"))
        say(world, "tied: saved")
    except BaseException as error:  # a CheckpointException is no Exception
        say(world, f"tied: {type(error).__name__}, {next(iter(error.failures.values()))[0]!r:.90}")
    for name, pieces in PIECES.items():
        if world.first:
            (folder / name).mkdir()
            for i, (values, first) in enumerate(pieces):
                places = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [first]}})}
                save_file({"w": torch.tensor(values)}, folder / name / f"{i}.safetensors", metadata=places)
        dist.barrier()
        found = {"w": torch.full((6,), 7.0)}
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder / name)))
        say(world, f"{name}: {found['w'].tolist()} from pieces {pieces}, 7 before")
    memory(world, folder, mesh)


def sync(world, folder: Path, mesh) -> None:
    sizes, real = [], os.fsync
    os.fsync = lambda fd: (sizes.append(os.fstat(fd).st_size), real(fd))[1]
    dcp.save({"w": DTensor.from_local(torch.ones(9), mesh, [Shard(0)])}, storage_writer=writer(folder))
    os.fsync = real
    say(world, f"sync: {sizes} bytes at fsync, {[path.stat().st_size for path in folder.iterdir()]} in the end")


def memory(world, folder: Path, mesh) -> None:
    """How much more a process takes while it saves 400 MiB of its own."""
    tensors = {f"w{i}": DTensor.from_local(torch.ones(100, 2**18), mesh, [Shard(0)]) for i in range(4)}
    ways = {
        "torch's writer": lambda: dcp.save(dict(tensors), storage_writer=writer(folder / "memory")),
        "ours": lambda: checkpoint.save(folder / "run", 1, {"model": tensors}, {}, {}, 2, world),
        "whole tensors": lambda: [tensor.full_tensor() for tensor in tensors.values()],
    }
    for name, work in ways.items():
        dist.barrier()
        before, most, done = resident(), [0.0], threading.Event()

        def watch(most=most, done=done) -> None:
            while not done.is_set():
                most[0] = max(most[0], resident())
                time.sleep(0.003)

        watcher = threading.Thread(target=watch)
        watcher.start()
        work()
        done.set()
        watcher.join()
        say(world, f"memory: {name}, {most[0] - before:.0f} MiB")


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    from tests.distributed.dcp_facts import facts as named  # a process finds it by its module

    with tempfile.TemporaryDirectory() as temporary:
        spawn(2, named, Path(temporary))
