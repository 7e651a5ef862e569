"""Any text comes back; ends are ids of their own; folders are read, and bad ones refused by name."""

import codecs
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from depthgate.data import tokenizer as tokenizer_module
from depthgate.data.tokenizer import END, ByteTokenizer, TextTokenizer, load_tokenizer, read_tokenizer, train_bpe
from depthgate.errors import DepthgateError

CORPUS = ["def route(tokens):\n    return tokens[:k]\n\n", "Größe 🙂 the tokens, the route, the rest\n"] * 20
BPE = train_bpe(CORPUS, 280)
any_text = st.text(st.characters(exclude_categories=("Cs",)))  # all of Unicode that UTF-8 can hold
both = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
HARD = [
    "",
    END,
    f"a{END}b",
    "\0\x01\x7f\r\n\t ",
    "🙂👩‍👩‍👧\u2028\ufeff\ufffd",
    "e\u0301 é",
    "\U0010ffff",
    "   \n\n   x  ",
]


@both
@given(text=any_text)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.end not in ids
    assert all(0 <= i < tokenizer.vocab for i in ids)


@both
@pytest.mark.parametrize("text", HARD)
def test_hard_texts_come_back_and_never_make_an_end(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end not in ids


@both
def test_an_end_has_no_bytes_and_broken_characters_are_replaced(tokenizer):
    ids = tokenizer.encode("ab")
    assert tokenizer.decode([*ids, tokenizer.end, *ids]) == "abab"
    assert len(tokenizer.decode_bytes([*ids, tokenizer.end])) == 2
    half = ByteTokenizer().encode("🙂")[:2]
    if tokenizer is BPE:
        half = [i for byte in half for i in range(BPE.vocab) if BPE.decode_bytes([i]) == bytes([byte])]
    assert tokenizer.decode(half) == "\ufffd"


@both
@given(texts=st.lists(any_text, max_size=5))
def test_many_at_once_are_each_alone(tokenizer, texts):
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]


@both
def test_a_stream_can_be_decoded_token_by_token(tokenizer):
    text = "Größe 🙂👩‍👩‍👧 zählt"
    decoder = codecs.getincrementaldecoder("utf-8")()
    assert "".join(decoder.decode(tokenizer.decode_bytes([i])) for i in tokenizer.encode(text)) == text


@both
def test_ids_outside_the_vocabulary_and_half_characters_are_refused(tokenizer):
    for i in (-1, tokenizer.vocab):
        with pytest.raises(DepthgateError, match=f"token id {i} is outside the tokenizer's vocabulary"):
            tokenizer.decode([i])
    with pytest.raises(DepthgateError, match="half a surrogate pair at character 2"):
        tokenizer.encode("ab\ud800")


def test_bytes_are_their_own_ids():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab, tokenizer.end) == (257, 256)
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]


@both
def test_saved_and_loaded_it_gives_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "deep" / "folder")
    loaded = load_tokenizer(tmp_path / "deep" / "folder")
    assert (loaded.vocab, loaded.end, loaded.fingerprint()) == (tokenizer.vocab, tokenizer.end, tokenizer.fingerprint())
    for text in HARD + CORPUS[:2]:
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
    assert isinstance(loaded, ByteTokenizer) == isinstance(tokenizer, ByteTokenizer)
    assert {p.suffix for p in (tmp_path / "deep" / "folder").iterdir()} == {".json"}


def test_saved_bytes_mean_the_same_to_the_tokenizers_package(tmp_path):
    ByteTokenizer().save(tmp_path)
    theirs = TextTokenizer(read_tokenizer(tmp_path / "tokenizer.json"), END)
    assert theirs.encode("Größe 🙂") == ByteTokenizer().encode("Größe 🙂")
    assert (theirs.vocab, theirs.end) == (257, 256)


def test_bpe_learns_what_is_frequent_and_is_the_same_in_every_process():
    assert BPE.vocab == 280
    assert len(BPE.encode("the tokens")) < len("the tokens")
    code = "from tests.data.test_tokenizer import CORPUS, train_bpe;print(train_bpe(CORPUS, 280).fingerprint())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == BPE.fingerprint()
    assert train_bpe(CORPUS, 279).fingerprint() != BPE.fingerprint()


def test_little_text_gives_a_smaller_vocabulary_and_none_gives_bytes():
    assert 257 < train_bpe(["ababab ababab"], 8192).vocab < 300
    assert train_bpe([], 8192).vocab == 257
    assert train_bpe(CORPUS, 280, limit=10).vocab < 280
    for vocab in (256, 0, -1, True, 3.5, 2**40):
        with pytest.raises(DepthgateError, match="vocab is"):
            train_bpe(CORPUS, vocab)


def test_long_texts_are_encoded_in_parts_and_come_back(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "_PIECE", 7)
    text = "ab\ncdefghijklmnop\n\nqr 🙂" * 5
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text


def words() -> Tokenizer:
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens([AddedToken("</s>", special=True)])
    inner.enable_truncation(2)
    inner.enable_padding(length=16)
    return inner


def folder(path, **files):
    words().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "</s>"}},
        {"tokenizer_config": {"eos_token": {"content": "</s>", "lstrip": False}}},
        {"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "</s>"}},
    ],
)
def test_a_hugging_face_folder_without_its_truncation_and_padding(tmp_path, files):
    tokenizer = load_tokenizer(folder(tmp_path, **files))
    assert (tokenizer.vocab, tokenizer.end) == (4, 3)
    assert tokenizer.encode("hello world hello what") == [1, 2, 1, 0]
    assert tokenizer.decode([1, 2, 3]) == "hello world"
    assert len(tokenizer.decode_bytes([1, 2, 3])) == 11


def test_bad_folders_are_refused_by_name(tmp_path):
    with pytest.raises(DepthgateError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
    folder(tmp_path)
    with pytest.raises(DepthgateError, match="does not say which token ends a text: add eos_token"):
        load_tokenizer(tmp_path)
    folder(tmp_path, tokenizer_config={"eos_token": "<eos>"})
    with pytest.raises(DepthgateError, match="'<eos>' is not in the tokenizer's vocabulary of 4"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DepthgateError, match=r"tokenizer_config.json cannot be read"):
        load_tokenizer(tmp_path)
    for bad in ("", "{}", "[]", '{"model": 3}', "\x80abc"):
        (tmp_path / "tokenizer.json").write_text(bad)
        with pytest.raises(DepthgateError, match=r"tokenizer.json is not a tokenizer"):
            load_tokenizer(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DepthgateError, match="cannot be written"):
        BPE.save(tmp_path / "file" / "inside")
