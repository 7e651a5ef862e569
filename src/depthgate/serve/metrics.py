"""Figures of a server in Prometheus' text format."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from depthgate.generation.text import Generation

_LIMITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # of buckets, in seconds
_ABOUT = {
    "requests_total": "answers by status",
    "requests_running": "sequences that are read or written now",
    "requests_waiting": "sequences that wait for a row",
    "prompt_tokens_total": "tokens of the prompts of finished sequences",
    "generated_tokens_total": "tokens that finished sequences were given",
    "layers_total": "layers of all tokens of finished sequences, taken or skipped",
    "layers_skipped_total": "layers that these tokens skipped",
    "time_to_first_token_seconds": "from the arrival of a request to its first token",
    "token_latency_seconds": "from one token of a sequence to the next",
}


class Metrics:
    """Counters and histograms since the start."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self._times: dict[str, list[int]] = {name: [0] * (len(_LIMITS) + 1) for name in list(_ABOUT)[-2:]}
        self._sums: dict[str, float] = dict.fromkeys(self._times, 0.0)

    def time(self, name: str, seconds: float) -> None:
        """Take in a time for a histogram."""
        self._times[name][bisect_left(_LIMITS, seconds)] += 1
        self._sums[name] += seconds

    def finished(self, result: Generation, layers: int) -> None:
        """Take in a finished sequence of a model with so many layers."""
        whole = layers * len(result.depths)
        read, added, skipped = len(result.prompt_tokens), len(result.tokens), whole - sum(result.depths)
        self._counts.update(prompt_tokens=read, generated_tokens=added, layers=whole, layers_skipped=skipped)

    def text(self, running: int, waiting: int) -> str:
        """The page, with the sequences of now."""
        values = {f"{name}_total": n for name, n in self._counts.items()}
        values |= {"requests_running": running, "requests_waiting": waiting}
        return "".join(f"{line}\n" for name in _ABOUT for line in self._lines(name, values))

    def _lines(self, name: str, values: dict[str, int]) -> Iterator[str]:
        full = f"depthgate_{name}"
        kind = "histogram" if name in self._times else "counter" if name.endswith("_total") else "gauge"
        yield f"# HELP {full} {_ABOUT[name]}"
        yield f"# TYPE {full} {kind}"
        if name == "requests_total":
            yield from (f'{full}{{status="{status}"}} {n}' for status, n in sorted(self.statuses.items()))
        elif kind == "histogram":
            for limit, n in zip((*_LIMITS, "+Inf"), accumulate(self._times[name]), strict=True):
                yield f'{full}_bucket{{le="{limit}"}} {n}'
            yield f"{full}_sum {self._sums[name]}"
            yield f"{full}_count {sum(self._times[name])}"
        else:
            yield f"{full} {values.get(name, 0)}"
