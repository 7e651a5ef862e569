"""Norms and attention of converted models, which are a kernel each on a GPU."""

import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers.models.qwen2.modeling_qwen2 as qwen2
import transformers.models.qwen3.modeling_qwen3 as qwen3

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


def test_what_somebody_has_put_in_place_of_a_familys_own_is_obeyed(monkeypatch):
    """Before a model is converted and after: with kernels as without them."""
    monkeypatch.setattr(parts, "classes", parts.classes.__wrapped__)  # as in a new process
    monkeypatch.setattr(qwen3, "apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    monkeypatch.setattr(qwen3.Qwen3RMSNorm, "forward", lambda _, x: x)
    assert parts.classes("qwen3") == {}
    model, ids = zoo.routed("qwen2").eval(), zoo.tokens(2, 11)
    kernels = SimpleNamespace(scaled=reference.scaled, turned=reference.turned)
    monkeypatch.setitem(sys.modules, "depthgate.ops.layer_triton", kernels)
    monkeypatch.setattr("depthgate.ops.layer_triton", kernels, raising=False)
    patches = [
        (qwen2, "apply_rotary_pos_emb", lambda q, k, *_: (q, k)),
        (qwen2.Qwen2RMSNorm, "forward", lambda _, x: x),
    ]
    for where, name, patch in patches:
        with monkeypatch.context() as patched, torch.no_grad():
            plain = model(ids).logits
            patched.setattr(where, name, patch)
            want = model(ids).logits
            assert not torch.allclose(want, plain)
            patched.setattr(parts, "few_launches", lambda _: True)
            close(model(ids).logits, want)


@pytest.mark.parametrize("kind", LIKE_LLAMA)
def test_parts_get_their_own_classes_back(kind):
    dense = zoo.dense(kind)
    own = [type(part) for part in dense.modules()]
    model = dg.hf.convert(dense, 0.5)
    assert [type(part) for part in pickle.loads(pickle.dumps(model)).modules()] == [type(p) for p in model.modules()]
    assert sum(type(part).__name__.startswith("OneKernel") for part in model.modules()) >= 3 * len(model.model.layers)
    assert [type(part) for part in dg.hf.to_dense(model).modules()] == own
