"""`depthgate generate`: text as it comes, one JSON object, or a conversation."""

import json
import os
import sys
import time
from collections.abc import Generator
from contextlib import closing
from io import TextIOWrapper

import torch

from depthgate.device import resolve_device
from depthgate.errors import DepthgateError
from depthgate.generation.config import GenerateConfig
from depthgate.generation.engine import Event, Forward, decode, journey
from depthgate.generation.prompts import Generation, requests
from depthgate.generation.stream_text import TextStream
from depthgate.loading import LoadedDecoder, load


def run(config: GenerateConfig, as_json: bool) -> int:
    """Continue the prompts, or talk; the exit code: 0, or 130 where it was interrupted."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what a terminal cannot show
    device = resolve_device(config.device)
    model = load(config.model).to(device)
    if not config.prompt:
        if as_json:
            raise DepthgateError("--json needs at least one --prompt")
        return _talk(model, config)
    todo = requests(model, config.prompt, model.tokenizer)
    forward = Forward(model, len(todo), not config.no_cache, config.chunk)
    start = time.perf_counter()
    code = 0
    try:
        _follow(_events(model, todo, config, forward), None if as_json else _Screen(todo, model, config))
    except KeyboardInterrupt:  # what there is so far is shown
        code = 130
    if as_json:
        print(json.dumps(_report(todo, time.perf_counter() - start, forward.kv_bytes)))
    return code


def _events(
    model: LoadedDecoder,
    todo: list[Generation],
    config: GenerateConfig,
    forward: Forward,
    computed: int = 0,
    drawn: int = 0,
) -> Generator[Event]:
    if config.beams > 1:
        from depthgate.generation.beams import search

        yield from search(forward, todo, config.beams, config.max_new_tokens, config.stop or [], model.tokenizer)
        return
    yield from decode(
        forward,
        todo,
        config.sampling,
        max_new_tokens=config.max_new_tokens,
        seeds=[config.seed] * len(todo),
        stop=config.stop or [],
        tokenizer=model.tokenizer,
        computed=computed,
        drawn=drawn,
    )


def _report(todo: list[Generation], seconds: float, kv_bytes: int) -> dict[str, object]:
    results = [
        {
            "prompt": result.prompt,
            "text": result.text,
            "tokens": result.tokens,
            "finish": result.finish,
            "routed_share": [round(share, 6) for share in result.routed_share],
        }
        for result in todo
    ]
    count = sum(len(result.tokens) for result in todo)
    speed = round(count / max(seconds, 1e-9), 3)
    return {"results": results, "tokens_per_second": speed, "seconds": round(seconds, 6), "kv_bytes": kv_bytes}


def _follow(events: Generator[Event], screen: "_Screen | None") -> None:
    """All events, shown on the screen if there is one; where they are cut short, it shows what there is so far."""
    try:
        with closing(events):  # before the end is shown: closing adds what was held back
            for event in events:
                if screen is not None:
                    screen.add(event)
    finally:
        if screen is not None:
            screen.end()


class _Screen:
    """Text in the order of the prompts: that of the first unfinished one as it comes, that of the others when those
    before them have finished. With `depth`, each piece in the colour of how many layers its token went through. That
    is known when the token after it is there, so what is shown is one token behind, and the last one is computed once
    more."""

    def __init__(self, todo: list[Generation], model: LoadedDecoder, config: GenerateConfig) -> None:
        self.todo, self.model, self.depth, self.beams = todo, model, config.depth, config.beams
        self.stop = config.stop or []
        self.colours = config.depth and "NO_COLOR" not in os.environ  # asked for, so also where nobody is at a terminal
        self.now = 0  # the prompt whose text is shown
        self.finished = [False] * len(todo)
        self.known = [0] * len(todo)  # characters of each text that events have brought
        self.held = [""] * len(todo)  # text of the last token, where its depth is waited for
        self.ready = [f"--- {result.prompt!r}\n" if len(todo) > 1 else "" for result in todo]  # and not shown yet
        self._write()

    def add(self, event: Event) -> None:
        """Take in one token, and show what may be shown."""
        n = event.request
        said, self.held[n] = (self.held[n], event.text) if self.depth else (event.text, "")
        self.known[n] += len(event.text)
        self.ready[n] += _coloured(said, event.depth, self.model) if self.colours and said else said
        self.finished[n] = event.finish is not None
        self._write()
        while self.now < len(self.todo) and self.finished[self.now]:
            self._next()

    def end(self) -> None:
        """Show all that is left, finished or not."""
        while self.now < len(self.todo):
            self._next()
        if self.depth:
            names = [(str(n), n) for n in range(_least(self.model), self.model.config.layers + 1)]
            print("layers:", *(_coloured(name, n, self.model) if self.colours else name for name, n in names))

    def _next(self) -> None:
        """Show the rest of a text, and go on to the next one."""
        n = self.now
        rest = self.held[n] + self.todo[n].text[self.known[n] :]
        if self.colours and self.todo[n].tokens:
            depths = _depths(self.todo[n], self.model)
            rest = self._all_coloured(n, depths) if self.beams > 1 else _coloured(rest, depths[-1], self.model)
        self.ready[n] += rest + "\n"
        self._write()
        self.now += 1
        self._write()

    def _all_coloured(self, n: int, depths: list[int]) -> str:
        """A text that came as a whole, token by token."""
        result, pieces = self.todo[n], TextStream(self.model.tokenizer, self.stop)
        said = [
            (pieces.push(token) if token != self.model.tokenizer.end else "", depth)
            for token, depth in zip(result.tokens, depths[-len(result.tokens) :], strict=True)
        ]
        said.append((pieces.finish(), depths[-1]))
        return "".join(_coloured(text, depth, self.model) for text, depth in said if text)

    def _write(self) -> None:
        if self.now < len(self.todo):
            said, self.ready[self.now] = self.ready[self.now], ""
            sys.stdout.write(said)
            sys.stdout.flush()


# From few layers to all of them: readable on dark and on light.
_COLOURS = (90, 34, 36, 32, 33, 31)  # of a terminal: grey, blue, cyan, green, yellow, red


def _least(model: LoadedDecoder) -> int:
    """Layers that every token goes through."""
    return model.config.layers - len(model.config.routed)


@torch.inference_mode()
def _depths(result: Generation, model: LoadedDecoder) -> list[int]:
    """How many layers each token of prompt and text goes through, the last one included."""
    ids = result.prompt_tokens + result.tokens
    _, went = Forward(model, 1, False, len(ids))([ids], [len(ids)])
    return journey(went.cpu()[:, 0], len(ids), model)[0]


def _coloured(text: str, depth: int | None, model: LoadedDecoder) -> str:
    span = max(1, model.config.layers - _least(model))
    number = 0 if depth is None else (depth - _least(model)) * (len(_COLOURS) - 1) // span
    return f"\x1b[{_COLOURS[number]}m{text}\x1b[0m"


def _talk(model: LoadedDecoder, config: GenerateConfig) -> int:
    """Lines from the user, each continued by the model; the cache keeps all that was said."""
    forward = Forward(model, 1, not config.no_cache, config.chunk)
    ids: list[int] = []
    computed = drawn = 0
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
                print(f"depthgate: {len(ids)} tokens were said, and more have no room: starting anew", file=sys.stderr)
                ids, computed = [], 0
                forward.restart(1)
            todo = requests(model, [ids + new], model.tokenizer)
        except DepthgateError as error:
            print(f"depthgate: {error}", file=sys.stderr)
            continue
        try:
            _follow(_events(model, todo, config, forward, computed, drawn), _Screen(todo, model, config))
        except KeyboardInterrupt:
            print(file=sys.stderr)
        said = todo[0].tokens
        ids, drawn = todo[0].prompt_tokens + said, drawn + len(said)
        if said:  # else the line was not read to its end, and is read again with the next
            computed = len(ids) - 1
        if forward.cache is not None:  # whatever an interrupted step has stored is forgotten
            forward.cache.crop(computed)
