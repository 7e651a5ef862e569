"""`depthgate bench`: how fast models read and write, and the memory that they take: our runs and Hugging Face folders.

Every model reads the same text with its own tokenizer into a cache, and goes on greedily. It is timed only if its
cached continuation of a short text is the uncached one, in float32, where rounding breaks no ties. Timed rounds go
through all models in turn, so that a drift of the machine meets all of them alike.
"""

import json
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from depthgate.commands.config import BenchConfig
from depthgate.console import print_table
from depthgate.data.token_file import cache_folder, everything, tokenize
from depthgate.data.tokenizer import TextTokenizer
from depthgate.device import interleaved, machine, resolve_device
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.generation.engine import Engine, generate
from depthgate.hf.adapter import cast, open_folder
from depthgate.hf.code import is_model
from depthgate.loading import held_out, load

_CHECKED = (24, 12)  # tokens of the short text, and of its continuation
_WARMUP = 3
_FIGURES = {  # figure -> column of the table, and its unit
    "prefill_tokens_per_second": ("prefill tokens/s", 1),
    "decode_tokens_per_second": ("decode tokens/s", 1),
    "memory_bytes": ("memory MiB", 2**20),
    "kv_bytes": ("K/V MiB", 2**20),
}


class _Decoder:
    """One of our runs."""

    def __init__(self, folder: Path, device: str) -> None:
        self.net: Any = load(folder).to(device)
        self.tokenizer: TextTokenizer = self.net.tokenizer
        self.room, self.dtype = self.net.config.context, torch.float32

    def read(self, ids: Tensor) -> None:
        engine = Engine(self.net, len(ids))
        self.logits = engine.prefill(ids.tolist()).logits
        self.engine = engine  # the one before is freed only now, which `_memory` relies on

    def step(self) -> None:
        self.logits = self.engine.step(self.logits.argmax(-1)).logits

    def kv_bytes(self) -> int:
        return self.engine.kv_bytes

    def right(self, ids: Tensor, new: int) -> bool:
        options: dict[str, Any] = {"max_new_tokens": new, "temperature": 0}
        a, b = (generate(self.net, ids.tolist(), **options, cache=cache) for cache in (True, False))
        return [(r.tokens, r.routed) for r in a] == [(r.tokens, r.routed) for r in b]


class _Transformers:
    """A Hugging Face model, dense or converted, run by transformers."""

    def __init__(self, folder: Path, device: str) -> None:
        found = open_folder(folder, device, context=1)
        self.net: Any = found.model
        self.tokenizer: TextTokenizer = found.tokenizer
        self.room, self.dtype = self.net.config.max_position_embeddings, self.net.dtype
        cast(self.net, torch.float32)

    def read(self, ids: Tensor) -> None:
        from transformers import DynamicCache

        cache = DynamicCache()
        self.logits = self.net(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        self.cache = cache  # the one before is freed only now, which `_memory` relies on

    def step(self) -> None:
        token = self.logits[:, -1:].argmax(-1)
        self.logits = self.net(token, past_key_values=self.cache, use_cache=True).logits

    def kv_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers if layer.is_initialized)

    def right(self, ids: Tensor, new: int) -> bool:
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        a, b = (self.net.generate(ids, attention_mask=mask, use_cache=cached, **options) for cached in (True, False))
        return torch.equal(a, b)


