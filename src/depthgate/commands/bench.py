"""`depthgate bench`: how fast models read and write, and the memory that they take: our runs and Hugging Face folders.

Every model reads the same text with its own tokenizer into a cache, and goes on greedily. It is timed only if its
logits with the cache are those without, in float32. Our runs, and what `to_decoder` takes, are also timed on the path
of the engine, if its tokens are the same. A routed model that is alone is timed beside its dense twin. Timed rounds go
through all models in turn, so that a drift of the machine meets all of them alike.
"""

import json
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from depthgate.config import BenchConfig
from depthgate.console import print_table
from depthgate.device import copy_rate, interleaved, machine, resolve_device
from depthgate.errors import DepthgateError, InvalidValueError, warn_once
from depthgate.generation.calls import generate
from depthgate.generation.config import Sampling
from depthgate.generation.engine import Engine, Request, cannot_run
from depthgate.generation.plain import Reader
from depthgate.hf.adapter import HFLanguageModel, cast
from depthgate.hf.conversion import to_dense
from depthgate.hf.decoder_weights import to_decoder
from depthgate.loading import LanguageModel, LoadedDecoder, open_model, text_of

_CHECKED = (24, 12)  # tokens that are read, and written, to compare logits
_TOLERANCE = 1e-3  # of the largest logit
_SPARE = 8  # tokens that requests of the engine may have more than are timed, so that none ends
_FIGURES = ("prefill_tokens_per_second", "decode_tokens_per_second", "memory_bytes", "kv_bytes", "bandwidth_share")


class _Cached:
    """A model with its cache: one of our runs with our own, a Hugging Face model with that of transformers."""

    path = "plain"

    def __init__(self, model: Any) -> None:
        self.model, self.ours = model, isinstance(model, LoadedDecoder)
        self.net = model if self.ours else model.model
        self.room = model.context if self.ours else self.net.config.max_position_embeddings
        self.decoder, self.no_engine = self.net, ""  # what the engine runs, or why it does not
        try:
            if not self.ours:
                self.decoder = to_decoder(self.net, LoadedDecoder)
                self.decoder.tokenizer = model.tokenizer
            self.no_engine = cannot_run(self.decoder)
        except DepthgateError as error:
            self.no_engine = str(error)

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


class _ByEngine(_Cached):
    """A Decoder on the path of the engine, with room for so many tokens."""

    path, rows, requests = "engine", 0, list[Request]()

    def __init__(self, model: LoadedDecoder, room: int) -> None:
        self.net, self.room = model, min(room, model.context)

    def read(self, ids: Tensor) -> None:
        new = self.room - ids.shape[1]
        if self.rows != len(ids):  # once: it has memory for all that comes
            self.rows, self.engine = len(ids), Engine(self.net, rows=len(ids), memory=len(ids) * (self.room + 256))
            self.requests = []
        for request in self.requests:
            self.engine.cancel(request)
        self.requests = [self.engine.submit(each, Sampling(temperature=0.0, max_new_tokens=new)) for each in ids]
        for request in self.requests:
            request.end = -1  # all rows go on
        while any(not request.result.tokens for request in self.requests):
            self.engine.turn()
        self.bytes = self.engine.kv_bytes

    def step(self) -> None:
        self.engine.turn()

    def kv_bytes(self) -> int:
        return self.bytes


@torch.inference_mode()
def measure(config: BenchConfig, device: str) -> list[dict[str, Any]]:
    """A row for each model, batch and context; for a wrong model, one that says so."""
    cached = {folder: _Cached(open_model(folder, device)) for folder in config.models.split(",")}
    one, *others = cached.values()
    if not others and {*one.model.kinds} != {"dense"}:
        cached = {"dense twin": _Cached(_twin(one.model)), **cached}
    room = min(each.room for each in cached.values())
    contexts = config.numbers("context") or [max(1, min(512, room - config.new_tokens))]
    if max(contexts) + config.new_tokens > room:
        new = f"{config.new_tokens} new tokens follow, but a model has room for {room}"
        raise InvalidValueError(f"context is {max(contexts)}, and {new}: ask for less of either")
    texts = {folder: _text(config, each.model, max(contexts)) for folder, each in cached.items()}
    rows: list[dict[str, Any]] = []
    paths: dict[str, _Cached] = {}
    for folder, each in cached.items():
        if why := _wrong(each, texts[folder], config):
            rows.append({"model": folder, "error": why})
            continue
        paths[folder] = each
        if each.no_engine:
            warn_once(f"{folder} is not timed on the engine: {each.no_engine}")
        else:
            paths[f"{folder}, engine"] = _ByEngine(each.decoder, max(contexts) + config.new_tokens + _SPARE)
            texts[f"{folder}, engine"] = texts[folder]
    rate = copy_rate(device)
    for batch, context in product(config.numbers("batch"), contexts):
        reads = {name: partial(each.read, texts[name][:batch, :context]) for name, each in paths.items()}
        prefill = interleaved(reads, config.repeats, 3, device)
        decode = interleaved({name: each.step for name, each in paths.items()}, config.new_tokens, 0, device)
        first: dict[str, float] = {}
        for name, each in paths.items():
            weights = sum(tensor.nbytes for tensor in {*each.net.parameters(), *each.net.buffers()})
            speeds = batch * context / median(prefill[name]), batch / median(decode[name])
            memory = weights + each.kv_bytes()  # what a step of a dense model reads
            share = memory / median(decode[name]) / rate
            found = dict(zip(_FIGURES, (*speeds, memory, each.kv_bytes(), share), strict=True))
            first = first or found
            ratios = {figure: value / first[figure] for figure, value in found.items()}
            about = {"model": name.removesuffix(", engine"), "path": each.path, "batch": batch, "context": context}
            rows.append({**about, **found, "ratios": ratios})
    return rows


