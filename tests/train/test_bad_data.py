"""Data that cannot be trained on or measured: an error before step 0, and the same command, mended, works (row 44 of
docs/reliability.md)."""

import gzip
import json
import lzma
import shutil
from pathlib import Path

import pytest
import torch

from depthgate.checkpoint import store as checkpoint
from depthgate.cli import main
from depthgate.data.token_file import TokenFile
from depthgate.data.tokenizer import ByteTokenizer
from tests.train.tiny import same, train, write_data


@pytest.fixture
def good(tmp_path):
    return write_data(tmp_path / "text.jsonl")


def write(name: str, content: bytes):
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def zst(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(content)


DATA = {
    "empty": (write("a.txt", b""), "holds no text"),
    "blank": (write("a.txt", b" \n\t\n" * 500), "holds no text"),
    "empty documents": (write("a.jsonl", b'{"text": ""}\n\n\n' * 9), "holds no text"),
    "one token": (write("a.txt", b"x"), "the data has 2 tokens"),
    "shorter than a sequence": (write("a.txt", b"hello world"), "context + 1 = 33"),
    "undecodable text": (write("a.txt", b"abc\xff" * 99), "a.txt is not UTF-8 text: byte 0xff at offset 3"),
    "undecodable jsonl": (write("a.jsonl", b'{"text": "\xff"}'), "a.jsonl is not UTF-8 text"),
    "undecodable gz": (write("a.txt.gz", gzip.compress(b"abc\xff")), "a.txt.gz is not UTF-8 text"),
    "cut gz": (write("a.txt.gz", gzip.compress(b"abc" * 999)[:-9]), "a.txt.gz is damaged or cut short"),
    "cut xz": (write("a.txt.xz", lzma.compress(b"abc" * 999)[:-9]), "a.txt.xz is damaged or cut short"),
    "cut zst": (lambda f: write("a.txt.zst", zst(b"abc" * 999)[:-3])(f), "a.txt.zst is damaged or cut short"),
    "no gz at all": (write("a.txt.gz", b"plain"), "a.txt.gz is damaged or cut short"),
    "jsonl without text": (write("a.jsonl", b'{"a": 1}\n'), "a.jsonl, line 1 has no text"),
    "jsonl of numbers": (write("a.jsonl", b'\n{"text": NaN}\n'), "a.jsonl, line 2 has no text"),
    "broken jsonl": (write("a.jsonl", b'{"text": "a"}\n{"te'), "a.jsonl, line 2 is not JSON"),
    "missing": (lambda folder: folder / "none.txt", "does not exist"),
    "empty folder": (lambda folder: folder, "is a folder without text"),
    "glob": (lambda folder: folder / "*.txt", "matches no file"),
    "device": (lambda folder: "/dev/null", "neither a file nor a folder"),
    "nothing": (lambda folder: "", "must name a file"),
}


@pytest.mark.parametrize(("make", "says"), DATA.values(), ids=DATA.keys())
def test_bad_data_is_refused_before_the_first_step(tmp_path, good, make, says, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    bad = make(folder)
    for options in ((bad, 3), (good, 3, f"--validation={bad}")):
        if says.startswith(("the data has", "context")) and options[0] == good:
            continue  # enough to measure
        assert train(tmp_path / "a", *options) == 2
        errors = capsys.readouterr().err
        assert says in errors
        assert len(errors.splitlines()) <= 2
        assert "Traceback" not in errors
        assert not (tmp_path / "a").exists()
    assert train(tmp_path / "a", good, 3) == 0


def test_blank_lines_of_jsonl_are_no_documents(tmp_path, good):
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n" + Path(good).read_text().replace("\n", "\n \n\n"))
    assert train(tmp_path / "a", good, 3) == 0
    assert train(tmp_path / "b", blank, 3) == 0
    assert same(tmp_path / "a", tmp_path / "b")


TOKENIZERS = {
    "no folder": (lambda f: None, "no tokenizer.json"),
    "empty": (lambda f: (f / "tokenizer.json").write_text(""), "is not a tokenizer"),
    "cut": (
        lambda f: (f / "tokenizer.json").write_text((f / "tokenizer.json").read_text()[:500]),
        "is not a tokenizer",
    ),
    "another kind": (lambda f: (f / "tokenizer.json").write_text('{"model": {"vocab": {}}}'), "is not a tokenizer"),
    "no end": (lambda f: (f / "tokenizer_config.json").write_text("{}"), "which token ends a text"),
    "wrong end": (lambda f: (f / "tokenizer_config.json").write_text('{"eos_token": "</s>"}'), "not in the tokenizer"),
}


@pytest.mark.parametrize(("damage", "says"), TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_a_damaged_tokenizer_folder_is_refused(tmp_path, good, damage, says, capsys):
    folder = tmp_path / "hf"
    if says != "no tokenizer.json":
        ByteTokenizer().save(folder)
    damage(folder)
    assert train(tmp_path / "a", good, 3, f"--tokenizer={folder}") == 2
    assert says in capsys.readouterr().err
    ByteTokenizer().save(folder)
    assert train(tmp_path / "a", good, 3, f"--tokenizer={folder}") == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(tmp_path, good, capsys):
    assert train(tmp_path / "a", good, 3, "--device=cuda") == 2
    assert "no CUDA device is available: use --device cpu" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_vocabulary_that_does_not_match_is_refused(tmp_path, good, capsys):
    assert train(tmp_path / "a", good, 3, "--model.vocab=300") == 2
    assert "model.vocab is 300, but the tokenizer has 257 tokens" in capsys.readouterr().err
    assert train(tmp_path / "a", good, 3, "--tokenizer=bpe", "--vocab=270") == 0
    assert train(tmp_path / "a", good, 4, "--tokenizer=bpe", "--vocab=280", "--resume") == 2
    assert "vocab: 270 there, 280 here" in capsys.readouterr().err


@pytest.mark.parametrize("change", [lambda b: b[:-8], lambda b: b"", lambda b: b[:200] + b"\xff\xff" + b[202:]])
def test_a_damaged_token_file_is_named_and_made_again(tmp_path, good, change):
    assert train(tmp_path / "a", good, 3) == 0
    (path,) = (tmp_path / "home" / ".cache" / "depthgate").iterdir()
    content = path.read_bytes()
    path.write_bytes(change(content))
    with pytest.warns(UserWarning, match=path.name):
        assert train(tmp_path / "b", good, 3) == 0
    assert path.read_bytes() == content
    assert len(TokenFile(path)) > 1000
    assert same(tmp_path / "a", tmp_path / "b")


def measure(model, data, capsys) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["eval", "--model", str(model), "--data", str(data), "--device=cpu", "--json"])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return code, shown.out, shown.err


def test_eval_refuses_what_it_cannot_measure_and_prints_one_object(tmp_path, good, capsys):
    assert train(tmp_path / "run", good, 7) == 0
    for content, says in ((b"", "holds no text"), (b"x", "no byte of text"), (b"ab\xff", "is not UTF-8")):
        (tmp_path / "a.txt").write_bytes(content)
        code, out, errors = measure(tmp_path / "run", tmp_path / "a.txt", capsys)
        assert (code, out) == (2, "")
        assert says in errors
    for model, says in (
        (tmp_path / "none", "is not a folder"),
        (tmp_path, f"no complete checkpoint in {tmp_path}: it holds runs, name one of them: {tmp_path / 'run'}\n"),
        (tmp_path / "home", f"no complete checkpoint in {tmp_path / 'home'}: the run has not saved yet"),
    ):
        code, out, errors = measure(model, good, capsys)
        assert (code, out) == (2, "")
        assert says in errors
    (tmp_path / "a.txt").write_bytes(b"xy")
    code, out, _ = measure(tmp_path / "run", tmp_path / "a.txt", capsys)
    assert code == 0
    assert json.loads(out)["tokens"] == 2
    assert out.count("\n") == 1


def test_eval_of_a_damaged_run(tmp_path, good, capsys):
    assert train(tmp_path / "run", good, 7) == 0
    (tmp_path / "run" / "step-7" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="step 5 is loaded instead"):
        code, out, _ = measure(tmp_path / "run", good, capsys)
    assert code == 0
    assert json.loads(out)["model"] == str(tmp_path / "run")
    assert measure(tmp_path / "run" / "step-7", good, capsys)[0] == 2
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    code, out, errors = measure(tmp_path / "run" / "step-5", good, capsys)
    assert (code, out) == (2, "")
    assert "tokenizer is missing" in errors
    assert checkpoint.steps(tmp_path / "run") == [5, 7]
