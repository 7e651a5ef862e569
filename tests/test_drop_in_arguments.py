"""What a routed block is called with: declared arguments against loops, padding, kept tokens, causality, bad input."""

import itertools
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import depthgate as dg
from depthgate.errors import DepthgateWarning
from tests.conftest import close

D, H = 16, 2
F64 = torch.float64


class Attends(nn.Module):
    """Attention of H heads without weights, by everything a block may be given."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, H, dtype=F64))
        self.calls = 0

    def forward(self, x, bias=None, pos=None, memory=None, *, times=1.0):
        self.calls += 1
        scores = torch.einsum("btd,bsd,h->bhts", x, x, self.scale)
        if bias is not None:
            scores = scores + (bias[:, None] if bias.ndim == 3 else bias)
        if pos is not None:
            angle, shift = pos
            x = x * angle[..., None] + shift
        if memory is not None:
            x = x + memory.mean((0, 1) if memory.ndim == 2 else 1, keepdim=memory.ndim == 3)
        return x + times * torch.einsum("bhts,bsd->btd", scores.softmax(-1), x)


class Multihead(nn.Module):
    """A block around nn.MultiheadAttention."""

    def __init__(self, padding=True):
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H, batch_first=True, dtype=F64)
        if not padding:
            self.forward = self.without_padding

    def forward(self, x, attn_mask=None, key_padding_mask=None):
        return x + self.attn(x, x, x, key_padding_mask, need_weights=False, attn_mask=attn_mask)[0]

    def without_padding(self, x, attn_mask=None):
        return x + self.attn(x, x, x, need_weights=False, attn_mask=attn_mask)[0]


def pair_shapes(B, T):
    return {"TT": (T, T), "BTT": (B, T, T), "B1TT": (B, 1, T, T), "BHTT": (B, H, T, T)}


def by_loops(x, plan, call):
    """y of a routed block: rows gathered one by one, `call(b, tokens)` the block's result for them (1, k, D)."""
    y = x.clone()
    for b in range(len(x)):
        tokens = [t for t in range(x.shape[1]) if plan.chosen[b, t, 0]]
        if not tokens:
            continue
        new = call(b, tokens)
        for i, t in enumerate(tokens):
            gate = 1 + torch.tanh(plan.scores[b, t, 0])
            y[b, t] = x[b, t] + gate * (new[0, i] - x[b, t])
    return y


def pairs_by_loops(value, b, tokens):
    """(T, T), (B, T, T), (B, 1, T, T) or (B, H, T, T) -> (1, H, k, k)."""
    row = value if value.ndim == 2 else value[b]
    row = row.expand(H, *row.shape[-2:])
    picked = [[[row[h, s, t] for t in tokens] for s in tokens] for h in range(H)]
    return torch.stack([torch.stack([torch.stack(line) for line in head]) for head in picked])[None]


@settings(max_examples=60)
@given(
    B=st.integers(1, 4),
    T=st.integers(1, 6),
    capacity=st.sampled_from([0.2, 0.5, 1.0]),
    shape=st.sampled_from(["TT", "BTT", "B1TT", "BHTT"]),
    how=st.sampled_from(["top k", "causal", "mask", "mask and causal"]),
    row=st.booleans(),
    seed=st.integers(0, 99),
)
@example(B=4, T=4, capacity=0.5, shape="TT", how="mask", row=False, seed=0)  # tokens and pairs as many as rows
def test_declared_arguments_equal_gathering_by_loops(B, T, capacity, shape, how, row, seed):
    """Per token with and without rows, per pair in all shapes, shared; by position and by name; any B, T and mask."""
    torch.manual_seed(seed)
    block = Attends()
    layer = dg.MixtureOfDepths(
        block, D, capacity, per_pair=["bias"], per_token=["pos"], shared=("memory", "times")
    ).double()
    x = torch.randn(B, T, D, dtype=F64)
    bias = torch.randn(pair_shapes(B, T)[shape], dtype=F64)
    angle = torch.randn(*((B, T) if row else (T,)), dtype=F64)
    shift = torch.randn(1 if row else B, T, D, dtype=F64)
    memory = torch.randn(B, T, D, dtype=F64)
    mask = torch.rand(B, T) < 0.7 if "mask" in how else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DepthgateWarning)
        options = {"mask": mask, "causal": "causal" in how, "return_plans": True}
        y, (plan,) = layer(x, bias, (angle, shift), memory=memory, times=0.5, **options)
    assert mask is None or not plan.chosen[~mask].any()

    def call(b, tokens):
        positions = (
            torch.stack([(angle[b] if row else angle)[t] for t in tokens])[None],
            torch.stack([shift[0 if row else b, t] for t in tokens])[None],
        )
        rows = torch.stack([x[b, t] for t in tokens])[None]
        return block(rows, pairs_by_loops(bias, b, tokens), positions, memory[b : b + 1], times=0.5)

    close(y, by_loops(x, plan, call))


