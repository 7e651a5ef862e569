"""Options of generation, each named once. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from depthgate.errors import InvalidValueError, check_count
from depthgate.options import DEVICES, Options, choice, count, number, option, repeatable, required


def _check_seed(seed: Any, name: str) -> None:
    if not isinstance(seed, int | Sequence) or isinstance(seed, str | bytes):
        raise InvalidValueError(f"{name} is {seed!r}: give a whole number, or one for each prompt")
    for each in [seed] if isinstance(seed, int) else seed:
        check_count(each, name, minimum=0, maximum=2**63 - 1)


def _check_stop(stop: Any, name: str) -> None:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or any(not isinstance(text, str) or not text for text in texts):
        raise InvalidValueError(f"{name} is {stop!r}: give a text, or a list of texts, none of them empty")


@dataclass(frozen=True)
class Sampling(Options):
    """The choice of each next token, and when to end. The filters work in the order of Hugging Face's:
    repetition_penalty, temperature, top_k, top_p, min_p."""

    temperature: float = number(1.0, "[0, inf)", "divides the logits; 0: the likeliest token, 1: as the model says")
    top_k: int | None = count(None, "sample among this many of the likeliest tokens, and those that tie with the last")
    top_p: float | None = number(
        None, "(0, 1]", "sample among the fewest likeliest tokens that together have this probability"
    )
    min_p: float | None = number(None, "[0, 1]", "leave out tokens less likely than this share of the likeliest one")
    repetition_penalty: float = number(1.0, "(0, inf)", "above 1 makes tokens of prompt and text less likely")
    max_new_tokens: int = count(128, "tokens to add at most")
    stop: str | Sequence[str] | None = option((), "text at which to end, or several", _check_stop)
    seed: int | Sequence[int] = option(0, "seed of the sampling of every prompt, or one for each", _check_seed)
    beams: int = count(1, "search with this many of the likeliest continuations, instead of sampling")

    def check_together(self) -> None:
        filters = (self.top_k, self.top_p, self.min_p, self.repetition_penalty)
        if self.beams > 1 and (filters != (None, None, None, 1) or self.temperature not in (0, 1)):
            raise InvalidValueError(
                f"beams is {self.beams}: a search takes the likeliest, so leave temperature, top_k, top_p, min_p and "
                "repetition_penalty out"
            )

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def most_tokens(self, room: int) -> tuple[int, str]:
        """The most tokens to add where a context has this much room, and the reason: length or context."""
        return min(self.max_new_tokens, room), "length" if self.max_new_tokens <= room else "context"

    def seeds(self, prompts: int) -> list[int]:
        seeds = [self.seed] * prompts if isinstance(self.seed, int) else list(self.seed)
        if len(seeds) != prompts:
            raise InvalidValueError(f"seed has {len(seeds)} numbers for {prompts} prompts: give one, or one for each")
        return seeds


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Sampling):
    """Continue a text, or several; without a prompt, line by line as you type."""

    model: str = required("folder of a run, of one of its checkpoints, or of a Hugging Face model")
    prompt: list[str] | None = repeatable("text to continue; may be given several times")
    stop: list[str] | None = repeatable("text at which to end; may be given several times")
    seed: int = count(0, "seed of the sampling of every prompt", minimum=0, maximum=2**63 - 1)
    no_cache: bool = option(False, "compute everything again for each token; the same text, slower")
    depth: bool = option(False, "colour each token by how many layers it went through")
    chunk: int | None = count(None, "tokens of a prompt computed at once; unless given 512, on CUDA 2,048")
    device: str = choice("auto", DEVICES, "cpu, cuda, or auto")

    def check_together(self) -> None:
        super().check_together()
        _check_stop(self.stops, "stop")
        if any(not isinstance(text, str) or not text for text in self.prompt or []):
            raise InvalidValueError("a prompt is empty, or not text: give some, or leave it out")
        if self.beams > 1 and not self.prompt:
            raise InvalidValueError(f"beams is {self.beams}: a search needs a --prompt")
