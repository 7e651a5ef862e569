"""Compiled equals eager, with fullgraph, forward and backward; shapes may change (row 39 of docs/reliability.md).

Every layer is traced, decomposed and split into forward and backward as inductor does it. The C++ of inductor, which
takes seconds a layer to build, is made for two routed layers in a row; the tests on a GPU build
its code for all layers.
"""

import pytest
import torch

import depthgate as dg
from tests.conftest import close
from tests.zoo import LAYERS, D, build, gradients, loss

TRACED = "aot_eager_decomp_partition"


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_equals_eager(name):
    x = torch.randn(2, 12, D)
    eager, inside = build(name), build(name)
    y, plans = eager(x)
    loss(y, plans).backward()
    compiled = torch.compile(inside, fullgraph=True, backend=TRACED)
    z, compiled_plans = compiled(x)
    loss(z, compiled_plans).backward()
    close(z, y)
    for a, b in zip(plans, compiled_plans, strict=True):
        assert type(a) is type(b)
        close(b.scores, a.scores)
        for field in ("index", "choice", "order"):
            if field in a._fields:
                assert torch.equal(getattr(a, field), getattr(b, field))
    for n, g in gradients(eager).items():
        close(gradients(inside)[n], g)


@pytest.mark.parametrize(
    ("kind", "backend"), [("mod", "inductor"), ("moe", "inductor"), ("soft", TRACED)], ids=["mod", "moe", "soft"]
)
def test_two_layers_in_a_row(kind, backend):
    """What torch once failed to compile: code of inductor gathered what the layer before had yet to scatter
    (pytorch#171493; in token choice the gradient of scores, with dynamic shapes), and two of Soft MoE were refused."""
    make = {
        "mod": lambda: dg.MixtureOfDepths(torch.nn.Linear(D, D), D, 0.5),
        "moe": lambda: dg.MixtureOfExperts(D, 4),
        "soft": lambda: dg.SoftMoE(D, 4),
    }[kind]
    x, layers = torch.randn(2, 12, D), torch.nn.ModuleList(make() for _ in range(2))

    def both(x):
        for layer in layers:
            x = layer(x) if kind == "mod" else x + layer(x)
        return x

    y = both(x)
    y.pow(2).sum().backward()
    expected = gradients(layers)
    layers.zero_grad()
    z = torch.compile(both, fullgraph=True, dynamic=kind != "mod", backend=backend)(x)
    z.pow(2).sum().backward()
    close(z, y)
    for n, g in gradients(layers).items():
        close(g, expected[n])


def test_compiled_masks_causal_mode_and_autocast():
    """The causal choice compiles too: all T slots, the chosen filled."""
    layer = build("mod")
    x = torch.randn(2, 12, D)
    close(torch.compile(layer, fullgraph=True, backend=TRACED)(x, causal=True)[0], layer(x, causal=True)[0])
    torch._dynamo.reset()
    layer = build("mixture of depths")
    mask = torch.arange(12) < torch.tensor([[12], [5]])
    compiled = torch.compile(layer, fullgraph=True, backend=TRACED)
    close(compiled(x, mask=mask)[0], layer(x, mask=mask)[0])
    close(compiled(x, causal=True)[0], layer(x, causal=True)[0])
    torch._dynamo.reset()
    layer = dg.MixtureOfDepths(torch.nn.Linear(D, D), D, 0.5)  # no padding mask: graphs break, answers do not
    close(torch.compile(layer, backend="eager")(x, mask=mask)[0], layer(x, mask=mask)[0])
    torch._dynamo.reset()
    encoder = dg.MoDEncoder(6, 16, num_layers=1).eval()
    x, mask = torch.randn(3, 9, 6), torch.arange(9) < torch.tensor([[9], [4], [1]])
    close(torch.compile(encoder, fullgraph=True, backend=TRACED)(x, mask), encoder(x, mask))
    torch._dynamo.reset()
    layer, x = build("moe tokens"), torch.randn(2, 12, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(torch.compile(layer, fullgraph=True, backend=TRACED)(x)[0].float(), layer(x)[0].float(), torch.bfloat16)


def test_changing_lengths_recompile_a_bounded_number_of_times():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    layer = build("mod")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for T in range(8, 24):
        x = torch.randn(2, T, D)
        close(compiled(x)[0], layer(x)[0])
    assert counter.frame_count <= 3