@pytest.mark.parametrize("padding", [True, False], ids=["padding mask", "no padding mask"])
@pytest.mark.parametrize("kind", ["additive", "boolean"])
@pytest.mark.parametrize("shape", ["TT", "BTT", "B1TT", "BHTT", "(B*H)TT"])
def test_masks_of_multihead_attention_in_all_shapes(shape, kind, padding):
    B, T = 3, 6
    block = Multihead(padding)
    layer = dg.MixtureOfDepths(block, D, 0.5).double()
    x = torch.randn(B, T, D, dtype=F64)
    given_shape = pair_shapes(B, T).get(shape, (B, H, T, T))
    value = torch.randn(given_shape, dtype=F64)
    if kind == "boolean":
        value = (value > 0) & ~torch.eye(T, dtype=torch.bool)
    for mask in (None, torch.arange(T) < torch.tensor([[6], [4], [1]])):
        given_value = value.flatten(0, 1) if shape == "(B*H)TT" else value
        y, (plan,) = layer(x, attn_mask=given_value, mask=mask, return_plans=True)

        def call(b, tokens):
            return block(x[b : b + 1, tokens], attn_mask=pairs_by_loops(value, b, tokens)[0])

        close(y, by_loops(x, plan, call))


ENCODER_CALLS = {
    "nothing": {},
    "is_causal": {"is_causal": True},
    "src_mask": {"src_mask": nn.Transformer.generate_square_subsequent_mask(8, dtype=F64)},
    "boolean src_mask": {"src_mask": torch.ones(8, 8, dtype=torch.bool).triu(1)},
    "src_mask, is_causal": {"src_mask": torch.ones(8, 8, dtype=torch.bool).triu(1), "is_causal": True},
}


@pytest.mark.parametrize("padding", [None, "boolean", "additive", "mask"])
@pytest.mark.parametrize("name", ENCODER_CALLS)
def test_encoder_layer_equals_the_plain_layer_on_routed_tokens(name, padding):
    """In training, in evaluation, and in torch's fast path without gradients. Padding is never routed."""
    plain = nn.TransformerEncoderLayer(D, H, 32, batch_first=True, dropout=0.0, dtype=F64)
    layer = dg.MixtureOfDepths(plain, D, 0.5).double()
    x = torch.randn(3, 8, D, dtype=F64)
    hidden = torch.arange(8) >= torch.tensor([[8], [5], [1]])
    call = dict(ENCODER_CALLS[name])
    if padding == "boolean":
        call["src_key_padding_mask"] = hidden
    elif padding == "additive":
        call["src_key_padding_mask"] = torch.zeros(3, 8, dtype=F64).masked_fill(hidden, -torch.inf)
    elif padding == "mask":
        call["mask"] = ~hidden
    causal = name != "nothing"

    def alone(b, tokens):
        order = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1) if causal else None
        return plain.train()(x[b : b + 1, tokens], src_mask=order)

    for training, grad in itertools.product((True, False), (True, False)):
        layer.train(training)
        with torch.set_grad_enabled(grad):
            y, (plan,) = layer(x, **call, return_plans=True)
            assert plan.chosen[..., 0].sum(1).tolist() == ([4, 4, 4] if padding is None else [4, 2, 1])
            assert padding is None or not plan.chosen[hidden].any()
            close(y, by_loops(x, plan, alone))


def test_decoder_layer_with_a_memory():
    plain = nn.TransformerDecoderLayer(D, H, 32, batch_first=True, dropout=0.0, dtype=F64)
    layer = dg.MixtureOfDepths(plain, D, 0.5).double()
    x, memory = torch.randn(2, 8, D, dtype=F64), torch.randn(2, 8, D, dtype=F64)
    hidden = torch.arange(8) >= torch.tensor([[8], [6]])
    y, (plan,) = layer(x, memory, memory_key_padding_mask=hidden, tgt_is_causal=True, return_plans=True)

    def alone(b, tokens):
        order = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        return plain(x[b : b + 1, tokens], memory[b : b + 1, : 8 - 2 * b], tgt_mask=order)

    close(y, by_loops(x, plan, alone))


