"""`depthgate bench generate`: tokens a second and K/V memory of a Mixture-of-Depths decoder and of its dense twin.

Weights are random. The causal rule of every routed layer is shifted so that it routes the configured share of random
tokens, and caches are filled with random keys and values at that share, as if a text of `context` tokens had been read.
With `--model`, a trained model and its dense twin really read `context` tokens of text; the twin's weights are random.
A model is timed only after its cached continuation of a short text was that of the uncached one.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch

from depthgate.bench.config import BenchGenerateConfig
from depthgate.bench.llama import check_transformers, llama_generate
from depthgate.config import ModelConfig
from depthgate.data.token_file import Documents, cache_folder, everything, tokenize
from depthgate.device import machine, resolve_device
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.flops import parameters
from depthgate.generation.engine import Engine, Pass, generate
from depthgate.hf.decoder import export
from depthgate.layers import MoD
from depthgate.loading import held_out, load
from depthgate.model import Decoder
from depthgate.presets import train_config
from depthgate.routing import Predictor, Scores, Slots, Threshold

_CHECKED = 12  # tokens
_PROMPT = 16


def _models(config: BenchGenerateConfig) -> dict[str, ModelConfig]:
    context = max(config.context_sizes) + config.new_tokens + 1
    presets = ("tiny-dense", "tiny-mod") if config.shape == "tiny" else (f"dense-{config.shape}", f"mod-{config.shape}")
    shapes = dict(zip(("dense", "MoD"), (train_config(name).model for name in presets), strict=True))
    layers = shapes["MoD"].layers  # twins: the same weights but for the routers
    return {name: replace(shape, context=context, layers=layers) for name, shape in shapes.items()}


def _built(shape: ModelConfig, config: BenchGenerateConfig) -> Decoder:
    torch.manual_seed(config.seed)
    with torch.device(config.device):  # a large model's weights are drawn where that is fast
        model = Decoder(shape).to(getattr(torch, config.dtype)).eval()
    _calibrate(model)
    return model


@torch.inference_mode()
def _calibrate(model: Decoder) -> None:
    """Shift every causal rule, from the first layer on, to route the router's capacity of random tokens."""
    tokens = torch.randint(model.config.vocab, (8, 256), device=model.embed.weight.device)
    for layer in model.layers:
        if not isinstance(layer, MoD):
            continue
        _, plans = model.hidden(tokens, causal=True)
        place = [other for other in model.layers if isinstance(other, MoD)].index(layer)
        plan = [plan for plan in plans if isinstance(plan, Slots)][place]
        edge = plan.decision.flatten().float().quantile(1 - layer.router.capacity)
        rule = layer.router.rule
        if isinstance(rule, Threshold):
            rule.average.fill_(plan.scores.flatten().float().quantile(1 - layer.router.capacity))
            rule.weight.fill_(1.0)
        else:
            bias = rule.down.bias if isinstance(rule, Predictor) else layer.router.proj.bias
            assert isinstance(rule, Predictor | Scores)
            assert bias is not None
            bias.sub_(edge.to(bias.dtype))


def _filled(model: Decoder, batch: int, context: int) -> Engine:
    """A cache that holds `context` tokens of random keys and values; routed layers their share of them."""
    engine = Engine(model, batch)
    assert engine.cache is not None
    c = model.config
    heads, size = c.kv_heads or c.heads, c.head_size
    for layer, store in zip(model.layers, engine.cache, strict=True):
        share = layer.router.capacity if isinstance(layer, MoD) else 1.0
        n = max(1, int(share * context))
        pos = torch.arange(context, device=engine.device)[-n:].expand(batch, n)
        shape = (batch, heads, n, size)
        k, v = (torch.randn(shape, device=pos.device, dtype=model.embed.weight.dtype) for _ in range(2))
        store.append(k, v, pos)
    engine.lengths = engine.lengths + context
    return engine


