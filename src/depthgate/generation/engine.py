"""Generation: prefill with the causal choice, then token by token; rows that finish leave the batch."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgate.cache import Cache
from depthgate.data.tokenizer import TextTokenizer
from depthgate.errors import InvalidValueError, check_count
from depthgate.generation.config import Sampling
from depthgate.generation.prompts import Generation, Prompt, requests
from depthgate.generation.sampling import Draws, check_logits, pick
from depthgate.generation.stream_text import TextStream
from depthgate.model import Decoder
from depthgate.routing import Plans, Slots


class Event(NamedTuple):
    """One token of one request."""

    request: int  # which prompt
    token: int
    text: str  # what may be shown now; held back while it may be half a character or the beginning of a stop string
    depth: int | None  # layers that the token before it went through: the one this was predicted from
    finish: str | None  # end, stop, length or context where this was the last one


class _Row:
    """A request that is under way."""

    def __init__(self, number: int, ids: list[int], stream: TextStream | None, result: Generation) -> None:
        self.number, self.ids, self.stream, self.result = number, ids, stream, result


class Forward:
    """The model over rows of tokens, with a cache or without: logits of the next token of each row."""

    def __init__(self, model: Decoder, rows: int, cached: bool, chunk: int) -> None:
        self.model, self.chunk = model, chunk
        self.cache = Cache(len(model.layers), rows) if cached else None
        self.device = model.embed.weight.device
        self.kv_bytes = 0  # the most that keys and values took

    def restart(self, rows: int) -> None:
        """Go on with so many rows of which nothing is known."""
        if self.cache is not None:
            self.cache = Cache(len(self.model.layers), rows)

    def __call__(self, texts: list[list[int]], new: list[int]) -> tuple[Tensor, Tensor]:
        """`texts`, all tokens of each row, of which the last `new` have not been computed yet -> logits (B, V), and
        where each of them went (L, B, T), padded at the left, a row for each routed layer."""
        if self.cache is None:
            new = [len(ids) for ids in texts]
        width = max(new)
        tokens = torch.zeros(len(texts), width, dtype=torch.long)
        pos = torch.full((len(texts), width), -1)
        for b, (ids, n) in enumerate(zip(texts, new, strict=True)):
            tokens[b, width - n :] = torch.tensor(ids[len(ids) - n :])
            pos[b, width - n :] = torch.arange(len(ids) - n, len(ids))
        tokens, pos = tokens.to(self.device), pos.to(self.device)
        step = self.chunk if self.cache is not None else width
        went = []
        for start in range(0, width, step):
            part = slice(start, start + step)
            x, plans = self.model.hidden(tokens[:, part], pos[:, part], causal=True, caches=self.cache)
            went.append(_entered(plans, x))
        if self.cache is not None:
            self.kv_bytes = max(self.kv_bytes, self.cache.nbytes)
        return self.model.head(x[:, -1]).float(), torch.cat(went, 2)

    def select(self, rows: list[int]) -> None:
        """Go on with these rows."""
        if self.cache is not None:
            fewer = len(rows) < self.cache.rows
            self.cache.select(torch.tensor(rows, dtype=torch.long, device=self.device))
            if fewer:  # whoever left may have been the longest
                self.cache.trim()


def _entered(plans: Plans, x: Tensor) -> Tensor:
    """(L, B, T) bool: which tokens entered each routed layer."""
    chosen = [plan.chosen[..., 0] for plan in plans if isinstance(plan, Slots)]
    return torch.stack(chosen) if chosen else x.new_zeros(0, *x.shape[:2], dtype=torch.bool)


@torch.inference_mode()
def decode(
    forward: Forward,
    todo: list[Generation],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seeds: Sequence[int],
    stop: Sequence[str] = (),
    tokenizer: TextTokenizer | None = None,
    computed: int = 0,
    drawn: int = 0,
) -> Generator[Event]:
    """Tokens as they come. `todo` fills up with the results; where it is interrupted or closed, what was held back of
    the text is added. To go on with a conversation, hand in the `forward` that has its first `computed` tokens in its
    cache, and how many tokens were `drawn` before."""
    model = forward.model
    end = None if tokenizer is None else tokenizer.end
    draws = Draws(seeds)
    rows = [
        _Row(i, list(r.prompt_tokens), None if tokenizer is None else TextStream(tokenizer, stop), r)
        for i, r in enumerate(todo)
    ]
    for result in todo:
        result.routed = [0] * len(model.config.routed)
    new = [len(row.ids) - computed for row in rows]
    seen = _seen(rows, model) if sampling.repetition_penalty != 1 else None
    try:
        for step in range(max_new_tokens):
            logits, went = forward([row.ids for row in rows], new)
            check_logits(logits)
            _note(rows, new, went, forward)
            uniform = draws.at([row.number for row in rows], drawn + step).to(logits.device)
            tokens = pick(logits, sampling, seen, uniform)
            if seen is not None:
                seen.scatter_(1, tokens[:, None], True)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                row.ids.append(token)
                row.result.finish = _finish(row, token, end, step + 1 == max_new_tokens, model.config.context)
                yield Event(row.number, token, _said(row, token, end), row.result.depths[-1], row.result.finish)
            stay = [i for i, row in enumerate(rows) if row.result.finish is None]
            if not stay:
                return
            if len(stay) < len(rows):
                forward.select(stay)
                seen = None if seen is None else seen[stay]
                rows = [rows[i] for i in stay]
            new = [1] * len(rows)
    finally:
        for row in rows:
            if row.stream is not None:
                row.stream.finish()
                row.result.text = row.stream.text


def _note(rows: list[_Row], new: list[int], went: Tensor, forward: Forward) -> None:
    """Where the tokens of this pass went, for each row: the new ones, or all, where all were computed again."""
    entered = went.cpu()
    for b, row in enumerate(rows):
        result = row.result
        if forward.cache is None:
            result.depths, result.routed = journey(entered[:, b], len(row.ids), forward.model)
            continue
        depths, counts = journey(entered[:, b], new[b], forward.model)
        result.depths += depths
        result.routed = [a + b for a, b in zip(result.routed, counts, strict=True)]


def journey(entered: Tensor, tokens: int, model: Decoder) -> tuple[list[int], list[int]]:
    """entered (L, T), of which the last `tokens` count -> the layers each of them went through, and how many entered
    each routed layer."""
    mine = entered[:, entered.shape[1] - tokens :].long()
    everywhere = model.config.layers - len(mine)
    return (mine.sum(0) + everywhere).tolist(), mine.sum(1).tolist()


def _said(row: _Row, token: int, end: int | None) -> str:
    """The text that a token adds."""
    if row.stream is None:
        row.result.tokens.append(token)
        return ""
    text = "" if token == end else row.stream.push(token)
    if row.stream.stopped:
        row.result.finish = "stop"
    if row.result.finish is not None:
        text += row.stream.finish()
    row.result.tokens.append(token)
    row.result.text += text
    return text


def _finish(row: _Row, token: int, end: int | None, last: bool, context: int) -> str | None:
    if token == end:
        return "end"
    if last:
        return "length"
    return "context" if len(row.ids) >= context else None


def _seen(rows: list[_Row], model: Decoder) -> Tensor:
    """(B, V) bool: the tokens of each row so far."""
    seen = torch.zeros(len(rows), model.config.vocab, dtype=torch.bool)
    for b, row in enumerate(rows):
        seen[b, row.ids] = True
    return seen.to(model.embed.weight.device)


def stream(
    model: Decoder,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    seed: int | Sequence[int] = 0,
    cache: bool = True,
    chunk: int = 512,
) -> Generator[Event]:
    """The tokens of `generate` one by one, as they come; the options are those of `generate`."""
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    todo, more = _checked(model, prompts, max_new_tokens, stop, seed, chunk)
    return decode(Forward(model, len(todo), cache, chunk), todo, sampling, max_new_tokens=max_new_tokens, **more)


def generate(
    model: Decoder,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    seed: int | Sequence[int] = 0,
    beams: int = 1,
    cache: bool = True,
    chunk: int = 512,
    callback: Callable[[Event], None] | None = None,
) -> list[Generation]:
    """Continue every prompt (text, or token ids) by at most `max_new_tokens`; one result for each, in their order.

    temperature: 0 takes the likeliest token. seed: of every request, or one for each; a request's tokens depend on its
    prompt and seed alone, whatever else is in the batch. stop: texts at which to end. beams: keep this many of the
    likeliest continuations instead of sampling. cache: keep keys and values; without, everything is computed again for
    each token, with the same result (in float32 or better). chunk: tokens of a prompt computed at once. callback: gets
    each token as it comes; with beams, when the best continuation is known.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    sampling.check_beams(beams)
    if callback is not None and not callable(callback):
        raise InvalidValueError(f"callback is {callback!r}: give a function of one event, or leave it out")
    todo, more = _checked(model, prompts, max_new_tokens, stop, seed, chunk)
    forward = Forward(model, len(todo), cache, chunk)
    if beams > 1:
        from depthgate.generation.beams import search

        events = search(forward, todo, beams, max_new_tokens, more["stop"], more["tokenizer"])
    else:
        events = decode(forward, todo, sampling, max_new_tokens=max_new_tokens, **more)
    for event in events:
        if callback is not None:
            callback(event)
    return todo


