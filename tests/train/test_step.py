"""One optimizer step against the same written out, and steps that must change nothing."""

from functools import partial

import pytest
import torch

import depthgate as dg
from depthgate.config import ModelConfig, TrainConfig
from depthgate.data.batches import Rows
from depthgate.routing import causal_bce
from depthgate.train import optim
from depthgate.train.loop import Pretraining
from depthgate.train.step import Step
from tests.conftest import close

MODEL = ModelConfig(vocab=50, dim=16, layers=2, heads=2, context=8, pattern="dense,mod")


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads that wait for each other take longer than so little work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows(seed=0, batch=4):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (batch, 8), generator=draw)
    targets = torch.where(torch.rand(batch, 8, generator=draw) < 0.2, -1, ids.roll(-1, 1))
    pos = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]).repeat(batch, 1)
    doc = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]]).repeat(batch, 1)
    return Rows(ids, targets, pos, doc)


def built(**options):
    config = TrainConfig(model=options.pop("model", MODEL), batch=4, **options)
    task = Pretraining(config)
    return Step(task, optim.build(task.model, config), config)


def everything(step):
    """Every number a step may change."""
    kept = optim.state_tensors(step.task.model, step.optimizers)
    return {n: t.detach().clone() for n, t in {**step.task.model.state_dict(), **kept}.items()}


@pytest.mark.parametrize("rule", ["scores", "predictor"])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_equals_the_step_written_out(accumulate, rule):
    """Gradients that reach the router through gates alone are all there are, unless scores are the rule."""
    shape = ModelConfig(**{**MODEL.__dict__, "rule": rule})
    step = built(model=shape, accumulate=accumulate, clip=0.1, lr=0.01)
    step.task.model.double()  # AdamW makes whole steps of what rounding leaves of a small gradient
    torch.manual_seed(0)
    model = dg.Decoder(shape).double()
    plain = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if p.ndim >= 2 and n.startswith("layers.")]},
            {
                "params": [p for n, p in model.named_parameters() if p.ndim < 2 or not n.startswith("layers.")],
                "weight_decay": 0.0,
            },
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    for seed in range(3):
        batch = rows(seed)
        losses, plan_losses = 0.0, 0.0
        for part in zip(*(t.chunk(accumulate) for t in batch), strict=True):
            logits, plans = model(part[0], part[2], part[3])
            kept = part[1] >= 0
            losses = losses + torch.nn.functional.cross_entropy(logits[kept], part[1][kept], reduction="sum")
            plan_losses = plan_losses + 0.01 * causal_bce(plans[0])
        loss = losses / (batch.targets >= 0).sum()
        (loss + plan_losses / accumulate).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
        got_loss, got_norm, shares = step(batch).read()
        close(torch.tensor(got_loss), loss)
        close(torch.tensor(got_norm), norm)
        assert norm > 0.1  # so that clipping was tested
        assert shares == pytest.approx([2 / 8])  # of each document of 5 and 3 tokens, one
    for weight, wanted in zip(step.task.model.parameters(), model.parameters(), strict=True):
        close(weight, wanted, torch.float32)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("rule", ["scores", "predictor", "threshold"])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_is_not_finite_changes_nothing(optimizer, rule, first):
    """No weight, moment, step count or threshold moves, on the very first step either; the next one does (row 17 of
    docs/reliability.md)."""
    model = ModelConfig(**{**MODEL.__dict__, "rule": rule})
    step = built(model=model, optimizer=optimizer)
    if not first:
        step(rows())
    before = everything(step)
    hook = step.task.model.layers[0].ffn.down.weight.register_hook(lambda grad: grad * torch.nan)
    _, norm, _ = step(rows()).read()
    hook.remove()
    assert norm != norm
    after = everything(step)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    for name in after.keys() - before.keys():  # moments that the first step made
        assert not after[name].any(), name
    step(rows())
    moved = everything(step)
    assert all(t.isfinite().all() for t in moved.values())
    assert not torch.equal(moved["embed.weight"], before["embed.weight"])


@pytest.mark.parametrize("where", ["loss", "router weight", "unrouted token", "infinite gradient"])
def test_whatever_is_not_finite_stays_out_of_the_weights(where):
    step = built()
    step(rows())
    held = step.task.model.state_dict()
    if where == "router weight":
        held["layers.1.router.proj.weight"].fill_(torch.nan)
    elif where == "loss":
        held["norm.weight"].fill_(torch.inf)
    elif where == "unrouted token":
        held["embed.weight"][7].fill_(torch.nan)
    else:
        step.task.model.layers[0].ffn.down.weight.register_hook(lambda grad: grad.fill_(3e38))
    before = everything(step)
    step(rows())
    for name, tensor in everything(step).items():
        assert torch.equal(tensor.nan_to_num(-1.0, -2.0), before[name].nan_to_num(-1.0, -2.0)), name


def test_one_spike_is_one_skip():
    """A spike that is not finite is skipped once, and what follows is what it would have been without it (row 18 of
    docs/reliability.md)."""
    spiked, smooth = built(), built()
    for seed in range(4):
        if seed == 2:
            hook = spiked.task.model.layers[0].ffn.down.weight.register_hook(lambda grad: grad * torch.inf)
            spiked(rows(9))
            hook.remove()
        spiked(rows(seed))
        smooth(rows(seed))
    for name, tensor in everything(smooth).items():
        assert torch.equal(everything(spiked)[name], tensor), name


def test_capacity_changes_how_many_are_routed():
    step = built()
    step.set_capacity(1.0)
    assert step(rows()).read()[2] == [1.0]
    step.set_capacity(0.5)
    assert step(rows()).read()[2] == pytest.approx([3 / 8])  # 2 of 5 and 1 of 3


def test_bf16_stays_near_fp32():
    losses = []
    for dtype in ("float32", "bfloat16"):
        step = built(dtype=dtype)
        losses.append(torch.tensor([step(rows(seed)).read()[0] for seed in range(3)]))
        assert all(p.dtype == torch.float32 for p in step.task.model.parameters())
    close(losses[1], losses[0], torch.bfloat16)


def test_compiled_equals_eager(monkeypatch):
    """Traced as for any backend; tests/gpu runs the code made for CUDA, tests/test_compile.py that for a CPU."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    eager, compiled = built(), built(compile=True)
    for seed in range(2):
        one, two = eager(rows(seed)).read(), compiled(rows(seed)).read()
        close(torch.tensor(one[:2]), torch.tensor(two[:2]))
        assert one[2] == two[2]
