"""Token files hold what was tokenized, are whole or not there, and tell when they were touched."""

import hashlib
import os
import struct
import time
import warnings
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthgate.data import token_file
from depthgate.data.token_file import Documents, TokenFile, mix, prepare, split, tokenize, write
from depthgate.data.tokenizer import ByteTokenizer, train_bpe
from depthgate.errors import DepthgateError

BYTES = ByteTokenizer()
TEXTS = [f"document {i} " + "word " * (i % 7) for i in range(50)]


def saved(folder: Path, texts=TEXTS, tokenizer=BYTES) -> TokenFile:
    write(folder / "a.tokens", texts, tokenizer)
    return TokenFile(folder / "a.tokens", verify=True)


def source(folder: Path, texts=TEXTS) -> str:
    (folder / "data.txt").write_text("\n\n\n".join(texts))
    return str(folder / "data.txt")


def contents(documents) -> list[list[int]]:
    n = len(documents)
    where = documents.documents_at(torch.tensor([0]), n)[0]
    ids = documents.read(torch.arange(n), where)
    return [ids[a:b].tolist() for a, b in zip(documents.bounds[:-1], documents.bounds[1:], strict=True)]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), min_size=1, max_size=8))
def test_a_file_holds_every_document_and_its_end(tmp_path_factory, texts):
    file = saved(tmp_path_factory.mktemp("file"), texts)
    assert contents(Documents(file)) == [[*text.encode(), 256] for text in texts]
    assert (file.vocab, file.end, file.documents) == (257, 256, len(texts))
    assert file.text_bytes == sum(len(text.encode()) for text in texts)


class Wide(ByteTokenizer):
    """Ids beyond 16 bits."""

    end = 2**31 + 299

    def __init__(self):
        super().__init__()
        self.vocab = 2**31 + 300

    def encode_many(self, texts):
        return [[2**31 + i for i in ids] for ids in super().encode_many(texts)]


class Narrow(ByteTokenizer):
    """The largest id of 16 bits."""

    end = 2**16 - 1

    def __init__(self):
        super().__init__()
        self.vocab = 2**16


def test_large_ids_are_kept_in_32_bits_and_ids_near_2_to_16_in_16(tmp_path):
    assert contents(Documents(saved(tmp_path, ["ab"], Wide())))[0] == [2**31 + 97, 2**31 + 98, 2**31 + 299]
    file = saved(tmp_path, ["ab"], Narrow())
    assert contents(Documents(file))[0] == [97, 98, 2**16 - 1]
    assert file.ids.dtype is torch.int16


def test_an_id_outside_the_vocabulary_is_refused_when_written(tmp_path):
    liar = ByteTokenizer()
    liar.vocab = 100
    with pytest.raises(DepthgateError, match="gave the id 117, but its vocabulary has 100"):
        saved(tmp_path, ["aaau"], liar)
    assert list(tmp_path.iterdir()) == []


def test_an_id_outside_the_vocabulary_is_refused_when_read_even_with_a_forged_hash(tmp_path):
    path = saved(tmp_path, ["abcdefg"]).path
    content = bytearray(path.read_bytes())
    content[128:130] = struct.pack("<H", 300)
    head = bytes(content[:48])
    content[48:80] = hashlib.sha256(head + hashlib.sha256(content[128:]).digest()).digest()
    path.write_bytes(content)
    with pytest.raises(DepthgateError, match=r"a.tokens is damaged .* holds the id 300, but its vocabulary has 257"):
        contents(Documents(TokenFile(path, verify=True)))


def test_every_cut_and_every_flipped_byte_is_found(tmp_path):
    good = saved(tmp_path, ["abc", "defg"]).path.read_bytes()
    path = tmp_path / "bad.tokens"
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(DepthgateError, match=r"bad.tokens is damaged or foreign"):
            TokenFile(path, verify=False)
    path.write_bytes(good + b"\0")
    with pytest.raises(DepthgateError, match=r"bad.tokens is damaged or foreign"):
        TokenFile(path, verify=False)
    for place in [*range(80), *range(128, len(good))]:  # between lie zeros that mean nothing
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(DepthgateError, match=r"bad.tokens is damaged or foreign"):
            TokenFile(path)
    path.write_bytes(os.urandom(500))
    with pytest.raises(DepthgateError, match="not a token file"):
        TokenFile(path)
    with pytest.raises(DepthgateError, match=r"none.tokens cannot be read"):
        TokenFile(tmp_path / "none.tokens")


def test_opening_a_file_warns_of_nothing(tmp_path):
    saved(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TokenFile(tmp_path / "a.tokens")


def test_data_is_tokenized_once(tmp_path, monkeypatch):
    data = source(tmp_path)
    first = tokenize(data, BYTES, tmp_path / "cache")
    monkeypatch.setattr(token_file, "documents", None)  # would fail if it were read again
    assert tokenize(data, BYTES, tmp_path / "cache").digest == first.digest
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".tokens"]