@pytest.mark.parametrize("dims", [2, 4])
def test_a_decoder_layer_of_transformers(dims):
    """hidden_states, attention_mask (additive of four axes, or a padding mask of two), position_embeddings."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    sizes = {"hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 8}
    config = LlamaConfig(**sizes, num_attention_heads=H, attn_implementation="eager")
    plain = LlamaDecoderLayer(config, 0).double()
    layer = dg.MixtureOfDepths(plain, D, 0.5).double()
    x = torch.randn(2, 8, D, dtype=F64)
    ids = torch.arange(8)[None]
    rotary = LlamaRotaryEmbedding(config)
    real = torch.arange(8) >= torch.tensor([[0], [3]])  # padding on the left
    order = torch.zeros(2, 1, 8, 8, dtype=F64).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
    call = {"attention_mask": order, "mask": real} if dims == 4 else {"attention_mask": real.long()}
    if dims == 2:  # eager attention of transformers adds what it is given; so does the one below
        plain.self_attn.forward = _of_padding(plain.self_attn.forward)
    y, (plan,) = layer(x, position_ids=ids, position_embeddings=rotary(x, ids), **call, return_plans=True)
    assert torch.equal(plan.valid, real)
    assert plan.chosen[..., 0].sum(1).tolist() == [4, 2]

    def alone(b, tokens):
        where = torch.tensor([tokens])
        mask = order[:1, :, : len(tokens), : len(tokens)]
        if dims == 2:
            mask = torch.ones(1, len(tokens), dtype=torch.long)
        return plain(x[b : b + 1, tokens], mask, where, position_embeddings=rotary(x, where))

    close(y, by_loops(x, plan, alone))


def _of_padding(forward):
    """An attention that takes a padding mask (B, k), as those of flash attention do, and insists on its shape."""

    def changed(hidden_states, attention_mask, **more):
        assert attention_mask.shape == hidden_states.shape[:2]
        assert attention_mask.all()
        return forward(hidden_states, attention_mask=None, **more)

    return changed


# Arguments that are not what they are declared as, or not declared.
class Takes(nn.Module):
    def forward(self, x, pos=None, pairs=None, past_key_values=None, *, flag=False):
        return x


B, T = 2, 5
X = torch.randn(B, T, D)
BAD_CALLS = {
    "undeclared rows": ({}, {"pos": torch.zeros(B, T, 3)}, r"pos has shape \(2, 5, 3\).*per_token=\['pos'\]"),
    "undeclared tokens": ({}, {"pos": torch.zeros(T)}, r"pos has shape \(5,\).*per_token"),
    "undeclared (1, T)": ({}, {"pos": torch.zeros(1, T)}, r"pos has shape \(1, 5\)"),
    "undeclared pairs": ({}, {"pairs": torch.zeros(B, 1, T, T)}, r"pairs has shape.*per_pair=\['pairs'\]"),
    "undeclared in a tuple": ({}, {"pos": (torch.zeros(B, T), 1)}, r"pos has shape \(2, 5\)"),
    "undeclared (B, H, T)": ({}, {"pos": torch.zeros(B, 3, T)}, r"pos has shape \(2, 3, 5\).*per_row=\['pos'\]"),
    "undeclared (B, H, T, d)": ({}, {"pos": torch.zeros(B, 3, T, 4)}, r"pos has shape \(2, 3, 5, 4\)"),
    "not per token": ({"per_token": ["pos"]}, {"pos": torch.zeros(B, 3)}, r"pos has shape \(2, 3\): per_token needs"),
    "not per pair": ({"per_pair": ["pairs"]}, {"pairs": torch.zeros(B, T)}, r"pairs has shape \(2, 5\): per_pair"),
    "too few axes": ({"per_pair": ["pairs"]}, {"pairs": torch.zeros(T)}, r"pairs has shape \(5,\): per_pair"),
    "rows of pairs": ({"per_pair": ["pairs"]}, {"pairs": torch.zeros(3, T, T)}, r"pairs has shape \(3, 5, 5\)"),
    "a cache": ({}, {"past_key_values": object()}, "past_key_values is given, but a routed block keeps no cache"),
    "mask shape": ({}, {"mask": torch.ones(B, T + 1, dtype=torch.bool)}, r"mask is \(2, 6\).*\(2, 5\)"),
    "mask dtype": ({}, {"mask": torch.ones(B, T)}, "mask has dtype torch.float32"),
    "mask list": ({}, {"mask": [True] * T}, "mask is list"),
    "keep shape": ({}, {"keep": torch.ones(T, dtype=torch.bool)}, r"keep is \(5,\).*\(2, 5\)"),
    "keep number": ({}, {"keep": 1}, "keep is int"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_argument_of_a_call_is_named(name):
    declared, call, text = BAD_CALLS[name]
    layer = dg.MixtureOfDepths(Takes(), D, 0.5, **declared)
    with pytest.raises(dg.DepthgateError, match=text):
        layer(X, **call)


def test_too_many_arguments_by_position():
    with pytest.raises(dg.DepthgateError, match="takes 3 arguments by position after x, not 4"):
        dg.MixtureOfDepths(Takes(), D, 0.5)(X, None, None, None, None)


def test_the_wrong_shape_of_a_padding_mask_is_named():
    layer = dg.MixtureOfDepths(nn.TransformerEncoderLayer(D, H, 32, batch_first=True), D, 0.5)
    with pytest.raises(dg.DepthgateError, match=r"src_key_padding_mask is \(2, 4\).*\(2, 5\)"):
        layer(X, src_key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))


BAD_OPTIONS = {
    "unknown": ({"per_token": ["place"]}, "per_token names 'place': the block's arguments after the first are"),
    "x itself": ({"shared": ["x"]}, "shared names 'x'"),
    "our own": ({"per_token": ["mask"]}, "per_token names 'mask'"),
    "twice": ({"per_token": ["pos"], "shared": ["pos"]}, "'pos' is declared as per_token and as shared"),
    "twice in one": ({"per_pair": ["pairs", "pairs"]}, "'pairs' is declared as per_pair and as per_pair"),
    "a string": ({"per_pair": "pairs"}, r"per_pair is 'pairs': it must be a list of names"),
    "no list": ({"shared": 3}, "shared is 3"),
    "keep": ({"keep": -1}, "keep is -1"),
    "keep share": ({"keep": 0.5}, "keep is 0.5"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_bad_declaration_is_named(name):
    options, text = BAD_OPTIONS[name]
    with pytest.raises(dg.DepthgateError, match=text):
        dg.MixtureOfDepths(Takes(), D, 0.5, **options)


def test_tensors_of_another_shape_need_no_declaration():
    """Neither B and T nor T first: nothing to gather, and handed on as they are."""

    class Scales(nn.Module):
        def forward(self, x, by):
            assert by.shape == (3, 7)
            return x * by.sum()

    layer = dg.MixtureOfDepths(Scales(), D, 1.0, gate=torch.ones_like)
    close(layer(X, torch.ones(3, 7)), 21 * X)


# Blocks that cannot be routed.
class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (lambda x: None, "block returned a NoneType"),
        (lambda x: x[:, :1], r"block returned torch.float32 of shape \(2, 1, 16\) for an input of shape \(2, 2, 16\)"),
        (lambda x: x.sum(), r"block returned torch.float32 of shape \(\)"),
        (lambda x: (x, x), "block returned a tuple"),
        (lambda x: x.long(), "block returned torch.int64"),
    ],
)
def test_a_block_that_changes_shape_or_returns_something_else(what, text):
    with pytest.raises(dg.DepthgateError, match=text):
        dg.MixtureOfDepths(Returns(what), D, 0.5)(X)


def test_a_routed_layer_in_itself_is_refused():
    inner = dg.MixtureOfDepths(nn.Linear(D, D), D, 0.25)
    with pytest.raises(dg.DepthgateError, match=r"block is a MixtureOfDepths itself, of capacity 0.25"):
        dg.MixtureOfDepths(inner, D, 0.5)
    inner.block = inner
    with pytest.raises(dg.DepthgateError, match="block holds this layer itself"):
        inner(X)


# Tokens that are kept.
@settings(max_examples=40)
@given(
    T=st.integers(4, 9), keep=st.integers(0, 2), left=st.integers(0, 3), causal=st.booleans(), seed=st.integers(0, 99)
)
def test_the_first_real_tokens_are_always_routed(T, keep, left, causal, seed):
    torch.manual_seed(seed)
    layer = dg.MixtureOfDepths(Takes(), D, 0.5, keep=keep)
    with torch.no_grad():
        layer.router.proj.weight[0] = torch.tensor([1.0] + [0.0] * (D - 1))
        layer.router.proj.bias.fill_(-0.1)
    x = torch.randn(2, T, D)
    x[:, :, 0] = torch.arange(T) - T  # the later, the better: the first tokens would never be among them
    x[:, -1, 0] = 1.0
    mask = torch.arange(T) >= torch.tensor([[left], [0]])
    real = [T - left, T]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DepthgateWarning)
        _, (plan,) = layer(x, mask=mask, causal=causal, return_plans=True)
    for b, n in enumerate(real):
        count = max(1, n // 2)
        first = list(range(T - n, T - n + keep))
        # The best of the rest fill what kept tokens leave of the budget.
        expected = {*first, T - 1} if causal else {*first[:count], *range(T - max(0, count - keep), T)}
        assert {*plan.chosen[b, :, 0].nonzero()[:, 0].tolist()} == expected


def test_a_mask_of_tokens_to_keep_joins_the_number():
    layer = dg.MixtureOfDepths(Takes(), D, 0.5, keep=1)
    x = torch.randn(2, 8, D)
    keep = torch.zeros(2, 8, dtype=torch.bool)
    keep[0, 5] = keep[1, 2] = True
    with torch.no_grad():
        layer.router.proj.weight.zero_()
    for causal in (False, True):
        layer.router.proj.bias.data.fill_(-1.0)
        _, (plan,) = layer(x, keep=keep, causal=causal, return_plans=True)
        chosen = plan.chosen[..., 0]
        assert chosen[:, 0].all()
        assert chosen[keep].all()
        assert chosen.sum(1).tolist() == ([2, 2] if causal else [4, 4])


def test_more_kept_tokens_than_the_capacity_takes():
    layer = dg.MixtureOfDepths(Takes(), D, 0.25, keep=3)
    assert layer(torch.randn(1, 12, D)).shape == (1, 12, D)
    with pytest.raises(dg.DepthgateError, match=r"keep is 3, but capacity 0.25 takes 2 of 8 tokens"):
        layer(torch.randn(1, 8, D))


# A causal choice around a block that is not causal.
class CausalAttends(Attends):
    def forward(self, x):
        T = x.shape[1]
        return super().forward(
            x, torch.zeros(T, T, dtype=x.dtype).masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
        )


def all_chosen(layer):
    with torch.no_grad():
        layer.router.proj.weight.zero_()
    return layer.double()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_a_block_that_looks_ahead_warns_once(grad, masked):
    x = torch.randn(2, 6, D, dtype=F64)
    mask = torch.arange(6) < torch.tensor([[6], [3]]) if masked else None
    plain = nn.TransformerEncoderLayer(D, H, 32, batch_first=True, dtype=F64)
    for block in (Attends(), plain, Multihead()):
        layer = all_chosen(dg.MixtureOfDepths(block, D, 0.5))
        with torch.set_grad_enabled(grad), pytest.warns(DepthgateWarning, match="looks at later tokens") as caught:
            layer(x, causal=True, mask=mask)
        assert len(caught) == 1
        assert type(block).__name__ in str(caught[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DepthgateWarning)
            layer(x, causal=True, mask=mask)


@pytest.mark.parametrize("grad", [True, False])
def test_a_causal_block_or_a_choice_of_the_top_k_never_warns(grad):
    x = torch.randn(2, 6, D, dtype=F64)
    plain = nn.TransformerEncoderLayer(D, H, 32, batch_first=True, dtype=F64)
    order = torch.ones(6, 6, dtype=torch.bool).triu(1)
    cases = [
        (CausalAttends(), {"causal": True}),
        (nn.Linear(D, D), {"causal": True}),
        (plain, {"causal": True, "is_causal": True}),
        (plain, {"causal": True, "src_mask": order}),
        (Multihead(), {"causal": True, "attn_mask": order}),
        (Attends(), {}),
        (plain, {}),
    ]
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("error", DepthgateWarning)
        for block, call in cases:
            layer = all_chosen(dg.MixtureOfDepths(block, D, 0.5))
            for _ in range(2):
                layer(x, **call)


def test_looking_ahead_is_seen_once_a_branch_that_starts_at_zero_has_grown():
    class Starts(Attends):
        def forward(self, x):
            return x + self.grown * (super().forward(x) - x)

    layer = all_chosen(dg.MixtureOfDepths(Starts(), D, 0.5))
    layer.block.grown = 0.0
    x = torch.randn(2, 6, D, dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DepthgateWarning)
        layer(x, causal=True)
    layer.block.grown = 1.0
    with pytest.warns(DepthgateWarning, match="looks at later tokens"):
        layer(x, causal=True)


@pytest.mark.parametrize("training", [True, False])
def test_losses_of_experts_in_a_causal_block_do_not_count_as_looking_ahead(training):
    class Experts(CausalAttends):
        def __init__(self):
            super().__init__()
            self.experts = dg.MixtureOfExperts(D, 4, hidden=8)

        def forward(self, x):
            x = super().forward(x)
            return x + self.experts(x)

    layer = all_chosen(dg.MixtureOfDepths(Experts(), D, 0.5)).train(training)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DepthgateWarning)
        layer(torch.randn(2, 6, D, dtype=F64), causal=True)


@pytest.mark.parametrize(("reentrant", "grad"), [(False, True), (False, False), (True, True)])
def test_a_checkpoint_around_the_layer_changes_nothing_while_it_is_looked_at(reentrant, grad):
    x = torch.randn(2, 6, D, dtype=F64, requires_grad=grad)
    layer = all_chosen(dg.MixtureOfDepths(CausalAttends(), D, 0.5))
    plain = all_chosen(dg.MixtureOfDepths(CausalAttends(), D, 0.5))
    for _ in range(4):
        y = torch.utils.checkpoint.checkpoint(lambda x: layer(x, causal=True), x, use_reentrant=reentrant)
        grads = []
        for result in (y, plain(x, causal=True)):
            layer.zero_grad()
            plain.zero_grad()
            result.square().sum().backward()
            grads.append((layer if result is y else plain).block.scale.grad)
        close(*grads)


def test_looking_ahead_is_seen_without_another_call_and_without_a_change():
    x = torch.randn(2, 6, D, dtype=F64, requires_grad=True)
    layers = [all_chosen(dg.MixtureOfDepths(Attends(), D, 0.5, losses=None)) for _ in range(2)]
    layers[1]._looks = 2  # the third call is not looked at
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DepthgateWarning)
        results = [layer(x, causal=True) for layer in layers]
    assert layers[0].block.calls == 1
    close(results[0], results[1])
    grads = [torch.autograd.grad(y.square().sum(), [x, *m.parameters()]) for y, m in zip(results, layers, strict=True)]
    for a, b in zip(*grads, strict=True):
        close(a, b)
    with torch.no_grad():
        assert not layers[0](x, causal=True).requires_grad


def test_the_mask_of_a_memory_loses_the_queries_that_skip():
    """(T, S) and (B * H, T, S) of torch's decoder layer."""
    plain = nn.TransformerDecoderLayer(D, H, 32, batch_first=True, dropout=0.0, dtype=F64)
    layer = dg.MixtureOfDepths(plain, D, 0.5).double()
    x, memory = torch.randn(2, 6, D, dtype=F64), torch.randn(2, 5, D, dtype=F64)
    for mask in (torch.rand(6, 5) < 0.3, torch.rand(2 * H, 6, 5) < 0.3):
        y, (plan,) = layer(x, memory, memory_mask=mask, return_plans=True)

        def call(b, tokens, mask=mask):
            mine = mask[tokens] if mask.ndim == 2 else mask[b * H : (b + 1) * H, tokens]
            return plain(x[b : b + 1, tokens], memory[b : b + 1], memory_mask=mine)

        close(y, by_loops(x, plan, call))


