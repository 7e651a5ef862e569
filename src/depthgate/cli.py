"""The command line: `depthgate VERB` runs depthgate.commands.VERB, which is imported only then."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader

from depthgate import __version__
from depthgate import config as configs
from depthgate.config import RunConfig, TrainConfig
from depthgate.console import guarded, silence
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.generation.config import GenerateConfig
from depthgate.isoflop.config import IsoflopConfig
from depthgate.presets import preset, settle_vocab
from depthgate.serve.config import ServeConfig

VERBS: dict[str, type[Any]] = {
    "train": TrainConfig,
    "eval": configs.EvalConfig,
    "isoflop": IsoflopConfig,
    "generate": GenerateConfig,
    "serve": ServeConfig,
    "convert": configs.ConvertConfig,
    "finetune": configs.FinetuneConfig,
    "view": configs.ViewConfig,
    "presets": configs.PresetsConfig,
    "bench": configs.BenchConfig,
    "demo": configs.DemoConfig,
}
_usual_loader = get_loader("yaml")


def _load_yaml(text: str) -> Any:
    """Options as yaml. PyYAML crashes on text that is nested too deep, and references can unfold to gigabytes."""
    depth = 10 if len(text) > 2**16 else 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > 9 or isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("it is too large, too deep or has references")
    return _usual_loader(text)


set_loader("yaml", _load_yaml, exceptions=(yaml.YAMLError,))


def _about(config: type[Any]) -> str:
    return (config.__doc__ or "").split("\n")[0]


class _Parser(ArgumentParser):
    """A parser that says in a line or two what is wrong, without the list of all options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        about = (getattr(ex, "subcommand_parser", None) or self).prog.replace(" [options]", "")
        raise DepthgateError(f"{message}\n`{about} --help` lists the options") from ex

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a file of options, as --config asks for."""
        try:
            return super().parse_path(path, *args, **kwargs)
        except (DepthgateError, UnicodeDecodeError) as error:
            said = str(error) if len(str(error)) < 500 else f"{str(error)[:200]}..."
            what = "" if said.startswith("Parser key") else " is not a yaml file of options"
            raise DepthgateError(f"{path}{what}: {said}") from None


def _verb_parser(config: type[Any]) -> ArgumentParser:
    parser = _Parser(description=_about(config), allow_abbrev=False)
    parser.add_argument("--config", action="config", help="yaml file with any of these options")
    parser.add_argument("--json", action="store_true", help="print figures as one JSON object, and nothing else")
    typed = {each.name: each.metadata for each in fields(config) if "typed" in each.metadata}
    for name, how in typed.items():
        parser.add_argument(name if "nargs" in how["typed"] else f"--{name}", help=how["about"], **how["typed"])
    parser.add_class_arguments(config, as_group=False, skip=set(typed))
    if issubclass(config, RunConfig):
        parser.add_argument("--resume", action="store_true", help="go on where the run's newest checkpoint ends")
    return parser


@cache
def build_parser(start: str = TrainConfig.preset) -> ArgumentParser:
    """The whole command line; `start` names the preset that `train` begins from."""
    about = "Mixture-of-Depths, MoDE and Soft MoE for PyTorch"
    parser = _Parser(prog="depthgate", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"depthgate {__version__}")
    verbs = parser.add_subcommands(dest="verb")
    for verb, config in VERBS.items():
        verb_parser = _verb_parser(config)
        if config is TrainConfig:
            verb_parser.set_defaults({"preset": start, **preset(start)})
        verbs.add_subcommand(verb, verb_parser, help=_about(config))
    return parser


def _with_underscores(word: str) -> str:
    """--max-new-tokens=9 -> --max_new_tokens=9: options may be typed either way."""
    name, given, value = word.partition("=")
    typed = re.fullmatch(r"--[A-Za-z][\w.-]*", name)  # and not a text that begins so
    return f"--{name[2:].replace('-', '_')}{given}{value}" if typed else word


def parse(argv: Sequence[str]) -> Namespace:
    """The options of a command line, and of the yaml files that it names."""
    words = [_with_underscores(word) for word in argv]
    try:
        if words[:1] != ["train"]:
            return build_parser().parse_args(words)
        # All other defaults depend on the preset, which may stand in a yaml file: read once to learn it.
        asking = ("--help", "-h", "--print_config")
        first = build_parser().parse_args([word for word in words if not word.startswith(asking)])
        options = build_parser(first.train.preset).parse_args(words)
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"a config file is not yaml text: {error}") from None
    if not isinstance(options.train.model, Namespace):
        raise InvalidValueError(f"model is {options.train.model!r}: it must be a group of options, such as model.dim")
    settle_vocab(options.train)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 2 something the user can mend, 130 interrupted."""
    with guarded():
        try:
            code = _run(sys.argv[1:] if argv is None else argv)
        except BrokenPipeError:  # the reader of our output has left
            silence(sys.stdout)
            code = 0
        except KeyboardInterrupt:
            print("depthgate: interrupted", file=sys.stderr)
            code = 130
        except (DepthgateError, OSError, MemoryError, RuntimeError) as error:
            print(f"depthgate: error: {_reason(error)}", file=sys.stderr)
            code = 2
    if argv is None and code == 130:  # a second Ctrl-C would only disturb the end of the process
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _reason(error: Exception) -> str:
    """A few lines for the user; raises errors again that are our own mistakes."""
    text = str(error)
    if isinstance(error, RuntimeError) and "alloc" not in text and "out of mem" not in text:
        raise error
    if isinstance(error, RuntimeError | MemoryError):
        return f"out of memory: {(text.splitlines() or ['nothing is left'])[0]}; ask for less"
    if isinstance(error, OSError):
        silence(sys.stdout)
    return text


def _run(argv: Sequence[str]) -> int:
    # Before torch is loaded. Threads that spin while they wait make a step ten times slower where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = parse(argv)
    verb, given = options.verb, options[options.verb]
    extra = {"resume": given.resume} if issubclass(VERBS[verb], RunConfig) else {}
    config = configs.build(VERBS[verb], given)
    code = import_module(f"depthgate.commands.{verb}").run(config, given.json, **extra) or 0
    print(end="", flush=True)  # here, where a failure is still ours to report
    return int(code)
