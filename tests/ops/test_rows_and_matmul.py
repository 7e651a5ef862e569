"""Fast ops against their naive twins: values, gradients, odd strides, poisoned memory."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from depthgate.ops import matmul, reference, rows
from tests.conftest import close

INDEX = torch.tensor([[0, 2, 5], [1, 3, 4]])


def test_rows_equal_their_twins():
    x, r = torch.randn(2, 6, 3), torch.randn(2, 3, 3)
    assert torch.equal(rows.take_rows(x, INDEX), reference.take_rows(x, INDEX))
    assert torch.equal(rows.add_rows(r, INDEX, 6), reference.add_rows(r, INDEX, 6))
    assert torch.equal(rows.put_rows(x, INDEX, r), reference.put_rows(x, INDEX, r))
    twice = torch.tensor([[0, 0, 5], [1, 3, 1]])
    close(rows.add_rows(r, twice, 6), reference.add_rows(r, twice, 6))
    pos = torch.arange(12).view(2, 6)
    assert torch.equal(rows.take_rows(pos, INDEX), reference.take_rows(pos, INDEX))
    deep = torch.randn(2, 6, 3, 4, 5)
    assert torch.equal(rows.take_rows(deep, INDEX), reference.take_rows(deep, INDEX))


def test_rows_pass_gradcheck_twice():
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    r = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    for check in (gradcheck, gradgradcheck):
        assert check(lambda x: rows.take_rows(x, INDEX), (x,))
        assert check(lambda r: rows.add_rows(r, INDEX, 6), (r,))
        assert check(lambda x, r: rows.put_rows(x, INDEX, r), (x, r))


@pytest.mark.parametrize("odd", ["transposed", "expanded", "sliced", "strided"])
def test_odd_strides_give_the_contiguous_result(odd):
    x = {
        "transposed": torch.randn(6, 2, 4).transpose(0, 1),
        "expanded": torch.randn(1, 6, 4).expand(2, 6, 4),
        "sliced": torch.randn(2, 9, 7)[:, 2:8, 1:5],
        "strided": torch.randn(2, 12, 8)[:, ::2, ::2],
    }[odd]
    index = INDEX[:, :3]
    assert torch.equal(rows.take_rows(x, index), rows.take_rows(x.contiguous(), index))
    assert torch.equal(rows.add_rows(x[:, :3], index, 9), rows.add_rows(x[:, :3].contiguous(), index, 9))
    r = torch.randn(2, 3, 4)
    assert torch.equal(rows.put_rows(x, index, r), rows.put_rows(x.contiguous(), index, r))


def test_more_elements_than_an_int32_counts():
    """2^31 elements and more, as bytes so that they fit; the last rows are read where they are (row 27 of
    docs/reliability.md)."""
    D, T = 1024, 2**21 + 8
    x = torch.zeros(1, T, D, dtype=torch.uint8)
    x[0, -3:] = torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None]
    assert x.numel() > 2**31
    got = rows.take_rows(x, torch.tensor([[0, T - 3, T - 1]]))
    assert got[0, :, 0].tolist() == [0, 1, 3]
    assert (got == got[..., :1]).all()


ENDS = {
    "even": [4, 8, 12],
    "an empty expert": [5, 5, 12],
    "one gets all": [0, 12, 12],
    "rows of no group": [2, 5, 9],
    "no rows": [0, 0, 0],
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("shape", [(16, 24), (5, 7), (6, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_grouped_matmul_equals_its_twin(ends, shape, dtype):
    D, F = shape
    x = torch.randn(12, D, dtype=dtype, requires_grad=True)
    w = torch.randn(3, D, F, dtype=dtype, requires_grad=True)
    offsets = torch.tensor(ends, dtype=torch.int32)
    fast = matmul.grouped_matmul(x, w, offsets)
    seed = torch.randn_like(fast)
    fast_grads = torch.autograd.grad(fast, (x, w), seed)
    slow = reference.grouped_matmul(x, w, offsets)
    slow_grads = torch.autograd.grad(slow, (x, w), seed)
    close(fast, slow)
    assert fast[ends[-1] :].abs().sum() == 0
    for a, b in zip(fast_grads, slow_grads, strict=True):
        close(a, b)
    assert fast_grads[0][ends[-1] :].abs().sum() == 0
    if ends[0] == ends[1]:
        assert fast_grads[1][1].abs().sum() == 0


def test_grouped_ops_keep_torchs_contract():
    """torch's own checks of a custom op: schema, fake tensors, autograd, compilation."""
    x, w = torch.randn(12, 16, requires_grad=True), torch.randn(3, 16, 24, requires_grad=True)
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)
    torch.library.opcheck(torch.ops.depthgate.grouped_mm.default, (x, w, ends))
    y = torch.randn(12, 24, requires_grad=True)
    torch.library.opcheck(torch.ops.depthgate.grouped_outer.default, (x, y, ends))
    close(torch.ops.depthgate.grouped_outer(x, y, ends), reference.grouped_outer(x, y, ends))


