"""The terminal: tables, and streams that survive a reader who leaves or a full disk."""

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import zip_longest
from typing import Any

from depthgate.errors import DepthgateWarning


class _Log:
    """stderr; what cannot be written there is lost, and the run goes on."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.stream, name)
        return partial(self._try, found) if name in ("write", "flush") else found

    def _try(self, action: Callable[..., Any], *given: str) -> Any:
        try:
            return action(*given)
        except OSError:
            silence(self.stream)


def silence(stream: Any) -> None:
    """Send what a stream still holds to nowhere, so that the end of the process does not fail on it."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def guarded() -> Iterator[None]:
    """Streams that are safe to write to, and short warnings."""
    while (free := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # a stream was closed: no file of ours may get its number, and with it what is printed there
    os.close(free)
    log, usual = sys.stderr, warnings.formatwarning

    def short(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None) -> str:
        ours = issubclass(category, DepthgateWarning)
        return f"depthgate: warning: {message}\n" if ours else usual(message, category, filename, lineno, line)

    # It says that norms are slower: weights in float32 and products in bfloat16 are what was asked for.
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    sys.stderr, warnings.formatwarning = _Log(log or open(os.devnull, "w")), short  # noqa: SIM115
    try:
        yield
    finally:
        try:
            print(end="", flush=True)  # now, and not when the interpreter ends, which cannot say what failed
        except OSError:
            silence(sys.stdout)
        sys.stderr, warnings.formatwarning = log, usual


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """A table on stdout: names in the first column, figures in the others; no cell is cut, however long. On a terminal
    that is too narrow, a line for each figure under the name."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip_longest(*lines, fillvalue="")]
    if title:
        print(title)
    if sys.stdout.isatty() and sum(widths) + 2 * len(widths) - 2 > shutil.get_terminal_size().columns:
        for name, *figures in lines[1:]:
            print("\n  ".join([name, *map(": ".join, zip(columns[1:], figures, strict=False))]))
        return
    lines.insert(1, ["-" * width for width in widths])
    for name, *figures in lines:
        cells = [name.ljust(widths[0]), *map(str.rjust, figures, widths[1:])]
        print("  ".join(cells).rstrip())
