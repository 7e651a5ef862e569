"""Runs of any kind as models of transformers: the same logits, losses, texts and files."""

import json

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

import depthgate as dg
from depthgate.cli import main
from depthgate.errors import DepthgateError
from tests.checkpoint.samples import same
from tests.conftest import close
from tests.generation.models import VOCAB, built
from tests.train.tiny import train, write_data

KINDS = {
    "mode": "threshold",
    "mod,mode": "threshold",
    "mod,moe": "predictor",
    "dense,mode_staged": "scores",
    "dense,random": "scores",
}
each = pytest.mark.parametrize("pattern", KINDS)


def pair(pattern):
    """A Decoder in float64 that routes some tokens and not others, and the same as a model of transformers."""
    mine = built(pattern, KINDS[pattern])
    return mine, dg.hf.export(mine)


def tokens(rows=2, length=18):
    return torch.randint(VOCAB, (rows, length))


@each
@torch.no_grad()
def test_logits_and_losses_are_those_of_the_decoder(pattern):
    mine, theirs = pair(pattern)
    assert type(theirs).__name__ == "DepthgateForCausalLM"
    ids = tokens()
    want = mine(ids, causal=True).logits
    assert torch.equal(theirs(ids).logits, want)
    assert torch.equal(theirs(ids, attention_mask=torch.ones_like(ids)).logits, want)
    assert torch.equal(theirs(ids, causal_routing=False).logits, mine(ids).logits)
    close(theirs(ids, logits_to_keep=3).logits, want[:, -3:])
    labels = torch.where(torch.rand(ids.shape) < 0.2, -100, ids)
    loss, _ = mine.loss(ids[:, :-1], labels[:, 1:], causal=True)
    close(theirs(ids, labels=labels).loss.double(), loss, torch.float32)  # which transformers computes in float32
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    pos = torch.where(mask > 0, mask.cumsum(1) - 1, -1)
    close(theirs(ids, attention_mask=mask).logits[mask > 0], mine(ids, pos, causal=True).logits[mask > 0])
    pos, doc = torch.tensor([[*range(11), *range(7)]] * 2), torch.tensor([[0] * 11 + [1] * 7] * 2)
    close(theirs(ids, position_ids=pos).logits, mine(ids, pos, doc, causal=True).logits)
    if pattern != "dense,random":  # which draws anew while it trains
        assert torch.equal(theirs.train()(ids).logits, mine.train()(ids).logits)


@each
@torch.no_grad()
def test_texts_are_those_of_the_decoder(pattern):
    """One by one with a cache, without one, and of prompts padded at the left; beams and looked-up words as without a
    cache."""
    mine, theirs = pair(pattern)
    prompts = [tokens(1, n)[0].tolist() for n in (9, 4)]
    want = [result.tokens for result in dg.generate(mine, prompts, max_new_tokens=8, temperature=0)]
    ids = torch.tensor([prompts[0], [0] * 5 + prompts[1]])
    mask = torch.tensor([[1] * 9, [0] * 5 + [1] * 4])
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for cached in (True, False):
        assert theirs.generate(ids, attention_mask=mask, **how, use_cache=cached)[:, 9:].tolist() == want
    beams = [
        theirs.generate(ids, attention_mask=mask, **how, num_beams=3, use_cache=cached) for cached in (True, False)
    ]
    assert torch.equal(*beams)
    how |= {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    looked_up = theirs.generate(ids[:1], attention_mask=mask[:1], **how)
    assert looked_up[0, 9:].tolist() == want[0]


@torch.no_grad()
def test_a_cache_goes_on_where_it_is():
    mine, theirs = pair("mod,mode")
    ids, cache = tokens(), DynamicCache()
    parts = [theirs(part, past_key_values=cache).logits for part in ids.split([5, 1, 12], 1)]
    close(torch.cat(parts, 1), mine(ids, causal=True).logits)
    assert cache.get_seq_length() == 18
    cache.crop(-12)
    close(theirs(ids[:, 6:], past_key_values=cache).logits, parts[2])
    padded = theirs(ids, attention_mask=torch.tensor([[1] * 18, [0] + [1] * 17]), use_cache=True).past_key_values
    with pytest.raises(DepthgateError, match="rows with padding cannot be cropped"):
        padded.crop(-1)


@each
def test_what_is_saved_is_what_is_opened(pattern, tmp_path):
    mine, theirs = pair(pattern)
    theirs.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same({"": dict(again.state_dict())}, {"": dict(theirs.state_dict())})
    decoder = dg.hf.to_decoder(again)
    assert decoder.config == mine.config
    assert same({"": dict(decoder.state_dict())}, {"": dict(mine.state_dict())})
    assert decoder.head.weight is decoder.embed.weight
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, tensor in half.state_dict().items():
        assert not tensor.is_floating_point() or (tensor.dtype == torch.float32) == ("router" in name)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.vocab_size, config.num_hidden_layers, config.max_position_embeddings) == (VOCAB, 4, 64)


