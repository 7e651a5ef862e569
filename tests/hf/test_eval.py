"""`depthgate eval` and `bench` on Hugging Face folders: by hand the same."""

import json
import math

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import AutoModelForCausalLM

from depthgate.cli import main
from depthgate.errors import DepthgateWarning
from tests.hf.words import save_model, texts, write_text
from tests.hf.zoo import dense, routed


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def evaluate(folder, text, capsys, *options):
    assert main(["eval", "--model", str(folder), "--data", str(text), "--device", "cpu", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["llama", "granite", "gpt2"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_loss_is_that_of_each_document_alone(tmp_path, capsys, kind, causal):
    folder = save_model(tmp_path / "model", kind)
    routed(kind).save_pretrained(folder)
    found = evaluate(folder, write_text(tmp_path / "text", documents=5, length=17), capsys, "--seq", "100")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    nats = 0.0
    for text in texts(5, 17):
        ids = torch.tensor([[1, *(int(word[1:]) for word in text.split()), 2]])
        with torch.no_grad():
            logits = model(ids, causal_routing=causal, use_cache=False).logits[0, :-1]
        nats += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    # One window holds all five documents: of each, 17 words and the end are predicted.
    assert found["tokens"] == 5 * 18
    assert found["bytes"] == sum(len(text) for text in texts(5, 17))
    name = "nats_per_token" if causal else "nats_per_token_top_k"
    assert found[name] == pytest.approx(nats / 90, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["nats_per_token"]))


def test_a_converted_model_is_at_first_the_dense_one_and_flops_follow_the_share(tmp_path, capsys):
    text = write_text(tmp_path / "text", documents=6, length=70)
    dense = evaluate(save_model(tmp_path / "dense"), text, capsys, "--seq", "64")
    same = evaluate(save_model(tmp_path / "same", capacity=0.5), text, capsys, "--seq", "64")
    assert same["nats_per_token"] == pytest.approx(dense["nats_per_token"], rel=1e-5)
    assert same["routed_share"] == [1.0, 1.0]
    # Width 32, hidden 48, 4 heads of 8 and 2 for keys and values; the head has 96 rows; windows of 64 tokens.
    layer = 2 * (32 * (32 + 2 * 16 + 32) + 3 * 32 * 48)
    seen = (6 * 64**2 + 48**2) / 432  # of 6 documents of 72 tokens; what a token looks at, masks left out
    assert dense["flops_per_token"] == pytest.approx(4 * (layer + 4 * seen * 32) + 2 * 96 * 32, rel=1e-3)
    folder = save_model(tmp_path / "routed")
    routed("llama").save_pretrained(folder)
    less = evaluate(folder, text, capsys, "--seq", "64")
    share = sum(less["routed_share"]) / 2
    saved = 2 * (1 - share) * layer  # and of attention some more
    assert saved < dense["flops_per_token"] - less["flops_per_token"] < saved + 2 * 4 * 64 * 32
    assert evaluate(folder, text, capsys, "--seq", "64", "--tokens", "100")["tokens"] < less["tokens"]


def test_bytes_do_not_depend_on_how_a_text_is_cut(tmp_path, capsys):
    """A decoder that drops the space before the first word drops it once a document, not once a window."""
    folder, text = save_model(tmp_path / "model"), write_text(tmp_path / "text.txt", documents=3, length=40)
    said = json.loads((folder / "tokenizer.json").read_text())
    words = {word if i < 3 else f"▁{word}": i for word, i in said["model"]["vocab"].items()}
    said |= {"model": {**said["model"], "vocab": words}, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}}
    said |= {"decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}}
    said["pre_tokenizer"] |= {"prepend_scheme": "always", "split": True}
    (folder / "tokenizer.json").write_text(json.dumps(said))
    size = len(text.read_bytes()) - 2 * len("<|endoftext|>")
    assert [evaluate(folder, text, capsys, "--seq", n)["bytes"] for n in ("8", "64")] == [size, size]


def test_weights_that_are_no_numbers_are_said(tmp_path, capsys):
    folder, text = save_model(tmp_path / "model"), write_text(tmp_path / "text.txt", documents=2)
    model = dense("llama")
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(folder)
    assert main(["eval", "--model", str(folder), "--data", str(text), "--device", "cpu", "--json"]) == 2
    assert "not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--data", "heldout"], "name a text"),
        ([], "data is missing: give --data"),
        (["--data", "stdlib", "--seq", "999"], "room for 128 tokens"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, capsys, options, why):
    folder = save_model(tmp_path / "model")
    assert main(["eval", "--model", str(folder), "--device", "cpu", *options]) == 2
    assert why in capsys.readouterr().err


def test_bench_times_models_whose_cache_is_right(tmp_path, capsys):
    text = write_text(tmp_path / "text")
    dense, less = save_model(tmp_path / "dense"), save_model(tmp_path / "routed")
    routed("llama").save_pretrained(less)
    names = ["--models", f"{dense},{less}", "--data", str(text), "--device", "cpu"]
    sizes = ["--context", "40", "--new_tokens", "4", "--repeats", "2", "--batch", "1,2"]
    assert main(["bench", *names, *sizes, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["prefill_tokens_per_second"] > 0 and row["decode_tokens_per_second"] > 0 for row in rows)
    plain, engine = ([row for row in rows if row["path"] == path] for path in ("plain", "engine"))
    for found in (plain, engine):
        assert [(row["model"], row["batch"]) for row in found] == [(str(m), b) for b in (1, 2) for m in (dense, less)]
    assert plain[1]["kv_bytes"] < plain[0]["kv_bytes"] == 4 * 2 * 2 * 8 * 44 * 4  # layers, k and v, heads, size, tokens
    assert main(["bench", *names, *sizes]) == 0
    assert "decode tokens/s" in capsys.readouterr().out


def test_bench_times_a_converted_model_beside_its_dense_twin(tmp_path, capsys):
    text, folder = write_text(tmp_path / "text"), save_model(tmp_path / "routed")
    routed("llama").save_pretrained(folder)
    sizes = ["--context", "40", "--new_tokens", "4", "--repeats", "1", "--batch", "1", "--device", "cpu", "--json"]
    assert main(["bench", "--models", str(folder), "--data", str(text), *sizes]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    names = [(name, path) for name in ("dense twin", str(folder)) for path in ("plain", "engine")]
    assert [(row["model"], row["path"]) for row in rows] == names
    assert rows[2]["kv_bytes"] < rows[0]["kv_bytes"]


def test_bench_says_why_a_model_is_not_timed_on_the_engine(tmp_path, capsys):
    text, folder = write_text(tmp_path / "text"), save_model(tmp_path / "dense", "mistral")
    sizes = ["--context", "40", "--new_tokens", "4", "--repeats", "1", "--batch", "1", "--device", "cpu", "--json"]
    with pytest.warns(DepthgateWarning, match="is not timed on the engine: .*mistral"):
        assert main(["bench", "--models", str(folder), "--data", str(text), *sizes]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["path"] == "plain"
