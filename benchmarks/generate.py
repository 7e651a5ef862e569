"""Tokens a second and K/V memory of a Mixture-of-Depths decoder and of its dense twin, with random weights.

    python benchmarks/generate.py --shape 1b --batches 1,8,64 --contexts 2048,16384 --device cuda --dtype bfloat16

The causal rule of every routed layer is shifted so that it routes the configured share of random tokens, and caches are
filled with random keys and values at that share, as if a text of `context` tokens had been read. A model is timed only
after its cached continuation of a short text was the uncached one. `depthgate bench` times trained models.
"""

import argparse
import json
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import measure
from depthgate.config import ModelConfig
from depthgate.errors import InvalidValueError
from depthgate.flops import parameters
from depthgate.generation.calls import generate
from depthgate.generation.plain import Reader
from depthgate.layers import MoD
from depthgate.model import Decoder
from depthgate.presets import train_config
from depthgate.routing import Predictor, Scores, Slots, Threshold

_CHECKED = 12  # tokens
_PROMPT = 16
_LLAMA = "Llama, transformers"


def _models(config: argparse.Namespace) -> dict[str, ModelConfig]:
    context = max(config.contexts) + config.new_tokens + 1
    presets = ("tiny-dense", "tiny-mod") if config.shape == "tiny" else (f"dense-{config.shape}", f"mod-{config.shape}")
    shapes = dict(zip(("dense", "MoD"), (train_config(name).model for name in presets), strict=True))
    layers = shapes["MoD"].layers  # twins: the same weights but for the routers
    return {name: replace(shape, context=context, layers=layers) for name, shape in shapes.items()}


def _built(shape: ModelConfig, config: argparse.Namespace) -> Decoder:
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


def _filled(model: Decoder, batch: int, context: int) -> Reader:
    """An engine whose cache holds `context` tokens of random keys and values; routed layers their share of them."""
    engine = Reader(model, batch)
    c = model.config
    heads, size = c.kv_heads or c.heads, c.head_size
    for layer, store in zip(model.layers, engine.caches, strict=True):
        share = layer.router.capacity if isinstance(layer, MoD) else 1.0
        n = max(1, int(share * context))
        pos = torch.arange(context, device=engine.device)[-n:].expand(batch, n)
        shape = (batch, heads, n, size)
        k, v = (torch.randn(shape, device=pos.device, dtype=model.embed.weight.dtype) for _ in range(2))
        store.append(k, v, pos)
    engine.lengths = engine.lengths + context
    return engine


def _texts(rows: int, tokens: int, vocab: int) -> list[list[int]]:
    return torch.randint(vocab, (rows, tokens)).tolist()


@torch.inference_mode()
def _decoded(engine: Reader, batch: int, config: argparse.Namespace) -> dict[str, float]:
    """Greedy steps of the whole batch, one after another: tokens a second, and the share that routed layers took."""
    steps = config.new_tokens if engine.cached else min(4, config.new_tokens)
    tokens = torch.randint(engine.model.config.vocab, (batch,), device=engine.device)
    seconds, routed = [], []
    for step in range(steps):
        _sync(config.device)
        start = time.perf_counter()
        found = engine.step(tokens)
        tokens = found.logits.argmax(-1)
        _sync(config.device)
        if step >= min(3, steps - 1):  # the first ones warm up
            seconds.append(time.perf_counter() - start)
        routed.append(found.routed.float())
    speed = {"tokens_per_second": batch / median(seconds)}
    return speed | ({"routed": torch.stack(routed).mean().item()} if routed[0].numel() else {})


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _right(model: Decoder, config: argparse.Namespace) -> bool:
    """True if a cached greedy continuation is the uncached one, in float32: rounding to bf16 may break ties."""
    torch.manual_seed(config.seed)
    prompts = _texts(2, min(_PROMPT, *config.contexts), model.config.vocab)
    options: dict[str, Any] = {"max_new_tokens": _CHECKED, "temperature": 0}
    model.float()  # in place: there and back changes nothing, and two copies of a large model may not fit
    a, b = (generate(model, prompts, **options, cache=cache) for cache in (True, False))
    model.to(getattr(torch, config.dtype))
    return [(r.tokens, r.routed) for r in a] == [(r.tokens, r.routed) for r in b]


