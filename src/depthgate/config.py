"""What the command line can set: frozen dataclasses, checked on creation. Imports no torch."""

from dataclasses import dataclass

from depthgate.errors import (
    InvalidValueError,
    check_capacity,
    check_choice,
    check_count,
    check_divides,
    check_positive,
    check_probability,
)


@dataclass(frozen=True)
class BenchLayersConfig:
    """Time layers forward and backward, with FLOPs beside the times.

    Args:
        dims: model widths, separated by commas
        batch: sequences in a batch
        seq: tokens in a sequence
        experts: experts of MoE and Soft MoE
        device: cpu or cuda
        dtype: float32 or bfloat16
        compile: compile every layer with torch.compile
        cuda_graphs: on cuda, capture each pass and time its replay, which leaves launch overhead out
        repeats: timed rounds; every round runs every layer, and medians are reported
        seed: seed of weights and data
    """

    dims: str = "256"
    batch: int = 8
    seq: int = 256
    experts: int = 8
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False
    cuda_graphs: bool = False
    repeats: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for width in self.widths:
            check_count(width, "dims", minimum=16)
        for name in ("batch", "seq", "experts", "repeats"):
            check_count(getattr(self, name), name)
        check_count(self.seed, "seed", minimum=0)
        check_choice(self.device, "device", ("cpu", "cuda"))
        check_choice(self.dtype, "dtype", ("float32", "bfloat16"))
        if self.cuda_graphs and self.device != "cuda":
            raise InvalidValueError(f"cuda_graphs is true, but device is {self.device!r}: it must be 'cuda'")

    @property
    def widths(self) -> list[int]:
        """`dims` as numbers."""
        try:
            return [int(width) for width in self.dims.split(",")]
        except ValueError:
            raise InvalidValueError(f"dims is {self.dims!r}: it must be whole numbers separated by commas") from None


@dataclass(frozen=True)
class DemoConfig:
    """Train the encoders on handwritten digits beside a dense twin, and write a report.

    Args:
        out: folder for report.html
        epochs: passes over the training digits
        hidden_size: width of every encoder
        num_layers: blocks of every encoder
        dropout: dropout of every encoder
        seed: seed of weights and batches
    """

    out: str = "runs/demo"
    epochs: int = 30
    hidden_size: int = 64
    num_layers: int = 4
    dropout: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "num_layers"):
            check_count(getattr(self, name), name)
        check_count(self.hidden_size, "hidden_size", minimum=8)
        check_count(self.seed, "seed", minimum=0)
        check_probability(self.dropout, "dropout")


KINDS = ("dense", "mod", "moe", "mode")
GATE_NAMES = ("one_plus_tanh", "sigmoid", "raw", "straight_through")
RULE_NAMES = ("scores", "predictor", "threshold")
# Far above any model that is trained, far below what would hang a machine that tries.
_MOST = {
    "vocab": 2**24,
    "dim": 2**16,
    "layers": 2**12,
    "heads": 2**12,
    "kv_heads": 2**12,
    "hidden": 2**20,
    "context": 2**24,
    "experts": 2**14,
    "null_experts": 2**14,
    "shared_experts": 2**8,
    "expert_hidden": 2**20,
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
            feed-forward), mode (Mixture-of-Depths around a layer with experts)
        capacity: share of the tokens that go through a mod or mode layer
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

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None or name not in ("kv_heads", "hidden", "expert_hidden"):
                check_count(value, name, int(name not in ("null_experts", "shared_experts")), most)
        check_count(self.top_k, "top_k", maximum=self.experts)
        head_dim = check_divides(self.heads, self.dim, "heads", "dim")
        if head_dim % 2:
            raise InvalidValueError(f"dim / heads is {head_dim}: rotary positions need an even head size; change one")
        check_divides(self.kv_heads or self.heads, self.heads, "kv_heads", "heads")
        check_capacity(self.capacity)
        check_choice(self.gate, "gate", GATE_NAMES)
        check_choice(self.rule, "rule", RULE_NAMES)
        check_positive(self.rope_base, "rope_base")
        for kind in self.pattern.split(","):
            if kind in ("soft_moe", "soft"):
                raise InvalidValueError(
                    f"pattern has {kind!r}: Soft MoE mixes all tokens of a sequence, so no decoder is causal with it; "
                    "use moe, or an encoder"
                )
            check_choice(kind, "pattern", KINDS)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer."""
        cycle = self.pattern.split(",")
        return tuple(cycle[i % len(cycle)] for i in range(self.layers))
