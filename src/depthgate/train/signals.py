"""SIGINT and SIGTERM as a wish to stop."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Signals that ask the run to stop after the step it is in; asked again a second later, it stops at once. (Sooner,
    it is the same wish that came by two ways: a terminal and a launcher.)"""
    asked: list[int] = []
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal first
        if not asked:
            first = time.monotonic()
            asked.append(number)
        elif time.monotonic() > first + 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread is told of signals
        yield asked
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
