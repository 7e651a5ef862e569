"""The folder of a run: what it was asked to do, one row of metrics a step, and its tokenizer."""

import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.checkpoint import files
from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint.store import CONFIG, METRICS, TOKENIZER
from depthgate.errors import DepthgateError, DepthgateWarning, InvalidValueError

# What may differ when a run goes on: how long, where and how it is computed, not what.
_FREE = (
    *("steps", "out", "device", "cuda_graph", "workers", "checkpoint_every", "keep", "tracker", "most_bad_steps"),
    "data",  # where it is: what is in it is known by its fingerprint
)


def plain(config: Any) -> dict[str, Any]:
    """The configuration as JSON holds it."""
    return json.loads(json.dumps(asdict(config)))  # type: ignore[no-any-return]


@contextmanager
def opened(config: Any, resume: bool, name: str = CONFIG) -> Iterator[Path]:
    """The run's folder, held by this process alone: new and empty, or that of the run that goes on; the file `name`
    says what it was asked to do. A new run that fails before its first step leaves no trace, so that the same command,
    mended, can be given again."""
    if "\0" in config.out:
        raise InvalidValueError(f"out is {config.out!r}: no folder has such a name; choose another")
    run = Path(config.out)
    try:
        _check_mine(config, resume, run, name)  # before anything is written
        run.mkdir(parents=True, exist_ok=True)
        with checkpoint.lock(run / ".run.lock"):
            new = _check_mine(config, resume, run, name)  # once more, now that no other process can come between
            path, steps, before = run / name, checkpoint.steps(run), None
            with suppress(OSError, UnicodeDecodeError):
                before = path.read_text(encoding="utf-8")
            try:
                write_json(path, plain(config))
                yield run
            except BaseException as error:
                if new:
                    _forget(run, name)
                elif before is not None and isinstance(error, DepthgateError) and checkpoint.steps(run) == steps:
                    with suppress(OSError):  # refused, as with other data: the run is what it was
                        _replace(path, before)
                raise
    except OSError as error:
        raise DepthgateError(
            f"cannot write {run} ({error.strerror or error}): choose another folder with --out"
        ) from error


def _check_mine(config: Any, resume: bool, run: Path, name: str) -> bool:
    """Whether the run is a new one; an error where the folder is of another, or of something else."""
    known = (run / name).exists() or bool(checkpoint.steps(run) if run.is_dir() else [])
    if resume and known:
        recorded = _recorded(run / name, config)
        check_same(plain(config), recorded, run)
        if config.schedule_steps is None and recorded.get("steps") != config.steps:
            was = f"the learning rate was scheduled for {recorded.get('steps')} steps and is now for {config.steps}"
            warnings.warn(f"{was}: --schedule_steps keeps it as it was", DepthgateWarning, stacklevel=2)
    elif run.exists() and (not run.is_dir() or any(p for p in run.iterdir() if not p.name.startswith("."))):
        what, remedy = ("another run", ", or go on with --resume") if known else ("other files", "")
        raise DepthgateError(f"out is {run}, which holds {what}: choose another folder{remedy}")
    return not known


def _forget(run: Path, config: str) -> None:
    """Remove what a run that made no step has written."""
    with suppress(OSError):
        if checkpoint.steps(run) or ((run / METRICS).exists() and (run / METRICS).stat().st_size):
            return
        for name in (config, METRICS):
            (run / name).unlink(missing_ok=True)
        shutil.rmtree(run / TOKENIZER, ignore_errors=True)


def _recorded(path: Path, config: Any) -> dict[str, Any]:
    """What the run was asked to do; where the file that says it is damaged or gone, what its newest checkpoint says, in
    which the vocabulary is the tokenizer's and not what was asked for."""
    run = path.parent
    try:
        with path.open("rb") as file:
            return files.from_json(file.read(files.MAX_JSON), path)
    except (OSError, DepthgateError) as error:
        if not checkpoint.steps(run):
            raise DepthgateError(f"cannot read {path} ({error}): the run cannot go on; choose another --out") from None
        warnings.warn(f"{error}\nthe configuration in the newest checkpoint is used", DepthgateWarning, stacklevel=2)
        found = checkpoint.load(run, ()).config
        if isinstance(found.get("model"), dict):
            found["model"]["vocab"] = config.model.vocab
        return found


