"""`depthgate generate`: text as it comes, one JSON object, or a conversation."""

import json
import os
import sys
import time
from collections.abc import Generator
from contextlib import closing
from io import TextIOWrapper

from depthgate.config import EXPERT_KINDS, ModelConfig
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError
from depthgate.generation.calls import events
from depthgate.generation.config import GenerateConfig
from depthgate.generation.plain import Reader
from depthgate.generation.text import Event, Generation, read_prompts
from depthgate.loading import LoadedDecoder, load_decoder


def run(config: GenerateConfig, as_json: bool) -> int:
    """Continue the prompts, or talk; the exit code: 0, or 130 where it was interrupted."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what a terminal cannot show
    model = load_decoder(config.model).to(resolve_device(config.device))
    if config.depth and not model.config.routed:
        experts = f"; `depthgate view --model {config.model}` shows what experts compute" * bool(
            {*EXPERT_KINDS} & {*model.config.kinds}
        )
        print(f"depthgate: every token goes through all {model.config.layers} layers{experts}", file=sys.stderr)
    if not config.prompt:
        if as_json:
            raise DepthgateError("--json needs at least one --prompt")
        return _talk(model, config)
    todo = read_prompts(model, config.prompt)
    reader = Reader(model, len(todo), not config.no_cache, config.chunk)
    start, code = time.perf_counter(), 0
    try:
        with closing(events(reader, todo, config)) as stream:
            if not as_json:
                _show(stream, todo, model, config.depth, prompts=True)
            for _ in stream:
                pass
    except KeyboardInterrupt:  # the text so far was shown
        code = 130
    if as_json:
        seconds, names = time.perf_counter() - start, ("prompt", "text", "tokens", "finish", "routed_share")
        report = {
            "results": [{name: getattr(result, name) for name in names} for result in todo],
            "tokens_per_second": sum(len(result.tokens) for result in todo) / max(seconds, 1e-9),
            "seconds": seconds,
            "kv_bytes": reader.kv_bytes,
        }
        print(json.dumps(report))
    return code


def _show(stream: Generator[Event], todo: list[Generation], model: LoadedDecoder, depth: bool, prompts: bool) -> None:
    """Print texts in the order of the prompts: that of the first unfinished one as it comes, that of the others when
    those before them have finished. Where the stream fails or is interrupted, the text so far is printed first.
    Depths are colours on a terminal, elsewhere digits under each line, which is then printed when it is whole."""
    terminal = "FORCE_COLOR" in os.environ or (sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    failed: BaseException | None = None
    for result in todo:
        if len(todo) > 1:
            print("---")
        prompt = result.prompt if prompts and isinstance(result.prompt, str) else ""
        digits = depth and not terminal
        print(f"\x1b[1m{prompt}\x1b[0m" if terminal and prompt else "" if digits else prompt, end="", flush=True)
        shown = ""
        try:
            while True:
                before, shown = shown, _by_depth(result, model.config) if depth else result.text
                print("" if digits else shown[len(before) :], end="", flush=True)
                if result.finish is not None or next(stream, None) is None:
                    break
        except BaseException as error:
            stream.close()  # adds what was held back
            failed = error
        whole = result.text
        if depth and result.tokens:
            found = Reader(model, 1, cached=False).prefill([result.prompt_tokens + result.tokens])
            last = int(found.depths[0, -1])
            whole = _digits(result, prompt, last) if digits else _by_depth(result, model.config, last)
        print(whole if digits else whole[len(shown) :])
        if result.finish == "context":
            print(f"depthgate: the context of {model.config.context} tokens is full", file=sys.stderr)
    if depth:
        shape = model.config
        depths = range(shape.layers - len(shape.routed), shape.layers + 1)
        print("layers:", *(_coloured(str(n), n, shape) if terminal else _DIGITS[n % 36] for n in depths))
    if failed is not None:
        raise failed


def _digits(result: Generation, prompt: str, last: int) -> str:
    """Lines of text, each with a line under it that has the number of layers of every character's token."""
    depths = [*result.depths[len(result.prompt_tokens) :], last]
    each = [_DIGITS[depth % 36] * len(piece) for piece, depth in zip(result.pieces, depths, strict=False)]
    marks, lines = " " * len(prompt) + "".join(each), list[str]()
    for line in (prompt + result.text).split("\n"):
        lines += [line, marks[: len(line)]]
        marks = marks[len(line) + 1 :]
    return "\n".join(lines)


_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# From few layers to all of them: readable on dark and on light.
_COLOURS = (90, 34, 36, 32, 33, 31)  # of a terminal: grey, blue, cyan, green, yellow, red


def _coloured(text: str, depth: int, shape: ModelConfig) -> str:
    routed = len(shape.routed)
    number = (depth - shape.layers + routed) * (len(_COLOURS) - 1) // max(1, routed)
    return f"\x1b[{_COLOURS[number]}m{text}\x1b[0m" if text else ""


def _by_depth(result: Generation, shape: ModelConfig, *last: int) -> str:
    """The text so far, each piece in the colour of how many layers its token went through. That is known when the token
    after it is there, so the last one is left out, unless its depth is given."""
    depths = [*result.depths[len(result.prompt_tokens) :], *last]
    return "".join(_coloured(*each, shape) for each in zip(result.pieces, depths, strict=False))


def _talk(model: LoadedDecoder, config: GenerateConfig) -> int:
    """Lines from the user, each continued by the model, which keeps all that was said."""
    reader = Reader(model, 1, not config.no_cache, config.chunk)
    ids: list[int] = []
    drawn = 0
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    typed = sys.stdin is not None and sys.stdin.isatty()  # and so to be seen already
    if typed:
        print("Type a text to go on from; an empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        if typed:
            print("> ", end="", file=sys.stderr, flush=True)
        line = "" if sys.stdin is None else sys.stdin.readline()
        if not line.strip():
            return 0
        if not typed:
            print(line, end="", flush=True)
        try:
            new = model.tokenizer.encode(line)
            if ids and len(ids) + len(new) >= model.config.context:
                print(f"depthgate: {len(ids)} tokens were said, and more have no room: starting over", file=sys.stderr)
                ids = []
                reader.restart(1)
            todo = read_prompts(model, [ids + new])
        except DepthgateError as error:
            print(f"depthgate: {error}", file=sys.stderr)
            continue
        try:
            _show(events(reader, todo, config, drawn), todo, model, config.depth, prompts=False)
        except KeyboardInterrupt:
            print(file=sys.stderr)
        ids, drawn = todo[0].prompt_tokens + todo[0].tokens, drawn + len(todo[0].tokens)