def _rows(name: str, model: Decoder, config: argparse.Namespace) -> list[dict[str, Any]]:
    measure.say(f"{name}: {parameters(model.config):,} parameters")
    if not _right(model, config):
        return [{"model": name, "error": "cached and uncached tokens differ"}]
    rows = []
    for batch in config.batches:
        for context in config.contexts:
            for cached in (True, False) if config.uncached else (True,):
                if cached:
                    engine = _filled(model, batch, context)
                else:
                    engine = Reader(model, batch, cached=False)
                    engine.prefill(_texts(batch, context, model.config.vocab))
                row: dict[str, Any] = {"model": name, "batch": batch, "context": context, "cache": cached}
                row |= _decoded(engine, batch, config)
                if cached:
                    row["kv_bytes"] = engine.cache_bytes
                rows.append(row)
                measure.say(json.dumps(row))
                del engine
    return rows


def _llama_rows(shape: ModelConfig, config: argparse.Namespace) -> list[dict[str, Any]]:
    """Hugging Face's generate with the weights of the dense model, greedy, its own dynamic cache."""
    from depthgate.hf import export

    model = _built(shape, config).float()
    net = export(model.eval(), "llama")
    tokens = torch.randint(shape.vocab, (2, _PROMPT), device=config.device)
    with torch.inference_mode():
        if not torch.allclose(net(tokens).logits, model(tokens).logits, atol=1e-3):
            return [{"model": _LLAMA, "error": "its logits are not those of the dense decoder"}]
    del model
    net.to(getattr(torch, config.dtype))
    rows = []
    for batch in config.batches:
        for context in config.contexts:
            tokens = torch.randint(shape.vocab, (batch, context), device=config.device)
            speed = measure.llama_generate(net, tokens, config.new_tokens)
            row = {"model": _LLAMA, "batch": batch, "context": context, "cache": True, "tokens_per_second": speed}
            rows.append(row)
            measure.say(json.dumps(row))
    return rows


def _with_ratios(rows: list[dict[str, Any]]) -> None:
    """Add the ratios to the dense model."""
    dense = {_case(row): row for row in rows if row["model"] == "dense" and "error" not in row}
    for row in rows:
        if "error" not in row and (twin := dense.get(_case(row))):
            row["speed_ratio"] = row["tokens_per_second"] / twin["tokens_per_second"]
            if "kv_bytes" in row:
                row["kv_ratio"] = row["kv_bytes"] / twin["kv_bytes"]


def _case(row: dict[str, Any]) -> tuple[int, int, bool]:
    return row["batch"], row["context"], row["cache"]


def options() -> argparse.ArgumentParser:
    found = measure.parser(__doc__)
    found.add_argument("--shape", choices=("tiny", "124m", "1b"), default="tiny", help="that of the presets")
    found.add_argument("--batches", type=measure.whole_numbers, default=[1, 8], help="sequences decoded at once")
    found.add_argument("--contexts", type=measure.whole_numbers, default=[256], help="tokens that the cache holds")
    found.add_argument("--new_tokens", type=int, default=32, help="timed tokens of every sequence")
    found.add_argument("--uncached", action=argparse.BooleanOptionalAction, default=True, help="also without a cache")
    found.add_argument("--llama", action="store_true", help="also Hugging Face's generate with a model of that shape")
    return found


def run(config: argparse.Namespace) -> None:
    """Measure every shape, and report."""
    if config.new_tokens < 1:
        raise InvalidValueError(f"new_tokens is {config.new_tokens}: it must be at least 1")
    if config.llama:
        measure.check_transformers()
    shapes = _models(config)
    rows = [row for name, shape in shapes.items() for row in _rows(name, _built(shape, config), config)]
    if config.llama:
        rows += _llama_rows(shapes["dense"], config)
    _with_ratios(rows)
    columns = {
        "model": lambda row: row["model"],
        "batch": measure.figure("batch"),
        "context": measure.figure("context"),
        "cache": lambda row: "yes" if row["cache"] else "no",
        "% routed": measure.figure("routed", 1, 100),
        "tokens/s": measure.figure("tokens_per_second", 1),
        "K/V MiB": measure.figure("kv_bytes", 2, 2**-20),
        "speed x": measure.figure("speed_ratio", 2),
        "K/V x": measure.figure("kv_ratio", 3),
    }
    what = f"{config.shape}, random weights, {config.dtype}, {config.new_tokens} tokens"
    measure.report(config, rows, f"Decoding: {what}, medians", columns)


if __name__ == "__main__":
    measure.main(run, options().parse_args())
