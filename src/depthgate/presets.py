"""Named starting points for `depthgate train`: option -> value, in the dotted names of the command line."""

import difflib
from dataclasses import replace
from typing import Any

from depthgate.config import ModelConfig, TrainConfig, build
from depthgate.errors import InvalidValueError

_TINY = {
    "model.dim": 96,
    "model.layers": 4,
    "model.heads": 3,
    "model.context": 256,
    "batch": 8,
    "lr": 3e-3,
    "warmup": 20,
    "schedule_steps": 1000,
    "checkpoint_every": 10,
}
_124M = {
    "tokenizer": "bpe",
    "vocab": 32768,
    "model.vocab": 32768,
    "model.dim": 768,
    "model.layers": 12,
    "model.heads": 12,
    "model.context": 1024,
    "batch": 32,
    "lr": 1e-3,
    "warmup": 200,
    "dtype": "bfloat16",
    "compile": True,
    "checkpoint_every": 500,
}
_1B = {
    **_124M,
    "model.dim": 2048,
    "model.layers": 16,
    "model.heads": 16,
    "model.kv_heads": 4,
    "model.context": 2048,
    "batch": 8,
    "lr": 4e-4,
}
_MOD = {"model.pattern": "dense,mod", "model.capacity": 0.125}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny-dense": _TINY,
    "tiny-mod": {**_TINY, **_MOD, "model.layers": 8},
    "dense-124m": _124M,
    "mod-124m": {**_124M, **_MOD},
    "mode-124m": {**_124M, **_MOD, "model.pattern": "dense,mode", "model.experts": 8, "model.top_k": 2},
    "dense-1b": _1B,
    "mod-1b": {**_1B, **_MOD},
}


def preset(name: str) -> dict[str, Any]:
    """The options of a preset; an unknown name is refused with the nearest known one."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1, cutoff=0.0)[0]
        raise InvalidValueError(f"preset is {name!r}: did you mean {near!r}? `depthgate presets` lists them all")
    return dict(PRESETS[name])


def settle_vocab(options: Any) -> None:
    """Let the size of a vocabulary imply a bpe tokenizer; the preset's size gives way to a tokenizer that was named."""
    start = preset(options.preset)
    if options.vocab is not None and options.tokenizer != "bpe":
        if options.vocab == start.get("vocab"):
            options.vocab = None
        elif options.tokenizer == start.get("tokenizer", "bytes"):
            options.tokenizer = "bpe"


def with_vocab(config: TrainConfig, vocab: int) -> TrainConfig:
    """The configuration with the tokenizer's vocabulary; another one that was asked for is refused."""
    if config.model.vocab not in (ModelConfig.vocab, preset(config.preset).get("model.vocab"), vocab):
        raise InvalidValueError(
            f"model.vocab is {config.model.vocab}, but the tokenizer has {vocab} tokens: leave model.vocab out"
        )
    return replace(config, model=replace(config.model, vocab=vocab))


def train_config(name: str, **options: Any) -> TrainConfig:
    """The configuration that `depthgate train --preset NAME` runs, with some options set."""
    config: TrainConfig = build(TrainConfig, _nested({"preset": name, **preset(name), **options}))
    return config


def _nested(dotted: dict[str, Any]) -> dict[str, Any]:
    """{"model.dim": 8, "lr": 1} -> {"model": {"dim": 8}, "lr": 1}."""
    out: dict[str, Any] = {}
    for name, value in dotted.items():
        *path, last = name.split(".")
        place = out
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return out
