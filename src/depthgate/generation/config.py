"""How a token is chosen. Imports no torch."""

import math
from dataclasses import dataclass

from depthgate.errors import InvalidValueError, check_count
from depthgate.options import DEVICES, Options, choice, count, number, positive, repeatable, switch


@dataclass(frozen=True)
class Sampling(Options):
    """How the next token is chosen. The filters work in this order, as Hugging Face's do.

    Args:
        repetition_penalty: what the logit of a token that occurred is divided by, or multiplied by where it is negative
        temperature: what logits are divided by; 0 always takes the best token
        top_k: keep this many of the best tokens, and those that tie with the last of them
        top_p: keep the fewest best tokens that have this probability together
        min_p: keep tokens of at least this share of the best one's probability
    """

    temperature: float = number(1.0, 0, math.inf, "[)", ", where 0 takes the best token")
    top_k: int | None = count(None)
    top_p: float | None = number(None, 0, 1, "(]", ", where 1 keeps every token")
    min_p: float | None = number(None, 0, 1, "[]", ", where 0 keeps every token")
    repetition_penalty: float = positive(1.0)

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken, and no random number is needed."""
        return self.temperature == 0

    def check_beams(self, beams: int) -> None:
        """Refuse a number of beams, or beams with options that would have no say."""
        if check_count(beams, "beams") > 1 and self not in (Sampling(), Sampling(temperature=0.0)):
            raise InvalidValueError(
                f"beams is {beams}: a search takes the likeliest, so leave temperature, top_k, top_p, min_p and "
                "repetition_penalty out"
            )


@dataclass(frozen=True)
class GenerateConfig(Options):
    """Continue a text, or several; without a prompt, line by line as you type.

    Args:
        model: folder of a run, or of one of its checkpoints
        prompt: text to continue; may be given several times
        max_new_tokens: tokens to add at most
        temperature: 0 takes the likeliest token; 1 samples as the model says
        top_k: sample among this many of the likeliest tokens
        top_p: sample among the likeliest tokens that together have this probability
        min_p: leave out tokens less likely than this share of the likeliest
        repetition_penalty: above 1 makes tokens that were there less likely
        stop: text at which to end; may be given several times
        seed: seed of the sampling of every prompt
        beams: keep this many of the likeliest continuations, instead of sampling
        no_cache: compute everything again for each token; the same text, slower
        depth: colour each token by how many layers it went through
        chunk: tokens of a prompt computed at once
        device: cpu, cuda, or auto
    """

    model: str
    prompt: list[str] | None = repeatable()
    max_new_tokens: int = count(128)
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: list[str] | None = repeatable()
    seed: int = count(0, minimum=0, maximum=2**63 - 1)
    beams: int = count(1)
    no_cache: bool = switch()
    depth: bool = switch()
    chunk: int = count(512)
    device: str = choice("auto", DEVICES)

    def check_together(self) -> None:
        for name in ("prompt", "stop"):
            if any(not isinstance(text, str) or not text for text in getattr(self, name) or []):
                raise InvalidValueError(f"a {name} is empty, or not text: give some, or leave it out")
        self.sampling.check_beams(self.beams)
        if self.beams > 1 and not self.prompt:
            raise InvalidValueError(f"beams is {self.beams}: a search needs a --prompt")

    @property
    def sampling(self) -> Sampling:
        """The options of sampling alone."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)
