"""`depthgate generate`: what it prints."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import depthgate as dg
from depthgate.cli import main


def said(capsys, *words):
    code = main(["generate", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_text_with_and_without_a_cache_is_the_same(model, capsys):
    for options in (["--temperature", "0"], ["--seed", "7"], ["--seed=7", "--top-k=5", "--temperature=0.8"]):
        words = ["--model", model, "--prompt", "the quick", "--max-new-tokens", "14", *options]
        code, out, _ = said(capsys, *words)
        assert code == 0
        assert len(out) > 1
        assert said(capsys, *words, "--no-cache")[1] == out
    assert said(capsys, *words[:-3], "--seed=8")[1] != said(capsys, *words[:-3], "--seed=7")[1]


def test_json_is_one_object_and_agrees_with_the_text(model, capsys):
    words = ["--model", model, "--max-new-tokens", "9", "--seed", "3"]
    code, out, _ = said(capsys, *words, "--prompt", "a lazy", "--prompt", "fox", "--json")
    assert code == 0
    report = json.loads(out)
    assert [r["prompt"] for r in report["results"]] == ["a lazy", "fox"]
    assert report["tokens_per_second"] > 0
    for result in report["results"]:
        assert len(result["tokens"]) <= 9
        assert len(result["routed_share"]) == 1
        assert 0 <= result["routed_share"][0] <= 1
        alone = said(capsys, *words, "--prompt", result["prompt"])[1]
        assert alone == result["prompt"] + result["text"] + "\n"
    both = said(capsys, *words, "--prompt", "a lazy", "--prompt", "fox")[1]
    assert all(result["text"] in both for result in report["results"])


@pytest.mark.parametrize("more", [["--temperature", "0"], ["--beams", "3"], ["--temperature=0", "--max-new-tokens=1"]])
def test_depth_colours_every_token_by_the_layers_it_went_through(model, capsys, monkeypatch, more):
    words = ["--model", model, "--prompt", "the", "--max-new-tokens", "8", *more]
    plain = said(capsys, *words)[1].removeprefix("the")
    assert plain.isascii()  # each character is a token
    monkeypatch.setenv("FORCE_COLOR", "1")
    text, _, legend = said(capsys, *words, "--depth")[1].rpartition("\nlayers:")
    colours = dict(re.findall(r"\x1b\[(\d+)m(\d)\x1b\[0m", legend))
    assert sorted(colours.values()) == ["1", "2"]
    (_, prompt), *parts = re.findall(r"\x1b\[(\d+)m(.*?)\x1b\[0m", text, re.S)
    assert prompt == "the"
    shown = [(colours[n], char) for n, part in parts for char in part]
    assert "".join(char for _, char in shown) + "\n" == plain
    tokens = torch.tensor([list(b"the" + plain[:-1].encode())])
    (plan,) = dg.load(model)(tokens, causal=True).plans
    assert [int(depth) for depth, _ in shown] == (1 + plan.chosen[0, 3:, 0].long()).tolist()
    monkeypatch.delenv("FORCE_COLOR")  # in a pipe: digits under each line
    digits = "   " + "".join(" " if char == "\n" else depth for depth, char in shown)
    line, under, legend = said(capsys, *words, "--depth")[1].split("\n", 2)
    assert (line, legend) == (f"the{plain[:-1]}", "layers: 1 2\n")
    assert under == digits


def test_several_prompts_are_shown_in_their_order(model, capsys, monkeypatch):
    """Whichever finishes first; with --depth coloured as one is, and a single legend at the end."""
    prompts = ["the", "a lazy dog and then it slee", "fox"]  # the second leaves room for 5 tokens
    words = ["--model", model, *(f"--prompt={prompt}" for prompt in prompts), "--max-new-tokens", "12", "--seed", "3"]
    results = json.loads(said(capsys, *words, "--json")[1])["results"]
    assert [len(result["tokens"]) for result in results] == [12, 5, 12]
    parts = [f"---\n{result['prompt']}{result['text']}\n" for result in results]
    assert said(capsys, *words)[1] == "".join(parts)
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = said(capsys, *words, "--depth")[1]
    for prompt, result in zip(prompts, results, strict=True):
        alone = said(capsys, *words[:2], "--prompt", prompt, *words[5:], "--depth")[1].rpartition("layers:")[0]
        assert f"---\n{alone}" in coloured
        assert re.sub(r"\x1b\[\d+m", "", alone) == f"{prompt}{result['text']}\n"
        assert "\x1b[" in alone
    assert coloured.count("layers:") == 1


def talk(monkeypatch, capsys, typed, *words):
    """Output of a conversation in which these lines are typed."""
    monkeypatch.setattr(sys, "stdin", None if typed is None else io.StringIO(typed))
    code, out, err = said(capsys, *words)
    assert code == 0
    return out, err


def test_a_conversation_goes_on_from_all_that_was_said(model, capsys, monkeypatch):
    """Two lines typed one after another give what one prompt with all of it gives."""
    words = ["--model", model, "--max-new-tokens", "5", "--temperature", "0"]
    out, _ = talk(monkeypatch, capsys, "fox\ndog\n", *words)
    words += ["--json", "--prompt"]
    first = json.loads(said(capsys, *words, "fox\n")[1])["results"][0]
    second = json.loads(said(capsys, *words, "fox\n" + first["text"] + "dog\n")[1])["results"][0]
    assert out == "fox\n" + first["text"] + "\ndog\n" + second["text"] + "\n"


def test_a_conversation_is_the_same_without_a_cache(model, capsys, monkeypatch):
    words = ["--model", model, "--max-new-tokens=5", "--seed=3"]
    out, _ = talk(monkeypatch, capsys, "fox\nfox\ndog\n", *words)
    assert len(out) > 3
    assert talk(monkeypatch, capsys, "fox\nfox\ndog\n", *words, "--no-cache")[0] == out


def test_a_conversation_that_is_full_starts_over(model, capsys, monkeypatch):
    words = ["--model", model, "--max-new-tokens", "9", "--temperature", "0"]
    lines = "a lazy dog\nand a fox\nfox\n"  # 11 + 9 + 10 + 2, which is the context
    out, err = talk(monkeypatch, capsys, lines, *words)
    assert "32 tokens were said, and more have no room: starting over" in err
    assert out.endswith("\n" + talk(monkeypatch, capsys, "fox\n", *words)[0])


def test_no_input_ends_a_conversation(model, capsys, monkeypatch):
    for nothing in ("", None):  # None, as Python has it where stdin is closed
        assert talk(monkeypatch, capsys, nothing, "--model", model)[0] == ""


def test_a_checkpoint_is_loaded_from_within(model, monkeypatch):
    monkeypatch.chdir(Path(model) / "step-60")
    assert torch.equal(dg.load(".").embed.weight, dg.load(model).embed.weight)


def test_a_prompt_is_taken_as_it_is(model, capsys):
    words = ["--model", model, "--max-new-tokens", "2", "--json"]
    for prompt in ("-- a-b comment", "--x-y", "-1", "5", "null", "é\n\t日本"):
        given = ["--prompt", prompt] if " " in prompt else [f"--prompt={prompt}"]
        assert json.loads(said(capsys, *words, *given)[1])["results"][0]["prompt"] == prompt


def test_an_interrupted_line_is_read_again(model, capsys, monkeypatch):
    """Ctrl-C while a prompt is read: the next line goes on from all that was typed, as if read at once."""
    from depthgate.layers import Block

    real, calls = Block.forward, []

    def forward(self, *args, **kwargs):
        found = real(self, *args, **kwargs)
        calls.append(0)
        if len(calls) == 1:  # the first layer has stored its keys and values
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Block, "forward", forward)
    monkeypatch.setattr(sys, "stdin", io.StringIO("fox a\ndog\n"))
    code, out, _ = said(capsys, "--model", model, "--max-new-tokens", "5", "--temperature", "0")
    assert code == 0
    prompt = ["--prompt", "fox a\ndog\n"]
    words = ["--model", model, "--max-new-tokens", "5", "--temperature", "0", *prompt, "--json"]
    assert out == "fox a\n\ndog\n" + json.loads(said(capsys, *words)[1])["results"][0]["text"] + "\n"


BAD = {
    "beams without a prompt": (["--beams", "2"], "--prompt"),
    "no model": (["--model", "nowhere", "--prompt", "a"], "nowhere"),
    "an empty prompt": (["--prompt", ""], "prompt is empty"),
    "no tokens": (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens is 0"),
    "a long prompt": (["--prompt", "a" * 99], "context is 32"),
    "temperature": (["--prompt", "a", "--temperature", "-1"], "temperature"),
    "top_p": (["--prompt", "a", "--top-p", "2"], "top_p"),
    "json without a prompt": (["--json"], "--prompt"),
}


@pytest.mark.parametrize(("words", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused(model, capsys, words, says):
    code, out, err = said(capsys, *(["--model", model] if "--model" not in words else []), *words)
    assert code == 2
    assert not out
    assert says in err
    assert "Traceback" not in err
