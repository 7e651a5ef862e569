"""Checkpoints of several processes: each writes and reads its own rows, and none gathers what the others hold.

A failure in one process is raised in all, for the same reason: processes agree after each phase (`World.agree`).
"""

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from depthgate.checkpoint import store
from depthgate.checkpoint import tensors as tensor_files
from depthgate.checkpoint.store import Checkpoint, Plain, Record, Tensors
from depthgate.checkpoint.tensors import Whole, piece_name
from depthgate.device import World
from depthgate.errors import DepthgateError, DepthgateWarning


def save(run: Path, step: int, tensors: Tensors, state: Plain, config: Plain, keep: int, world: World) -> Path:
    """Save by all processes together, as `store.save` does alone: the rows of split tensors that each holds, and the
    first process's copy of all others, its state and its configuration."""
    run = Path(run)
    size, plain, own = world.agree(
        lambda: (
            tensor_files.check(tensors),
            store.plain_files(state, config),
            {group: _own(named, world) for group, named in tensors.items()},
        )
    )
    with ExitStack() as stack:

        def begin() -> Path | None:
            return stack.enter_context(store.begun(run, step, size, keep)) if world.first else None

        temp = world.told(world.agree(begin))
        assert temp is not None

        def write() -> dict[str, Record]:
            paths = {group: temp / piece_name(group, world.rank, world.size) for group in own}
            with store.named_errors(run, step):
                for group, (held, places) in own.items():
                    tensor_files.write(paths[group], held, places)
                return store.seal(paths.values())

        written: list[dict[str, Record]] = [{}] * world.size
        dist.all_gather_object(written, world.agree(write))

        def publish() -> None:
            if world.first:
                records = {name: record for part in written for name, record in sorted(part.items())}
                with store.named_errors(run, step):
                    store.publish(temp, step, records, plain, keep)

        world.agree(publish)
    return run / f"step-{step}"


def load(run: Path, world: World, held: Mapping[str, Tensor]) -> Checkpoint:
    """Load by all processes together, as `store.load` does alone, the same checkpoint in all. A tensor with the name of
    one in `held` (or that name, a colon and more) and its shape is split as it is; others are whole, on the CPU."""

    def listed(run: Path) -> list[Path]:
        return world.told(world.agree(lambda: store.candidates(run)))

    with warnings.catch_warnings():
        if not world.first:
            warnings.simplefilter("ignore", DepthgateWarning)  # once is enough
        return store.newest(run, lambda path: _read_folder(path, world, held), listed)


def _read_folder(folder: Path, world: World, held: Mapping[str, Tensor]) -> Checkpoint:
    """Every process looks at all headers, hashes its share of the files, and then reads its rows."""
    step, wholes, *plain = world.agree(lambda: store.open_checkpoint(folder, None, world.rank, world.size))

    def read() -> dict[str, dict[str, Tensor]]:
        return {
            group: {name: _read(name, whole, held, world) for name, whole in named.items()}
            for group, named in wholes.items()
        }

    return Checkpoint(folder, step, world.agree(read), *plain)


def _own(tensors: Mapping[str, Tensor], world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that this process writes, and their places in the whole ones."""
    held, places = dict[str, Tensor](), dict[str, Any]()
    for name, tensor in tensors.items():
        first = _rows(name, tensor, world)[0] if isinstance(tensor, DTensor) else 0
        if isinstance(tensor, DTensor) or world.first:
            held[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            offsets = [first] + [0] * (tensor.ndim - 1) if tensor.ndim else []
            places[name] = {"saved_offsets": offsets, "shape": list(tensor.shape)}
    return held, places


def _rows(name: str, tensor: DTensor, world: World) -> tuple[int, int]:
    """The first row and the number of rows that this process holds."""
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    if tuple(tensor.placements) != (Shard(0),) or mesh.size() != world.size:
        what = "is not split by its first dimension among all processes"
        raise DepthgateError(f"tensor {name!r} {what}: it cannot be saved or loaded")
    each = -(-rows // world.size)  # as torch.chunk divides
    first = min(mesh.get_local_rank() * each, rows)
    return first, min(each, rows - first)


def _read(name: str, whole: Whole, held: Mapping[str, Tensor], world: World) -> Tensor:
    """A tensor, or this process's rows of one that is split as `held` has it."""
    like = held.get(name, held.get(name.rpartition(":")[0]))
    if not isinstance(like, DTensor) or list(like.shape) != whole.shape:
        return tensor_files.read(whole)
    local = tensor_files.read(whole, *_rows(name, like, world)).to(like.device)
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
