"""Options of `depthgate train` from the command line and from yaml, and what is refused: in a few lines, exit code 2,
before torch is loaded and anything is written."""

import os
import subprocess
import sys

import pytest

from depthgate.cli import main
from depthgate.recipes import PRESETS

BASE = ["train", "--data=stdlib", "--steps=3"]


def refused(argv, capsys) -> str:
    """The message of a command line that is refused."""
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("depthgate: error: ")
    assert len(shown.err.splitlines()) <= 6
    return shown.err


OPTIONS = {
    "--steps=0": "steps is 0",
    "--steps=-1": "steps is -1",
    "--steps=1.5": "1.5",
    "--steps=abc": "abc",
    "--steps=99999999999": "steps is 99999999999",
    "--preset=tny-mod": "preset is 'tny-mod': did you mean tiny-mod?",
    "--preset=": "did you mean",
    "--bogus=1": "--bogus",
    "--pre=tiny-dense": "--pre",
    "--resum": "--resum",
    "extra": "extra",
    "--model.dims=8": "--model.dims",
    "--model.hidden=1000000000": "hidden is 1000000000",
    "--model.pattern=sparse": "'sparse'",
    "--model.pattern=": "pattern is ''",
    "--model.gate=os.system": "gate is 'os.system'",
    "--model.capacity=nan": "nan",
    "--model.capacity=0": "capacity is 0",
    "--lr=-1": "lr is -1.0",
    "--lr=inf": "inf",
    "--device=gpu": "device is 'gpu'",
    "--vocab=99": "vocab is 99",
    "--tokenizer=bpe": "as --vocab 8192",
    "--keep=1": "keep is 1",
    "--accumulate=3": "accumulate 3",
    "--batch=2147483647": "batch * model.context is",
    "--model.dim=65536 --model.heads=8 --model.layers=4096": "GiB of memory",
    "--model.pattern=moe --model.experts=16384 --model.expert_hidden=1048576": "GiB of memory",
}


@pytest.mark.parametrize(("options", "says"), OPTIONS.items())
def test_bad_options_are_refused_and_nothing_is_written(tmp_path, options, says, capsys):
    errors = refused([*BASE, f"--out={tmp_path / 'a'}", "--device=cpu", *options.split()], capsys)
    assert says in errors
    assert not (tmp_path / "a").exists()


