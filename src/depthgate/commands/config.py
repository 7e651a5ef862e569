"""Options of verbs that have no package of their own. Imports no torch."""

from dataclasses import dataclass

from depthgate.errors import InvalidValueError, check_count
from depthgate.options import DEVICES, Options, choice, count, whole_numbers


@dataclass(frozen=True)
class BenchConfig(Options):
    """Time how fast models read and write, and measure the memory they take, next to the first of them.

    Args:
        models: folders of runs or of Hugging Face models, dense or converted, separated by commas
        data: text that they read, as for depthgate train; what the first model's run held out unless given
        batch: numbers of sequences computed at once, separated by commas
        context: numbers of tokens read of each sequence, separated by commas; 512 or what fits unless given
        new_tokens: tokens of each that are written
        repeats: how often the text is read
        dtype: float32, bfloat16, or auto: on a CPU float32, else what each is stored in
        device: cpu, cuda, or auto
    """

    models: str
    data: str | None = None
    batch: str | int = "1,8"
    context: str | int | None = None
    new_tokens: int = count(32)
    repeats: int = count(5)
    dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    device: str = choice("auto", DEVICES)

    def check_together(self) -> None:
        for batch in self.batch_sizes:
            check_count(batch, "batch")
        for context in self.contexts(2**31):
            check_count(context, "context")

    @property
    def folders(self) -> list[str]:
        """`models` as names."""
        return self.models.split(",")

    @property
    def batch_sizes(self) -> list[int]:
        """`batch` as numbers."""
        return whole_numbers(self.batch, "batch")

    def contexts(self, room: int) -> list[int]:
        """`context` as numbers, for models with room for so many tokens."""
        given = min(512, max(1, room - self.new_tokens)) if self.context is None else self.context
        found = whole_numbers(given, "context")
        if max(found) + self.new_tokens > room:
            new = f"{self.new_tokens} new tokens follow, but a model has room for {room}"
            raise InvalidValueError(f"context is {given}, and {new}: ask for less of either")
        return found


@dataclass(frozen=True)
class PresetsConfig(Options):
    """List the presets of depthgate train, with parameters and FLOPs."""


@dataclass(frozen=True)
class DemoConfig(Options):
    """Train tiny-mod and, with as many FLOPs, tiny-dense; sample from both and write a report.

    Args:
        out: folder of both runs and of report.html
        steps: optimizer steps of tiny-mod; tiny-dense takes as many as cost the same
        data: text, as for depthgate train
        seed: seed of weights, of the order of the data, and of the samples
    """

    out: str = "runs/demo"
    steps: int = count(250)
    data: str = "stdlib"
    seed: int = count(0, minimum=0)
