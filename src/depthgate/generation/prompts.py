"""Prompts as tokens, checked before anything is computed, and what becomes of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthgate.data.tokenizer import TextTokenizer
from depthgate.errors import InvalidValueError
from depthgate.model import Decoder

Prompt = str | Sequence[int] | Tensor


@dataclass
class Generation:
    """What became of one prompt."""

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

    def __str__(self) -> str:
        return self.text


def requests(model: Decoder, prompts: Prompt | Sequence[Prompt], tokenizer: TextTokenizer | None) -> list[Generation]:
    """Prompts as tokens, checked before anything is computed."""
    several = _as_list(prompts)
    if not several:
        raise InvalidValueError("prompts is empty: give at least one")
    out = []
    for prompt in several:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise InvalidValueError("a prompt is text, but the model has no tokenizer: give token ids")
            out.append(Generation(prompt, tokenizer.encode(prompt)))
        else:
            ids = _ids(prompt)
            out.append(Generation(tokenizer.decode(ids) if tokenizer and _inside(ids, model) else "", ids))
        _check_ids(out[-1].prompt_tokens, model)
    return out


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Tensor):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidValueError(f"prompts is a {type(prompts).__name__}: give text, token ids, or a list of either")
    if isinstance(prompts, bytes):
        raise InvalidValueError("prompts is bytes: decode it to text, or give token ids")
    if prompts and not any(isinstance(prompt, str | Sequence | Tensor) for prompt in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _ids(prompt: Sequence[int] | Tensor) -> list[int]:
    if not isinstance(prompt, Sequence | Tensor) or isinstance(prompt, bytes):
        raise InvalidValueError(f"a prompt is {prompt!r}: give text, or a list of token ids")
    if isinstance(prompt, Tensor):
        whole = not (prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool)
        if prompt.ndim != 1 or not whole:
            shape = tuple(prompt.shape)
            raise InvalidValueError(f"a prompt is {prompt.dtype} of shape {shape}: token ids are whole numbers (T,)")
        return [int(i) for i in prompt.tolist()]
    if any(not isinstance(i, int) or isinstance(i, bool) for i in prompt):
        wrong = next(i for i in prompt if not isinstance(i, int) or isinstance(i, bool))
        raise InvalidValueError(f"a prompt holds {wrong!r}: token ids are whole numbers")
    return list(prompt)


def _inside(ids: list[int], model: Decoder) -> bool:
    return all(0 <= i < model.config.vocab for i in ids)


def _check_ids(ids: list[int], model: Decoder) -> None:
    config = model.config
    if not ids:
        raise InvalidValueError("a prompt is empty: give at least one token")
    if not _inside(ids, model):
        wrong = next(i for i in ids if not 0 <= i < config.vocab)
        raise InvalidValueError(f"a prompt holds token {wrong}: ids are from 0 to {config.vocab - 1}")
    if len(ids) >= config.context:
        raise InvalidValueError(
            f"a prompt has {len(ids)} tokens, and the model's context is {config.context}: shorten it to leave room"
        )
