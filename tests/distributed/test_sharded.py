"""Checkpoints of several processes: written and read in pieces, by any number of them, whatever goes wrong in one."""

import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import depthgate as dg
from depthgate.checkpoint import store as checkpoint
from depthgate.cli import main
from depthgate.errors import DepthgateError, DepthgateWarning
from tests.checkpoint.samples import flip, same
from tests.distributed.spawn import spawn, start
from tests.train.tiny import TINY

CONFIG = {"dim": 3}
# Rows that no number of processes divides, fewer rows than processes, none at all, and a number.
SHAPES = {"long": (7, 3), "even": (8,), "one": (1, 2), "none": (0, 3), "wide": (2, 0), "deep": (5, 2, 2)}


def content(value: int) -> dict:
    """What a checkpoint holds, as whole tensors."""
    model = {
        name: torch.arange(torch.Size(shape).numel()).reshape(shape) * 0.5 + value for name, shape in SHAPES.items()
    }
    model["tied"] = model["long"]
    optimizer = {f"{name}:mean": -tensor.bfloat16() for name, tensor in model.items()}
    optimizer |= {f"{name}:step": torch.tensor(float(value)) for name in model}
    plain = {"flags": torch.tensor([True, False, True]), "count": torch.tensor(value)}
    return {"model": model | plain, "optimizer": optimizer, "rng": {"cpu": torch.arange(5, dtype=torch.uint8)}}


def split(groups: dict, mesh) -> dict:
    """The same with every tensor split that a checkpoint splits: those named in SHAPES, and what belongs to them."""
    done: dict[int, DTensor] = {}

    def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.partition(":")[0] not in {*SHAPES, "tied"} or not tensor.ndim:
            return tensor
        return done.setdefault(id(tensor), distribute_tensor(tensor, mesh, [Shard(0)]))

    return {group: {name: one(name, tensor) for name, tensor in named.items()} for group, named in groups.items()}


def put(run: Path, value: int, world, step: int | None = None) -> Path:
    tensors = split(content(value), init_device_mesh("cpu", (world.size,)))
    state = {"value": value, "seen_by": world.rank}
    return checkpoint.save(run, value if step is None else step, tensors, state, CONFIG, 2, world)


def got(run: Path, world) -> int:
    """Load in all processes; every part comes from one save, and is split as the model is. Returns which save."""
    held = split(content(0), init_device_mesh("cpu", (world.size,)))["model"]
    found = checkpoint.load(run, world=world, held=held)
    value = found.state["value"]
    assert (found.config, found.state["seen_by"]) == (CONFIG, 0)
    for name in held:
        assert isinstance(found.tensors["model"][name], DTensor) == isinstance(held[name], DTensor)
    assert isinstance(found.tensors["optimizer"]["long:mean"], DTensor)
    full = {
        group: {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in named.items()}
        for group, named in found.tensors.items()
    }
    assert same(full, content(value))
    return value


def got_alone(run: Path) -> int:
    found = checkpoint.load(run)
    assert same(found.tensors, content(found.state["value"]))
    return found.state["value"]


@contextmanager
def fails(world, *words: str):
    """The same error in every process, naming what happened in one of them; at once, and nothing is left behind."""
    with pytest.raises(DepthgateError) as caught:
        yield
    texts = [None] * world.size
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    for word in words:
        assert word in texts[0]


def _two(world, run: Path) -> None:
    run = run / "run"
    for step in (1, 2, 3):
        assert put(run, step, world) == run / f"step-{step}"
    assert checkpoint.steps(run) == [2, 3]
    assert got(run, world) == 3
    put(run, 33, world, step=3)  # replaces
    assert got(run, world) == 33
    names = {path.name for path in (run / "step-3").iterdir()}
    parts = {f"{group}-0000{i}-of-00002.safetensors" for group in ("model", "optimizer", "rng") for i in (1, 2)}
    assert names == parts | {"state.json", "config.json", "manifest.json"}
    _failures(world, run)
    _damage(world, run)
    if world.first:
        checkpoint.save(run.parent / "alone", 5, content(5), {"value": 5, "seen_by": 0}, CONFIG)
    dist.barrier()
    assert got(run.parent / "alone", world) == 5  # what one process saved


def _failures(world, run: Path) -> None:
    """One process cannot write: all say so, and the checkpoints that were there still are."""
    for broken in (0, 1):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.rank == broken:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, limit[1]))  # Python ignores SIGXFSZ: a write fails
        with fails(world, "File too large", "cannot save step 4", "earlier checkpoints are intact"):
            put(run, 4, world)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with pytest.MonkeyPatch.context() as patch, fails(world, "Input/output error", "cannot save step 4"):
        if world.first:  # all is written, and the last act fails

            def rename(*paths):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(os, "rename", rename)
        put(run, 4, world)
    if world.first:
        with checkpoint.lock(run / ".lock"), fails(world, ".lock is held"):
            put(run, 4, world)
    else:
        with fails(world, ".lock is held"):
            put(run, 4, world)
    with fails(world, "complex128"):
        checkpoint.save(run, 4, {"m": {"a": torch.ones(1, dtype=torch.complex128)}}, {}, {}, 2, world)
    with fails(world, "state is not plain data"):
        checkpoint.save(run, 4, {"m": {"a": torch.ones(1)}}, {"a": {1}}, {}, 2, world)
    mesh = init_device_mesh("cpu", (world.size,))
    with fails(world, "not split by its first dimension"):
        across = distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)])
        checkpoint.save(run, 4, {"m": {"a": across}}, {}, {}, 2, world)
    assert {path.name for path in run.iterdir()} == {".lock", "step-2", "step-3"}
    assert got(run, world) == 33