def test_other_text_and_other_tokenizers_get_other_files(tmp_path):
    one = tokenize(source(tmp_path), BYTES, tmp_path / "cache")
    two = tokenize(source(tmp_path), train_bpe(TEXTS, 270), tmp_path / "cache")
    three = tokenize(source(tmp_path, TEXTS[1:]), BYTES, tmp_path / "cache")
    assert len({one.path, two.path, three.path}) == 3
    assert len(two) < len(one)


def test_a_damaged_cache_is_named_and_made_again(tmp_path):
    data = source(tmp_path)
    good = tokenize(data, BYTES, tmp_path / "cache")
    path, content = good.path, good.path.read_bytes()
    del good
    flipped = bytearray(content)
    flipped[150] ^= 1
    write(tmp_path / "other.tokens", TEXTS, train_bpe(TEXTS, 270))
    for bad in (b"", content[:-8], bytes(flipped), b"x" * 1000, (tmp_path / "other.tokens").read_bytes()):
        path.write_bytes(bad)
        with pytest.warns(UserWarning, match=path.name):
            assert tokenize(data, BYTES, tmp_path / "cache").path == path
        assert path.read_bytes() == content
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenize(data, BYTES, tmp_path / "cache")


def test_a_failure_while_writing_leaves_nothing(tmp_path):
    def failing():
        yield "fine"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.tokens", failing(), BYTES)
    assert list(tmp_path.iterdir()) == []
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine\n\n\n\xff")
    with pytest.raises(DepthgateError, match=r"bad.txt is not UTF-8"):
        tokenize(str(bad), BYTES, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_temporary_files_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path):
    old, new = tmp_path / ".old.tokens.123.part", tmp_path / ".new.tokens.456.part"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (time.time() - 10**6,) * 2)
    saved(tmp_path)
    assert not old.exists()
    assert new.exists()


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(DepthgateError, match=r"token cache .* cannot be written: .*; name another folder"):
        tokenize(source(tmp_path), BYTES, tmp_path / "file")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DepthgateError, match="cannot be written: No space left on device"):
        tokenize(source(tmp_path), BYTES, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.floats(0.001, 0.5), st.integers(0, 5))
def test_a_split_shares_out_every_token_and_both_sides_have_some(tmp_path_factory, sizes, share, seed):
    texts = ["x" * size for size in sizes]
    file = saved(tmp_path_factory.mktemp("split"), texts)
    if len(file) < 4:
        with pytest.raises(DepthgateError, match="too few"):
            split(file, share, seed)
        return
    train, held = split(file, share, seed)
    assert len(train) + len(held) == len(file)
    assert len(train) > 0
    assert 2 <= len(held) <= max(share * len(file), min(len(file) // 10, 4096), 2)
    again = split(file, share, seed)
    assert contents(again.train) == contents(train)
    assert contents(again.validation) == contents(held)
    whole = sorted(contents(Documents(file)))
    if sorted(contents(train) + contents(held)) != whole:  # the tail of the last ones was cut off instead
        assert [*chain(*contents(train), *contents(held))] == [*chain(*contents(Documents(file)))]


def test_a_split_by_documents_keeps_them_whole_and_follows_the_seed(tmp_path):
    file = saved(tmp_path)
    seen = set()
    for seed in range(4):
        train, held = split(file, 0.2, seed)
        assert sorted(contents(train) + contents(held)) == sorted(contents(Documents(file)))
        assert abs(len(held) / len(file) - 0.2) < 0.03
        seen.add(held.fingerprint())
    assert len(seen) == 4


def test_one_document_is_split_at_its_tail(tmp_path):
    train, held = split(saved(tmp_path, ["abcdefghi" * 100]), 0.25)
    assert (len(train), len(held)) == (676, 225)
    assert contents(train)[0] + contents(held)[0] == [*b"abcdefghi" * 100, 256]


def test_a_validation_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = source(tmp_path)
    (tmp_path / "valid.txt").write_text("held out")
    train, held = prepare(data, BYTES, str(tmp_path / "valid.txt"))
    assert len(contents(train)) == len(TEXTS)
    assert contents(held) == [[*b"held out", 256]]


def test_prepare_refuses_missing_data(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DepthgateError, match="does not exist"):
        prepare(str(tmp_path / "none.txt"), BYTES)
    assert not (tmp_path / "cache").exists()


def test_fingerprints_follow_tokens_and_documents(tmp_path):
    one, two = saved(tmp_path, ["ab", "cd"]), saved(tmp_path, ["ab", "ce"])
    assert Documents(one).fingerprint() != Documents(two).fingerprint()
    assert Documents(one).fingerprint() == Documents(saved(tmp_path, ["ab", "cd"])).fingerprint()
    assert split(one, 0.4).train.fingerprint() != Documents(one).fingerprint()


def test_the_standard_library_as_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    train, held = prepare("stdlib", BYTES)
    assert len(train) > 5_000_000
    assert 2**17 < len(held) <= 2**18
    assert held.bounds.diff().max() <= 2**15  # no single file decides
    assert train.file.text_bytes + train.file.documents == len(train) + len(held)


def test_mixing_is_pinned():
    """The order of data must not change between versions: these are splitmix64's first values from 0, and ours."""
    assert mix(0) == 0xE220A8397B1DCDAF
    assert len({mix(a, b) for a in range(50) for b in range(50)}) == 2500
