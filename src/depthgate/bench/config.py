"""What `depthgate bench` can be told. Imports no torch."""

from dataclasses import dataclass

from depthgate.errors import InvalidValueError, check_choice, check_count


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
        try:
            return [int(width) for width in str(self.dims).split(",")]
        except ValueError:
            raise InvalidValueError(f"dims is {self.dims!r}: it must be whole numbers separated by commas") from None
