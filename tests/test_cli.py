"""The command line as a stranger meets it: help, bad options, yaml, exit codes."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import fields

import pytest

from depthgate import __version__
from depthgate.cli import VERBS, _verb_parser, main
from depthgate.config import ModelConfig


def shown(argv, capsys) -> str:
    """The output of a command that ends while its options are read."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert not caught.value.code
    return capsys.readouterr().out


def test_version_and_help(capsys):
    assert shown(["--version"], capsys).strip() == f"depthgate {__version__}"
    overview = shown(["--help"], capsys)
    for verb in VERBS:
        assert f"\n    {verb} " in overview
        text = shown([verb, "--help"], capsys)
        assert "--config" in text
        assert "--json" in text


@pytest.mark.parametrize("config", VERBS.values())
def test_every_option_is_explained(config):
    """Those of a base class and those that are typed without a value, too."""
    explained = {action.dest: action.help for action in _verb_parser(config)._actions}
    for each in fields(config):
        names = [each.name] if each.type is not ModelConfig else [f"model.{each.name}" for each in fields(ModelConfig)]
        assert all(explained[name] for name in names), each.name


def test_help_and_presets_load_no_torch():
    code = (
        "import sys\n"
        "from depthgate.cli import main\n"
        "assert main(['presets', '--json']) == 0\n"
        "try:\n    main(['train', '--help'])\n"
        "except SystemExit:\n    sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["fly"], "fly"),
        (["demo", "--bogus", "1"], "--bogus"),
        (["demo", "--steps", "0"], "steps is 0"),
        (["demo", "--steps", "many"], "many"),
        (["bench", "--models", "a", "--batch", "a,b"], "'a,b'"),
        (["bench", "--models", "a", "--dtype", "int8"], "'int8'"),
        (["demo", "--config", "missing.yaml"], "missing.yaml"),
        ([], "verb"),
        (["demo", "--seed", "9" * 24], "seed is 999"),
    ],
)
def test_bad_options_exit_2_with_a_short_message(args, says, capsys):
    assert main(args) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("depthgate: error: ")
    assert captured.out == ""


def test_the_process_ends_as_main_says():
    done = subprocess.run([sys.executable, "-m", "depthgate", "fly"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "fly" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_the_command_line_is_imported_ends_quietly():
    """As both `depthgate` and `python -m depthgate` begin."""
    raising = "import sys; sys.meta_path.insert(0, type('Stop', (), {'find_spec': staticmethod(stop)}))"
    code = f"def stop(name, *_):\n    if name == 'jsonargparse':\n        raise KeyboardInterrupt\n{raising}\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}import depthgate.cli"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_table_fits_a_narrow_terminal():
    """A real one, of 40 columns: one figure a line, none cut."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    subprocess.run([sys.executable, "-m", "depthgate", "presets"], stdout=theirs, env=env, check=True)
    shown = os.read(ours, 2**16).decode().splitlines()
    assert "  parameters: 124,276,992" in shown
    assert max(map(len, shown)) <= 40
    for end in (ours, theirs):
        os.close(end)


def test_running_out_of_memory_is_one_line(capsys, monkeypatch):
    def run(config, as_json):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes\nand more")

    monkeypatch.setattr("depthgate.commands.presets.run", run)
    assert main(["presets"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "depthgate: error: out of memory: DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes; "
        "ask for less"
    ]


def test_a_yaml_file_sets_options_and_unknown_keys_are_refused(tmp_path, capsys):
    good = tmp_path / "good.yaml"
    good.write_text("steps: 0\n")
    assert main(["demo", "--config", str(good)]) == 2
    assert "steps is 0" in capsys.readouterr().err
    bad = tmp_path / "bad.yaml"
    bad.write_text("step: 1\n")
    for verb in ("demo", "bench"):
        assert main([verb, "--config", str(bad)]) == 2
        assert f"step is not an option of depthgate {verb}" in capsys.readouterr().err
    assert main(["view", "--runs", "x"]) == 2
    assert "--runs is not an option of depthgate view: give it without its name" in capsys.readouterr().err
    for damaged in (b"steps: 3\n  foo: [1\n", b"steps: \xff"):
        bad.write_bytes(damaged)
        assert main(["demo", "--config", str(bad)]) == 2
        assert f"{bad} is not" in capsys.readouterr().err
