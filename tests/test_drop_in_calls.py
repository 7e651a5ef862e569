"""How a routed layer calls its block: signatures, tuples, empty batches, wrappers, what cannot be routed."""

import copy
import dataclasses
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import depthgate as dg
from depthgate.errors import DepthgateWarning, warn_once
from depthgate.routing import causal_bce, z_loss
from tests.conftest import close
from tests.vision import package

D, H = 16, 2
F64 = torch.float64
X = torch.randn(2, 8, D, dtype=F64, generator=torch.Generator().manual_seed(5))


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(D, H, 32, batch_first=True, dropout=0.0, dtype=F64, **options)


def routed(block, capacity=0.5, **options):
    return dg.MixtureOfDepths(block, D, capacity, **options).double()


# Signatures.
class Any(nn.Module):
    def forward(self, x, *args, scale=1.0):
        return x + scale * sum(args)


class Unnamed(nn.Module):
    def forward(self, x, by, plus=0.0, /):
        return x * by + plus


class Everything(nn.Module):
    def forward(self, *args, **kwargs):
        x, by = args
        return x * by + kwargs["plus"]


class Own(nn.Module):
    def forward(self, hidden_states, by=1.0, keep=None):
        return hidden_states * by + (0 if keep is None else keep[..., None].double())


def through(plan, new, x=X):
    """x with each routed token moved towards its row of `new` (B, T, D)."""
    gate = torch.zeros_like(plan.scores).scatter(1, plan.tokens.mT, plan.gates.mT)
    return x + gate * (new - x)


def test_blocks_that_take_arguments_by_position_alone():
    pos = torch.arange(8.0, dtype=F64)[:, None]
    y, (plan,) = routed(Any(), per_token=["args"])(X, pos, 2 * pos, scale=0.5, return_plans=True)
    close(y, through(plan, X + 1.5 * pos))
    y, (plan,) = routed(Unnamed())(X, 3.0, 1.0, return_plans=True)
    close(y, through(plan, 3 * X + 1))
    y, (plan,) = routed(Everything())(X, 3.0, plus=1.0, return_plans=True)
    close(y, through(plan, 3 * X + 1))


def test_x_by_the_name_that_the_block_has_for_it():
    layer = routed(Own())
    close(layer(hidden_states=X, by=2.0), layer(X, 2.0))
    close(routed(Own())(x=X), X)


def test_a_block_may_have_a_keep_of_its_own():
    keep = torch.rand(2, 8) < 0.5
    y, (plan,) = routed(Own(), per_token=["keep"])(X, keep=keep, return_plans=True)
    close(y, through(plan, X + keep[..., None].double()))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: routed(Own())(X, 2.0, by=3.0), "by is given by name, but also"),
        (lambda: routed(Own())(X, hidden_states=X), "hidden_states is given by name, but also"),
        (lambda: routed(Own())(by=2.0), "x is a NoneType"),
        (lambda: routed(Unnamed())(X, by=2.0), "by is given by name.*to be given, by position"),
        (lambda: routed(Any())(X, args=(1,)), "args is given by name.*to be given, by position"),
        (lambda: routed(Any())(X, torch.zeros(2, 8, 1)), r"args has shape \(2, 8, 1\).*per_token=\['args'\]"),
        (
            lambda: routed(Own(), padding_keyword="padd"),
            "padding_keyword is 'padd'.* by, keep",
        ),
        (lambda: routed(Own(), padding_keyword=3), "padding_keyword is 3"),
        (
            lambda: routed(Own(), padding_keyword="by", shared=["by"]),
            "padding_keyword is 'by': it must name an argument per token",
        ),
        (lambda: routed(Own())(X, keep=torch.ones(2, 8)), "keep has dtype torch.float32.*must be bool"),
        (lambda: routed(Own())(X, rope=torch.zeros(7, 4)), "rope is given, timm's positions of all patches"),
    ],
)
def test_a_bad_call_is_named(call, text):
    with pytest.raises(dg.DepthgateError, match=text):
        call()


def test_a_block_whose_causal_is_its_own_cannot_declare_it():
    class Causal(nn.Module):
        def forward(self, x, causal=False):
            return x

    with pytest.raises(dg.DepthgateError, match="'causal', an argument of MixtureOfDepths"):
        routed(Causal(), shared=["causal"])


