"""Named starting points for `depthgate train`: option -> value, in the dotted names of the command line."""

from collections.abc import Mapping
from typing import Any

from depthgate.config import ModelConfig, TrainConfig
from depthgate.errors import InvalidValueError, near
from depthgate.vision import IMAGE_PRESETS, ImagesConfig, ViTConfig


def _model(**shape: Any) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in shape.items()}


# The same for all kinds of models, in presets and studies; docs/log.md has what was measured of its parts.
RECIPE: dict[str, Any] = dict.fromkeys(("qk_norm", "key_shift", "embed_norm", "router_norm"), True)
MOD: dict[str, Any] = {"pattern": "dense,mod", "capacity": 0.125, "gate": "one_plus_tanh", "rule": "threshold"}
# A shared expert and one of sixteen on average, each half as wide as a dense feed-forward; the first layer is dense.
EXPERTS: dict[str, Any] = {"first": "dense", "experts": 16, "top_k": 1, "shared_experts": 1, "expert_gate": "sigmoid"}
SCHEDULE: dict[str, Any] = {"schedule": "linear", "lowest_lr": 0.0}

_TINY = {
    **_model(dim=48, layers=2, heads=2, context=256, **RECIPE),
    **SCHEDULE,
    "batch": 4,
    "lr": 0.016,
    "warmup": 40,
    "checkpoint_every": 100,
}
_124M = {
    **_model(vocab=32768, dim=768, layers=12, heads=12, hidden=2560, context=1024, **RECIPE),
    **SCHEDULE,
    "tokenizer": "bpe",
    "vocab": 32768,
    "dtype": "bfloat16",
    "compile": True,
    "batch": 32,
    "lr": 1e-3,
    "warmup": 200,
    "checkpoint_every": 500,
}
_770M = {
    **_124M,
    **_model(dim=2048, layers=16, heads=16, kv_heads=4, hidden=None, context=2048),
    "batch": 8,
    "lr": 4e-4,
}
_MOD = _model(**MOD)
_MODE = _model(**EXPERTS, pattern="mode")

PRESETS: dict[str, dict[str, Any]] = {
    "tiny-dense": _TINY,
    "tiny-mod": {**_TINY, **_MOD, "model.layers": 4},
    "tiny-mode": {**_TINY, **_MODE},
    "dense-124m": _124M,
    "mod-124m": {**_124M, **_MOD},
    "mode-124m": {**_124M, **_MODE},
    "dense-770m": _770M,
    "mod-770m": {**_770M, **_MOD},
    "mode-770m": {**_770M, **_MODE},
}
RENAMED = {f"{kind}-1b": f"{kind}-770m" for kind in ("dense", "mod", "mode")}  # said more than they had; still taken


def presets() -> list[str]:
    """The names of presets, for `Decoder.from_preset`, `ViT.from_preset` and --preset of `depthgate train`."""
    return [*PRESETS, *IMAGE_PRESETS]


def preset(name: str, known: Mapping[str, dict[str, Any]] = PRESETS) -> dict[str, Any]:
    """The options of a preset; an unknown name is refused with the nearest known one."""
    found = RENAMED.get(name, name)
    if name in IMAGE_PRESETS and known is not IMAGE_PRESETS:
        raise InvalidValueError(f"preset is {name!r}, which is for images: give --task images, or use ViT.from_preset")
    if found not in known:
        raise InvalidValueError(f"preset is {name!r}{near(name, known, 0.0)} `depthgate presets` lists them all")
    return dict(known[found])


def settle_vocab(options: Any) -> None:
    """Let the size of a vocabulary imply a bpe tokenizer; the preset's size gives way to a tokenizer that was named."""
    start = preset(options.preset)
    if options.vocab is not None and options.tokenizer != "bpe":
        if options.vocab == start.get("vocab"):
            options.vocab, options.model.vocab = None, ModelConfig.vocab
        elif options.tokenizer == start.get("tokenizer", "bytes"):
            options.tokenizer = "bpe"


def train_config(name: str) -> TrainConfig:
    """The configuration that `depthgate train --preset NAME` runs."""
    return _config(TrainConfig, ModelConfig, name, preset(name))  # type: ignore[no-any-return]


def images_config(name: str) -> ImagesConfig:
    """The configuration that `depthgate train --task images --preset NAME` runs."""
    return _config(ImagesConfig, ViTConfig, name, preset(name, IMAGE_PRESETS))  # type: ignore[no-any-return]


def _config(run: type[Any], model: type[Any], name: str, values: dict[str, Any]) -> Any:
    shape = {key.removeprefix("model."): values.pop(key) for key in list(values) if key.startswith("model.")}
    return run(preset=name, model=model(**shape), **values)