def test_grouped_matmul_passes_gradcheck_twice():
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    for check in (gradcheck, gradgradcheck):
        assert check(lambda x, w: matmul.grouped_matmul(x, w, ends), (x, w))


def test_grouped_matmul_counts_its_flops():
    from torch.utils.flop_counter import FlopCounterMode

    x, w = torch.randn(12, 16, requires_grad=True), torch.randn(3, 16, 24, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        matmul.grouped_matmul(x, w, torch.tensor([4, 4, 12], dtype=torch.int32)).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 12 * 16 * 24


def test_results_do_not_depend_on_what_memory_held():
    """Deterministic mode fills fresh memory with NaN: anything read before it is written would show."""
    x, w = torch.randn(12, 16), torch.randn(3, 16, 24)
    ends = torch.tensor([2, 5, 9], dtype=torch.int32)
    r = torch.randn(2, 3, 3)
    calm = matmul.grouped_matmul(x, w, ends), rows.add_rows(r, INDEX, 6)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        poisoned = matmul.grouped_matmul(x, w, ends), rows.add_rows(r, INDEX, 6)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(calm[0], poisoned[0])
    assert torch.equal(calm[1], poisoned[1])


def test_huge_page_matmul_equals_that_of_torch(monkeypatch):
    monkeypatch.setattr(matmul, "_HUGE_BYTES", 0)
    x = torch.randn(3, 5, 8, requires_grad=True)
    w = torch.randn(3, 8, 2048, requires_grad=True)
    fast, slow = matmul.expert_matmul(x, w), torch.bmm(x, w)
    close(fast, slow)
    seed = torch.randn_like(fast)
    for a, b in zip(torch.autograd.grad(fast, (x, w), seed), torch.autograd.grad(slow, (x, w), seed), strict=True):
        close(a, b)
    x64 = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    w64 = torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(matmul.expert_matmul, (x64, w64))
    assert gradgradcheck(matmul.expert_matmul, (x64, w64))


def test_gathers_by_place_equal_scatters():
    """The same values and gradients as without `place`, where only placed rows are used."""
    place = torch.tensor([[0, -1, 1, -1, -1, 2], [-1, 0, -1, 1, 2, -1]])  # of INDEX
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    r = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    for plain, placed in (
        (lambda: rows.take_rows(x, INDEX), lambda: rows.take_rows(x, INDEX, place)),
        (lambda: rows.add_rows(r, INDEX, 6), lambda: rows.add_rows(r, INDEX, 6, place)),
    ):
        a, b = plain(), placed()
        assert torch.equal(a, b)
        grad = torch.randn_like(a)
        for one, two in zip(
            torch.autograd.grad(a, (x, r), grad, allow_unused=True),
            torch.autograd.grad(b, (x, r), grad, allow_unused=True),
            strict=True,
        ):
            assert (one is None and two is None) or torch.equal(one, two)
    assert gradcheck(lambda x: rows.take_rows(x, INDEX, place), (x,))
    assert gradcheck(lambda r: rows.add_rows(r, INDEX, 6, place), (r,))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_experts_are_not_rounded_to_halves(compiled):
    """As under CUDA's autocast: products in bfloat16, and the weight's gradient in float32, as the weight."""
    x, w, grad = torch.randn(3, 6, 5).bfloat16(), torch.randn(3, 5, 4), torch.randn(3, 6, 4).bfloat16()
    x.requires_grad_()
    w.requires_grad_()
    call = matmul._WideGradient.apply
    y = (torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition") if compiled else call)(x, w)
    close(y, torch.bmm(x, w.bfloat16()))
    grad_x, grad_w = torch.autograd.grad(y, (x, w), grad)
    close(grad_x, torch.bmm(grad, w.bfloat16().mT))
    assert grad_w.dtype is torch.float32
    close(grad_w, torch.bmm(x.float().mT, grad.float()))
