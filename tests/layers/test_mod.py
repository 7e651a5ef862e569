"""Mixture-of-Depths: the probes every peer fails at least one of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import depthgate as dg
from depthgate.layers import Attention, Block, MoD, MoE, SoftMoE, SwiGLU
from depthgate.ops.rows import masked_positions
from depthgate.routing import RULES, TopTokens
from tests.conftest import close
from tests.zoo import DepthsWithPlans as MixtureOfDepths

D = 16


def block(bidirectional=False, ffn=None):
    return Block(D, Attention(D, 2, bidirectional=bidirectional), ffn or SwiGLU(D))


def zero_router(module):
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "router" in name:
                p.zero_()


class Recorder(nn.Module):
    """A plain block: adds `amount`, and remembers what it was called with."""

    def __init__(self, amount=0.0):
        super().__init__()
        self.amount, self.calls = amount, []

    def forward(self, x, *args, **kwargs):
        self.calls.append((x.clone(), args, kwargs))
        return x + self.amount


# 1. A zero branch is the identity.
@pytest.mark.parametrize("gate", ["one_plus_tanh", "sigmoid", "raw", "straight_through"])
def test_a_block_that_adds_nothing_leaves_x_bitwise_equal(gate):
    x = torch.randn(3, 11, D)
    layer = MixtureOfDepths(Recorder(), D, 0.3, gate=gate)
    assert torch.equal(layer(x)[0], x)
    assert torch.equal(layer(x, causal=True)[0], x)
    native = block()
    nn.init.zeros_(native.attention.out.weight)
    nn.init.zeros_(native.ffn.down.weight)
    update, _ = MoD(native, TopTokens(D, 0.3, gate=gate))(x)
    assert torch.equal(x + update, x)


# 2. Exactly k tokens are seen, in training and evaluation alike, and they are copies of rows of x.
@pytest.mark.parametrize("training", [True, False])
@given(st.integers(1, 3), st.integers(1, 20), st.sampled_from([0.125, 0.4, 1.0]))
def test_the_block_sees_exactly_k_rows_of_x(training, B, T, capacity):
    seen = Recorder(1.0)
    layer = MixtureOfDepths(seen, D, capacity).train(training)
    x = torch.randn(B, T, D)
    y, plans = layer(x)
    (rows, args, kwargs) = seen.calls[0]
    k = max(1, int(capacity * T))
    assert rows.shape == (B, k, D)
    assert (args, kwargs) == ((), {})
    for b in range(B):
        where = [(x[b] == row).all(-1).nonzero().item() for row in rows[b]]
        assert where == sorted(where)
        assert where == plans[0].tokens[b, 0].tolist()
        skipped = [t for t in range(T) if t not in where]
        assert torch.equal(y[b, skipped], x[b, skipped])
        assert (y[b, where] != x[b, where]).any(-1).all()


# 3. Capacity 1 equals the dense block bit for bit, and positions survive.
def test_capacity_one_with_gate_one_is_the_dense_block_bit_for_bit():
    x = torch.randn(2, 12, D)
    inner = block()
    dense, _ = inner(x)
    for router in (TopTokens(D, 1.0, gate="straight_through"), TopTokens(D, 1.0)):
        if router.gate.__name__ == "one_plus_tanh":
            nn.init.zeros_(router.proj.weight)
        assert torch.equal(MoD(inner, router)(x)[0], dense)
    plain = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, dropout=0.0)
    wrapped = MixtureOfDepths(plain, D, 1.0)
    zero_router(wrapped)
    assert torch.equal(wrapped(x)[0], plain(x))


def test_routed_tokens_attend_among_themselves_at_their_own_positions():
    inner = block().double()
    router = TopTokens(D, 0.5).double()
    x = torch.randn(2, 10, D, dtype=torch.float64)
    update, (plan,) = MoD(inner, router)(x)
    for b in range(2):
        picked = plan.tokens[b, 0]
        alone, _ = inner(x[b : b + 1, picked], pos=picked[None])
        close(update[b, picked], plan.gates[b, 0, :, None] * alone[0])
        renumbered, _ = inner(x[b : b + 1, picked])
        assert not torch.allclose(renumbered, alone)
        skipped = [t for t in range(10) if t not in picked.tolist()]
        assert update[b, skipped].abs().sum() == 0


# 6. Rows are independent of each other.
def test_rows_are_independent():
    x = torch.randn(4, 9, D, dtype=torch.float64)
    for layer in (MoD(block(), TopTokens(D, 0.4)).double(), MixtureOfDepths(Recorder(1.0), D, 0.4).double()):
        together = layer(x)[0]
        for b in range(4):
            close(layer(x[b : b + 1])[0], together[b : b + 1])


# 8. Padding is never routed and changes nothing; packed documents stay apart.
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing(side, causal):
    layer = MoD(block(), TopTokens(D, 0.5)).double()
    x = torch.randn(3, 8, D, dtype=torch.float64)
    lengths = [8, 5, 0]
    t = torch.arange(8)
    mask = torch.stack([(t >= 8 - n) if side == "left" else (t < n) for n in lengths])
    x[~mask] = torch.nan  # whatever lies in padding
    update, (plan,) = layer(x, masked_positions(mask, x), causal=causal)
    assert not plan.chosen[~mask].any()
    assert (update[~mask] == 0).all()
    for b, n in enumerate(lengths[:2]):
        alone, _ = layer(x[b : b + 1, mask[b]], causal=causal)
        close(update[b, mask[b]], alone[0])
        assert not causal or plan.chosen[b].sum() == (plan.decision[b, mask[b]] >= 0).sum()
        assert causal or plan.chosen[b].sum() == max(1, n // 2)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_equal_separate_rows(causal):
    layer = MoD(block(), TopTokens(D, 0.5)).double()
    lengths = [5, 1, 4]
    parts = [torch.randn(1, n, D, dtype=torch.float64) for n in lengths]
    pos = torch.cat([torch.arange(n) for n in lengths])[None]
    doc = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    packed, _ = layer(torch.cat(parts, 1), pos, doc, causal=causal)
    close(packed, torch.cat([layer(p, causal=causal)[0] for p in parts], 1))


# 4. In causal mode a later token never changes an earlier one (and in top-k mode it does).
@pytest.mark.parametrize("rule", RULES)
def test_the_future_does_not_leak_in_causal_mode(rule):
    layer = MoD(block(), TopTokens(D, 0.5, rule=rule)).double()
    x = torch.randn(2, 12, D, dtype=torch.float64)
    layer.router.update(layer(x)[1][0])
    changed = x.clone()
    changed[:, 7:] = 3 * torch.randn_like(changed[:, 7:])
    close(layer(x, causal=True)[0][:, :7], layer(changed, causal=True)[0][:, :7])
    assert not torch.allclose(layer(x)[0][:, :7], layer(changed)[0][:, :7])


def test_no_token_enters_and_nothing_is_computed():
    class Never(nn.Module):
        def forward(self, *args, **kwargs):
            raise AssertionError("called")

    x = torch.randn(2, 5, D)
    layer = MoD(Never(), TopTokens(D, 0.5, rule="threshold"))
    layer.router.rule.average.fill_(1e6)
    layer.router.rule.weight.fill_(1.0)
    with torch.no_grad():
        update, (plan,) = layer(x, causal=True)
    assert (update == 0).all()
    assert plan.tokens.shape == (2, 1, 0)
    wrapped, calls = MixtureOfDepths(nn.Linear(D, D), D, 0.5, rule=layer.router.rule), []
    wrapped.block.register_forward_pre_hook(lambda m, args: calls.append(args[0].shape[1]))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(wrapped(x, causal=True)[0], x)
            assert torch.equal(wrapped(x, mask=torch.zeros(2, 5, dtype=torch.bool))[0], x)
    assert calls == [1]  # by the first alone, which cannot know whether the block returns a tuple


def closed(layer):
    """A layer whose threshold no token passes."""
    layer.router.rule.average.fill_(1e6)
    layer.router.rule.weight.fill_(1.0)
    return layer


def test_no_token_enters_and_every_parameter_still_has_a_gradient():
    x = torch.randn(2, 5, D)
    layer = closed(MoD(block(), TopTokens(D, 0.5, rule="threshold")))
    layer(x, causal=True)[0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in layer.parameters())
    encoder = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True)
    for plain in (nn.Linear(D, D), encoder):
        layer = closed(MixtureOfDepths(plain, D, 0.5, rule="threshold"))
        for call in ({"causal": True}, {"mask": torch.zeros(2, 5, dtype=torch.bool)}):
            layer.zero_grad(set_to_none=True)
            y, _ = layer(x, **call)
            assert torch.equal(y, x)
            y.sum().backward()
            assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in layer.parameters())


def test_a_block_with_a_padding_mask_gets_ragged_rows_in_one_call():
    """One call, and the same as the rows alone: lengths differ, one row has no token."""
    calls = []
    plain = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, dropout=0.0)
    plain.register_forward_pre_hook(lambda m, args: calls.append(args[0].shape))
    layer = MixtureOfDepths(plain, D, 0.5).double()
    x = torch.randn(4, 8, D, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(8) < torch.tensor([[8], [5], [0], [3]])
    y, _ = layer(x, mask=mask)
    assert calls == [(4, 4, D)]
    y.pow(2).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert x.grad.isfinite().all()
    for b, n in ((0, 8), (1, 5), (3, 3)):
        close(y[b, :n], layer(x[b : b + 1, :n])[0][0])
    assert torch.equal(y[2], x[2])
    # whatever lies in padding, in x or in a keyword of the block's, reaches neither values nor gradients
    layer.zero_grad()
    poisoned = torch.where(mask[..., None], x.detach(), torch.nan)
    z, _ = layer(poisoned, mask=mask)
    close(z[mask], y[mask])
    z[mask].pow(2).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    # the block's own padding mask, where the caller gives one as well, joins ours: what it hides is not routed
    hidden = ~mask
    hidden[0, :4] = True
    z, (plan,) = layer(x, mask=mask, src_key_padding_mask=hidden)
    assert torch.equal(plan.valid, ~hidden)
    assert not plan.chosen[hidden].any()
    close(z[0, 4:], layer(x[:1, 4:])[0][0])


def test_an_additive_padding_mask_stays_additive():
    plain = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, dropout=0.0)
    layer = MixtureOfDepths(plain, D, 1.0)
    x, bias = torch.randn(2, 6, D), torch.randn(2, 6)
    everywhere = torch.ones(2, 6, dtype=torch.bool)
    close(layer(x, mask=everywhere, src_key_padding_mask=bias)[0], layer(x, src_key_padding_mask=bias)[0])
    with pytest.raises(dg.DepthgateError, match="src_key_padding_mask is list"):
        layer(x, mask=everywhere, src_key_padding_mask=[1])


def test_always_call_reaches_the_block_though_no_token_enters():
    """FSDP2 without gradients needs it: each process enters every sharded block."""
    for plain in (nn.Linear(D, D), nn.TransformerEncoderLayer(D, 2, 32, batch_first=True)):
        layer = closed(MixtureOfDepths(plain, D, 0.5, rule="threshold"))
        calls = []
        plain.register_forward_pre_hook(lambda m, args, calls=calls: calls.append(args[0].shape[1]))
        x = torch.randn(2, 5, D)
        with torch.no_grad():
            layer(x)
            layer(x, causal=True)
            assert calls == [2]
            layer.always_call = True
            assert torch.equal(layer(x, causal=True)[0], x)
            assert calls == [2, 1]


def test_identity_and_capacity_one_hold_for_inf_and_fp16_extremes():
    x = torch.randn(2, 6, D)
    x[0, 2, 3], x[1, 1, 1] = torch.inf, -torch.inf
    assert torch.equal(MixtureOfDepths(Recorder(), D, 1.0)(x)[0], x)

    class Negative(nn.Module):
        def forward(self, x):
            return -x

    x = torch.full((1, 4, D), 50_000.0, dtype=torch.float16)
    layer = MixtureOfDepths(Negative(), D, 1.0)
    zero_router(layer)
    assert torch.equal(layer(x)[0], -x)


# Drop-in: any block, per-token and per-batch keywords, masks.
class ListensTo(nn.Module):
    def forward(self, x, *, bias, pair, scale, note):
        assert note == "as it is"
        cos, sin = pair
        return x + scale[:, None] * (bias[..., None] + cos * sin)


@pytest.mark.parametrize("how", ["top k", "mask", "causal"])
def test_per_token_keywords_travel_and_the_rest_stays(how):
    B, T = 3, 10
    x = torch.randn(B, T, D)
    bias, cos, sin = torch.randn(B, T), torch.randn(1, T, D), torch.randn(B, T, D)
    scale = torch.randn(B, 1)
    layer = MixtureOfDepths(ListensTo(), D, 0.4, gate="straight_through", per_token=["bias", "pair"])
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, 6:] = False
    options = {"top k": {}, "mask": {"mask": mask}, "causal": {"causal": True}}[how]
    y, (plan,) = layer(x, bias=bias, pair=(cos, sin), scale=scale, note="as it is", **options)
    everywhere = x + scale[:, None] * (bias[..., None] + cos * sin)
    close(y, torch.where(plan.chosen, everywhere, x))
    assert torch.equal(y[~plan.chosen[..., 0]], x[~plan.chosen[..., 0]])


class Crosses(nn.Module):
    def forward(self, x, *, memory, shift):
        assert memory.shape[1] == 6
        return x + memory.mean(1, keepdim=True) + shift


def test_a_shared_memory_as_long_as_x_stays_whole():
    x, memory, shift = torch.randn(2, 6, D), torch.randn(2, 6, D), torch.randn(2, 6, D)
    layer = MixtureOfDepths(Crosses(), D, 0.5, gate="straight_through", per_token=["shift"], shared=["memory"])
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    for options in ({}, {"mask": mask}):
        y, (plan,) = layer(x, memory=memory, shift=shift, **options)
        close(y, torch.where(plan.chosen, x + memory.mean(1, keepdim=True) + shift, x))


def test_transformer_encoder_layer_with_padding_equals_rows_alone():
    plain = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, dropout=0.0)
    layer = MixtureOfDepths(plain, D, 0.5)
    x = torch.randn(3, 8, D)
    mask = torch.arange(8) < torch.tensor([[8], [5], [1]])
    y, (plan,) = layer(x, mask=mask)
    for b, n in enumerate((8, 5, 1)):
        close(y[b, :n], layer(x[b : b + 1, :n])[0][0])
        assert torch.equal(y[b, n:], x[b, n:])
    assert plan.chosen.sum(1)[:, 0].tolist() == [4, 2, 1]


# 12. Staged MoDE by composition: the experts see routed tokens only.
def test_staged_mode_is_mod_around_a_block_with_experts():
    moe = MoE(D, 4, top_k=2)
    layer = MoD(block(ffn=moe), TopTokens(D, 0.25))
    x = torch.randn(2, 16, D)
    update, (plan, inner) = layer(x)
    assert plan.tokens.shape == (2, 1, 4)
    assert inner.scores.shape == (2, 4, 4)
    assert (update[~plan.chosen[..., 0]] == 0).all()
    for causal in (False, True):
        pos = torch.arange(16).repeat(2, 1)
        pos[0, 3:] = -1
        _, (outer, inner) = layer(x, pos, causal=causal)
        assert int((inner.choice >= 0).sum()) == 2 * int(outer.chosen.sum())


def test_any_update_can_be_routed():
    """Feed-forwards too, each with the arguments that every Update takes."""
    x = torch.randn(2, 8, D)
    for update in (SwiGLU(D), MoE(D, 4), SoftMoE(D, 2)):
        routed, (plan, *_) = MoD(update, TopTokens(D, 0.5))(x, max_documents=1)
        assert (routed[~plan.chosen[..., 0]] == 0).all()
        assert (routed[plan.chosen[..., 0]] != 0).any()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_in_empty_out(shape):
    x = torch.randn(*shape, D)
    y, plans = MixtureOfDepths(nn.Linear(D, D), D, 0.5)(x)
    assert y.shape == x.shape
    assert len(plans) == 1
    assert MoD(block(), TopTokens(D, 0.5))(x)[0].shape == x.shape


@pytest.mark.parametrize("T", range(1, 8))
def test_short_rows_route_one(T):
    _, (plan,) = MixtureOfDepths(Recorder(), D, 0.125)(torch.randn(2, T, D))
    assert plan.tokens.shape == (2, 1, 1)


def test_dense_skips_cost_nothing():
    """FLOPs fall with capacity, attention included."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(capacity):
        layer = MoD(Block(64, Attention(64, 4), SwiGLU(64)), TopTokens(64, capacity))
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(2, 64, 64))
        return counter.get_total_flops()

    router = 2 * 2 * 64 * 64
    assert (flops(0.125) - router) * 8 == flops(1.0) - router


