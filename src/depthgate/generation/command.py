"""`depthgate generate`: text as it comes, one JSON object, or a conversation."""

import json
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from io import TextIOWrapper

from rich.console import Console

from depthgate.errors import DepthgateError
from depthgate.generation.config import GenerateConfig
from depthgate.generation.engine import Event, Forward, decode
from depthgate.generation.requests import Generation, requests
from depthgate.loading import LoadedDecoder, load
from depthgate.train.loop import resolve_device


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
    with closing(_events(model, todo, config, forward)) as events:
        try:
            if not as_json and len(todo) == 1:
                _show(events, model, config.depth)
            else:
                for _ in events:
                    pass
        except KeyboardInterrupt:  # what there is so far is shown
            code = 130
    seconds = time.perf_counter() - start
    if as_json:
        print(json.dumps(_report(todo, seconds, forward.kv_bytes)))
    elif len(todo) > 1:
        for result in todo:
            print(f"--- {result.prompt!r}\n{result.text}")
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

        cached, chunk, stop = not config.no_cache, config.chunk, config.stop or []
        yield from search(model, todo, config.beams, config.max_new_tokens, stop, cached, chunk, model.tokenizer)
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


def _show(events: Iterator[Event], model: LoadedDecoder, depth: bool) -> None:
    """Text as it comes; with `depth`, each piece in the colour of how many layers its token went through. That is
    known when the token after it is there, so what is shown is one token behind."""
    colours = depth and Console(file=sys.stdout).is_terminal
    held = ""
    try:
        for event in events:
            said, held = (held, event.text) if depth else (event.text, "")
            sys.stdout.write(_coloured(said, event.depth, model) if colours and said else said)
            sys.stdout.flush()
    finally:
        print(held, flush=True)
        if depth:
            least = _least(model)
            names = [(str(n), n) for n in range(least, model.config.layers + 1)]
            print("layers:", *(_coloured(name, n, model) if colours else name for name, n in names))


# From few layers to all of them: readable on dark and on light.
_COLOURS = (90, 34, 36, 32, 33, 31)  # of a terminal: grey, blue, cyan, green, yellow, red


def _least(model: LoadedDecoder) -> int:
    """Layers that every token goes through."""
    return model.config.layers - len(model.config.routed)


def _coloured(text: str, depth: int | None, model: LoadedDecoder) -> str:
    span = max(1, model.config.layers - _least(model))
    number = 0 if depth is None else (depth - _least(model)) * (len(_COLOURS) - 1) // span
    return f"\x1b[{_COLOURS[number]}m{text}\x1b[0m"


def _talk(model: LoadedDecoder, config: GenerateConfig) -> int:
    """Lines from the user, each continued by the model; the cache keeps all that was said."""
    forward = Forward(model, 1, not config.no_cache, config.chunk)
    ids: list[int] = []
    computed = drawn = 0
    print("Type a text to go on from; an empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            return 0
        try:
            todo = requests(model, [ids + model.tokenizer.encode(line)], model.tokenizer)
        except DepthgateError as error:
            print(f"depthgate: {error}", file=sys.stderr)
            continue
        try:
            with closing(_events(model, todo, config, forward, computed, drawn)) as events:
                _show(events, model, config.depth)
        except KeyboardInterrupt:
            print(file=sys.stderr)
        said = todo[0].tokens
        ids, drawn = todo[0].prompt_tokens + said, drawn + len(said)
        if said:  # else the line was not read to its end, and is read again with the next
            computed = len(ids) - 1
        if forward.cache is not None:  # whatever an interrupted step has stored is forgotten
            forward.cache.crop(computed)
