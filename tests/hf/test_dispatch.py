"""Models that accelerate has placed on devices, before and after they are routed: weights that are fetched for a layer
from elsewhere, and hooks that call what a layer's forward was when they were put there."""

import types

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'depthgate[hf]'")

import accelerate
import torch
from transformers import AutoModelForCausalLM

import depthgate as dg
from tests.conftest import close
from tests.hf.zoo import ROUTED, dense, plans_of, routed, tokens, with_random_routers

OTHERS = {"llama": ["embed_tokens", "norm", "rotary_emb"], "gpt2": ["wte", "wpe", "drop", "ln_f"]}
PLACES = ["cpu", "disk", "everything"]


def places(kind, where):
    """A device for every part; the layers that are routed, and one that is not, lie `where`."""
    decoder, layers = ("transformer", "h") if kind == "gpt2" else ("model", "layers")
    there = {f"{decoder}.{name}": "cpu" for name in OTHERS[kind]} | {"lm_head": "cpu"}
    return there | {f"{decoder}.{layers}.{i}": "cpu" if i == 1 else where for i in range(4)}


def placed(model, kind, where, folder):
    if where == "everything":  # from the CPU's memory to where it is used
        return accelerate.cpu_offload(model, torch.device("cpu"))
    return accelerate.dispatch_model(
        model, places(kind, where), main_device="cpu", offload_dir=str(folder), force_hooks=True
    )


@pytest.mark.parametrize("rule", ["predictor", "threshold"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_that_was_placed_before_is_routed(tmp_path, kind, where, rule):
    ids, want = tokens(3, 12), routed(kind, rule=rule)
    model = placed(dense(kind), kind, where, tmp_path / "off")
    with torch.no_grad():
        dense_logits = model(ids).logits
        dg.hf.convert(model, 0.25, ROUTED, rule=rule)
        close(model(ids).logits, dense_logits)
        with_random_routers(model)
        for training in (True, False):
            with plans_of(model) as plans:
                logits = model.train(training)(ids, use_cache=False).logits
            assert len(plans) == 2
            close(logits, want.train(training)(ids, use_cache=False).logits)
        how = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(ids, **how), want.generate(ids, **how))


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_it_is_saved_as_any_other_and_routed_without_its_hooks(tmp_path, where):
    ids, want = tokens(2, 9), routed("llama", rule="predictor")
    model = placed(dense("llama"), "llama", where, tmp_path / "off")
    with_random_routers(dg.hf.convert(model, 0.25, ROUTED))
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    bare = accelerate.hooks.remove_hook_from_module(model, recurse=True)
    with torch.no_grad():
        for each in (again, bare):
            close(each(ids).logits, want(ids).logits)


@pytest.mark.parametrize("rule", ["scores", "predictor", "threshold"])
def test_a_routed_model_computes_with_weights_on_disk(tmp_path, rule):
    model, ids = routed("llama", rule=rule), tokens(2, 12)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=places("llama", "disk"), offload_folder=str(tmp_path / "off")
    )
    assert {weight.device.type for weight in again.model.layers[0].parameters()} == {"meta"}
    with torch.no_grad():
        close(again(ids).logits, model(ids).logits)


@torch.no_grad()
def test_routers_are_calibrated_where_they_can_be_changed(tmp_path):
    ids, want = tokens(4, 16), dg.hf.convert(dense("llama"), 0.25, ROUTED)
    want.save_pretrained(tmp_path / "saved")
    dg.hf.calibrate(want, ids)
    model = dg.hf.convert(placed(dense("llama"), "llama", "disk", tmp_path / "off"), 0.25, ROUTED)
    dg.hf.calibrate(model, ids)  # its routers came after the others were placed
    close(model(ids, causal_routing=False).logits, want(ids, causal_routing=False).logits)
    how = {"device_map": places("llama", "disk"), "offload_folder": str(tmp_path / "more")}
    with pytest.raises(dg.DepthgateError, match=r"offloaded \(device_map\).*before it is placed"):
        dg.hf.calibrate(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **how), ids)


def test_a_layer_whose_forward_was_replaced_is_refused():
    model = dense("llama")
    layer = model.model.layers[1]
    layer.forward = types.MethodType(type(layer).forward, layer)
    with pytest.raises(dg.DepthgateError, match="layer 1 of LlamaForCausalLM has a forward of its own"):
        dg.hf.convert(model)
    assert not hasattr(model.config, "depthgate")
