"""Text in and text out: prompts as token ids, results, and the text of a request piece by piece as its tokens come."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from depthgate.data.tokenizer import ByteTokenizer, HFTokenizer, TextTokenizer
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.model import Decoder

Prompt = str | Sequence[int] | Tensor


class Event(NamedTuple):
    """One token of one request."""

    request: int  # number of its prompt
    token: int
    text: str  # safe to show now; held back while it may be half a character or the beginning of a stop string
    depth: int  # layers that the token before it went through: the one this was predicted from
    finish: str | None  # end, stop, length or context if this was the last one


@dataclass
class Generation:
    """The continuation of one prompt."""

    prompt: str
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None  # end: its end token; stop: a stop string; length: max_new_tokens; context: no room left
    depths: list[int] = field(default_factory=list)  # layers of every token but the last, prompt included
    routed: list[int] = field(default_factory=list)  # tokens that entered each routed layer

    @property
    def routed_share(self) -> list[float]:
        """Share of the tokens that entered each routed layer."""
        return [n / max(1, len(self.depths)) for n in self.routed]

    def note(self, depths: list[int], routed: list[int]) -> None:
        """Add what became of tokens that were computed."""
        self.depths += depths
        self.routed = [a + b for a, b in zip(self.routed or [0] * len(routed), routed, strict=True)]

    def __str__(self) -> str:
        return self.text


def read_prompts(model: Decoder, prompts: Prompt | Sequence[Prompt]) -> list[Generation]:
    """A result to fill for each prompt, with its token ids; bad prompts are refused before anything is computed."""
    tokenizer: TextTokenizer | None = getattr(model, "tokenizer", None)
    results = []
    for prompt in _each(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise InvalidValueError("a prompt is text, but the model has no tokenizer: give token ids")
            results.append(Generation(prompt, tokenizer.encode(prompt)))
            _check_ids(results[-1].prompt_tokens, model)
        else:
            ids = _ids(prompt)
            _check_ids(ids, model)
            results.append(Generation("" if tokenizer is None else tokenizer.decode(ids), ids))
    if not results:
        raise InvalidValueError("prompts is empty: give at least one")
    return results


def _each(prompts: Prompt | Sequence[Prompt]) -> Iterator[Prompt]:
    if isinstance(prompts, bytes):
        raise InvalidValueError("prompts is bytes: decode it to text, or give token ids")
    if not isinstance(prompts, str | Sequence | Tensor):
        raise InvalidValueError(f"prompts is a {type(prompts).__name__}: give text, token ids, or a list of either")
    if isinstance(prompts, Tensor):
        several = prompts.ndim == 2
    else:
        several = not prompts or any(isinstance(prompt, str | Sequence | Tensor) for prompt in prompts)
    if several and not isinstance(prompts, str):
        yield from prompts  # type: ignore[misc]
    else:
        yield prompts  # type: ignore[misc]


def _ids(prompt: Sequence[int] | Tensor) -> list[int]:
    if isinstance(prompt, Tensor):
        found = prompt.tolist()
        if prompt.ndim != 1 or any(type(i) is not int for i in found):
            shape = tuple(prompt.shape)
            raise InvalidValueError(f"a prompt is {prompt.dtype} of shape {shape}: token ids are whole numbers (T,)")
        return list(found)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidValueError(f"a prompt is {prompt!r}: give text, or a list of token ids")
    for i in prompt:
        if not isinstance(i, int) or isinstance(i, bool):
            raise InvalidValueError(f"a prompt holds {i!r}: token ids are whole numbers")
    return list(prompt)


def _check_ids(ids: list[int], model: Decoder) -> None:
    vocab, context = model.config.vocab, model.config.context
    if not ids:
        raise InvalidValueError("a prompt is empty: give at least one token")
    for i in ids:
        if not 0 <= i < vocab:
            raise InvalidValueError(f"a prompt holds token {i}: ids are from 0 to {vocab - 1}")
    if len(ids) >= context:
        raise InvalidValueError(
            f"a prompt has {len(ids)} tokens, and the model's context is {context}: shorten it to leave room"
        )


class TextStream:
    """Turns ids into text that may be shown at once: what was given out never changes.

    Held back are half a UTF-8 sequence and text that may be the beginning of a stop string. The stop string that is
    complete first ends the text right before it, the longest where several are complete at once; so the text does not
    depend on how it is cut into tokens, and no further token is needed to know that a stop string has occurred.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise InvalidValueError(f"stop is {stop!r}: it must be a list of strings that are not empty")
        self.text = ""  # everything given out so far
        self.stopped = False
        self._stop = tuple(stop)
        self._decoder = _Joined(tokenizer) if _joins(tokenizer) else _Whole(tokenizer)
        self._held = ""
        self._finished = False

    def push(self, token: int) -> str:
        """The new text that is safe to show; nothing once a stop string occurred."""
        if self._finished:
            raise DepthgateError("push after finish: make a new TextStream for further tokens")
        return "" if self.stopped else self._release(self._decoder.push(token))

    def finish(self) -> str:
        """The rest: what was held back, and U+FFFD for half a UTF-8 sequence."""
        over, self._finished = self._finished or self.stopped, True
        return "" if over else self._release(self._decoder.finish())

    def _release(self, new: str) -> str:
        known = self._held + new
        found = [(at + len(s), at) for s in self._stop if (at := known.find(s)) >= 0]
        if found:
            self.stopped = True
            cut = min(found)[1]
        else:
            cut = len(known) - (0 if self._finished else self._doubtful(known))
        self._held = known[cut:]
        self.text += known[:cut]
        return known[:cut]

    def _doubtful(self, known: str) -> int:
        """Number of last characters that may begin a stop string."""
        return max((n for s in self._stop for n in range(1, len(s)) if known.endswith(s[:n])), default=0)


def pieces(tokens: Sequence[int], tokenizer: TextTokenizer | None, stop: Sequence[str] = ()) -> list[str]:
    """The text that each token adds; the last one's with all that was held back."""
    if tokenizer is None or not tokens:
        return [""] * len(tokens)
    stream = TextStream(tokenizer, stop)
    *found, last = ["" if token == tokenizer.end else stream.push(token) for token in tokens]
    return [*found, last + stream.finish()]


def _joins(tokenizer: TextTokenizer) -> bool:
    """True where the bytes of a list of ids are known to be those of each id, joined."""
    return isinstance(tokenizer, ByteTokenizer) or (isinstance(tokenizer, HFTokenizer) and bool(tokenizer._bytes))


class _Joined:
    """Text of a byte-level tokenizer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Whole:
    """Text of any tokenizer: a token may change how its neighbours are written, so all are decoded every time.

    U+FFFD at the end is held back, as the next token may complete it. Where a tokenizer rewrites text that was given
    out, everything from the first difference on is given out again: some may be there twice, none is lost.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = ""

    def push(self, token: int) -> str:
        self._ids.append(token)
        return self._new(self._tokenizer.decode(self._ids).rstrip("\ufffd"))

    def finish(self) -> str:
        return self._new(self._tokenizer.decode(self._ids))

    def _new(self, text: str) -> str:
        given, self._given = self._given, text
        if text.startswith(given):
            return text[len(given) :]
        return text[next((i for i, (a, b) in enumerate(zip(given, text, strict=False)) if a != b), len(text)) :]
