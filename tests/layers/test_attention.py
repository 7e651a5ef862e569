"""Attention against a written-out softmax, and what positions promise."""

import pytest
import torch

from depthgate.errors import InvalidValueError
from depthgate.layers.attention import Attention
from depthgate.ops.attention import rope as turn
from depthgate.ops.attention import rotation, token_before
from tests.conftest import close


def rope(x, pos, base):
    return turn(x, *rotation(pos, x.shape[-1] // 2, base, x.dtype))


def naive(layer, x, pos, doc=None):
    """Token by token, head by head, over the keys its position may see."""
    B, T, _ = x.shape
    H, G, d = layer.heads, layer.kv_heads, layer.head_dim
    q, k, v = layer.qkv(x).view(B, T, H + 2 * G, d).split((H, G, G), dim=2)
    q, k = rope(layer.q_norm(q), pos, layer.rope_base), rope(layer.k_norm(k), pos, layer.rope_base)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = torch.zeros(B, H, T, d, dtype=x.dtype)
    for b in range(B):
        for t in range(T):
            if pos[b, t] < 0:
                continue
            seen = pos[b] >= 0
            if not layer.bidirectional:
                seen = seen & (pos[b] <= pos[b, t])
            if doc is not None:
                seen = seen & (doc[b] == doc[b, t])
            for h in range(H):
                g = h * G // H
                weights = (k[b, g][seen] @ q[b, h, t] / d**0.5).softmax(0)
                out[b, h, t] = weights @ v[b, g][seen]
    return layer.out(out.transpose(1, 2).reshape(B, T, H * d))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_equals_the_written_out_softmax(bidirectional, heads, kv_heads, qk_norm):
    layer = Attention(32, heads, kv_heads, qk_norm=qk_norm, bidirectional=bidirectional)
    x = torch.randn(2, 7, 32)
    plain = torch.arange(7).expand(2, 7)
    close(layer(x), naive(layer, x, plain))
    close(layer(x, plain), naive(layer, x, plain))  # the masked path says the same
    pos = torch.tensor([[-1, -1, 0, 1, 2, 3, 4], [0, 3, 4, 9, 11, -1, -1]])
    real = (pos >= 0)[..., None]
    close(layer(x, pos) * real, naive(layer, x, pos) * real)
    assert layer(x, pos).isfinite().all()
    doc = torch.tensor([[0, 0, 0, 0, 1, 1, 1]]).expand(2, 7)
    close(layer(x, pos, doc) * real, naive(layer, x, pos, doc) * real)


def test_rope_turns_scores_by_distance_alone():
    """<rope(q, m), rope(k, n)> depends on m - n only, and a rotation keeps lengths."""
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    at = lambda x, p: rope(x, torch.tensor([[p]]), 10_000.0)  # noqa: E731
    close((at(q, 3) * at(k, 1)).sum(), (at(q, 103) * at(k, 101)).sum(), torch.float32)
    close(at(q, 1234).norm(), q.norm())
    assert torch.equal(at(q, 0), q)


def test_rope_by_hand():
    """One pair of features: a plain turn by `pos` radians."""
    x = torch.tensor([[[[1.0, 0.0]]]])
    turned = rope(x, torch.tensor([[2]]), 10_000.0)
    close(turned.flatten(), torch.tensor([torch.tensor(2.0).cos(), torch.tensor(2.0).sin()]))


def test_packed_documents_equal_separate_ones():
    layer = Attention(32, 4)
    a, b = torch.randn(1, 5, 32), torch.randn(1, 3, 32)
    pos = torch.cat([torch.arange(5), torch.arange(3)])[None]
    doc = torch.tensor([[0] * 5 + [1] * 3])
    packed = layer(torch.cat([a, b], 1), pos, doc)
    close(packed, torch.cat([layer(a), layer(b)], 1))


def test_left_and_right_padding_equal_the_row_alone():
    layer = Attention(32, 4)
    x = torch.randn(1, 5, 32)
    noise = torch.randn(1, 3, 32)
    pos = torch.arange(5)[None]
    none = torch.full((1, 3), -1)
    left = layer(torch.cat([noise, x], 1), torch.cat([none, pos], 1))[:, 3:]
    right = layer(torch.cat([x, noise], 1), torch.cat([pos, none], 1))[:, :5]
    close(left, layer(x))
    close(right, layer(x))


class ListCache:
    """The simplest store: remembers everything it was given."""

    def __init__(self):
        self.k, self.v, self.pos = [], [], []

    def append(self, k, v, pos):
        self.k.append(k)
        self.v.append(v)
        self.pos.append(pos)
        return torch.cat(self.k, 2), torch.cat(self.v, 2), torch.cat(self.pos, 1)


def test_token_by_token_with_a_cache_equals_one_forward():
    layer = Attention(32, 4, 2).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    pos = torch.tensor([list(range(9)), [-1, -1, *range(7)]])
    whole = layer(x, pos)
    cache = ListCache()
    parts = [layer(x[:, :4], pos[:, :4], cache=cache)]
    parts += [layer(x[:, t : t + 1], pos[:, t : t + 1], cache=cache) for t in range(4, 9)]
    real = (pos >= 0)[..., None]
    close(torch.cat(parts, 1) * real, whole * real)


# Keys of the token before


def test_the_token_before_by_hand():
    pos = torch.tensor([[-1, 0, -1, 1, 2], [0, 1, 0, 1, -1]])
    doc = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, -1]])
    assert token_before(pos, None).tolist() == [[0, 1, 1, 1, 3], [0, 0, 1, 2, 3]]
    # A document's first token, and padding that belongs to none, have themselves.
    assert token_before(pos, doc).tolist() == [[0, 1, 1, 1, 3], [0, 0, 2, 2, 4]]


