"""Parts of a CUDA graph that run only where a number on the device is not 0: IF nodes, by NVIDIA's `cuda-bindings`,
which PyTorch for CUDA brings along."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def available() -> bool:
    """True where `cuda-bindings` is installed, and it and the driver know IF nodes in captured streams."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return False
    return min(runtime.CUDART_VERSION, _done(runtime.cudaDriverGetVersion())) >= 13000


class Branches:
    """Places for the IF nodes of one graph, made before it is captured and kept as long as it is."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.MemPool()

    def new_handle(self) -> int:
        """A handle of the graph that is being captured, for a kernel to set; 0 until one does."""
        from cuda.bindings import runtime

        default = runtime.cudaGraphConditionalHandleFlags.cudaGraphCondAssignDefault
        return int(_done(runtime.cudaGraphConditionalHandleCreate(_captured()[1], 0, int(default))))

    @contextmanager
    def only_if(self, handle: int) -> Iterator[None]:
        """Capture what is launched inside as the body of an IF node, which runs where the handle's number is not 0."""
        from cuda.bindings import runtime

        params = runtime.cudaGraphNodeParams()
        params.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
        params.conditional.handle = runtime.cudaGraphConditionalHandle(handle)
        params.conditional.type = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeIf
        params.conditional.size = 1
        stream, graph, before = _captured()
        node = _done(runtime.cudaGraphAddNode(graph, before, None, len(before), params))
        body = params.conditional.phGraph_out[0]
        flag = runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
        _done(runtime.cudaStreamUpdateCaptureDependencies(stream, [node], None, 1, int(flag)))
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.pool):
            side = self.stream.cuda_stream
            _done(runtime.cudaStreamBeginCaptureToGraph(side, body, None, None, 0, mode))
            try:
                yield
            finally:
                _done(runtime.cudaStreamEndCapture(side))


def _captured() -> tuple[int, Any, list[Any]]:
    """The current stream, the graph that is being captured from it, and the nodes that the next one comes after."""
    from cuda.bindings import runtime

    stream = torch.cuda.current_stream().cuda_stream
    _, _, graph, nodes, *_ = _done(runtime.cudaStreamGetCaptureInfo(stream))
    return stream, graph, nodes


def _done(result: tuple[Any, ...]) -> Any:
    """The results of a call, after its error code."""
    error, *found = result
    if error.value:
        raise RuntimeError(f"CUDA says {error.name}")
    return found[0] if len(found) == 1 else found
