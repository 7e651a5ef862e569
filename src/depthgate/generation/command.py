"""`depthgate generate`: text as it comes, one JSON object, or a conversation."""

import json
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing

from rich.console import Console
from rich.text import Text

from depthgate.errors import DepthgateError
from depthgate.generation.config import GenerateConfig
from depthgate.generation.engine import Event, Forward, stream
from depthgate.generation.requests import Generation, requests
from depthgate.loading import LoadedDecoder, load
from depthgate.train.loop import resolve_device


def run(config: GenerateConfig, as_json: bool) -> int:
    """Continue the prompts, or talk; the exit code: 0, or 130 where it was interrupted."""
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
            if not as_json and len(todo) == 1 and config.beams == 1:
                _show(events, model, config.depth)
            else:
                for _ in events:
                    pass
        except KeyboardInterrupt:  # what there is so far is shown
            code = 130
    seconds = time.perf_counter() - start
    if as_json:
        print(json.dumps(_report(todo, seconds, forward.kv_bytes)))
    elif len(todo) > 1 or config.beams > 1:
        for result in todo:
            print(f"--- {result.prompt!r}\n{result.text}")
    return code


def _events(
    model: LoadedDecoder,
    todo: list[Generation],
    config: GenerateConfig,
    forward: Forward | None = None,
    computed: int = 0,
) -> Generator[Event]:
    if config.beams > 1:
        from depthgate.generation.beams import search

        cached, chunk = not config.no_cache, config.chunk
        search(model, todo, config.beams, config.max_new_tokens, config.stop or [], cached, chunk, model.tokenizer)
        return
    yield from stream(
        model,
        todo,
        config.sampling,
        max_new_tokens=config.max_new_tokens,
        seeds=[config.seed] * len(todo),
        stop=config.stop or [],
        cache=not config.no_cache,
        chunk=config.chunk,
        tokenizer=model.tokenizer,
        forward=forward,
        computed=computed,
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
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    held: str | None = None
    try:
        for event in events:
            if not depth:
                sys.stdout.write(event.text)
                sys.stdout.flush()
                continue
            if held is not None:
                console.print(Text(held, style=_style(event.depth, model)), end="")
            held = event.text
    finally:
        if held:
            console.print(Text(held), end="")
        print(flush=True)
        if depth:
            _legend(console, model)


# From few layers to all of them: light on dark and dark on light alike.
_COLOURS = ("bright_black", "blue", "cyan", "green", "yellow", "red")


def _style(depth: int | None, model: LoadedDecoder) -> str:
    if depth is None:
        return ""
    least = sum(kind not in ("mod", "mode") for kind in model.config.kinds)
    span = max(1, model.config.layers - least)
    return _COLOURS[(depth - least) * (len(_COLOURS) - 1) // span]


def _legend(console: Console, model: LoadedDecoder) -> None:
    least = sum(kind not in ("mod", "mode") for kind in model.config.kinds)
    text = Text("layers: ")
    for depth in range(least, model.config.layers + 1):
        text.append(f"{depth} ", style=_style(depth, model))
    console.print(text)


def _talk(model: LoadedDecoder, config: GenerateConfig) -> int:
    """Lines from the user, each continued by the model; the cache keeps all that was said."""
    forward = Forward(model, 1, not config.no_cache, config.chunk)
    ids: list[int] = []
    computed = 0
    print("Type a text to go on from; an empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            return 0
        ids += model.tokenizer.encode(line)
        todo = [Generation(line, ids)]
        try:
            checked = requests(model, [ids], model.tokenizer)
        except DepthgateError as error:
            print(f"depthgate: {error}", file=sys.stderr)
            return 0
        todo[0].prompt_tokens = checked[0].prompt_tokens
        try:
            with closing(_events(model, todo, config, forward, computed)) as events:
                _show(events, model, config.depth)
        except KeyboardInterrupt:
            print(file=sys.stderr)
        ids = todo[0].prompt_tokens + todo[0].tokens
        computed = len(ids) - 1
        if forward.cache is not None:  # an interrupted step may have stored a token that was not said
            forward.cache.crop(computed)
