"""`depthgate bench`: how fast models read and write, and the memory that they take: our runs and Hugging Face folders.

Every model reads the same text with its own tokenizer into a cache, and goes on greedily. It is timed only if its
logits with the cache are those without, in float32. Timed rounds go through all models in turn, so that a drift of the
machine meets all of them alike.
"""

import json
from dataclasses import asdict
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from depthgate.commands.config import BenchConfig
from depthgate.console import print_table
from depthgate.data.token_file import cache_folder, everything, tokenize
from depthgate.device import interleaved, machine, resolve_device
from depthgate.errors import DepthgateError
from depthgate.generation.engine import Engine
from depthgate.hf.adapter import cast
from depthgate.loading import LanguageModel, LoadedDecoder, held_out, open_model

_CHECKED = (24, 12)  # tokens that are read, and written, to compare logits
_TOLERANCE = 1e-3  # of the largest logit
_WARMUP = 3
_FIGURES = ("prefill_tokens_per_second", "decode_tokens_per_second", "memory_bytes", "kv_bytes")


class _Decoder:
    """One of our runs and its cache."""

    def __init__(self, model: LoadedDecoder) -> None:
        self.net, self.room = model, model.context

    def read(self, ids: Tensor) -> None:
        engine = Engine(self.net, len(ids))
        self.logits = engine.prefill(ids.tolist()).logits
        self.engine = engine  # the cache before is freed only now, which `_memory` relies on

    def step(self) -> None:
        self.logits = self.engine.step(self.logits.argmax(-1)).logits

    def kv_bytes(self) -> int:
        return self.engine.kv_bytes


class _Transformers:
    """A Hugging Face model and the cache of transformers."""

    def __init__(self, model: Any) -> None:
        self.net, self.room = model.model, model.model.config.max_position_embeddings

    def read(self, ids: Tensor) -> None:
        from transformers import DynamicCache

        cache = DynamicCache()
        self.logits = self.net(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        self.cache = cache  # the cache before is freed only now, which `_memory` relies on

    def step(self) -> None:
        token = self.logits.argmax(-1)[:, None]
        self.logits = self.net(token, past_key_values=self.cache, use_cache=True).logits[:, -1]

    def kv_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers if layer.is_initialized)


_Cached = _Decoder | _Transformers


@torch.inference_mode()
def measure(config: BenchConfig, device: str) -> list[dict[str, Any]]:
    """A row for each model, batch and context; for a wrong model, one that says so."""
    models = {folder: open_model(folder, device) for folder in config.folders}
    cached = {f: _Decoder(m) if isinstance(m, LoadedDecoder) else _Transformers(m) for f, m in models.items()}
    contexts = config.contexts(min(each.room for each in cached.values()))
    texts = {folder: _text(config, model, max(contexts)) for folder, model in models.items()}
    rows: list[dict[str, Any]] = []
    for folder, model in models.items():
        net = cached[folder].net
        dtype = next(net.parameters()).dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        cast(net, torch.float32)
        if not _right(cached[folder], model, texts[folder][:2, : _CHECKED[0]], min(_CHECKED[1], config.new_tokens)):
            rows.append({"model": folder, "error": "logits with and without a cache differ"})
            del cached[folder]
        cast(net, dtype)
    for batch, context in product(config.batch_sizes, contexts):
        reads = {folder: partial(each.read, texts[folder][:batch, :context]) for folder, each in cached.items()}
        memory = {folder: _memory(each, reads[folder], device) for folder, each in cached.items()}
        read = interleaved(reads, config.repeats, _WARMUP, device)
        warmup = min(_WARMUP, config.new_tokens - 1)
        written = interleaved({f: each.step for f, each in cached.items()}, config.new_tokens - warmup, warmup, device)
        found = {}
        for folder, each in cached.items():
            speeds = batch * context / median(read[folder]), batch / median(written[folder])
            found[folder] = dict(zip(_FIGURES, (*speeds, memory[folder], each.kv_bytes()), strict=True))
            row = {"model": folder, "batch": batch, "context": context, **found[folder]}
            if first := found.get(config.folders[0]):
                row["ratios"] = {name: found[folder][name] / first[name] for name in _FIGURES}
            rows.append(row)
    return rows


def _text(config: BenchConfig, model: LanguageModel, context: int) -> Tensor:
    """Tokens (B, T) that a model reads, from places spread over the text."""
    if config.data is None:
        documents = held_out(config.folders[0], model.tokenizer)
    else:
        documents = everything(tokenize(config.data, model.tokenizer, cache_folder()))
    if len(documents) < context:
        raise DepthgateError(f"the text has {len(documents)} tokens, and {context} are read: name a longer --data")
    starts = torch.linspace(0, len(documents) - context, max(2, *config.batch_sizes)).long()
    places = documents.documents_at(starts, context)
    return documents.read(starts[:, None] + torch.arange(context), places).to(model.device)


def _right(cached: _Cached, model: LanguageModel, ids: Tensor, new: int) -> bool:
    """True if the logits of the cache are the model's own, for the next tokens after `ids` (B, T)."""
    cached.read(ids)
    for _ in range(new):
        wanted = model(ids, causal=True).logits[:, -1].float()
        if not (cached.logits - wanted).abs().max() <= _TOLERANCE * wanted.abs().max():
            return False
        ids = torch.cat([ids, cached.logits.argmax(-1)[:, None]], 1)
        cached.step()
    return True


def _memory(cached: _Cached, read: partial[None], device: str) -> int:
    """Bytes of weights and of keys and values; on cuda, of all that reading and a step allocate at most."""
    weights: int = sum(tensor.nbytes for tensor in {*cached.net.parameters(), *cached.net.buffers()})
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    read()
    cached.step()
    return weights + (torch.cuda.max_memory_allocated() - before if device == "cuda" else cached.kv_bytes())


def run(config: BenchConfig, as_json: bool) -> None:
    """Measure, print one table or one JSON object; raises at the end if a model was wrong."""
    device = resolve_device(config.device)
    rows, about = measure(config, device), machine(device)
    if as_json:
        print(json.dumps({"machine": about, "config": asdict(config), "rows": rows}))
    else:
        columns = ("model", "batch", "context", "prefill tokens/s", "decode tokens/s", "memory MiB", "K/V MiB")
        title = f"{config.new_tokens} tokens written, {config.dtype}, medians; x: times the first model's"
        print_table(columns, map(_cells, rows), title, ", ".join(f"{key} {value}" for key, value in about.items()))
    if wrong := [f"{row['model']}: {row['error']}" for row in rows if "error" in row]:
        raise DepthgateError(f"wrong answer, not timed: {'; '.join(wrong)}")


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["model"], row["error"]]
    figures = [f"{row[name] / (2**20 if 'bytes' in name else 1):,.1f}" for name in _FIGURES]
    ratios = [f" {ratio:.2f}x" for ratio in row.get("ratios", {}).values()] or [""] * len(figures)
    return [row["model"], str(row["batch"]), str(row["context"]), *map("".join, zip(figures, ratios, strict=True))]