def _texts(rows: int, tokens: int, vocab: int, documents: Documents | None) -> list[list[int]]:
    """Tokens of each row: random, or from where the longest documents begin."""
    if documents is None:
        return torch.randint(vocab, (rows, tokens)).tolist()
    if len(documents) < tokens:
        raise DepthgateError(
            f"the text has {len(documents)} tokens, and {tokens} are read: name a longer one with --data"
        )
    longest = documents.bounds.diff().argsort(descending=True, stable=True)
    starts = documents.bounds[longest[torch.arange(rows) % len(longest)]].clamp(max=len(documents) - tokens)
    return documents.read(starts[:, None] + torch.arange(tokens), documents.documents_at(starts, tokens)).tolist()


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _decoded(engine: Engine, last: list[int], config: BenchGenerateConfig, read: Pass | None) -> dict[str, float]:
    """Greedy steps of the whole batch, one after another, from the last token of each row: tokens a second, and what
    share routed layers took, of the tokens that were read before as well."""
    seconds = []
    steps = config.new_tokens if engine.cached else min(4, config.new_tokens)
    tokens = torch.tensor(last, device=engine.device)
    passes = [] if read is None else [read]
    for step in range(steps):
        _sync(config.device)
        start = time.perf_counter()
        passes.append(engine.step(tokens))
        tokens = passes[-1].logits.argmax(-1)
        _sync(config.device)
        if step >= min(3, steps - 1):  # the first ones warm up
            seconds.append(time.perf_counter() - start)
    routed, computed = (torch.cat([getattr(p, name) for p in passes], 1) for name in ("routed", "depths"))
    layers = passes[0].routed.shape[1]
    found = {"tokens_per_second": len(last) / median(seconds)}
    return found | ({"routed": routed.sum().item() / (layers * computed.numel())} if layers else {})


def _right(model: Decoder, config: BenchGenerateConfig, documents: Documents | None) -> bool:
    """Whether a cached greedy continuation is the uncached one, in float32: rounding to bf16 may break ties."""
    torch.manual_seed(config.seed)
    prompts = _texts(2, min(_PROMPT, *config.context_sizes), model.config.vocab, documents)
    options: dict[str, Any] = {"max_new_tokens": _CHECKED, "temperature": 0}
    wide = config.dtype == "float32"
    if not wide:  # in place: there and back changes nothing, and two copies of a large model may not fit
        model.float()
    a, b = (generate(model, prompts, **options, cache=cache) for cache in (True, False))
    if not wide:
        model.to(getattr(torch, config.dtype))
    return [r.tokens for r in a] == [r.tokens for r in b] and [r.routed for r in a] == [r.routed for r in b]


def _rows(
    name: str, model: Decoder, config: BenchGenerateConfig, documents: Documents | None = None
) -> list[dict[str, Any]]:
    _say(f"{name}: {parameters(model.config):,} parameters")
    if not _right(model, config, documents):
        return [{"model": name, "error": "cached and uncached tokens differ"}]
    rows = []
    for batch in config.batch_sizes:
        for context in config.context_sizes:
            for cached in (True, False) if config.uncached else (True,):
                texts = _texts(batch, context + 1, model.config.vocab, documents)
                row: dict[str, Any] = {"model": name, "batch": batch, "context": context, "cache": cached}
                filled = cached and documents is None
                engine = _filled(model, batch, context) if filled else Engine(model, batch, cached)
                read = None if filled else engine.prefill([text[:-1] for text in texts])
                row |= _decoded(engine, [text[-1] for text in texts], config, read)
                if engine.cache is not None:
                    row["kv_bytes"] = engine.cache.nbytes
                rows.append(row)
                _say(json.dumps(row))
                del engine
    return rows


def _settled(config: BenchGenerateConfig, context: int) -> BenchGenerateConfig:
    """With contexts that a trained model has room for."""
    room = context - config.new_tokens
    if config.contexts is None:
        config = replace(config, contexts=max(1, room))
    if max(config.context_sizes) > room:
        raise InvalidValueError(
            f"contexts is {config.contexts}, and {config.new_tokens} new tokens follow, but the model's context is "
            f"{context}: ask for less of either"
        )
    return config


