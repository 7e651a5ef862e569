"""What a routed layer adds to a dense one: operations that are launched, and times that the host waits for the device.

Counted by a dispatch mode, as the difference of models that differ by one layer. Views launch nothing.
"""

from collections import Counter

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import depthgate as dg
import depthgate.hf
from tests.hf.zoo import plans_of, tokens, with_random_routers

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "equal"}
ON_THE_HOST = {"promote_types", "_unsafe_view", "lift_fresh"}  # a rule of types, a view, a number that becomes a tensor


class Launches(TorchDispatchMode):
    """Names of the operations that are no views, each as often as it is called."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in ON_THE_HOST:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def model_of(layers, routed, rule):
    torch.manual_seed(0)
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, num_hidden_layers=layers))
    return with_random_routers(dg.hf.convert(model, 0.5, routed, rule=rule)) if routed else model.eval()


def launched(model, how, rows):
    ids, options = tokens(rows, 40), {"use_cache": False}
    if how == "top_k" and dg.hf.routed_layers(model):
        options["causal_routing"] = False
    if how == "cached":
        options = {"past_key_values": DynamicCache()}
    with torch.set_grad_enabled(how == "training"), Launches() as mode:
        model.train(how == "training")(ids, **options)
    return mode.found


def added(how, rule, rows):
    """Launches of a routed layer, and of a dense one."""
    routed = launched(model_of(3, [1, 2], rule), how, rows) - launched(model_of(2, [1], rule), how, rows)
    return routed, launched(model_of(3, [], rule), how, rows) - launched(model_of(2, [], rule), how, rows)


@pytest.mark.parametrize("rule", ["threshold", "predictor", "scores"])
@pytest.mark.parametrize(
    ("how", "rows", "most", "waits"),
    [
        ("top_k", 2, 18, 0),
        ("top_k", 1, 16, 0),
        ("training", 2, 18, 0),
        ("causal", 2, 22, 1),
        ("causal", 1, 15, 1),
        ("cached", 1, 16, 1),
    ],
)
def test_a_routed_layer_adds_a_handful_of_operations_and_top_k_passes_never_wait(how, rows, rule, most, waits):
    routed, dense = added(how, rule, rows)
    learns = 6 if how == "training" and rule != "threshold" else 0  # a loss teaches the rule
    assert routed.total() - dense.total() <= most + learns, routed - dense
    assert sum(routed[name] for name in WAITS) == waits
    assert sum(dense[name] for name in WAITS) == 0


def test_a_step_gathers_nothing_in_rows_of_one_token():
    model, ids, cache, entering = model_of(1, [0], "scores"), tokens(6, 60), DynamicCache(), set()
    with torch.no_grad(), plans_of(model) as plans:
        model(ids[:, :40], past_key_values=cache)
        for t in range(40, 60):
            where = torch.full((6, 1), t)  # each row has its own, as generate gives them
            with Launches() as mode:
                model(ids[:, t : t + 1], past_key_values=cache, position_ids=where)
            entering.add(int(plans[-1].filled.sum()))
            assert mode.found["gather"] == 1  # of the scores of slots: rows are picked as they are
    assert {0, 1, 2, 3} <= entering