def test_the_hint_of_a_causal_memory_mask_changes_nothing():
    plain = nn.TransformerDecoderLayer(D, H, 32, batch_first=True, dropout=0.0, dtype=F64)
    layer = dg.MixtureOfDepths(plain, D, 0.5).double()
    x, memory = torch.randn(2, 8, D, dtype=F64), torch.randn(2, 8, D, dtype=F64)
    order = torch.ones(8, 8, dtype=torch.bool).triu(1)
    y, (plan,) = layer(x, memory, memory_mask=order, memory_is_causal=True, return_plans=True)
    close(y, by_loops(x, plan, lambda b, t: plain(x[b : b + 1, t], memory[b : b + 1], memory_mask=order[t])))


def test_a_bad_mask_of_a_memory_is_named():
    layer = dg.MixtureOfDepths(nn.TransformerDecoderLayer(D, H, 32, batch_first=True), D, 0.5)
    for shape in ((3, 4, 7), (B, 7)):
        with pytest.raises(dg.DepthgateError, match=r"memory_mask has shape .*: it needs \(5, S\), \(2, 5, S\)"):
            layer(X, memory=torch.randn(B, 7, D), memory_mask=torch.zeros(shape))


class Sees(nn.Module):
    """Attention of one head without weights, whose masks are those of scaled_dot_product_attention."""

    def forward(self, x, attention_mask=None, attn_mask=None):
        mask = attn_mask if attention_mask is None else attention_mask
        mask = mask if mask is None or mask.ndim == 2 else mask[:, 0] if mask.ndim == 4 else mask
        return x + nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("name", ["attn_mask", "attention_mask"])
