"""Tensors that several processes saved in pieces: whether the pieces make whole tensors, and the whole ones.

model-00002-of-00004.safetensors holds the second of four processes' rows of every tensor in the group `model`. Its
header says where they belong as torch.distributed.checkpoint does (so its reader knows these files), and how large the
whole is, which that leaves out. Whatever a header claims is checked against all others before memory is taken.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgate.checkpoint import files
from depthgate.checkpoint.files import Entry, Packed, Reader, Record, damaged, opened
from depthgate.checkpoint.manifest import SUFFIX, TENSORS
from depthgate.errors import DepthgateError

PLACES = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"


class Piece(NamedTuple):
    """Some rows of a tensor, and where they lie."""

    file: str
    begin: int  # in bytes from the start of the file
    first: int  # the number of its first row in the whole
    shape: list[int]


class Whole(NamedTuple):
    """A tensor; its pieces follow each other without gap or overlap."""

    dtype: torch.dtype
    shape: list[int]
    pieces: list[Piece]


def file_name(group: str, part: int, parts: int) -> str:
    """The file of process `part`, counted from 0."""
    return f"{group}-{part + 1:05}-of-{parts:05}{SUFFIX}"


def check_groups(groups: Iterable[Any]) -> None:
    """Groups become names of files, and none may look like a piece of another."""
    for group in groups:
        found = TENSORS.fullmatch(f"{group}{SUFFIX}") if isinstance(group, str) else None
        if not found or found[2]:
            what = "use letters, digits, _ and -, at most 64, and no -00001-of-00002 at the end"
            raise DepthgateError(f"tensors has the group {group!r}: {what}")


def by_group(names: Iterable[str], folder: Path) -> dict[str, list[str]]:
    """The files of every group in order; those of all processes must be there."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if match := TENSORS.fullmatch(name):
            found.setdefault(match[1], []).append(name)
    for group, listed in found.items():
        if listed not in ([group + SUFFIX], [file_name(group, i, len(listed)) for i in range(len(listed))]):
            raise damaged(folder, f"has {', '.join(listed[:3])}, which are not all the files of {group!r}, or too many")
    return found


def pack(tensors: Mapping[str, Tensor], places: Mapping[str, Any], what: str) -> Packed:
    """Like `files.pack`, with a header that says where each tensor's rows belong."""
    if len(tensors) > files.MAX_TENSORS // 2:
        raise DepthgateError(f"{what} has {len(tensors)} tensors, too many for one file: split it into several groups")
    packed = files.pack(tensors, what)
    header = json.loads(packed.head[8:])
    header["__metadata__"][PLACES] = json.dumps(places)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return Packed(head, packed.tensors, packed.size - len(packed.head) + len(head))


def index(fd: int, folder: Path, names: Sequence[str], records: Mapping[str, Record]) -> dict[str, Whole]:
    """What the headers of a group's files say, if it fits together; the folder is open as `fd`."""
    found: dict[str, Whole] = {}
    for name in names:
        path = folder / name
        with opened(fd, path, records[name].size) as file:
            entries, aliases = file.header()
            start = records[name].size - file.left
            places = _places(file, start) if _is_piece(name) else None
        kept = {entry.name: entry for entry in entries}
        for tensor, entry in (kept | {alias: kept[of] for alias, of in aliases.items()}).items():
            first, shape = (0, entry.shape) if places is None else _place(tensor, entry, places.get(tensor), path)
            whole = found.setdefault(tensor, Whole(entry.dtype, shape, []))
            if (whole.dtype, whole.shape) != (entry.dtype, shape):
                raise damaged(path, f"has another dtype or shape for tensor {tensor[:99]!r} than the files before it")
            whole.pieces.append(Piece(name, start + entry.begin, first, entry.shape))
    return {tensor: _fitted(tensor, whole, folder) for tensor, whole in found.items()}


