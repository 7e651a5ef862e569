"""What `depthgate demo` can be told. Imports no torch."""

from dataclasses import dataclass

from depthgate.errors import check_count


@dataclass(frozen=True)
class DemoConfig:
    """Train tiny-mod and, with as many FLOPs, tiny-dense; sample from both and write a report.

    Args:
        out: folder of both runs and of report.html
        steps: optimizer steps of tiny-mod; tiny-dense takes as many as cost the same
        data: text, as for depthgate train
        seed: seed of weights, of the order of the data, and of the samples
    """

    out: str = "runs/demo"
    steps: int = 250
    data: str = "stdlib"
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.steps, "steps")
        check_count(self.seed, "seed", minimum=0)
