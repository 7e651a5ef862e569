"""The options of `depthgate isoflop`, and the variants that a study compares. Imports no torch."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from depthgate.config import EXPERT_KINDS, ROUTED_KINDS, ModelConfig, TrainConfig, check_vocab
from depthgate.errors import InvalidValueError, check_count, check_number, near
from depthgate.options import DEVICES, Options, choice, count, number, option
from depthgate.recipes import EXPERTS, MOD, PRESETS, RECIPE, RENAMED, SCHEDULE, train_config
from depthgate.vision import ImagesConfig, ViTConfig

_DENSE = {"pattern": "dense", **RECIPE}
_MOD = {**_DENSE, **MOD}
_EXPERTS = {**_DENSE, **EXPERTS}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": _DENSE,
    "mod": _MOD,
    "moe": {**_EXPERTS, "pattern": "moe"},
    "mode": {**_EXPERTS, "pattern": "mode"},
    "mode_staged": {**_MOD, **_EXPERTS, "pattern": "dense,mode_staged"},
    "random": {**_MOD, "pattern": "dense,random"},
}
_SOFT = {"pattern": "soft_moe"}
IMAGE_VARIANTS: dict[str, dict[str, Any]] = {
    **{"dense": {"pattern": "dense"}, "soft_moe": _SOFT},
    "moe": {"pattern": "moe", "experts": 16},
    "mod": {"pattern": "dense,mod"},
    "uniform_dispatch": {**_SOFT, "dispatch": "uniform"},
    "uniform_combine": {**_SOFT, "combine": "uniform"},
    "uniform": {**_SOFT, "dispatch": "uniform", "combine": "uniform"},
}
LEARNT, CONTROLS = "soft_moe", ("uniform_dispatch", "uniform_combine", "uniform")  # what its router is compared with
_LARGE = 1e14  # from this budget on, defaults are those of a GPU
# Options that the study itself decides for every cell.
_FIXED = {
    *("vocab", "dim", "layers", "heads", "context", "data", "out", "steps", "preset", "device", "seed", "validation"),
    *("image", "channels", "classes", "task", "pretrained", "epochs", "corrupt", "tokenizer", "model", "batch", "lr"),
    *("warmup", "keep", "checkpoint_every", "tracker", "workers", "dtype"),
}
# Options that layers of some kinds alone read: where a variant has none of these, it would be compared with itself.
_READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("capacity", "capacity_steps"), ROUTED_KINDS),
    **dict.fromkeys(("gate", "rule", "rule_loss", "router_norm"), ("mod", "mode_staged")),
    "router_lr": (*ROUTED_KINDS, *EXPERT_KINDS, "soft_moe"),
    **dict.fromkeys(("experts", "expert_hidden"), (*EXPERT_KINDS, "soft_moe")),
    **dict.fromkeys(("top_k", "null_experts", "shared_experts", "expert_gate"), EXPERT_KINDS),
    **dict.fromkeys(("pool", "choice"), ("mode",)),
    **dict.fromkeys(("balance_loss", "z_loss"), ("moe", "mode_staged")),
    **dict.fromkeys(("slots", "slot_scale", "dispatch", "combine"), ("soft_moe",)),
}


@dataclass(frozen=True)
class Variant:
    """A kind of model, with the options of the model and of its training that define it. One that sets `dim` has a
    single size; the others have one for every width."""

    name: str
    model: dict[str, Any]
    training: dict[str, Any]

    def shape(self, dim: int, vocab: Any, context: int) -> Any:
        """The model of one width: depth grows with it. A layer that most tokens skip costs little, so a variant with
        such layers has more of them, until a token costs about as much as in the dense model of that width."""
        pattern, capacity = self.model["pattern"].split(","), self.model.get("capacity", ModelConfig.capacity)
        share = sum(capacity if kind in ROUTED_KINDS else 1.0 for kind in pattern) / len(pattern)
        depth = round((1.5 + dim / 48) / max(share, 0.5) / len(pattern)) * len(pattern)
        # Each kind of a pattern has a layer, also where the first one is of another kind.
        least = len(pattern) * (2 if self.model.get("first") and len(pattern) > 1 else 1)
        options = {"dim": dim, "layers": max(least, depth), "heads": _heads(dim), **self.model}
        return ModelConfig(**{**options, "vocab": vocab, "context": context})


@dataclass(frozen=True)
class ImageVariant(Variant):
    """A kind of vision transformer."""

    def shape(self, dim: int, vocab: Any, context: int) -> Any:  # noqa: ARG002
        """The model of one width, for images whose size, channels and classes are `vocab`: depth grows with it."""
        options = {"dim": dim, "layers": round(3 + dim / 32), "heads": _heads(dim), "hidden": 2 * dim, "stem": True}
        return ViTConfig(**{**options, **self.model, **vocab})


def _heads(dim: int) -> int:
    """Heads of about 64, or of about 32 in narrow models: with only a few heads a model learns to copy late."""
    size = 64 if dim >= 512 else 32
    return min((n for n in range(1, dim // 8 + 1) if dim % (2 * n) == 0), key=lambda n: abs(dim / n - size))


def parse_variant(text: str, images: bool = False) -> Variant:
    """`name[:option=value]...`, where the kinds of a pattern are joined by +; or the name of a preset."""
    name, *options = text.split(":")
    variants, presets = (IMAGE_VARIANTS, {}) if images else (VARIANTS, {**PRESETS, **RENAMED})
    if name not in (*variants, *presets):
        known = f"{', '.join(variants)}{', and the presets' * bool(presets)}"
        raise InvalidValueError(f"variants has {name!r}{near(name, variants, 0.0)} Known are {known}")
    model = dict(variants[name] if name in variants else vars(train_config(name).model))
    training: dict[str, Any] = {}
    runs, models = (ImagesConfig, ViTConfig) if images else (TrainConfig, ModelConfig)
    places = {f.name: (training, f) for f in fields(runs)} | {f.name: (model, f) for f in fields(models)}
    keys = [each.partition("=")[0] for each in options]
    for key, equals, given in (each.partition("=") for each in options):
        if keys.count(key) > 1:
            raise InvalidValueError(f"variants has {text!r}: {key} stands twice, give it once")
        if not equals or key not in places or key in _FIXED:
            why = f"is not an option that a variant can set, such as capacity=0.25{near(key, places.keys() - _FIXED)}"
            raise InvalidValueError(f"variants has {text!r}: {key!r} {why}")
        value: Any = given.replace("+", ",")
        with suppress(ValueError):
            value = json.loads(value)  # a number, true or false
        place, option = places[key]
        option.metadata.get("check", lambda *_: None)(value, key)
        place[key] = value
    variant = (ImageVariant if images else Variant)(text, model, training)
    shape = variant.shape(model.get("dim", 64), {} if images else 257, 64)
    replace(runs(), model=shape, **training)  # refuses bad values
    if baseline([name]) and (other := next((kind for kind in shape.kinds if kind != "dense"), None)):
        named = renamed if (renamed := name.replace("dense", other)) in presets else other
        rest = [f"pattern={model['pattern'].replace(',', '+')}", *(o for o in options if o[:8] != "pattern=")]
        why = f"others are compared with dense, and it has {other} layers; name it {':'.join([named, *rest])}"
        raise InvalidValueError(f"variants has {text!r}: {why}")
    there = {*shape.kinds, *("moe",) * (tokens := model.get("choice") == "tokens")}  # tokens choose as in a moe layer
    for key in keys:
        where = " where experts choose" * (key == "pool")
        if there.isdisjoint(read_by := _READ_BY.get(key, there)) or (where and tokens):
            why = f"no layer of it reads {key}, which is for {', '.join(read_by)}{where}; leave it out"
            raise InvalidValueError(f"variants has {text!r}: {why}")
    return variant


def _trained(variant: Variant, images: bool) -> list[dict[str, Any]]:
    """What a variant trains at some widths, without the options that no layer reads."""
    run = asdict(replace((ImagesConfig if images else TrainConfig)(), **{**SCHEDULE, **variant.training}))
    shapes = [variant.shape(dim, {} if images else 257, 64) for dim in (64, 96, 128, 256, 384, 512)]
    there = {*shapes[0].kinds, *("moe",) * (variant.model.get("choice") == "tokens")}
    whole = [run | asdict(s) | {"pattern": s.kinds} | dict.fromkeys(("first", "start", "model")) for s in shapes]
    return [{k: v for k, v in each.items() if not there.isdisjoint(_READ_BY.get(k, there))} for each in whole]


@dataclass(frozen=True)
class IsoflopConfig(Options):
    """Train models of several sizes and kinds with the same FLOPs, fit the best of each kind, and compare them."""

    task: str = choice("text", ("text", "images"), "what models learn: to predict text, or the classes of images")
    data: str = option("stdlib", "text or images, as for depthgate train")
    out: str = option("runs/isoflop", "folder of the study: every cell's run, results.jsonl, results.csv, report.html")
    budgets: str | float = option("1e12,2e12", "training FLOPs, separated by commas")
    sizes: int = count(5, "models of each variant at each budget; a minimum needs three", maximum=99)
    variants: str = option(
        "dense,mod",
        "dense, mod, moe, mode, mode_staged or random, with options of model and training, such as "
        "mod:capacity=0.25:pattern=dense+dense+mod:router_lr=3; or presets, which have one size. With --task images: "
        f"{', '.join(IMAGE_VARIANTS)}",
    )
    seeds: int = count(1, "seeds of every cell", maximum=99)
    seed: int = count(0, "the first of them", minimum=0)
    seeds_at_minimum: int | None = count(None, "seeds of each variant's best size; seeds unless given", maximum=99)
    calibrate: bool = option(True, "train dense of the smallest budget with two seeds, to learn what difference shows")
    more_sizes: int = count(0, "sizes that may be added to a curve until its minimum is inside it", 0, 99)
    validation: str | None = option(None, "text to measure on; a share of the data is held out unless given")
    tokenizer: str | None = option(
        None, "bytes, bpe, or the folder of a Hugging Face one; unless given bytes, or bpe if a budget is 1e14 or more"
    )
    vocab: int | None = option(None, "size of a bpe tokenizer; 1024 where bpe is not asked for")
    context: int | None = count(None, "tokens of a sequence; 256, or 512 if a budget is 1e14 or more", 8, 2**20)
    batch: int | None = count(None, "sequences of a step; unless given, more the larger the budget", maximum=2**16)
    center: float = number(1.0, "[0.001, 1000]", "FLOPs per token of the middle size over those expected to be best")
    spread: float | None = number(
        None,
        "[1.2, 100]",
        "FLOPs per token of a size over those of the next smaller one; 2, or 1.4 if a budget is 1e14",
    )
    lr: float | None = number(None, "(0, inf)", "learning rate of all cells, instead of one by width and budget")
    lr_sweep: bool = option(False, "first find learning rates for each variant, by trying some at the smallest budget")
    device: str = choice("auto", DEVICES, "cpu, cuda, or auto")
    launcher: str = choice("local", ("local", "ray", "submitit"), "local, ray or submitit")
    parallel: int | None = count(None, "cells at once, locally; unless given one a core, or one on a GPU", maximum=256)
    cpus: int = count(1, "processor cores of a cell, for ray and submitit", maximum=1024)
    gpus: float = number(0.0, "[0, 1024]", "GPUs of a cell, for ray and submitit; may be a fraction with ray")
    minutes: int = count(240, "longest time of a cell, for submitit", maximum=10**6)
    measured: int | None = count(None, "held-out tokens measured; 131072, or all if a budget is 1e14 or more", 1, 2**40)
    points: int = count(1, "checkpoints of each cell that are measured, evenly spread and the last", maximum=99)
    samples: int = count(0, "tokens to sample from each variant's best model", minimum=0, maximum=2**16)
    extend: bool = option(False, "go on with a study of other budgets, sizes (center, spread), variants or seeds")
    dry_run: bool = option(False, "print the grid, and train nothing")

    def check_together(self) -> None:
        budgets = [f"{each:.4g}" for each in self.budget_list]  # as cells are named by them
        for name, found in (("budgets", budgets), ("variants", [each.name for each in self.variant_list])):
            if len(set(found)) < len(found):
                raise InvalidValueError(f"{name} is {getattr(self, name)!r}: one stands twice")
        trained = [(each.name, _trained(each, self.images)) for each in self.variant_list]
        for (one, mine), (other, its) in combinations(trained, 2):
            if mine == its:
                raise InvalidValueError(f"variants has {one!r} and {other!r}: the same, leave one out")
        if self.seeds_at_minimum is not None:
            check_count(self.seeds_at_minimum, "seeds_at_minimum", minimum=self.seeds, maximum=99)
        if self.lr is not None and self.lr_sweep:
            raise InvalidValueError(f"lr is {self.lr} and lr_sweep is true: give one of them")
        if self.launcher == "submitit" and self.gpus % 1:
            raise InvalidValueError(f"gpus is {self.gpus}: it must be a whole number with --launcher submitit")
        if self.launcher != "local" and self.device == "cuda" and not self.gpus:
            raise InvalidValueError(f"device is cuda and gpus is 0: give --gpus 1 with --launcher {self.launcher}")
        check_vocab(*self.tokens)
        of_text = ("validation", "tokenizer", "vocab", "context", "measured", "points", "samples")
        if given := [name for name in of_text if self.images and getattr(self, name) != getattr(type(self), name)]:
            raise InvalidValueError(f"{given[0]} is {getattr(self, given[0])!r}: it is for text, leave it out")

    @cached_property
    def budget_list(self) -> list[float]:
        """`budgets` as numbers, ascending."""
        try:
            found = sorted(float(part) for part in str(self.budgets).split(","))
        except ValueError:
            raise InvalidValueError(f"budgets is {self.budgets!r}: give FLOPs, such as 3e15,1e16") from None
        return [check_number(budget, "budgets", "(0, inf)") for budget in found]

    @cached_property
    def variant_list(self) -> list[Variant]:
        """`variants`, each with its options."""
        return [parse_variant(part.strip(), self.images) for part in str(self.variants).split(",")]

    @property
    def images(self) -> bool:
        return self.task == "images"

    @property
    def tokens_in_sequence(self) -> int:
        """`context`, or the default for the budgets."""
        return self.context or (512 if self.large else 256)

    @property
    def large(self) -> bool:
        """True for budgets of a GPU."""
        return max(self.budget_list) >= _LARGE

    @property
    def apart(self) -> float:
        """`spread`, or the default for the budgets."""
        return self.spread or (1.4 if self.large else 2.0)

    @property
    def tokens(self) -> tuple[str, int | None]:
        """The name of the tokenizer, and its size if it is trained."""
        if self.tokenizer is not None or (self.vocab is None and not self.large):
            return self.tokenizer or "bytes", self.vocab
        return "bpe", self.vocab or 1024

    @property
    def most_measured(self) -> int | None:
        """`measured`, or the default for the budgets; None: all."""
        return self.measured or (None if self.large else 2**17)

    def seeds_of(self, variant: str, budget: float) -> range:
        """The seeds of a variant's cells: dense has two at least at the smallest budget, to calibrate the study."""
        names = [each.name for each in self.variant_list]
        several = self.calibrate and self.sizes > 1 and len(names) > 1
        again = several and variant == baseline(names) and budget == self.budget_list[0]
        return range(self.seed, self.seed + max(self.seeds, 2 if again else 1))


def baseline(variants: Iterable[str]) -> str | None:
    """The variant that others are compared with: dense, or the only one of dense layers."""
    kinds = [name for name in variants if "dense" in name.partition(":")[0].split("-")]
    return "dense" if "dense" in kinds else kinds[0] if len(kinds) == 1 else None
