"""`dg.generate` and `dg.stream`: prompts and options in; results, or their tokens one by one, out."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import fields
from inspect import Parameter, signature
from typing import Any

from depthgate.errors import InvalidValueError, warn_once
from depthgate.generation.config import Sampling
from depthgate.generation.engine import cannot_run, run
from depthgate.generation.plain import Reader, decode, search
from depthgate.generation.text import Event, Generation, Prompt, check_stops, read_prompts
from depthgate.model import Decoder


def events(reader: Reader, todo: list[Generation], sampling: Sampling, drawn: int = 0) -> Generator[Event]:
    """Every token of every request, searched or sampled. Options are checked at once; computing waits for `next`."""
    check_stops(reader.model, sampling)
    sampling.seeds(len(todo))
    return search(reader, todo, sampling) if sampling.beams > 1 else decode(reader, todo, sampling, drawn)


def _events(
    model: Decoder,
    prompts: Prompt | Sequence[Prompt],
    options: dict[str, Any],
    cache: bool,
    chunk: int | None,
    engine: bool | None,
) -> tuple[list[Generation], Generator[Event]]:
    sampling, todo = Sampling(**options), read_prompts(model, prompts)
    plain = not cache or sampling.beams > 1
    if engine and plain:
        what = "cache is False" if not cache else f"beams is {sampling.beams}"
        raise InvalidValueError(f"engine is True and {what}: leave one of them out")
    if engine is None and not plain and model.embed.weight.is_cuda:
        if why := cannot_run(model):
            warn_once(f"tokens are computed without the engine, more slowly: {why}")
        engine = not why
    if not engine:
        return todo, events(Reader(model, len(todo), cache, chunk), todo, sampling)
    check_stops(model, sampling)
    sampling.seeds(len(todo))
    return todo, run(model, todo, sampling, chunk)


def stream(
    model: Decoder,
    prompts: Prompt | Sequence[Prompt],
    *,
    cache: bool = True,
    chunk: int | None = None,
    engine: bool | None = None,
    **options: Any,
) -> Generator[Event]:
    """The tokens of `generate` one by one, as they come; with beams, when the best continuation is known.

    Args:"""
    return _events(model, prompts, options, cache, chunk, engine)[1]


def generate(
    model: Decoder,
    prompts: Prompt | Sequence[Prompt],
    *,
    cache: bool = True,
    chunk: int | None = None,
    engine: bool | None = None,
    callback: Callable[[Event], None] | None = None,
    **options: Any,
) -> list[Generation]:
    """Continue every prompt (text, or token ids); one result for each, in their order.

    A request's tokens depend on its prompt and seed alone, whatever else is in the batch.

    Args:
        cache: keep keys and values; without, all is computed again for each token, with the same result in float32
        chunk: tokens of a prompt computed at once; None: 512, on CUDA 2,048
        engine: compute with the engine of `depthgate serve`, the same in float32 and faster; None: on CUDA, if it can
        callback: gets each token as it comes; with beams, when the best continuation is known"""
    if callback is not None and not callable(callback):
        raise InvalidValueError(f"callback is {callback!r}: give a function of one event, or leave it out")
    todo, found = _events(model, prompts, options, cache, chunk, engine)
    for event in found:
        if callback is not None:
            callback(event)
    return todo


def _show_options(function: Any) -> None:
    """Give **options the names, defaults and explanations of Sampling, in the function's signature and help."""
    known, kind = signature(function), Parameter.KEYWORD_ONLY
    model, prompts, *own, _ = known.parameters.values()
    options = [Parameter(f.name, kind, default=f.default, annotation=f.type) for f in fields(Sampling)]
    function.__signature__ = known.replace(parameters=[model, prompts, *options, *own])
    function.__doc__ += (Sampling.__doc__ or "").partition("Args:")[2]


_show_options(stream)
_show_options(generate)
