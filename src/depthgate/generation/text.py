"""Text in and text out: prompts as token ids, results, and the text of a request piece by piece as its tokens come."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from depthgate.data.tokenizer import MOST_IDS, TextTokenizer
from depthgate.errors import InvalidValueError, TooLongError, check_count
from depthgate.generation.config import Sampling
from depthgate.model import Decoder

Prompt = str | Sequence[int] | Tensor
_BEFORE = 8  # tokens of a prompt that its continuation is decoded with


class NoTokenizer:
    """The tokenizer of a model that has none: all its text is empty."""

    end = -1

    def encode(self, text: str) -> list[int]:
        raise InvalidValueError(f"{text[:40]!r} is text, and the model has no tokenizer: give token ids, and no stop")

    def decode(self, ids: Iterable[int]) -> str:  # noqa: ARG002
        return ""


def tokenizer_of(model: Decoder) -> TextTokenizer:
    """The tokenizer that a model was loaded with, or NoTokenizer."""
    return getattr(model, "tokenizer", None) or NoTokenizer()  # type: ignore[return-value]


class Event(NamedTuple):
    """One token of one request."""

    request: int  # number of its prompt
    token: int
    text: str  # safe to show now; held back while it may be half a character or the beginning of a stop string
    depth: int  # layers that the token before it went through: the one this was predicted from
    finish: str | None  # end, stop, length or context if this was the last one; cancelled or error without a token
    logprob: float | None = None  # of the token, as the model says, before all filters; where an engine was asked
    top: Sequence[tuple[int, float]] = ()  # the likeliest tokens and theirs, best first


@dataclass
class Generation:
    """The continuation of one prompt."""

    prompt: str
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # text of each token, with what was held back before it
    finish: str | None = None  # end: its end token; stop: a stop string; length: max_new_tokens; context: no room left
    depths: list[int] = field(default_factory=list)  # layers of every token but the last, prompt included
    routed: list[int] = field(default_factory=list)  # tokens that entered each routed layer

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def routed_share(self) -> list[float]:
        """Share of the tokens that entered each routed layer."""
        return [n / max(1, len(self.depths)) for n in self.routed]

    def note(self, depths: list[int], routed: list[int]) -> None:
        """Add what became of tokens that were computed. Makes new lists: beams share theirs with their parents."""
        self.depths = self.depths + depths
        self.routed = [a + b for a, b in zip(self.routed or [0] * len(routed), routed, strict=True)]

    def __str__(self) -> str:
        return self.text


def read_prompts(model: Decoder, prompts: Prompt | Sequence[Prompt]) -> list[Generation]:
    """A result to fill for each prompt, with its token ids; bad prompts are refused before anything is computed."""
    given: Any = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise InvalidValueError(f"prompts is {type(prompts).__name__}: give text, token ids, or a list of either")
    if not given and not isinstance(given, str):
        raise InvalidValueError("prompts is empty: give at least one")
    one = isinstance(given, str) or not any(isinstance(each, Sequence | Tensor) for each in given)
    return [_read_prompt(model, each) for each in ([given] if one else given)]


def _read_prompt(model: Decoder, prompt: Any) -> Generation:
    tokenizer, context = tokenizer_of(model), model.config.context
    text = prompt if isinstance(prompt, str) else None
    ids = prompt.tolist() if isinstance(prompt, Tensor) else prompt if text is None else tokenizer.encode(text)
    if not isinstance(ids, Sequence) or isinstance(ids, bytes):
        raise InvalidValueError(f"a prompt is {prompt!r}: give text, or a list of token ids")
    if not ids:
        raise InvalidValueError("a prompt is empty: give at least one token")
    if len(ids) >= context:
        raise TooLongError(f"a prompt has {len(ids)} tokens, and the model's context is {context}: shorten it")
    if not all(type(i) is int and 0 <= i < model.config.vocab for i in ids):  # one by one takes longer
        ids = [check_count(i, "a token id of a prompt", 0, model.config.vocab - 1) for i in ids]
    return Generation(tokenizer.decode(ids) if text is None else text, list(ids))


def check_stops(model: Decoder, sampling: Sampling) -> None:
    """Refuse stop strings for a model without a tokenizer."""
    for stop in sampling.stops:
        tokenizer_of(model).encode(stop)


class TextStream:
    """Turns ids into text that may be shown at once: what was given out never changes.

    Held back are half a UTF-8 sequence and text that may be the beginning of a stop string. The stop string that is
    complete first ends the text right before it, the longest where several are complete at once; so the text does not
    depend on how it is cut into tokens, and no further token is needed to know that a stop string has occurred.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """before: the tokens that the text follows. Some tokenizers drop the space at the beginning of a text."""
        self.stopped = False
        self._stop = tuple(stop)
        self._decode = _decoder(tokenizer, before)
        self._held = ""

    def finish(self) -> str:
        """The rest: what was held back, and U+FFFD for half a UTF-8 sequence."""
        return self.push(None)

    def push(self, token: int | None) -> str:
        """The new text that is safe to show; nothing once a stop string occurred."""
        if self.stopped:
            return ""
        known = self._held + self._decode(token)
        found = [(at + len(s), at) for s in self._stop if (at := known.find(s)) >= 0]
        self.stopped = bool(found)
        cut = min(found)[1] if found else len(known)
        if token is not None and not found:  # the last characters may begin a stop string
            cut -= max((n for s in self._stop for n in range(1, len(s)) if known.endswith(s[:n])), default=0)
        self._held = known[cut:]
        return known[:cut]


