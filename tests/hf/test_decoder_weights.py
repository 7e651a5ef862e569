"""Our Decoder as a Llama or Qwen3 of transformers and back: the same logits, routes and texts, whatever the config."""

import json

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import depthgate as dg
from depthgate.cli import main
from depthgate.flops import forward_flops, parameters
from depthgate.hf.decoder_weights import theirs_of
from depthgate.routing import causal_bce
from tests.conftest import close
from tests.hf.zoo import dense, plans_of, routed, tokens

SHAPE = {"vocab": 96, "dim": 32, "layers": 4, "heads": 4, "hidden": 48, "context": 64, "capacity": 0.25}
CONFIGS = {
    "dense llama": {"pattern": "dense", "tied": False},
    "llama": {"pattern": "dense,mod", "kv_heads": 2, "rope_base": 500.0},
    "llama, scores": {"pattern": "mod,dense,mod", "rule": "scores", "gate": "sigmoid", "norm_eps": 1e-5},
    "qwen3": {"pattern": "dense,mod", "qk_norm": True, "rule": "threshold", "head_dim": 12, "tied": False},
    "dense qwen3": {"pattern": "dense", "qk_norm": True, "kv_heads": 1, "head_dim": 6, "hidden": None},
}
configs = pytest.mark.parametrize("name", CONFIGS)


def decoder(name: str) -> dg.Decoder:
    """Large random weights, so that every part has a say, and routes that differ from row to row."""
    torch.manual_seed(10)
    model = dg.Decoder(dg.ModelConfig(**{**SHAPE, **CONFIGS[name]})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
        for part in model.modules():
            if isinstance(part, dg.routing.Threshold):
                part.average.fill_(0.1)
                part.weight.fill_(0.5)
    return model


@configs
@torch.no_grad()
def test_export_and_back_give_the_same_logits_and_routes(name):
    mine, ids = decoder(name), tokens(3, 20)
    theirs = dg.hf.export(mine)
    again = dg.hf.to_decoder(theirs)
    for causal in (True, False):
        want, plans = mine(ids, causal=causal)
        how = {"causal_routing": causal} if mine.config.routed else {}
        with plans_of(theirs) as found:
            got = theirs(ids, **how, use_cache=False).logits
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        for plan, other in zip(plans, found, strict=True):
            assert torch.equal(plan.chosen, other.chosen)
            assert not causal or 0 < plan.chosen.float().mean() < 1
        assert torch.equal(again(ids, causal=causal).logits, want)
    state = mine.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
    assert again.config.kinds == mine.config.kinds


@configs
def test_weights_and_flops_are_counted_with_heads_of_any_width(name):
    model = decoder(name)
    assert parameters(model.config) == sum(weight.numel() for weight in model.parameters())
    with torch.no_grad(), FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        model(tokens(1, 16))
    assert forward_flops(model.config, 16) * 16 == pytest.approx(counted.get_total_flops())


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"head_dim": 7}, "head_dim is 7: rotary positions need an even head size"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"norm_eps": 0}, "norm_eps is 0"),
        ({"heads": 5, "dim": 32}, "dim 32 is not divisible by heads 5"),
    ],
)
def test_sizes_that_cannot_be_are_refused(values, why):
    with pytest.raises(dg.DepthgateError, match=why):
        dg.ModelConfig(**{**SHAPE, **values})


@configs
def test_texts_are_the_same(name):
    mine, ids = decoder(name), tokens(2, 9)
    theirs = dg.hf.export(mine)
    want = dg.generate(mine, ids.tolist(), max_new_tokens=8, temperature=0)
    got = theirs.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert got[:, 9:].tolist() == [result.tokens for result in want]


@configs
def test_what_is_exported_trains_as_the_decoder_does(name):
    """Losses and gradients of the top k, through fused and split weights."""
    mine, ids = decoder(name).train(), tokens(2, 12)
    theirs = dg.hf.export(mine)
    loss, plans = mine.loss(ids[:, :-1], ids[:, 1:])
    taught = [] if mine.config.rule == "threshold" else plans
    (loss + sum(0.01 * causal_bce(plan) for plan in taught)).backward()
    out = theirs(ids[:, :-1], use_cache=False).logits
    its = torch.nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())
    its.backward()
    close(its, loss)
    own, given = dict(mine.named_parameters()), dict(theirs.named_parameters())
    for name, weight in own.items():
        split = torch.cat([given[part].grad for part in theirs_of(name)])
        torch.testing.assert_close(split, weight.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@torch.no_grad()
def test_a_decoder_computes_what_a_model_of_transformers_does(kind):
    plain = dense(kind)
    if kind == "qwen3":  # the zoo's has windows
        plain.config.use_sliding_window = False
        values = {**plain.config.to_dict(), "layer_types": None, "sliding_window": None}
        weights = plain.state_dict()
        plain = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values)).eval()
        plain.load_state_dict(weights)
    ids = tokens(2, 15)
    close(dg.hf.to_decoder(plain)(ids).logits, plain(ids).logits)
    model = dg.hf.convert(plain, 0.25, [0, 3], rule="scores")
    for layer in dg.hf.routed_layers(model):
        layer.depth_router.proj.weight.normal_()
    mine = dg.hf.to_decoder(model)
    assert mine.config.kinds == ("mod", "dense", "dense", "mod")
    close(mine(ids, causal=True).logits, model(ids).logits)


