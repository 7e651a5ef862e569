"""The command line: verb -> function. Heavy imports wait until a verb runs."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import docstring_parser
import yaml
from jsonargparse import ArgumentParser, Namespace

from depthgate._version import __version__
from depthgate.bench.config import BenchGenerateConfig, BenchLayersConfig, BenchTrainConfig
from depthgate.config import (
    ConvertConfig,
    EvalConfig,
    FinetuneConfig,
    PresetsConfig,
    RunConfig,
    TrainConfig,
    build,
)
from depthgate.console import guarded, silence
from depthgate.demo.config import DemoConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.flops import parameters, training_flops
from depthgate.generation.config import GenerateConfig
from depthgate.hf.config import BenchHFConfig
from depthgate.isoflop.config import IsoflopConfig
from depthgate.presets import PRESETS, preset, train_config
from depthgate.view.config import ViewConfig


def _presets(config: PresetsConfig, as_json: bool) -> None:  # noqa: ARG001
    rows = []
    for name in PRESETS:
        model = train_config(name).model
        rows.append({"preset": name, "parameters": parameters(model), "flops_per_token": training_flops(model)})
    if as_json:
        print(json.dumps(rows))
        return
    print(f"{'preset':12} {'parameters':>14} {'training FLOPs a token':>24}")
    for row in rows:
        print(f"{row['preset']:12} {row['parameters']:14,} {row['flops_per_token']:24,.0f}")


def _late(module: str) -> Callable[..., int | None]:
    """The `run` of a module that is loaded when it is called."""
    return lambda config, as_json, **more: import_module(module).run(config, as_json, **more)


# verb -> (configuration, function); a verb of two words is typed as two (`depthgate bench layers`)
_VERBS: dict[str, tuple[type[Any], Any]] = {
    "train": (TrainConfig, _late("depthgate.commands.train")),
    "eval": (EvalConfig, _late("depthgate.commands.eval")),
    "isoflop": (IsoflopConfig, _late("depthgate.isoflop.study")),
    "generate": (GenerateConfig, _late("depthgate.commands.generate")),
    "convert": (ConvertConfig, _late("depthgate.commands.convert")),
    "finetune": (FinetuneConfig, _late("depthgate.hf.finetune")),
    "view": (ViewConfig, _late("depthgate.commands.view")),
    "presets": (PresetsConfig, _presets),
    "bench-layers": (BenchLayersConfig, _late("depthgate.bench.layers")),
    "bench-train": (BenchTrainConfig, _late("depthgate.bench.train")),
    "bench-generate": (BenchGenerateConfig, _late("depthgate.bench.generate")),
    "bench-hf": (BenchHFConfig, _late("depthgate.hf.speed")),
    "demo": (DemoConfig, _late("depthgate.demo.command")),
}


def _about(config: type[Any]) -> str:
    return (config.__doc__ or "").split("\n")[0]


class _Parser(ArgumentParser):
    """Says in a line or two what is wrong, without the list of all options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        about = (getattr(ex, "subcommand_parser", None) or self).prog.replace(" [options]", "")
        raise DepthgateError(f"{message}\n`{about} --help` lists the options") from ex


def _verb_parser(config: type[Any]) -> ArgumentParser:
    parser = _Parser(description=_about(config), allow_abbrev=False)
    parser.add_argument("--config", action="config", help="yaml file with any of these options")
    parser.add_argument("--json", action="store_true", help="print figures as one JSON object, and nothing else")
    typed = {each.name: each.metadata["typed"] for each in fields(config) if "typed" in each.metadata}
    about = {each.arg_name: each.description for each in docstring_parser.parse(config.__doc__ or "").params}
    for name, how in typed.items():
        parser.add_argument(name if "nargs" in how else f"--{name}", help=about[name], **how)
    parser.add_class_arguments(config, as_group=False, skip=set(typed))
    if issubclass(config, RunConfig):
        parser.add_argument("--resume", action="store_true", help="go on where the run's newest checkpoint ends")
    return parser


def build_parser(start: str = "tiny-mod") -> ArgumentParser:
    """The whole command line; `start` names the preset that `train` begins from."""
    about = "Mixture-of-Depths, MoDE and Soft MoE for PyTorch"
    parser = _Parser(prog="depthgate", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"depthgate {__version__}")
    verbs = parser.add_subcommands(dest="verb")
    for verb, (config, _) in _VERBS.items():
        verb_parser = _verb_parser(config)
        if config is TrainConfig:
            verb_parser.set_defaults({"preset": start, **preset(start)})
        verbs.add_subcommand(verb, verb_parser, help=_about(config))
    return parser


