"""Checkpoints that survive a kill, a full disk and damage.

    run/step-100/    model.safetensors, optimizer.safetensors, ..., state.json, config.json, manifest.json

Where several processes save, each writes its own model-00001-of-00004.safetensors (see `pieces` and `sharded`).
A folder named step-N is complete: it gets that name by one rename, after all its files are on the disk. The manifest
holds size and SHA-256 of each. .tmp-step-N-... is unfinished or on its way out: nobody loads it, and the next save
removes it. .old-step-N-... is complete and about to be replaced; it counts until its successor stands.
Hashes find damage, they are no signature: who can write the folder can choose weights, but execute nothing.
"""

import fcntl
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from depthgate.checkpoint import files, manifest
from depthgate.checkpoint import rows as pieces
from depthgate.checkpoint.files import Packed, Record, opened
from depthgate.checkpoint.manifest import MANIFEST, PLAIN, SUFFIX, open_folder, step_of
from depthgate.errors import DepthgateError, DepthgateWarning, check_count

CONFIG, METRICS, TOKENIZER = "config.json", "metrics.jsonl", "tokenizer"  # in the folder of a run
MAX_STEP = 10**15
Groups = Mapping[str, Mapping[str, Tensor]]
Plain = Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: tensors on the CPU by group and name, and plain data."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    config: dict[str, Any]


def save(run: Path, step: int, tensors: Groups, state: Plain, config: Plain, keep: int = 2) -> Path:
    """Write `run/step-N`, then remove all but the `keep` newest complete checkpoints up to it; returns the folder.

    When this returns, the checkpoint is on the disk. When it raises, the earlier ones are as they were. A checkpoint of
    the same step is replaced; later ones, which only a run that went back can meet, are left alone.
    """
    pieces.check_groups(tensors)
    contents = {g + SUFFIX: files.pack(named, g) for g, named in tensors.items()} | plain_files(state, config)
    with begun(run, step, sum(content.size for content in contents.values()), keep) as temp:
        return publish(
            temp, step, {name: files.write(temp / name, content) for name, content in contents.items()}, keep
        )


def plain_files(state: Plain, config: Plain) -> dict[str, Packed]:
    """The files that hold no tensors."""
    return {"state.json": files.to_json(state, "state"), "config.json": files.to_json(config, "config")}


@contextmanager
def begun(run: Path, step: int, size: int, keep: int) -> Iterator[Path]:
    """A folder for a checkpoint of `size` bytes, in a run that nobody else saves meanwhile; gone if not published."""
    run, step, keep = Path(run), check_count(step, "step", 0, MAX_STEP), check_count(keep, "keep", 2)
    try:
        if not run.is_dir():
            run.mkdir(parents=True)
            files.sync_folder(run.parent)
        with lock(run / ".lock"):
            _tidy(run)
            if (free := shutil.disk_usage(run).free) < (need := size + 2**20):
                sizes = f"{free / 2**20:.1f} MiB free, and a checkpoint needs {need / 2**20:.1f}"
                what = f"{run} has {sizes}: free some space or choose another"
                raise DepthgateError(f"{what}; earlier checkpoints are intact")
            temp = run / f".tmp-step-{step}-{secrets.token_hex(8)}"
            try:
                os.mkdir(temp)
                yield temp
            except BaseException:
                _discard(temp)
                raise
    except OSError as error:
        raise cannot_save(run, step, error) from error


def cannot_save(run: Path, step: int, error: OSError) -> DepthgateError:
    """The error for a checkpoint that the disk refused."""
    why = f"cannot save step {step} in {run} ({error.strerror or error}): earlier checkpoints are intact"
    return DepthgateError(f"{why}; free some space, make it writable, or choose another folder")


def publish(temp: Path, step: int, records: Mapping[str, Record], keep: int) -> Path:
    """Give the folder of `begun`, whose files are all on the disk, its name; then remove what is too old."""
    run, target = temp.parent, temp.parent / f"step-{step}"
    files.write(temp / MANIFEST, manifest.pack(step, records))
    files.sync_folder(temp)
    if os.path.lexists(target):
        os.rename(target, run / f".old-{temp.name.removeprefix('.tmp-')}")
    os.rename(temp, target)
    files.sync_folder(run)
    _rotate(run, step, keep)
    return target


def load(run: Path, only: Collection[str] | None = None) -> Checkpoint:
    """Read the newest complete checkpoint; a damaged one is named in a warning, and the one before is used.

    `only` names the groups of tensors to read, and to check; all unless given.
    """
    return newest(run, lambda path: read_folder(path, only))


def newest(
    run: Path, read: Callable[[Path], Checkpoint], listed: Callable[[Path], list[Path]] | None = None
) -> Checkpoint:
    """What `read` makes of the newest checkpoint that it can read."""
    failed: dict[Path, str] = {}
    # Listed anew each time: a run that is still saving may have removed an old one and added a newer one.
    while left := [path for path in (listed or candidates)(Path(run)) if path not in failed]:
        path = left[-1]
        try:
            found = read(path)
        except DepthgateError as error:
            failed[path] = str(error)
            continue
        for later, reason in failed.items():
            if step_of(later.name) >= found.step:
                warnings.warn(f"{reason}\nstep {found.step} is loaded instead", DepthgateWarning, stacklevel=3)
        return found
    reasons = "".join(f"\n{reason}" for reason in list(failed.values())[:5])
    raise DepthgateError(f"no complete checkpoint in {run}: check the path, or start without it{reasons}")


