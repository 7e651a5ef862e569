"""How long cells will take: from cells that were run, or from a few steps of a small and of a large model."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from depthgate.flops import training_flops
from depthgate.isoflop.grid import Cell
from depthgate.model import Decoder

_OVERHEAD = 5.0  # seconds of a cell besides its training steps
_COMPILED = 30.0  # more, where it is compiled first


class Speed:
    """FLOPs a second, as a function of the FLOPs a token costs."""

    def __init__(self, rows: Sequence[dict[str, Any]], device: str) -> None:
        self.device = device
        self.known: list[tuple[float, float]] = []  # FLOPs a token, FLOPs a second
        for row in rows:
            self.learn(row)

    def learn(self, row: dict[str, Any]) -> None:
        """Of a finished cell."""
        if row.get("device") == self.device and row.get("seconds"):
            self.known.append((row["flops_per_token"], row["flops"] / row["seconds"]))

    def left(self, cells: Iterable[Cell]) -> str:
        """About how long cells take together, where any has been run."""
        return f"; about {duration(sum(map(self.seconds, cells)))} left" if self.known else ""

    def seconds(self, cell: Cell) -> float:
        """About how long a cell takes; not a number where nothing is known."""
        if not self.known:
            return math.nan
        cost = training_flops(cell.training.model)
        rate = min(self.known, key=lambda known: abs(math.log(known[0] / cost)))[1]
        return cell.flops / rate + _OVERHEAD + (_COMPILED if cell.training.compile else 0.0)

    def probe(self, cells: Sequence[Cell]) -> None:
        """Where nothing is known yet, measure the cheapest and the dearest model, if their device is here."""
        if self.known or (self.device == "cuda" and not torch.cuda.is_available()):
            return
        ordered = sorted(cells, key=lambda cell: training_flops(cell.training.model))
        for cell in (ordered[0], ordered[-1]):
            self.known.append((training_flops(cell.training.model), self._rate(cell)))

    def _rate(self, cell: Cell) -> float:
        """FLOPs a second of forward and backward over a sequence, or a few on a GPU."""
        model = cell.training.model
        net = Decoder(model).to(self.device)
        rows = 1 if self.device == "cpu" else min(8, cell.training.batch)
        tokens = torch.randint(model.vocab, (rows, model.context), device=self.device)
        seconds = []
        for _ in range(3):
            self._wait()
            start = time.perf_counter()
            net.loss(tokens, tokens)[0].backward()  # type: ignore[no-untyped-call]
            self._wait()
            seconds.append(time.perf_counter() - start)
        return training_flops(model) * tokens.numel() / min(seconds)

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def duration(seconds: float) -> str:
    """For a reader: 45 s, 12 min, 3.5 h."""
    if math.isnan(seconds):
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
