"""GGUF files as a source, and folders that open where depthgate is not imported."""

import json

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'depthgate[hf]'")

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import depthgate as dg
from depthgate.cli import main
from tests.conftest import close
from tests.generation.models import built
from tests.hf import elsewhere
from tests.hf.zoo import dense, routed, tokens

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def pairs_side_by_side(weight, heads):
    """GGUF's order of a head's rows: rotary pairs next to each other, instead of half a head apart."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(model, path, kind=gguf.GGMLQuantizationType.F32):
    """A Llama as llama.cpp would have it, its matrices stored as `kind`, with a tokenizer of 96 words."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    letters = gguf_letters()
    writer.add_token_list(letters)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(letters))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, weight in model.state_dict().items():
        stored = weight.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            stored = pairs_side_by_side(stored, heads)
        data = stored.numpy()
        quantised = kind != gguf.GGMLQuantizationType.F32 and weight.ndim > 1
        if quantised:
            data = gguf.quantize(data, kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind if quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_letters():
    from depthgate.data.tokenizer import _alphabet

    return ["<s>", "</s>", "ab", *list(_alphabet())[33:126]]


def gguf_name(name):
    known = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in known:
        return known[name]
    _, _, i, rest = name.split(".", 3)
    return f"blk.{i}.{PARTS[rest.removesuffix('.weight')]}.weight"


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "models" / "tiny.gguf"
    path.parent.mkdir()
    write_gguf(dense("llama"), path)
    return path


@pytest.mark.parametrize("by_folder", [False, True])
@torch.no_grad()
def test_a_gguf_file_is_converted_with_its_tokenizer(packed, tmp_path, capsys, by_folder):
    before = packed.read_bytes()
    source = packed.parent if by_folder else packed
    assert main(["convert", "--model", str(source), "--out", str(tmp_path / "out"), "--layers", "0,3"]) == 0
    assert packed.read_bytes() == before
    assert [p.name for p in packed.parent.iterdir()] == [packed.name]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = tokens(2, 9)
    close(model(ids).logits, dense("llama")(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc")["input_ids"][-2:] == [2, gguf_letters().index("c")]
    with torch.enable_grad():
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "depth_router" not in name)


@torch.no_grad()
def test_quantised_weights_become_the_numbers_they_stand_for(tmp_path, capsys):
    path, model = tmp_path / "q8.gguf", dense("llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    for layer in model.model.layers:  # 48 columns are no whole number of blocks of 32: make them 64
        for part, dim in ((layer.mlp.gate_proj, 0), (layer.mlp.up_proj, 0), (layer.mlp.down_proj, 1)):
            more = torch.zeros(*(16 if i == dim else n for i, n in enumerate(part.weight.shape)))
            part.weight = torch.nn.Parameter(torch.cat([part.weight, more], dim))
    model.config.intermediate_size = 64
    write_gguf(model, path, kind)
    assert main(["convert", "--model", str(path), "--out", str(tmp_path / "out")]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, weight in model.state_dict().items():
        rounded = weight
        if weight.ndim > 1:
            rounded = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
        close(found[name], rounded)


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (half, "cut"),
        (lambda p: p.write_bytes(p.read_bytes()[:-40]), "cut"),
        (lambda p: p.write_bytes(p.read_bytes()[:30]), "cannot be loaded"),
        (lambda p: p.write_bytes(b""), "cannot be loaded"),
        (lambda p: p.write_bytes(b"GGUF" + bytes(200)), "cannot be loaded"),
        (lambda p: p.write_text("text"), "cannot be loaded"),
        (lambda p: p.with_name("other.gguf").write_bytes(p.read_bytes()), "has 2 GGUF files: name one of them"),
        (lambda p: p.rename(p.with_suffix(".bin")), "has no config.json"),
    ],
)
def test_a_damaged_gguf_file_is_refused_and_nothing_is_written(packed, tmp_path, capsys, damage, why):
    damage(packed)
    there = {p: p.read_bytes() for p in packed.parent.iterdir()}
    assert main(["convert", "--model", str(packed.parent), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("depthgate: error: ") == 1
    assert {p: p.read_bytes() for p in packed.parent.iterdir()} == there
    assert [p.name for p in tmp_path.iterdir()] == ["models"]


OPENS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
assert "depthgate" not in sys.modules
for folder in sys.argv[1:]:
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids = torch.load(folder + "/ids.pt")
    with torch.no_grad():
        logits = model(ids).logits
    new = model.generate(ids, max_new_tokens=4, do_sample=False)
    model.save_pretrained(folder + "/again")
    torch.save((logits, new), folder + "/found.pt")
"""


def test_a_saved_folder_opens_where_depthgate_is_not_imported(tmp_path):
    models = {kind: routed(kind) for kind in ("llama", "gemma3_text", "gpt2")}
    models["depthgate"] = dg.hf.export(built("mod,mode", "threshold", vocab=96))
    ids = tokens(2, 8)
    for kind, model in models.items():
        model.save_pretrained(tmp_path / kind)
        torch.save(ids, tmp_path / kind / "ids.pt")
    folders = [str(tmp_path / kind) for kind in models]
    done = elsewhere.run(OPENS, *folders)
    assert done.returncode == 0, done.stderr
    for kind, model in models.items():
        logits, new = torch.load(tmp_path / kind / "found.pt")
        with torch.no_grad():
            close(logits, model(ids).logits)
        assert torch.equal(new, model.generate(ids, max_new_tokens=4, do_sample=False))
        saved, again = tmp_path / kind, tmp_path / kind / "again"  # saved by that process, without our source
        code = [path.name for path in again.iterdir() if path.suffix == ".py"]
        assert code == ["modeling_depthgate.py"]
        assert (again / "config.json").read_text() == (saved / "config.json").read_text()


def test_without_depthgate_the_error_says_what_to_install(tmp_path):
    """A path without us: as where depthgate is not installed."""
    routed("llama").save_pretrained(tmp_path / "model")
    code = "import sys; sys.path[:] = [p for p in sys.path if not __import__('os').path.isdir(p + '/depthgate')]\n"
    code += "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
    code += "from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1], trust_remote_code=True)"
    done = elsewhere.run(code, str(tmp_path / "model"))
    assert done.returncode != 0
    assert "pip install depthgate" in done.stderr


@pytest.mark.parametrize("named", [{"AutoModelForCausalLM": "evil.Evil"}, {"AutoConfig": "evil.Evil"}, "evil"])
def test_a_config_that_names_other_code_is_refused(tmp_path, capsys, named):
    routed("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": named}))
    with pytest.raises(dg.DepthgateError, match=r"names code to run \(auto_map"):
        AutoConfig.from_pretrained(tmp_path / "model")
    assert main(["convert", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 2
    assert "names code to run" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
