"""`depthgate generate`: text as it comes, one JSON object, or a conversation."""

import json
import os
import sys
import time
from collections.abc import Generator
from contextlib import closing
from io import TextIOWrapper

from depthgate.config import ModelConfig
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError
from depthgate.generation.config import GenerateConfig
from depthgate.generation.engine import Engine, events
from depthgate.generation.text import Event, Generation, pieces, read_prompts
from depthgate.loading import LoadedDecoder, load


def run(config: GenerateConfig, as_json: bool) -> int:
    """Continue the prompts, or talk; the exit code: 0, or 130 where it was interrupted."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what a terminal cannot show
    model = load(config.model).to(resolve_device(config.device))
    if not config.prompt:
        if as_json:
            raise DepthgateError("--json needs at least one --prompt")
        return _talk(model, config)
    todo = read_prompts(model, config.prompt)
    engine = Engine(model, len(todo), not config.no_cache, config.chunk)
    start = time.perf_counter()
    code = 0
    try:
        _follow(events(engine, todo, config), None if as_json else _Screen(todo, model, config.depth))
    except KeyboardInterrupt:  # the text so far was shown
        code = 130
    if as_json:
        print(json.dumps(_report(todo, time.perf_counter() - start, engine.kv_bytes)))
    return code


def _report(todo: list[Generation], seconds: float, kv_bytes: int) -> dict[str, object]:
    results = [
        {name: getattr(result, name) for name in ("prompt", "text", "tokens", "finish", "routed_share")}
        for result in todo
    ]
    speed = sum(len(result.tokens) for result in todo) / max(seconds, 1e-9)
    return {"results": results, "tokens_per_second": speed, "seconds": seconds, "kv_bytes": kv_bytes}


def _follow(stream: Generator[Event], screen: "_Screen | None") -> None:
    """Take in all events; a screen shows them and, where they are cut short, the text so far."""
    try:
        with closing(stream):  # before the end is shown: closing adds what was held back
            for event in stream:
                if screen is not None:
                    screen.add(event)
    finally:
        if screen is not None:
            screen.end()


class _Screen:
    """Text in the order of the prompts: that of the first unfinished one as it comes, that of the others when those
    before them have finished. With `depth`, each piece in the colour of how many layers its token went through. That
    is known when the token after it is there, so what is shown is one token behind, and the last token is computed
    once more."""

    def __init__(self, todo: list[Generation], model: LoadedDecoder, depth: bool) -> None:
        self.todo, self.model, self.depth = todo, model, depth
        self.colours = depth and "NO_COLOR" not in os.environ  # asked for, so also where stdout is not a terminal
        self.now = 0  # the prompt whose text is shown
        self.finished = [False] * len(todo)
        self.last = [""] * len(todo)  # text of the last token, if its depth is waited for
        self.known = [0] * len(todo)  # characters of each text that were shown, or are ready to be
        self.ready = [f"--- {result.prompt!r}\n" if len(todo) > 1 else "" for result in todo]
        self._write()

    def add(self, event: Event) -> None:
        """Take in one token, and show what may be shown."""
        n = event.request
        piece, self.last[n] = (self.last[n], event.text) if self.depth else (event.text, "")
        self.known[n] += len(piece)
        self.ready[n] += _coloured(piece, event.depth, self.model.config) if self.colours else piece
        self.finished[n] = event.finish is not None
        self._write()
        while self.now < len(self.todo) and self.finished[self.now]:
            self._next()

    def end(self) -> None:
        """Show all that is left, finished or not."""
        while self.now < len(self.todo):
            self._next()
        if self.depth:
            shape = self.model.config
            depths = range(shape.layers - len(shape.routed), shape.layers + 1)
            print("layers:", *(_coloured(str(n), n, shape) if self.colours else n for n in depths))

    def _next(self) -> None:
        """Show the rest of a text, and go on to the next one."""
        self.ready[self.now] += self._rest(self.todo[self.now], self.known[self.now]) + "\n"
        self._write()
        self.now += 1
        self._write()

    def _rest(self, result: Generation, known: int) -> str:
        if not self.colours or not result.tokens:
            return result.text[known:]
        texts = pieces(result.tokens, self.model.tokenizer)
        ids = result.prompt_tokens + result.tokens
        depths = Engine(self.model, 1, cached=False).prefill([ids]).depths[0, -len(texts) :].tolist()
        rest, start = "", 0
        for text, depth in zip(texts, depths, strict=True):
            unknown = result.text[max(start, known) : start + len(text)]
            rest += _coloured(unknown, depth, self.model.config)
            start += len(text)
        return rest

    def _write(self) -> None:
        if self.now < len(self.todo):
            text, self.ready[self.now] = self.ready[self.now], ""
            sys.stdout.write(text)
            sys.stdout.flush()


# From few layers to all of them: readable on dark and on light.
_COLOURS = (90, 34, 36, 32, 33, 31)  # of a terminal: grey, blue, cyan, green, yellow, red


def _coloured(text: str, depth: int, shape: ModelConfig) -> str:
    routed = len(shape.routed)
    number = (depth - shape.layers + routed) * (len(_COLOURS) - 1) // max(1, routed)
    return f"\x1b[{_COLOURS[number]}m{text}\x1b[0m" if text else ""


def _talk(model: LoadedDecoder, config: GenerateConfig) -> int:
    """Lines from the user, each continued by the model, which keeps all that was said."""
    engine = Engine(model, 1, not config.no_cache, config.chunk)
    ids: list[int] = []
    drawn = 0
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    print("Type a text to go on from; an empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = "" if sys.stdin is None else sys.stdin.readline()
        if not line.strip():
            return 0
        try:
            new = model.tokenizer.encode(line)
            if ids and len(ids) + len(new) >= model.config.context:
                print(f"depthgate: {len(ids)} tokens were said, and more have no room: starting over", file=sys.stderr)
                ids = []
                engine.restart(1)
            todo = read_prompts(model, [ids + new])
        except DepthgateError as error:
            print(f"depthgate: {error}", file=sys.stderr)
            continue
        try:
            _follow(events(engine, todo, config, drawn), _Screen(todo, model, config.depth))
        except KeyboardInterrupt:
            print(file=sys.stderr)
        ids, drawn = todo[0].prompt_tokens + todo[0].tokens, drawn + len(todo[0].tokens)
