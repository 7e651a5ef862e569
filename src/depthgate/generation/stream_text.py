"""Text of one request, piece by piece as its tokens come, until a stop string."""

import codecs
from collections.abc import Sequence

from depthgate.data.tokenizer import ByteTokenizer, HFTokenizer, TextTokenizer
from depthgate.errors import DepthgateError, InvalidValueError


class TextStream:
    """Turns ids into text that may be shown at once: what was given out never changes.

    Held back are half a UTF-8 sequence and text that may be the beginning of a stop string. The stop string that is
    complete first ends the text right before it, the longest where several are complete at once; so the text does not
    depend on how it is cut into tokens, and no token is needed to know that a stop string has occurred.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise InvalidValueError(f"stop is {stop!r}: it must be a list of strings that are not empty")
        self.stopped = False
        self._stop = tuple(stop)
        self._decoder = _Joined(tokenizer) if _joins(tokenizer) else _Whole(tokenizer)
        self._held = ""
        self._pieces: list[str] = []
        self._finished = False

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """The new text that is safe to show; nothing once a stop string occurred."""
        if self._finished:
            raise DepthgateError("push after finish: make a new TextStream for further tokens")
        return "" if self.stopped else self._release(self._decoder.push(token))

    def finish(self) -> str:
        """The rest: what was held back, and U+FFFD for half a UTF-8 sequence."""
        if self._finished or self.stopped:
            self._finished = True
            return ""
        self._finished = True
        return self._release(self._decoder.finish())

    def _release(self, new: str) -> str:
        known = self._held + new
        found = [(at + len(s), at) for s in self._stop if (at := known.find(s)) >= 0]
        if found:
            self.stopped = True
            cut = min(found)[1]
        else:
            cut = len(known) - (0 if self._finished else self._doubtful(known))
        self._held = "" if self.stopped else known[cut:]
        self._pieces.append(known[:cut])
        return known[:cut]

    def _doubtful(self, known: str) -> int:
        """How many of the last characters may begin a stop string."""
        return max((n for s in self._stop for n in range(1, len(s)) if known.endswith(s[:n])), default=0)


def _joins(tokenizer: TextTokenizer) -> bool:
    """Whether the bytes of ids are those of each, joined; of unknown tokenizers it is not assumed."""
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
        same = len(self._given)
        if not text.startswith(self._given):
            same = next((i for i, (a, b) in enumerate(zip(self._given, text, strict=False)) if a != b), len(text))
        self._given = text
        return text[same:]
