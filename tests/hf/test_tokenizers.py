"""The tokenizer and the other files next to the weights: a converted model reads text as its source does."""

import json
import re

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import AutoTokenizer

import depthgate as dg
from depthgate.cli import main
from depthgate.hf.adapter import tokenizer_of
from tests.hf import elsewhere
from tests.hf.words import save_model, write_text
from tests.hf.zoo import dense

TEXT = "In 1212, 12 or 34?\n\n  a<|end|>b  é"
SPECIAL = {"eos_token": "<|end|>", "bos_token": "<|end|>", "unk_token": "<|end|>"}


def letters():
    """95 ids: visible ASCII, a space, a merge of two digits, and an end."""
    words = [chr(33 + i) for i in range(92)]
    return {word: i for i, word in enumerate([*words, "Ġ", "12", "<|end|>"])}


def save_digits(folder, named):
    """A tokenizer.json that splits digits, which a merge of two would join; and a configuration that names a class."""
    inner = Tokenizer(BPE(letters(), [("1", "2")]))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    inner.save(str(folder / "tokenizer.json"))
    if named is not None:
        values = {"tokenizer_class": named, "chat_template": "{{ messages }}", **SPECIAL}
        (folder / "tokenizer_config.json").write_text(json.dumps(values))


def convert(folder, *options):
    out = folder.parent / "routed"
    assert main(["convert", "--model", str(folder), "--out", str(out), *options]) == 0
    return out


def same(a, b):
    """The ids of two tokenizers of transformers, if those and all the rest are the same."""
    assert type(a) is type(b)
    assert a.backend_tokenizer.to_str() == b.backend_tokenizer.to_str()
    assert a.special_tokens_map == b.special_tokens_map
    assert a.chat_template == b.chat_template
    ids = a(TEXT)["input_ids"]
    assert b(TEXT)["input_ids"] == ids
    return ids


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("olmo2", "GPT2Tokenizer"),
        ("granite", "GPT2TokenizerFast"),
        ("mistral", "LlamaTokenizerFast"),
        ("llama", "LlamaTokenizer"),
        ("llama", "GPT2Tokenizer"),
        ("phi3", "LlamaTokenizer"),
        ("qwen2", "LlamaTokenizerFast"),
        ("qwen3", "PreTrainedTokenizerFast"),
        ("qwen3_moe", "Qwen2Tokenizer"),
        ("mixtral", None),
        ("gemma3_text", "GemmaTokenizer"),
        ("smollm3", "PreTrainedTokenizerFast"),
        ("gpt_neox", "GPTNeoXTokenizerFast"),
        ("gpt2", None),
        ("gpt2", "GPT2Tokenizer"),
    ],
)
def test_a_converted_model_has_the_tokenizer_of_its_source(tmp_path, capsys, kind, named):
    dense(kind).save_pretrained(tmp_path / "dense")
    save_digits(tmp_path / "dense", named)
    before = {path.name: path.read_bytes() for path in (tmp_path / "dense").iterdir()}
    out = convert(tmp_path / "dense", "--layers", "1")
    first = AutoTokenizer.from_pretrained(tmp_path / "dense")
    ids = same(first, AutoTokenizer.from_pretrained(out))
    assert letters()["12"] not in ids or type(first).__name__ != "TokenizersBackend"  # others split as they like
    assert {path.name: path.read_bytes() for path in (tmp_path / "dense").iterdir()} == before
    # Next to a model that was saved without the command, with a tokenizer that was copied as it is.
    dg.hf.convert(dense(kind), 1.0).save_pretrained(tmp_path / "dense")
    same(first, AutoTokenizer.from_pretrained(tmp_path / "dense"))


def test_a_tokenizer_that_knows_some_words_only_is_converted(tmp_path, capsys):
    dense("llama").save_pretrained(tmp_path / "dense")
    Tokenizer(WordLevel({"a": 0, "b": 1})).save(str(tmp_path / "dense" / "tokenizer.json"))
    found = AutoTokenizer.from_pretrained(convert(tmp_path / "dense"))
    assert found("b")["input_ids"] == [1]


ELSEWHERE = """
import json, sys
from transformers import AutoTokenizer
for trust in (False, True):
    assert "depthgate" not in sys.modules
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=trust)
    print(json.dumps([type(tokenizer).__name__, tokenizer(sys.argv[2])["input_ids"]]))
"""


