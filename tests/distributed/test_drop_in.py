"""A model of plain torch with drop-in layers, on two processes with DDP and FSDP2: the gradients of one process with
the routers' losses added by hand."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import depthgate as dg
from depthgate.routing import causal_bce, load_balance, z_loss
from tests.conftest import close
from tests.distributed.spawn import spawn

D = 16


class Model(nn.Module):
    """Each drop-in layer once, in a stack that knows nothing of plans."""

    def __init__(self, losses: str | None = "backward"):
        super().__init__()
        encoder = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, dropout=0.0)
        self.layers = nn.ModuleList(
            [
                nn.Linear(D, D),
                dg.MixtureOfDepths(encoder, D, 0.5, losses=losses),
                dg.MixtureOfExperts(D, 4, hidden=8, losses=losses),
                dg.MixtureOfDepths(nn.Linear(D, D), D, 0.5, rule="predictor", losses=losses),
                dg.SoftMoE(D, 3),
                dg.MixtureOfExperts(D, 4, choice="experts", hidden=8, losses=losses),
                nn.Linear(D, 1),
            ]
        )

    def forward(self, x, recompute=False):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return x


def _build(losses="backward"):
    torch.manual_seed(0)
    return Model(losses).double()


def _batch():
    return torch.randn(4, 12, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _by_hand(parts):
    """Gradients of two processes with a part of the batch each, or with one between them."""
    model = _build(losses=None)
    for half in parts:
        with dg.record(model) as plans:
            y = model(half)
        first, tokens, predictor, _, experts = plans
        losses = [0.01 * causal_bce(first), 0.01 * load_balance(tokens), 0.01 * causal_bce(predictor)]
        losses += [0.001 * z_loss(plan) for plan in (first, tokens, predictor, experts)]
        ((y.square().mean() + sum(losses)) / 2).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _equal(world):
    mesh = init_device_mesh("cpu", (2,))
    sharded = _build()
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    wrapped = DistributedDataParallel(_build())
    mine, expected = _batch().chunk(2)[world.rank], _by_hand(_batch().chunk(2))
    for model, names in ((sharded, sharded.named_parameters), (wrapped, wrapped.module.named_parameters)):
        for recompute in (False, True):
            model.zero_grad()
            model(mine, recompute).square().mean().backward()
            grads = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in names()}
            for name, grad in expected.items():
                close(grads[name], grad)


def test_two_processes_equal_one_with_losses_added_by_hand():
    """With activations kept, and computed again on the way back."""
    spawn(2, _equal)


def _empty(world):
    mine = _batch()[: 0 if world.rank else 4]
    mesh = init_device_mesh("cpu", (2,))
    sharded = _build()
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh)
    wrapped = DistributedDataParallel(_build())
    expected = _by_hand([_batch()])
    for model, names in ((sharded, sharded.named_parameters), (wrapped, wrapped.module.named_parameters)):
        y = model(mine)
        (y.square().mean() if len(y) else y.sum()).backward()
        for name, p in names():
            close(getattr(p.grad, "full_tensor", lambda p=p: p.grad)(), expected[name])


def test_a_process_without_rows_does_not_hold_up_the_other():
    spawn(2, _empty)
