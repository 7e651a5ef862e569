"""Beam search: the likeliest continuations of one prompt, several at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from depthgate.data.tokenizer import TextTokenizer
from depthgate.generation.config import Sampling
from depthgate.generation.sampling import check_logits


@dataclass
class Beam:
    """A continuation: its tokens, the sum of their log-probabilities, and the layers that prompt and tokens but the
    last went through."""

    tokens: list[int]
    score: float
    depths: list[int]
    routed: list[int]
    finish: str | None = None

    @property
    def mean(self) -> float:
        """Log-probability a token, by which beams are compared."""
        return self.score / max(1, len(self.tokens))


class Beams:
    """A search for the best continuation of one prompt, where the context has room for `room` tokens."""

    def __init__(self, sampling: Sampling, tokenizer: TextTokenizer, room: int, routed_layers: int) -> None:
        self.width, self.stops, self.tokenizer = sampling.beams, sampling.stops, tokenizer
        self.most, self.at_most = sampling.most_tokens(room)
        self.going = [Beam([], 0.0, [], [0] * routed_layers)]
        self.finished: list[Beam] = []
        self.best = self.going[0]  # of all, finished or not

    def advance(self, logits: Tensor, depths: list[list[int]], routed: list[list[int]]) -> list[int]:
        """Extend every beam by a token, given the logits (B, V) of the beams and, for each, the layers of the tokens
        just computed and how many of these entered each routed layer. The rows to go on with; none at the end."""
        check_logits(logits)
        count = len(self.going[0].tokens) + 1
        ways = [
            (beam.depths + more, [a + b for a, b in zip(beam.routed, counts, strict=True)])
            for beam, more, counts in zip(self.going, depths, routed, strict=True)
        ]
        scores = logits.log_softmax(-1) + torch.tensor([[beam.score] for beam in self.going], device=logits.device)
        # Twice as many as are kept: half of them may end here.
        best = scores.flatten().topk(min(2 * self.width, scores.numel()))
        parents: list[int] = []
        going: list[Beam] = []
        for score, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            parent, token = divmod(place, scores.shape[1])
            beam = Beam([*self.going[parent].tokens, token], score, *ways[parent])
            beam.finish = self._finish(beam.tokens)
            if beam.finish is not None:
                self.finished.append(beam)
            elif len(going) < self.width:
                parents.append(parent)
                going.append(beam)
        self.finished = sorted(self.finished, key=lambda beam: -beam.mean)[: self.width]
        self.going = going
        if count == self.most:
            for beam in going:
                beam.finish = self.at_most
        self.best = max([*self.finished, *going], key=lambda beam: beam.mean)
        settled = len(self.finished) == self.width and all(self.finished[-1].mean >= beam.mean for beam in going)
        return [] if count == self.most or settled else parents

    def _finish(self, tokens: list[int]) -> str | None:
        if tokens[-1] == self.tokenizer.end:
            return "end"
        text = self.tokenizer.decode(tokens) if self.stops else ""
        return "stop" if any(stop in text for stop in self.stops) else None
