"""Seconds to save and to load a checkpoint, as ratios of writing and of reading the same bytes plainly.

    python benchmarks/checkpoint.py --gigabytes 1 --repeats 5

The state is what a run saves: float32 weights and two moments of each. A plain write is one file, synced; a plain read
is that file into memory; both are done next to each save and load, as disks and shared machines change their speed.
Medians. Reads come from memory, where the file has just been written.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from depthgate.checkpoint import store
from depthgate.device import machine


def state(gigabytes: float) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of 16 MiB in the groups of a run, a third of them weights."""
    layers = max(1, round(gigabytes * 2**30 / (3 * 2**24)))
    weights = {f"layers.{i}.weight": torch.randn(2048, 2048) for i in range(layers)}
    moments = {f"{name}:{key}": torch.randn(2048, 2048) for name in weights for key in ("exp_avg", "exp_avg_sq")}
    return {"model": weights, "optimizer": moments, "rng": {"cpu": torch.get_rng_state()}}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_write(path: Path, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
    with path.open("wb") as file:
        for group in tensors.values():
            for tensor in group.values():
                file.write(memoryview(tensor.numpy()).cast("B"))
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to be measured; the system's temporary folder unless given")
    options = parser.parse_args()
    tensors = state(options.gigabytes)
    size = sum(t.nbytes for group in tensors.values() for t in group.values())
    rows: list[list[float]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run, plain = Path(folder) / "run", Path(folder) / "plain"
        for step in range(options.repeats):
            rows.append(
                [
                    seconds(lambda: plain_write(plain, tensors)),
                    seconds(lambda step=step: store.save(run, step, tensors, {}, {})),
                    seconds(lambda: bytearray(plain.read_bytes())),
                    seconds(lambda: store.load(run)),
                ]
            )
    written, saved, read, loaded = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"{size / 2**30:.2f} GiB, {options.repeats} repeats, {machine('cpu')}")
    print(f"save {saved:.2f} s, {saved / written:.2f} times a plain write of {written:.2f} s")
    print(f"load {loaded:.2f} s, {loaded / read:.2f} times a plain read of {read:.2f} s")


if __name__ == "__main__":
    main()
