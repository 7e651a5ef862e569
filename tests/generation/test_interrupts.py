"""Ctrl-C, or an iterator closed early: the text so far is kept, and nothing of it that was held back is lost."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

import depthgate as dg
from depthgate.cli import main
from depthgate.data.tokenizer import ByteTokenizer
from depthgate.generation.config import Sampling
from depthgate.generation.plain import Reader, decode, search
from depthgate.generation.text import read_prompts
from tests.generation.models import built, said


def results(capsys, words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["results"]


def interrupt_at(monkeypatch, call, before=lambda: None):
    """A real SIGINT to this process, in the middle of a pass of the model; `before` is called first."""
    real, calls = dg.Decoder.hidden, []

    def hidden(self, *args, **kwargs):
        calls.append(0)
        if len(calls) == call:
            before()
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(dg.Decoder, "hidden", hidden)
    return calls


@pytest.mark.parametrize("how", ["closed", "interrupted"])
def test_text_that_was_held_back_is_part_of_the_result(how, monkeypatch):
    """A model that says any bytes, with stop strings that begin as its text does: every token counts, half characters
    become U+FFFD as at an end."""
    model, tokenizer = built(vocab=256), ByteTokenizer()  # 256, the end, is never said
    model.tokenizer = tokenizer
    whole = dg.generate(model, ["ab", "c"], max_new_tokens=12, seed=3)
    stop = [result.text[2:] + "!" for result in whole]
    halves = 0
    for steps in range(1, 12):
        todo = read_prompts(model, ["ab", "c"])
        events = decode(Reader(model, 2), todo, Sampling(max_new_tokens=12, seed=3, stop=stop))
        if how == "closed":
            shown = [next(events) for _ in range(2 * steps)]
            events.close()
        else:
            shown = []
            with monkeypatch.context() as patch:
                interrupt_at(patch, steps + 1)
                with pytest.raises(KeyboardInterrupt):
                    shown.extend(events)
        for i, result in enumerate(todo):
            mine = "".join(event.text for event in shown if event.request == i)
            assert result.tokens == whole[i].tokens[:steps]
            assert result.finish is None
            assert result.text == tokenizer.decode(result.tokens)
            assert result.text.startswith(mine)
            assert steps < 4 or len(mine) < len(result.text)  # the test is about text that was held back
            halves += result.text[-1] == "\ufffd" and not whole[i].text.startswith(result.text)
    assert halves  # and about half characters


@pytest.mark.parametrize("cache", [True, False])
def test_an_interrupted_search_gives_the_best_so_far(cache, monkeypatch):
    """It is what a search of as many tokens gives; the prompt before it is done, the one after it was not begun."""
    model = built(vocab=257)
    model.tokenizer = ByteTokenizer()
    first = dg.generate(model, "ab", max_new_tokens=9, beams=3)[0]
    for steps in range(9):
        todo = read_prompts(model, ["ab", "cde", "f"])
        reader = Reader(model, 3, cache)
        with monkeypatch.context() as patch:
            interrupt_at(patch, len(first.tokens) + steps + 1)
            with pytest.raises(KeyboardInterrupt):
                list(search(reader, todo, Sampling(beams=3, max_new_tokens=9)))
        assert said(todo[:1]) == said([first])
        assert todo[1].finish is None
        assert todo[2].tokens == []
        if steps:
            best = dg.generate(model, "cde", max_new_tokens=steps, beams=3)[0]
            assert said(todo[1:2]) == [(best.tokens, None, best.depths, best.routed)]
            assert todo[1].text == best.text
        else:
            assert (todo[1].tokens, todo[1].text) == ([], "")


def test_keys_and_values_of_a_search_are_counted(model, capsys):
    """Dense layers, worked by hand: a row of 8 places, and one more, for each beam; the largest prompt counts."""
    dense = built("dense", vocab=257)
    reader = Reader(dense, 2)
    todo = read_prompts(dense, [[1, 2, 3], [4] * 9, [5]])
    list(search(reader, todo, Sampling(beams=3, max_new_tokens=4)))
    numbers = 4 * 2 * 2 * 8  # layers, keys and values, heads, their size
    assert reader.kv_bytes == 3 * (16 + 1) * numbers * 8
    words = ["generate", "--model", model, "--prompt", "the", "--max-new-tokens=5", "--json"]
    bytes_of = {}
    for more in (["--temperature=0"], ["--beams=3"], ["--beams=3", "--no-cache"]):
        assert main([*words, *more]) == 0
        bytes_of[more[-1]] = json.loads(capsys.readouterr().out)["kv_bytes"]
    assert bytes_of["--temperature=0"] < bytes_of["--beams=3"] <= 3 * bytes_of["--temperature=0"]
    assert bytes_of["--no-cache"] == 0


def interrupted(words, capsys, monkeypatch, call):
    """Output of `depthgate` up to the SIGINT that comes in a pass of the model, and its output from then on."""
    shown = []
    with monkeypatch.context() as patch:
        interrupt_at(patch, call, lambda: shown.append(capsys.readouterr().out))
        assert main(words) == 130
    out, err = capsys.readouterr()
    assert err == ""
    return shown[0], out


def test_ctrl_c_shows_text_that_may_begin_a_stop_string(model, capsys, monkeypatch):
    words = ["generate", "--model", model, "--prompt", "the", "--seed=1", "--max-new-tokens=20", "--device=cpu"]
    whole = results(capsys, words)[0]["text"]
    assert len(whole) == 20  # each character is a token
    shown, rest = interrupted([*words, "--stop", whole[5:] + "!"], capsys, monkeypatch, call=12)
    assert (shown, rest) == ("the" + whole[:5], whole[5:11] + "\n")


def test_several_prompts_stream_in_their_order_and_ctrl_c_shows_what_there_is_of_each(model, capsys, monkeypatch):
    words = ["generate", "--model", model, "--prompt", "the", "--prompt", "a lazy", "--temperature=1.5", "--seed=1"]
    first, second = (result["text"] for result in results(capsys, [*words, "--max-new-tokens=9"]))
    assert first != second
    shown, rest = interrupted(words, capsys, monkeypatch, call=10)
    assert shown == f"---\nthe{first}"
    assert rest == f"\n---\na lazy{second}\n"


def test_ctrl_c_shows_the_best_beam_so_far(model, capsys, monkeypatch):
    words = ["generate", "--model", model, "--device=cpu", "--beams=2"]
    with monkeypatch.context() as patch:
        calls = interrupt_at(patch, None)
        first = results(capsys, [*words, "--prompt", "dog dog"])[0]["text"]
    best = results(capsys, [*words, "--prompt", "a lazy", "--max-new-tokens=4"])[0]["text"]
    both = [*words, "--prompt", "dog dog", "--prompt", "a lazy"]
    shown, rest = interrupted(both, capsys, monkeypatch, call=len(calls) + 5)
    assert shown == f"---\ndog dog{first}\n---\na lazy"
    assert rest == f"{best}\n"


def test_a_process_that_is_interrupted_says_so_by_its_exit_code(model):
    """The signal comes from within, so that it meets the fifth pass of the model on any machine."""
    script = """if True:
        import os, signal, sys
        import depthgate as dg
        from depthgate.cli import main
        calls, real = [], dg.Decoder.hidden
        def hidden(*args, **kwargs):
            calls.append(0)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return real(*args, **kwargs)
        dg.Decoder.hidden = hidden
        sys.exit(main())
    """
    words = ["generate", "--model", model, "--prompt", "the", "--temperature=0", "--device=cpu"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
    whole = dg.generate(dg.load(model), "the", temperature=0, max_new_tokens=4)[0].text
    assert done.stdout == f"the{whole}\n"


def test_json_has_what_there_was(model, capsys, monkeypatch):
    words = ["generate", "--model", model, "--prompt", "the", "--temperature=0", "--max-new-tokens=9", "--device=cpu"]
    whole = results(capsys, words)[0]
    interrupt_at(monkeypatch, 5)
    assert main([*words, "--stop", whole["text"] + "!", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)["results"][0]
    assert (found["tokens"], found["finish"]) == (whole["tokens"][:4], None)
    assert found["text"] == ByteTokenizer().decode(found["tokens"]) != ""


def test_a_conversation_goes_on_after_text_that_was_held_back(model, capsys, monkeypatch):
    """Ctrl-C ends what the model says; all of it is shown, and the next line goes on from it."""
    words = ["generate", "--model", model, "--max-new-tokens=9", "--temperature=0", "--device=cpu"]
    first = results(capsys, [*words, "--prompt", "fox\n"])[0]["text"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("fox\ndog\n"))
    interrupt_at(monkeypatch, 5)
    assert main([*words, "--stop", first[:9] + "!"]) == 0
    out = capsys.readouterr().out
    second = results(capsys, [*words, "--prompt", f"fox\n{first[:4]}dog\n"])[0]["text"]
    assert out == f"fox\n{first[:4]}\ndog\n{second}\n"
