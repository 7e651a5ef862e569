"""Sources of text, read one document at a time.

`data` is a text file, a glob, .jsonl, any of these as .gz, .xz or .zst, a folder, `stdlib` (the Python standard
library's own source), or a Hugging Face dataset: `hf:NAME[:CONFIG[:SPLIT]]`, or a bare `owner/name` that is not a path.
Before a path, `whole:` makes every .txt file one document.

Documents within a file: every line of .jsonl is one, its field `text` or `content`. A .txt file, or one without suffix,
is cut at every `<|endoftext|>`; where its first 4 MiB have no such mark, also at two or more blank lines, as stand
between the articles of Wikipedia text. Any other file, such as .py and .md, is one document, exactly as it is.
"""

import glob
import gzip
import hashlib
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from depthgate.errors import DepthgateError, InvalidValueError, near

MARK = "<|endoftext|>"
WHOLE = "whole:"
_CUT = (".txt", "")  # kinds of files that are cut into documents
PACKED = (".gz", ".xz", ".zst")
FOLDER_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
_PEEK = 2**22  # how much of a .txt file is searched for MARK before blank lines count
_HASHED = 2**26  # data of up to 64 MiB is told apart by content; more, by path, size and time of change
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_DATASET = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")


def documents(data: str) -> Iterator[str]:
    """The documents of `data` in a fixed order, none of them empty; an error where all of them are blank."""
    blank, name = True, _dataset_name(data)
    read = partial(_file_documents, whole=data.startswith(WHOLE))
    for text in _dataset(name) if name else chain.from_iterable(map(read, source_files(data))):
        if text:
            blank = blank and text.isspace()
            yield text
    if blank:
        raise DepthgateError(f"data {data!r} holds no text: give a file with at least one document")


def fingerprint(data: str) -> str:
    """A hash that changes when the text of `data` does, and reads at most 64 MiB. A hub's dataset is its name alone."""
    if name := _dataset_name(data):
        return hashlib.sha256(f"hf:{name}".encode()).hexdigest()
    files, found = source_files(data), hashlib.sha256(WHOLE.encode() if data.startswith(WHOLE) else b"")
    by_content = sum(path.stat().st_size for path in files) <= _HASHED
    for path in files:
        stat = path.stat()
        known_by = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
        if by_content:
            with _named_errors(path):
                known_by = f"{''.join(_suffixes(path))} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        found.update(f"{known_by}\n".encode())
    return found.hexdigest()


def source_files(data: str) -> list[Path]:
    """The files that `data` names, sorted; an error where there is none."""
    data = data.removeprefix(WHOLE)
    if not data or "\0" in data:
        raise InvalidValueError(f"data is {data!r}: it must name a file, a glob, a folder, a dataset or stdlib")
    path = Path(sysconfig.get_paths()["stdlib"] if data == "stdlib" else data).expanduser()
    try:
        if path.is_file():
            return [path]
        if path.is_dir():
            return _folder_files(path, data)
        exists = path.exists()
    except OSError as error:
        raise DepthgateError(f"data {data!r} cannot be read: {error.strerror}") from None
    files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
    if not files:
        nearest = near(str(path), map(str, path.parent.glob("*")))
        why = f"does not exist{nearest or ': give a file, a glob, a folder, hf:NAME or stdlib'}"
        if exists:
            why = "is neither a file nor a folder: write it to a file first"
        elif glob.has_magic(data):
            why = "matches no file: change the pattern (** goes into folders)"
        raise DepthgateError(f"data {data!r} {why}")
    return files


def cut_note(data: str, documents: int) -> str:
    """A sentence for the user where .txt files were cut into documents."""
    files = [] if _dataset_name(data) or data.startswith(WHOLE) else source_files(data)
    cut = documents > len(files) and any(_suffixes(path)[0] in _CUT for path in files)
    return f"; .txt is cut at {MARK}, or else at two blank lines: not with --data {WHOLE}{data}" if cut else ""


def _folder_files(root: Path, data: str) -> list[Path]:
    """The text files under a folder, sorted; without hidden ones and, in the standard library, tests and packages."""
    kinds, skipped = ((".py",), _SKIPPED) if data == "stdlib" else (FOLDER_SUFFIXES, {"__pycache__"})
    files = []

    def unreadable(error: OSError) -> None:
        raise DepthgateError(f"folder {error.filename} cannot be read: {error.strerror}")

    for folder, inside, names in os.walk(root, onerror=unreadable):
        inside[:] = [name for name in inside if not name.startswith(".") and name not in skipped]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        files += [path for path in paths if _suffixes(path)[0] in kinds and path.is_file()]
    if not files:
        what = f"data {data!r} is a folder without text ({' '.join(kinds)}, also packed as {' '.join(PACKED)})"
        raise DepthgateError(f"{what}: for other files give a glob such as '{root}/**/*.c'")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _suffixes(path: Path) -> tuple[str, str]:
    """Suffix of what is inside, and of the packing or nothing."""
    outer = path.suffix.lower()
    return (Path(path.stem).suffix.lower(), outer) if outer in PACKED else (outer, "")


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turn what a damaged or unreadable file raises into an error that names the file."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise DepthgateError(f"{path} is damaged or cut short: {error}; fetch it again") from None
    except OSError as error:
        raise DepthgateError(f"{path} cannot be read: {error.strerror or error}") from None


