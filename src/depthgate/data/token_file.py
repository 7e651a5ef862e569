"""Text as token files: written once into a cache, memory-mapped, checked by hash; and the split of their documents.

A token file is little-endian: a header of 128 bytes (`_HEADER`, zeros), the tokens (uint16, or uint32 for more than
65536 ids) up to a multiple of 8 bytes, then the places at which documents begin and the end of the last one (int64).
Every document ends with the tokenizer's end id. The hash covers the header's fields and everything after the header.
"""

import hashlib
import mmap
import os
import re
import struct
import time
import warnings
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from depthgate.data.sources import cut_note, documents, fingerprint
from depthgate.data.tokenizer import TextTokenizer
from depthgate.errors import DepthgateError, DepthgateWarning
from depthgate.files import writing

VERSION = 1
_MAGIC = b"DGTOKENS"
_HEADER = struct.Struct("<8sIIQQQII32s")  # magic, then as TokenFile reads them
_HEADER_SIZE = 128
_HELD_OUT = 0.005  # the share of the tokens that no run trains on
_SMALL = 2**26  # files of up to 64 MiB are hashed whenever they are opened, which takes a tenth of a second
_STALE = 24 * 3600  # seconds after which the temporary file of a killed process is removed


class TokenFile:
    """An open token file: ids (tokens,) as stored, offsets (documents + 1,)."""

    def __init__(self, path: str | Path, verify: bool | None = None) -> None:
        """`verify` compares the hash of all bytes, by default only where that is quick. Sizes are always checked."""
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise DepthgateError(f"token file {path} cannot be read: {error.strerror}") from None
        head = self._map[: _HEADER.size].ljust(_HEADER.size, b"\0")
        magic, version, width, count, self.documents, *about, digest = _HEADER.unpack(head)
        self.text_bytes, self.vocab, self.end = about
        begin = _HEADER_SIZE + -(-count * width // 8) * 8
        whole = size == begin + 8 * (self.documents + 1) and width in (2, 4) and 0 < self.documents <= count
        if (magic, version) != (_MAGIC, VERSION) or not whole:
            raise self._damage(f"it is not a token file of format {VERSION}, or not a whole one")
        self.digest: str = digest.hex()
        if size <= _SMALL if verify is None else verify:
            payload = hashlib.sha256(memoryview(self._map)[_HEADER_SIZE:])
            if digest != hashlib.sha256(head[:-32] + payload.digest()).digest():
                raise self._damage("its contents do not match its hash")
        kind = torch.int16 if width == 2 else torch.int32  # torch does not index unsigned tensors
        with warnings.catch_warnings(action="ignore"):  # torch warns of memory that cannot be written; nothing writes
            self.ids = torch.frombuffer(self._map, dtype=kind, count=count, offset=_HEADER_SIZE)
            self.offsets = torch.frombuffer(self._map, dtype=torch.int64, count=self.documents + 1, offset=begin)
        self._mask = 2 ** (8 * width) - 1  # makes a stored id unsigned again
        if self.offsets[0] != 0 or self.offsets[-1] != count or (self.offsets.diff() < 1).any():
            raise self._damage("its documents do not fill it")

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, places: Tensor) -> Tensor:
        """The ids at places, as int64; one outside the vocabulary is an error, as on a GPU it would end the process."""
        ids: Tensor = take(self.ids, places).to(torch.int64) & self._mask
        if ids.numel() and int(ids.max()) >= self.vocab:
            raise self._damage(f"it holds the id {int(ids.max())}, but its vocabulary has {self.vocab}")
        return ids

    def _damage(self, why: str) -> DepthgateError:
        return DepthgateError(f"token file {self.path} is damaged or foreign: {why}; delete it to have it made again")


