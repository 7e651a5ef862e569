"""Options of models, of training runs and of conversions: frozen dataclasses, strict. Imports no torch."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from depthgate.errors import InvalidValueError, check_choice, check_count, check_divides
from depthgate.options import (
    DEVICES,
    Options,
    checked,
    choice,
    count,
    positive,
    share,
    token_share,
    weight,
    whole_numbers,
)

KINDS = ("dense", "mod", "moe", "mode", "random")
ROUTED_KINDS = ("mod", "mode", "random")
GATE_NAMES = ("one_plus_tanh", "sigmoid", "raw", "straight_through")
NEUTRAL_GATES = ("one_plus_tanh", "straight_through")  # those that are 1 at a score of 0
RULE_NAMES = ("scores", "predictor", "threshold")


def build(config: type[Any], values: Any) -> Any:
    """An option class from nested values; a field that is an option class itself is built first."""
    given = {}
    for each in fields(config):
        if each.name in values:
            value = values[each.name]
            given[each.name] = build(ModelConfig, value) if each.type is ModelConfig else value
    return config(**given)


def check_pattern(pattern: Any, name: str = "pattern") -> None:
    """Kinds of layers, separated by commas."""
    if not isinstance(pattern, str):
        raise InvalidValueError(f"{name} is {pattern!r}: it must be kinds of layers, such as dense,mod")
    for kind in pattern.split(","):
        if kind in ("soft_moe", "soft"):
            why = "Soft MoE mixes all tokens of a sequence, so a decoder with it is not causal"
            raise InvalidValueError(f"{name} has {kind!r}: {why}; use moe, or an encoder")
        check_choice(kind, name, KINDS)


def check_neutral(gate: Any, name: str = "gate") -> None:
    """A gate that can be added to a trained model: at first it changes nothing."""
    if check_choice(gate, name, GATE_NAMES) not in NEUTRAL_GATES:
        raise InvalidValueError(
            f"{name} is {gate!r}, which is not 1 before the router has learnt anything, and would change what the "
            f"model says: use {' or '.join(NEUTRAL_GATES)}"
        )


def check_vocab(tokenizer: str, vocab: int | None) -> None:
    """A bpe tokenizer has a size, and the others take none."""
    if vocab is not None and tokenizer != "bpe":
        raise InvalidValueError(f"vocab is {vocab}: only --tokenizer bpe takes one; leave it out")
    if tokenizer == "bpe":
        if vocab is None:
            raise InvalidValueError("tokenizer is 'bpe' without a size: give one, such as --vocab 8192")
        check_count(vocab, "vocab", minimum=257, maximum=2**20)


@dataclass(frozen=True)
class ModelConfig(Options):
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

    # The limits are far above any model that is trained, and far below what would hang a machine that tries.
    vocab: int = count(257, maximum=2**24)
    dim: int = count(128, maximum=2**16)
    layers: int = count(4, maximum=2**12)
    heads: int = count(4, maximum=2**12)
    kv_heads: int | None = count(None, maximum=2**12)
    hidden: int | None = count(None, maximum=2**20)
    context: int = count(256, maximum=2**24)
    pattern: str = checked("dense", check_pattern)
    capacity: float = token_share(0.125)
    gate: str = choice("one_plus_tanh", GATE_NAMES)
    rule: str = choice("predictor", RULE_NAMES)
    experts: int = count(8, maximum=2**14)
    top_k: int = count(2, maximum=2**14)
    null_experts: int = count(0, minimum=0, maximum=2**14)
    shared_experts: int = count(0, minimum=0, maximum=2**8)
    expert_hidden: int | None = count(None, maximum=2**20)
    qk_norm: bool = False
    tied: bool = True
    rope_base: float = positive(10_000.0)
    head_dim: int | None = count(None, maximum=2**16)
    norm_eps: float | None = positive(None)

    def check_together(self) -> None:
        check_count(self.top_k, "top_k", maximum=self.experts)
        if self.head_size % 2:
            what = "dim / heads" if self.head_dim is None else "head_dim"
            raise InvalidValueError(f"{what} is {self.head_size}: rotary positions need an even head size; change it")
        check_divides(self.kv_heads or self.heads, self.heads, "kv_heads", "heads")

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


@dataclass(frozen=True, kw_only=True)
class RunConfig(Options):
    """A training run, of our own models or of a converted one.

    Args:
        data: a text file, a glob, a folder, .jsonl, any of them packed (.xz, .gz, .zst), or stdlib: the source of
            Python's standard library
        out: folder of the run
        steps: optimizer steps in all, also when a run is resumed
        device: cpu, cuda, or auto: cuda where there is one
        seed: seed of weights and of the order of the data
        batch: sequences in a step
        accumulate: parts a step's batch is computed in, one after another
        lr: highest learning rate
        router_lr: times lr, for the routers
        weight_decay: decay of the matrices
        warmup: steps until lr is reached
        schedule: cosine, or wsd: constant, and a linear decay over the last fifth
        schedule_steps: steps the schedule is made for, so that longer runs begin as shorter ones do; steps unless given
        lowest_lr: share of lr at the end
        clip: largest norm of all gradients
        dtype: float32, or bfloat16: products in bfloat16, weights in float32
        compile: compile the layers with torch.compile
        workers: threads that prepare batches
        checkpoint_every: steps between checkpoints
        keep: checkpoints kept
        tracker: also send metrics to tensorboard, trackio or wandb
        most_bad_steps: steps in a row without a finite loss and gradient, after which a run stops
    """

    data: str
    out: str
    steps: int = count(1000)
    device: str = choice("auto", DEVICES)
    seed: int = count(0, minimum=0)
    batch: int = count(8)
    accumulate: int = count(1)
    lr: float | None = positive(None)
    router_lr: float = positive(1.0)
    weight_decay: float = weight(0.1)
    warmup: int = count(100, minimum=0)
    schedule: str = choice("cosine", ("cosine", "wsd"))
    schedule_steps: int | None = count(None)
    lowest_lr: float = share(0.1)  # 1: a rate that stays as it is
    clip: float = positive(1.0)
    dtype: str = choice("float32", ("float32", "bfloat16"))
    compile: bool = False
    workers: int = count(0, minimum=0, maximum=256)
    checkpoint_every: int = count(100)
    keep: int = count(2, minimum=2)
    tracker: str | None = choice(None, ("tensorboard", "trackio", "wandb"))
    most_bad_steps: int = count(10)

    def check_together(self) -> None:
        check_divides(self.accumulate, self.batch, "accumulate", "batch")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Train a decoder language model on text.

    Args:
        preset: where all other options start from (see depthgate presets)
        validation: text for `depthgate eval --data heldout`; a share of the data is held out unless given
        tokenizer: bytes, bpe (trained on the data), or a folder with a Hugging Face tokenizer
        vocab: size of a bpe tokenizer
        model: the model
        optimizer: adamw, or muon: Muon for the matrices of the layers and AdamW for the rest
        rule_loss: weight of the loss that trains the causal rule
        balance_loss: weight of the loss that spreads tokens over experts
        z_loss: weight of the loss that keeps the logits of experts small
        capacity_steps: steps over which the capacity falls from 1 to that of the model
        cuda_graph: on cuda, record a step once and replay it as a CUDA graph, where it can be one
        max_documents: most documents in a sequence; the tokens of further ones are left out. Unless given, as many as
            the data needs
    """

    data: str = "stdlib"
    out: str = "runs/train"
    preset: str = "tiny-mod"
    validation: str | None = None
    tokenizer: str = "bytes"
    vocab: int | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: str = choice("adamw", ("adamw", "muon"))
    lr: float = positive(1e-3)
    rule_loss: float = weight(0.01)
    balance_loss: float = weight(0.01)
    z_loss: float = weight(1e-4)
    capacity_steps: int = count(0, minimum=0)
    cuda_graph: bool = True
    max_documents: int | None = count(None)

    def check_together(self) -> None:
        super().check_together()
        check_vocab(self.tokenizer, self.vocab)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(RunConfig):
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
        tokens: tokens to train on, instead of steps
        seq: tokens of a sequence
        lr: highest learning rate; unless given 1e-4, of LoRA and routers 1e-3
        dtype: float32, bfloat16 (products in bfloat16, what is trained in float32), or auto: bfloat16 on cuda
        checkpointing: compute activations again on the way back, which saves memory
        compile: compile the layers and the loss with torch.compile
        seed: seed of the order of the data, and of LoRA
    """

    model: str
    teacher: str | None = None
    loss: str = choice("distillation", ("distillation", "text"))
    text_share: float = share(0.0)
    temperature: float = positive(1.0)
    train: str = choice("full", ("full", "router", "lora"))
    rank: int = count(16)
    capacity: float | None = token_share(None)
    capacity_share: float = share(0.1)
    calibrate: int = count(16_384, minimum=0)
    tokens: int | None = count(None, maximum=2**53)
    seq: int = count(512)
    weight_decay: float = weight(0.01)
    warmup: int = count(20, minimum=0)
    dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    checkpointing: bool = False
    workers: int = count(1, minimum=0, maximum=256)
    checkpoint_every: int = count(500)

    def check_together(self) -> None:
        super().check_together()
        check_count(self.batch * self.seq, "batch * seq", maximum=2**28)
        if self.loss == "text" and self.teacher is not None:
            raise InvalidValueError("loss is 'text', which needs no teacher: leave --teacher out")
        if self.loss == "text" and self.text_share:
            raise InvalidValueError(f"text_share is {self.text_share}, and loss 'text' is nothing else: leave it out")

    @property
    def settled(self) -> "FinetuneConfig":
        """The same options, with those filled in that depend on others: steps and lr."""
        steps = self.steps if self.tokens is None else -(-self.tokens // (self.batch * self.seq))
        lr = self.lr if self.lr is not None else 1e-4 if self.train == "full" else 1e-3
        return replace(self, steps=steps, tokens=None, lr=lr)


@dataclass(frozen=True)
class ConvertConfig(Options):
    """Route some layers of a Hugging Face model, and save it as another; or write a run as a Hugging Face model.

    Args:
        model: folder of a Hugging Face model, a GGUF file, or a run of `depthgate train`; it stays as it is
        out: folder to write; it must not be there yet
        capacity: share of the tokens that go through a routed layer
        layers: every_other, auto (those that change their tokens least on --text), or numbers of layers, such as 1,3,5
        gate: what a routed row is multiplied by: one_plus_tanh or straight_through, which are 1 at first
        rule: how a token is routed causally
        text: file of text that `--layers auto` measures on
        probe: tokens of each of the two sequences that the converted model is compared on with the dense one; they come
            after as many as its window of attention holds, if that is 1024 at most
        seed: seed of those sequences
        to: family that a run must become: llama, or qwen3 (where it normalises queries and keys)
    """

    model: str
    out: str
    capacity: float = token_share(0.5)
    layers: str | list[int] = "every_other"
    gate: str = checked("one_plus_tanh", check_neutral)
    rule: str = choice("predictor", RULE_NAMES)
    text: str | None = None
    probe: int = count(64, minimum=2, maximum=2**16)
    seed: int = count(0, minimum=0)
    to: str | None = choice(None, ("llama", "qwen3"))

    def check_together(self) -> None:
        if (self.layers == "auto") != (self.text is not None):
            raise InvalidValueError("--layers auto and --text FILE go together: give both, or neither")
        if not self.layer_choice:
            raise InvalidValueError(f"layers is {self.layers!r}: give every_other, auto, or numbers, such as 1,3,5")

    @property
    def layer_choice(self) -> str | list[int]:
        """every_other, auto, or numbers."""
        if not isinstance(self.layers, str) or self.layers in ("every_other", "auto"):
            return self.layers
        return whole_numbers(self.layers, "layers", "every_other, auto, or numbers, such as 1,3,5")


@dataclass(frozen=True)
class EvalConfig(Options):
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
    limit: int | None = count(None)
    batch: int = count(8)
    tokens: int | None = count(None)
    seq: int | None = count(None)
    dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    device: str = choice("auto", DEVICES)

    def check_together(self) -> None:
        if (self.data is None) == (self.tasks is None):
            raise InvalidValueError("eval needs a text or tasks: give --data or --tasks, and not both")
