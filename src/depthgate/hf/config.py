"""What a routed model's config.json says of routing, and what `depthgate convert` can be told. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from depthgate.config import GATE_NAMES, RULE_NAMES
from depthgate.errors import (
    InvalidValueError,
    check_capacity,
    check_choice,
    check_count,
    check_divides,
    check_positive,
    check_probability,
    check_share,
)

NEUTRAL_GATES = ("one_plus_tanh", "straight_through")  # that are 1 at a score of 0


def check_neutral(gate: str) -> str:
    """A gate that a model which others have trained can be given: at first it changes nothing."""
    if check_choice(gate, "gate", GATE_NAMES) not in NEUTRAL_GATES:
        raise InvalidValueError(
            f"gate is {gate!r}, which is not 1 before the router has learnt anything, and would change what the model "
            f"says: use {' or '.join(NEUTRAL_GATES)}"
        )
    return gate


@dataclass(frozen=True)
class Routing:
    """How a model is routed: the value of `depthgate` in its config. Unknown and wrong values are refused."""

    layers: tuple[int, ...]
    capacity: float = 0.5
    gate: str = "one_plus_tanh"
    rule: str = "predictor"
    rule_loss: float = 0.01  # weight of the loss that teaches the causal rule

    def __post_init__(self) -> None:
        check_capacity(self.capacity)
        check_choice(self.gate, "gate", GATE_NAMES)
        check_choice(self.rule, "rule", RULE_NAMES)
        check_probability(self.rule_loss, "rule_loss")

    @classmethod
    def read(cls, values: Any, depth: int) -> "Routing":
        """From what a config holds, for a model of `depth` layers."""
        known = {each.name for each in fields(cls)}
        if not isinstance(values, Mapping) or "layers" not in values:
            raise InvalidValueError("the config does not say which layers are routed: give depthgate={'layers': [...]}")
        if unknown := sorted(map(str, values.keys() - known)):
            raise InvalidValueError(
                f"depthgate in the config has unknown keys ({', '.join(unknown)[:200]}): "
                f"it may have {', '.join(sorted(known))}"
            )
        return cls(**{**values, "layers": checked_layers(values["layers"], depth)})

    def written(self) -> dict[str, Any]:
        """As a config holds it."""
        return {**asdict(self), "layers": list(self.layers)}


def numbers(given: str | int, name: str, what: str = "whole numbers separated by commas") -> list[int]:
    """1,3,5 as numbers."""
    try:
        return [int(part) for part in str(given).split(",")]
    except ValueError:
        raise InvalidValueError(f"{name} is {given!r}: it must be {what}") from None


def checked_layers(layers: Any, depth: int) -> tuple[int, ...]:
    """Numbers of layers, ascending, each once."""
    if isinstance(layers, str | bytes) or not isinstance(layers, Sequence):
        raise InvalidValueError(f"layers is {layers!r}: give 'every_other', 'auto', or numbers of layers, as [1, 3]")
    if not layers:
        raise InvalidValueError("layers is empty: name at least one layer to route")
    numbers = [check_count(layer, "a layer", minimum=0, maximum=depth - 1) for layer in layers]
    if len(set(numbers)) < len(numbers):
        raise InvalidValueError(f"layers is {list(layers)}: name each layer once")
    return tuple(sorted(numbers))


@dataclass(frozen=True)
class ConvertConfig:
    """Route some layers of a Hugging Face model, and save it as another; or write a run as a Hugging Face model.

    Args:
        model: folder of a Hugging Face model, a GGUF file, or a run of `depthgate train`; it stays as it is
        out: folder to write; it must not be there yet
        capacity: share of the tokens that go through a routed layer
        layers: every_other, auto (those that change their tokens least on --text), or numbers of layers, as 1,3,5
        gate: what a routed row is multiplied by: one_plus_tanh or straight_through, which are 1 at first
        rule: how a token is routed causally
        text: file of text that `--layers auto` measures on
        probe: tokens of each of the two sequences that the converted model is compared on with the dense one; they come
            after as many as its window of attention holds, if that is 1024 at most
        seed: seed of those sequences
        to: of a run, the family it must become: llama, or qwen3 (where it normalises queries and keys)
    """

    model: str
    out: str
    capacity: float = 0.5
    layers: str | list[int] = "every_other"
    gate: str = "one_plus_tanh"
    rule: str = "predictor"
    text: str | None = None
    probe: int = 64
    seed: int = 0
    to: str | None = None

    def __post_init__(self) -> None:
        check_capacity(self.capacity)
        check_neutral(self.gate)
        check_choice(self.rule, "rule", RULE_NAMES)
        check_count(self.probe, "probe", minimum=2, maximum=2**16)
        if self.to is not None:
            check_choice(self.to, "to", ("llama", "qwen3"))
        check_count(self.seed, "seed", minimum=0)
        if (self.layers == "auto") != (self.text is not None):
            raise InvalidValueError("--layers auto and --text FILE go together: give both, or neither")
        if not self.layer_choice:
            raise InvalidValueError(f"layers is {self.layers!r}: give every_other, auto, or numbers, as 1,3,5")

    @property
    def layer_choice(self) -> str | list[int]:
        """every_other, auto, or numbers."""
        if not isinstance(self.layers, str) or self.layers in ("every_other", "auto"):
            return self.layers
        return numbers(self.layers, "layers", "every_other, auto, or numbers, as 1,3,5")


@dataclass(frozen=True)
class FinetuneConfig:
    """Recover the quality of a converted Hugging Face model.

    Args:
        model: folder of a converted model, which stays as it is
        data: text, as for depthgate train
        out: folder to write the model to, with its metrics and checkpoints
        teacher: folder of the model to learn from; the dense form of --model unless given
        loss: distillation: say what the teacher says; text: predict the text
        text_share: share of the distillation loss that is of predicting the text
        temperature: how much both sides are softened in distillation
        train: what is trained: full, router (the routers alone) or lora (routers, and LoRA in all linear layers, merged
            when the model is saved)
        rank: rank of LoRA
        capacity: share of the tokens that go through a routed layer at the end; the model's unless given
        capacity_share: share of the steps over which the capacity falls from 1
        calibrate: tokens that routers are scaled by before the first step and, if they are all zero, set from, so that
            they begin with what their layers change most; 0: none
        steps: optimizer steps in all, also when a run is resumed
        tokens: tokens to train on, instead of steps
        batch: sequences in a step
        seq: tokens of a sequence
        accumulate: parts a step's batch is computed in, one after another
        lr: highest learning rate; unless given 1e-4, of LoRA and routers 1e-3
        router_lr: times lr, for the routers
        weight_decay: decay of the matrices
        warmup: steps until lr is reached
        schedule: cosine, or wsd: constant, and a linear decay over the last fifth
        schedule_steps: steps that schedules are made for; steps unless given
        lowest_lr: share of lr at the end
        clip: largest norm of all gradients
        device: cpu, cuda, or auto: cuda where there is one
        dtype: float32, bfloat16 (products in bfloat16, what is trained in float32), or auto: bfloat16 on cuda
        checkpointing: compute activations again on the way back, which saves memory
        compile: compile the layers and the loss with torch.compile
        seed: seed of the order of the data, and of LoRA
        workers: threads that prepare batches
        checkpoint_every: steps between checkpoints
        keep: checkpoints kept
        tracker: also send metrics to tensorboard, trackio or wandb
        most_bad_steps: steps in a row without a finite loss and gradient, after which a run stops
    """

    model: str
    data: str
    out: str
    teacher: str | None = None
    loss: str = "distillation"
    text_share: float = 0.0
    temperature: float = 1.0
    train: str = "full"
    rank: int = 16
    capacity: float | None = None
    capacity_share: float = 0.1
    calibrate: int = 16_384
    steps: int = 1000
    tokens: int | None = None
    batch: int = 8
    seq: int = 512
    accumulate: int = 1
    lr: float | None = None
    router_lr: float = 1.0
    weight_decay: float = 0.01
    warmup: int = 20
    schedule: str = "cosine"
    schedule_steps: int | None = None
    lowest_lr: float = 0.1
    clip: float = 1.0
    device: str = "auto"
    dtype: str = "auto"
    checkpointing: bool = False
    compile: bool = False
    seed: int = 0
    workers: int = 1
    checkpoint_every: int = 500
    keep: int = 2
    tracker: str | None = None
    most_bad_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seq", "accumulate", "rank", "checkpoint_every", "most_bad_steps"):
            check_count(getattr(self, name), name)
        for name in ("seed", "warmup", "calibrate"):
            check_count(getattr(self, name), name, minimum=0)
        for name in ("tokens", "schedule_steps"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name, maximum=2**53)
        check_count(self.workers, "workers", minimum=0, maximum=256)
        check_count(self.keep, "keep", minimum=2)
        check_count(self.batch * self.seq, "batch * seq", maximum=2**28)
        check_divides(self.accumulate, self.batch, "accumulate", "batch")
        for name in ("router_lr", "clip", "temperature", *(("lr",) if self.lr is not None else ())):
            check_positive(getattr(self, name), name)
        check_probability(self.weight_decay, "weight_decay")
        for name in ("text_share", "capacity_share", "lowest_lr"):
            check_share(getattr(self, name), name)
        if self.capacity is not None:
            check_capacity(self.capacity)
        check_choice(self.loss, "loss", ("distillation", "text"))
        check_choice(self.train, "train", ("full", "router", "lora"))
        check_choice(self.schedule, "schedule", ("cosine", "wsd"))
        check_choice(self.device, "device", ("auto", "cpu", "cuda"))
        check_choice(self.dtype, "dtype", ("auto", "float32", "bfloat16"))
        if self.tracker is not None:
            check_choice(self.tracker, "tracker", ("tensorboard", "trackio", "wandb"))
        if self.loss == "text" and self.teacher is not None:
            raise InvalidValueError("loss is 'text', which needs no teacher: leave --teacher out")
        if self.loss == "text" and self.text_share:
            raise InvalidValueError(f"text_share is {self.text_share}, and loss 'text' is nothing else: leave it out")

    @property
    def settled(self) -> "FinetuneConfig":
        """With what hangs on other options filled in."""
        steps = self.steps if self.tokens is None else -(-self.tokens // (self.batch * self.seq))
        lr = self.lr if self.lr is not None else 1e-4 if self.train == "full" else 1e-3
        return replace(self, steps=steps, tokens=None, lr=lr)


@dataclass(frozen=True)
class BenchHFConfig:
    """Time how fast Hugging Face models read and write, dense and converted.

    Args:
        models: folders of models, separated by commas
        data: text that they read, as for depthgate train
        batches: numbers of sequences computed at once, separated by commas
        context: tokens of each sequence that are read
        new_tokens: tokens of each that are written
        repeats: how often the text is read
        dtype: float32, bfloat16, or auto: on a CPU float32, else what each is stored in
        device: cpu, cuda, or auto
    """

    models: str
    data: str
    batches: str | int = "1,8"
    context: int = 512
    new_tokens: int = 32
    repeats: int = 5
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("context", "new_tokens", "repeats"):
            check_count(getattr(self, name), name)
        for batch in self.batch_sizes:
            check_count(batch, "batches")
        check_choice(self.dtype, "dtype", ("auto", "float32", "bfloat16"))
        check_choice(self.device, "device", ("auto", "cpu", "cuda"))

    @property
    def folders(self) -> list[str]:
        """`models` as names."""
        return self.models.split(",")

    @property
    def batch_sizes(self) -> list[int]:
        """`batches` as numbers."""
        return numbers(self.batches, "batches")
