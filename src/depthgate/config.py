"""Options of models, of training runs and of most commands: frozen dataclasses, strict. Imports no torch."""

from dataclasses import dataclass, field, replace
from typing import Any

from depthgate.errors import InvalidValueError, check_capacity, check_choice, check_count, check_divides, check_head
from depthgate.options import DEVICES, Options, choice, count, number, option, positional, required, whole_numbers

KINDS = ("dense", "mod", "moe", "mode", "mode_staged", "random")
ROUTED_KINDS = ("mod", "mode_staged", "random")  # whole layers that only some tokens go through
EXPERT_KINDS = ("moe", "mode", "mode_staged")  # layers with experts as feed-forward
# The tables of routing.scores and routing.causal, for those that load no torch: a new name goes into both.
GATE_NAMES = ("one_plus_tanh", "sigmoid", "raw", "straight_through")
NEUTRAL_GATES = ("one_plus_tanh", "straight_through")  # those that are 1 at a score of 0
RULE_NAMES = ("scores", "predictor", "threshold")
TRACKERS = ("tensorboard", "trackio", "wandb")
DTYPES = ("auto", "float32", "bfloat16")
TEXT_TASKS = ("word", "continuation", "order")  # train.tasks makes them from any text


def check_pattern(pattern: Any, name: str = "pattern", kinds: tuple[str, ...] = KINDS) -> None:
    """Kinds of layers, separated by commas."""
    if not isinstance(pattern, str):
        raise InvalidValueError(f"{name} is {pattern!r}: it must be kinds of layers, such as dense,{kinds[1]}")
    for kind in pattern.split(","):
        if kind in ("soft_moe", "soft") and "soft_moe" not in kinds:
            why = "Soft MoE mixes all tokens of a sequence, so a decoder with it is not causal"
            raise InvalidValueError(f"{name} has {kind!r}: {why}; use moe, or an encoder")
        check_choice(kind, name, kinds)


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
    """A decoder language model."""

    # The limits are far above any model that is trained, and far below what would hang a machine that tries.
    vocab: int = count(257, "how many token ids there are", maximum=2**24)
    dim: int = count(128, "model width", maximum=2**16)
    layers: int = count(4, "number of layers", maximum=2**12)
    heads: int = count(4, "query heads", maximum=2**12)
    kv_heads: int | None = count(None, "key and value heads; as many as heads unless given", maximum=2**12)
    hidden: int | None = count(None, "width of the feed-forward; 8/3 of dim unless given", maximum=2**20)
    context: int = count(256, "tokens of a training sequence, and the most a prompt may have", maximum=2**24)
    pattern: str = option(
        "dense",
        "kinds of layers, separated by commas and repeated: dense, mod (Mixture-of-Depths), moe (experts as "
        "feed-forward, chosen by tokens), mode (integrated MoDE: experts choose, and a token may get none), "
        "mode_staged (Mixture-of-Depths around a moe layer), random (tokens taken by chance: what mod is to be "
        "compared with)",
        check_pattern,
    )
    first: str | None = choice(None, KINDS, "kind of the first layer, in place of the pattern's")
    capacity: float = option(0.125, "share of the tokens in a mod, mode_staged or random layer", check_capacity)
    gate: str = choice("one_plus_tanh", GATE_NAMES, "what a row of a mod or mode_staged layer is multiplied by")
    rule: str = choice("threshold", RULE_NAMES, "how a token enters a mod or mode_staged layer causally")
    experts: int = count(8, "experts of a moe, mode or mode_staged layer", maximum=2**14)
    top_k: int = count(2, "experts each token uses; on average, where experts choose", maximum=2**14)
    pool: str = choice("batch", ("batch", "sequence"), "what experts choose their tokens out of")
    expert_gate: str | None = choice(
        None, ("softmax", "sigmoid"), "what an expert's row is multiplied by; sigmoid in mode layers, else softmax"
    )
    choice: str = choice("experts", ("experts", "tokens"), "who chooses in a mode layer")
    null_experts: int = count(0, "experts that compute nothing, for tokens to choose", minimum=0, maximum=2**14)
    shared_experts: int = count(0, "experts that every token uses", minimum=0, maximum=2**8)
    expert_hidden: int | None = count(
        None, "width of each expert; unless given, so that a token costs what a dense feed-forward does", maximum=2**20
    )
    qk_norm: bool = option(False, "normalise queries and keys")
    key_shift: bool = option(False, "take half of each key from the token before")
    embed_norm: bool = option(False, "normalise the embedding")
    router_norm: bool = option(False, "let routers of whole layers read normalised tokens")
    tied: bool = option(True, "use the embedding as the head")
    rope_base: float = number(10_000.0, "(0, inf)", "base of the rotary positions")
    head_dim: int | None = count(None, "width of a head; dim / heads unless given", maximum=2**16)
    norm_eps: float | None = number(None, "(0, inf)", "what norms add to the mean square; unless given the dtype's eps")

    def check_together(self) -> None:
        check_count(self.top_k, "top_k", maximum=self.experts)
        if any(self.experts_choose(kind) for kind in self.kinds):
            check_count(self.experts, "experts", minimum=2, maximum=2**14)
        if self.null_experts and "mode" in self.kinds and self.choice == "experts":
            raise InvalidValueError(f"null_experts is {self.null_experts}: they are for --model.choice tokens")
        check_head(self.head_size, "head_dim" if self.head_dim else "dim / heads", self.key_shift)
        check_divides(self.kv_heads or self.heads, self.heads, "kv_heads", "heads")

    @property
    def head_size(self) -> int:
        return self.head_dim or check_divides(self.heads, self.dim, "heads", "dim")

    @property
    def kinds(self) -> tuple[str, ...]:
        cycle = self.pattern.split(",")
        kinds = tuple(cycle[i % len(cycle)] for i in range(self.layers))
        return kinds if self.first is None else (self.first, *kinds[1:])

    def experts_choose(self, kind: str) -> bool | None:
        """Whether experts choose tokens in a layer of this kind, or tokens experts; None: it has no experts."""
        return (kind == "mode" and self.choice == "experts") if kind in EXPERT_KINDS else None

    @property
    def routed(self) -> tuple[int, ...]:
        """The layers, counted from 0, that only some tokens go through."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind in ROUTED_KINDS)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Options):
    """A training run, of our own models or of a converted one."""

    data: str = required(
        "text file, glob, folder or .jsonl, also packed (.xz, .gz, .zst); stdlib: Python's source. A .txt is cut into "
        "documents at <|endoftext|>, or else at two blank lines, unless it is given as whole:FILE"
    )
    out: str = required("folder of the run")
    steps: int = count(1000, "optimizer steps in all, also when a run is resumed")
    device: str = choice("auto", DEVICES, "cpu, cuda, or auto: cuda where there is one")
    seed: int = count(0, "seed of weights and of the order of the data", minimum=0)
    batch: int = count(8, "sequences in a step")
    accumulate: int = count(1, "parts a step's batch is computed in, one after another")
    lr: float | None = number(None, "(0, inf)", "highest learning rate")
    router_lr: float = number(1.0, "(0, inf)", "times lr, for the routers")
    weight_decay: float = number(0.1, "[0, 1)", "decay of the matrices")
    warmup: int = count(100, "steps until lr is reached, at most half of the schedule's", minimum=0)
    schedule: str = choice(
        "cosine", ("cosine", "linear", "wsd"), "cosine, linear, or wsd: constant, then linear over the last fifth"
    )
    schedule_steps: int | None = count(
        None, "steps the schedule is made for, so that longer runs begin as shorter ones do; steps unless given"
    )
    lowest_lr: float = number(0.1, "[0, 1]", "share of lr at the end; 1: a rate that stays as it is")
    clip: float = number(1.0, "(0, inf)", "largest norm of all gradients")
    dtype: str = choice("float32", DTYPES[1:], "float32, or bfloat16: products in bfloat16, weights in float32")
    compile: bool = option(False, "compile the layers and the loss with torch.compile")
    workers: int = count(0, "threads that prepare batches", minimum=0, maximum=256)
    checkpoint_every: int = count(100, "steps between checkpoints")
    keep: int = count(2, "checkpoints kept", minimum=2)
    tracker: str | None = choice(None, TRACKERS, "also send metrics to tensorboard, trackio or wandb")
    most_bad_steps: int = count(10, "steps in a row without a finite loss and gradient, after which a run stops")

    def check_together(self) -> None:
        check_divides(self.accumulate, self.batch, "accumulate", "batch")
        if (end := self.schedule_steps or self.steps) < self.steps and not self.lowest_lr:
            why = f"the rate is 0 from there on, and steps up to {self.steps} change nothing"
            raise InvalidValueError(f"schedule_steps is {end}: {why}; leave it out, or give a --lowest_lr above 0")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Train a decoder language model on text."""

    data: str = "stdlib"
    out: str = "runs/train"
    preset: str = option("tiny-mod", "where all other options start from (see depthgate presets)")
    validation: str | None = option(None, "text for `eval --data heldout`; a share of the data unless given")
    tokenizer: str = option("bytes", "bytes, bpe (trained on the data), or a folder with a Hugging Face tokenizer")
    vocab: int | None = option(None, "size of a bpe tokenizer")
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: str = choice("adamw", ("adamw", "muon"), "adamw, or muon: Muon for the layers' matrices, else AdamW")
    lr: float = number(1e-3, "(0, inf)")
    rule_loss: float = number(0.01, "[0, 1)", "weight of the loss that trains the causal rule")
    balance_loss: float = number(0.01, "[0, 1)", "weight of the loss that spreads tokens over experts")
    z_loss: float = number(1e-4, "[0, 1)", "weight of the loss that keeps the logits of experts small")
    capacity_steps: int = count(0, "steps over which the capacity falls from 1 to that of the model", minimum=0)
    cuda_graph: bool = option(True, "on cuda, record a step once and replay it as a CUDA graph, where it can be one")
    max_documents: int | None = count(
        None, "most documents in a sequence, further ones are left out; as many as the data needs unless given"
    )

    def check_together(self) -> None:
        super().check_together()
        check_vocab(self.tokenizer, self.vocab)

    def with_vocab(self, vocab: int) -> "TrainConfig":
        """The configuration with the tokenizer's vocabulary; another one that was asked for is refused."""
        if self.model.vocab not in (ModelConfig.vocab, self.vocab, vocab):
            raise InvalidValueError(
                f"model.vocab is {self.model.vocab}, but the tokenizer has {vocab} tokens: leave it out"
            )
        return replace(self, model=replace(self.model, vocab=vocab))


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(RunConfig):
    """Recover the quality of a converted Hugging Face model."""

    model: str = required("folder of a converted model, which stays as it is")
    out: str = required("folder to write the model to, with its metrics and checkpoints")
    teacher: str | None = option(None, "folder of the model to learn from; the dense form of --model unless given")
    loss: str = choice(
        "distillation", ("distillation", "text"), "distillation: say what the teacher says; text: predict the text"
    )
    text_share: float = number(0.0, "[0, 1]", "share of the distillation loss that is of predicting the text")
    temperature: float = number(1.0, "(0, inf)", "how much both sides are softened in distillation")
    train: str = choice(
        "full",
        ("full", "router", "lora"),
        "what is trained: full, router (routers alone) or lora (routers, and LoRA in linear layers, merged when saved)",
    )
    rank: int = count(16, "rank of LoRA")
    capacity: float | None = option(None, "share of tokens routed at the end; the model's unless given", check_capacity)
    capacity_share: float = number(0.1, "[0, 1]", "share of the steps over which the capacity falls from 1")
    calibrate: int = count(
        16_384, "tokens that routers are scaled by, and set from if all zero, before the first step; 0: none", minimum=0
    )
    tokens: int | None = count(None, "tokens to train on, instead of steps", maximum=2**53)
    seq: int = count(512, "tokens of a sequence", minimum=2)
    lr: float | None = number(None, "(0, inf)", "highest learning rate; unless given 1e-4, of LoRA and routers 1e-3")
    weight_decay: float = number(0.01, "[0, 1)")
    warmup: int = count(20, minimum=0)
    dtype: str = choice("auto", DTYPES, "float32, bfloat16 (of products alone), or auto: bfloat16 on cuda")
    checkpointing: bool = option(False, "compute activations again on the way back, which saves memory")
    workers: int = count(1, minimum=0, maximum=256)
    checkpoint_every: int = count(500)

    def check_together(self) -> None:
        super().check_together()
        check_count(self.batch * self.seq, "batch * seq", maximum=2**28)
        if self.rank != type(self).rank and self.train != "lora":
            raise InvalidValueError(f"rank is {self.rank}, and train is {self.train!r}: --rank belongs to --train lora")
        of_teachers = ("teacher", "text_share", "temperature") if self.loss == "text" else ()
        if given := [name for name in of_teachers if getattr(self, name) != getattr(type(self), name)]:
            raise InvalidValueError(f"loss is 'text', which needs no teacher: leave --{given[0]} out")

    @property
    def settled(self) -> "FinetuneConfig":
        """The same options, with those filled in that depend on others: steps and lr."""
        steps = self.steps if self.tokens is None else -(-self.tokens // (self.batch * self.seq))
        lr = self.lr if self.lr is not None else 1e-4 if self.train == "full" else 1e-3
        return replace(self, steps=steps, tokens=None, lr=lr)


@dataclass(frozen=True)
class ConvertConfig(Options):
    """Route some layers of a Hugging Face model, and save it as another; or write a run as a Hugging Face model."""

    model: str = required("folder of a Hugging Face model or its name on the hub, a GGUF file, or a run")
    out: str = required("folder to write; it must not be there yet")
    capacity: float | str | None = option(None, "share of tokens routed, 0.5 unless given; or of each layer: 0.25,0.5")
    capacity_by: str = choice("layer", ("layer", "change"), "change: more where layers change --text more")
    layers: str | list[int] | None = option(  # noqa: RUF009
        None, "every_other (unless given), auto (those that change their tokens least on --text), or numbers: 1,3,5"
    )
    gate: str | None = option(None, "factor of a row: one_plus_tanh (unless given), straight_through", check_neutral)
    rule: str | None = choice(None, RULE_NAMES, "how a token is routed causally; predictor unless given")
    routing_mode: str = choice("auto", ("auto", "causal", "top_k"), "auto: top k in training, causal in evaluation")
    text: str | None = option(None, "text, as for depthgate train: --layers auto and --capacity_by change use it")
    probe: int = count(64, "tokens compared with the dense model, of two sequences", minimum=2, maximum=2**16)
    seed: int = count(0, "seed of those sequences", minimum=0)
    to: str | None = choice(
        None, ("llama", "qwen3", "depthgate"), "what a run becomes: llama, qwen3 (has qk_norm), or depthgate (any run)"
    )

    def check_together(self) -> None:
        if (self.layers == "auto" or self.capacity_by == "change") != (self.text is not None):
            raise InvalidValueError("--layers auto (or --capacity_by change) and --text go together: give both")
        if not self.layer_choice:
            raise InvalidValueError(f"layers is {self.layers!r}: give every_other, auto, or numbers, such as 1,3,5")
        for each in self.capacities:
            check_capacity(each)

    @property
    def capacities(self) -> list[float]:
        """One for all routed layers, or one for each."""
        try:
            return [float(each) for each in str(0.5 if self.capacity is None else self.capacity).split(",")]
        except ValueError:
            raise InvalidValueError(f"capacity is {self.capacity!r}: give a number, or several") from None

    @property
    def layer_choice(self) -> str | list[int]:
        """every_other, auto, or numbers."""
        if not isinstance(self.layers, str) or self.layers in ("every_other", "auto"):
            return "every_other" if self.layers is None else self.layers
        return whole_numbers(self.layers, "layers", "every_other, auto, or numbers, such as 1,3,5")


@dataclass(frozen=True)
class EvalConfig(Options):
    """Measure how well a model predicts a text or tells images apart, or how well it does tasks."""

    model: str = required("folder of a run, of one of its checkpoints, or of a Hugging Face model, dense or converted")
    data: str | None = option(
        None, "text or images, as for depthgate train; or heldout: what the run kept from its training, or validation"
    )
    tasks: str | None = option(
        None, "word,continuation,order or some of them, made from data; or, without data, a yaml file of lm-eval"
    )
    limit: int | None = count(None, "items of each task; unless given 200, of lm-eval all")
    card: bool = option(False, "also write figures and command into the README.md of a Hugging Face model")
    batch: int = count(8, "sequences or images computed at once")
    tokens: int | None = count(None, "most tokens to measure on, spread evenly; all unless given")
    seq: int | None = count(
        None, "tokens a Hugging Face model reads at once; unless given 1024, or what it has room for"
    )
    dtype: str = choice("auto", DTYPES, "that of a Hugging Face model; auto: float32 on a CPU, else as it is stored")
    device: str = choice("auto", DEVICES, "cpu, cuda, or auto")

    def check_together(self) -> None:
        names = (self.tasks or "").split(",")
        if self.data is None and {"", *TEXT_TASKS} & {*names}:
            raise InvalidValueError("data is missing: give --data, or in --tasks a yaml file with a task of lm-eval")
        if self.data is not None and names[0].endswith((".yaml", ".yml")):
            raise InvalidValueError(f"{self.tasks} names data of its own: leave --data out")
        for name in names if self.data is not None and self.tasks is not None else ():
            check_choice(name, "tasks", TEXT_TASKS)
        if self.limit is not None and self.tasks is None:
            raise InvalidValueError(f"limit is {self.limit}: it is for --tasks; give --tokens for a text")


@dataclass(frozen=True)
class ViewConfig(Options):
    """See which tokens went deep (--model), or how training runs went (RUN_DIR...): one self-contained page."""

    runs: list[str] = positional("folders of `depthgate train`, drawn over each other; or of one `depthgate isoflop`")
    model: str | None = option(None, "folder of a run, of one of its checkpoints, or of a converted model")
    text: str | None = option(None, "file to read; what the run held out unless text or prompt is given")
    prompt: str | None = option(None, "text to read, given here")
    images: str | None = option(None, "folder of images to show with a run of images; held-out ones unless given")
    out: str | None = option(None, "file of the page; page.html unless given, or none where a picture is asked for")
    png: str | None = option(None, "file of a picture")
    svg: str | None = option(None, "file of a picture for papers")
    title: str = option("", "heading of the page or picture; names of runs or of the model unless given")
    tokens: int = count(4000, "tokens read at most", maximum=2**16)
    device: str = choice("auto", DEVICES, "cpu, cuda, or auto")

    def check_together(self) -> None:
        if bool(self.runs) == (self.model is not None):
            raise InvalidValueError("give either folders of runs (depthgate view RUN_DIR...) or --model DIR")
        if self.text is not None and self.prompt is not None:
            raise InvalidValueError("text and prompt are both given: leave one out")
        if self.runs and {self.text, self.prompt, self.images} != {None}:
            raise InvalidValueError("text, prompt and images are for --model: runs have none to show")
        for name, what in (("prompt", "some text"), ("model", "a folder")):
            if getattr(self, name) == "":
                raise InvalidValueError(f"{name} is empty: give {what}")

    @property
    def page(self) -> str | None:
        """File of the page; None: no page is asked for."""
        return self.out or (None if self.png or self.svg else "page.html")


@dataclass(frozen=True)
class BenchConfig(Options):
    """Time how fast models read and write, and measure the memory they take, next to the first of them."""

    models: str = required("folders of runs or of Hugging Face models, dense or converted, separated by commas")
    data: str | None = option(None, "text, as for depthgate train; what the first model's run held out unless given")
    batch: str | int = option("1,8", "numbers of sequences computed at once, separated by commas")
    context: str | int | None = option(None, "tokens read of a sequence, or several numbers; unless given 512, or less")
    new_tokens: int = count(32, "tokens of each that are decoded")
    repeats: int = count(5, "how often the text is read")
    dtype: str = choice("auto", DTYPES, "float32, bfloat16, or auto: float32 on a CPU, else as a model is stored")
    device: str = choice("auto", DEVICES, "cpu, cuda, or auto")

    def check_together(self) -> None:
        if "" in self.models.split(","):
            raise InvalidValueError(f"models is {self.models!r}: a name is empty, give folders separated by commas")
        for name in ("batch", "context"):
            for each in self.numbers(name):
                check_count(each, name)

    def numbers(self, name: str) -> list[int]:
        """`batch` or `context` as numbers."""
        given = getattr(self, name)
        return [] if given is None else whole_numbers(given, name)


@dataclass(frozen=True)
class PresetsConfig(Options):
    """List the presets of depthgate train, with parameters and FLOPs."""


@dataclass(frozen=True)
class DemoConfig(Options):
    """Train a dense, a Mixture-of-Depths and a MoDE model with as many FLOPs each; sample from them, write a report."""

    out: str = option("runs/demo", "folder of the runs and of report.html")
    steps: int = count(2800, "optimizer steps of tiny-dense; the others take as many as cost the same")
    data: str = option("stdlib", "text, as for depthgate train")
    seed: int = count(0, "seed of weights, of the order of the data, and of the samples", minimum=0)