def test_tensors_inside_objects_are_refused_unless_shared():
    @dataclasses.dataclass
    class Context:
        pos: torch.Tensor

    class Reads(nn.Module):
        def forward(self, x, context):
            return x + context.pos.sum()

    context = Context(torch.ones(8, dtype=F64))
    for given in (context, [context]):
        with pytest.raises(dg.DepthgateError, match=r"context has tensors in a Context.*shared=\['context'\]"):
            routed(Reads())(X, given)
    y, (plan,) = routed(Reads(), shared=["context"])(X, context, return_plans=True)
    close(y, through(plan, X + 8))


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, lambda block: torch.compile(block, backend="eager")])
def test_wrapped_layers_are_known_as_what_they_are(wrap):
    """Padding, causal hints and masks by position, with checkpoints and a compiled block."""
    plain = encoder_layer()
    padding = torch.arange(8) >= torch.tensor([[8], [5]])
    layer = routed(plain)
    wrapped = copy.deepcopy(layer)
    wrapped = dg.MixtureOfDepths(wrap(wrapped.block), D, 0.5).double()
    wrapped.router.load_state_dict(layer.router.state_dict())
    order = torch.ones(8, 8, dtype=torch.bool).triu(1)
    for args, call in (((), {}), ((order,), {}), ((), {"is_causal": True}), ((), {"src_key_padding_mask": padding})):
        close(wrapped(X, *args, **call), layer(X, *args, **call))
    with pytest.raises(dg.DepthgateError, match="batch_first=False"):
        routed(wrap(nn.TransformerEncoderLayer(D, H)))


# Results.
class Returns(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.linear, self.form = nn.Linear(D, D, dtype=F64), form

    def forward(self, x):
        return self.form(x + self.linear(x))


def test_a_tuple_comes_back_as_a_tuple():
    """As older layers of transformers return (hidden_states,), or (hidden_states, None)."""
    mask = torch.arange(8) < torch.tensor([[8], [3]])
    for more in ((), (None,), (None, None)):
        block = Returns(lambda y, more=more: (y, *more))
        layer = routed(block)
        for call in ({}, {"mask": mask}, {"mask": mask, "causal": True}):
            (y, *rest), (plan,) = layer(X, **call, return_plans=True)
            assert tuple(rest) == more
            close(y, through(plan, X + block.linear(X)))
        with torch.no_grad():  # a pass in which no token is routed has the same form
            assert torch.equal(layer(X, mask=torch.zeros_like(mask))[0], X)
        never = routed(Returns(lambda y, more=more: (y, *more)))  # nor has ever been
        with torch.no_grad():
            never.router.proj.bias.fill_(-100.0)
            for call in ({"causal": True}, {"mask": torch.zeros_like(mask)}):
                y, *rest = copy.deepcopy(never)(X, **call)
                assert torch.equal(y, X)
                assert tuple(rest) == more
    model = nn.Sequential(routed(Returns(lambda y: (y,))))
    model.compile(backend="aot_eager", fullgraph=True)
    assert isinstance(model(X), tuple)


@torch.no_grad()
def test_a_result_is_never_the_input_itself():
    layer, x = routed(nn.Linear(D, D)), X.clone()
    layer.router.proj.bias.fill_(-100.0)
    for call in ({"causal": True}, {"mask": torch.zeros(2, 8, dtype=torch.bool)}):
        for _ in range(2):
            y = layer(x, **call)
            y += 1
            assert torch.equal(x, X)


@pytest.mark.parametrize("shape", [(0, 8, D), (2, 0, D), (0, 0, D)])
@pytest.mark.parametrize(
    "build",
    [
        lambda: routed(encoder_layer(), keep=1),
        lambda: routed(nn.Linear(D, D), rule="predictor", keep=1),
        lambda: dg.MixtureOfExperts(D, 4, hidden=8).double(),
        lambda: dg.MixtureOfExperts(D, 4, choice="experts", hidden=8, rule="predictor").double(),
        lambda: dg.SoftMoE(D, 2).double(),
    ],
)
def test_an_empty_batch_gives_every_parameter_a_gradient_of_zero(build, shape):
    """One process of several may have no rows left, and the others wait for its gradients."""
    for dtype, masked in itertools.product((F64, torch.float32), (False, True)):
        layer, x = build().to(dtype), torch.randn(shape, dtype=dtype)
        mask = torch.ones(shape[:2], dtype=torch.bool) if masked else None
        y = layer(x, mask=mask)
        assert y.shape == shape
        y.sum().backward()
        for name, weight in layer.named_parameters():
            assert weight.grad is not None, name
            assert not weight.grad.any(), name


# Blocks that cannot be routed.
def test_a_layer_within_itself_is_refused_however_deep():
    layer = routed(nn.Sequential(nn.Linear(D, D)))
    layer.block.append(layer)
    with pytest.raises(dg.DepthgateError, match="block holds this layer itself"):
        layer(X)


def test_tables_over_all_places_are_refused():
    timm = package("timm")
    beit = timm.create_model("beit_base_patch16_224", img_size=32, depth=1)
    with pytest.raises(dg.DepthgateError, match="block has relative_position_bias_table"):
        dg.MixtureOfDepths(beit.blocks[0], 768)
    eva = timm.create_model("eva02_tiny_patch14_224", img_size=28, depth=1)
    eva.blocks[0] = dg.MixtureOfDepths(eva.blocks[0], 192, 0.5)
    with pytest.raises(dg.DepthgateError, match="rope is given, timm's positions"):
        eva(torch.randn(1, 3, 28, 28))


def test_an_error_of_the_block_says_how_many_tokens_it_got():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(8, D, dtype=F64))

        def forward(self, x):
            return x + self.table

    with pytest.raises(RuntimeError, match="must match the size") as caught:
        routed(Fixed())(X)
    assert "got 4 tokens of each row" in caught.value.__notes__[0]


