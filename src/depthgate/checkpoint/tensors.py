"""Tensors of a checkpoint in safetensors files: written by one process or by several, read whole or by rows.

model.safetensors holds whole tensors. model-00002-of-00004.safetensors holds the second of four processes' rows of the
tensors in the group `model`; its header says where they belong as torch.distributed.checkpoint does, whose reader
knows these files, and how large each whole tensor is. Headers are checked against each other before memory is taken.
A split tensor (DTensor) is known by its method `to_local`: importing its module takes a second.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from depthgate.device import World
from depthgate.errors import DepthgateError

SUFFIX = ".safetensors"
MAX_HEADER = 32 * 2**20  # far above any real one: it bounds the memory that a hostile file can take
FILE_NAME = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_-]{0,63}?)(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
ALIASES = "depthgate.aliases"  # in a header: name -> name of the tensor that it is tied to
PLACES = "DCP_SHARDING_INFO"  # in the header of a piece: name -> first row and shape of the whole
_BITS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 bool int64 int32 int16 int8"
DTYPES = frozenset(getattr(torch, name) for name in f"{_BITS} uint64 uint32 uint16 uint8".split())


def damaged(path: Path, what: str) -> DepthgateError:
    """The error for a file that cannot be trusted."""
    return DepthgateError(f"{path} {what}: restore it from a copy, or use an earlier checkpoint")


def from_json(text: str | bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"is not the JSON it should be ({error})") from None
    if not isinstance(value, dict):
        raise damaged(path, "is not a JSON object")
    return value


def file_name(group: str, part: int = 0, parts: int = 1) -> str:
    """The file of process `part`, counted from 0, among those that hold the tensors of a group."""
    return f"{group}-{part + 1:05}-of-{parts:05}{SUFFIX}" if parts > 1 else f"{group}{SUFFIX}"


def by_group(names: Iterable[str], folder: Path) -> dict[str, list[str]]:
    """The safetensors files of every group, in order; an error where those of some processes are missing."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if match := FILE_NAME.fullmatch(name):
            found.setdefault(match[1], []).append(name)
    for group, listed in found.items():
        parts = len(listed)
        if listed not in ([f"{group}-00001-of-00001{SUFFIX}"], [file_name(group, i, parts) for i in range(parts)]):
            raise damaged(folder, f"has {', '.join(listed[:3])}, which are not all the files of {group!r}, or too many")
    return found