def _join_words(argv: Sequence[str]) -> list[str]:
    """["bench", "layers", ...] -> ["bench-layers", ...]: the parser reads yaml for one level of verbs only."""
    first = "-".join(argv[:2])
    if len(argv) > 1 and first in _VERBS:
        return [first, *argv[2:]]
    second = [verb.partition("-")[2] for verb in _VERBS if argv and verb.startswith(f"{argv[0]}-")]
    if second:
        raise InvalidValueError(
            f"{argv[0]} what? `depthgate {argv[0]} WHAT`, where WHAT is one of: {', '.join(second)}"
        )
    return list(argv)


def _preset_of(argv: Sequence[str]) -> str:
    """The preset that the command line or its yaml files name last: all other defaults hang on it."""
    found = "tiny-mod"
    for i, word in enumerate(argv):
        name, given, value = word.partition("=")
        value = value if given else "".join(argv[i + 1 : i + 2])
        if name == "--preset":
            found = value
        elif name == "--config" or (name == "--model" and argv[0] == "train"):  # both may name a yaml file
            with suppress(OSError, yaml.YAMLError):  # the parser will say what is wrong
                loaded = _read_yaml(value)
                named = loaded.get("preset") if name == "--config" and isinstance(loaded, dict) else None
                found = named if isinstance(named, str) else found
    return found


def _read_yaml(config: str) -> Any:
    """What a yaml file, or text, holds. What would overwhelm the parser, which reads it next, is refused here."""
    path = Path(config)
    text = path.read_bytes() if path.is_file() else config.encode()
    too_much = InvalidValueError(f"config is {config[:99]!r}: it is too large, too deep or refers to itself")
    if len(text) > 2**16:
        raise too_much
    depth = 0
    try:
        for event in yaml.parse(text.decode(), yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > 9 or isinstance(event, yaml.AliasEvent):
                raise too_much
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"config is {config!r}, which is not yaml text: {error}") from None
    return yaml.safe_load(text)


def _with_underscores(word: str) -> str:
    """--max-new-tokens=9 -> --max_new_tokens=9: options may be typed either way."""
    name, given, value = word.partition("=")
    typed = re.fullmatch(r"--[A-Za-z][\w.-]*", name)  # and not a text that begins so
    return f"--{name[2:].replace('-', '_')}{given}{value}" if typed else word


def _parse(argv: Sequence[str]) -> Namespace:
    words = [_with_underscores(word) for word in _join_words(argv)]
    options = build_parser(_preset_of(words)).parse_args(words)
    if options.verb == "train" and not isinstance(options.train.model, Namespace):
        raise InvalidValueError(f"model is {options.train.model!r}: it must be a group of options, such as model.dim")
    if options.verb == "train":
        _settle_vocab(options.train)
    return options


def _settle_vocab(options: Namespace) -> None:
    """A vocabulary asks for a bpe tokenizer; one that only the preset asked for gives way to another tokenizer."""
    start = preset(options.preset)
    if options.vocab is not None and options.tokenizer != "bpe":
        if options.vocab == start.get("vocab"):
            options.vocab = None
        elif options.tokenizer == start.get("tokenizer", "bytes"):
            options.tokenizer = "bpe"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 2 something the user can mend, 130 interrupted."""
    code = _guarded(argv)
    if argv is None and code == 130:  # a second Ctrl-C would only disturb the end of the process
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _guarded(argv: Sequence[str] | None) -> int:
    with guarded():
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        except DepthgateError as error:
            return _refuse(error)
        except (MemoryError, RuntimeError) as error:
            text = str(error)
            if not isinstance(error, MemoryError) and "alloc" not in text and "out of memory" not in text:
                raise
            return _refuse(f"out of memory: {(text.splitlines() or ['nothing is left'])[0]}; ask for less")
        except BrokenPipeError:  # whoever read our output has had enough
            silence(sys.stdout)
            return 0
        except OSError as error:
            silence(sys.stdout)
            return _refuse(error)
        except KeyboardInterrupt:
            print("depthgate: interrupted", file=sys.stderr)
            return 130


def _refuse(why: object) -> int:
    print(f"depthgate: error: {why}", file=sys.stderr)
    return 2


def _run(argv: Sequence[str]) -> int:
    # Before torch is loaded. Threads that spin while they wait make a step ten times slower where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = _parse(argv)
    config_type, function = _VERBS[options.verb]
    options = options[options.verb]
    extra = {"resume": options.resume} if issubclass(config_type, RunConfig) else {}
    code = function(build(config_type, options), options.json, **extra) or 0
    print(end="", flush=True)  # here, where a failure is still ours to report
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