def _damage(world, run: Path) -> None:
    """Damage that one process finds sends all of them to the checkpoint before; the first one says so."""
    for name in ("model-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors", "state.json"):
        if world.first:
            flip(run / "step-3" / name, -3)
        dist.barrier()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert got(run, world) == 2
        ours = [str(w.message) for w in warned if w.category is DepthgateWarning]
        assert len(ours) == (1 if world.first else 0)
        assert all(name in text and "step 2 is loaded instead" in text for text in ours)
        dist.barrier()
        if world.first:
            flip(run / "step-3" / name, -3)
        dist.barrier()
    if world.first:
        (run / "step-3" / "rng-00002-of-00002.safetensors").unlink()
        (run / "step-2" / "manifest.json").unlink()
    dist.barrier()
    with fails(world, "no complete checkpoint", "rng-00002-of-00002.safetensors", "step-2/manifest.json"):
        got(run, world)
    put(run, 6, world)
    assert got(run, world) == 6


def _four(world, run: Path) -> None:
    assert got(run / "run", world) == 6
    put(run / "run", 7, world)
    assert got(run / "run", world) == 7


def test_two_processes_save_load_fail_and_meet_damage_and_four_go_on(tmp_path):
    spawn(2, _two, tmp_path)
    assert got_alone(tmp_path / "run") == 6  # two to one
    spawn(4, _four, tmp_path)  # two to four
    assert got_alone(tmp_path / "run") == 7
    assert len(list((tmp_path / "run" / "step-7").glob("model-*-of-00004.safetensors"))) == 4


# Training
KINDS = {"mod": [], "mode": ["--model.pattern=mod,mode", "--model.experts=4", "--model.shared_experts=1"]}
RUNS = [("mod", "straight"), ("mod", "pieces"), ("mod", "wholes"), ("mode", "straight"), ("mode", "pieces")]


def _train(rank: int, ports: list[int], tmp: Path, data: str) -> None:
    """Ten steps at a stretch; then five of them again, from pieces and from whole tensors."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["HOME"] = str(tmp / "home")
    for (kind, out), port in zip(RUNS, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        if rank == 0 and out != "straight":
            back_to_five(tmp / kind / "straight", tmp / kind / out, whole=out == "wholes")
        resume = ["--resume"] if out != "straight" else []  # rank 1 waits for rank 0 at the start of main
        assert main([*command(tmp / kind / out, data), *resume]) == 0


def command(out: Path, data: str) -> list[str]:
    options = ["--checkpoint_every=5", "--model.tied=true", "--model.rule=threshold", *KINDS[out.parent.name]]
    return ["train", "--out", str(out), "--data", data, "--steps=10", *TINY, *options]


def back_to_five(run: Path, copy: Path, whole: bool = False) -> None:
    """A copy of the run as it was after five steps; its checkpoint may be that of one process."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("step-10", "step-5" if whole else ""))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"out": str(copy)}))
    if whole:
        found = checkpoint.read_folder(run / "step-5")
        checkpoint.save(copy, 5, found.tensors, found.state, found.config)


def bits(run: Path) -> dict:
    found = checkpoint.load(run)
    assert found.step == 10
    return found.tensors


def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, monkeypatch):
    data = tmp_path / "text.txt"
    data.write_text("\n\n\n".join(f"document {i}: " + "abc defg hij " * (3 + i % 7) for i in range(40)))
    sockets = [socket.socket() for _ in RUNS]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    start(2, _train, ports, tmp_path, str(data))
    for kind, out in RUNS:
        assert same(bits(tmp_path / kind / out), bits(tmp_path / kind / "straight"))
    mod = tmp_path / "mod"
    straight = bits(mod / "straight")
    assert list((mod / "wholes" / "step-5").glob("model.safetensors"))
    # One process goes on from either kind with the same result, which is that of two but for the order of sums.
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    back_to_five(mod / "straight", mod / "one")
    back_to_five(mod / "straight", mod / "one whole", whole=True)
    for out in ("one", "one whole"):
        assert main([*command(mod / out, str(data)), "--resume"]) == 0
    one = bits(mod / "one")
    assert same(one, bits(mod / "one whole"))
    for name, tensor in one["model"].items():
        torch.testing.assert_close(tensor, straight["model"][name], rtol=2e-3, atol=2e-5)
    for model in (dg.load(mod / "straight"), dg.load(mod / "straight" / "step-10")):
        assert same({"model": dict(model.state_dict())}, {"model": straight["model"]})


def test_real_kills():
    soak = Path(__file__).with_name("kill_sharded.py")
    done = subprocess.run([sys.executable, soak, "--rounds", "4"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "4 kills" in done.stdout