def test_it_has_it_too_where_depthgate_is_not_imported(tmp_path, capsys):
    dense("olmo2").save_pretrained(tmp_path / "dense")
    save_digits(tmp_path / "dense", "GPT2Tokenizer")
    out = convert(tmp_path / "dense")
    done = elsewhere.run(ELSEWHERE, str(out), TEXT)
    assert done.returncode == 0, done.stderr
    first = AutoTokenizer.from_pretrained(tmp_path / "dense")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [["TokenizersBackend", first(TEXT)["input_ids"]]] * 2


def test_a_vocabulary_and_merges_alone_become_a_tokenizer_that_everything_reads(tmp_path, capsys):
    source = tmp_path / "dense"
    dense("gpt2").save_pretrained(source)
    words = {**letters(), "<|endoftext|>": 95}
    (source / "vocab.json").write_text(json.dumps(words))
    (source / "merges.txt").write_text("#version: 0.2\n1 2\n")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    out = convert(source)
    ids = same(AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(out))
    assert ids[:5] == [words[token] for token in ("I", "n", "Ġ", "12", "12")]
    for folder in (source, out):
        assert tokenizer_of(folder).encode("In 1212") == ids[:5]
        assert tokenizer_of(folder).end == 95
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    (tmp_path / "text").write_text("In 1212, 12 or 34? " * 60)
    run = ["finetune", "--model", str(out), "--data", str(tmp_path / "text"), "--out", str(tmp_path / "tuned")]
    assert main([*run, "--steps", "1", "--batch", "2", "--seq", "32", "--device", "cpu"]) == 0
    same(AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(tmp_path / "tuned"))


def test_without_a_tokenizer_what_needs_one_says_where_it_comes_from(tmp_path, capsys):
    dense("gpt2").save_pretrained(tmp_path / "dense")
    out = convert(tmp_path / "dense")
    assert not list(out.glob("tokenizer*"))
    write_text(tmp_path / "text")
    assert main(["finetune", "--model", str(out), "--data", str(tmp_path / "text"), "--out", str(tmp_path / "x")]) == 2
    assert "has no tokenizer: put the files of the model's own there, as AutoTokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.json", "{bad", r"tokenizer.json is not a tokenizer: "),
        ("tokenizer.json", "{}", r"tokenizer.json is not a tokenizer: "),
        ("tokenizer.json", '{"model": {"vocab": {"a": 1099511627776}}}', "ids that are not whole numbers from 0 to"),
        ("tokenizer_config.json", "{bad", "tokenizer_config.json cannot be loaded: "),
        ("tokenizer_config.json", '{"bos_token": {"content": 3}}', "has no tokenizer that loads: .*Mend its files"),
        ("vocab.json", json.dumps({"a": 2**30}), "has 1073741824 as its largest id: it is damaged"),
        ("generation_config.json", "{bad", "generation_config.json cannot be loaded: .*Mend it, or take it away"),
        ("generation_config.json", "[]", "generation_config.json cannot be loaded: "),
        ("generation_config.json", '{"do_sample": false, "temperature": 0.6}', "cannot be loaded: .*temperature"),
    ],
)
def test_damaged_files_are_refused_and_nothing_is_written(tmp_path, capsys, name, content, why):
    save_model(tmp_path / "gpt2", "gpt2")
    if name == "vocab.json":
        (tmp_path / "gpt2" / "tokenizer.json").unlink()
        (tmp_path / "gpt2" / "tokenizer_config.json").unlink()
        (tmp_path / "gpt2" / "merges.txt").write_text("")
    (tmp_path / "gpt2" / name).write_text(content)
    before = {path.name: path.read_bytes() for path in (tmp_path / "gpt2").iterdir()}
    assert main(["convert", "--model", str(tmp_path / "gpt2"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("depthgate: error: ")
    assert re.search(why, error), error
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "gpt2").iterdir()} == before


def test_finetune_refuses_them_before_it_makes_a_folder(tmp_path, capsys):
    folder = save_model(tmp_path / "model", capacity=0.5)
    (folder / "generation_config.json").write_text("{bad")
    text = write_text(tmp_path / "text")
    assert main(["finetune", "--model", str(folder), "--data", str(text), "--out", str(tmp_path / "out")]) == 2
    assert "generation_config.json cannot be loaded" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
