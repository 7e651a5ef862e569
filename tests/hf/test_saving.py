"""What is saved comes back, in a process that knows nothing but `import depthgate.hf`; and a config is strict."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import depthgate as dg
from depthgate.hf.layer import routed_layers
from tests.conftest import close
from tests.hf import elsewhere
from tests.hf.zoo import FAMILY_NAMES, dense, routed, tokens, with_random_routers

RULES = ("scores", "predictor", "threshold")
LOADS = """
import sys
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
import depthgate
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
    raise SystemExit("known before depthgate.hf is imported")
except ValueError:
    assert not any(name.startswith("depthgate.") for name in sys.modules)
import depthgate.hf
logging.disable_progress_bar()
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        ids = torch.load(folder + "/ids.pt")
        torch.save((model(ids).logits, model.state_dict(), model.dtype), folder + "/found.pt")
"""


def half(rule: str, folder: Path):
    """A routed model that was loaded in bfloat16; its routers are in float32."""
    dense("llama").bfloat16().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return with_random_routers(dg.hf.convert(model, 0.25, rule=rule))


def test_a_fresh_process_loads_every_family_and_rule(tmp_path):
    models = {kind: routed(kind, rule=RULES[i % 3]) for i, kind in enumerate(FAMILY_NAMES)}
    models |= {rule: half(rule, tmp_path / "dense") for rule in RULES}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        torch.save(tokens(2, 10), tmp_path / name / "ids.pt")
    folders = [str(tmp_path / name) for name in models]
    done = elsewhere.run(LOADS, *folders)
    assert done.returncode == 0, done.stderr
    for name, model in models.items():
        logits, state, dtype = torch.load(tmp_path / name / "found.pt")
        assert dtype == model.dtype
        for key, value in model.state_dict().items():
            assert state[key].dtype == value.dtype, key
            assert torch.equal(state[key], value), key
        with torch.no_grad():
            close(logits, model(tokens(2, 10)).logits)


def test_a_reloaded_model_trains_and_generates_as_before(tmp_path):
    model = routed("qwen3", rule="predictor")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert [layer.depth_router.capacity for layer in routed_layers(again)] == [0.25, 0.25]
    ids = tokens(2, 12)
    how = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, **how), again.generate(ids, **how))
    losses = [m.train()(ids, labels=ids, use_cache=False).loss for m in (model, again)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half(),
        lambda model: model.double(),
        lambda model: model.to("cpu", torch.bfloat16).train().eval(),
        lambda model: model.to("meta").to_empty(device="cpu"),
    ],
)
@torch.no_grad()
def test_routers_stay_in_float32_whatever_a_model_is_cast_to(tmp_path, cast, rule):
    model, ids = routed("gpt2", rule=rule), tokens(2, 12)  # others' rotary frequencies are cast, and loaded uncast
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cast(model)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float32 if "depth_router" in name else model.dtype), name
    if model.dtype != torch.float32:
        assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items() if "router" in key)
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_dense_checkpoint_loads_into_a_routed_class_and_is_neutral(tmp_path):
    model = dense("llama")
    model.save_pretrained(tmp_path)
    from depthgate.hf.classes import MoDLlamaConfig, MoDLlamaForCausalLM

    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["model_type"]
    config = MoDLlamaConfig(**raw, depthgate={"layers": [1, 2], "capacity": 1.0})
    found, info = MoDLlamaForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert all("depth_router" in key for key in info["missing_keys"])
    with torch.no_grad():
        ids = tokens(2, 9)
        assert torch.equal(found(ids).logits, model(ids).logits)
        assert torch.equal(found(ids, causal_routing=False, use_cache=False).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"layers": [0], "capacty": 0.5}, "unknown keys .capacty"),
        ({"layers": [0], "capacity": 0}, "capacity is 0"),
        ({"layers": [4]}, "a layer is 4"),
        ({"layers": [-1]}, "a layer is -1"),
        ({"layers": [1, 1]}, "each layer once"),
        ({"layers": []}, "layers is empty"),
        ({"layers": "0"}, "layers is '0'"),
        ({"layers": [0], "gate": "os.system"}, "gate is 'os.system'"),
        ({"layers": [0], "rule": 3}, "rule is 3"),
        ({"layers": [0], "rule_loss": -1}, "rule_loss is -1"),
        ({"capacity": 0.5}, "does not say which layers"),
    ],
)
def test_a_config_with_a_wrong_value_is_refused(tmp_path, values, why):
    routed("llama").save_pretrained(tmp_path)
    path = Path(tmp_path, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "depthgate": values}))
    with pytest.raises(dg.DepthgateError, match=why):
        AutoConfig.from_pretrained(tmp_path)


@torch.no_grad()
def test_transformers_knows_a_routed_model_by_name(tmp_path):
    """As Trainer does, which else smooths the labels of a causal language model without shifting them."""
    from transformers import Trainer, TrainingArguments

    model, ids = routed("llama"), tokens(2, 8)
    how = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    found = Trainer(model, how).compute_loss(model, {"input_ids": ids, "labels": ids})
    probabilities = model(ids).logits[:, :-1].log_softmax(-1)
    right = -probabilities.gather(-1, ids[:, 1:, None]).mean()
    close(found, 0.9 * right - 0.1 * probabilities.mean())


OLD = Path(__file__).parents[1] / "fixtures" / "e9f41b0" / "converted"


@torch.no_grad()
def test_a_folder_that_an_older_depthgate_converted_loads_and_says_the_same():
    """Written by commit e9f41b0 with `depthgate convert`, its routers then drawn at random; so are these figures."""
    model, info = AutoModelForCausalLM.from_pretrained(OLD, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.arange(3, 15)[None]
    causal = [0.37531, -1.68485, 0.226368, -0.706201, -0.76817, 1.483405, -0.702366, 0.087628]
    top_k = [1.750867, 0.19233, -0.164701, -0.490048, 0.295265, 0.827204, 1.507519, 3.099925]
    decoder = dg.load(OLD)
    for routing, want in ((True, causal), (False, top_k)):
        close(model(ids, use_cache=False, causal_routing=routing).logits[0, -1, :8], torch.tensor(want))
        close(decoder(ids, causal=routing).logits[0, -1, :8], torch.tensor(want))
    new = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 12:]
    assert new.tolist() == [45, 62, 2, 62, 27, 45]


def test_registration_says_which_transformers_it_needs(monkeypatch):
    register = dg.hf.register.__wrapped__  # not the one that was called already
    module = sys.modules["transformers"]  # not the one imported above, once transformers has replaced itself
    monkeypatch.setattr(module, "__version__", "4.57.0")
    with pytest.raises(dg.DepthgateError, match=r"transformers is 4.57.0: install 5.18"):
        register()
    monkeypatch.setattr(module, "__version__", "5.17.1")
    with pytest.warns(UserWarning, match="assisted decoding and cropped caches may fail"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(dg.DepthgateError, match=r"transformers is missing: pip install 'depthgate\[hf\]'"):
        register()


def test_a_config_without_routing_makes_no_model():
    from depthgate.hf.classes import MoDLlamaConfig, MoDLlamaForCausalLM

    with pytest.raises(dg.DepthgateError, match="which layers"):
        MoDLlamaForCausalLM(MoDLlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1))
