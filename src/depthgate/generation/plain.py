"""The plain path of generation, which says what every other must give: `decode` lets a reader read the prompts with the
causal choice (`prefill`) and picks a token for every row from the logits (`sampling.pick`); then `step` reads that
token and the next is picked. Rows that finish leave the batch. `search` follows several beams."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from depthgate.cache import LayerCache
from depthgate.data.tokenizer import TextTokenizer
from depthgate.errors import check_count
from depthgate.generation.config import Sampling
from depthgate.generation.sampling import Filters, check_logits, pick, uniform
from depthgate.generation.text import Event, Generation, Writing, added_text, pieces, tokenizer_of
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


def tokens_at_once(chunk: int | None, device: torch.device) -> int:
    """Tokens of a prompt that are computed at once, of which a GPU takes many in the time of a few."""
    return check_count(chunk, "chunk") if chunk is not None else 2048 if device.type == "cuda" else 512


class Reader:
    """A model and what it has read of every row: in caches, or as tokens that it reads again each time."""

    def __init__(self, model: Decoder, rows: int, cached: bool = True, chunk: int | None = None) -> None:
        self.model, self.cached, self.tokenizer = model, cached, tokenizer_of(model)
        self.device = model.embed.weight.device
        self.chunk = tokens_at_once(chunk, self.device)
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


def decode(reader: Reader, todo: list[Generation], sampling: Sampling, drawn: int = 0) -> Generator[Event]:
    """Tokens as they come; `todo` fills up with the results. Where it is interrupted or closed, the text that was held
    back is added. What the reader has read of the prompts is not read again; `drawn` is how many tokens were sampled
    before, in a conversation."""
    prompts = [result.prompt_tokens for result in todo]
    seeds = torch.tensor(sampling.seeds(len(todo)), device=reader.device)
    filters = Filters.all_alike(sampling, reader.device)
    seen = torch.zeros(len(todo), reader.model.config.vocab, dtype=torch.bool, device=reader.device)
    for number, ids in enumerate(prompts):
        seen[number, ids] = True
    rows = [Writing(number, result, reader.model, sampling) for number, result in enumerate(todo)]
    try:
        found = reader.prefill([ids[read:] for ids, read in zip(prompts, reader.lengths.tolist(), strict=True)])
        for step in count(drawn):
            check_logits(found.logits)
            tokens = pick(found.logits, filters, seen, uniform(seeds, step))
            seen.scatter_(1, tokens[:, None], True)
            for row, depths, routed in zip(rows, *found.ways(), strict=True):
                row.result.note(depths, routed)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                yield row.add(token)
            stay = [i for i, row in enumerate(rows) if row.result.finish is None]
            if not stay:
                return
            if len(stay) < len(rows):
                rows, index = [rows[i] for i in stay], torch.tensor(stay, device=reader.device)
                reader.select(index)
                seeds, seen, tokens = seeds[index], seen[index], tokens[index]
            found = reader.step(tokens)
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


def search(reader: Reader, todo: list[Generation], sampling: Sampling) -> Generator[Event]:
    """The best continuation of every prompt by log-probability a token; prompts are searched one after another, and
    the tokens of each come when it is found. Where it is interrupted, the prompt under way keeps the best so far."""
    for number, result in enumerate(todo):
        try:
            for best in _best_so_far(reader, result, sampling):
                result.tokens, result.depths, result.routed = best.tokens, best.depths, best.routed
            result.finish = best.finish
        finally:
            result.pieces = pieces(result.tokens, reader.tokenizer, sampling.stops, result.prompt_tokens)
        depths = result.depths[len(result.prompt_tokens) - 1 :]
        finishes = [None] * (len(result.tokens) - 1) + [result.finish]
        yield from map(partial(Event, number), result.tokens, result.pieces, depths, finishes)


def _best_so_far(reader: Reader, result: Generation, sampling: Sampling) -> Generator[_Beam]:
    """The best continuation of one prompt so far, after each token that all beams grow by."""
    config, width = reader.model.config, sampling.beams
    most, at_most = sampling.most_tokens(config.context - len(result.prompt_tokens))
    going, finished = [_Beam(result.prompt, result.prompt_tokens)], list[_Beam]()
    reader.restart(1)
    found = reader.prefill([result.prompt_tokens])
    for length in range(1, most + 1):
        extended = _extended(going, found, 2 * width)  # twice as many as are kept: half of them may end here
        for _, beam in extended:
            beam.finish = _finish(beam, reader.tokenizer, sampling.stops)
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
        reader.select(torch.tensor([parent for parent, _ in kept], device=reader.device))
        found = reader.step(torch.tensor([beam.tokens[-1] for beam in going], device=reader.device))


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


def _finish(beam: _Beam, tokenizer: TextTokenizer, stops: list[str]) -> str | None:
    if beam.tokens[-1] == tokenizer.end:
        return "end"
    text = added_text(beam.prompt_tokens, beam.tokens, tokenizer) if stops else ""
    return "stop" if any(stop in text for stop in stops) else None
