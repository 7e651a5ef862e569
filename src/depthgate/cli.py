"""The command line: `depthgate VERB` runs depthgate.commands.VERB, which is imported only then."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

try:  # imports take a while, in which nothing has begun
    import yaml
    from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader

    from depthgate import __version__
    from depthgate import config as configs
    from depthgate.config import RunConfig, TrainConfig
    from depthgate.console import guarded, silence
    from depthgate.errors import DepthgateError, InvalidValueError, near
    from depthgate.generation.config import GenerateConfig
    from depthgate.isoflop.config import IsoflopConfig
    from depthgate.options import Options, build
    from depthgate.recipes import PRESETS, preset, settle_vocab
    from depthgate.serve.config import ServeConfig
    from depthgate.vision import IMAGE_PRESETS, PRETRAINED, ImagesConfig
except KeyboardInterrupt:
    raise SystemExit(130) from None

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
TASKS: dict[str, type[Any]] = {"text": TrainConfig, "images": ImagesConfig}  # of train
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
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
        parser = getattr(ex, "subcommand_parser", None) or self
        verb = re.search(r"are required: (\w+)\.", message)
        about = parser.prog.replace(" [options]", "") + (f" {verb[1]}" if verb else "")
        raise DepthgateError(f"{_plain(message, about)}\n`{about} --help` lists the options") from ex

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a file of options, as --config asks for."""
        try:
            return super().parse_path(path, *args, **kwargs)
        except (DepthgateError, UnicodeDecodeError) as error:
            said = str(error) if len(str(error)) < 500 else f"{str(error)[:200]}..."
            what = "" if ": it must be " in said else " is not a yaml file of options"
            raise DepthgateError(f"{path}{what}: {said}") from None


def _plain(message: str, about: str) -> str:
    """What jsonargparse says of a mistake, in the words of all other messages."""
    if found := re.search("unrecognized arguments: (--?[^ =]*)|does not accept option '(.*)'", message):
        name, known = found[1] or found[2], [name for name, _ in _options(VERBS.get(about.split()[-1]))]
        remedy = near(name, [f"--{each}" for each in known] if found[1] else known)
        remedy = ": give it without its name" if found[1] and name[2:] in known else remedy
        return f"{name} is not an option of {about}{remedy}"
    if found := re.search("unrecognized arguments: (.*)", message):
        return f"{found[1]!r} belongs to no option: a value follows its option, in quotes if it has spaces"
    if found := re.search("(?:argument --(.*): )?invalid choice: '(.*?)' \\(choose from (.*)\\)", message):
        if found[1]:
            return f"{found[1]} is {found[2]!r}: it must be one of {found[3].replace(chr(39), '')}"
        return f"{found[2]!r} is not a verb{near(found[2], VERBS) or ': these are ' + ', '.join(VERBS)}"
    if found := re.search("File does not exist: '(.*)'", message):
        return f"{found[1]} does not exist: --config takes a yaml file of options"
    if found := re.search("Unexpected config: (.*)", message):
        return f"it {f'says {found[1]!r}' if found[1] else 'is empty'}, where lines such as lr: 0.01 belong"
    if found := re.search("Problems parsing config: (.*)", message, re.DOTALL):
        lines = found[1].splitlines()  # what was read and where, what is wrong, and where
        problem = [line for line in lines if not line.startswith("  in ")][-1]
        return problem + "".join(re.findall(", line .*", lines[-1]))
    if found := re.search("arguments are required: (.*)", message):
        return f"{about} needs {found[1].replace(about.split()[-1] + '.', '--')}"
    if found := re.search("argument (--.*): expected one argument", message):
        return f"{found[1]} has no value: give one"
    if 'expected "verb"' in message:
        return f"a verb is missing: {', '.join(VERBS)}"
    value = re.search("(?:Got|Given) value: (?!.*(?:Got|Given) value: )(.*)", message, re.DOTALL)
    kind = re.search(f"Expected a <class '({'|'.join(_KINDS)})'>", message)
    if value and kind and (key := re.search('Parser key "(.*?)"', message)):
        return f"{key[1]} is {value[1]!r}: it must be {_KINDS[kind[1]]}"
    return message


def _options(config: type[Any] | None) -> Iterator[tuple[str, Any]]:
    """The names of a verb's options, with the types of their values."""
    for each in fields(config) if config else ():
        yield each.name, each.type
        if isinstance(each.type, type) and issubclass(each.type, Options):
            yield from ((f"model.{each.name}", each.type) for each in fields(each.type))
    yield from (("json", bool), ("resume", bool), ("config", str))


def _verb_parser(config: type[Any]) -> ArgumentParser:
    parser = _Parser(description=_about(config), allow_abbrev=False)
    parser.add_argument("--config", action="config", help="yaml file with any of these options")
    parser.add_argument("--json", type=bool, default=False, help="print figures as one JSON object, and nothing else")
    typed = {each.name: each.metadata for each in fields(config) if "typed" in each.metadata}
    for name, how in typed.items():
        parser.add_argument(name if "nargs" in how["typed"] else f"--{name}", help=how["about"], **how["typed"])
    if config is TrainConfig:
        about = "text, or images: see `depthgate train --task images --help`"
        parser.add_argument("--task", choices=list(TASKS), default="text", help=about)
    parser.add_class_arguments(config, as_group=False, skip=set(typed))
    if issubclass(config, RunConfig):
        parser.add_argument("--resume", type=bool, default=False, help="go on with the run of --out, by its options")
    for action in parser._actions:
        if (action.dest, bool) in _options(config):
            action.metavar = "[true|false]"
    return parser


