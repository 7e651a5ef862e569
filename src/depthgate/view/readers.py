"""The text that a model reads, and how well it predicted it."""

import re
from pathlib import Path

import torch
from torch import Tensor

from depthgate.errors import DepthgateError
from depthgate.loading import LanguageModel


def read_text(path: str, most: int) -> tuple[str, int]:
    """The beginning of a file, and how many of its bytes are no text: U+FFFD stands for each."""
    try:
        with Path(path).open(encoding="utf-8", errors="surrogateescape") as file:
            text = file.read(64 * most)  # more than so many tokens can stand for, as a rule
    except OSError as error:
        raise DepthgateError(f"text is {path}: it cannot be read ({error.strerror})") from None
    if not text:
        raise DepthgateError(f"text is {path}: there is nothing in it to read")
    return re.subn("[\udc80-\udcff]", "\ufffd", text)


def encoded(model: LanguageModel, text: str, most: int) -> list[int]:
    """The first tokens of a text."""
    try:
        ids = model.tokenizer.encode(text)[:most]
    except DepthgateError:
        raise
    except Exception as error:  # tokenizers raise plain ones
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise DepthgateError(f"the model's tokenizer cannot express this text ({why}): give another") from None
    if not ids:
        raise DepthgateError(
            f"the text is {_beginning(text)}: the model's tokenizer makes no token of it, give another"
        )
    return ids


def _beginning(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def losses(logits: Tensor, tokens: Tensor) -> list[float]:
    """Nats of each token (1, T) given those before it; not a number for the first."""
    said = torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:].to(logits.device), reduction="none")
    return [float("nan"), *said.tolist()]