def test_router_parameters_are_named_router():
    layer = MixtureOfDepths(nn.Linear(D, D), D, 0.5, rule="predictor")
    names = [n for n, _ in layer.named_parameters() if not n.startswith("block.")]
    assert len(names) == 6
    assert all("router" in n for n in names)


def test_gradients_equal_those_of_a_written_out_layer():
    """Through gather, gate and scatter: against plain indexing and autograd."""
    lin = nn.Linear(D, D).double()
    layer = MixtureOfDepths(lin, D, 0.5).double()
    x = torch.randn(2, 8, D, dtype=torch.float64, requires_grad=True)
    y, (plan,) = layer(x)
    seed = torch.randn_like(y)
    params = [x, *layer.parameters()]
    fast = torch.autograd.grad(y, params, seed)
    scores = x @ layer.router.proj.weight[0] + layer.router.proj.bias
    slow_rows = []
    for b in range(2):
        rows = list(x[b])
        for t in plan.tokens[b, 0].tolist():
            g = 1 + torch.tanh(scores[b, t])
            rows[t] = (1 - g) * x[b, t] + g * lin(x[b, t])
        slow_rows.append(torch.stack(rows))
    slow = torch.autograd.grad(torch.stack(slow_rows), params, seed)
    for a, b in zip(fast, slow, strict=True):
        close(a, b)


def test_public_names():
    assert issubclass(MixtureOfDepths, dg.MixtureOfDepths)
    with pytest.raises(AttributeError):
        dg.nothing_of_the_kind  # noqa: B018
