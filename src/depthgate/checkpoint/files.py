"""Files of a checkpoint: safetensors and JSON, hashed as they are written and as they are read. Nothing is executed.

The safetensors format is written and read here and not by its package, so that a full disk is an OSError with a
number, tensors leave the device a chunk at a time, and the bytes that were hashed are the bytes that are used.
"""

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgate.errors import DepthgateError

# Far above any real checkpoint; they bound what a hostile file can make us allocate.
MAX_HEADER = 64 * 2**20
MAX_JSON = 16 * 2**20
MAX_TENSORS = 2**18
CHUNK = 4 * 2**20
ALIASES = "depthgate.aliases"
# fmt: off
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}
# fmt: on
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def damaged(path: Path, what: str) -> DepthgateError:
    """The error for a file that cannot be trusted."""
    return DepthgateError(f"{path} {what}: restore it from a copy, or use an earlier checkpoint")


class Record(NamedTuple):
    """What the manifest says of a file."""

    size: int
    sha256: str


class Entry(NamedTuple):
    """A tensor's place among the data of its file."""

    begin: int
    end: int
    name: str
    dtype: torch.dtype
    shape: list[int]


class Packed(NamedTuple):
    """A file ready to be written: JSON, or the head of a safetensors file and its tensors in the order of the data."""

    head: bytes
    tensors: list[Tensor]
    size: int

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes of the file; each chunk is valid until the next is asked for."""
        yield self.head
        buffer = bytearray(CHUNK)
        host = torch.frombuffer(buffer, dtype=torch.uint8)
        for tensor in self.tensors:
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            for part in torch.split(flat, CHUNK):
                host[: part.numel()].copy_(part)
                yield memoryview(buffer)[: part.numel()]


def pack(tensors: Mapping[str, Tensor], what: str) -> Packed:
    """Lay tensors out; names that hold the same tensor (tied weights) share one copy, and the header says so."""
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        _check_savable(name, tensor, what)
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        kept = first.setdefault(place if tensor.numel() else name, name)
        if kept != name:
            aliases[name] = kept
    # Wide dtypes first, as in the safetensors package: every tensor is then aligned to its own width.
    order = sorted(first.values(), key=lambda name: (-tensors[name].dtype.itemsize, name))
    metadata = {"format": "pt"} | ({ALIASES: json.dumps(aliases)} if aliases else {})
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DepthgateError(f"{what} has a tensor name that is not text ({error}): rename it") from None
    text += b" " * (-len(text) % 8)
    if _too_large(text):
        raise DepthgateError(f"{what} has {len(tensors)} tensors, too many for one file: split it into several groups")
    return Packed(len(text).to_bytes(8, "little") + text, [tensors[name] for name in order], 8 + len(text) + end)


def _check_savable(name: Any, tensor: Any, what: str) -> None:
    if not isinstance(name, str) or name == "__metadata__":
        raise DepthgateError(f"{what} has a tensor named {name!r}: a name must be text other than __metadata__")
    if not isinstance(tensor, Tensor):
        raise DepthgateError(f"{what}[{name!r}] is a {type(tensor).__name__}, not a tensor: put it into state")
    if hasattr(tensor, "full_tensor"):
        raise DepthgateError(f"{what}[{name!r}] is sharded: save what its full_tensor() returns")
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided or tensor.dtype not in NAMES:
        kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise DepthgateError(f"{what}[{name!r}] is {kind}: only dense tensors of the safetensors dtypes can be saved")


def _too_large(header: bytes) -> bool:
    """Counts separators, so that the number of parsed values is bounded before parsing."""
    return len(header) > MAX_HEADER or sum(header.count(mark) for mark in (b"{", b"[", b",")) > 12 * MAX_TENSORS


def to_json(value: Mapping[str, Any], what: str) -> Packed:
    """Encode plain data; tuples become lists, and whatever else JSON would change or not hold is refused."""
    try:
        text = json.dumps(value, indent=1).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DepthgateError(f"{what} is no plain data ({error}): use numbers, text, lists and dicts") from None
    _check_keys(value, what)
    if len(text) > MAX_JSON:
        raise DepthgateError(f"{what} is {len(text)} bytes of JSON, more than {MAX_JSON}: save the bulk as tensors")
    return Packed(text, [], len(text))


def _check_keys(value: Any, what: str) -> None:
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise DepthgateError(f"{what} has the key {wrong[0]!r}: JSON would turn it into text; use text")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner, what)


def from_json(text: bytes, path: Path) -> dict[str, Any]:
    """Decode a JSON object; a name that stands twice is damage, as two readers could take different values."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"is not the JSON it should be ({error})") from None
    if not isinstance(value, dict):
        raise damaged(path, "is not a JSON object")
    return value


