"""What `depthgate demo` can be told. Imports no torch."""

from dataclasses import dataclass

from depthgate.options import Options, count


@dataclass(frozen=True)
class DemoConfig(Options):
    """Train tiny-mod and, with as many FLOPs, tiny-dense; sample from both and write a report.

    Args:
        out: folder of both runs and of report.html
        steps: optimizer steps of tiny-mod; tiny-dense takes as many as cost the same
        data: text, as for depthgate train
        seed: seed of weights, of the order of the data, and of the samples
    """

    out: str = "runs/demo"
    steps: int = count(250)
    data: str = "stdlib"
    seed: int = count(0, minimum=0)