def test_masks_of_four_axes_tell_of_padding(name, queries, kind, causal):
    """As naflexvit of timm has them: rows with padding are what they are without."""
    real = torch.arange(8) < torch.tensor([[8], [5], [2]])
    seen = real[:, None, None].expand(3, 1, queries, 8)
    mask = seen if kind == "boolean" else torch.zeros(seen.shape, dtype=F64).masked_fill(~seen, -torch.inf)
    layer = dg.MixtureOfDepths(Sees(), D, 0.5).double()
    x = torch.randn(3, 8, D, dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DepthgateWarning)
        y, (plan,) = layer(x, **{name: mask}, causal=causal, return_plans=True)
        assert torch.equal(plan.valid, real)
        for b, n in enumerate((8, 5, 2)):
            close(y[b, :n], layer(x[b : b + 1, :n], causal=causal)[0])


def test_hidden_keys_of_multihead_attention_are_padding():
    hidden = torch.arange(6) >= torch.tensor([[6], [3]])
    layer = dg.MixtureOfDepths(Multihead(padding=False), D, 0.5).double()
    x = torch.randn(2, 6, D, dtype=F64)
    y, (plan,) = layer(x, attn_mask=hidden[:, None, None].expand(2, 1, 6, 6), return_plans=True)
    assert torch.equal(plan.valid, ~hidden)
    close(y, by_loops(x, plan, lambda b, t: layer.block(x[b : b + 1, t])))


