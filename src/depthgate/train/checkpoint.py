"""Checkpoints that survive a kill, a full disk and damage.

    run/step-100/    model.safetensors, optimizer.safetensors, ..., state.json, config.json, manifest.json

A folder named step-N is complete: it gets that name by one rename, after all its files are on the disk. The manifest
holds size and SHA-256 of each. .tmp-step-N-... is unfinished or on its way out: nobody loads it, and the next save
removes it. .old-step-N-... is complete and about to be replaced; it counts until its successor stands.
Hashes find damage, they are no signature: who can write the folder can choose weights, but execute nothing.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from depthgate.errors import DepthgateError, DepthgateWarning, check_count
from depthgate.train import files
from depthgate.train.files import Packed, Record, damaged, opened

VERSION = 1
_FORMAT = "depthgate checkpoint"
MANIFEST = "manifest.json"
MAX_STEP = 10**15
_STEP = re.compile(r"(?:step|(\.old)-step)-(0|[1-9][0-9]{0,15})(?(1)-[0-9a-f]+)")
_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_SUFFIX = ".safetensors"
_JSON = ("state.json", "config.json")
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
    run, step, keep = Path(run), check_count(step, "step", 0, MAX_STEP), check_count(keep, "keep", 2)
    if wrong := [group for group in tensors if not isinstance(group, str) or not _GROUP.fullmatch(group)]:
        raise DepthgateError(f"tensors has the group {wrong[0]!r}: use letters, digits, _ and -, at most 64")
    contents = {g + _SUFFIX: files.pack(named, g) for g, named in tensors.items()}
    contents |= {"state.json": files.to_json(state, "state"), "config.json": files.to_json(config, "config")}
    try:
        if not run.is_dir():
            run.mkdir(parents=True)
            files.sync_folder(run.parent)
        with lock(run / ".lock"):
            _tidy(run)
            target = _publish(run, step, contents)
            _rotate(run, step, keep)
    except OSError as error:
        why = f"cannot save step {step} in {run} ({error.strerror or error}): earlier checkpoints are intact"
        raise DepthgateError(f"{why}; free some space, make it writable, or choose another folder") from error
    return target


def load(run: Path, only: Collection[str] | None = None) -> Checkpoint:
    """Read the newest complete checkpoint; a damaged one is named in a warning, and the one before is used.

    `only` names the groups of tensors to read, and to check; all unless given.
    """
    failed: dict[Path, str] = {}
    # Listed anew each time: a run that is still saving may have removed an old one and added a newer one.
    while left := [path for path in _candidates(Path(run)) if path not in failed]:
        path = left[-1]
        try:
            found = read_folder(path, only)
        except DepthgateError as error:
            failed[path] = str(error)
            continue
        for later, reason in failed.items():
            if _step_of(later.name) >= found.step:
                warnings.warn(f"{reason}\nstep {found.step} is loaded instead", DepthgateWarning, stacklevel=2)
        return found
    reasons = "".join(f"\n{reason}" for reason in list(failed.values())[:5])
    raise DepthgateError(f"no complete checkpoint in {run}: check the path, or start without it{reasons}")


def steps(run: Path) -> list[int]:
    """The steps that have a folder, ascending; none if there is no such run. Damaged ones count: see `load`."""
    return sorted({_step_of(path.name) for path in _candidates(Path(run))})


def verify(folder: Path) -> dict[str, Record]:
    """Read every file of a checkpoint and compare it with the manifest, without keeping it; returns the records."""
    with _open_folder(folder := Path(folder)) as fd:
        _, records = _manifest(fd, folder)
        for name, record in records.items():
            with opened(fd, folder / name, record.size) as file:
                if name.endswith(_SUFFIX):
                    file.header()
                else:
                    files.from_json(file.take(file.left), file.path)
                file.finish(record.sha256)
    return records


def read_folder(folder: Path, only: Collection[str] | None = None) -> Checkpoint:
    """Read one checkpoint, from a folder of any name; whatever is missing, damaged or unknown is an error."""
    with _open_folder(folder := Path(folder)) as fd:
        step, records = _manifest(fd, folder)
        groups = {name.removesuffix(_SUFFIX) for name in records} - set(_JSON)
        wanted = groups if only is None else set(only)
        if missing := wanted - groups:
            raise DepthgateError(f"{folder} has no tensors named {sorted(missing)}: it has {sorted(groups)}")
        plain = {}
        for name in _JSON:
            with opened(fd, folder / name, records[name].size) as file:
                plain[name] = files.from_json(file.take(file.left), folder / name)
                file.finish(records[name].sha256)
        tensors = {}
        for group in sorted(wanted):
            name = group + _SUFFIX
            with opened(fd, folder / name, records[name].size) as file:
                tensors[group] = file.tensors()
                file.finish(records[name].sha256)
    return Checkpoint(folder, step, tensors, plain["state.json"], plain["config.json"])


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


def _publish(run: Path, step: int, contents: Mapping[str, Packed]) -> Path:
    token = secrets.token_hex(8)
    temp, old, target = run / f".tmp-step-{step}-{token}", run / f".old-step-{step}-{token}", run / f"step-{step}"
    need = sum(content.size for content in contents.values()) + 2**20
    if (free := shutil.disk_usage(run).free) < need:
        sizes = f"{free / 2**20:.0f} MiB free, and a checkpoint needs {need / 2**20:.0f}"
        raise DepthgateError(f"{run} has {sizes}: free some space or choose another; earlier checkpoints are intact")
    try:
        os.mkdir(temp)
        records = {name: files.write(temp / name, content) for name, content in contents.items()}
        files.write(temp / MANIFEST, _manifest_of(step, records))
        files.sync_folder(temp)
        if os.path.lexists(target):
            os.rename(target, old)
        os.rename(temp, target)
    except BaseException:
        _discard(temp)
        raise
    files.sync_folder(run)
    return target


def _manifest_of(step: int, records: Mapping[str, Record]) -> Packed:
    listed = {name: record._asdict() for name, record in records.items()}
    body = {"format": _FORMAT, "version": VERSION, "step": step, "files": listed}
    sha256 = hashlib.sha256(files.to_json(body, MANIFEST).head).hexdigest()
    return files.to_json(body | {"sha256": sha256}, MANIFEST)


def _manifest(fd: int, folder: Path) -> tuple[int, dict[str, Record]]:
    """The step and records of the folder open as `fd`, after a look at every name and size in it."""
    path = folder / MANIFEST
    with opened(fd, path, None) as file:
        body = files.from_json(text := file.take(file.left), path)
    version = body.get("version")
    if body.get("format") != _FORMAT or type(version) is not int:
        raise damaged(path, "is not the manifest of a depthgate checkpoint")
    if version != VERSION:
        remedy = "upgrade depthgate" if version > VERSION else "read and save it with the depthgate that wrote it"
        raise DepthgateError(f"{path} has format version {version}, this depthgate reads {VERSION}: {remedy}")
    step, listed = body.get("step"), body.get("files")
    if type(step) is not int or not isinstance(listed, dict):
        raise damaged(path, "lists no step or no files")
    records = {name: _record(name, claim, path) for name, claim in listed.items()}
    if text != _manifest_of(step, records).head:
        raise damaged(path, "is not what was saved (its own SHA-256 differs)")
    if missing := set(_JSON) - records.keys():
        raise damaged(path, f"does not list {', '.join(sorted(missing))}")
    if _step_of(folder.name) not in (-1, step):
        raise damaged(folder, f"holds step {step}, so it was renamed or mixed up")
    for name in os.listdir(fd):
        if name not in records and name != MANIFEST:
            raise damaged(folder / name, "is not in the manifest; remove it if it is yours")
    for name, record in records.items():
        with opened(fd, folder / name, record.size):
            pass
    return step, records


def _record(name: str, claim: Any, path: Path) -> Record:
    """A file that a manifest lists must have a name that `save` gives: no separators, no dots, of a known kind."""
    if name not in _JSON and not (name.endswith(_SUFFIX) and _GROUP.fullmatch(name.removesuffix(_SUFFIX))):
        raise damaged(path, f"lists the file {name[:99]!r}, a name that no checkpoint has")
    match claim:
        case {"size": int(size), "sha256": str(sha256)} if size >= 0:
            return Record(size, sha256)
    raise damaged(path, f"says nothing useful of {name}")


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """Files are opened relative to this descriptor, so that a folder swapped meanwhile is never mixed with the old."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        why = "it is a symbolic link" if folder.is_symlink() else error.strerror
        raise damaged(folder, f"cannot be read as a folder ({why})") from None


def _step_of(name: str) -> int:
    return int(match[2]) if (match := _STEP.fullmatch(name)) else -1


def _candidates(run: Path) -> list[Path]:
    """Everything that has the name of a checkpoint, oldest first; a replaced one (.old) before its successor."""
    try:
        found = [name for name in os.listdir(run) if _step_of(name) >= 0]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DepthgateError(f"cannot list {run} ({error.strerror}): give the folder of a run") from None
    return [run / name for name in sorted(found, key=lambda name: (_step_of(name), name))]


def _tidy(run: Path) -> None:
    """Clear away what a killed save left. Only the holder of the lock may, so nothing here is still being written."""
    for name in os.listdir(run):
        if name.startswith(".tmp-step-"):
            _discard(run / name)
        elif name.startswith(".old-") and (step := _step_of(name)) >= 0:
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
    for path in reversed(_candidates(run)):
        if path.name.startswith("."):
            _discard(path)
        elif _step_of(path.name) > step:
            warnings.warn(f"{path} is later than step {step}, now saved: a load tries it first", DepthgateWarning, 4)
        elif kept >= keep:
            _discard(path)
        else:
            with suppress(DepthgateError), _open_folder(path) as fd:
                _manifest(fd, path)
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
