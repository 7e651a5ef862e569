"""Every error a user can cause, and the checks of plain values that raise them: each names the value and the remedy.

Imports no torch, so that the command line can refuse a bad value at once.
"""

import difflib
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from typing import Any


class DepthgateError(Exception):
    """Root of every error a user of depthgate can cause."""


class InvalidValueError(DepthgateError, ValueError):
    """A value outside its allowed range; also a ValueError."""


class TooLongError(InvalidValueError):
    """A prompt that a model has no room for."""


def show(value: Any, written: Callable[[Any], str] = repr) -> str:
    """A value as errors quote it."""
    text = written(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# What other libraries call what is here; of several words for a thing each leads to the one that is known.
_ELSEWHERE = {
    "lr": "learning_rate",
    "batch": "batch_size per_device_train_batch_size train_batch_size bs",
    "steps": "max_steps num_steps max_iters total_steps iterations epochs num_epochs num_train_epochs max_epochs",
    "accumulate": "gradient_accumulation_steps grad_accum accumulation_steps",
    "warmup": "warmup_steps num_warmup_steps",
    "clip": "max_grad_norm grad_clip gradient_clip_val",
    "out": "output_dir output save_dir outdir",
    "data": "dataset dataset_name train_file corpus",
    "model": "model_name_or_path model_name checkpoint ckpt model_path",
    "dim": "d_model n_embd hidden_size embed_dim width",
    "layers": "n_layer num_layers num_hidden_layers depth",
    "heads": "n_head num_heads num_attention_heads nhead",
    "kv_heads": "num_key_value_heads n_kv_heads",
    "hidden": "intermediate_size dim_feedforward mlp_ratio ffn_dim",
    "context": "block_size seq_len max_seq_len sequence_length max_position_embeddings context_length",
    "vocab": "vocab_size",
    "experts": "num_experts num_local_experts n_experts",
    "top_k": "num_experts_per_tok",
    "capacity": "capacity_factor capacity_ratio",
    "max_new_tokens": "max_tokens max_length num_tokens",
    "MixtureOfDepths": "MoD MOD",
    "MixtureOfExperts": "MoE MOE MoELayer SparseMoE",
}
_HERE = {word: here for here, words in _ELSEWHERE.items() for word in words.split()}


def near(name: Any, known: Iterable[str], least: float = 0.6) -> str:
    """`: did you mean tiny-mod?` for the known name that other libraries call so, or that is spelled nearest; nothing
    where none is as near as `least`."""
    known, wanted = list(known), _HERE.get(str(name).strip("-").removeprefix("model."))
    found = [each for each in known if wanted and each.strip("-").removeprefix("model.") == wanted]
    spelled = difflib.get_close_matches(str(name), known, 3, least)  # first one of the same letters
    found = found or sorted(spelled, key=lambda each: sorted(each) != sorted(str(name)))
    return f": did you mean {found[0]}?" if found else ""


def check_number(value: Any, name: str, interval: str, note: str = "") -> float:
    """A real number in an interval such as "(0, 1]", which contains 1 and not 0."""
    low, high = map(float, interval[1:-1].split(","))
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.nan
    inside = low < number < high or (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)
    if not inside:
        raise InvalidValueError(f"{name} is {show(value)}: it must be a number in {interval}{note}")
    return number


def check_capacity(value: Any, name: str = "capacity") -> float:
    """A share of tokens."""
    return check_number(value, name, "(0, 1]", ", where 1 routes every token")


def check_count(value: Any, name: str, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
    """A whole number from `minimum` to `maximum`."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not minimum <= value <= maximum:
        raise InvalidValueError(f"{name} is {show(value)}: it must be a whole number from {minimum} to {maximum}")
    return int(value)


def check_divides(part: int, whole: int, part_name: str, whole_name: str) -> int:
    """`part` must divide `whole`; returns the quotient."""
    if whole % part:
        raise InvalidValueError(f"{whole_name} {whole} is not divisible by {part_name} {part}: change one of them")
    return whole // part


def check_head(size: int, name: str, key_shift: bool = False) -> int:
    """The width of a head, whose pairs rotary positions turn, and of whose halves key_shift is made."""
    if size % 2:
        raise InvalidValueError(f"{name} is {size}: rotary positions need an even head size; change it")
    if key_shift and size % 4:
        raise InvalidValueError(f"the head size is {size}: key_shift needs a multiple of 4; change it")
    return size


def check_choice(value: Any, name: str, allowed: Collection[str]) -> str:
    """One of a fixed set of names."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidValueError(f"{name} is {show(value)}: it must be one of {', '.join(sorted(allowed))}")
    return value


def installed(package: str, extra: str) -> Any:
    """A package that not all of depthgate needs, and that an extra of it brings along."""
    try:
        return import_module(package)
    except ImportError:
        raise DepthgateError(f"{package} is missing: pip install 'depthgate[{extra}]'") from None


class DepthgateWarning(UserWarning):
    """Something went wrong that depthgate could work around; the text says what was done instead."""


@cache
def warn_once(text: str) -> None:
    """Warn, once in a process for each text, at the line outside depthgate and torch that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("depthgate", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, DepthgateWarning, stacklevel=level)