# One name, several forms.
class Masked(nn.Module):
    def forward(self, x, attention_mask=None):
        self.got = attention_mask
        return x


def test_an_attention_mask_of_two_axes_is_of_tokens_or_of_pairs():
    layer = dg.MixtureOfDepths(Masked(), D, 0.5)
    order = torch.ones(T, T, dtype=torch.bool).tril()
    for mask in (order, order.long(), order.float()):
        _, (plan,) = layer(X, attention_mask=mask, return_plans=True)
        rows = [mask[t[0]][:, t[0]] for t in plan.tokens]
        assert torch.equal(layer.block.got, torch.stack(rows)[:, None])
        assert plan.valid is None
    real = torch.tensor([[True] * T, [True] * 2 + [False] * 3])
    for mask in (real, real.long()):
        assert torch.equal(layer(X, attention_mask=mask, return_plans=True)[1][0].valid, real)


@pytest.mark.parametrize(("rows", "shape"), [(T, (T, T)), (1, (1, T)), (2, (2, T))])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_an_attention_mask_that_may_mean_two_things_is_refused_until_it_is_declared(rows, shape, dtype):
    x, mask = torch.randn(rows, T, D), torch.ones(shape, dtype=dtype)
    mask[:, -1] = 0
    if rows == T or dtype == torch.float32:
        with pytest.raises(dg.DepthgateError, match=r"per_token=.*padding_keyword=.*per_pair="):
            dg.MixtureOfDepths(Masked(), D, 0.5)(x, attention_mask=mask)
    layer = dg.MixtureOfDepths(Masked(), D, 0.5, per_token=["attention_mask"])
    assert torch.equal(layer(x, attention_mask=mask, return_plans=True)[1][0].valid, mask != 0)
    if rows == T:
        layer = dg.MixtureOfDepths(Masked(), D, 0.5, per_pair=["attention_mask"])
        assert layer(x, attention_mask=mask, return_plans=True)[1][0].valid is None
        assert layer.block.got.shape == (T, 1, 2, 2)