class Documents:
    """Documents of a token file, all unless their `starts` and `stops` are given, in order, as one run of tokens.
    `bounds` (documents + 1,) holds the place at which each begins in that run, and the length of the run."""

    def __init__(self, file: TokenFile, starts: Tensor | None = None, stops: Tensor | None = None) -> None:
        self.file = file
        starts = file.offsets[:-1] if starts is None else starts
        stops = file.offsets[1:] if stops is None else stops
        self.bounds = torch.cat([torch.zeros(1, dtype=torch.int64), (stops - starts).cumsum(0)])
        self._shift = starts - self.bounds[:-1]

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def documents_at(self, starts: Tensor, length: int) -> Tensor:
        """The numbers (B, length) of the documents at the places from `starts` (B,) on; past the end, the last one."""
        stops = (starts + length - 1).clamp(max=len(self) - 1)
        first, last = torch.searchsorted(self.bounds, torch.stack([starts, stops]), right=True) - 1
        steps = torch.zeros(len(starts), length, dtype=torch.int64)
        steps[:, 0] = first
        for row in (first < last).nonzero().flatten().tolist():  # a search for every place is slower than this
            steps[row, self.bounds[first[row] + 1 : last[row] + 1] - starts[row]] = 1
        return steps.cumsum(1)

    def read(self, places: Tensor, document: Tensor) -> Tensor:
        """The ids at places of the run, given the documents that hold them."""
        return self.file.read(places + take(self._shift, document))

    def fingerprint(self) -> str:
        """A hash of all tokens and documents, which a resumed run compares."""
        places = array("q", self.bounds.tolist() + self._shift.tolist()).tobytes()
        return hashlib.sha256(self.file.digest.encode() + places).hexdigest()


class Shards(NamedTuple):
    """The documents that a run trains on, and those that it is measured on."""

    train: Documents
    validation: Documents


def prepare(data: str, tokenizer: TextTokenizer, validation: str | None = None) -> Shards:
    """Documents of `data`, and of `validation` where given; otherwise some documents are held out, the same ones for
    every run, so that runs of different seeds can be compared."""
    file = tokenize(data, tokenizer)
    if validation is None:
        return split(file, _HELD_OUT)
    return Shards(Documents(file), Documents(tokenize(validation, tokenizer)))


def told(data: str, trained: Documents, held: Documents | None = None) -> str:
    """A line on the text of a run: bytes, documents and tokens, how many are held out, and how files were cut."""
    file = trained.file
    documents = f"{file.documents:,} document{'s' * (file.documents > 1)}"
    size = f"{file.text_bytes:,} bytes of text, {documents}, {len(file):,} tokens"
    if held is not None:
        size += f", {len(held):,} {'of them held out' if held.file is file else 'more to validate on'}"
    return f"data {data}: {size}{cut_note(data, file.documents)}"