def _llama_rows(shape: ModelConfig, config: BenchGenerateConfig) -> list[dict[str, Any]]:
    """Hugging Face's generate with the weights of the dense model, greedy, its own dynamic cache."""
    name = "Llama, transformers"
    model = _built(shape, config).float()
    net = export(model.eval(), "llama")
    tokens = torch.randint(shape.vocab, (2, _PROMPT), device=config.device)
    with torch.inference_mode():
        if not torch.allclose(net(tokens).logits, model(tokens).logits, atol=1e-3):
            return [{"model": name, "error": "its logits are not those of the dense decoder"}]
    del model
    net.to(getattr(torch, config.dtype))
    rows = []
    for batch in config.batch_sizes:
        for context in config.context_sizes:
            tokens = torch.randint(shape.vocab, (batch, context), device=config.device)
            speed = llama_generate(net, tokens, config.new_tokens)
            rows.append({"model": name, "batch": batch, "context": context, "cache": True, "tokens_per_second": speed})
            _say(json.dumps(rows[-1]))
    return rows


def run(config: BenchGenerateConfig, as_json: bool) -> None:
    """Measure, print one table or one JSON object; raises at the end if a model was wrong."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DepthgateError("device is 'cuda', but no CUDA device is available: use --device cpu")
    if config.llama:
        check_transformers()
    folder = config.model
    if folder is None:
        shapes = _models(config)
        rows = [row for name, shape in shapes.items() for row in _rows(name, _built(shape, config), config)]
        dense = shapes["dense"]
    else:
        model = load(folder).to(resolve_device(config.device), getattr(torch, config.dtype))
        config = _settled(config, model.config.context)
        documents = (
            held_out(folder, model.tokenizer)
            if config.data is None
            else everything(tokenize(config.data, model.tokenizer, cache_folder()))
        )
        dense = replace(model.config, pattern="dense")
        rows = _rows("trained", model, config, documents)
        del model
        rows += _rows("dense", _built(dense, config), config, documents)
    if config.llama:
        rows += _llama_rows(dense, config)
    _with_ratios(rows)
    about = machine(config.device)
    if as_json:
        print(json.dumps({"machine": about, "config": asdict(config), "rows": rows}))
    else:
        _print_table(about, config, rows)
    if wrong := [f"{row['model']}: {row['error']}" for row in rows if "error" in row]:
        raise DepthgateError(f"wrong answer, not timed: {'; '.join(wrong)}")


def _with_ratios(rows: list[dict[str, Any]]) -> None:
    """Each row beside that of the dense model."""
    key: Callable[[dict[str, Any]], tuple[Any, ...]] = lambda row: (row["batch"], row["context"], row["cache"])  # noqa: E731
    dense = {key(row): row for row in rows if row["model"] == "dense" and "error" not in row}
    for row in rows:
        if "error" not in row and (twin := dense.get(key(row))):
            row["speed_ratio"] = row["tokens_per_second"] / twin["tokens_per_second"]
            if "kv_bytes" in row:
                row["kv_ratio"] = row["kv_bytes"] / twin["kv_bytes"]


def _say(text: str) -> None:
    """Progress, on stderr so that stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


def _print_table(about: dict[str, Any], config: BenchGenerateConfig, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    weights = "random weights" if config.model is None else "dense with random weights"
    what = f"{config.model or config.shape}, {weights}, {config.dtype}, {config.new_tokens} tokens"
    table = Table(title=f"Decoding: {what}, medians", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("model", "batch", "context", "cache", "routed", "tokens/s", "K/V MiB", "speed x", "K/V x"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for row in rows:
        if "error" in row:
            table.add_row(row["model"], row["error"], style="red")
            continue
        table.add_row(
            row["model"],
            str(row["batch"]),
            str(row["context"]),
            "yes" if row["cache"] else "no",
            f"{row['routed']:.1%}" if "routed" in row else "-",
            f"{row['tokens_per_second']:,.1f}",
            f"{row['kv_bytes'] / 2**20:.2f}" if "kv_bytes" in row else "-",
            f"{row.get('speed_ratio', float('nan')):.2f}",
            f"{row['kv_ratio']:.3f}" if "kv_ratio" in row else "-",
        )
    console = Console(width=max(120, Console().width))
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), soft_wrap=True)
