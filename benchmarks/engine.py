r"""Decode steps of the engine and the time to a first token: dense against Mixture-of-Depths, by batch and context.

    python benchmarks/engine.py --shape 1b --batches 1,8,64 --contexts 2048,16384 --device cuda --dtype bfloat16 \
        --transformers --seconds 540 --out h200-engine.jsonl

Weights are random, and routers are set so that they take about 12.5% of the tokens. A model is timed only if the
tokens of the engine are those of the plain path, in float32 and with two layers. `--transformers` puts Hugging Face's
generate beside it, with the weights of the dense model (without parts that Qwen3 lacks), as it comes and with a static
cache, which it compiles on CUDA. Rows are written to `--out` as they come; what is not done after `--seconds` is left
out. `depthgate bench` times trained models.
"""

import argparse
import gc
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import depthgate as dg
import measure
from depthgate.device import copy_rate, machine
from depthgate.generation.batch import Batch
from depthgate.generation.config import Sampling
from depthgate.generation.engine import Engine
from depthgate.generation.sampling import used_filters
from depthgate.model import Decoder
from depthgate.recipes import train_config

_PAGE = 256
_NEW = 4  # steps after which tokens are drawn anew: greedy ones of random weights soon repeat


def _model(name: str, config: argparse.Namespace, **changes: Any) -> Decoder:
    torch.manual_seed(config.seed)
    preset = f"tiny-{name}" if config.shape == "tiny" else f"{name}-{config.shape}"
    shape = replace(train_config(preset).model, context=max(config.contexts) + 1024, **changes)
    with torch.device(config.device):
        return Decoder(shape).to(getattr(torch, config.dtype)).eval().requires_grad_(False)


