"""A stream gives the decoded text up to the first stop string, whatever the cuts, and takes nothing back."""

import codecs

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

import depthgate as dg
from depthgate.data.tokenizer import END, ByteTokenizer, TextTokenizer, train_bpe
from depthgate.errors import InvalidValueError
from depthgate.generation.config import Sampling
from depthgate.generation.text import TextStream
from tests.generation.models import built


class Joined(ByteTokenizer):
    """Ids that are places in a list of byte strings."""

    def __init__(self, chunks):
        super().__init__()
        self.chunks = chunks

    def decode_bytes(self, ids):
        return b"".join(self.chunks[i] for i in ids)


class Whole:
    """The same, without a promise that decoded parts join."""

    def __init__(self, chunks):
        self.chunks = chunks

    def decode(self, ids):
        return b"".join(self.chunks[i] for i in ids).decode(errors="replace")


class Written:
    """Decodes the first n ids to text n: what a tokenizer that rewrites its text may do."""

    def __init__(self, texts):
        self.texts = texts

    def decode(self, ids):
        return self.texts[len(ids)]


def reference(text, stops):
    """Letter by letter: the text before the stop string that is complete first, the longest of them at a tie."""
    for n in range(len(text) + 1):
        ended = [len(s) for s in stops if text[:n].endswith(s)]
        if ended:
            return text[: n - max(ended)], True
    return text, False


def run(tokenizer, ids, stops=()):
    stream = TextStream(tokenizer, stops)
    pieces = [stream.push(i) for i in ids]
    pieces.append(stream.finish())
    stream.text = "".join(pieces)
    return pieces, stream


few = st.text("ab", min_size=1, max_size=4)  # few letters: overlaps and restarts
stop_lists = st.lists(few | st.text("abé🙂\ufffd", min_size=1, max_size=4), max_size=3)
parts = st.sampled_from([*"abab", "é", "🙂"]).map(str.encode) | st.binary(min_size=1, max_size=1)
contents = st.lists(parts, max_size=24).map(b"".join)
both = pytest.mark.parametrize("kind", [Joined, Whole])


def cut(data, content):
    places = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=12)))
    return [content[a:b] for a, b in zip([0, *places], [*places, len(content)], strict=True)]  # some are empty


@both
@settings(max_examples=200)
@given(data=st.data(), content=contents, stops=stop_lists)
def test_the_pieces_are_the_text_up_to_the_first_stop(kind, data, content, stops):
    chunks = cut(data, content)
    pieces, stream = run(kind(chunks), range(len(chunks)), stops)
    expected, stopped = reference(content.decode(errors="replace"), stops)
    # Equal as a whole, so U+FFFD is in a piece only where the text has it.
    assert ("".join(pieces), stream.stopped) == (expected, stopped)


@settings(max_examples=200)
@given(data=st.data(), content=contents, stops=stop_lists)
def test_a_stop_is_known_at_once_and_no_more_is_held_than_may_begin_one(data, content, stops):
    chunks = cut(data, content)
    stream, utf8 = TextStream(Joined(chunks), stops), codecs.getincrementaldecoder("utf-8")("replace")
    known = text = ""
    for i, chunk in enumerate(chunks):
        known += utf8.decode(chunk)  # all whole characters so far
        text += stream.push(i)
        expected, stopped = reference(known, stops)
        assert stream.stopped == stopped
        if stopped:
            assert text == expected
            assert stream.push(i) == stream.finish() == ""
            return
        assert known.startswith(text)
        held = known[len(text) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)
        longer = known[len(known) - len(held) - 1 :] if len(known) > len(held) else ""
        assert not longer or not any(s.startswith(longer) for s in stops)  # nothing was given out too early


@both
@pytest.mark.parametrize(
    ("chunks", "stops", "pieces", "stopped"),
    [
        (["Hel", "lo"], [], ["Hel", "lo", ""], False),
        (["a", "a", "a", "b", "c"], ["aab"], ["", "", "a", "", "", ""], True),  # restarts inside itself
        (["xaaaby"], ["aab"], ["xa", ""], True),
        (["one STO", "P two"], ["STOP"], ["one ", "", ""], True),
        (["one STO", "NE"], ["STOP"], ["one ", "STONE", ""], False),
        (["one STO"], ["STOP"], ["one ", "STO"], False),  # finish gives what was held back
        (["\n", "\n", "User:"], ["User:", "\n\nUser:"], ["", "", "", ""], True),  # complete at once: the longest
        (["abcd"], ["abcd", "bc"], ["a", ""], True),  # complete first, as if letters came one by one
        (["a", "b", "c", "d"], ["abcd", "bc"], ["", "", "a", "", ""], True),
        (["a", "bx", "c"], ["abc", "x"], ["", "ab", "", ""], True),
        (["STOP"], ["STOP"], ["", ""], True),
    ],
)
def test_pieces_worked_by_hand(kind, chunks, stops, pieces, stopped):
    found, stream = run(kind([c.encode() for c in chunks]), range(len(chunks)), stops)
    assert (found, stream.stopped) == (pieces, stopped)


