"""Tasks made from a text: one right choice of four, the same items every time, likelihoods as computed one by one."""

import json

import pytest
import torch

from depthgate.cli import main
from depthgate.config import TEXT_TASKS, ModelConfig
from depthgate.data.tokenizer import ByteTokenizer
from depthgate.errors import DepthgateError
from depthgate.loading import LoadedDecoder, open_model
from depthgate.model import Output
from depthgate.train.tasks import items, likelihoods, measure
from tests.conftest import close
from tests.train.tiny import train


def texts(documents=6, length=80):
    """Documents without a word twice."""
    return [" ".join(f"d{i}w{j * j}" for j in range(length)) for i in range(documents)]


def write(path, documents=6, length=80):
    path.write_text("<|endoftext|>".join(texts(documents, length)))
    return str(path)


def decoder(context=512):
    torch.manual_seed(1)
    model = LoadedDecoder(ModelConfig(dim=16, layers=2, heads=2, context=context, pattern="dense,mod", capacity=0.5))
    model.tokenizer = ByteTokenizer()
    return model.eval()


class Told:
    """A model that has read the texts: each byte that follows what was read since the last document is likelier."""

    context, device, tokenizer = 1000, torch.device("cpu"), ByteTokenizer()

    def __init__(self, known):
        self.known = known

    def __call__(self, ids, pos, causal):
        assert causal
        logits = torch.zeros(*ids.shape, 257)
        for row, (tokens, places) in enumerate(zip(ids.tolist(), pos.tolist(), strict=True)):
            read = bytes(tokens[: sum(place >= 0 for place in places)])
            for text in self.known:
                for i in range(len(read)):
                    at = text.find(read[: i + 1])
                    if 0 <= at < len(text) - i - 1:
                        logits[row, i, text[at + i + 1]] = 9.0
        return Output(logits, ())


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_every_item_has_one_right_choice_which_follows_in_the_text(task):
    found = items(texts(), task, 20)
    assert found == items(texts(), task, 20)
    assert found[:5] == items(texts(), task, 5)
    for context, choices, right in found:
        assert len(context.split()) == 40
        assert len({*choices}) == 4
        assert [any(f"{context} {choice}" in text for text in texts()) for choice in choices] == [
            place == right for place in range(4)
        ]
        assert {len(choice.split()) for choice in choices} == {1 if task == "word" else 12}
        if task == "order":
            assert len({tuple(sorted(choice.split())) for choice in choices}) == 1
    assert {right for _, _, right in found} == {0, 1, 2, 3}


def test_who_knows_the_text_finds_every_choice_and_who_knows_nothing_takes_the_first():
    told = Told([text.encode() for text in texts()])
    found = measure(told, texts(), ("continuation", "order"), 12)
    assert found == {"continuation": 1.0, "continuation_stderr": 0.0, "order": 1.0, "order_stderr": 0.0}
    share = sum(item.right == 0 for item in items(texts(), "order", 30)) / 30
    found = measure(Told([]), texts(), ["order"], 30)  # choices of one length, each as likely as the others
    assert found == {"order": share, "order_stderr": pytest.approx((share * (1 - share) / 30) ** 0.5)}


def naive(model, context, choice):
    """Nats by the byte, from one row of the model alone."""
    ids = [*f"{context} {choice}".encode()][-model.context :]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), causal=True).logits[0].log_softmax(-1)
    size = len(f" {choice}".encode())  # bytes, of which the model says all but a first one that nothing stands before
    places = range(max(1, len(ids) - size), len(ids))
    return sum(logits[i - 1, ids[i]].item() for i in places) / len(choice.encode())


@pytest.mark.parametrize("context", [512, 64, 8])
def test_likelihoods_are_those_of_rows_alone_and_long_ones_lose_their_beginning(context):
    model = decoder(context)
    for item in (*items(texts(), "word", 3), *items(texts(), "continuation", 3)):
        found = likelihoods(model, item.context, item.choices)
        wanted = [naive(model, item.context, choice) for choice in item.choices]
        close(torch.tensor(found), torch.tensor(wanted))


def test_a_model_of_transformers_is_asked_in_the_same_way(tmp_path):
    words = pytest.importorskip("tests.hf.words", reason="transformers is not installed: pip install 'depthgate[hf]'")
    model = open_model(words.save_model(tmp_path / "model", capacity=0.5), "cpu")
    for context, choices, _ in items(words.texts(6, 80), "continuation", 3):
        wanted = []
        for choice in choices:
            ids = torch.tensor([[1, *(int(word[1:]) for word in f"{context} {choice}".split())]])
            with torch.no_grad():
                logits = model.model(ids, causal_routing=True, use_cache=False).logits[0, 40:-1].log_softmax(-1)
            wanted.append(logits.gather(-1, ids[0, 41:, None]).sum().item() / len(choice))
        close(torch.tensor(likelihoods(model, context, choices)), torch.tensor(wanted))


def test_a_run_is_asked_about_a_text_or_about_what_it_has_held_out(tmp_path, capsys):
    data = write(tmp_path / "text.txt", documents=60)
    assert train(tmp_path / "run", data, 1) == 0
    asked = ["eval", "--model", str(tmp_path / "run"), "--device", "cpu", "--tasks", "order,word", "--limit", "8"]
    for given in (data, "heldout"):
        found = []
        for _ in range(2):
            capsys.readouterr()
            assert main([*asked, "--data", given, "--json"]) == 0
            found.append(json.loads(capsys.readouterr().out))
        assert found[0] == found[1]
        assert {name: found[0][name] for name in ("data", "tasks", "items")} == {
            "data": given,
            "tasks": "order,word",
            "items": 8,
        }
        assert list(found[0]["metrics"]) == ["order", "order_stderr", "word", "word_stderr"]
    assert main([*asked, "--data", data]) == 0
    assert f"order,word of {data}: 8 items" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("documents", "length", "why"), [(6, 52, "0 documents of more than 52 words"), (1, 53, "too little for 3 items")]
)
def test_too_little_text_is_said_before_anything_is_computed(documents, length, why):
    with pytest.raises(DepthgateError, match=why):
        measure(None, [" ".join(["again"] * length)] * documents, ["word"], 3)


def test_there_are_no_more_items_than_places_in_the_text():
    """Else most items are there twice, and the standard error is that of others."""
    few = [" ".join(f"{name}{i}" for i in range(60)) for name in "ab"]  # nine places in each
    assert len(items(few, "word", 18)) == 18
    with pytest.raises(DepthgateError, match=r"2 documents .* too little for 19 items of the task 'word': .* --limit"):
        items(few, "word", 19)


def test_weights_that_are_no_numbers_are_said():
    model = decoder()
    model.embed.weight.data.fill_(float("nan"))
    with pytest.raises(DepthgateError, match="not finite"):
        measure(model, texts(), ["word"], 1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--data", "x", "--tasks", "word,wrod"], "tasks is 'wrod': it must be one of continuation, order, word"),
        (["--data", "x", "--tasks", "word,"], "tasks is ''"),
        (["--tasks", "word"], "data is missing: give --data"),
        (["--data", "x", "--tasks", "task.yaml"], "task.yaml names data of its own: leave --data out"),
        (["--data", "x", "--limit", "3"], "limit is 3: it is for --tasks"),
    ],
)
def test_what_does_not_go_together_is_said(capsys, options, why):
    assert main(["eval", "--model", "model", *options]) == 2
    assert why in capsys.readouterr().err