@cache
def build_parser(start: str | None = None, task: str = "text") -> ArgumentParser:
    """The whole command line; `start` names the preset that `train` begins from, for a task."""
    about = "Mixture-of-Depths, MoDE and Soft MoE for PyTorch"
    parser = _Parser(prog="depthgate", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"depthgate {__version__}")
    verbs = parser.add_subcommands(
        dest="verb", metavar="VERB", title="verbs", description="`depthgate VERB --help` lists the options of one"
    )
    for verb, config in {**VERBS, "train": TASKS[task]}.items():
        verb_parser = _verb_parser(config)
        if verb == "train":
            start = start or str(TASKS[task].preset)
            verb_parser.set_defaults({"preset": start, **preset(start, PRESETS if task == "text" else IMAGE_PRESETS)})
        verbs.add_subcommand(verb, verb_parser, help=_about(config))
    return parser


def _words(argv: Sequence[str]) -> list[str]:
    """Options may be typed with dashes or underscores, and what is true or false without a value: --dry-run."""
    verbs = [VERBS.get("".join(argv[:1])), *(TASKS.values() if argv[:1] == ["train"] else ())]
    bare = {f"--{name}" for verb in verbs for name, kind in _options(verb) if kind is bool}
    name = re.compile(r"\A--[A-Za-z][\w.-]*(?==|\Z)")  # and not a text that begins so
    words = [name.sub(lambda found: f"--{found[0][2:].replace('-', '_')}", word) for word in argv]
    for i, word in enumerate(words):
        after = words[i + 1 : i + 2]
        if (
            word in bare
            and after not in (["true"], ["false"])
            and (argv[:1] == ["view"] or not after or after[0][:2] == "--")
        ):
            words[i] = f"{word}=true"
    return words


def _value(words: Sequence[str], name: str) -> str:
    """The value of an option among words, as it was typed; empty where it is not there."""
    found = [after for word, after in pairwise(words) if word == name]
    return [*found, *(word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}=")), ""][0]


def _steps(out: Path) -> list[Path]:
    """The folders of a run's checkpoints, newest first."""
    with suppress(OSError, ValueError):
        return sorted(out.glob("step-*"), key=lambda path: (len(path.name), path.name), reverse=True)
    return [out]  # not the name of a folder, as will be said


def _recorded(words: Sequence[str]) -> list[str]:
    """The options of the run that goes on, as words to stand before those that are given. Where they are damaged, those
    in its newest checkpoint; none where the run's folder is not on the command line, or holds no run."""
    if words[:1] not in (["train"], ["finetune"]) or _value(words, "--resume") != "true":
        return []
    from depthgate.checkpoint.store import as_written_now
    from depthgate.checkpoint.tensors import from_json

    out, own = Path(_value(words, "--out") or TrainConfig.out), {"train": "config.json", "finetune": "finetune.json"}
    for path in (out / own[words[0]], *(step / "config.json" for step in _steps(out))):
        with suppress(OSError, ValueError, DepthgateError):
            found = as_written_now(from_json(path.read_bytes(), path))
            of = TASKS[found.get("task", "text")] if words[0] == "train" else VERBS[words[0]]
            names = {name for name, _ in _options(of)}
            if isinstance(model := found.get("model"), dict):
                found["model"] = {name: value for name, value in model.items() if f"model.{name}" in names}
            kept = {name: found[name] for name in names & found.keys() - {"out"}}
            return ["--config", json.dumps(kept, ensure_ascii=False)]
    source = _value(words, "--model") or _value(words, "--config")
    if words[0] == "finetune" and _value(words, "--out") and not source:
        raise DepthgateError(f"out is {out}, which holds no run to resume: name its folder, or start one with --model")
    return []


def _task(words: Sequence[str]) -> str:
    """The task of a run: as typed, or as a file of options or the run that goes on names it."""
    task = _value(words, "--task")
    for given in [after for word, after in pairwise(words) if word == "--config"] if not task else ():
        with suppress(OSError, ValueError, AttributeError, yaml.YAMLError):
            text = given if given.startswith("{") else Path(given).read_text(encoding="utf-8")
            task = str(_load_yaml(text).get("task") or task)
    return task if task in TASKS else "text"


def parse(argv: Sequence[str]) -> Namespace:
    """The options of a command line, and of the yaml files that it names."""
    typed = _words(argv)
    words = [*typed[:1], *_recorded(typed), *typed[1:]]
    try:
        if words[:1] != ["train"]:
            return build_parser().parse_args(words)
        # All other defaults depend on the preset, which may stand in a yaml file: read once to learn it.
        asking, task, of_run = ("--help", "-h", "--print_config"), _task(words), _task(_recorded(words) or words)
        if task != of_run:
            raise InvalidValueError(f"task is {task!r}, but the run is one of {of_run}: leave it out")
        first = build_parser(task=task).parse_args([word for word in words if not word.startswith(asking)])
        plain = [word for word in typed if not word.startswith(asking)]
        given, start = build_parser(task=task).parse_args(plain, defaults=False).train, first.train.preset
        if first.train.get("pretrained") and not given.get("preset"):  # it is routed where that is asked for
            start = PRETRAINED
        options = build_parser(start, task).parse_args(words)
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"a config file is not yaml text: {error}") from None
    if not isinstance(options.train.model, Namespace):
        raise InvalidValueError(f"model is {options.train.model!r}: it must be a group of options, such as model.dim")
    if given.get("steps") and given.get("epochs"):
        raise InvalidValueError(f"steps is {given.steps}, and epochs is {given.epochs}: give one of them")
    if task == "text":
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
    config = build(TASKS[given.task] if verb == "train" else VERBS[verb], given)
    code = import_module(f"depthgate.commands.{verb}").run(config, given.json, **extra) or 0
    print(end="", flush=True)  # here, where a failure is still ours to report
    return int(code)
