"""Models that read a text, seen in one way: our Decoder, and models of transformers that `depthgate convert` wrote."""

import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from depthgate.config import EvalConfig
from depthgate.data.batches import windows
from depthgate.data.tokenizer import HFTokenizer
from depthgate.errors import DepthgateError
from depthgate.hf.code import is_model
from depthgate.hf.convert import routed_layers
from depthgate.hf.folder import load as load_hf
from depthgate.hf.tokenizer_files import load_tokenizer
from depthgate.loading import LoadedDecoder, load
from depthgate.routing import Plans
from depthgate.train.evaluate import documents_of
from depthgate.view.heldout import token_text

_HF_WINDOW = 1024  # tokens read at once: the logits of a large vocabulary have to fit


class Reader(Protocol):
    """What a page wants to know of a model."""

    kinds: tuple[str, ...]  # of its layers, as in ModelConfig.pattern
    window: int  # tokens it reads at once
    experts: tuple[int, int]  # of a layer that has some: those that compute, and null ones

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""

    def held_out(self, tokens: int) -> list[int]:
        """The beginning of the text that the model's run held out."""

    def text(self, token: int) -> str:
        """What a token stands for; bytes that are no text alone are escaped."""

    def __call__(self, tokens: Tensor, causal: bool) -> tuple[Tensor, Plans]:
        """Logits and plans of tokens (1, T)."""


def reader(folder: str, device: str) -> Reader:
    """The model in a folder, whichever it is."""
    if is_model(Path(folder)):
        return HFReader(folder, device)
    return DecoderReader(load(folder).to(device), folder)


class DecoderReader:
    """Our own language model."""

    def __init__(self, model: LoadedDecoder, folder: str = "") -> None:
        self.model, self.folder = model, folder
        self.kinds, self.window = model.config.kinds, model.config.context
        self.experts = (model.config.experts, model.config.null_experts)

    def encode(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text)

    def held_out(self, tokens: int) -> list[int]:
        documents = documents_of(EvalConfig(self.folder, "heldout"), self.model)
        found: list[int] = windows(documents, [0], min(tokens, len(documents))).tokens[0].tolist()
        return found

    def text(self, token: int) -> str:
        return token_text(self.model, token)

    def __call__(self, tokens: Tensor, causal: bool) -> tuple[Tensor, Plans]:
        return self.model(tokens.to(self.model.embed.weight.device), causal=causal)  # type: ignore[no-any-return]


class HFReader:
    """A causal language model of transformers; the routers of its routed layers hand their plans over."""

    def __init__(self, folder: str, device: str) -> None:
        self.model = load_hf(Path(folder)).to(device)
        self.folder, self.tokenizer = folder, load_tokenizer(Path(folder))
        routed = (getattr(self.model.config, "depthgate", None) or {}).get("layers", [])
        self.kinds = tuple("mod" if i in routed else "dense" for i in range(self.model.config.num_hidden_layers))
        self.window, self.experts = min(self.model.config.max_position_embeddings, _HF_WINDOW), (0, 0)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]  # with the token that begins a text, where there is one
        if ids and max(ids) >= self.model.config.vocab_size:
            raise DepthgateError(f"{self.folder} has a tokenizer of another model: it makes the token {max(ids)}")
        return ids

    def held_out(self, tokens: int) -> list[int]:  # noqa: ARG002
        raise DepthgateError(
            "a Hugging Face model has no held-out text: say what it is to read with --text or --prompt"
        )

    def text(self, token: int) -> str:
        piece = str(self.tokenizer.convert_ids_to_tokens(token) or "")
        said: str = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if not said or "\ufffd" in said:  # a part of a character, or a token that is no text
            if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # SentencePiece's names of bytes
                return bytes.fromhex(byte[1]).decode(errors="surrogateescape")
            return self._bytes([token]).decode(errors="surrogateescape") or piece
        return f" {said}" if piece.startswith("▁") and not said.startswith(" ") else said

    @cached_property
    def _bytes(self) -> Callable[[list[int]], bytes]:
        """What tokens of a byte-level tokenizer stand for, parts of characters included."""
        if (fast := getattr(self.tokenizer, "backend_tokenizer", None)) is None:
            return lambda _: b""
        copy = type(fast).from_str(fast.to_str())
        return HFTokenizer(copy, next(iter(copy.get_vocab()))).decode_bytes

    def __call__(self, tokens: Tensor, causal: bool) -> tuple[Tensor, Plans]:
        plans: list[Any] = []
        routers = [layer.depth_router for layer in routed_layers(self.model)]
        hooks = [router.register_forward_hook(lambda _, __, plan: plans.append(plan)) for router in routers]
        how = {"causal_routing": causal} if routers else {}
        try:
            logits = self.model(tokens.to(self.model.device), use_cache=False, **how).logits
        finally:
            for hook in hooks:
                hook.remove()
        return logits, Plans(plans)


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


def encoded(model: Reader, text: str, most: int) -> list[int]:
    """The first tokens of a text."""
    try:
        ids = model.encode(text)[:most]
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