def test_exporting_what_differs_from_row_to_row_is_refused():
    mask = torch.ones(2, 8, dtype=torch.bool)
    with pytest.raises(Exception, match="export needs a padding_keyword"):
        torch.export.export(routed(nn.Linear(D, D)).eval(), (X,), {"mask": mask})


# Masks that are not what they seem.
def test_integer_masks_of_pairs_are_those_of_booleans():
    """As DeBERTa has them: 0 where a query does not see a key."""

    class Layer(nn.Module):
        def forward(self, hidden_states, attention_mask):
            seen = attention_mask[:, 0].bool()
            return hidden_states + torch.where(seen, 0.0, -torch.inf).double().softmax(-1) @ hidden_states

    real = torch.arange(8) < torch.tensor([[8], [5]])
    pairs = (real[:, None] & real[:, :, None])[:, None]
    layer = routed(Layer())
    y, (plan,) = layer(X, attention_mask=pairs.long(), return_plans=True)
    assert torch.equal(plan.valid, real)
    close(y, layer(X, attention_mask=pairs))
    assert y.isfinite().all()


# Warnings.
def count(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [warning for warning in caught if issubclass(warning.category, DepthgateWarning)]


def test_warnings_come_once_in_a_process_and_from_the_line_of_the_caller():
    def causal():
        for _ in range(3):
            routed(encoder_layer(), keep=4)(X, causal=True)

    def half():
        model = nn.Sequential(*[dg.MixtureOfDepths(nn.Linear(D, D), D) for _ in range(3)])
        with torch.autocast("cpu", torch.float16):
            model(X.float())
            model(X.float())

    for call in (causal, half):
        (warning,) = count(call)
        assert warning.filename == __file__
        assert count(call) == []


def test_compiled_layers_warn_when_they_are_traced():
    def half():
        model = nn.Sequential(*[dg.MixtureOfDepths(nn.Linear(D, D), D) for _ in range(2)])
        model.compile(backend="eager", fullgraph=True)
        with torch.autocast("cpu", torch.float16):
            model(X.float())

    def causal(many, **call):
        warn_once.cache_clear()
        torch.compiler.reset()
        layer = routed(encoder_layer())
        layer.compile(backend="eager", fullgraph=True)
        assert len(count(lambda: layer(X, causal=True, **call))) == many

    order = torch.ones(8, 8, dtype=torch.bool).triu(1)
    assert len(count(half)) == 1
    causal(1)
    causal(0, is_causal=True)
    causal(0, src_mask=order)


def test_a_mask_that_is_not_causal_does_not_count_as_causal():
    order = torch.ones(8, 8, dtype=torch.bool).triu(1)
    for mask, many in ((torch.zeros_like(order), 1), (order.mT, 1), (order, 0), (-1e9 * order.double(), 0)):
        for real in (None, torch.arange(8) < torch.tensor([[8], [5]])):
            warn_once.cache_clear()
            layer = routed(encoder_layer(), keep=4)
            assert len(count(lambda: layer(X, src_mask=mask, mask=real, causal=True))) == many  # noqa: B023


# Gradients in other ways.
def test_functional_gradients_have_the_losses():
    layer = routed(nn.Linear(D, D))
    weights = dict(layer.named_parameters())
    grads = torch.func.grad(lambda w: torch.func.functional_call(layer, w, (X,)).square().mean())(weights)
    layer(X).square().mean().backward()
    for name, weight in layer.named_parameters():
        close(grads[name], weight.grad)


def test_a_graph_that_is_used_twice_has_the_losses_twice():
    """As documented: each backward pass through the layer's result adds them."""
    layer, hand = (routed(nn.Linear(D, D), losses=losses) for losses in ("backward", None))
    hand.load_state_dict(layer.state_dict())
    y = layer(X)
    y[:, :4].sum().backward(retain_graph=True)
    y[:, 4:].sum().backward()
    y, (plan,) = hand(X, return_plans=True)
    (y.sum() + 2 * (0.01 * causal_bce(plan) + 0.001 * z_loss(plan))).backward()
    for a, b in zip(layer.parameters(), hand.parameters(), strict=True):
        close(a.grad, b.grad)


# Scales.
def test_scales_are_checked_as_tensors_too_and_soft_moe_has_nothing_to_scale():
    dg.set_loss_scale(nn.Sequential(dg.SoftMoE(D, 2)), 0.5)
    layer = routed(nn.Linear(D, D))
    for scale, text in (
        (torch.tensor([1.0, 2.0]), r"scale is tensor\(\[1., 2.\]\)"),
        (torch.tensor(2), r"scale is tensor\(2\)"),
        (torch.tensor(torch.nan), "scale is nan"),
        (torch.tensor(-1.0), "scale is -1.0"),
    ):
        with pytest.raises(dg.DepthgateError, match=text):
            dg.set_loss_scale(layer, scale)
    grads = []
    for scale in (4.0, torch.tensor([4.0])):
        layer.zero_grad()
        dg.set_loss_scale(layer, scale)
        layer(X).square().mean().backward()
        grads.append(layer.router.proj.weight.grad.clone())
    close(*grads)


class InPlace(nn.Module):
    """A causal block that writes to its input."""

    def forward(self, x):
        x += torch.relu(x)
        return x


def test_a_block_may_write_to_its_input_in_every_causal_call():
    layer = routed(InPlace(), rule="scores")
    wanted = layer(X.clone())
    with torch.no_grad():
        for _ in range(4):
            y = layer(X.clone(), causal=True)
            chosen = layer.router.rule(X, layer.router.proj(X))[..., 0] >= 0
            assert torch.equal(y[~chosen], X[~chosen])
    assert wanted.shape == X.shape
    x = X.clone().requires_grad_()
    layer(x, causal=True).sum().backward()
    assert x.grad.isfinite().all()


def test_torch_func_grad_of_causal_calls():
    layer = routed(nn.Sequential(nn.Linear(D, D, dtype=F64), nn.Tanh()))
    weights = dict(layer.named_parameters())

    def total(weights):
        return torch.func.functional_call(layer, weights, (X,), {"causal": True}).pow(2).sum()

    for _ in range(3):
        found = torch.func.grad(total)(weights)
        assert found["block.0.weight"].isfinite().all()


def test_arguments_of_another_size_than_declared_are_refused():
    class Block(nn.Module):
        def forward(self, x, c=None, attn_mask=None):
            return x if c is None else x + c[:, None]

    layer = routed(Block(), per_row=["c"])
    layer(X, c=torch.zeros(2, D, dtype=F64))
    for size in (1, 5, 8):
        with pytest.raises(dg.DepthgateError, match=r"c has shape .*per_row needs \(2, ...\)"):
            layer(X, c=torch.zeros(size, D, dtype=F64))
    for shape in ((2, 1, 8), (1, 8)):
        with pytest.raises(dg.DepthgateError, match="attn_mask has shape"):
            layer(X, attn_mask=torch.ones(shape, dtype=torch.bool))