def test_rows_of_one_length_that_are_as_many_as_tokens_are_still_rows():
    real = torch.ones(T + 1, T, dtype=torch.bool)
    real[0, 2:] = False
    layer = dg.MixtureOfDepths(Masked(), D, 0.5)
    _, (plan,) = layer(torch.randn(T + 1, T, D), attention_mask=real, return_plans=True)
    assert plan.chosen.sum(1).flatten().tolist() == [1] + [2] * T
    assert layer.block.got.shape == (T, 2)


def test_booleans_of_four_axes_for_multihead_attention_are_refused_until_they_are_declared():
    class Named(Multihead):
        def forward(self, x, attention_mask=None):
            return self.without_padding(x, attention_mask)

    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1).expand(2, 1, 6, 6)
    x = torch.randn(2, 6, D, dtype=F64)
    with pytest.raises(dg.DepthgateError, match=r"of four axes.*per_pair=\['attention_mask'\]"):
        dg.MixtureOfDepths(Named(), D, 0.5).double()(x, attention_mask=hidden)
    layer = dg.MixtureOfDepths(Named(), D, 0.5, per_pair=["attention_mask"]).double()
    y, (plan,) = layer(x, attention_mask=hidden, return_plans=True)
    assert plan.valid is None
    close(y, by_loops(x, plan, lambda b, t: layer.block(x[b : b + 1, t], pairs_by_loops(hidden, b, t)[0])))


def test_the_mask_of_an_encoder_has_a_row_for_each_row():
    class Crosses(nn.Module):
        def forward(self, x, encoder_attention_mask):
            self.got = encoder_attention_mask
            return x

    for rows in (3, T):
        mask, layer = torch.rand(rows, 4) < 0.5, dg.MixtureOfDepths(Crosses(), D, 0.5)
        layer(torch.randn(rows, T, D), encoder_attention_mask=mask)
        assert torch.equal(layer.block.got, mask)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float64])