def _checked(
    model: Decoder,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int,
    stop: str | Sequence[str],
    seed: int | Sequence[int],
    chunk: int,
) -> tuple[list[Generation], dict[str, Any]]:
    """The requests, and what `decode` wants to know of them; what is wrong is said before anything is computed."""
    tokenizer = getattr(model, "tokenizer", None)
    todo = requests(model, prompts, tokenizer)
    check_count(max_new_tokens, "max_new_tokens")
    check_count(chunk, "chunk")
    if not isinstance(seed, int | Sequence) or isinstance(seed, str | bytes):
        raise InvalidValueError(f"seed is {seed!r}: give a whole number, or one for each prompt")
    seeds = [seed] * len(todo) if isinstance(seed, int) else list(seed)
    if len(seeds) != len(todo):
        raise InvalidValueError(f"seed has {len(seeds)} numbers for {len(todo)} prompts: give one, or one for each")
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or any(not isinstance(text, str) or not text for text in stops):
        raise InvalidValueError(f"stop is {stop!r}: give a text, or a list of texts, none of them empty")
    if stops and tokenizer is None:
        raise InvalidValueError(f"stop is {stop!r}, but the model has no tokenizer: leave it out")
    return todo, {"seeds": seeds, "stop": list(stops), "tokenizer": tokenizer}