@torch.inference_mode()
def measure(config: BenchConfig, device: str) -> list[dict[str, Any]]:
    """A row for each model, batch and context; for a wrong model, one that says so."""
    models = {
        folder: _Transformers(Path(folder), device) if is_model(Path(folder)) else _Decoder(Path(folder), device)
        for folder in config.folders
    }
    contexts = _contexts(config, min(model.room for model in models.values()))
    texts = {folder: _text(config, model.tokenizer, max(contexts)).to(device) for folder, model in models.items()}
    rows: list[dict[str, Any]] = []
    for folder, model in list(models.items()):
        if not model.right(texts[folder][:2, : _CHECKED[0]], min(_CHECKED[1], config.new_tokens)):
            rows.append({"model": folder, "error": "cached and uncached tokens differ"})
            del models[folder]
            continue
        cast(model.net, model.dtype if config.dtype == "auto" else getattr(torch, config.dtype))
    for batch, context in product(config.batch_sizes, contexts):
        reads = {folder: partial(model.read, texts[folder][:batch, :context]) for folder, model in models.items()}
        memory = {folder: _memory(model, reads[folder], device) for folder, model in models.items()}
        read = interleaved(reads, config.repeats, _WARMUP, device)
        warmup = min(_WARMUP, config.new_tokens - 1)
        written = interleaved({f: m.step for f, m in models.items()}, config.new_tokens - warmup, warmup, device)
        found = {}
        for folder, model in models.items():
            speeds = batch * context / median(read[folder]), batch / median(written[folder])
            found[folder] = dict(zip(_FIGURES, (*speeds, memory[folder], model.kv_bytes()), strict=True))
            row = {"model": folder, "batch": batch, "context": context, **found[folder]}
            if first := found.get(config.folders[0]):
                row["ratios"] = {name: found[folder][name] / first[name] for name in _FIGURES}
            rows.append(row)
    return rows


def _memory(model: _Decoder | _Transformers, read: partial[None], device: str) -> int:
    """Bytes of weights and of keys and values; on cuda, of all that reading and a step allocate at most."""
    weights = sum(tensor.nbytes for tensor in {*model.net.parameters(), *model.net.buffers()})
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    read()
    model.step()
    return int(weights + (torch.cuda.max_memory_allocated() - before if device == "cuda" else model.kv_bytes()))


def _contexts(config: BenchConfig, room: int) -> list[int]:
    found = config.context_sizes or [min(512, max(1, room - config.new_tokens))]
    if max(found) + config.new_tokens > room:
        raise InvalidValueError(
            f"context is {max(found)}, and {config.new_tokens} new tokens follow, but a model has room for {room}: "
            "ask for less of either"
        )
    return found


def _text(config: BenchConfig, tokenizer: TextTokenizer, context: int) -> Tensor:
    """Tokens (B, T) that are read, from places spread over the text."""
    if config.data is None:
        documents = held_out(config.folders[0], tokenizer)
    else:
        documents = everything(tokenize(config.data, tokenizer, cache_folder()))
    if len(documents) < context:
        raise DepthgateError(f"the text has {len(documents)} tokens, and {context} are read: name a longer --data")
    starts = torch.linspace(0, len(documents) - context, max(2, *config.batch_sizes)).long()
    return documents.read(starts[:, None] + torch.arange(context), documents.documents_at(starts, context))


def run(config: BenchConfig, as_json: bool) -> None:
    """Measure, print one table or one JSON object; raises at the end if a model was wrong."""
    device = resolve_device(config.device)
    rows, about = measure(config, device), machine(device)
    if as_json:
        print(json.dumps({"machine": about, "config": asdict(config), "rows": rows}))
    else:
        cells = [[row["model"], row["error"]] if "error" in row else _cells(row) for row in rows]
        title = f"{config.new_tokens} tokens written, {config.dtype}, medians; x: times the first model's"
        caption = ", ".join(f"{key} {value}" for key, value in about.items())
        print_table(("model", "batch", "context", *(name for name, _ in _FIGURES.values())), cells, title, caption)
    if wrong := [f"{row['model']}: {row['error']}" for row in rows if "error" in row]:
        raise DepthgateError(f"wrong answer, not timed: {'; '.join(wrong)}")


def _cells(row: dict[str, Any]) -> list[str]:
    figures = [f"{row[name] / unit:,.1f}" for name, (_, unit) in _FIGURES.items()]
    ratios = [f" {ratio:.2f}x" for ratio in row.get("ratios", {}).values()] or [""] * len(figures)
    return [row["model"], str(row["batch"]), str(row["context"]), *map("".join, zip(figures, ratios, strict=True))]
