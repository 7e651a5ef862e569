"""The command line: verb -> function. Heavy imports wait until a verb runs."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from jsonargparse import ArgumentParser

from depthgate._version import __version__
from depthgate.bench.config import BenchLayersConfig
from depthgate.config import DemoConfig, EvalConfig, ModelConfig, PresetsConfig, TrainConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.flops import parameters, training_flops
from depthgate.presets import PRESETS, preset


def _train(config: TrainConfig, as_json: bool, resume: bool) -> int:  # noqa: ARG001
    from depthgate.train.loop import train

    return train(config, resume)


def _eval(config: EvalConfig, as_json: bool) -> None:
    from depthgate.train.evaluate import run

    run(config, as_json)


def _presets(config: PresetsConfig, as_json: bool) -> None:  # noqa: ARG001
    rows = []
    for name in PRESETS:
        model = _build(TrainConfig, _nested(preset(name))).model
        rows.append({"preset": name, "parameters": parameters(model), "flops_per_token": training_flops(model)})
    if as_json:
        print(json.dumps(rows))
        return
    print(f"{'preset':12} {'parameters':>14} {'training FLOPs a token':>24}")
    for row in rows:
        print(f"{row['preset']:12} {row['parameters']:14,} {row['flops_per_token']:24,.0f}")


def _demo(config: DemoConfig, as_json: bool) -> None:
    from depthgate.demo import run

    run(config, as_json)


def _bench_layers(config: BenchLayersConfig, as_json: bool) -> None:
    from depthgate.bench.layers import run

    run(config, as_json)


# verb -> (configuration, function); a verb of two words is typed as two (`depthgate bench layers`)
_VERBS: dict[str, tuple[type[Any], Any]] = {
    "train": (TrainConfig, _train),
    "eval": (EvalConfig, _eval),
    "presets": (PresetsConfig, _presets),
    "bench-layers": (BenchLayersConfig, _bench_layers),
    "demo": (DemoConfig, _demo),
}


def _nested(dotted: dict[str, Any]) -> dict[str, Any]:
    """{"model.dim": 8, "lr": 1} -> {"model": {"dim": 8}, "lr": 1}."""
    out: dict[str, Any] = {}
    for name, value in dotted.items():
        *path, last = name.split(".")
        place = out
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return out


def _build(config: type[Any], values: Any) -> Any:
    """A configuration from nested values; fields that are configurations themselves are built first."""
    given = {}
    for field in fields(config):
        if field.name in values:
            value = values[field.name]
            given[field.name] = _build(ModelConfig, value) if field.type is ModelConfig else value
    return config(**given)


def _about(config: type[Any]) -> str:
    return (config.__doc__ or "").split("\n")[0]


def _verb_parser(config: type[Any]) -> ArgumentParser:
    parser = ArgumentParser(description=_about(config))
    parser.add_argument("--config", action="config", help="yaml file with any of these options")
    parser.add_argument("--json", action="store_true", help="print figures as one JSON object, and nothing else")
    parser.add_class_arguments(config, as_group=False)
    if config is TrainConfig:
        parser.add_argument("--resume", action="store_true", help="go on where the run's newest checkpoint ends")
    return parser


def build_parser(start: str = "tiny-mod") -> ArgumentParser:
    """The whole command line; `start` names the preset that `train` begins from."""
    parser = ArgumentParser(prog="depthgate", description="Mixture-of-Depths, MoDE and Soft MoE for PyTorch")
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
    """The preset named on the command line: all other defaults hang on it."""
    for i, word in enumerate(argv):
        if word.startswith("--preset="):
            return word.partition("=")[2]
        if word == "--preset" and i + 1 < len(argv):
            return argv[i + 1]
    return "tiny-mod"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 2 something the user can mend, 130 interrupted."""
    try:
        words = _join_words(sys.argv[1:] if argv is None else argv)
        options = build_parser(_preset_of(words)).parse_args(words)
        config_type, function = _VERBS[options.verb]
        options = options[options.verb]
        extra = {"resume": options.resume} if config_type is TrainConfig else {}
        return function(_build(config_type, options), options.json, **extra) or 0
    except DepthgateError as error:
        print(f"depthgate: error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "alloc" not in str(error) and "out of memory" not in str(error):
            raise
        print(f"depthgate: error: out of memory: {str(error).splitlines()[0]}; ask for less", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("depthgate: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
