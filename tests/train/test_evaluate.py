"""The figures of an evaluation, held to counts made in other ways."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import depthgate as dg
from depthgate.data.token_file import Documents, tokenize
from depthgate.data.tokenizer import ByteTokenizer
from depthgate.flops import layer_cost, model_cost
from depthgate.loading import LoadedDecoder
from depthgate.routing import Threshold
from depthgate.train.evaluate import measure

T = 24


@pytest.mark.parametrize("skipped", [False, True], ids=["some enter", "none enters"])
@pytest.mark.parametrize("choice", ["tokens", "experts"])
def test_experts_per_token_are_those_that_computed(tmp_path, choice, skipped):
    """In a mix of layers, also where no token enters a staged one: the FLOPs are those that a counter counts."""
    torch.manual_seed(0)
    null = 3 if choice == "tokens" else 0
    config = dg.ModelConfig(
        dim=16,
        heads=1,
        layers=6,
        context=T,
        pattern="mode,mode_staged,moe",
        capacity=0.5,
        experts=4,
        choice=choice,
        null_experts=null,
    )
    model = LoadedDecoder(config).eval()
    model.tokenizer = ByteTokenizer()
    for rule in (module for module in model.modules() if isinstance(module, Threshold)):
        of_layer = len(rule.average) == 1
        rule.move(torch.full((1,), 9.0) if skipped and of_layer else torch.randn_like(rule.average) / 20)
    (tmp_path / "text.txt").write_text("a line of text, 24 bytes")
    text = Documents(tokenize(str(tmp_path / "text.txt"), model.tokenizer))
    found = measure(model, text, 1)
    assert found["tokens"] == T
    assert any(found["routed_share"]) != skipped
    used, shares = iter(found["experts_per_token"]), iter(found["routed_share"])
    flops = model_cost(replace(config, pattern="dense"), T).forward - 6 * layer_cost(config, "dense", T).forward
    for kind in config.kinds:
        share = next(used) / config.top_k
        entered = round(T * next(shares)) if kind == "mode_staged" else T
        flops += layer_cost(config, kind, T, share, entered=entered).forward
    ids = text.read(torch.arange(T), torch.zeros(T, dtype=torch.int64))[None]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, causal=True)
    assert counter.get_total_flops() == pytest.approx(flops)


def test_a_dense_model_is_measured_once(tmp_path):
    """Its decisions are none: both losses are one, and there are no shares."""
    (tmp_path / "text.txt").write_text("some words " * 20)
    model = LoadedDecoder(dg.ModelConfig(dim=16, layers=1, heads=2, context=32, pattern="dense")).eval()
    model.tokenizer = ByteTokenizer()
    found = measure(model, Documents(tokenize(str(tmp_path / "text.txt"), model.tokenizer)), 2)
    assert found["nats_per_token"] == found["nats_per_token_top_k"] > 0
    assert found["routed_share"] == found["agreement"] == found["experts_per_token"] == []