def split(file: TokenFile, share: float, seed: int = 0) -> Shards:
    """Hold out documents until they fill `share` of the tokens, in an order that depends on their number and the seed.

    The share of a short text is larger: a fortieth up to 2^18 tokens, a tenth up to 4096. Documents of at most an
    eighth of the room come first; larger ones follow if these do not fill half of it. Where none fits, the end of the
    last document is held out.
    """
    total = len(file)
    if total < 4:
        raise DepthgateError(f"the data has {total} tokens: too few to train on some and hold out others")
    room = left = max(int(total * share), min(total // 40, 2**18), min(total // 10, 4096), 2)
    starts, stops = file.offsets[:-1], file.offsets[1:]
    lengths = (stops - starts).tolist()
    held = torch.zeros(len(lengths), dtype=torch.bool)
    for most in (room // 8, room):
        for i in sorted(range(len(lengths)), key=lambda i: mix(seed, i)):
            if left * 10 >= room and 1 < lengths[i] <= min(left, most) and not held[i]:
                held[i] = True
                left -= lengths[i]
        if left * 2 < room:
            break
    if held.any() and not held.all():
        return Shards(Documents(file, starts[~held], stops[~held]), Documents(file, starts[held], stops[held]))
    cut = total - room
    before, after = starts < cut, stops > cut
    trained = Documents(file, starts[before], stops[before].clamp(max=cut))
    return Shards(trained, Documents(file, starts[after].clamp(min=cut), stops[after]))


def cache_folder() -> Path:
    """The folder of token files: depthgate in $XDG_CACHE_HOME, or in .cache of the home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "depthgate"
    except RuntimeError:
        raise DepthgateError("there is no home folder to keep token files in: set HOME or XDG_CACHE_HOME") from None


def tokenize(data: str, tokenizer: TextTokenizer, cache: str | Path | None = None) -> TokenFile:
    """The token file of all of `data`, from the cache (`cache_folder` unless given) if it is there and whole."""
    key = hashlib.sha256(f"{VERSION} {fingerprint(data)} {tokenizer.fingerprint()}".encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9]+", "-", Path(data).name).strip("-")[:40] or "data"
    path = Path(cache or cache_folder(), f"{name}-{key[:24]}.tokens")
    if path.exists():
        try:
            found = TokenFile(path)
            if (found.vocab, found.end) != (tokenizer.vocab, tokenizer.end):
                raise DepthgateError(f"token file {path} is of another tokenizer")
            return found
        except DepthgateError as error:
            warnings.warn(f"{error}; making it again", DepthgateWarning, stacklevel=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, documents(data), tokenizer, data)
    except OSError as error:
        why = f"the token cache {path} cannot be written: {error.strerror}"
        raise DepthgateError(f"{why}; name another folder in XDG_CACHE_HOME") from None
    return TokenFile(path, verify=False)


def write(path: Path, texts: Iterable[str], tokenizer: TextTokenizer, title: str = "text") -> None:
    """Tokenize texts into a file, which is whole or not there."""
    for left in path.parent.glob(".*.tokens.*.part"):  # of killed processes, once none can be writing it any more
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE:
                left.unlink()
    vocab, end = tokenizer.vocab, tokenizer.end
    width, code = (2, "H") if vocab <= 2**16 else (4, "I")
    offsets, text_bytes, payload = array("q", [0]), 0, hashlib.sha256()
    with writing(path) as file, Console(stderr=True).status(f"tokenizing {title}") as status:

        def put(part: bytes) -> None:
            payload.update(part)
            file.write(part)

        file.write(bytes(_HEADER_SIZE))
        for batch in _batches(texts):
            for text, ids in zip(batch, tokenizer.encode_many(batch), strict=True):
                if ids and not 0 <= min(ids) <= max(ids) < vocab:
                    raise DepthgateError(f"the tokenizer gave the id {max(ids)}, but its vocabulary has {vocab}")
                put(array(code, [*ids, end]).tobytes())
                offsets.append(offsets[-1] + len(ids) + 1)
                text_bytes += len(text.encode())
            status.update(f"tokenizing {title}  {offsets[-1]:,} tokens")
        put(bytes(-offsets[-1] * width % 8))
        put(offsets.tobytes())
        fields = (_MAGIC, VERSION, width, offsets[-1], len(offsets) - 1, text_bytes, vocab, end)
        head = _HEADER.pack(*fields, bytes(32))[:-32]
        file.seek(0)
        file.write(head + hashlib.sha256(head + payload.digest()).digest())


def _batches(texts: Iterable[str], characters: int = 2**21) -> Iterator[list[str]]:
    """Texts in lists of about `characters`, so that memory is bounded and threads have work."""
    waiting, size = list[str](), 0
    for text in texts:
        waiting.append(text)
        size += len(text)
        if size >= characters:
            yield waiting
            waiting, size = [], 0
    yield waiting


def take(table: Tensor, places: Tensor) -> Tensor:
    """table[places], by numpy: torch splits more than 3000 among threads, and on a busy machine these wait for each
    other a hundred times longer than the work takes."""
    return torch.from_numpy(table.numpy()[places.numpy()])


def mix(*parts: int) -> int:
    """64 well-mixed bits of some whole numbers (splitmix64): the same on every machine and in every version."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state