def _filled(model: Decoder, batch: int, context: int) -> Batch:
    """Rows that have read so many tokens: keys and values are random, routed layers hold their share."""
    share, layers = model.config.capacity, len(model.config.routed)
    room = context + 512
    pages = [-(-room // _PAGE), -(-int(room * share + 256) // _PAGE)]
    rows = Batch(model, batch, batch * pages[0], batch * pages[1] * layers, _PAGE)
    for layer in rows.layers:
        layer.kv.normal_()
    start = 1
    for group in range(1 + layers):
        many = pages[group > 0]
        start = 1 if group <= 1 else start
        table = start + torch.arange(batch * many, device=rows.device).view(batch, many)
        rows.tables[group, :, :many] = table.int()
        start += batch * many
        rows.lengths[group] = context if group == 0 else int(context * share)
    rows.pos.fill_(context)
    rows.token.random_(model.config.vocab)
    rows._set_live(batch)
    return rows


def _calibrated(model: Decoder, context: int = 256) -> None:
    """Set the thresholds so that the routers take their share of random tokens after so many others."""
    routers = [layer.router for layer in model.layers if hasattr(layer, "router")]
    for n, router in enumerate(routers):
        for rule in (r.rule for r in routers[n:]):
            rule.average.fill_(1e9)
            rule.weight.fill_(1.0)
        rows, found = _filled(model, 32, context), []
        hook = router.proj.register_forward_hook(lambda _, __, scores, found=found: found.append(scores.flatten()))
        with torch.inference_mode():
            for _ in range(64):
                rows.layers = [layer._replace(rule=None) for layer in rows.layers]
                rows.token.random_(model.config.vocab)
                rows._body(32, (False,) * 5, None)
        hook.remove()
        router.rule.average.fill_(torch.cat(found).quantile(1 - model.config.capacity).item())


def _now(config: argparse.Namespace) -> float:
    """Seconds, when the device has done all that it was given."""
    if config.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _first_token(model: Decoder, config: argparse.Namespace) -> float:
    """Milliseconds from a prompt of the smallest context to its first token, by a running engine."""
    engine = Engine(model, rows=1, memory=min(config.contexts) + 512)
    times = []
    for _ in range(6):
        prompt = torch.randint(model.config.vocab, (min(config.contexts),)).tolist()
        begun = _now(config)
        engine.submit(prompt, Sampling(temperature=0.0, max_new_tokens=2))
        while not engine.turn():
            pass
        times.append((_now(config) - begun) * 1e3)
        while engine.waiting or engine.running:
            engine.turn()
    return min(times[2:])  # from the third prompt of a size on it is a graph


def _by_transformers(config: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Hugging Face's generate with the weights of the dense model, greedy, with its own cache and with a static one."""
    lacking = dict.fromkeys(("key_shift", "embed_norm", "router_norm"), False)
    small = argparse.Namespace(**{**vars(config), "dtype": "float32"})
    model = _model("dense", small, **lacking)
    net = dg.hf.export(model)
    tokens = torch.randint(model.config.vocab, (2, 16), device=config.device)
    with torch.inference_mode():
        if not torch.allclose(net(tokens).logits, model(tokens).logits, atol=1e-3):
            raise dg.DepthgateError("the logits of transformers are not those of the dense model, so it is not timed")
    del model
    net.to(getattr(torch, config.dtype))
    for batch, cache in product(config.batches, (None, "static")):
        tokens = torch.randint(net.config.vocab_size, (batch, min(config.contexts)), device=config.device)
        speed = measure.llama_generate(net, tokens, min(64, config.steps), cache_implementation=cache)
        name = f"transformers, {cache or 'dynamic'} cache"
        yield {"model": name, "batch": batch, "context": min(config.contexts), "tokens_per_second": speed}


@torch.inference_mode()
def _timed(model: Decoder, batch: int, context: int, config: argparse.Namespace) -> dict[str, Any]:
    rows = _filled(model, batch, context)
    used = used_filters([Sampling(temperature=0.0)])
    lengths = rows.lengths.clone()
    for step in range(config.warmup + config.steps):
        if step == config.warmup:
            rows.lengths.copy_(lengths)
            rows.pos.fill_(context)
            begun = _now(config)
        if step % _NEW == 0:
            rows.token.random_(model.config.vocab)
        rows.step(used, None)
    mean = (_now(config) - begun) * 1e3 / config.steps
    grown = (rows.lengths - lengths)[1:].float()
    share = grown.mean().item() / config.steps if model.config.routed else 1.0
    return {"ms": mean, "tokens_per_second": batch / mean * 1e3, "entered": share} | _read_bytes(
        rows, batch, context, share
    )


def _read_bytes(rows: Batch, batch: int, context: int, share: float) -> dict[str, int]:
    """The least that a step reads: weights, of a routed layer only if one of the rows enters it, as rows that decide by
    themselves do; keys and values."""
    config = rows.model.config
    read = sum(w.nbytes for name, w in rows.model.named_parameters() if name != "embed.weight" or config.tied)
    skipped = (1 - share) ** batch * sum(w.nbytes for n in config.routed for w in rows.model.layers[n].parameters())
    entries = config.layers - len(config.routed) * (1 - config.capacity)
    return {"bytes": int(read - skipped + batch * context * entries * rows.layers[0].kv[0, :, :, 0].nbytes)}


def _check(name: str, config: argparse.Namespace) -> None:
    """Raise if the engine's tokens are not those of the plain path, in float32, with two layers."""
    small = argparse.Namespace(**{**vars(config), "dtype": "float32", "contexts": [256]})
    model = _model(name, small, layers=2)
    if model.config.routed:
        _calibrated(model)
    prompts = torch.randint(model.config.vocab, (5, 20)).tolist()
    plain, ours = (
        dg.generate(model, prompts, max_new_tokens=16, temperature=0, engine=engine) for engine in (False, True)
    )
    if [(each.tokens, each.depths) for each in plain] != [(each.tokens, each.depths) for each in ours]:
        raise dg.DepthgateError(f"{name}: the tokens of the engine are not those of the plain path, so it is not timed")


def _rows(config: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rate = copy_rate(config.device)
    for name in config.models:
        _check(name, config)
        model = _model(name, config)
        first: dict[str, float] = {}
        for context, batch in product(config.contexts, config.batches):
            if batch == config.batches[0]:
                if model.config.routed:
                    _calibrated(model, context)
                first = first or {"first_token_ms": _first_token(model, config)}
            row = {"model": name, "batch": batch, "context": context, **_timed(model, batch, context, config), **first}
            yield row | {"bandwidth_share": row["bytes"] / row["ms"] * 1e3 / rate}
            gc.collect()
            if config.device == "cuda":
                torch.cuda.empty_cache()
        del model
    if config.transformers:
        yield from _by_transformers(config)


def _too_late(*_: Any) -> None:
    raise TimeoutError


def run(config: argparse.Namespace) -> None:
    if config.transformers:
        measure.check_transformers()
    rows: list[dict[str, Any]] = []
    dense: dict[tuple[int, int], float] = {}
    signal.signal(signal.SIGALRM, _too_late)
    try:
        signal.setitimer(signal.ITIMER_REAL, config.seconds or 0)
        for row in _rows(config):
            dense |= {_case(row): row["tokens_per_second"]} if row["model"] == "dense" else {}
            rows.append(
                row | ({"speed_ratio": row["tokens_per_second"] / dense[_case(row)]} if _case(row) in dense else {})
            )
            measure.say(str(rows[-1]))
            if config.out:
                with Path(config.out).open("a") as file:
                    file.write(json.dumps({**rows[-1], **machine(config.device)}) + "\n")
    except TimeoutError:
        measure.say(f"{config.seconds} s are over: the rest is left out")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    columns = ("batch", "context", "tokens_per_second", "speed_ratio", "bandwidth_share", "entered", "first_token_ms")
    shown = {key: (lambda row, key=key: measure.number(row.get(key))) for key in columns}
    measure.report(config, rows, "decode steps", {"model": lambda row: row["model"], **shown})


def _case(row: dict[str, Any]) -> tuple[int, int]:
    return row["batch"], row["context"]


def options() -> argparse.ArgumentParser:
    found = measure.parser(__doc__)
    found.add_argument("--shape", choices=("tiny", "124m", "1b"), default="tiny", help="that of the presets")
    found.add_argument("--models", type=lambda text: text.split(","), default=["dense", "mod"])
    found.add_argument("--batches", type=measure.whole_numbers, default=[1, 8], help="sequences decoded at once")
    found.add_argument("--contexts", type=measure.whole_numbers, default=[256], help="tokens that were read before")
    found.add_argument("--steps", type=int, default=240)
    found.add_argument("--warmup", type=int, default=5)
    found.add_argument("--seconds", type=float, help="time for all of it; as long as it takes unless given")
    found.add_argument("--out", help="file that gets a line of JSON for each row, as soon as it is there")
    found.add_argument("--transformers", action="store_true", help="also Hugging Face's generate with those weights")
    return found


if __name__ == "__main__":
    measure.main(run, options().parse_args())
