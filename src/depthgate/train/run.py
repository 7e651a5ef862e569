"""The folder of a run: what it was asked to do, one row of metrics a step, and its tokenizer."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from depthgate.config import TrainConfig
from depthgate.errors import DepthgateError
from depthgate.train import checkpoint

CONFIG, METRICS, TOKENIZER = "config.json", "metrics.jsonl", "tokenizer"
# What may differ when a run goes on: how long, where and how it is computed, not what.
_FREE = ("steps", "out", "device", "workers", "checkpoint_every", "keep", "most_bad_steps")


def plain(config: TrainConfig) -> dict[str, Any]:
    """The configuration as JSON holds it."""
    return json.loads(json.dumps(asdict(config)))  # type: ignore[no-any-return]


@contextmanager
def opened(config: TrainConfig, resume: bool) -> Iterator[Path]:
    """The run's folder, held by this process alone: new and empty, or that of the run that goes on."""
    run = Path(config.out)
    there = run / CONFIG
    if resume and there.exists():
        _check_same(plain(config), _read(there), run)
    elif run.exists() and (not run.is_dir() or any(p for p in run.iterdir() if not p.name.startswith("."))):
        what = "another run" if there.exists() else "other files"
        raise DepthgateError(f"out is {run}, which holds {what}: choose another folder, or go on with --resume")
    try:
        run.mkdir(parents=True, exist_ok=True)
        with checkpoint.lock(run / ".run.lock"):
            write_json(there, plain(config))
            yield run
    except OSError as error:
        raise DepthgateError(
            f"cannot write {run} ({error.strerror or error}): choose another folder with --out"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DepthgateError(f"cannot read {path} ({error}): the run cannot go on; choose another --out") from error
    if not isinstance(found, dict):
        raise DepthgateError(f"{path} holds no configuration: the run cannot go on; choose another --out")
    return found


def _check_same(asked: dict[str, Any], recorded: dict[str, Any], run: Path) -> None:
    old, new = _flat(recorded), _flat(asked)
    differ = [
        f"  {name}: {old.get(name, 'absent')} there, {new.get(name, 'absent')} here"
        for name in sorted(old.keys() | new.keys())
        if name not in _FREE and old.get(name) != new.get(name)
    ]
    if differ:
        raise DepthgateError(
            f"{run} was trained with another configuration; go on with the same one, or choose another --out:\n"
            + "\n".join(differ[:12])
        )


def _flat(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in config.items():
        out |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return out


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file so that it is there whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(name, path)


class Metrics:
    """metrics.jsonl: one row a step, on its way to the disk when `add` returns."""

    def __init__(self, run: Path, last: int) -> None:
        """Rows after step `last` are of steps that will be done again: they go, and so does a row cut short."""
        self.path = run / METRICS
        kept = [line for line in self._lines() if self._step(line) <= last]
        temporary = self.path.with_name(f".{METRICS}")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self.path)
        self.file = self.path.open("a", encoding="utf-8")

    def _lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []

    @staticmethod
    def _step(line: str) -> float:
        try:
            return int(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
        except (ValueError, KeyError, TypeError):
            return float("inf")

    def add(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()
