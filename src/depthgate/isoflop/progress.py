"""What a study says while it runs."""

import sys
from collections.abc import Sequence
from typing import Any

from depthgate.isoflop.estimate import Speed
from depthgate.isoflop.grid import Cell


def short(error: Exception) -> str:
    """Its first line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class Progress:
    """One line for every cell that begins or ends, with the time that is left, on stderr."""

    def __init__(self, missing: Sequence[Cell], total: int, speed: Speed) -> None:
        self.left = {cell.name: cell for cell in missing}
        self.done, self.total, self.speed = total - len(missing), total, speed
        if self.done and missing:
            self._say(f"{self.done} of {total} cells are finished")

    def begins(self, cell: Cell) -> None:
        steps = f"{cell.training.steps:,} steps, {cell.params:,} weights"
        self._say(f"cell {self.done + 1} of {self.total}: {cell.name} ({steps}){self.speed.left(self.left.values())}")

    def ends(self, cell: Cell, outcome: dict[str, Any] | Exception) -> None:
        self.left.pop(cell.name, None)
        self.done += 1
        if isinstance(outcome, Exception):
            self._say(f"{cell.name} failed: {short(outcome)}")
            return
        self.speed.learn(outcome)
        said = f"causal loss {outcome['loss_causal']:.4f} after {outcome['seconds']:.0f} s"
        self._say(f"{self.done} of {self.total}: {cell.name}: {said}")

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
