"""What `depthgate bench` can be told. Imports no torch."""

from dataclasses import dataclass

from depthgate.config import RULE_NAMES
from depthgate.errors import InvalidValueError, check_capacity, check_choice, check_count, check_divides


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

    dims: str | int = "256"
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
        return _numbers(self.dims, "dims")


@dataclass(frozen=True)
class BenchTrainConfig:
    """Time whole training steps of a Mixture-of-Depths decoder and of its dense twin, with FLOPs beside the times.

    Args:
        dims: model widths, separated by commas; heads are of 64, and of 128 from width 1024, four to one of keys
        layers: layers of every model
        seq: tokens in a sequence
        batch: sequences in a step; wide models compute it in parts
        vocab: size of the vocabulary
        capacity: share of the tokens that go through every other layer
        rule: how the Mixture-of-Depths model decides causally
        documents: documents packed into every sequence
        device: cpu or cuda
        dtype: float32 or bfloat16
        compile: compile the layers with torch.compile
        cuda_graph: on cuda, replay the whole step as a CUDA graph
        steps: timed steps
        rounds: how often every model is built and timed; medians are reported
        llama: widths at which to time Hugging Face's LlamaForCausalLM of the dense shape as well
        seed: seed of weights and data
    """

    dims: str | int = "256,512,1024,2048"
    layers: int = 16
    seq: int = 2048
    batch: int = 128
    vocab: int = 32768
    capacity: float = 0.125
    rule: str = "predictor"
    documents: int = 1
    device: str = "cuda"
    dtype: str = "bfloat16"
    compile: bool = True
    cuda_graph: bool = True
    steps: int = 20
    rounds: int = 2
    llama: str | int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for width in [*self.widths, *self.llama_widths]:
            check_count(width, "dims", minimum=128)
            check_divides(128, width, "the head size", "dims")
        for name in ("layers", "seq", "batch", "vocab", "documents", "steps", "rounds"):
            check_count(getattr(self, name), name)
        check_count(self.documents, "documents", maximum=self.seq)
        check_count(self.seed, "seed", minimum=0)
        check_capacity(self.capacity)
        check_choice(self.rule, "rule", RULE_NAMES)
        check_choice(self.device, "device", ("cpu", "cuda"))
        check_choice(self.dtype, "dtype", ("float32", "bfloat16"))

    @property
    def widths(self) -> list[int]:
        """`dims` as numbers."""
        return _numbers(self.dims, "dims")

    @property
    def llama_widths(self) -> list[int]:
        """`llama` as numbers."""
        return [] if self.llama is None else _numbers(self.llama, "llama")


@dataclass(frozen=True)
class BenchGenerateConfig:
    """Time decoding and count K/V memory of a Mixture-of-Depths decoder and of its dense twin.

    Args:
        shape: tiny, 124m or 1b: that of the presets, with random weights
        model: folder of a run, or of one of its checkpoints: measured as it was trained, instead of a shape
        data: text that the model reads, as for depthgate train; what it kept from its training unless given
        batches: numbers of sequences decoded at once, separated by commas
        contexts: tokens that the cache holds already, separated by commas; 256 unless given, or of a model all that its
            context has room for
        new_tokens: timed tokens of every sequence
        uncached: also without a cache, where everything is computed again for each token
        llama: also Hugging Face's generate with a model of the dense shape
        device: cpu or cuda
        dtype: float32 or bfloat16
        seed: seed of weights and data
    """

    shape: str = "tiny"
    model: str | None = None
    data: str | None = None
    batches: str | int = "1,8"
    contexts: str | int | None = None
    new_tokens: int = 32
    uncached: bool = True
    llama: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(self.shape, "shape", ("tiny", "124m", "1b"))
        if self.data is not None and self.model is None:
            raise InvalidValueError(f"data is {self.data!r}, but only a trained model reads text: name a --model")
        for name, numbers in (("batches", self.batch_sizes), ("contexts", self.context_sizes)):
            for number in numbers:
                check_count(number, name)
        check_count(self.new_tokens, "new_tokens")
        check_count(self.seed, "seed", minimum=0)
        check_choice(self.device, "device", ("cpu", "cuda"))
        check_choice(self.dtype, "dtype", ("float32", "bfloat16"))

    @property
    def batch_sizes(self) -> list[int]:
        """`batches` as numbers."""
        return _numbers(self.batches, "batches")

    @property
    def context_sizes(self) -> list[int]:
        """`contexts` as numbers."""
        return _numbers(256 if self.contexts is None else self.contexts, "contexts")


def _numbers(given: str | int, name: str) -> list[int]:
    try:
        return [int(number) for number in str(given).split(",")]
    except ValueError:
        raise InvalidValueError(f"{name} is {given!r}: it must be whole numbers separated by commas") from None
