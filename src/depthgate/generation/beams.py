"""Beam search: the likeliest continuations, several at a time, each with its own rows of the cache."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from depthgate.data.tokenizer import TextTokenizer
from depthgate.generation.engine import Event, Forward, journey
from depthgate.generation.prompts import Generation
from depthgate.generation.sampling import check_logits


@dataclass
class _Beam:
    """A continuation: its tokens, the sum of their log-probabilities, and where all tokens before the last went."""

    tokens: list[int]
    score: float
    depths: list[int]
    routed: list[int]
    finish: str | None = None

    @property
    def mean(self) -> float:
        """What beams are compared by: log-probability a token."""
        return self.score / max(1, len(self.tokens))


@torch.inference_mode()
def search(
    forward: Forward,
    todo: list[Generation],
    width: int,
    max_new_tokens: int,
    stop: Sequence[str],
    tokenizer: TextTokenizer | None,
) -> Generator[Event]:
    """The best continuation of every prompt by log-probability a token; prompts are searched one after another, and
    the tokens of each come when it is found, the text with the last. Where it is interrupted, the prompt under way
    keeps the best so far."""
    for number, result in enumerate(todo):
        result.routed = [0] * len(forward.model.config.routed)
        try:
            for best in _search(forward, result.prompt_tokens, width, max_new_tokens, stop, tokenizer):
                result.tokens, result.depths, result.routed = best.tokens, best.depths, best.routed
            result.finish = best.finish
        finally:
            result.text = _text(result.tokens, stop, tokenizer)
        first = len(result.prompt_tokens) - 1
        for i, token in enumerate(best.tokens):
            last = i + 1 == len(best.tokens)
            text, finish = (result.text, best.finish) if last else ("", None)
            yield Event(number, token, text, best.depths[first + i], finish)


def _search(
    forward: Forward,
    prompt: list[int],
    width: int,
    max_new_tokens: int,
    stop: Sequence[str],
    tokenizer: TextTokenizer | None,
) -> Iterator[_Beam]:
    """The best beam after every step; the last one is the result."""
    model, cached = forward.model, forward.cache is not None
    end = None if tokenizer is None else tokenizer.end
    forward.restart(1)
    beams = [_Beam([], 0.0, [], [0] * len(model.config.routed))]
    finished: list[_Beam] = []
    new = [len(prompt)]
    for step in range(max_new_tokens):
        logits, went = forward([prompt + beam.tokens for beam in beams], new)
        check_logits(logits)
        entered = went.cpu()
        ways = []
        for b, beam in enumerate(beams):
            depths, counts = journey(entered[:, b], new[b] if cached else len(prompt) + step, model)
            if cached:
                depths, counts = beam.depths + depths, [x + y for x, y in zip(beam.routed, counts, strict=True)]
            ways.append((depths, counts))
        scores = logits.log_softmax(-1) + torch.tensor([[beam.score] for beam in beams], device=logits.device)
        # Twice as many as are kept: half of them may end here.
        best = scores.flatten().topk(min(2 * width, scores.numel()))
        last = step + 1 == max_new_tokens or len(prompt) + step + 1 >= model.config.context
        going: list[tuple[int, _Beam]] = []
        for score, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            parent, token = divmod(place, scores.shape[1])
            beam = _Beam([*beams[parent].tokens, token], score, *ways[parent])
            beam.finish = _finish(beam, token, end, stop, tokenizer)
            if beam.finish is not None:
                finished.append(beam)
            elif len(going) < width:
                going.append((parent, beam))
        finished = sorted(finished, key=lambda beam: -beam.mean)[:width]
        beams = [beam for _, beam in going]
        if last:
            for beam in beams:
                beam.finish = "length" if step + 1 == max_new_tokens else "context"
        yield max([*finished, *beams], key=lambda beam: beam.mean)
        if last or not beams or (len(finished) == width and finished[-1].mean >= max(beam.mean for beam in beams)):
            return
        forward.select([parent for parent, _ in going])
        new = [1] * len(beams)


def _finish(
    beam: _Beam, token: int, end: int | None, stop: Sequence[str], tokenizer: TextTokenizer | None
) -> str | None:
    if token == end:
        return "end"
    if stop and tokenizer is not None and any(text in tokenizer.decode(beam.tokens) for text in stop):
        return "stop"
    return None


def _text(tokens: list[int], stop: Sequence[str], tokenizer: TextTokenizer | None) -> str:
    """The text of a continuation, up to the first stop string."""
    if tokenizer is None:
        return ""
    text = tokenizer.decode(tokens)
    return text[: min((text.index(s) for s in stop if s in text), default=len(text))]