def test_keys_that_no_query_of_a_transformers_mask_sees_are_padding(kind):
    class Layer(nn.Module):
        def forward(self, hidden_states, attention_mask=None):
            assert attention_mask.shape[-2:] == (hidden_states.shape[1],) * 2
            return hidden_states + 1

    real = torch.tensor([[False] * 3 + [True] * 5, [True] * 8])
    seen = (real[:, None] & torch.ones(8, 8, dtype=torch.bool).tril())[:, None]
    mask = seen if kind == torch.bool else torch.zeros(seen.shape, dtype=kind).masked_fill(~seen, torch.finfo(kind).min)
    _, (plan,) = dg.MixtureOfDepths(Layer(), D, 0.5)(torch.randn(2, 8, D), attention_mask=mask, return_plans=True)
    assert torch.equal(plan.valid, real)
    assert plan.chosen.sum(1).flatten().tolist() == [2, 4]


def test_large_negative_numbers_of_a_padding_mask_are_padding():
    layer = dg.MixtureOfDepths(nn.TransformerEncoderLayer(D, H, 32, batch_first=True), D, 0.5)
    for low in (-1e9, torch.finfo(torch.float32).min, -torch.inf):
        mask = torch.zeros(2, 8)
        mask[1, 4:] = low
        _, (plan,) = layer(torch.randn(2, 8, D), src_key_padding_mask=mask, return_plans=True)
        assert torch.equal(plan.valid, mask == 0)


class Slopes(nn.Module):
    """Takes a tensor that has as many entries as the batch has rows, but none for a row."""

    def forward(self, x, slopes):
        return x + slopes.sum() * x.mean(1, keepdim=True)


def test_a_shared_tensor_as_long_as_the_batch_stays_whole():
    x, slopes = torch.randn(4, 8, D, dtype=F64), torch.randn(4, dtype=F64)
    mask = torch.arange(8) < torch.tensor([[8], [5], [0], [2]])
    for options in ({"shared": ["slopes"]}, {}):
        layer = dg.MixtureOfDepths(Slopes(), D, 0.5, **options).double()
        y, (plan,) = layer(x, slopes=slopes, mask=mask, return_plans=True)
        close(y, by_loops(x, plan, lambda b, tokens: Slopes()(x[b : b + 1, tokens], slopes)))
        assert torch.equal(layer(x, slopes=slopes, mask=torch.zeros_like(mask)), x)


def test_entries_of_rows_go_with_their_rows():
    """As a condition (B, D): the block gets each routed token once."""

    class Conditioned(nn.Module):
        def forward(self, x, c):
            tokens.append(x.shape[0] * x.shape[1])
            return x * c[:, None]

    tokens = []
    x, c = torch.randn(4, 8, D, dtype=F64), torch.randn(4, D, dtype=F64)
    mask = torch.arange(8) < torch.tensor([[8], [5], [0], [4]])
    layer = dg.MixtureOfDepths(Conditioned(), D, 0.5, per_row=["c"]).double()
    y, (plan,) = layer(x, c, mask=mask, return_plans=True)
    assert sum(tokens) == plan.chosen.sum() == 4 + 2 + 2
    close(y, by_loops(x, plan, lambda b, t: x[b : b + 1, t] * c[b]))


@pytest.mark.parametrize("options", [{}, {"shared": ["slopes"]}, {"per_row": ["slopes"]}])
def test_what_lies_in_padding_never_reaches_a_gradient(options):
    class Normalises(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, x, slopes):
            return x + self.weight * x / x.norm(dim=-1, keepdim=True) * slopes.mean()

    mask = torch.arange(8) < torch.tensor([[8], [4], [2], [0]])
    x = torch.randn(4, 8, D).masked_fill(~mask[..., None], torch.nan).requires_grad_()
    layer = dg.MixtureOfDepths(Normalises(), D, 0.5, **options)
    layer(x, torch.randn(4), mask=mask)[mask].sum().backward()
    assert layer.block.weight.grad.isfinite().all()
    assert layer.router.proj.weight.grad.isfinite().all()
    assert x.grad[mask].isfinite().all()


def test_a_block_may_have_a_mask_of_its_own():
    class Own(nn.Module):
        def forward(self, x, mask):
            return x + (mask[:, 0] if mask.ndim == 4 else mask).double().softmax(-1) @ x

    x, bias = torch.randn(2, 6, D, dtype=F64), torch.randn(2, 6, 6, dtype=F64)
    layer = dg.MixtureOfDepths(Own(), D, 0.5, per_pair=["mask"]).double()
    for call in ({"mask": bias}, {}):
        y, (plan,) = layer(x, *([] if call else [bias]), **call, return_plans=True)
        close(y, by_loops(x, plan, lambda b, t: Own()(x[b : b + 1, t], pairs_by_loops(bias, b, t)[:, 0])))
