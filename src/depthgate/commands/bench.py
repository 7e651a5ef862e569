"""`depthgate bench`: how fast models read and write, and the memory that they take: our runs and Hugging Face folders.

Every model reads the same text with its own tokenizer into a cache, and goes on greedily. It is timed only if its
logits with the cache are those without, in float32. Timed rounds go through all models in turn, so that a drift of the
machine meets all of them alike.
"""

import json
from dataclasses import asdict
from functools import partial
from importlib import import_module
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from depthgate.config import BenchConfig
from depthgate.console import print_table
from depthgate.device import interleaved, machine, resolve_device
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.generation.plain import Reader
from depthgate.hf.adapter import cast
from depthgate.loading import LanguageModel, LoadedDecoder, open_model, text_of

_CHECKED = (24, 12)  # tokens that are read, and written, to compare logits
_TOLERANCE = 1e-3  # of the largest logit
_FIGURES = ("prefill_tokens_per_second", "decode_tokens_per_second", "memory_bytes", "kv_bytes")


class _Cached:
    """A model with its cache: one of our runs with our own, a Hugging Face model with that of transformers."""

    def __init__(self, model: Any) -> None:
        self.model, self.ours = model, isinstance(model, LoadedDecoder)
        self.net = model if self.ours else model.model
        self.room = model.context if self.ours else self.net.config.max_position_embeddings

    def read(self, ids: Tensor) -> None:
        """Read tokens (B, T) into a new cache."""
        self.cache: Any = Reader(self.net, len(ids)) if self.ours else import_module("transformers").DynamicCache()
        self._go_on(ids)

    def step(self) -> None:
        """Read the likeliest next token."""
        self._go_on(self.logits.argmax(-1)[:, None])

    def _go_on(self, ids: Tensor) -> None:
        if not self.ours:
            found = self.net(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.logits = found.logits[:, -1]
        else:
            found = self.cache.step(ids[:, 0]) if ids.shape[1] == 1 else self.cache.prefill(ids.tolist())
            self.logits = found.logits

    def kv_bytes(self) -> int:
        if self.ours:
            return int(self.cache.kv_bytes)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers if layer.is_initialized)


@torch.inference_mode()
def measure(config: BenchConfig, device: str) -> list[dict[str, Any]]:
    """A row for each model, batch and context; for a wrong model, one that says so."""
    cached = {folder: _Cached(open_model(folder, device)) for folder in config.models.split(",")}
    room = min(each.room for each in cached.values())
    contexts = config.numbers("context") or [max(1, min(512, room - config.new_tokens))]
    if max(contexts) + config.new_tokens > room:
        new = f"{config.new_tokens} new tokens follow, but a model has room for {room}"
        raise InvalidValueError(f"context is {max(contexts)}, and {new}: ask for less of either")
    texts = {folder: _text(config, each.model, max(contexts)) for folder, each in cached.items()}
    rows: list[dict[str, Any]] = []
    for folder, each in list(cached.items()):
        if not _right(each, texts[folder], config):
            rows.append({"model": folder, "error": "logits with and without a cache differ"})
            del cached[folder]
    for batch, context in product(config.numbers("batch"), contexts):
        reads = {folder: partial(each.read, texts[folder][:batch, :context]) for folder, each in cached.items()}
        prefill = interleaved(reads, config.repeats, 3, device)
        decode = interleaved({folder: each.step for folder, each in cached.items()}, config.new_tokens, 0, device)
        first: dict[str, float] = {}
        for folder, each in cached.items():
            weights = sum(tensor.nbytes for tensor in {*each.net.parameters(), *each.net.buffers()})
            speeds = batch * context / median(prefill[folder]), batch / median(decode[folder])
            found = dict(zip(_FIGURES, (*speeds, weights + each.kv_bytes(), each.kv_bytes()), strict=True))
            first = first or found
            ratios = {name: value / first[name] for name, value in found.items()}
            rows.append({"model": folder, "batch": batch, "context": context, **found, "ratios": ratios})
    return rows


def _text(config: BenchConfig, model: LanguageModel, context: int) -> Tensor:
    """Tokens (B, T) that a model reads, from places spread over the text."""
    documents = text_of(config.models.split(",")[0], model.tokenizer, config.data)
    if len(documents) < context:
        raise DepthgateError(f"the text has {len(documents)} tokens, and {context} are read: name a longer --data")
    starts = torch.linspace(0, len(documents) - context, max(2, *config.numbers("batch"))).long()
    places = documents.documents_at(starts, context)
    return documents.read(starts[:, None] + torch.arange(context), places).to(model.device)


def _right(cached: _Cached, text: Tensor, config: BenchConfig) -> bool:
    """True if logits with a cache are those without, in float32. The model is left in the dtype that is asked for."""
    dtype = next(cached.net.parameters()).dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    cast(cached.net, torch.float32)
    ids, right = text[:2, : _CHECKED[0]], True
    cached.read(ids)
    for _ in range(min(_CHECKED[1], config.new_tokens)):
        wanted = cached.model(ids, causal=True).logits[:, -1]
        right = right and bool((cached.logits - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())
        ids = torch.cat([ids, cached.logits.argmax(-1)[:, None]], 1)
        cached.step()
    cast(cached.net, dtype)
    return right


def run(config: BenchConfig, as_json: bool) -> None:
    """Measure, print one table or one JSON object; raises at the end if a model was wrong."""
    device = resolve_device(config.device)
    rows, about = measure(config, device), machine(device)
    if as_json:
        print(json.dumps({"machine": about, "config": asdict(config), "rows": rows}))
    else:
        columns = ("model", "batch", "context", "prefill tokens/s", "decode tokens/s", "memory MiB", "K/V MiB")
        title = f"{config.new_tokens} tokens decoded, {config.dtype}, medians; memory: weights + K/V; x: over the first"
        print_table(columns, map(_cells, rows), title)
        print(", ".join(f"{key} {value}" for key, value in about.items()))
    if wrong := [row["model"] for row in rows if "error" in row]:
        raise DepthgateError(f"wrong answer, not timed: {', '.join(wrong)}: logits with and without a cache differ")


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["model"], row["error"]]
    values = ((row[name] / (2**20 if "bytes" in name else 1), row["ratios"][name]) for name in _FIGURES)
    return [row["model"], str(row["batch"]), str(row["context"]), *(f"{value:,.1f} {x:.2f}x" for value, x in values)]