@both
def test_characters_come_whole_and_halves_at_the_end_are_replaced(kind):
    smile = "🙂".encode()
    chunks = [b"a", smile[:1], smile[1:3], smile[3:] + b"b", smile[:2]]
    assert run(kind(chunks), range(5))[0] == ["a", "", "", "🙂b", "", "\ufffd"]
    assert run(kind([b"\xff", b"a"]), range(2))[1].text == "\ufffda"  # not UTF-8 at all
    assert run(kind([b"\xef\xbf", b"\xbd", b"a"]), range(3))[1].text == "\ufffda"  # U+FFFD that was said


BPE = train_bpe(["Größe 🙂 the tokens, the route, the rest\n"] * 20, 280)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@given(ids=st.lists(st.integers(0, 256), max_size=30), stops=stop_lists)
def test_any_ids_of_our_own_tokenizers(tokenizer, ids, stops):
    _, stream = run(tokenizer, ids, stops)
    assert (stream.text, stream.stopped) == reference(tokenizer.decode(ids), stops)


def llama_like():
    """Tokens as Llama 2 has them: spaces as ▁, unknown characters as bytes, the first space dropped."""
    tokens = ["<unk>", END, *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁Hello", "▁wor", "ld", "a", "b"]
    inner = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return TextTokenizer(inner, END), {t: i for i, t in enumerate(tokens)}


def test_tokens_that_need_their_neighbours_are_decoded_with_them():
    tokenizer, ids = llama_like()
    said = ["▁Hello", "▁wor", "ld", "▁", *(f"<0x{b:02X}>" for b in "🙂".encode()), "a", END, "▁", "▁wor"]
    pieces, stream = run(tokenizer, [ids[t] for t in said])
    assert pieces == ["Hello", " wor", "ld", " ", "", "", "", "🙂", "a", "", " ", " wor", ""]
    assert stream.text == tokenizer.decode([ids[t] for t in said]) == "Hello world 🙂a  wor"
    assert run(tokenizer, [ids[t] for t in said], ["ld 🙂"])[1].text == "Hello wor"
    assert run(tokenizer, [ids[t] for t in said[:6]])[1].text == "Hello world \ufffd\ufffd"


@pytest.mark.parametrize("how", [{}, {"engine": True}, {"temperature": 0.0, "beams": 3}])
def test_a_continuation_keeps_the_space_it_begins_with(how):
    tokenizer, ids = llama_like()
    model = built(vocab=len(ids))
    model.tokenizer = tokenizer
    with torch.no_grad():  # words and letters are far likelier than the rest
        model.head.weight[: ids["▁"]] *= 0
        model.head.weight[ids["▁"] :] *= 10
    prompts = [[ids["a"]], [ids["▁Hello"], ids["a"]] * 9, [ids["b"]], [ids["ld"]], [ids["▁wor"]]]
    options = {"max_new_tokens": 12, "seed": 1, **how}
    found = dg.generate(model, prompts, **options)
    assert any(result.text.startswith(" ") for result in found)
    for result in found:
        assert result.prompt + result.text == tokenizer.decode([*result.prompt_tokens, *result.tokens])
    ended = dg.generate(model, prompts, **options, stop=[" wor", " Hello"])
    for result, before in zip(ended, found, strict=True):
        assert result.text == reference(before.text, [" wor", " Hello"])[0] or "beams" in how
        assert not {" wor", " Hello"} & {result.text[i : i + n] for i in range(99) for n in (4, 6)}


@pytest.mark.parametrize(
    ("texts", "pieces"),
    [
        (["", "it", "it '", "it's", "it's a"], ["it", " '", "'s", " a", ""]),
        (["", "abc", "ab", "abd"], ["abc", "", "d", ""]),
        (["", "é", "\ufffd\ufffd", "\ufffd\ufffdx"], ["é", "", "\ufffd\ufffdx", ""]),
    ],
)
def test_where_a_tokenizer_rewrites_its_text_nothing_is_lost(texts, pieces):
    assert run(Written(texts), range(len(texts) - 1))[0] == pieces


def test_an_empty_stream_and_one_that_is_over():
    stream = TextStream(ByteTokenizer())
    assert (stream.finish(), stream.stopped) == ("", False)
    assert stream.finish() == ""


@pytest.mark.parametrize("stop", ["", [""], ["a", 3], [None], None, 3])
def test_bad_stop_strings_are_refused(stop):
    with pytest.raises(InvalidValueError, match=r"stop is .*: give a text, or a list of texts, none of them empty"):
        Sampling(stop=stop)