def test_absurd_sizes_load_no_torch():
    """They are refused by arithmetic: torch, which would allocate them, is not even imported."""
    code = (
        "import sys; from depthgate.cli import main; "
        "codes = [main([*sys.argv[1:], option]) for option in "
        "('--model.hidden=1000000000', '--model.dim=65536', '--batch=99999999')]; "
        "sys.exit(codes != [2, 2, 2] or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *BASE, "--model.heads=8", "--model.layers=4096"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


YAML = {
    "unknown: 3": "unknown is not an option of depthgate train\n",
    "model:\n  dims: 3": "model.dims is not an option of depthgate train: did you mean model.dim?",
    "_private: 3": "_private is not",
    "steps: abc": "abc",
    "steps: true": "True",
    "steps: 0": "steps is 0",
    "lr: .nan": "lr is nan",
    "model: 3": "model is 3",
    "model: null": "model is None",
    "model: [1]": "model is [1]",
    "model:\n  dim: x": "a.yaml: model.dim is 'x': it must be a whole number",
    "preset: tny": "did you mean",
    "preset: [1]": "[1]",
    "- 1\n- 2": "a.yaml is not a yaml file of options: it says '- 1', where lines such as lr: 0.01 belong\n",
    "": "a.yaml is not a yaml file of options: it is empty, where lines such as lr: 0.01 belong\n",
    "just text": "it says 'just text'",
    "{unclosed": "a.yaml is not a yaml file of options: did not find expected ',' or '}', line 2, column 1\n",
    'out: "a\\0b"': "a folder cannot have such a name",
    "x: !!python/object/apply:os.mkdir [PLANTED]": "python/object/apply",
    "!!python/object/apply:os.mkdir [PLANTED]": "python/object/apply",
    "!!python/name:os.system": "python/name",
    "[" * 50_000: "options: it is too large, too deep or has references\n",
    "[" * 100_000: "too large",
    "a: &a [1]\nb: [*a, *a]": "has references",
    "a: &a [*a]": "has references",
    "steps: &a [*a]": "has references",
}


@pytest.mark.parametrize(("text", "says"), YAML.items(), ids=lambda value: repr(value[:30]))
def test_bad_yaml_is_refused_and_never_run(tmp_path, text, says, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    assert says in refused([*BASE, "--device=cpu", "--config=a.yaml"], capsys)
    assert os.listdir() == ["a.yaml"]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\0\1\2\xff", b"\x80\x04\x95"])
def test_binary_yaml_is_refused(tmp_path, content, capsys):
    (tmp_path / "a.yaml").write_bytes(content)
    for option in ("--config", "--model"):
        assert "can't decode byte" in refused([*BASE, f"{option}={tmp_path / 'a.yaml'}"], capsys)


def test_yaml_that_is_not_there(tmp_path, capsys):
    assert "missing.yaml" in refused([*BASE, "--config", "missing.yaml"], capsys)
    assert "not a file" in refused([*BASE, "--config", str(tmp_path)], capsys)


def shown(argv, capsys) -> dict[str, str]:
    """The options as they were read."""
    with pytest.raises(SystemExit) as caught:
        main([*argv, "--print_config"])
    assert not caught.value.code
    lines = capsys.readouterr().out.splitlines()
    return dict(line.strip().partition(": ")[::2] for line in lines)


def test_a_preset_in_yaml_is_a_preset(tmp_path, capsys):
    """It sets where all other options start from; the last one named counts, and options of one's own stay."""
    dense, own = tmp_path / "dense.yaml", tmp_path / "own.yaml"
    dense.write_text("preset: tiny-dense\n")
    own.write_text("preset: tiny-dense\nlr: 0.5\nmodel:\n  dim: 48\n")
    by_option = shown(["train", "--preset=tiny-dense"], capsys)
    assert by_option["pattern"] == "dense"
    assert shown(["train", "--config", str(dense)], capsys) == by_option
    assert shown(["train", f"--config={dense}"], capsys) == by_option
    assert shown(["train", "--config", "{preset: tiny-dense}"], capsys) == by_option
    found = shown(["train", "--config", str(own), "--model.layers", "2"], capsys)
    assert (found["dim"], found["layers"], found["lr"], found["pattern"]) == ("48", "2", "0.5", "dense")
    assert shown(["train", "--config", str(own), "--lr=0.25"], capsys)["lr"] == "0.25"
    assert shown(["train", "--config", str(own), "--preset=tiny-mod"], capsys)["pattern"] == "dense,mod"
    assert shown(["train", "--preset=tiny-mod", "--config", str(own)], capsys)["pattern"] == "dense"


def test_the_schedule_follows_steps_in_every_preset(capsys):
    for name in PRESETS:
        found = shown(["train", f"--preset={name}", "--steps=5000"], capsys)
        assert (found["steps"], found["schedule_steps"]) == ("5000", "null")
    assert shown(["train", "--schedule_steps=70"], capsys)["schedule_steps"] == "70"


def test_true_and_false_with_and_without_a_value(capsys):
    for words in (["--compile"], ["--compile", "true"], ["--compile=true"], ["--compile", "--seed=1"]):
        assert shown(["train", *words], capsys)["compile"] == "true"
    for words in ([], ["--compile", "false"], ["--compile=false"]):
        assert shown(["train", *words], capsys)["compile"] == "false"
    assert shown(["train", "--model.qk-norm", "false"], capsys)["qk_norm"] == "false"
    assert shown(["isoflop", "--dry-run", "--extend"], capsys)["dry_run"] == "true"


def test_help_into_a_closed_pipe_is_no_error():
    command = f"set -o pipefail; {sys.executable} -m depthgate --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