def write(path: Path, content: Packed) -> Record:
    """Write a new file to the disk itself, and say what was written."""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        for chunk in content.chunks():
            digest.update(chunk)
            left = memoryview(chunk)
            while left:
                left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return Record(content.size, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: without it a rename may be lost with the power."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Reader:
    """A file that is hashed as it is read."""

    def __init__(self, fd: int, path: Path, size: int) -> None:
        self.fd, self.path, self.left = fd, path, size
        self.digest = hashlib.sha256()

    def fill(self, view: memoryview) -> None:
        """Read exactly as many bytes as `view` has room for; the caller knows that they are there."""
        done = 0
        while done < len(view):
            if not (got := os.readv(self.fd, [view[done:]])):
                raise damaged(self.path, "became shorter while it was read")
            done += got
        self.left -= done
        self.digest.update(view)

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.left:  # before the allocation
            raise damaged(self.path, "ends too early")
        buffer = bytearray(count)
        self.fill(memoryview(buffer))
        return bytes(buffer)

    def finish(self, sha256: str) -> None:
        """Read what is left, and compare the hash."""
        while self.left:
            self.take(min(CHUNK, self.left))
        if self.digest.hexdigest() != sha256:
            raise damaged(self.path, "is not what was saved (its SHA-256 differs)")

    def header(self) -> tuple[list[Entry], dict[str, str]]:
        """The tensors of a safetensors file in the order of their data, and its aliases; every claim is checked."""
        length = int.from_bytes(self.take(8), "little")
        if length > min(MAX_HEADER, self.left):
            raise damaged(self.path, f"is no safetensors file (its header claims {length} bytes)")
        text = self.take(length)
        if _too_large(text):
            raise damaged(self.path, "claims too many tensors")
        header = from_json(text, self.path)
        metadata = header.pop("__metadata__", {})
        entries = sorted(_entry(name, claim, self.path) for name, claim in header.items())
        end = 0
        for entry in entries:
            if entry.begin != end:
                raise damaged(self.path, f"has data that overlaps or is missing before tensor {entry.name!r}")
            end = entry.end
        if end != self.left:
            raise damaged(self.path, f"has {self.left} bytes of data where its header says {end}")
        aliases: dict[str, str] = {}
        if isinstance(metadata, dict) and isinstance(metadata.get(ALIASES), str):
            aliases = from_json(metadata[ALIASES].encode(errors="replace"), self.path)
        for name, kept in aliases.items():
            if name in header or not isinstance(kept, str) or kept not in header:
                raise damaged(self.path, f"ties {name[:99]!r} to a tensor that it does not have")
        return entries, aliases

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a safetensors file, on the CPU; to be trusted after `finish`."""
        entries, aliases = self.header()
        buffer = bytearray(CHUNK)
        host = torch.frombuffer(buffer, dtype=torch.uint8)
        found: dict[str, Tensor] = {}
        for entry in entries:
            found[entry.name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            flat = found[entry.name].reshape(-1).view(torch.uint8)
            for part in torch.split(flat, CHUNK):
                self.fill(memoryview(buffer)[: part.numel()])
                part.copy_(host[: part.numel()])
            if entry.dtype is torch.bool and (flat > 1).any():
                raise damaged(self.path, f"has a bool that is neither 0 nor 1 in tensor {entry.name!r}")
        return found | {name: found[kept] for name, kept in aliases.items()}


def _entry(name: str, claim: Any, path: Path) -> Entry:
    match claim:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if kind in DTYPES:
            if len(shape) <= 64 and all(type(n) is int and n >= 0 for n in shape):
                # The first product: an empty tensor may have sizes that no machine can count.
                fits = math.prod(n or 1 for n in shape) < 2**60
                if fits and math.prod(shape) * DTYPES[kind].itemsize == end - begin:
                    return Entry(begin, end, name, DTYPES[kind], shape)
    raise damaged(path, f"has an unknown dtype or an impossible shape for tensor {name[:99]!r}")


@contextmanager
def opened(folder: int, path: Path, size: int | None) -> Iterator[Reader]:
    """Open a plain file of the folder that is open as `folder`; its size is checked before anything is read."""
    try:
        # Without O_NONBLOCK, a pipe put there would block for ever.
        fd = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise damaged(path, f"cannot be opened ({why})") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise damaged(path, "is not a plain file")
        if size is not None and found.st_size != size:
            raise damaged(path, f"has {found.st_size} bytes where the manifest says {size}")
        if path.suffix == ".json" and found.st_size > MAX_JSON:
            raise damaged(path, f"has {found.st_size} bytes, more than the {MAX_JSON} allowed")
        yield Reader(fd, path, found.st_size)
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from None
    finally:
        os.close(fd)
