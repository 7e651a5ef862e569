"""Kill a process that saves checkpoints, at random times, and load after each kill.

    python tests/soak/kill_saves.py --rounds 200

Every round forks a process that saves without pause (new steps, and every third time the same step once more) and
writes a line after each save. After SIGKILL, the checkpoint loaded must be whole and no older than the last line.
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

from depthgate.checkpoint import store as checkpoint


def write_for_ever(run: Path, attempt: int, out: int) -> None:
    while True:
        attempt += 1
        step = attempt - attempt // 3  # 1, 2, 2, 3, 4, 4, ...
        tensors = {
            "model": {"w": torch.full((300_000,), float(attempt)), "b": torch.full((3,), float(attempt))},
            "optimizer": {"m": torch.full((100_000,), float(attempt))},
        }
        checkpoint.save(run, step, tensors, {"attempt": attempt}, {"same": True})
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    rng = random.Random(options.seed)
    started, attempt, dirty, saves = time.monotonic(), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        for number in range(options.rounds):
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                try:
                    write_for_ever(run, attempt, writing)
                finally:
                    os._exit(1)
            os.close(writing)
            lines = os.fdopen(reading)
            acknowledged = [int(lines.readline())] if number % 4 else []  # saving has begun; or it may not even have
            time.sleep(rng.uniform(0.0, 0.3))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "the child ended by itself: a save failed"
            with lines:
                acknowledged += [int(line) for line in lines]
            saves += len(acknowledged)
            attempt, left = check(run, max([attempt, *acknowledged]))
            dirty += left
    seconds = time.monotonic() - started
    kills = f"{options.rounds} kills, {dirty} of which left an unfinished folder"
    print(f"{kills}; {saves} saves acknowledged; every load whole and current; {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
