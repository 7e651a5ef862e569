"""FSDP2 and DDP on two gloo processes equal one: losses, gradients, and a step in which no token enters a block."""

from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.conftest import close
from tests.distributed.spawn import spawn
from tests.zoo import D, build, gradients, loss

NAMES = ["mod predictor", "mixture of depths", "moe tokens", "moe experts", "soft moe", "staged mode"]


def _batch():
    return torch.randn(4, 12, D, generator=torch.Generator().manual_seed(3))


def _means(name: str, plans):
    """Plans whose losses are means over the batch, so that the mean over ranks is the mean over all. Load balance is
    no such mean."""
    return () if name in ("moe tokens", "staged mode") else plans


def _equal(world):
    mesh, rank = init_device_mesh("cpu", (2,)), world.rank
    for name, recompute in product(NAMES, (False, True)):
        single, sharded = build(name), build(name)
        for layer in getattr(sharded, "layers", ()):
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        x = _batch()
        mine = x[2 * rank : 2 * rank + 2]
        y, plans = checkpoint(sharded, mine, use_reentrant=False) if recompute else sharded(mine)
        total = loss(y, _means(name, plans))
        total.backward()
        mean = total.detach().clone()
        dist.all_reduce(mean)
        y, plans = single(x)
        expected = loss(y, _means(name, plans))
        expected.backward()
        close(mean / 2, expected.detach())
        grads = {n: g.full_tensor() for n, g in gradients(sharded).items() if g is not None}
        for n, g in gradients(single).items():
            if g is not None:
                close(grads[n], g)
    _step_without_a_token(rank, mesh)
    _masks_that_differ(rank, mesh)
    _ddp(rank)


def _step_without_a_token(rank: int, mesh) -> None:
    """On rank 1 no token passes the threshold; both ranks still meet in every collective."""
    sharded = build("mod threshold")
    for layer in sharded.layers:
        layer.router.rule.average.fill_(1e6 if rank == 1 else -1e6)
        layer.router.rule.weight.fill_(1.0)
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    y, plans = sharded(_batch()[2 * rank : 2 * rank + 2], causal=True)
    assert plans[0].chosen.any() == (rank == 0)
    y.sum().backward()
    assert all(g is not None for g in gradients(sharded).values())


def _masks_that_differ(rank: int, mesh) -> None:
    """The drop-in layer on ranks with other masks: equal to one process, also with the block sharded by itself."""
    x = _batch()
    mask = torch.arange(12) < torch.tensor([[12], [12], [7], [3]])
    mine = slice(2 * rank, 2 * rank + 2)
    single, sharded = build("mixture of depths"), build("mixture of depths")
    fully_shard(sharded.block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded(x[mine], mask=mask[mine])[0].pow(2).mean().backward()
    single(x, mask=mask)[0].pow(2).mean().backward()
    for n, g in gradients(single).items():
        close(gradients(sharded)[n].full_tensor(), g)


def _ddp(rank: int) -> None:
    """DistributedDataParallel waits for every parameter's gradient, and averages them: equal to one process."""
    x = _batch()
    for name in NAMES:
        single, wrapped = build(name), DistributedDataParallel(build(name))
        for module, rows in ((single, x), (wrapped, x[2 * rank : 2 * rank + 2])):
            for _ in range(2):
                module.zero_grad()
                y, plans = module(rows)
                loss(y, _means(name, plans)).backward()
        for n, g in gradients(single).items():
            close(gradients(wrapped.module)[n], g)


def test_two_processes_equal_one():
    """With activations kept, and computed again on the way back."""
    spawn(2, _equal)
