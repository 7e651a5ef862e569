"""Figures of a server in Prometheus' text format."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from depthgate.generation.text import Generation

_FIRST, _NEXT = "time_to_first_token_seconds", "token_latency_seconds"
_LIMITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # of buckets, in seconds
_ABOUT = {
    "requests_total": "answers by status",
    "requests_running": "sequences that are read or written now",
    "requests_waiting": "sequences that wait for a row",
    "prompt_tokens_total": "tokens of the prompts of finished sequences",
    "generated_tokens_total": "tokens that finished sequences were given",
    "layers_total": "layers of all tokens of finished sequences, taken or skipped",
    "layers_skipped_total": "layers that these tokens skipped",
    _FIRST: "from the arrival of a request to the first token of a sequence",
    _NEXT: "from one token of a sequence to the next",
}


class Metrics:
    """Counters and histograms since the start."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self._times = {name: [0] * (len(_LIMITS) + 1) for name in (_FIRST, _NEXT)}  # in each bucket
        self._sums = dict.fromkeys(self._times, 0.0)

    def token(self, now: float, arrived: float, last: float | None) -> None:
        """Take in a token of a request that arrived then, and had its last token then, or none."""
        name, seconds = (_FIRST, now - arrived) if last is None else (_NEXT, now - last)
        self._times[name][bisect_left(_LIMITS, seconds)] += 1
        self._sums[name] += seconds

    def finished(self, result: Generation, layers: int) -> None:
        """Take in a finished sequence of a model with so many layers."""
        whole = layers * len(result.depths)
        read, added, skipped = len(result.prompt_tokens), len(result.tokens), whole - sum(result.depths)
        self._counts.update(prompt_tokens=read, generated_tokens=added, layers=whole, layers_skipped=skipped)

    def text(self, running: int, waiting: int) -> str:
        """The page, with the sequences of now."""
        now = {"requests_running": running, "requests_waiting": waiting}
        return "".join(f"{line}\n" for name in _ABOUT for line in self._lines(name, now))

    def _lines(self, name: str, now: dict[str, int]) -> Iterator[str]:
        full = f"depthgate_{name}"
        yield f"# HELP {full} {_ABOUT[name]}"
        yield f"# TYPE {full} {'histogram' if name in self._times else 'gauge' if name in now else 'counter'}"
        if name == "requests_total":
            yield from (f'{full}{{status="{status}"}} {n}' for status, n in sorted(self.statuses.items()))
        elif name in self._times:
            for limit, n in zip((*_LIMITS, "+Inf"), accumulate(self._times[name]), strict=True):
                yield f'{full}_bucket{{le="{limit}"}} {n}'
            yield f"{full}_sum {self._sums[name]}"
            yield f"{full}_count {sum(self._times[name])}"
        else:
            yield f"{full} {now.get(name, self._counts[name.removesuffix('_total')])}"
