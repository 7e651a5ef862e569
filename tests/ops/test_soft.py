"""Soft MoE's products: golden values worked by hand in float64, and equality with their twins."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from depthgate.layers import SoftMoE, soft_moe
from depthgate.ops import reference, soft
from depthgate.routing import SoftSlots, routers
from tests.conftest import close

F64 = torch.float64


def test_router_dispatch_and_combine_by_hand():
    """Two tokens of lengths 5 and 2, two slots along the axes, scale ln 4: cosines (0.6, 0.8) and (0, 1)."""
    router = SoftSlots(2, 2).double()
    with torch.no_grad():
        router.phi.copy_(torch.tensor([[7.0, 0.0], [0.0, 0.5]]))
        router.scale.fill_(math.log(4))
    x = torch.tensor([[[3.0, 4.0], [0.0, 2.0]]], dtype=F64)
    plan = router(x)
    a, b, c, d = 4**0.6, 4**0.8, 1.0, 4.0  # exponentials of the logits: rows are tokens, columns slots
    close(plan.scores[0, :, :, 0].exp(), torch.tensor([[a, b], [c, d]], dtype=F64))
    close(plan.into[0, :, :, 0], torch.tensor([[a / (a + c), b / (b + d)], [c / (a + c), d / (b + d)]], dtype=F64))
    close(plan.back[0, :, :, 0], torch.tensor([[a / (a + b), b / (a + b)], [c / (c + d), d / (c + d)]], dtype=F64))
    slots = plan.dispatch(x)
    close(slots[0, 0, 0], torch.tensor([3 * a / (a + c), (4 * a + 2 * c) / (a + c)], dtype=F64))
    rows = torch.tensor([[[[10.0, 0.0]], [[0.0, 1.0]]]], dtype=F64)
    close(plan.combine(rows)[0, 1], torch.tensor([2.0, 0.8], dtype=F64))  # 10 / 5, 4 / 5


def operands(dtype=F64):
    torch.manual_seed(1)
    x, slots = (
        torch.randn(2, 5, 4, dtype=dtype),
        3 * torch.nn.functional.normalize(torch.randn(4, 6, dtype=dtype), dim=0),
    )
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, 3:] = False
    return x.requires_grad_(), slots.requires_grad_(), torch.tensor([3.0], dtype=dtype), valid


@pytest.mark.parametrize("padded", [False, True])
def test_exponentials_and_means_equal_their_twins(padded):
    x, slots, bound, valid = operands()
    valid = valid if padded else None
    found, wanted = [], []
    for module, into in ((soft, found), (reference, wanted)):
        weights = module.soft_exponentials(x, slots, bound, valid)
        rows = module.weighted_means(weights.mT, x).tanh()
        out = module.weighted_means(weights, rows)
        into.extend([weights, out, *torch.autograd.grad((out**2).sum(), (x, slots))])
    for mine, twin in zip(found, wanted, strict=True):
        close(mine, twin)
    for check in (gradcheck, gradgradcheck):
        assert check(lambda x, s: soft.soft_exponentials(x, s, bound, valid), (x, slots))
        assert check(soft.weighted_means, (found[0].detach()[:, :3].requires_grad_(), torch.randn(2, 6, 3, dtype=F64)))


def test_a_token_of_zeros_and_a_row_of_padding_alone_have_finite_gradients():
    x, slots, bound, valid = operands()
    x = torch.where(torch.arange(5)[:, None] == 0, 0.0, x.detach()).requires_grad_()
    weights = soft.soft_exponentials(x, slots, bound, valid & torch.tensor([[True], [False]]))
    out = soft.weighted_means(weights.mT, x)
    assert (out[1] == 0).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (x, slots)))
    layer, x = SoftMoE(8, 3), torch.randn(2, 5, 8, requires_grad=True)
    update, _ = layer(x, mask=valid)
    update.sum().backward()  # of padding, too
    assert all(weight.grad.isfinite().all() for weight in (x, *layer.parameters()))
    assert (x.grad[1, 3:] == 0).all()


def test_one_exponential_serves_the_largest_scale():
    """Weights that differ by e^80 are still those of two softmaxes; larger scales count as 40."""
    router = SoftSlots(8, 3, 2)
    x = torch.randn(2, 7, 8)
    with torch.no_grad():
        router.scale.fill_(1000.0)
    logits = 40 * torch.nn.functional.normalize(x, dim=-1) @ torch.nn.functional.normalize(router.phi, dim=0)
    plan = router(x)
    close(plan.into.flatten(2), logits.softmax(1))
    close(plan.back.flatten(2), logits.softmax(2))


def test_a_scale_beyond_the_largest_has_the_gradient_of_the_largest():
    """It would else stay there for good: one that starts at 40 is beyond it after a step."""
    x, grads = torch.randn(2, 7, 8, dtype=F64), []
    layer = SoftMoE(8, 3, 2, scale=40.0).double()
    for scale in (40.0, 40.5, 1000.0):
        torch.nn.init.constant_(layer.router.scale, scale)
        grads.append(torch.autograd.grad(layer(x)[0].square().sum(), layer.router.scale)[0])
    assert grads[0] != 0
    close(grads[1], grads[0])
    close(grads[2], grads[0])


def test_products_in_bfloat16_are_near_those_in_float32():
    layer = SoftMoE(32, 4, 2, scale=8.0)
    x = torch.randn(2, 9, 32)
    exact = layer(x)[0]
    close(layer.bfloat16()(x.bfloat16())[0], exact, torch.bfloat16)


def test_the_backward_pass_keeps_one_matrix_of_tokens_and_slots():
    """Neither matrix of probabilities: the exponentials alone, however often they are read."""
    layer, x = SoftMoE(8, 5, 3), torch.randn(2, 7, 8, requires_grad=True)
    kept = {}

    def keep(tensor):
        if tensor.numel() == 2 * 7 * 15:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)[0].sum().backward()
    assert len(kept) == 1


class Written(TorchDispatchMode):
    """Operations that write as many values as tokens have, and in which dtype."""

    def __init__(self, values):
        super().__init__()
        self.values, self.seen = values, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        views = any(each.alias_info for each in operation._schema.returns) or "view" in str(operation)
        if isinstance(result, torch.Tensor) and result.numel() == self.values and not views:
            self.seen.append((operation.overloadpacket.__name__, result.dtype))
        return result


@pytest.mark.parametrize("cast", [False, True])
def test_tokens_are_read_and_written_no_more_than_they_must(cast, monkeypatch):
    """As on CUDA, in bfloat16 and under its autocast: one product writes the update, four operations the gradient
    (of slots, of logits, of lengths, their sum), and none is in float32 beyond the casts at both ends."""
    layer, x = SoftMoE(32, 5), torch.randn(2, 7, 32)
    layer, x = (layer, x) if cast else (layer.bfloat16(), x.bfloat16())
    monkeypatch.setattr(soft, "_product", lambda x, slots: (x @ slots).float())  # a CPU has none that adds in float32
    for module in (routers, soft_moe):
        monkeypatch.setattr(module, "working_dtype", lambda _: torch.bfloat16)
    with Written(x.numel()) as mode:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            update = layer(x.requires_grad_())[0]
        forward, mode.seen = mode.seen, []
        update.backward(torch.ones_like(update))
    backward = [each for each in mode.seen if each[0] != "ones_like"]
    assert forward == [("_to_copy", torch.bfloat16)] * cast + [("bmm", torch.bfloat16)]
    products = [("bmm", torch.bfloat16), ("mm", torch.bfloat16), ("addcmul", torch.bfloat16), ("add", torch.bfloat16)]
    assert backward == products + [("_to_copy", torch.float32)] * cast


@pytest.mark.parametrize(("dispatch", "combine"), [("uniform", "learnt"), ("learnt", "uniform")])
def test_uniform_weights_are_means(dispatch, combine):
    layer = SoftMoE(8, 3, dispatch=dispatch, combine=combine)
    x, mask = torch.randn(2, 6, 8), torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    update, (plan,) = layer(x, mask=mask)
    if dispatch == "uniform":
        close(plan.dispatch(x)[1, 0, 0], x[1, :4].mean(0))
    else:
        close(update[1, :4], layer.experts(plan.dispatch(x))[1, :, 0].mean(0).expand(4, 8))
    assert (update[1, 4:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_loses_no_small_weights(dtype):
    """At a scale of 30 weights go down to e^-60, which halves cannot hold; nor may a backward pass in autocast."""
    layer, x = SoftMoE(32, 4, 2, scale=30.0), torch.randn(2, 9, 32, requires_grad=True)
    of = (x, layer.router.phi)
    exact = layer(x)[0]
    with torch.autocast("cpu", dtype):
        found = layer(x)[0]
        grads = torch.autograd.grad(found.float().sum(), of)
    assert (found - exact).norm() < 0.01 * exact.norm()
    for mine, wanted in zip(grads, torch.autograd.grad(exact.sum(), of), strict=True):
        assert (mine - wanted).norm() < 0.01 * wanted.norm()


def test_functional_gradients_are_those_of_a_backward_pass():
    layer, x, mask = SoftMoE(8, 5, 3).double(), torch.randn(2, 5, 8, dtype=F64, requires_grad=True), operands()[3]
    weights = dict(layer.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(layer, weights, (x,), {"mask": mask})[0].square().sum()

    of_weights, of_x = torch.func.grad(loss, (0, 1))(weights, x)
    loss(weights, x).backward()
    for mine, weight in zip((of_x, *of_weights.values()), (x, *weights.values()), strict=True):
        close(mine, weight.grad)


def test_compiled_as_one_graph_it_is_the_same_under_autocast():
    layer, x = SoftMoE(8, 5, 3), torch.randn(2, 7, 8, requires_grad=True)
    mask, of, found = torch.arange(7) < torch.tensor([[7], [4]]), (x, *layer.parameters()), []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")):
        with torch.autocast("cpu", torch.bfloat16):
            update = call(x, mask=mask)[0]
        found.append((update, *torch.autograd.grad(update.float().square().sum(), of)))
    for mine, wanted in zip(*found, strict=True):
        close(mine.float(), wanted.float(), torch.bfloat16)
