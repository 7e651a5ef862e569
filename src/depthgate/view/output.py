"""Where pages and pictures go: checked before any work is done, and written whole or not at all."""

import os
from pathlib import Path

from depthgate.errors import DepthgateError


def check_out(path: Path) -> Path:
    """The file, if it may be one."""
    if path.is_dir() or not path.parent.is_dir():
        raise DepthgateError(f"out is {path}: name a file in a folder that exists")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise DepthgateError(f"cannot write {path} (Permission denied): name another file")
    return path


def write(path: Path, content: str | bytes) -> None:
    """What `replace` does, for a file that the user has named."""
    try:
        replace(path, content)
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
