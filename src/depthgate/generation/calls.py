"""`dg.generate` and `dg.stream`: prompts and options in; results, or their tokens one by one, out."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import fields
from inspect import Parameter, signature
from typing import Any

from depthgate.errors import InvalidValueError
from depthgate.generation.config import Sampling
from depthgate.generation.plain import Reader, decode, search
from depthgate.generation.text import Event, Generation, Prompt, read_prompts
from depthgate.model import Decoder


def events(reader: Reader, todo: list[Generation], sampling: Sampling, drawn: int = 0) -> Generator[Event]:
    """Every token of every request, searched or sampled. Options are checked at once; computing waits for `next`."""
    for stop in sampling.stops:
        reader.tokenizer.encode(stop)  # a model without a tokenizer refuses text
    sampling.seeds(len(todo))
    return search(reader, todo, sampling) if sampling.beams > 1 else decode(reader, todo, sampling, drawn)


def stream(
    model: Decoder, prompts: Prompt | Sequence[Prompt], *, cache: bool = True, chunk: int = 512, **options: Any
) -> Generator[Event]:
    """The tokens of `generate` one by one, as they come; with beams, when the best continuation is known.

    Args:"""
    sampling, todo = Sampling.of(options), read_prompts(model, prompts)
    return events(Reader(model, len(todo), cache, chunk), todo, sampling)


def generate(
    model: Decoder,
    prompts: Prompt | Sequence[Prompt],
    *,
    cache: bool = True,
    chunk: int = 512,
    callback: Callable[[Event], None] | None = None,
    **options: Any,
) -> list[Generation]:
    """Continue every prompt (text, or token ids); one result for each, in their order.

    A request's tokens depend on its prompt and seed alone, whatever else is in the batch.

    Args:
        cache: keep keys and values; without, all is computed again for each token, with the same result in float32
        chunk: tokens of a prompt computed at once
        callback: gets each token as it comes; with beams, when the best continuation is known"""
    if callback is not None and not callable(callback):
        raise InvalidValueError(f"callback is {callback!r}: give a function of one event, or leave it out")
    sampling, todo = Sampling.of(options), read_prompts(model, prompts)
    for event in events(Reader(model, len(todo), cache, chunk), todo, sampling):
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
