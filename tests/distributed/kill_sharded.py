"""Kill one or both of two processes that save checkpoints together, at random times, and load after each kill.

    python tests/distributed/kill_sharded.py --rounds 100

Every round forks two processes that save without pause (new steps, and every third time the same step once more); the
first writes a line after each save. After SIGKILL of one, the other ends by itself; where gloo waits for the dead, it
is ended after two seconds, as torchrun would do at once. The checkpoint loaded must be whole and no older than the last
line.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch._dynamo  # a mesh needs it: loaded before the processes are forked
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from depthgate.checkpoint import store as checkpoint
from depthgate.device import World


def write_for_ever(rank: int, meeting: Path, run: Path, attempt: int, out: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh, world = init_device_mesh("cpu", (2,)), World(rank, 2)
    while True:
        attempt += 1
        step = attempt - attempt // 3  # 1, 2, 2, 3, 4, 4, ...
        weight = DTensor.from_local(torch.full((150_000,), float(attempt)), mesh, [Shard(0)])
        tensors = {"model": {"w": weight, "b": torch.full((3,), float(attempt))}, "optimizer": {"w:m": weight}}
        checkpoint.save(run, step, tensors, {"attempt": attempt}, {"same": True}, 2, world)
        if rank == 0:
            os.write(out, b"%d\n" % attempt)


def check(run: Path, saved: int) -> tuple[int, bool]:
    """Load after a kill: the attempt found, and whether the kill left anything unfinished."""
    left = any(path.name.startswith((".tmp-", ".old-")) for path in run.iterdir())
    if not saved and not checkpoint.steps(run):
        return 0, left  # killed before the first save ended: nothing was promised
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kill damages nothing, so there is nothing to warn of
        found = checkpoint.load(run)
    attempt = int(found.state["attempt"])
    assert attempt >= saved, f"attempt {saved} was saved, but {attempt} was loaded"
    assert found.step == attempt - attempt // 3
    for group in found.tensors.values():
        for tensor in group.values():
            assert (tensor == attempt).all(), f"tensors of another save in attempt {attempt}"
    return attempt, left


def fork(rank: int, *args) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the one that is left over may complain
        write_for_ever(rank, *args)
    finally:
        os._exit(1)


def wait(child: int) -> tuple[bool, int]:
    """Whether it ended within two seconds, and how; ended by force if not."""
    for _ in range(200):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return True, status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return False, os.waitpid(child, 0)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    rng = random.Random(options.seed)
    started, attempt, dirty, saves, waited = time.monotonic(), 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        for number in range(options.rounds):
            reading, writing = os.pipe()
            children = [fork(rank, Path(folder) / f"meet-{number}", run, attempt, writing) for rank in (0, 1)]
            os.close(writing)
            lines = os.fdopen(reading)
            acknowledged = [int(lines.readline())] if number % 4 else []  # saving has begun; or it may not even have
            time.sleep(rng.uniform(0.0, 0.4))
            killed = rng.choice([[0], [1], [0, 1]])
            for rank in killed:
                os.kill(children[rank], signal.SIGKILL)
            for rank, child in enumerate(children):
                ended, status = wait(child)
                waited += not ended
                if ended:
                    assert os.WIFSIGNALED(status) == (rank in killed), f"process {rank} ended by itself: {status}"
            with lines:
                acknowledged += [int(line) for line in lines]
            saves += len(acknowledged)
            attempt, left = check(run, max([attempt, *acknowledged]))
            dirty += left
    seconds = time.monotonic() - started
    kills = f"{options.rounds} kills, {dirty} of which left an unfinished folder, {waited} a process waiting"
    print(f"{kills}; {saves} saves acknowledged; every load whole and current; {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
