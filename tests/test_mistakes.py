"""The twenty likeliest mistakes, ten on the command line and ten in Python, and all that is said of each."""

import os

import pytest
import torch
from torch import nn

import depthgate as dg
from depthgate.cli import main
from tests.train.tiny import train, write_data

COMMANDS = {
    "trian --data my.txt": "'trian' is not a verb: did you mean train?\n`depthgate --help` lists the options",
    "train --presset tiny-mod": (
        "--presset is not an option of depthgate train: did you mean --preset?\n"
        "`depthgate train --help` lists the options"
    ),
    "train --preset tiny-mdo": ("preset is 'tiny-mdo': did you mean tiny-mod? `depthgate presets` lists them all"),
    "train --config typo.yaml": (
        "model.capacty is not an option of depthgate train: did you mean model.capacity?\n"
        "`depthgate train --help` lists the options"
    ),
    "train --lr abc": "lr is 'abc': it must be a number\n`depthgate train --help` lists the options",
    "train --data my.txt --out new": (
        "the data has 15 tokens to train on, but a sequence takes context + 1 = 257: give more text, or a smaller "
        "context (--model.context of train, --seq of finetune, --context of isoflop)"
    ),
    "train --data mine.txt": "data 'mine.txt' does not exist: did you mean my.txt?",
    "train --out my.txt": "out is my.txt, which is not a folder: choose another name",
    "generate --model runs --prompt a": (
        "no complete checkpoint in runs: it holds runs, name one of them: runs/dense, runs/mod"
    ),
    "generate --prompt a": "depthgate generate needs --model\n`depthgate generate --help` lists the options",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs, a short text and a yaml file with a mistake."""
    folder = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder / "home"))
        for run in ("mod", "dense"):
            assert train(folder / "runs" / run, write_data(folder / "text.jsonl"), 1) == 0
    (folder / "my.txt").write_text("short.\n\n\nvery.\n\n\nso.")
    (folder / "typo.yaml").write_text("model:\n  capacty: 0.5\n")
    return folder


@pytest.mark.parametrize(("words", "says"), COMMANDS.items(), ids=COMMANDS)
def test_on_the_command_line(folder, words, says, capsys, monkeypatch):
    """One message, exit code 2, and nothing is left behind."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "home"))
    before = sorted(os.listdir())
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if not line.startswith("data my.txt: ")]  # what the data is, before
    assert (out, "\n".join(told)) == ("", f"depthgate: error: {says}")
    assert sorted(os.listdir()) == before


D = 64
X = torch.randn(2, 16, D)
BLOCK = nn.TransformerEncoderLayer(D, 4, batch_first=True)
PYTHON = {
    "a percentage": (
        lambda: dg.MixtureOfDepths(BLOCK, D, capacity=12.5),
        "capacity is 12.5: it must be a number in (0, 1], where 1 routes every token",
    ),
    "tokens before batch": (
        lambda: dg.MixtureOfDepths(nn.TransformerEncoderLayer(D, 4), D),
        "block has batch_first=False: build it with batch_first=True, x is (B, T, dim)",
    ),
    "a class": (lambda: dg.MixtureOfDepths(nn.Linear, D), "block is a type: it must be an nn.Module"),
    "another width": (
        lambda: dg.SoftMoE(D, 4)(torch.randn(2, 16, 32)),
        "x has shape (2, 16, 32): it must be (batch, tokens, 64), since dim is 64",
    ),
    "another dtype": (
        lambda: dg.MixtureOfDepths(BLOCK, D)(X.half()),
        "x is float16, and the weights are float32: cast x or the layer, or use torch.autocast",
    ),
    "a mask of numbers": (
        lambda: dg.MixtureOfExperts(D, 4)(X, torch.ones(2, 16)),
        "mask has dtype torch.float32: it must be bool, True at real tokens",
    ),
    "more choices than experts": (
        lambda: dg.MixtureOfExperts(D, 4, top_k=5),
        "top_k is 5: it must be a whole number from 1 to 4",
    ),
    "a name of another library": (
        lambda: dg.ModelConfig(n_layers=3),
        "n_layers is not an option of ModelConfig: did you mean layers?",
    ),
    "a preset as a configuration": (
        lambda: dg.Decoder("tiny-mod"),
        "config is 'tiny-mod': it must be a ModelConfig, or use Decoder.from_preset(name)",
    ),
    "text without a tokenizer": (
        lambda: dg.generate(dg.Decoder(dg.ModelConfig()), "hello"),
        "'hello' is text, and the model has no tokenizer: give token ids, and no stop",
    ),
}


@pytest.mark.parametrize(("call", "says"), PYTHON.values(), ids=PYTHON)
def test_in_python(call, says):
    with pytest.raises(dg.DepthgateError) as caught:
        call()
    assert str(caught.value) == says


def test_ten_and_ten():
    assert len(COMMANDS) == len(PYTHON) == 10


def test_words_of_other_libraries(capsys):
    """Options, in a yaml file too, arguments and names that are called otherwise there."""
    for words, wanted in (
        ("train --learning_rate 1", "--lr"),
        ("train --batch-size 4", "--batch"),
        ("train --epochs=3", "--steps"),
        ("train --model.n_embd 4", "--model.dim"),
        ("finetune --output_dir a", "--out"),
        ("isoflop --block_size 4", "--context"),
        ("generate --max_tokens 4", "--max_new_tokens"),
    ):
        assert main(words.split()) == 2
        assert f": did you mean {wanted}?" in capsys.readouterr().err
    for call, wanted in (
        (lambda: dg.ModelConfig(hidden_size=3), "dim"),
        (lambda: dg.MixtureOfDepths(BLOCK, D, capacity_factor=0.5), "capacity"),
        (lambda: dg.MixtureOfExperts(D, 4, num_experts_per_tok=1), "top_k"),
    ):
        with pytest.raises(dg.DepthgateError, match=rf": did you mean {wanted}\?"):
            call()
    says = "activation is not an option of SoftMoE: these are dim, num_experts, slots_per_expert, hidden"
    with pytest.raises(dg.DepthgateError, match=says):
        dg.SoftMoE(D, 4, activation="gelu")
    with pytest.raises(AttributeError, match=r"no attribute 'MoD': did you mean MixtureOfDepths\?"):
        dg.MoD  # noqa: B018
    assert dg.Decoder.from_preset(dg.presets()[0]).config.layers == 2


def test_help_fits_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def test_nearly_a_name_and_tokens_without_values():
    with pytest.raises(AttributeError, match=r"no attribute 'MixtureOfDepth': did you mean MixtureOfDepths\?"):
        dg.MixtureOfDepth  # noqa: B018
    for layer in (dg.MixtureOfDepths(BLOCK, D), dg.MixtureOfExperts(D, 4), dg.SoftMoE(D, 4)):
        with pytest.raises(dg.DepthgateError, match="x is on the meta device"):
            layer(X.to("meta"))
        if not isinstance(layer, dg.MixtureOfDepths):
            with pytest.raises(dg.DepthgateError, match="x is float64, and the weights are float32"):
                layer(X.double())
