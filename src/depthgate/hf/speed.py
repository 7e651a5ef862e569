"""`depthgate bench hf`: tokens a second that Hugging Face models read and write, dense and converted ones side by side.

Every model reads the same text, and what it writes is greedy. A model is timed only after its cached continuation of a
short text was that of the uncached one, in float32, where no tie is broken by rounding.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from depthgate.data.token_file import cache_folder, everything, tokenize
from depthgate.device import machine, resolve_device
from depthgate.errors import DepthgateError
from depthgate.hf.adapter import HFLanguageModel, cast, compute_dtype, tokenizer_of
from depthgate.hf.config import BenchHFConfig
from depthgate.hf.folder import load

_CHECKED = 12  # tokens of a continuation
_READ = 24  # tokens before it
_WARMUP = 3


def run(config: BenchHFConfig, as_json: bool) -> None:
    """Measure, print one table or one JSON object; raises at the end if a model was wrong."""
    device = resolve_device(config.device)
    rows = []
    for folder in config.folders:
        rows += speeds(folder, config, device)
        for row in rows[-len(config.batch_sizes) :]:
            print(json.dumps(row), file=sys.stderr, flush=True)
    about = machine(device)
    if as_json:
        print(json.dumps({"machine": about, "config": asdict(config), "rows": rows}))
    else:
        _print_table(about, config, rows)
    if wrong := [f"{row['model']}: {row['error']}" for row in rows if "error" in row]:
        raise DepthgateError(f"wrong answer, not timed: {'; '.join(wrong)}")


@torch.inference_mode()
def speeds(folder: str, config: BenchHFConfig, device: str) -> list[dict[str, Any]]:
    """A row for each size of batch."""
    model, tokenizer = load(Path(folder)), tokenizer_of(Path(folder))
    HFLanguageModel(model, tokenizer, config.context + config.new_tokens)  # refuses what does not fit
    dtype = compute_dtype(config.dtype, device, model)
    documents = everything(tokenize(config.data, tokenizer, cache_folder()))
    largest = max(config.batch_sizes)
    if len(documents) < config.context:
        raise DepthgateError(f"the text has {len(documents)} tokens, and {config.context} are read: give a longer one")
    starts = torch.linspace(0, len(documents) - config.context, largest).long()
    places = documents.documents_at(starts, config.context)
    ids = documents.read(starts[:, None] + torch.arange(config.context), places).to(device)
    cast(model.to(device), torch.float32)
    if not _right(model, ids[:2, :_READ]):
        return [{"model": folder, "error": "cached and uncached tokens differ"}]
    cast(model, dtype)
    return [{"model": folder, "batch": batch, **_timed(model, ids[:batch], config)} for batch in config.batch_sizes]


def _right(model: Any, ids: Tensor) -> bool:
    options = {"max_new_tokens": _CHECKED, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    a, b = (model.generate(ids, attention_mask=mask, use_cache=cached, **options) for cached in (True, False))
    return torch.equal(a, b)


def _timed(model: Any, ids: Tensor, config: BenchHFConfig) -> dict[str, float]:
    """Medians: tokens a second of reading `ids` (B, T) into a cache, and of writing after it."""
    from transformers import DynamicCache

    read: list[float] = []
    for _ in range(_WARMUP + config.repeats):
        store, start = DynamicCache(), _now(ids.device)
        logits = model(ids, past_key_values=store, use_cache=True, logits_to_keep=1).logits
        read.append(_now(ids.device) - start)
    write: list[float] = []
    for _ in range(_WARMUP + config.new_tokens):
        start = _now(ids.device)
        token = logits[:, -1:].argmax(-1)
        logits = model(token, past_key_values=store, use_cache=True).logits
        write.append(_now(ids.device) - start)
    prefill, decode = (median(seconds[_WARMUP:]) for seconds in (read, write))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in store.layers if layer.is_initialized)
    return {
        "prefill_tokens_per_second": ids.numel() / prefill,
        "decode_tokens_per_second": len(ids) / decode,
        "kv_bytes": held,
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _print_table(about: dict[str, Any], config: BenchHFConfig, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"Read {config.context} tokens of {config.data}, write {config.new_tokens}, {config.dtype}, medians"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("model", "batch", "prefill tokens/s", "decode tokens/s", "K/V MiB"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=name != "model", overflow="fold")
    for row in rows:
        if "error" in row:
            table.add_row(row["model"], row["error"], style="red")
            continue
        speed = [f"{row[f'{name}_tokens_per_second']:,.0f}" for name in ("prefill", "decode")]
        table.add_row(row["model"], str(row["batch"]), *speed, f"{row['kv_bytes'] / 2**20:.1f}")
    console = Console(width=max(100, Console().width))
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), soft_wrap=True)
