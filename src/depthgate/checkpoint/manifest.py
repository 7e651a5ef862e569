"""The manifest of a checkpoint's folder: which files it has, how large they are, and their SHA-256."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from depthgate.checkpoint import files
from depthgate.checkpoint.files import Packed, Record, damaged, opened
from depthgate.errors import DepthgateError

VERSION = 1
_FORMAT = "depthgate checkpoint"
MANIFEST = "manifest.json"
PLAIN = ("state.json", "config.json")  # the files that hold no tensors
SUFFIX = ".safetensors"
# Of one process, or of one of several: model.safetensors, model-00001-of-00004.safetensors.
TENSORS = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_-]{0,63}?)(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_STEP = re.compile(r"(?:step|(\.old)-step)-(0|[1-9][0-9]{0,15})(?(1)-[0-9a-f]+)")


def pack(step: int, records: Mapping[str, Record]) -> Packed:
    """The manifest of these files; it holds a hash of itself."""
    listed = {name: record._asdict() for name, record in records.items()}
    body = {"format": _FORMAT, "version": VERSION, "step": step, "files": listed}
    sha256 = hashlib.sha256(files.to_json(body, MANIFEST).head).hexdigest()
    return files.to_json(body | {"sha256": sha256}, MANIFEST)


def read(fd: int, folder: Path) -> tuple[int, dict[str, Record]]:
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
    if text != pack(step, records).head:
        raise damaged(path, "is not what was saved (its own SHA-256 differs)")
    if missing := set(PLAIN) - records.keys():
        raise damaged(path, f"does not list {', '.join(sorted(missing))}")
    if step_of(folder.name) not in (-1, step):
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
    if name not in PLAIN and not TENSORS.fullmatch(name):
        raise damaged(path, f"lists the file {name[:99]!r}, a name that no checkpoint has")
    match claim:
        case {"size": int(size), "sha256": str(sha256)} if size >= 0:
            return Record(size, sha256)
    raise damaged(path, f"says nothing useful of {name}")


@contextmanager
def open_folder(folder: Path) -> Iterator[int]:
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


def step_of(name: str) -> int:
    """The step of a folder, by its name; -1 if it is no checkpoint's."""
    return int(match[2]) if (match := _STEP.fullmatch(name)) else -1
