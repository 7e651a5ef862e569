"""Every kind of source gives its documents; every bad one is refused by name."""

import gzip
import json
import lzma
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from depthgate.data import sources as text_module
from depthgate.data.sources import MARK, cut_note, documents, fingerprint, source_files
from depthgate.errors import DepthgateError

ARTICLES = ["First article.\n\nIts second paragraph.", "Zweiter Artikel: äöü 🙂", "Third.\n\n  indented"]


def put(path: Path, content: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode())
    return str(path)


def test_a_text_file_is_cut_at_two_blank_lines_and_not_at_one(tmp_path):
    assert list(documents(put(tmp_path / "a.txt", "\n\n\n".join(ARTICLES) + "\n"))) == ARTICLES
    assert list(documents(put(tmp_path / "b.txt", "\r\n\r\n\r\n\r\n".join(["x", "y"])))) == ["x", "y"]
    assert list(documents(put(tmp_path / "c", "one\n\nstill one\n"))) == ["one\n\nstill one"]


def test_a_text_file_is_whole_if_asked(tmp_path):
    for text in ("one\n\n\ntwo\n", f"a{MARK}b\n"):
        data = put(tmp_path / "a.txt", text)
        assert list(documents(f"whole:{data}")) == [text]
        assert fingerprint(f"whole:{data}") != fingerprint(data)
        assert cut_note(f"whole:{data}", 1) == cut_note(data, 1) == ""
        assert f"not with --data whole:{data}" in cut_note(data, 2)


def test_marks_cut_and_then_blank_lines_do_not(tmp_path):
    path = put(tmp_path / "a.txt", f"a\n\n\nb\n{MARK}\nc{MARK}d\n{MARK}\n")
    assert list(documents(path)) == ["a\n\n\nb", "c", "d"]


def test_a_mark_cuts_even_where_it_comes_late(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "_PEEK", 4)
    assert list(documents(put(tmp_path / "a.txt", f"aaaa\n\n\nb{MARK}c"))) == ["aaaa", "b", "c"]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",))), min_size=1, max_size=6))
def test_marked_documents_come_back(tmp_path_factory, texts):
    texts = [t.replace(MARK, "").strip("\r\n").removeprefix("\ufeff") for t in texts]
    path = put(tmp_path_factory.mktemp("marked") / "a.txt", MARK.join([*texts, ""]))
    if any(text.strip() for text in texts):
        assert list(documents(path)) == [t for t in texts if t]


def test_source_code_and_markdown_are_one_document_exactly(tmp_path):
    code = f"\nimport os\n\n\n\ndef f():\n    return '{MARK}'\n"
    assert list(documents(put(tmp_path / "a.py", code))) == [code]
    assert list(documents(put(tmp_path / "a.md", code))) == [code]


def test_packed_files(tmp_path):
    plain = put(tmp_path / "a.txt", "\n\n\n".join(ARTICLES))
    for suffix, pack in ((".gz", gzip.compress), (".xz", lzma.compress)):
        path = Path(plain + suffix)
        path.write_bytes(pack(Path(plain).read_bytes()))
        assert list(documents(str(path))) == ARTICLES
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(DepthgateError, match=f"a.txt{suffix} is damaged or cut short"):
            list(documents(str(path)))
        path.write_bytes(b"this is not packed at all")
        with pytest.raises(DepthgateError, match=f"a.txt{suffix} is damaged or cut short"):
            list(documents(str(path)))


def test_zstandard(tmp_path, monkeypatch):
    pack = zstandard.ZstdCompressor().compress
    path = tmp_path / "a.jsonl.zst"
    lines = [json.dumps({"text": f"document {i} " * 50}) + "\n" for i in range(2000)]
    half = len(lines) // 2
    content = pack("".join(lines[:half]).encode()) + pack("".join(lines[half:]).encode()[:-1])  # two frames
    path.write_bytes(content)
    assert list(documents(str(path))) == [f"document {i} " * 50 for i in range(2000)]
    for damaged in (content[:-3], content[: len(content) // 3], b"no frame"):
        path.write_bytes(damaged)
        with pytest.raises(DepthgateError, match=r"a.jsonl.zst is damaged or cut short"):
            list(documents(str(path)))


def test_jsonl_reads_text_or_content_and_names_the_line_that_has_neither(tmp_path):
    good = '{"text": "a\\nb"}\n\n{"content": "c", "id": 3}\n{"text": ""}\n'
    assert list(documents(put(tmp_path / "a.jsonl", good))) == ["a\nb", "c"]
    for bad in ('{"title": "x"}', '{"text": 3}', '["text"]', '"text"', '{"text": null}'):
        with pytest.raises(DepthgateError, match=r"b.jsonl, line 5 has no text"):
            list(documents(put(tmp_path / "b.jsonl", good + bad)))
    for bad in ("{", "nonsense", "[" * 100_000):
        with pytest.raises(DepthgateError, match=r"b.jsonl, line 5 is not JSON"):
            list(documents(put(tmp_path / "b.jsonl", good + bad)))
    with pytest.raises(DepthgateError, match=r"line 5 holds half a surrogate pair at character 1"):
        list(documents(put(tmp_path / "b.jsonl", good + '{"text": "a\\ud800"}')))


def test_folders_and_globs_are_sorted_and_skip_what_is_no_text(tmp_path):
    put(tmp_path / "b" / "2.txt", "two")
    put(tmp_path / "b" / "1.md", "one")
    put(tmp_path / "a.py", "zero")
    put(tmp_path / "c.jsonl", '{"text": "three"}')
    put(tmp_path / ".git" / "x.txt", "hidden")
    put(tmp_path / ".hidden.txt", "hidden")
    put(tmp_path / "image.png", "no")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"four"))
    assert list(documents(str(tmp_path))) == ["zero", "one", "two", "three", "four"]
    assert list(documents(str(tmp_path / "**" / "*.txt"))) == ["two"]
    assert list(documents(str(tmp_path / "b" / "*"))) == ["one", "two"]


