"""Checkpoints of several processes: each writes and reads its own rows, and none gathers what the others hold.

torch.distributed.checkpoint plans who writes which rows, and who needs which; the folder, the files and the decision
whether a checkpoint is whole are ours (docs/decisions/005-sharded-checkpoints.md). What goes wrong in one process is
raised in all. Nothing is raised while DCP is at work: there, errors travel as pickled tracebacks, which torch 2.11
cannot make on Python 3.13, and the other processes would wait.
"""

import math
import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from depthgate.checkpoint import files, manifest
from depthgate.checkpoint import rows as pieces
from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint.files import Record, opened
from depthgate.checkpoint.rows import Whole
from depthgate.checkpoint.store import Checkpoint, Groups, Plain
from depthgate.device import World
from depthgate.errors import DepthgateError, DepthgateWarning

T = TypeVar("T")


def save(run: Path, step: int, tensors: Groups, state: Plain, config: Plain, keep: int, world: World) -> Path:
    """Like `checkpoint.save`, by all processes together: the rows of split tensors that each holds, and the first
    process's copy of all others, its state and its configuration."""
    pieces.check_groups(tensors)
    with ExitStack() as stack:
        writer = _Writer(stack, Path(run), step, list(tensors), state, config, keep)
        planner = dcp.DefaultSavePlanner(False, False, dedup_save_to_lowest_rank=True)
        try:
            dcp.save(_flat(tensors), storage_writer=writer, planner=planner)
        except dcp.CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
        world.agree(writer.outcome)
    return Path(run) / f"step-{step}"


def load(run: Path, world: World, held: Mapping[str, Tensor]) -> Checkpoint:
    """Like `checkpoint.load`, by all processes together, with the same result in all. A tensor that has the name of one
    in `held` (or that name, a colon and more) and its shape is split as it is; all others are whole, on the CPU."""

    def listed(run: Path) -> list[Path]:
        return world.told(world.agree(lambda: checkpoint.candidates(run)))

    with warnings.catch_warnings():
        if not world.first:
            warnings.simplefilter("ignore", DepthgateWarning)  # once is enough
        return checkpoint.newest(run, lambda path: _read_folder(path, world, held), listed)


def _read_folder(folder: Path, world: World, held: Mapping[str, Tensor]) -> Checkpoint:
    with ExitStack() as stack:

        def checked() -> tuple[Checkpoint, _Reader]:
            """Every process looks at all headers, and reads its share of the files."""
            fd = stack.enter_context(manifest.open_folder(folder))
            step, records = manifest.read(fd, folder)
            by_size = sorted(records.items(), key=lambda item: (item[1].size, item[0]))
            checkpoint.verify_files(fd, folder, dict(by_size[world.rank :: world.size]))
            groups = pieces.by_group(records, folder)
            wholes = {group: pieces.index(fd, folder, names, records) for group, names in groups.items()}
            found = {
                g: {name: _room(name, whole, held) for name, whole in named.items()} for g, named in wholes.items()
            }
            plain = checkpoint.read_plain(fd, folder, records)
            return Checkpoint(folder, step, found, *plain), _Reader(fd, folder, records, _flat(wholes), _flat(found))

        found, reader = world.agree(checked)
        try:
            dcp.load(_flat(found.tensors), storage_reader=reader, planner=dcp.DefaultLoadPlanner(False, False))
        except dcp.CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
        world.agree(reader.outcome)
    return found


