"""Where pages and pictures go: checked before any work is done, and written whole or not at all."""

import os
from collections.abc import Sequence
from pathlib import Path

from depthgate.errors import DepthgateError


def check_outs(paths: Sequence[str | None]) -> list[Path]:
    """The files that are named, if they may be some and none is named twice."""
    outs = [check_out(Path(path)) for path in paths if path is not None]
    if len({os.path.realpath(out) for out in outs}) < len(outs):
        raise DepthgateError("two outputs have one name: give each a file of its own")
    return outs


def check_out(path: Path) -> Path:
    """The file, if it may be one."""
    real = Path(os.path.realpath(path))  # a link stays, and what it names is written
    if path.is_dir() or not real.parent.is_dir():
        raise DepthgateError(f"out is {path}: name a file in a folder that exists")
    # A page takes the place of what was there: a device or a pipe would be gone, and so would a stream of the system.
    stream = path.is_symlink() and path.absolute().parts[1] in ("dev", "proc")
    if stream or (path.exists() and not path.is_file()):
        raise DepthgateError(f"out is {path}: it is no regular file, name another")
    if not os.access(real.parent, os.W_OK) or (real.exists() and not os.access(real, os.W_OK)):
        raise DepthgateError(f"cannot write {path} (Permission denied): name another file")
    return path


def write(path: Path, content: str | bytes) -> None:
    """What `replace` does, for a file that the user has named."""
    try:
        replace(Path(os.path.realpath(check_out(path))), content)
    except OSError as error:
        raise DepthgateError(f"cannot write {path} ({error.strerror}): name another file") from None


def replace(path: Path, content: str | bytes) -> None:
    """Put a file in place of what was there, at once."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
