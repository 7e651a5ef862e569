"""The kinds of models that are compared, and the ladder of sizes of each. Imports no torch."""

import difflib
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from depthgate.config import ROUTED_KINDS, ModelConfig, TrainConfig
from depthgate.errors import InvalidValueError
from depthgate.flops import swiglu_hidden

# Norms of queries and keys, and gates of one, were best in what docs/log.md tells of.
_DENSE = {"pattern": "dense", "qk_norm": True}
_MOD = {**_DENSE, "pattern": "dense,mod", "capacity": 0.125, "gate": "straight_through"}
_EXPERTS = {"experts": 8, "top_k": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": _DENSE,
    "mod": _MOD,
    "mode": {**_MOD, **_EXPERTS, "pattern": "dense,mode"},
    "moe": {**_DENSE, **_EXPERTS, "pattern": "dense,moe"},
    "random": {**_MOD, "pattern": "dense,random"},
}
# What a study itself decides for every cell.
_FIXED = {
    *("vocab", "dim", "layers", "heads", "context", "data", "out", "steps", "preset", "device", "seed", "validation"),
    *("tokenizer", "model", "batch", "lr", "warmup", "keep", "checkpoint_every", "tracker", "workers", "dtype"),
}


@dataclass(frozen=True)
class Variant:
    """A kind of model by name, with the options of model and training that make it one."""

    name: str
    model: dict[str, Any] = field(default_factory=dict, hash=False)
    training: dict[str, Any] = field(default_factory=dict, hash=False)

    def shape(self, dim: int, vocab: int, context: int) -> ModelConfig:
        """The model of one width: depth grows with it. A layer that most tokens skip costs little, so a variant with
        such layers has more of them, until a token costs about what it costs the dense model of that width."""
        pattern = self.model["pattern"].split(",")
        capacity = self.model.get("capacity", 1.0)
        share = sum(capacity if kind in ROUTED_KINDS else 1.0 for kind in pattern) / len(pattern)
        depth = round((1.5 + dim / 48) / max(share, 0.5) / len(pattern)) * len(pattern)
        heads = _heads(dim)
        options = {"pattern": "dense", **self.model}
        if "experts" in options and "expert_hidden" not in options:  # as many FLOPs as a dense feed-forward
            options["expert_hidden"] = max(8, swiglu_hidden(dim) // options.get("top_k", 2) // 8 * 8)
        layers = max(len(pattern), depth)
        return ModelConfig(vocab=vocab, dim=dim, layers=layers, heads=heads, context=context, **options)


def parsed(text: str) -> Variant:
    """`name[:option=value]...`; a pattern's kinds are joined by +."""
    name, *options = text.split(":")
    if name not in VARIANTS:
        near = difflib.get_close_matches(name, VARIANTS, 1, cutoff=0.0)[0]
        known = ", ".join(VARIANTS)
        raise InvalidValueError(f"variants has {name!r}: did you mean {near!r}? Known are {known}")
    model, training = dict(VARIANTS[name]), dict[str, Any]()
    kinds = {f.name: (model, f.type) for f in fields(ModelConfig)}
    kinds |= {f.name: (training, f.type) for f in fields(TrainConfig) if f.name not in kinds}
    given_before = set[str]()
    for option in options:
        key, given, value = option.partition("=")
        if not given or key not in kinds or key in _FIXED:
            raise InvalidValueError(
                f"variants has {text!r}: {key!r} is no option that a variant can set, as capacity=0.25"
            )
        place, kind = kinds[key]
        if key in given_before:
            raise InvalidValueError(f"variants has {text!r}: {key} stands twice, give it once")
        given_before.add(key)
        place[key] = _value(text, key, value.replace("+", ","), kind)
    variant = Variant(text, model, training)
    replace(TrainConfig(), model=variant.shape(64, 257, 64), **training)  # values out of range are said here
    return variant


def _value(text: str, key: str, value: str, kind: Any) -> Any:
    """A value as its option has it."""
    if kind is bool and value in ("true", "false"):
        return value == "true"
    try:
        if kind is float and value and not math.isfinite(float(value)):
            raise ValueError(value)
        if kind in (int, float, str) and value:
            return kind(value)
        if kind not in (int, float, str, bool):  # the others are numbers that may be left out
            return int(value)
    except ValueError:
        pass
    wanted = kind.__name__ if isinstance(kind, type) else kind
    raise InvalidValueError(f"variants has {text!r}: {key} is {value!r}, it must be {wanted}")


def _heads(dim: int) -> int:
    """Heads of about 64, or of about 32 in narrow models: fewer than a handful of them learn to copy late."""
    size = 64 if dim >= 512 else 32
    return min((n for n in range(1, dim // 8 + 1) if dim % (2 * n) == 0), key=lambda n: abs(dim / n - size))


def widths() -> list[int]:
    """All widths of the ladder, four to a doubling from 128 on, so that heads are of 32 or 64."""
    found = [16, 24, 32, 48, 64, 96]
    while found[-1] < 2**14:
        start = 128 * 2 ** ((len(found) - 6) // 4)
        found += [start + start // 4 * i for i in range(4)]
    return found
