"""A converted Hugging Face model has the same page."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Metaspace, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from depthgate.data.tokenizer import train_bpe
from depthgate.hf.layer import routed_layers
from tests.hf.zoo import ROUTED, dense, routed
from tests.view.pages import page_data, view, view_model

TEXT = " ".join(f"w{(7 * i) % 90}" for i in range(150))  # more than the model reads at once


def save(model, folder):
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(routed("llama"), tmp_path_factory.mktemp("hf") / "routed")


def test_the_page_holds_what_the_plans_say(folder, tmp_path):
    page = tmp_path / "page.html"
    assert view_model(folder, page, "--prompt", TEXT) == 0
    data = page_data(page)
    assert data["layers"] == list(ROUTED)
    assert data["tokens"] == TEXT.split()
    model, width = routed("llama"), 128
    ids = torch.tensor([[int(word[1:]) for word in TEXT.split()]])
    for start in (0, width):
        for causal, name in ((True, "causal"), (False, "top_k")):
            plans = []
            hooks = [
                layer.depth_router.register_forward_hook(lambda _, __, plan: plans.append(plan))  # noqa: B023
                for layer in routed_layers(model)
            ]
            with torch.no_grad():
                model(ids[:, start : start + width], causal_routing=causal, use_cache=False)
            for hook in hooks:
                hook.remove()
            for row, plan in enumerate(plans):
                chosen = "".join(str(int(yes)) for yes in plan.chosen[0, :, 0].tolist())
                assert data[name][row][start : start + width] == chosen
                if causal:
                    wanted = plan.scores[0, :, 0].tolist()
                    assert data["scores"][row][start : start + width] == pytest.approx(wanted, abs=1e-3)
    assert 0 < data["causal"][0].count("1") < 150


def test_it_works_in_a_browser(browser, folder, tmp_path):
    assert view_model(folder, tmp_path / "page.html", "--prompt", "w1 w2 w3") == 0
    browser.open(tmp_path / "page.html")
    assert browser.js("Number(document.getElementById('map').dataset.cells)") == 3 * len(ROUTED)
    browser.click('pre [data-t="1"]')
    score = page_data(tmp_path / "page.html")["scores"][0][1]
    assert f"score {score}" in browser.text("#said")
    browser.assert_alone()


@pytest.mark.parametrize("kind", ["ByteLevel", "ByteFallback"])
def test_characters_of_several_tokens_are_shown_once(browser, tmp_path, kind):
    """A byte-level vocabulary, as GPT's and Qwen's, and one that falls back to bytes, as Llama's."""
    text = "café שלום 😀"
    if kind == "ByteLevel":
        made = train_bpe([], 300).inner
    else:
        vocab = {"<unk>": 0} | {f"<0x{n:02X}>": n + 1 for n in range(256)} | {c: 300 + i for i, c in enumerate("▁acf")}
        made = Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
        made.pre_tokenizer = Metaspace()
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    model = routed("llama")
    model.resize_token_embeddings(320)
    model.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path / "model")
    assert view_model(tmp_path / "model", tmp_path / "page.html", "--prompt", text) == 0
    browser.open(tmp_path / "page.html")
    assert browser.js("document.querySelector('pre').innerText").removeprefix("·") == text.replace(" ", "·")
    labels = page_data(tmp_path / "page.html")["tokens"]
    assert {"byte 1 of 2 of é", "byte 2 of 2 of ש", "byte 3 of 4 of 😀"} <= set(labels)
    browser.assert_alone()


def test_a_dense_model_has_a_page_without_a_map_and_no_picture(tmp_path, capfd):
    folder = save(dense("gpt2"), tmp_path / "dense")
    assert view_model(folder, tmp_path / "page.html", "--prompt", "w1 w2") == 0
    assert "no routed layers" in (tmp_path / "page.html").read_text()
    assert view_model(folder, tmp_path / "other.html", "--prompt", "w1 w2", "--png", tmp_path / "a.png") == 2
    assert "nothing to draw" in capfd.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "page.html"}


def test_what_it_cannot_read_is_named(folder, tmp_path, capfd):
    assert view_model(folder, tmp_path / "page.html") == 2
    assert "--text or --prompt" in capfd.readouterr().err
    (tmp_path / "cut").mkdir()
    for file in folder.iterdir():
        if "tokenizer" not in file.name:
            (tmp_path / "cut" / file.name).write_bytes(file.read_bytes())
    assert view("--model", tmp_path / "cut", "--prompt", "a", "--out", tmp_path / "page.html") == 2
    assert "has no tokenizer: put the files" in capfd.readouterr().err
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}))  # without a word for the unknown
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "cut")
    for text, says in (
        ("w1 word", "cannot express this text"),
        (" ", "the text is ' ': the model's tokenizer makes no"),
    ):
        assert view_model(tmp_path / "cut", tmp_path / "page.html", "--prompt", text) == 2
        assert says in capfd.readouterr().err
    assert not (tmp_path / "page.html").exists()
