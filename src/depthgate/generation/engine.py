"""Generation, from the token ids of prompts (`text.read_prompts`) to a stream of events. `decode` lets the engine read
the prompts with the causal choice (`prefill`) and picks a token for every row from the logits (`sampling.pick`); then
`step` reads that token and the next is picked. Rows that finish leave the batch."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import Parameter, signature
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgate.cache import LayerCache
from depthgate.data.tokenizer import TextTokenizer
from depthgate.errors import InvalidValueError, check_count
from depthgate.generation.config import Sampling
from depthgate.generation.sampling import check_logits, pick, uniform
from depthgate.generation.text import Event, Generation, Prompt, TextStream, pieces, read_prompts, tokenizer_of
from depthgate.model import Decoder
from depthgate.routing import depth_plans


class Pass(NamedTuple):
    """The findings of one pass over the new tokens of every row."""

    logits: Tensor  # (B, V) of the next token, fp32
    depths: Tensor  # (B, T) layers that each new token went through; -1 at padding, which is at the left
    routed: Tensor  # (B, L) new tokens that entered each routed layer

    def ways(self) -> tuple[list[list[int]], list[list[int]]]:
        """`depths` without padding, and `routed`, for each row. Waits for the device."""
        return [[depth for depth in row if depth >= 0] for row in self.depths.tolist()], self.routed.tolist()


class Engine:
    """A model and what it has read of every row: in caches, or as tokens that it reads again each time."""

    def __init__(self, model: Decoder, rows: int, cached: bool = True, chunk: int = 512) -> None:
        self.model, self.cached, self.chunk = model, cached, check_count(chunk, "chunk")
        self.tokenizer = tokenizer_of(model)
        self.device = model.embed.weight.device
        self.kv_bytes = 0  # the most that keys and values took
        self.restart(rows)

    def restart(self, rows: int) -> None:
        """Forget everything, and go on with so many rows."""
        self.lengths = torch.zeros(rows, dtype=torch.long, device=self.device)  # tokens that were read
        self.caches = [LayerCache(rows) for _ in self.model.layers] if self.cached else []
        self.history = self.lengths.new_zeros(2, rows, 0)  # without caches: tokens and positions

    @property
    def cache_bytes(self) -> int:
        """Memory that keys and values take now."""
        return sum(layer.nbytes for layer in self.caches)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Pass:
        """Read more of every row, `chunk` tokens at a time."""
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts])
        place = torch.tensor([range(-(width - len(ids)), len(ids)) for ids in prompts]).to(self.device)
        return self._read(tokens.to(self.device), torch.where(place < 0, -1, place + self.lengths[:, None]))

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Pass:
        """Read one more token (B,) of every row."""
        return self._read(tokens[:, None], self.lengths[:, None])

    def _read(self, tokens: Tensor, pos: Tensor) -> Pass:
        known = torch.cat([self.history, torch.stack([tokens, pos])], 2)
        entered = []  # the routed layers that took each token, (L, B, T) for each chunk
        try:
            for ids, places in torch.split(known, self.chunk if self.cached else known.shape[2], 2):
                x, plans = self.model.hidden(ids, places, causal=True, caches=self.caches or None)
                chosen = [plan.chosen[..., 0] for plan in depth_plans(plans)]
                entered.append(torch.stack(chosen) if chosen else places.new_zeros(0, *places.shape, dtype=torch.bool))
        except BaseException:  # also Ctrl-C: an interrupted pass leaves nothing behind
            for layer in self.caches:
                layer.crop(self.lengths)
            raise
        if not self.cached:
            self.history = known
        self.kv_bytes = max(self.kv_bytes, self.cache_bytes)
        self.lengths = self.lengths + (pos >= 0).sum(1)
        routed = torch.cat(entered, 2)[:, :, -tokens.shape[1] :]
        depths = torch.where(pos >= 0, routed.sum(0) + len(self.model.layers) - len(routed), -1)
        return Pass(self.model.head(x[:, -1]).float(), depths, routed.sum(2).T)

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        """Go on with these rows (N,), in this order."""
        self.lengths, self.history = self.lengths[rows], self.history[:, rows]
        for layer in self.caches:
            layer.select(rows)


class _Row:
    """A request under way."""

    def __init__(self, number: int, result: Generation, engine: Engine, sampling: Sampling) -> None:
        self.number, self.result, self.end = number, result, engine.tokenizer.end
        self.stream = TextStream(engine.tokenizer, sampling.stops)
        self.most, self.at_most = sampling.most_tokens(engine.model.config.context - len(result.prompt_tokens))

    def add(self, token: int) -> Event:
        """Take in the next token."""
        result, stream = self.result, self.stream
        text = "" if token == self.end else stream.push(token)
        finish = self.at_most if len(result.tokens) + 1 == self.most else None
        finish = "end" if token == self.end else "stop" if stream.stopped else finish
        text += stream.finish() if finish is not None else ""
        result.tokens.append(token)
        result.pieces.append(text)
        result.finish = finish
        return Event(self.number, token, text, result.depths[-1], finish)

    def close(self) -> None:
        """Add what was held back to the text."""
        if self.result.pieces:
            self.result.pieces[-1] += self.stream.finish()


def decode(engine: Engine, todo: list[Generation], sampling: Sampling, drawn: int = 0) -> Generator[Event]:
    """Tokens as they come; `todo` fills up with the results. Where it is interrupted or closed, the text that was held
    back is added. What the engine has read of the prompts is not read again; `drawn` is how many tokens were sampled
    before, in a conversation."""
    prompts = [result.prompt_tokens for result in todo]
    seeds = torch.tensor(sampling.seeds(len(todo)), device=engine.device)
    seen = torch.zeros(len(todo), engine.model.config.vocab, dtype=torch.bool, device=engine.device)
    for number, ids in enumerate(prompts):
        seen[number, ids] = True
    rows = [_Row(number, result, engine, sampling) for number, result in enumerate(todo)]
    try:
        found = engine.prefill([ids[read:] for ids, read in zip(prompts, engine.lengths.tolist(), strict=True)])
        for step in count(drawn):
            check_logits(found.logits)
            tokens = pick(found.logits, sampling, seen, uniform(seeds, step))
            seen.scatter_(1, tokens[:, None], True)
            for row, depths, routed in zip(rows, *found.ways(), strict=True):
                row.result.note(depths, routed)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                yield row.add(token)
            stay = [i for i, row in enumerate(rows) if row.result.finish is None]
            if not stay:
                return
            if len(stay) < len(rows):
                rows, index = [rows[i] for i in stay], torch.tensor(stay, device=engine.device)
                engine.select(index)
                seeds, seen, tokens = seeds[index], seen[index], tokens[index]
            found = engine.step(tokens)
    finally:
        for row in rows:
            row.close()


@dataclass
class _Beam(Generation):
    """A continuation under way, with the sum of the log-probabilities of its tokens."""

    score: float = 0.0

    @property
    def mean(self) -> float:
        """Log-probability a token, by which beams are compared."""
        return self.score / max(1, len(self.tokens))


def search(engine: Engine, todo: list[Generation], sampling: Sampling) -> Generator[Event]:
    """The best continuation of every prompt by log-probability a token; prompts are searched one after another, and
    the tokens of each come when it is found. Where it is interrupted, the prompt under way keeps the best so far."""
    for number, result in enumerate(todo):
        try:
            for best in _best_so_far(engine, result, sampling):
                result.tokens, result.depths, result.routed = best.tokens, best.depths, best.routed
            result.finish = best.finish
        finally:
            result.pieces = pieces(result.tokens, engine.tokenizer, sampling.stops)
        depths = result.depths[len(result.prompt_tokens) - 1 :]
        finishes = [None] * (len(result.tokens) - 1) + [result.finish]
        yield from map(partial(Event, number), result.tokens, result.pieces, depths, finishes)


def _best_so_far(engine: Engine, result: Generation, sampling: Sampling) -> Generator[_Beam]:
    """The best continuation of one prompt so far, after each token that all beams grow by."""
    config, width = engine.model.config, sampling.beams
    most, at_most = sampling.most_tokens(config.context - len(result.prompt_tokens))
    going, finished = [_Beam(result.prompt, result.prompt_tokens)], list[_Beam]()
    engine.restart(1)
    found = engine.prefill([result.prompt_tokens])
    for length in range(1, most + 1):
        extended = _extended(going, found, 2 * width)  # twice as many as are kept: half of them may end here
        for _, beam in extended:
            beam.finish = _finish(beam.tokens, engine.tokenizer, sampling.stops)
        finished += [beam for _, beam in extended if beam.finish is not None]
        finished = sorted(finished, key=lambda beam: -beam.mean)[:width]
        kept = [(parent, beam) for parent, beam in extended if beam.finish is None][:width]
        going = [beam for _, beam in kept]
        if length == most:
            for beam in going:
                beam.finish = at_most
        yield max([*finished, *going], key=lambda beam: beam.mean)
        settled = len(finished) == width and all(finished[-1].mean >= beam.mean for beam in going)
        if settled or length == most:
            return
        engine.select(torch.tensor([parent for parent, _ in kept], device=engine.device))
        found = engine.step(torch.tensor([beam.tokens[-1] for beam in going], device=engine.device))


def _extended(beams: list[_Beam], found: Pass, most: int) -> list[tuple[int, _Beam]]:
    """The likeliest beams with one more token, best first, each with the row that it comes from."""
    check_logits(found.logits)
    for beam, depths, routed in zip(beams, *found.ways(), strict=True):
        beam.note(depths, routed)
    scores = found.logits.log_softmax(-1) + torch.tensor([[beam.score] for beam in beams], device=found.logits.device)
    best = scores.flatten().topk(min(most, scores.numel()))
    places = [divmod(place, scores.shape[1]) for place in best.indices.tolist()]
    return [
        (row, replace(beams[row], tokens=[*beams[row].tokens, token], score=score))
        for score, (row, token) in zip(best.values.tolist(), places, strict=True)
    ]


def _finish(tokens: list[int], tokenizer: TextTokenizer, stops: list[str]) -> str | None:
    if tokens[-1] == tokenizer.end:
        return "end"
    text = tokenizer.decode(tokens) if stops else ""
    return "stop" if any(stop in text for stop in stops) else None


def events(engine: Engine, todo: list[Generation], sampling: Sampling, drawn: int = 0) -> Generator[Event]:
    """Every token of every request, searched or sampled. Options are checked at once; computing waits for `next`."""
    for stop in sampling.stops:
        engine.tokenizer.encode(stop)  # a model without a tokenizer refuses text
    sampling.seeds(len(todo))
    return search(engine, todo, sampling) if sampling.beams > 1 else decode(engine, todo, sampling, drawn)


def stream(
    model: Decoder, prompts: Prompt | Sequence[Prompt], *, cache: bool = True, chunk: int = 512, **options: Any
) -> Generator[Event]:
    """The tokens of `generate` one by one, as they come; with beams, when the best continuation is known.

    Args:"""
    sampling, todo = Sampling.of(options), read_prompts(model, prompts)
    return events(Engine(model, len(todo), cache, chunk), todo, sampling)


def generate(
    model: Decoder,
    prompts: Prompt | Sequence[Prompt],
    *,
    cache: bool = True,
    chunk: int = 512,
    callback: Callable[[Event], None] | None = None,
    **options: Any,
) -> list[Generation]:
    """Continue every prompt (text, or token ids); one result for each, in their order.

    A request's tokens depend on its prompt and seed alone, whatever else is in the batch.

    Args:
        cache: keep keys and values; without, all is computed again for each token, with the same result in float32
        chunk: tokens of a prompt computed at once
        callback: gets each token as it comes; with beams, when the best continuation is known"""
    if callback is not None and not callable(callback):
        raise InvalidValueError(f"callback is {callback!r}: give a function of one event, or leave it out")
    sampling, todo = Sampling.of(options), read_prompts(model, prompts)
    for event in events(Engine(model, len(todo), cache, chunk), todo, sampling):
        if callback is not None:
            callback(event)
    return todo


def _show_options(function: Any) -> None:
    """Give **options the names, defaults and explanations of Sampling, in the function's signature and help."""
    known, kind = signature(function), Parameter.KEYWORD_ONLY
    model, prompts, *own, _ = known.parameters.values()
    options = [Parameter(f.name, kind, default=f.default, annotation=f.type) for f in fields(Sampling)]
    function.__signature__ = known.replace(parameters=[model, prompts, *options, *own])
    function.__doc__ += (Sampling.__doc__ or "").partition("Args:")[2]


_show_options(stream)
_show_options(generate)