def _twin(model: LanguageModel) -> LanguageModel:
    """The model with every layer dense; a run's has random weights, which take the time of any others."""
    if isinstance(model, HFLanguageModel):
        return HFLanguageModel(to_dense(deepcopy(model.model)), model.tokenizer, model.context)
    twin = LoadedDecoder(replace(model.config, pattern="dense", first=None)).to(model.embed.weight)
    twin.tokenizer = model.tokenizer
    return twin.eval()


def _text(config: BenchConfig, model: LanguageModel, context: int) -> Tensor:
    """Tokens (B, T) that a model reads, from places spread over the text."""
    documents = text_of(config.models.split(",")[0], model.tokenizer, config.data)
    if len(documents) < context:
        raise DepthgateError(f"the text has {len(documents)} tokens, and {context} are read: name a longer --data")
    starts = torch.linspace(0, len(documents) - context, max(2, *config.numbers("batch"))).long()
    places = documents.documents_at(starts, context)
    return documents.read(starts[:, None] + torch.arange(context), places).to(model.device)


def _wrong(cached: _Cached, text: Tensor, config: BenchConfig) -> str:
    """The reason why a model is not timed; "" if its logits with a cache are those without, in float32, and tokens of
    the engine the same. The model is left in the dtype that is asked for."""
    dtype = next(cached.net.parameters()).dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    for net in (cached.net, cached.decoder):
        cast(net, torch.float32)
    ids, right, many = text[:2, : _CHECKED[0]], True, min(_CHECKED[1], config.new_tokens)
    cached.read(ids)
    for _ in range(many):
        wanted = cached.model(ids, causal=True).logits[:, -1]
        right = right and bool((cached.logits - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())
        ids = torch.cat([ids, cached.logits.argmax(-1)[:, None]], 1)
        cached.step()
    why = "" if right else "logits with and without a cache differ"
    if right and not cached.no_engine:
        found = generate(cached.decoder, text[:2, : _CHECKED[0]], temperature=0, max_new_tokens=many, engine=True)
        plain = ids[:, -many:].tolist()  # goes on where the engine ends a text
        if any(each.tokens != row[: len(each.tokens)] for each, row in zip(found, plain, strict=True)):
            why = "tokens of the engine and of the plain path differ"
    for net in (cached.net, cached.decoder):
        cast(net, dtype)
    return why


def run(config: BenchConfig, as_json: bool) -> None:
    """Measure, print one table or one JSON object; raises at the end if a model was wrong."""
    device = resolve_device(config.device)
    rows, about = measure(config, device), machine(device)
    if as_json:
        print(json.dumps({"machine": about, "config": asdict(config), "rows": rows}))
    else:
        figures = ("prefill tokens/s", "decode tokens/s", "memory MiB", "K/V MiB", "of the bandwidth")
        columns = ("model", "path", "batch", "context", *figures)
        title = f"{config.new_tokens} tokens decoded, {config.dtype}, medians; memory: weights + K/V; x: over the first"
        print_table(columns, map(_cells, rows), title)
        print(", ".join(f"{key} {value}" for key, value in about.items()))
    if wrong := [row["model"] for row in rows if "error" in row]:
        raise DepthgateError(f"wrong answer, not timed: {', '.join(wrong)}")


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["model"], row["error"]]
    values = ((row[name] / (2**20 if "bytes" in name else 1), row["ratios"][name]) for name in _FIGURES)
    about = [str(row[name]) for name in ("model", "path", "batch", "context")]
    return [*about, *(f"{value:,.1f} {x:.2f}x" if value >= 10 else f"{value:.3g} {x:.2f}x" for value, x in values)]