def _flat(groups: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    return {f"{group}/{name}": value for group, named in groups.items() for name, value in named.items()}


def _room(name: str, whole: Whole, held: Mapping[str, Tensor]) -> Tensor:
    """Memory for this process's part of a tensor."""
    model = held.get(name, held.get(name.rpartition(":")[0]))
    if isinstance(model, DTensor) and list(model.shape) == whole.shape:
        return torch.empty_like(model, dtype=whole.dtype)
    return torch.empty(whole.shape, dtype=whole.dtype, device="cpu")


class _Writer(dcp.StorageWriter):
    """What `dcp.save` calls, in this order. The first process is the coordinator."""

    def __init__(
        self, stack: ExitStack, run: Path, step: int, groups: list[str], state: Plain, config: Plain, keep: int
    ) -> None:
        self.stack, self.run, self.step, self.groups, self.keep = stack, run, step, groups, keep
        self.state, self.config = state, config
        self.error: Exception | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """The first process makes the folder; without it the others write nothing."""
        temp = None
        try:
            self.plain = checkpoint.plain_files(self.state, self.config)
            size = sum(content.size for content in self.plain.values())
            size += sum(_bytes(item) for plan in plans for item in plan.items)
            temp = self.stack.enter_context(checkpoint.begun(self.run, self.step, size, self.keep))
        except Exception as error:
            self.error = error
        return [replace(plan, storage_data=(temp, i, len(plans))) for i, plan in enumerate(plans)]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """This process's files. The result holds what the manifest will say of them."""
        self.temp, part, self.parts = plan.storage_data
        done: list[WriteResult] = []
        try:
            for group, content in self._contents(plan, planner).items() if self.temp else ():
                name = pieces.file_name(group, part, self.parts)
                record = files.write(self.temp / name, content)
                done.append(WriteResult(MetadataIndex(name), record.size, record))
        except Exception as error:
            self.error = error
        future: Future[list[WriteResult]] = Future()
        future.set_result(done)
        return future

    def _contents(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> dict[str, files.Packed]:
        tensors: dict[str, dict[str, Tensor]] = {group: {} for group in self.groups}
        places: dict[str, dict[str, Any]] = {group: {} for group in self.groups}
        for item in plan.items:
            group, _, name = item.index.fqn.partition("/")
            data = item.tensor_data
            if data is None:
                raise DepthgateError(f"{group}[{name!r}] is not a tensor: put it into state")
            if data.chunk.sizes[1:] != data.size[1:] or name in tensors[group]:
                raise DepthgateError(f"{group}[{name!r}] is not split by its first dimension: it cannot be saved")
            tensors[group][name] = planner.resolve_data(item)  # type: ignore[assignment]
            places[group][name] = {pieces.OFFSETS: list(data.chunk.offsets), "shape": list(data.size)}
        return {group: pieces.pack(tensors[group], places[group], group) for group in self.groups}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        """In the first process, after all have written. One that failed is short of files, and says why afterwards."""
        records = {result.index.fqn: result.storage_data for part in results for result in part}
        if len(records) < len(self.groups) * self.parts or self.error:
            return
        try:
            records |= {name: files.write(self.temp / name, content) for name, content in self.plain.items()}
            checkpoint.publish(self.temp, self.step, records, self.keep)
        except Exception as error:
            self.error = error

    def outcome(self) -> None:
        """Raise what went wrong in this process."""
        if isinstance(self.error, OSError):
            raise checkpoint.cannot_save(self.run, self.step, self.error) from self.error
        if self.error:
            raise self.error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return True


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data else 0


class _Reader(dcp.StorageReader):
    """What `dcp.load` calls, in this order."""

    def __init__(
        self,
        fd: int,
        folder: Path,
        records: Mapping[str, Record],
        wholes: Mapping[str, Whole],
        rooms: Mapping[str, Tensor],
    ) -> None:
        self.fd, self.folder, self.records, self.wholes, self.rooms = fd, folder, records, wholes, rooms
        self.error: Exception | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        return Metadata({name: _described(whole) for name, whole in self.wholes.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return plans

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Fill this process's part of every tensor."""
        try:
            starts = {(name, p.first): p for name, whole in self.wholes.items() for p in whole.pieces}
            left = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in self.rooms.values())
            wanted: dict[str, list[tuple[int, Tensor]]] = {}
            for item in plan.items:
                name, place = item.storage_index.fqn, item.storage_index.offset
                target = planner.resolve_tensor(item).detach()
                piece = starts[name, place[0] if place else 0]
                if list(target.shape[1:]) != piece.shape[1:]:
                    raise DepthgateError(f"{name!r} is not split by its first dimension: it cannot be loaded")
                skipped = item.storage_offsets[0] * math.prod(piece.shape[1:]) * target.dtype.itemsize if place else 0
                wanted.setdefault(piece.file, []).append((piece.begin + skipped, target))
                left -= target.numel()
            if left:  # the pieces do not overlap, so what is planned is all exactly if the numbers agree
                raise DepthgateError(f"{self.folder}: torch planned to read {left} numbers too few or too many")
            for file, targets in wanted.items():
                with opened(self.fd, self.folder / file, self.records[file].size) as source:
                    for begin, target in targets:
                        pieces.read_rows(source, begin, target)
        except Exception as error:
            self.error = error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def outcome(self) -> None:
        """Raise what went wrong in this process."""
        if self.error:
            raise self.error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return True


def _described(whole: Whole) -> TensorStorageMetadata:
    chunks = []
    for piece in whole.pieces:
        offsets = [piece.first] + [0] * (len(piece.shape) - 1) if piece.shape else []
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(piece.shape)))
    return TensorStorageMetadata(TensorProperties(whole.dtype), torch.Size(whole.shape), chunks)