def check(groups: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Refuse what safetensors cannot hold; returns the bytes of all tensors."""
    size = 0
    for group, tensors in groups.items():
        match = FILE_NAME.fullmatch(f"{group}{SUFFIX}") if isinstance(group, str) else None
        if not match or match[2]:
            what = "use letters, digits, _ and -, at most 64, and no -00001-of-00002 at the end"
            raise DepthgateError(f"tensors has the group {group!r}: {what}")
        for name, t in tensors.items():
            if not isinstance(name, str) or name == "__metadata__" or name.encode(errors="replace").decode() != name:
                raise DepthgateError(f"{group} has a tensor named {name!r}: rename it to text other than __metadata__")
            if not isinstance(t, Tensor):
                raise DepthgateError(f"{group}[{name!r}] is a {type(t).__name__}, not a tensor: put it into state")
            if t.is_meta or t.is_nested or t.layout != torch.strided or t.dtype not in DTYPES:
                kind = f"{t.dtype}, {t.layout}, on {t.device}"
                raise DepthgateError(f"{group}[{name!r}] is {kind}: it cannot be saved as safetensors")
            size += t.numel() * t.dtype.itemsize
    return size


def own(tensors: Mapping[str, Any], world: World) -> tuple[Mapping[str, Tensor], dict[str, Any] | None]:
    """The tensors that this process writes (the first one all that are not split), and their places among several."""
    if world.size == 1:
        return tensors, None
    held, places = dict[str, Tensor](), dict[str, Any]()
    for name, tensor in tensors.items():
        if (split := hasattr(tensor, "to_local")) or world.first:
            first = _rows_of(name, tensor, world)[0] if split else 0
            offsets = [first] + [0] * (tensor.ndim - 1) if tensor.ndim else []
            held[name] = tensor.to_local() if split else tensor
            places[name] = {"saved_offsets": offsets, "shape": list(tensor.shape)}
    return held, places


def _rows_of(name: str, tensor: Any, world: World) -> tuple[int, int]:
    """The first row and the number of rows of a split tensor that this process holds."""
    if [place.is_shard(0) for place in tensor.placements] != [True] or tensor.device_mesh.size() != world.size:
        what = "is not split by its first dimension among all processes"
        raise DepthgateError(f"tensor {name!r} {what}: it cannot be saved or loaded")
    each = -(-len(tensor) // world.size)  # as torch.chunk divides
    return min(tensor.device_mesh.get_local_rank() * each, len(tensor)), len(tensor.to_local())


def write(path: Path, tensors: Mapping[str, Tensor], places: Mapping[str, Any] | None = None) -> None:
    """Write a new file; names of the same tensor (tied weights) share one copy, and the header says so."""
    kept: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    storages = set[int]()
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        owner = first.setdefault(memory if tensor.numel() else name, name)
        if owner != name:
            aliases[name] = owner
            continue
        host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if host.untyped_storage().data_ptr() in storages:  # another view of saved memory, which save_file refuses
            host = host.clone()
        storages.add(host.untyped_storage().data_ptr())
        kept[name] = host
    metadata = {"format": "pt"} | ({ALIASES: json.dumps(aliases)} if aliases else {})
    metadata |= {PLACES: json.dumps(places)} if places is not None else {}
    try:
        save_file(kept, path, metadata)
    except SafetensorError as error:  # of a full disk there is only the text
        raise OSError(re.sub(r".*I/O error: | \(os error .*", "", str(error))) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # the package lets the owner alone read it


def open_file(fd: int, path: Path) -> Any:
    """The safetensors file that is open as `fd`, mapped into memory: it outlives the descriptor."""
    if (length := int.from_bytes(os.pread(fd, 8, 0), "little")) > MAX_HEADER:
        raise damaged(path, f"is not a safetensors file (its header claims {length} bytes)")
    try:
        return safe_open(f"/dev/fd/{fd}", framework="pt")
    except Exception as error:  # the package, torch and the system have errors of their own
        raise damaged(path, f"is not a safetensors file ({str(error)[:200]})") from None


class Piece(NamedTuple):
    """Rows of a tensor in an open file, under a name of that file. The rows of all pieces are the `whole` shape."""

    path: Path
    file: Any
    name: str
    first: int  # the number of its first row in the whole tensor
    rows: int  # 1 of a tensor without dimensions
    whole: list[int]
    dtype: str


def index(files: Mapping[Path, Any]) -> dict[str, list[Piece]]:
    """The pieces of all tensors in the open files of a group, in order, if their headers fit together."""
    found: dict[str, list[Piece]] = {}
    for path, file in files.items():
        metadata, names = file.metadata() or {}, set(file.keys())
        aliases = from_json(metadata.get(ALIASES, "{}"), path)
        if aliases.keys() & names or not all(isinstance(owner, str) and owner in names for owner in aliases.values()):
            raise damaged(path, "ties tensors to some that it does not have")
        in_pieces = re.search("-of-[0-9]{5}$", path.stem) is not None
        places = from_json(metadata.get(PLACES, "[]"), path) if in_pieces else {}
        for name in sorted(names | aliases.keys()):
            held = file.get_slice(owner := aliases.get(name, name))
            dtype, shape = held.get_dtype(), held.get_shape()
            first, whole = _place(name, shape, places.get(name), path) if in_pieces else (0, shape)
            rows = shape[0] if shape else 1
            found.setdefault(name, []).append(Piece(path, file, owner, first, rows, whole, dtype))
    for name, pieces in found.items():
        pieces.sort(key=lambda piece: (piece.first, piece.rows))
        whole, dtype = pieces[0].whole, pieces[0].dtype
        ends = list(accumulate((piece.rows for piece in pieces), initial=0))
        follow = all(piece.first == end or not piece.rows for piece, end in zip(pieces, ends, strict=False))
        complete = ends[-1] == (whole[0] if whole else 1)
        if not follow or not complete or any((p.whole, p.dtype) != (whole, dtype) for p in pieces):
            raise damaged(pieces[-1].path, f"and those next to it do not make up the tensor {name[:99]!r}")
    return found


def _place(name: str, shape: list[int], claim: Any, path: Path) -> tuple[int, list[int]]:
    """The first row's number and the shape of the whole tensor, as a header claims them for a piece of this shape."""
    match claim:
        case {"saved_offsets": [*offsets], "shape": [*full]} if len(offsets) == len(full) == len(shape):
            if all(type(n) is int for n in offsets + full) and not any(offsets[1:]) and full[1:] == shape[1:]:
                return sum(offsets), full
    raise damaged(path, f"has an impossible place for tensor {name[:99]!r}")


def read(name: str, pieces: list[Piece], first: int = 0, rows: int | None = None) -> Tensor:
    """A copy of some rows of a tensor, or of all, on the CPU."""
    stop = first + (sum(piece.rows for piece in pieces) if rows is None else rows)
    wanted = [p for p in pieces if max(first, p.first) < min(stop, p.first + p.rows)] or pieces[:1]
    parts = []
    for piece in wanted:
        try:
            some = slice(max(first - piece.first, 0), min(stop - piece.first, piece.rows))
            part = piece.file.get_slice(piece.name)[some] if piece.whole else piece.file.get_tensor(piece.name)
        except Exception as error:  # the package and torch have errors of their own
            raise damaged(piece.path, f"has a tensor {name[:99]!r} that cannot be read ({str(error)[:200]})") from None
        if part.dtype is torch.bool and (part.view(torch.uint8) > 1).any():
            raise damaged(piece.path, f"has a bool that is neither 0 nor 1 in tensor {name[:99]!r}")
        parts.append(part)
    return parts[0].clone() if len(parts) == 1 else torch.cat(parts)


def read_all(tensors: Mapping[str, list[Piece]], world: World, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of all tensors; names that were tied get the same tensor. What is split in `held` is split likewise."""
    found, tied = dict[str, Tensor](), dict[Any, Tensor]()
    for name, pieces in tensors.items():
        like: Any = held.get(name, held.get(name.rpartition(":")[0]))
        owner = tuple((piece.path, piece.name) for piece in pieces)
        split = hasattr(like, "to_local") and list(like.shape) == pieces[0].whole
        if owner not in tied and split:
            rows = read(name, pieces, *_rows_of(name, like, world)).to(like.device)
            shape = {"shape": like.shape, "stride": like.stride()}
            tied[owner] = type(like).from_local(rows, like.device_mesh, like.placements, run_check=False, **shape)
        elif owner not in tied:
            tied[owner] = read(name, pieces)
        found[name] = tied[owner]
    return found
