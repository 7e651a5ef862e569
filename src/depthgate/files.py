"""Work that may be interrupted: files and folders that are written whole or not at all (under a temporary name, to the
disk, then renamed), and handlers of signals."""

import json
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any

from depthgate.errors import DepthgateError


def replace(path: Path, content: str | bytes) -> None:
    """Put a file in place of what was there, at once."""
    with writing(path) as file:
        file.write(content.encode(errors="replace") if isinstance(content, str) else content)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Put plain data in place of what was there, at once."""
    replace(path, json.dumps(value, indent=1))


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` when the block ends without an error."""
    part = _part(path.parent, path.name)
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path, last: str | None = None) -> Iterator[Path]:
    """A new folder to fill, which becomes `target` when the block ends without an error. With `last`, `target` is a
    folder that exists: the files move into it one by one, the one named `last` at the end."""
    part = _part(target.parent if last is None else target, target.name)
    try:
        part.mkdir(parents=True)
        yield part
        for name in os.listdir(part):
            sync(part / name)
        sync(part)
        if last is None:
            os.rename(part, target)
        else:
            for name in sorted(os.listdir(part), key=lambda name: (name == last, name)):
                os.replace(part / name, target / name)
        sync(part.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def handled(handler: Callable[..., Any], *numbers: signal.Signals) -> Iterator[None]:
    """Have a function called for these signals; not outside the main thread, which alone is told of them."""
    before = {}
    with suppress(ValueError):
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual or signal.SIG_DFL)  # None: not set by Python


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_hub_name(name: str) -> bool:
    """True for what may name a model on the hub (owner/name), and is not a path of this machine."""
    odd = name.startswith((".", "/", "~"))
    return name.count("/") == 1 and not odd and not os.path.exists(name) and not os.path.exists(Path(name).parent)


def not_a_folder(name: str, remedy: str) -> DepthgateError:
    """The error of a name that is not a folder's: of a model on the hub, perhaps."""
    if is_hub_name(name):
        remedy = (
            f"if it is on the hub, fetch it (hf download {name} --local-dir {Path(name).name}) and give that folder"
        )
    return DepthgateError(f"{name} is not a folder: {remedy}")


def check_no_part(folder: Path) -> None:
    """Refuse a folder without a model's config.json that holds an adapter of PEFT, or a part of a run of finetune."""
    there = os.path.isfile  # False, and no error, in a folder that is closed to us
    if there(folder / "adapter_config.json") and not there(folder / "config.json"):
        how = "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(OTHER)"
        raise DepthgateError(f"{folder} is an adapter of PEFT, and no model: merge it first, as {how} does")
    begun = there(folder / "finetune.json") and not there(folder / "config.json")
    if begun or there(folder.parent / "finetune.json"):
        what = f"{folder} is of a run of depthgate finetune that has not finished, or a checkpoint of one, and no model"
        raise DepthgateError(f"{what}: go on with the same command and --resume, or give the run's folder")


def leftovers(target: Path) -> list[Path]:
    """What killed processes have begun to write for `target`, and not that of `target.more`."""
    return list(target.parent.glob(f".{escape(target.name[:200])}.{'[0-9a-f]' * 8}.part"))


def _part(parent: Path, name: str) -> Path:
    return parent / f".{name[:200]}.{secrets.token_hex(4)}.part"


def check_outs(*paths: str | Path | None) -> list[Path]:
    """The files that a user has named for output, checked before any work is done."""
    outs = [Path(path) for path in paths if path is not None]
    if len({os.path.realpath(out) for out in outs}) < len(outs):
        raise DepthgateError("two outputs have the same name: give each a file of its own")
    for out in outs:
        real = Path(os.path.realpath(out))  # a link stays, and the file that it points to is written
        if out.is_dir() or not real.parent.is_dir():
            raise DepthgateError(f"out is {out}: name a file in a folder that exists")
        # Replacing a device, a pipe or a stream of the system (/dev/stdout) would remove it.
        stream = out.is_symlink() and out.absolute().parts[1] in ("dev", "proc")
        if stream or (out.exists() and not out.is_file()):
            raise DepthgateError(f"out is {out}: it is not a regular file, name another")
        if not os.access(real.parent, os.W_OK) or (real.exists() and not os.access(real, os.W_OK)):
            raise DepthgateError(f"cannot write {out} (Permission denied): name another file")
    return outs


def write(path: Path, content: str | bytes) -> None:
    """Put a file that a user has named in place of what was there, at once."""
    check_outs(path)
    try:
        replace(Path(os.path.realpath(path)), content)
    except OSError as error:
        raise DepthgateError(f"cannot write {path} ({error.strerror}): name another file") from None
