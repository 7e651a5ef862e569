"""Norms and attention of converted models, which are a kernel each on a GPU."""

import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

import depthgate as dg
from depthgate.hf import parts
from depthgate.hf.families import FAMILIES
from depthgate.ops import reference
from tests.conftest import close
from tests.hf import zoo

LIKE_LLAMA = [kind for kind in FAMILIES if FAMILIES[kind].norm]


@pytest.mark.parametrize("kind", LIKE_LLAMA)
def test_parts_by_kernels_compute_what_the_family_computes(kind, monkeypatch):
    """With the twins of the kernels in their place: every norm and every turn of all layers goes through them."""
    model, ids = zoo.routed(kind).eval(), zoo.tokens(2, 11)
    calls = {"scaled": 0, "turned": 0}

    def counted(name):
        def call(*given):
            calls[name] += 1
            return getattr(reference, name)(*given)

        return call

    kernels = SimpleNamespace(**{name: counted(name) for name in calls})
    with torch.no_grad():
        want = model(ids).logits
        monkeypatch.setitem(sys.modules, "depthgate.ops.layer_triton", kernels)
        monkeypatch.setattr("depthgate.ops.layer_triton", kernels, raising=False)
        monkeypatch.setattr(parts, "few_launches", lambda _: True)
        close(model(ids).logits, want)
    layers = model.config.num_hidden_layers
    assert calls["scaled"] >= 2 * layers + 1
    assert calls["turned"] == (2 if kind == "smollm3" else layers)  # of which some layers have no positions


@pytest.mark.parametrize("kind", LIKE_LLAMA)
def test_parts_get_their_own_classes_back(kind):
    dense = zoo.dense(kind)
    own = [type(part) for part in dense.modules()]
    model = dg.hf.convert(dense, 0.5)
    assert [type(part) for part in pickle.loads(pickle.dumps(model)).modules()] == [type(p) for p in model.modules()]
    assert sum(type(part).__name__.startswith("OneKernel") for part in model.modules()) >= 3 * len(model.model.layers)
    assert [type(part) for part in dg.hf.to_dense(model).modules()] == own