def test_shifted_keys_equal_the_loop():
    """Of every rotary pair in the slower half, both parts come from the key of the token before."""
    layer = Attention(16, 2, key_shift=True).double()
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    q, k, v = (t.view(1, 5, 2, 8) for t in layer.qkv(x).split(16, -1))
    q, k = (rope(each, torch.arange(5)[None], layer.rope_base) for each in (q, k))
    out = torch.zeros(1, 5, 2, 8, dtype=torch.float64)
    for head in range(2):
        for t in range(5):
            keys = k[0, : t + 1, head].clone()
            for s in range(1, t + 1):
                keys[s, [2, 3, 6, 7]] = k[0, s - 1, head, [2, 3, 6, 7]]
            weights = (keys @ q[0, t, head] / 8**0.5).softmax(0)
            out[0, t, head] = weights @ v[0, : t + 1, head]
    close(layer(x), layer.out(out.reshape(1, 5, 16)))
    with pytest.raises(InvalidValueError, match="key_shift needs a multiple of 4"):
        Attention(12, 2, key_shift=True)


def test_shifted_keys_of_packed_documents_with_a_promise_and_without():
    layer = Attention(16, 2, key_shift=True).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    doc = torch.tensor([[0] * 4 + [1] * 5, [0] * 8 + [-1]])
    pos = torch.tensor([[*range(4), *range(5)], [*range(8), -1]])
    real = pos >= 0
    close(layer(x, pos, doc, max_documents=2)[real], layer(x, pos, doc)[real])
    close(layer(x, pos, doc)[0, 4:], layer(x[:1, 4:])[0])


def test_rope_is_its_equation_to_the_bit() -> None:
    """The form of a CPU, and its gradient, against the equation, pair by pair."""
    x, grad = (torch.randn(2, 5, 3, 8) for _ in range(2))
    cos, sin = rotation(torch.arange(5).expand(2, 5), 4, 100.0, x.dtype)
    mine, twin = x.clone().requires_grad_(), x.clone().requires_grad_()
    a, b = twin.chunk(2, -1)
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    found = turn(mine, cos, sin)
    found.backward(grad)
    expected.backward(grad)
    assert torch.equal(found, expected)
    assert torch.equal(mine.grad, twin.grad)
