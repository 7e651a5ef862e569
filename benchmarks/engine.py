"""Decode steps of the engine: dense against Mixture-of-Depths, by batch and context.

    python benchmarks/engine.py --batches 1,8,64 --contexts 2048,16384 --device cuda --dtype bfloat16 --json

Weights are random, and routers are set so that they take about 12.5% of the tokens. A model is timed only if the
tokens of the engine are those of the plain path, in float32 and with two layers.
"""

import argparse
import gc
from dataclasses import replace
from typing import Any

import torch

import depthgate as dg
import measure
from depthgate.generation.batch import Batch
from depthgate.generation.config import Sampling
from depthgate.generation.sampling import used_filters
from depthgate.model import Decoder
from depthgate.presets import train_config

_PAGE = 256


def _model(name: str, config: argparse.Namespace, **changes: Any) -> Decoder:
    torch.manual_seed(config.seed)
    shape = replace(train_config(f"{name}-{config.shape}").model, context=max(config.contexts) + 1024, **changes)
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


def _calibrated(model: Decoder) -> None:
    """Set the thresholds so that the routers take their share of random tokens in the middle of a decode."""
    routers = [layer.router for layer in model.layers if hasattr(layer, "router")]
    for n, router in enumerate(routers):
        for rule in (r.rule for r in routers[n:]):
            rule.average.fill_(1e9)
            rule.weight.fill_(1.0)
        rows, found = _filled(model, 32, 256), []
        hook = router.proj.register_forward_hook(lambda _, __, scores, found=found: found.append(scores.flatten()))
        with torch.inference_mode():
            for _ in range(8):
                rows.layers = [layer._replace(rule=None) for layer in rows.layers]
                rows.token.random_(model.config.vocab)
                rows._body(32, (False,) * 5, None)
        hook.remove()
        router.rule.average.fill_(torch.cat(found).quantile(1 - model.config.capacity).item())


@torch.inference_mode()
def _timed(model: Decoder, batch: int, context: int, config: argparse.Namespace) -> dict[str, Any]:
    rows = _filled(model, batch, context)
    used = used_filters([Sampling(temperature=0.0)])
    lengths = rows.lengths.clone()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(config.warmup + config.steps):
        if step == config.warmup:
            rows.lengths.copy_(lengths)
            rows.pos.fill_(context)
            begun.record()
        rows.token.random_(model.config.vocab)  # greedy tokens of random weights would soon repeat
        rows.step(used, None)
    ended.record()
    torch.cuda.synchronize()
    mean = begun.elapsed_time(ended) / config.steps
    grown = (rows.lengths - lengths)[1:].float()
    share = grown.mean().item() / config.steps if model.config.routed else 1.0
    weights = sum(
        w.numel() * w.element_size() for n, w in model.named_parameters() if n != "head.weight" or not model.config.tied
    )
    return {
        "ms": mean,
        "tokens_per_second": batch / mean * 1e3,
        "entered": share,
        "weights": weights,
    }


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


def run(config: argparse.Namespace) -> None:
    cells = []
    for name in config.models:
        _check(name, config)
        model = _model(name, config)
        if model.config.routed:
            _calibrated(model)
        for context in config.contexts:
            for batch in config.batches:
                row = {"model": name, "batch": batch, "context": context, **_timed(model, batch, context, config)}
                measure.say(str(row))
                cells.append(row)
                gc.collect()
                torch.cuda.empty_cache()
        del model
    measure.report(config, cells, "decode steps", {key: (lambda row, key=key: str(row[key])) for key in cells[0]})


if __name__ == "__main__":
    options = measure.parser(__doc__)
    options.add_argument("--shape", default="1b", help="of the presets: 124m or 1b")
    options.add_argument("--models", type=lambda text: text.split(","), default=["dense", "mod"])
    options.add_argument("--batches", type=measure.whole_numbers, default=[1, 8, 64])
    options.add_argument("--contexts", type=measure.whole_numbers, default=[2048, 16384])
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--warmup", type=int, default=5)
    measure.main(run, options.parse_args())