@torch.no_grad()
def test_a_half_precision_model_keeps_its_routers_whole():
    ids = tokens(2, 9)
    truth = decoder("llama")(ids, causal=True).logits
    mine = decoder("llama").bfloat16()
    theirs = dg.hf.export(mine)
    assert {str(w.dtype) for w in theirs.parameters()} == {"torch.bfloat16", "torch.float32"}
    assert {w.dtype for layer in dg.hf.routed_layers(theirs) for w in layer.depth_router.parameters()} == {
        torch.float32
    }
    ours, others = ((each - truth).abs().max() for each in (mine(ids, causal=True).logits, theirs(ids).logits))
    assert others <= 2 * ours <= 0.1 * truth.abs().max()


@pytest.mark.parametrize(
    ("values", "to", "why"),
    [
        ({"pattern": "dense,moe"}, "llama", "to is 'llama', which has no moe layers: write the model as depthgate"),
        ({"qk_norm": True, "key_shift": True}, "qwen3", "to is 'qwen3', which has no key_shift"),
        ({"qk_norm": True}, "llama", "qk_norm is true, which llama is not: write it as qwen3"),
        ({}, "qwen3", "qk_norm is false, which qwen3 is not: write it as llama"),
        ({}, "gpt2", "to is 'gpt2'"),
    ],
)
def test_a_decoder_without_a_counterpart_is_refused(values, to, why):
    with pytest.raises(dg.DepthgateError, match=why):
        dg.hf.export(dg.Decoder(dg.ModelConfig(**{**SHAPE, **values})), to)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ],
)
def test_a_model_that_a_decoder_cannot_be_is_refused(values, why):
    shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_attention_heads=1, **values))
    with pytest.raises(dg.DepthgateError, match=why):
        dg.hf.to_decoder(model)


def test_other_families_windows_and_strangers_are_refused():
    with pytest.raises(dg.DepthgateError, match=r"use_sliding_window is True|layer_types is \['sliding_attention'\]"):
        dg.hf.to_decoder(dense("qwen3"))
    with pytest.raises(dg.DepthgateError, match="a Decoder cannot be a gpt2: only llama, qwen3"):
        dg.hf.to_decoder(routed("gpt2"))
    with pytest.raises(dg.DepthgateError, match="model is a Linear"):
        dg.hf.to_decoder(torch.nn.Linear(2, 2))
    with pytest.raises(dg.DepthgateError, match="decoder is a Linear"):
        dg.hf.export(torch.nn.Linear(2, 2))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mod"
    (folder.parent / "text").write_text("a quick brown fox jumps over the lazy dog\n" * 400)
    options = ["--data", str(folder.parent / "text"), "--out", str(folder), "--steps", "3", "--device", "cpu"]
    shape = ["--model.dim", "32", "--model.layers", "2", "--model.heads", "2", "--model.context", "32", "--batch", "2"]
    plain = [f"--model.{name}=false" for name in ("qk_norm", "key_shift", "embed_norm", "router_norm")]
    assert main(["train", "--preset", "tiny-mod", *options, *shape, *plain, "--tokenizer", "bytes"]) == 0
    return folder


@torch.no_grad()
def test_a_run_becomes_a_folder_that_transformers_and_we_open(run, tmp_path, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    how = ["--to", "llama", "--routing_mode", "causal", "--json"]
    assert main(["convert", "--model", str(run), "--out", str(tmp_path / "hf"), *how]) == 0
    assert json.loads(capsys.readouterr().out)["model_type"] == "depthgate_llama"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    mine, theirs = dg.load(run), AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.routing_mode == "causal"
    again = dg.load(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("a brown dog", return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == mine.tokenizer.encode("a brown dog") == again.tokenizer.encode("a brown dog")
    assert theirs.config.eos_token_id == mine.tokenizer.end
    close(theirs(ids).logits, mine(ids, causal=True).logits)
    assert torch.equal(again(ids, causal=True).logits, mine(ids, causal=True).logits)
    how = ["--prompt", "a brown dog", "--max-new-tokens", "5", "--temperature", "0", "--json"]
    texts = []
    for folder in (run, tmp_path / "hf"):
        capsys.readouterr()
        assert main(["generate", "--model", str(folder), *how]) == 0
        texts.append(json.loads(capsys.readouterr().out)["results"][0])
    assert texts[0]["tokens"] == texts[1]["tokens"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--to", "qwen3"], "qk_norm is false"),
        (["--to", "gpt2"], "to is 'gpt2'"),
        (["--capacity", "0.25"], "is a run, which keeps its own routing: leave --capacity out"),
        (["--capacity", "0.5"], "leave --capacity out, which is for Hugging Face models"),
        (["--layers", "every_other"], "leave --layers out"),
    ],
)
def test_a_run_that_cannot_be_written_so_writes_nothing(run, tmp_path, capsys, options, why):
    assert main(["convert", "--model", str(run), "--out", str(tmp_path / "hf"), *options]) == 2
    assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_of_before_there_were_head_dim_and_norm_eps_loads(run):
    from depthgate.loading import model_config

    config = json.loads((run / "config.json").read_text())
    want = model_config(config, run)
    for name in ("head_dim", "norm_eps"):
        del config["model"][name]
    assert model_config(config, run) == want


def test_to_is_for_runs(tmp_path, capsys):
    dense("llama").save_pretrained(tmp_path / "dense")
    assert main(["convert", "--model", str(tmp_path / "dense"), "--out", str(tmp_path / "x"), "--to", "llama"]) == 2
    assert "leave --to out" in capsys.readouterr().err