def test_continuous_batching_is_that_of_the_decoder():
    mine, theirs = pair("mode")
    prompts = [ids.tolist() for ids in tokens(3)]
    options = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None)
    found = theirs.generate_batch(prompts, generation_config=options)
    expected = dg.generate(mine, prompts, max_new_tokens=4, temperature=0)
    assert [each.generated_tokens for each in found.values()] == [each.tokens for each in expected]


def test_what_it_cannot_do_is_refused(tmp_path):
    mine, theirs = pair("mode")
    ids = tokens(1)
    with pytest.raises(DepthgateError, match="a Decoder cannot use a static or offloaded cache"):
        theirs.generate(ids, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    with pytest.raises(DepthgateError, match=r"attention_mask is \(1, 1, 18, 18\): routed layers need one of shape"):
        theirs(ids, attention_mask=torch.ones(1, 1, 18, 18))
    with pytest.raises(DepthgateError, match=r"DepthgateForCausalLM \(depthgate\) cannot be routed"):
        dg.hf.convert(theirs)
    with pytest.raises(DepthgateError, match="to is 'qwen3', which has no mode layers: write the model as depthgate"):
        dg.hf.export(mine, "qwen3")
    with pytest.raises(DepthgateError, match="the vocabulary of a Decoder stays as it is"):
        theirs.resize_token_embeddings(99)
    values = {**theirs.config.depthgate, "pattern": "fancy"}
    with pytest.raises(DepthgateError, match="'fancy'"):
        type(theirs.config)(depthgate=values)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "depthgate": {**config["depthgate"], "more": 1}}))
    with pytest.raises(DepthgateError, match="more is not an option of ModelConfig"):
        dg.hf.folder.load(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        options = ("--preset=tiny-mode", "--model.experts=4", "--model.layers=3", "--model.pattern=mod,mode")
        assert train(folder / "run", write_data(folder / "text.jsonl"), 4, *options) == 0
        yield folder / "run"


def test_a_run_becomes_a_folder_that_transformers_and_we_open(run, tmp_path, capsys):
    out = tmp_path / "hf"
    assert main(["convert", "--model", str(run), "--out", str(out), "--to", "llama"]) == 2
    assert "to is 'llama', which has no mode layers: write the model as depthgate" in capsys.readouterr().err
    assert not out.exists()
    assert main(["convert", "--model", str(run), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(out), "model_type": "depthgate", "difference": 0.0}
    mine, theirs, again = dg.load(run), AutoModelForCausalLM.from_pretrained(out), dg.load(out)
    ids = AutoTokenizer.from_pretrained(out)("a lazy dog", return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == again.tokenizer.encode("a lazy dog")
    assert theirs.config.eos_token_id == mine.tokenizer.end
    want = mine(ids, causal=True).logits
    assert torch.equal(again(ids, causal=True).logits, want)
    close(theirs(ids).logits, want)
    for weight in theirs.parameters():  # they lie as in the file, not aligned, which may change the last bit
        weight.data = weight.data.clone()
    assert torch.equal(theirs(ids).logits, want)
    (tmp_path / "text").write_text("a lazy dog sleeps over a fox")
    found = []
    for folder in (run, out):
        for words in (["generate", "--prompt", "the fox", "--seed", "3"], ["eval", "--data", str(tmp_path / "text")]):
            assert main([*words, "--model", str(folder), "--device", "cpu", "--json"]) == 0
            found.append(json.loads(capsys.readouterr().out))
    assert found[0]["results"] == found[2]["results"]
    assert {**found[1], "model": ""} == {**found[3], "model": ""}
    for folder in (run, out):  # neither is a model of another family
        assert main(["eval", "--model", str(folder), "--data", "stdlib", "--seq", "64", "--device", "cpu"]) == 2
        said = f"--seq and --dtype are not for models of depthgate's own, as in {folder}: remove them"
        assert said in capsys.readouterr().err
    assert main(["convert", "--model", str(out), "--out", str(tmp_path / "x")]) == 2
    assert "(depthgate) cannot be routed" in capsys.readouterr().err