def _zst_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of all frames; one that is cut short is an error (the package's own reader ends in silence)."""
    import zstandard

    frame, chunk, left = None, b"", b""
    while chunk := chunk or file.read(2**17):
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        try:
            *lines, left = (left + frame.decompress(chunk)).split(b"\n")
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from None
        yield from (line + b"\n" for line in lines)
        chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the last frame does not end")
    yield from [left] if left else []


def _file_documents(path: Path, whole: bool) -> Iterator[str]:
    kind, lines = _suffixes(path)[0], _lines(path)
    if kind == ".jsonl":
        yield from (_text_of(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if not line.isspace())
    elif kind in _CUT and not whole:
        yield from _plain(lines)
    else:
        yield "".join(lines)


def _lines(path: Path) -> Iterator[str]:
    """Decoded lines with their ends. No UTF-8 sequence spans two lines, so an error has an exact place."""
    offset = 0
    with _named_errors(path), path.open("rb") as file:
        unpack: Any = {".gz": gzip.open, ".xz": lzma.open, ".zst": _zst_lines}.get(_suffixes(path)[1], iter)
        for raw in unpack(file):
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                place = f"byte {raw[error.start]:#04x} at offset {offset + error.start}"
                remedy = f"convert it to UTF-8 (packed files must end in {', '.join(PACKED)})"
                raise DepthgateError(f"{path} is not UTF-8 text: {place}; {remedy}") from None
            yield line.removeprefix("\ufeff") if offset == 0 else line
            offset += len(raw)


def _plain(lines: Iterator[str]) -> Iterator[str]:
    """Documents between marks, or blank lines (see above), without the line ends around them."""
    head, size, marked = list[str](), 0, False
    while not marked and size < _PEEK and (line := next(lines, "")):
        head.append(line)
        size += len(line)
        marked = MARK in line
    parts, blank = list[str](), 0
    for line in chain(head, lines):
        if blank > 1 and not marked and not line.isspace():
            yield "".join(parts).strip("\r\n")
            parts = []
        blank = blank + 1 if line.isspace() else 0
        parts.append(line)
        if MARK in line:
            *done, rest = "".join(parts).split(MARK)
            yield from (text.strip("\r\n") for text in done)
            parts = [rest]
    yield "".join(parts).strip("\r\n")


def _text_of(record: Any, place: str) -> str:
    """The text of a record, which may be a line of JSON."""
    try:
        record = json.loads(record) if isinstance(record, str) else record
    except (ValueError, RecursionError) as error:
        raise DepthgateError(f"{place} is not JSON: {error}") from None
    text = record.get("text", record.get("content")) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DepthgateError(f"{place} has no text: it must be an object with a string named text or content")
    utf8(text, place)
    return text


def utf8(text: str, place: str = "text") -> bytes:
    """The bytes of a text; half a surrogate pair has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DepthgateError(f"{place} holds half a surrogate pair at character {error.start}: remove it") from None


def _dataset_name(data: str) -> str | None:
    """The dataset that `data` names; None where it is a path."""
    if data.startswith("hf:"):
        return data.removeprefix("hf:")
    looks = _DATASET.fullmatch(data) and _suffixes(Path(data))[0] not in FOLDER_SUFFIXES
    return data if looks and not Path(data).exists() and not Path(data).parent.exists() else None


def _dataset(name: str) -> Iterator[str]:
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        remedy = "to read it as a Hugging Face dataset, install the package datasets (pip install 'depthgate[data]')"
        raise DepthgateError(f"data {name!r} is not a file or folder; {remedy}") from None
    path, config, split = [*name.split(":"), "", ""][:3]
    try:
        records = load_dataset(path, config or None, split=split or "train", streaming=True)
        for number, record in enumerate(records):
            yield _text_of(record, f"dataset {name}, record {number}")
    except DepthgateError:
        raise
    except Exception as error:  # the hub, the network and every loader have errors of their own
        raise DepthgateError(f"the Hugging Face dataset {name!r} cannot be read: {error}") from None