def pieces(
    tokens: Sequence[int], tokenizer: TextTokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()
) -> list[str]:
    """The text that each token adds to that of the tokens before; the last one's with all that was held back."""
    stream = TextStream(tokenizer, stop, before)
    found = ["" if token == tokenizer.end else stream.push(token) for token in tokens]
    return [*found[:-1], found[-1] + stream.finish()] if found else []


def added_text(before: Sequence[int], tokens: Sequence[int], tokenizer: TextTokenizer) -> str:
    """The text of tokens that come after those before."""
    if tokenizer.token_bytes:
        return tokenizer.decode(tokens)
    start = [*before[-_BEFORE:]]
    return _beyond(tokenizer.decode(start), tokenizer.decode([*start, *tokens]))


def _beyond(before: str, text: str) -> str:
    """What a text adds to the one before; where it rewrites that, everything from the first difference on."""
    if text.startswith(before):
        return text[len(before) :]
    return text[next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(text)) :]


def _decoder(tokenizer: TextTokenizer, before: Sequence[int] = ()) -> Callable[[int | None], str]:
    """A function that takes ids one by one, and None at the end, and returns the text that each adds. A model may have
    more ids than its tokenizer knows (its vocabulary is made round): these add none."""
    vocab = getattr(tokenizer, "vocab", MOST_IDS)
    if isinstance(tokenizer, TextTokenizer) and tokenizer.token_bytes:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: utf8.decode(
            b"" if token is None or token >= vocab else tokenizer.decode_bytes([token]), token is None
        )
    ids = [token for token in before[-_BEFORE:] if token < vocab]
    given = tokenizer.decode(ids) if ids else ""

    def whole(token: int | None) -> str:
        # A token may change how its neighbours are written, so all are decoded every time. U+FFFD at the end may be
        # completed by the next token. Where text that was given out is rewritten, everything from the first difference
        # on is given out again: some may be there twice, none is lost.
        nonlocal given
        ids.extend([] if token is None or token >= vocab else [token])
        text = tokenizer.decode(ids).rstrip("" if token is None else "\ufffd")
        new, given = _beyond(given, text), text
        return new

    return whole


class Writing:
    """A request under way: tokens go in, events come out."""

    def __init__(self, number: int, result: Generation, model: Decoder, sampling: Sampling) -> None:
        tokenizer = tokenizer_of(model)
        self.number, self.result, self.sampling, self.end = number, result, sampling, tokenizer.end
        self.stream = TextStream(tokenizer, sampling.stops, result.prompt_tokens)
        self.most, self.at_most = sampling.most_tokens(model.config.context - len(result.prompt_tokens))

    def add(self, token: int, *likely: Any) -> Event:
        """Take in the next token."""
        result, stream = self.result, self.stream
        text = "" if token == self.end else stream.push(token)
        finish = self.at_most if len(result.tokens) + 1 == self.most else None
        finish = "end" if token == self.end else "stop" if stream.stopped else finish
        text += stream.finish() if finish is not None else ""
        result.tokens.append(token)
        result.pieces.append(text)
        result.finish = finish
        return Event(self.number, token, text, result.depths[-1], finish, *likely)

    def close(self) -> None:
        """Add what was held back to the text."""
        if self.result.pieces:
            self.result.pieces[-1] += self.stream.finish()