def _places(file: Reader, start: int) -> dict[str, Any]:
    """The places in a header that was just checked and ends at `start`."""
    metadata = files.from_json(os.pread(file.fd, start - 8, 8), file.path).get("__metadata__")
    text = metadata.get(PLACES) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise damaged(file.path, "does not say which rows it holds")
    return files.from_json(text.encode(errors="surrogatepass"), file.path)


def _place(tensor: str, entry: Entry, claim: Any, path: Path) -> tuple[int, list[int]]:
    """The first row's number and the shape of the whole, as a header claims them."""
    match claim:
        case {"saved_offsets": [*offsets], "shape": [*shape]} if len(offsets) == len(shape) == len(entry.shape):
            if all(type(n) is int and n >= 0 for n in offsets + shape) and math.prod(n or 1 for n in shape) < 2**60:
                first, rows = (offsets or [0])[0], count(entry.shape)
                if not any(offsets[1:]) and shape[1:] == entry.shape[1:] and first + rows <= count(shape):
                    return first, shape
    raise damaged(path, f"has an impossible place for tensor {tensor[:99]!r}")


def _fitted(tensor: str, whole: Whole, folder: Path) -> Whole:
    """The whole with its pieces in order, those without rows left out."""
    pieces = sorted((p for p in whole.pieces if count(p.shape)), key=lambda piece: piece.first)
    end = 0
    for piece in pieces:
        if piece.first != end:
            raise damaged(folder / piece.file, f"leaves a gap or an overlap in the rows of tensor {tensor[:99]!r}")
        end += count(piece.shape)
    if end != count(whole.shape):
        file = (pieces or whole.pieces)[-1].file
        raise damaged(folder / file, f"should not be the last: rows of tensor {tensor[:99]!r} are missing")
    return whole._replace(pieces=pieces)


def _is_piece(name: str) -> bool:
    found = TENSORS.fullmatch(name)
    return bool(found and found[2])


def count(shape: Sequence[int]) -> int:
    """How many rows; a number is one."""
    return shape[0] if shape else 1


def read(fd: int, folder: Path, names: Sequence[str], records: Mapping[str, Record]) -> dict[str, Tensor]:
    """The whole tensors of a group, on the CPU. Every byte that is used was hashed as it was read."""
    if not _is_piece(names[0]):
        return _read_file(fd, folder / names[0], records[names[0]])
    wholes = index(fd, folder, names, records)
    inside: dict[str, list[tuple[str, Piece]]] = {name: [] for name in names}
    for tensor, whole in wholes.items():
        for piece in whole.pieces:
            inside[piece.file].append((tensor, piece))
    found = {tensor: torch.empty(whole.shape, dtype=whole.dtype, device="cpu") for tensor, whole in wholes.items()}
    for name in names:
        parts = _read_file(fd, folder / name, records[name])
        for tensor, piece in inside[name]:
            part, target = parts.get(tensor), found[tensor]
            if part is None or part.dtype != target.dtype or list(part.shape) != piece.shape:
                raise damaged(folder / name, "was changed while it was read")
            (target[piece.first : piece.first + len(part)] if part.ndim else target).copy_(part)
    return found


def read_rows(file: Reader, begin: int, target: Tensor) -> None:
    """Fill a contiguous tensor, on any device, with the bytes at `begin`."""
    flat = target.view(-1).view(torch.uint8)
    buffer = bytearray(min(files.CHUNK, flat.numel()))
    host = torch.frombuffer(buffer, dtype=torch.uint8) if buffer else flat
    for part in torch.split(flat, files.CHUNK):
        view = memoryview(buffer)[: part.numel()]
        while view:
            if not (got := os.preadv(file.fd, [view], begin)):
                raise damaged(file.path, "became shorter while it was read")
            view, begin = view[got:], begin + got
        if target.dtype is torch.bool and (host[: part.numel()] > 1).any():
            raise damaged(file.path, "has a bool that is neither 0 nor 1")
        part.copy_(host[: part.numel()])


def _read_file(fd: int, path: Path, record: Record) -> dict[str, Tensor]:
    with opened(fd, path, record.size) as file:
        tensors = file.tensors()
        file.finish(record.sha256)
    return tensors
