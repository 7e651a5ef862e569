"""Our attention in short rows equals the written-out softmax, forward and backward: on CUDA, or on a CPU by triton's
interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

from depthgate.ops import attention, reference
from tests.conftest import close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device on this machine, and TRITON_INTERPRET is not 1", allow_module_level=True)
pytest.importorskip("depthgate.ops.short_attention_triton", reason="triton is not installed")

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
SHAPES = [
    (2, 17, 2, 1, 8),
    (1, 64, 1, 1, 16),
    (2, 70, 3, 3, 32),
    (1, 200, 4, 2, 20),
    (3, 1, 2, 2, 32),
    (1, 130, 2, 1, 64),
]
SHAPES += [(4, 512, 10, 10, 32), (2, 1024, 12, 4, 64), (8200, 16, 8, 8, 16)] * (DEVICE == "cuda")


def inputs(shape, way):
    """q, k and v, of which v is a part of a larger tensor, as projections give it; and documents."""
    B, T, H, G, d = shape
    torch.manual_seed(T)
    both = torch.randn(B, T, H + 2 * G, d, device=DEVICE).to(DTYPE)
    q, k, v = both.split((H, G, G), 2)
    doc = (torch.rand(B, T, device=DEVICE) < 0.06).long().cumsum(1)
    doc = doc - doc[:, :1]
    doc[0, T - T // 4 :] = -1  # padding
    return q.contiguous() * 2, k.contiguous(), v, doc if way == "documents" else None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", ["documents", "causal", "all"])
def test_it_equals_the_written_out_softmax(shape, way):
    q, k, v, doc = inputs(shape, way)
    mine = [
        each.detach().clone().requires_grad_() if each is not v else v.detach().requires_grad_() for each in (q, k, v)
    ]
    wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
    y = attention.short_attention(*mine, doc, way != "all")
    want = reference.short_attention(*wide, doc, way != "all")
    close(y.double(), want, DTYPE)
    grad = torch.randn_like(y)
    y.backward(grad)
    want.backward(grad.double())
    for ours, theirs in zip(mine, wide, strict=True):
        apart = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm().clamp(
            min=0.1
        )  # of one token those of q and k are 0
        assert apart < (2e-2 if DTYPE is torch.bfloat16 else 1e-5)


def test_what_lies_in_other_documents_does_not_matter():
    q, k, v, _ = inputs((1, 90, 2, 2, 16), "causal")
    doc = (torch.arange(90, device=DEVICE) >= 33).long()[None]
    whole = attention.short_attention(q, k, v, doc, True)
    alone = attention.short_attention(q[:, 33:].contiguous(), k[:, 33:].contiguous(), v[:, 33:], None, True)
    close(whole[:, 33:], alone, DTYPE)
    k[:, :33], v[:, :33] = 1e4, torch.inf
    assert torch.equal(attention.short_attention(q, k, v.nan_to_num(posinf=3e4), doc, True)[:, 64:], whole[:, 64:])


def test_a_token_sees_no_later_one():
    q, k, v, doc = inputs((1, 70, 2, 2, 32), "documents")
    before = attention.short_attention(q, k, v, doc, True)
    for each in (q, k, v):
        each[:, 40:] = 7.0
    assert torch.equal(attention.short_attention(q, k, v, doc, True)[:, :40], before[:, :40])


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device on this machine")
def test_compiled_it_gives_the_same():
    q, k, v, doc = inputs((2, 512, 4, 4, 32), "documents")
    given = [each.detach().requires_grad_() for each in (q, k, v)]
    plain = attention.packed_attention(*given, doc, 40)
    grads = torch.autograd.grad(plain.float().square().mean(), given)
    compiled = torch.compile(attention.packed_attention, fullgraph=True)(*given, doc, 40)
    close(compiled, plain, DTYPE)
    for one, two in zip(torch.autograd.grad(compiled.float().square().mean(), given), grads, strict=True):
        close(one, two, DTYPE)
    assert attention.is_short(v, *attention._PACKED)