def test_the_standard_library_is_there_and_has_no_tests():
    files = source_files("stdlib")
    assert len(files) > 300
    assert {"argparse.py", "os.py"} <= {f.name for f in files}
    assert not any({"test", "tests", "site-packages"} & set(f.parts) for f in files)
    assert files == source_files("stdlib")
    assert "import" in next(documents("stdlib"))
    assert fingerprint("stdlib") == fingerprint("stdlib")


def test_undecodable_bytes_are_named_with_their_place(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("fünf\n".encode() + b"abc\xff\n")
    with pytest.raises(DepthgateError, match=r"a.txt is not UTF-8 text: byte 0xff at offset 9"):
        list(documents(str(path)))
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"\n\n\xe4x"))
    with pytest.raises(DepthgateError, match=r"byte 0xe4 at offset 2"):
        list(documents(str(path)))


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert list(documents(put(tmp_path / "a.txt", "\ufeffabc"))) == ["abc"]


@pytest.mark.parametrize("content", ["", "\n\n\n\n", MARK * 3, f"\n{MARK}\n", " \n\t" * 99, f" {MARK} "])
def test_empty_and_blank_data(tmp_path, content):
    with pytest.raises(DepthgateError, match="holds no text"):
        list(documents(put(tmp_path / "a.txt", content)))


def test_missing_data(tmp_path):
    for data, message in {
        "": "must name a file",
        "a\0b": "must name a file",
        str(tmp_path / "no.txt"): "does not exist",
        str(tmp_path / "*.txt"): "matches no file",
        str(tmp_path): "is a folder without text",
        "x" * 5000: "cannot be read",
        "/dev/null": "neither a file nor a folder",
    }.items():
        for function in (lambda d: list(documents(d)), fingerprint):
            with pytest.raises(DepthgateError, match=message):
                function(data)


def test_an_unreadable_file(tmp_path, monkeypatch):
    path = put(tmp_path / "a.txt", "x")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DepthgateError, match=r"a.txt cannot be read: Permission denied"):
        list(documents(path))


def test_the_fingerprint_follows_content_order_and_kind(tmp_path):
    one = fingerprint(put(tmp_path / "a.txt", "abc"))
    assert fingerprint(put(tmp_path / "copy.txt", "abc")) == one
    assert fingerprint(put(tmp_path / "a.py", "abc")) != one  # read by another rule
    assert fingerprint(put(tmp_path / "a.txt", "abd")) != one


def test_large_data_is_told_apart_by_size_and_time(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "_HASHED", 2)
    path = put(tmp_path / "a.txt", "abc")
    one = fingerprint(path)
    assert fingerprint(path) == one
    assert fingerprint(put(tmp_path / "a.txt", "abcd")) != one


@pytest.fixture
def offline(monkeypatch):
    """Only what is on this machine: a name that is not a local folder is refused without a network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_datasets_by_name(offline, tmp_path, monkeypatch):
    """The real package, on datasets that are folders of files: a split is a file's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    put(tmp_path / "set" / "train.jsonl", '{"text": "a"}\n{"text": "b"}\n')
    put(tmp_path / "set" / "validation.jsonl", '{"text": "c"}\n')
    put(tmp_path / "labels" / "train.jsonl", '{"label": 1}\n')
    assert list(documents("hf:set")) == ["a", "b"]
    assert list(documents("hf:set::validation")) == ["c"]
    assert fingerprint("hf:set") != fingerprint("hf:other")
    with pytest.raises(DepthgateError, match=r"the Hugging Face dataset 'set::test' cannot be read: .*test"):
        list(documents("hf:set::test"))
    with pytest.raises(DepthgateError, match="dataset labels, record 0 has no text"):
        list(documents("hf:labels"))
    for name in ("hf:no/such", "no/such"):
        with pytest.raises(DepthgateError, match="the Hugging Face dataset 'no/such' cannot be read"):
            list(documents(name))


def test_datasets_need_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for data in ("hf:wikitext", "owner/name"):
        with pytest.raises(DepthgateError, match="install the package datasets"):
            list(documents(data))


def test_a_path_that_is_missing_is_not_taken_for_a_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for data in ("data/name", "texts/train.txt", "texts/train.jsonl.gz", "name"):
        with pytest.raises(DepthgateError, match="does not exist"):
            list(documents(data))
