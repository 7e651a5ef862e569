"""What the command line can set: frozen dataclasses, checked on creation. Imports no torch."""

from dataclasses import dataclass, field, fields
from typing import Any

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


def build(config: type[Any], values: Any) -> Any:
    """A configuration from nested values; fields that are configurations themselves are built first."""
    given = {}
    for each in fields(config):
        if each.name in values:
            value = values[each.name]
            given[each.name] = build(ModelConfig, value) if each.type is ModelConfig else value
    return config(**given)


KINDS = ("dense", "mod", "moe", "mode", "random")
ROUTED_KINDS = ("mod", "mode", "random")
GATE_NAMES = ("one_plus_tanh", "sigmoid", "raw", "straight_through")
RULE_NAMES = ("scores", "predictor", "threshold")
# Far above any model that is trained, far below what would hang a machine that tries.
_MOST = {
    **dict.fromkeys(("vocab", "context"), 2**24),
    "dim": 2**16,
    **dict.fromkeys(("layers", "heads", "kv_heads"), 2**12),
    **dict.fromkeys(("hidden", "expert_hidden"), 2**20),
    **dict.fromkeys(("experts", "null_experts"), 2**14),
    "shared_experts": 2**8,
    "head_dim": 2**16,
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder language model.

    Args:
        vocab: how many token ids there are
        dim: model width
        layers: number of layers
        heads: query heads
        kv_heads: key and value heads; as many as heads unless given
        hidden: width of the feed-forward; 8/3 of dim unless given
        context: tokens of a training sequence, and the most a prompt may have
        pattern: kinds of layers, separated by commas and repeated: dense, mod (Mixture-of-Depths), moe (experts as
            feed-forward), mode (Mixture-of-Depths around a layer with experts), random (tokens taken by chance: what
            mod is to be compared with)
        capacity: share of the tokens that go through a mod, mode or random layer
        gate: what a routed row is multiplied by
        rule: how a token is routed causally
        experts: experts of a moe or mode layer
        top_k: experts each token uses
        null_experts: experts that compute nothing (integrated MoDE)
        shared_experts: experts that every token uses
        expert_hidden: width of each expert; hidden unless given
        qk_norm: normalise queries and keys
        tied: use the embedding as the head
        rope_base: base of the rotary positions
        head_dim: width of a head; dim / heads unless given
        norm_eps: what norms add to the mean square; the precision of the numbers unless given
    """

    vocab: int = 257
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    hidden: int | None = None
    context: int = 256
    pattern: str = "dense"
    capacity: float = 0.125
    gate: str = "one_plus_tanh"
    rule: str = "predictor"
    experts: int = 8
    top_k: int = 2
    null_experts: int = 0
    shared_experts: int = 0
    expert_hidden: int | None = None
    qk_norm: bool = False
    tied: bool = True
    rope_base: float = 10_000.0
    head_dim: int | None = None
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None or name not in ("kv_heads", "hidden", "expert_hidden", "head_dim"):
                check_count(value, name, int(name not in ("null_experts", "shared_experts")), most)
        check_count(self.top_k, "top_k", maximum=self.experts)
        if self.head_size % 2:
            what = "dim / heads" if self.head_dim is None else "head_dim"
            raise InvalidValueError(f"{what} is {self.head_size}: rotary positions need an even head size; change it")
        check_divides(self.kv_heads or self.heads, self.heads, "kv_heads", "heads")
        check_capacity(self.capacity)
        check_choice(self.gate, "gate", GATE_NAMES)
        check_choice(self.rule, "rule", RULE_NAMES)
        check_positive(self.rope_base, "rope_base")
        if self.norm_eps is not None:
            check_positive(self.norm_eps, "norm_eps")
        for name in ("qk_norm", "tied"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValueError(f"{name} is {getattr(self, name)!r}: it must be true or false")
        if not isinstance(self.pattern, str):
            raise InvalidValueError(f"pattern is {self.pattern!r}: it must be kinds of layers, as dense,mod")
        for kind in self.pattern.split(","):
            if kind in ("soft_moe", "soft"):
                why = "Soft MoE mixes all tokens of a sequence, so no decoder is causal with it"
                raise InvalidValueError(f"pattern has {kind!r}: {why}; use moe, or an encoder")
            check_choice(kind, "pattern", KINDS)

    @property
    def head_size(self) -> int:
        """The width of a head."""
        return self.head_dim or check_divides(self.heads, self.dim, "heads", "dim")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer."""
        cycle = self.pattern.split(",")
        return tuple(cycle[i % len(cycle)] for i in range(self.layers))

    @property
    def routed(self) -> tuple[int, ...]:
        """The layers, counted from 0, that only some tokens go through."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind in ROUTED_KINDS)


def check_vocab(tokenizer: str, vocab: int | None) -> None:
    """A bpe tokenizer has a size, and no other takes one."""
    if vocab is not None and tokenizer != "bpe":
        raise InvalidValueError(f"vocab is {vocab}: only --tokenizer bpe takes one; leave it out")
    if tokenizer == "bpe":
        if vocab is None:
            raise InvalidValueError("tokenizer is 'bpe' without a size: give one, as --vocab 8192")
        check_count(vocab, "vocab", minimum=257, maximum=2**20)


@dataclass(frozen=True)
class TrainConfig:
    """Train a decoder language model on text.

    Args:
        data: a text file, a glob, a folder, .jsonl, any of them packed (.xz, .gz, .zst), or stdlib: the source of
            Python's standard library
        out: folder of the run
        steps: optimizer steps in all, also when a run is resumed
        preset: where all other options start from (see depthgate presets)
        device: cpu, cuda, or auto: cuda where there is one
        seed: seed of weights and of the order of the data
        validation: text for `depthgate eval --data heldout`; a share of the data is held out unless given
        tokenizer: bytes, bpe (trained on the data), or a folder with a Hugging Face tokenizer
        vocab: size of a bpe tokenizer
        model: the model
        batch: sequences in a step
        accumulate: parts a step's batch is computed in, one after another
        optimizer: adamw, or muon: Muon for the matrices of the layers and AdamW for the rest
        lr: highest learning rate
        router_lr: times lr, for the routers
        weight_decay: decay of the matrices
        warmup: steps until lr is reached
        schedule: cosine, or wsd: constant, and a linear decay over the last fifth
        schedule_steps: steps the schedule is made for, so that longer runs begin as shorter ones do; steps unless given
        lowest_lr: share of lr at the end
        clip: largest norm of all gradients
        rule_loss: weight of the loss that trains the causal rule
        balance_loss: weight of the loss that spreads tokens over experts
        z_loss: weight of the loss that keeps the logits of experts small
        capacity_steps: steps over which the capacity falls from 1 to that of the model
        dtype: float32, or bfloat16: products in bfloat16, weights in float32
        compile: compile the layers with torch.compile
        cuda_graph: on cuda, record a step once and replay it as a CUDA graph, where it can be one
        max_documents: most documents in a sequence; the tokens of further ones are left out. Unless given, as many as
            the data needs
        workers: threads that prepare batches
        checkpoint_every: steps between checkpoints
        keep: checkpoints kept
        tracker: also send metrics to tensorboard, trackio or wandb
        most_bad_steps: steps in a row without a finite loss and gradient, after which a run stops
    """

    data: str = "stdlib"
    out: str = "runs/train"
    steps: int = 1000
    preset: str = "tiny-mod"
    device: str = "auto"
    seed: int = 0
    validation: str | None = None
    tokenizer: str = "bytes"
    vocab: int | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    batch: int = 8
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float = 1e-3
    router_lr: float = 1.0
    weight_decay: float = 0.1
    warmup: int = 100
    schedule: str = "cosine"
    schedule_steps: int | None = None
    lowest_lr: float = 0.1
    clip: float = 1.0
    rule_loss: float = 0.01
    balance_loss: float = 0.01
    z_loss: float = 1e-4
    capacity_steps: int = 0
    dtype: str = "float32"
    compile: bool = False
    cuda_graph: bool = True
    max_documents: int | None = None
    workers: int = 0
    checkpoint_every: int = 100
    keep: int = 2
    tracker: str | None = None
    most_bad_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "checkpoint_every", "most_bad_steps"):
            check_count(getattr(self, name), name)
        if self.max_documents is not None:
            check_count(self.max_documents, "max_documents")
        for name in ("seed", "warmup", "capacity_steps"):
            check_count(getattr(self, name), name, minimum=0)
        if self.schedule_steps is not None:
            check_count(self.schedule_steps, "schedule_steps")
        check_count(self.workers, "workers", minimum=0, maximum=256)
        check_count(self.keep, "keep", minimum=2)
        check_divides(self.accumulate, self.batch, "accumulate", "batch")
        for name in ("lr", "router_lr", "clip"):
            check_positive(getattr(self, name), name)
        for name in ("weight_decay", "rule_loss", "balance_loss", "z_loss"):
            check_probability(getattr(self, name), name)
        check_share(self.lowest_lr, "lowest_lr")  # 1: a rate that stays as it is
        check_choice(self.device, "device", ("auto", "cpu", "cuda"))
        check_choice(self.optimizer, "optimizer", ("adamw", "muon"))
        check_choice(self.schedule, "schedule", ("cosine", "wsd"))
        check_choice(self.dtype, "dtype", ("float32", "bfloat16"))
        if self.tracker is not None:
            check_choice(self.tracker, "tracker", ("tensorboard", "trackio", "wandb"))
        check_vocab(self.tokenizer, self.vocab)


@dataclass(frozen=True)
class EvalConfig:
    """Measure how well a model predicts a text, or how well it does tasks.

    Args:
        model: folder of a run, or of one of its checkpoints, or of a Hugging Face model, dense or converted
        data: text, as for depthgate train; or heldout: what the run kept from its training (or its validation text)
        tasks: instead of data, a task of lm-eval in a yaml file, for Hugging Face models
        limit: most documents of the task
        batch: sequences computed at once
        tokens: most tokens to measure on, spread evenly; all unless given
        seq: tokens that a Hugging Face model reads at once; unless given 1024, or what it has room for
        dtype: that of a Hugging Face model: float32, bfloat16, or auto: on a CPU float32, else what it is stored in
        device: cpu, cuda, or auto
    """

    model: str
    data: str | None = None
    tasks: str | None = None
    limit: int | None = None
    batch: int = 8
    tokens: int | None = None
    seq: int | None = None
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if (self.data is None) == (self.tasks is None):
            raise InvalidValueError("eval needs a text or tasks: give --data or --tasks, and not both")
        for name in ("limit", "tokens", "seq", "batch"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name)
        check_choice(self.dtype, "dtype", ("auto", "float32", "bfloat16"))
        check_choice(self.device, "device", ("auto", "cpu", "cuda"))


@dataclass(frozen=True)
class PresetsConfig:
    """List the presets of depthgate train, with parameters and FLOPs."""
