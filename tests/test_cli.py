"""The command line as a stranger meets it: help, bad options, yaml, exit codes."""

import subprocess
import sys

import pytest

from depthgate import __version__
from depthgate.cli import main


def run(*args):
    return subprocess.run([sys.executable, "-m", "depthgate", *args], capture_output=True, text=True, check=False)


def test_version_and_help():
    assert run("--version").stdout.strip() == f"depthgate {__version__}"
    assert "bench" in run("--help").stdout
    for verb in (["demo"], ["bench", "layers"]):
        done = run(*verb, "--help")
        assert done.returncode == 0
        assert "--config" in done.stdout
        assert "--json" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["fly"], "fly"),
        (["demo", "--bogus", "1"], "--bogus"),
        (["demo", "--steps", "0"], "steps is 0"),
        (["demo", "--steps", "many"], "many"),
        (["bench", "layers", "--dims", "a,b"], "'a,b'"),
        (["bench", "layers", "--dtype", "int8"], "'int8'"),
        (["demo", "--config", "missing.yaml"], "missing.yaml"),
        ([], "verb"),
        (["bench"], "bench what? `depthgate bench WHAT`, where WHAT is one of: layers"),
        (["demo", "--seed", "9" * 24], "seed is 999"),
        (["bench", "layers", "--seed", "9" * 24], "seed is 999"),
        (["bench", "layers", "--batch", "1000000", "--seq", "1000000"], "out of memory"),
    ],
)
def test_bad_options_exit_2_with_a_short_message(args, says):
    done = run(*args)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_yaml_file_sets_options_and_unknown_keys_are_refused(tmp_path, capsys):
    good = tmp_path / "good.yaml"
    good.write_text("steps: 0\n")
    assert main(["demo", "--config", str(good)]) == 2
    assert "steps is 0" in capsys.readouterr().err
    bad = tmp_path / "bad.yaml"
    bad.write_text("step: 1\n")
    for verb in (["demo"], ["bench", "layers"]):
        assert main([*verb, "--config", str(bad)]) == 2
        assert "'step'" in capsys.readouterr().err