def steps(run: Path) -> list[int]:
    """The steps that have a folder, ascending; none if there is no such run. Damaged ones count: see `load`."""
    return sorted({step_of(path.name) for path in candidates(Path(run))})


def verify(folder: Path) -> dict[str, Record]:
    """Read every file of a checkpoint and compare it with the manifest, without keeping it; returns the records."""
    with open_folder(folder := Path(folder)) as fd:
        _, records = manifest.read(fd, folder)
        for names in pieces.by_group(records, folder).values():
            pieces.index(fd, folder, names, records)
        verify_files(fd, folder, records)
    return records


def verify_files(fd: int, folder: Path, records: Mapping[str, Record]) -> None:
    """Compare these files with what the manifest says of them."""
    for name, record in records.items():
        with opened(fd, folder / name, record.size) as file:
            if name.endswith(SUFFIX):
                file.header()
            else:
                files.from_json(file.take(file.left), file.path)
            file.finish(record.sha256)


def read_folder(folder: Path, only: Collection[str] | None = None) -> Checkpoint:
    """Read one checkpoint, from a folder of any name; whatever is missing, damaged or unknown is an error."""
    with open_folder(folder := Path(folder)) as fd:
        step, records = manifest.read(fd, folder)
        groups = pieces.by_group(records, folder)
        wanted = groups.keys() if only is None else set(only)
        if missing := wanted - groups.keys():
            raise DepthgateError(f"{folder} has no tensors named {sorted(missing)}: it has {sorted(groups)}")
        state, config = read_plain(fd, folder, records)
        tensors = {group: pieces.read(fd, folder, groups[group], records) for group in sorted(wanted)}
    return Checkpoint(folder, step, tensors, state, config)


def read_plain(fd: int, folder: Path, records: Mapping[str, Record]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the configuration."""
    found = []
    for name in PLAIN:
        with opened(fd, folder / name, records[name].size) as file:
            found.append(files.from_json(file.take(file.left), folder / name))
            file.finish(records[name].sha256)
    return found[0], found[1]


def check_fit(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    """Tensors must have the names, shapes and dtypes of those they replace, and be finite."""
    if odd := sorted(found.keys() ^ wanted.keys()):
        what = "lacks" if odd[0] in wanted else "has the unknown"
        raise files.damaged(path, f"does not fit its configuration: it {what} {odd[0][:99]!r}")
    for name, tensor in found.items():
        if (tensor.shape, tensor.dtype) != (wanted[name].shape, wanted[name].dtype):
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            raise files.damaged(path, f"does not fit its configuration: {name} is {kind}"[:300])
        own = getattr(tensor, "to_local", lambda t=tensor: t)()  # of a split tensor, this process's rows
        if own.is_floating_point() and not own.isfinite().all():
            raise files.damaged(path, f"has numbers in {name} that are not finite")


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, or raise at once if another process or thread does. A dead process holds nothing."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DepthgateError(f"{path} is held by a process that writes there: choose another folder") from None
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough where a forked child has the file open too
    finally:
        os.close(fd)


def candidates(run: Path) -> list[Path]:
    """Everything that has the name of a checkpoint, oldest first; a replaced one (.old) before its successor."""
    try:
        found = [name for name in os.listdir(run) if step_of(name) >= 0]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DepthgateError(f"cannot list {run} ({error.strerror}): give the folder of a run") from None
    return [run / name for name in sorted(found, key=lambda name: (step_of(name), name))]


def _tidy(run: Path) -> None:
    """Clear away what a killed save left. Only the holder of the lock may, so nothing here is still being written."""
    for name in os.listdir(run):
        if name.startswith(".tmp-step-"):
            _discard(run / name)
        elif name.startswith(".old-") and (step := step_of(name)) >= 0:
            if os.path.lexists(run / f"step-{step}"):
                _discard(run / name)
            else:
                os.rename(run / name, run / f"step-{step}")


def _rotate(run: Path, step: int, keep: int) -> None:
    """Remove what is older than the `keep` newest complete ones up to `step`.

    Complete is judged by manifest and sizes, not by reading gigabytes again. Later steps do not count: they may be the
    damaged ones that a resume went back from, and must not push out the good ones.
    """
    kept = 0
    for path in reversed(candidates(run)):
        if path.name.startswith("."):
            _discard(path)
        elif step_of(path.name) > step:
            warnings.warn(f"{path} is later than step {step}, now saved: a load tries it first", DepthgateWarning, 4)
        elif kept >= keep:
            _discard(path)
        else:
            with suppress(DepthgateError), open_folder(path) as fd:
                manifest.read(fd, path)
                kept += 1


def _discard(path: Path) -> None:
    """Remove, or say why not: an old folder that stays is no reason to stop training."""
    try:
        if not path.name.startswith(".tmp-"):
            # Out of sight first: a kill must not leave half a checkpoint.
            path = path.rename(path.with_name(f".tmp-{path.name.removeprefix('.old-')}-{secrets.token_hex(4)}"))
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"cannot remove {path} ({error.strerror}): remove it by hand", DepthgateWarning, stacklevel=5)