def check_same(asked: dict[str, Any], recorded: dict[str, Any], where: Path) -> None:
    """Two configurations of one run, or an error that lists the differences."""
    old, new = _flat(recorded), _flat(asked)
    moved = all(each.get("validation") is not None for each in (old, new))  # without any, some of the data is held out
    differ = [
        f"  {name}: {_short(old, name)} there, {_short(new, name)} here"
        for name in sorted(old.keys() | new.keys())
        if name not in _FREE and old.get(name) != new.get(name) and not (name == "validation" and moved)
    ]
    if differ:
        more = [f"  and {len(differ) - 12} more"] if len(differ) > 12 else []
        raise DepthgateError(
            f"{where} was trained with another configuration; go on with the same one, or choose another --out:\n"
            + "\n".join(differ[:12] + more)
        )


def _short(config: dict[str, Any], name: str) -> str:
    text = str(config.get(name, "absent"))
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_found(
    found: checkpoint.Checkpoint,
    config: Any,
    new: dict[str, Any],
    model: nn.Module,
    held: Mapping[str, Tensor] | None = None,
) -> None:
    """Refuse a checkpoint that this run cannot have saved, whatever its hashes say; `new` is the state of a new run,
    `held` what is saved of its model: all, unless given."""
    check_same(plain(config), found.config, found.path)
    check_state(found, new)
    if found.tensors.keys() != {"model", "optimizer", "rng"}:
        raise files.damaged(found.path, "does not hold a model, its optimizer and its random numbers")
    checkpoint.check_fit(found.tensors["model"], model.state_dict() if held is None else held, found.path)
    checkpoint.check_fit(found.tensors["optimizer"], _moments(found, model), found.path)
    checkpoint.check_fit(found.tensors["rng"], {"cpu": torch.get_rng_state()}, found.path)
    try:
        torch.Generator().set_state(found.tensors["rng"]["cpu"])
    except RuntimeError:
        raise files.damaged(found.path, "holds no state of random numbers") from None


def check_state(found: checkpoint.Checkpoint, new: dict[str, Any]) -> None:
    """The state must have the names and types of `new`, and no odd number."""
    state = found.state
    fits = state.keys() == new.keys() and state.get("step") == found.step
    for name, value in new.items() if fits else ():
        number = isinstance(value, int | float)
        fits = fits and type(state[name]) is type(value)
        fits = fits and (not number or (math.isfinite(state[name]) and state[name] >= 0))
    if not fits:
        raise files.damaged(found.path / "state.json", "is not the state of a run")


def _moments(found: checkpoint.Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """What an optimizer keeps of the weights that have moments in a checkpoint: as AdamW does, or as Muon."""
    weights, named = dict(model.named_parameters()), found.tensors["optimizer"]
    wanted: dict[str, Tensor] = {}
    for name in {name.rpartition(":")[0] for name in named} & weights.keys():
        keys = ("momentum_buffer",) if f"{name}:momentum_buffer" in named else ("exp_avg", "exp_avg_sq", "step")
        wanted |= {f"{name}:{key}": torch.zeros(()) if key == "step" else weights[name] for key in keys}
    return wanted


def _flat(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in config.items():
        out |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return out


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write plain data so that the file is there whole or not at all."""
    _replace(path, json.dumps(value, indent=1))


def _replace(path: Path, text: str) -> None:
    """Who calls holds the run, so one temporary name will do."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class Metrics:
    """metrics.jsonl: one row a step, on its way to the disk when `add` returns."""

    def __init__(self, run: Path, last: int) -> None:
        """Rows after step `last` are of steps that will be done again: they go, and so does a row cut short."""
        self.path = run / METRICS
        _replace(self.path, "".join(line for line in self._lines() if self._step(line) <= last))
        self.file = self.path.open("a", encoding="utf-8")

    def _lines(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", errors="replace") as file:
            return list(file)

    @staticmethod
    def _step(line: str) -> float:
        try:
            step = json.loads(line)["step"] if line.endswith("\n") else None
        except (ValueError, KeyError, TypeError, RecursionError):
            step = None
        return step if type(step) is int else math.inf

    def add(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()
