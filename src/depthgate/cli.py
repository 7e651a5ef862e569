"""The command line: verb -> function. Heavy imports wait until a verb runs."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from jsonargparse import ArgumentParser

from depthgate._version import __version__
from depthgate.config import BenchLayersConfig, DemoConfig
from depthgate.errors import DepthgateError


def _demo(config: DemoConfig, as_json: bool) -> None:
    from depthgate.demo import run

    run(config, as_json)


def _bench_layers(config: BenchLayersConfig, as_json: bool) -> None:
    from depthgate.bench.layers import run

    run(config, as_json)


# (verb, ...) -> (configuration, function)
_VERBS: dict[tuple[str, ...], tuple[type[Any], Any]] = {
    ("bench", "layers"): (BenchLayersConfig, _bench_layers),
    ("demo",): (DemoConfig, _demo),
}
_GROUPS = {"bench": "measure speed and FLOPs, with the answer checked first"}


def _about(config: type[Any]) -> str:
    return (config.__doc__ or "").split("\n")[0]


def _verb_parser(config: type[Any]) -> ArgumentParser:
    parser = ArgumentParser(description=_about(config))
    parser.add_argument("--config", action="config", help="yaml file with any of these options")
    parser.add_argument("--json", action="store_true", help="print figures as one JSON object, and nothing else")
    parser.add_class_arguments(config, as_group=False)
    return parser


def build_parser() -> ArgumentParser:
    """The whole command line."""
    parser = ArgumentParser(prog="depthgate", description="Mixture-of-Depths, MoDE and Soft MoE for PyTorch")
    parser.add_argument("--version", action="version", version=f"depthgate {__version__}")
    verbs = parser.add_subcommands(dest="verb")
    for group, about in _GROUPS.items():
        group_parser = ArgumentParser(description=about)
        verbs.add_subcommand(group, group_parser, help=about)
        members = group_parser.add_subcommands(dest="what")
        for path, (config, _) in _VERBS.items():
            if path[0] == group:
                members.add_subcommand(path[1], _verb_parser(config), help=_about(config))
    for path, (config, _) in _VERBS.items():
        if len(path) == 1:
            verbs.add_subcommand(path[0], _verb_parser(config), help=_about(config))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 2 something the user can mend, 130 interrupted."""
    options = build_parser().parse_args(argv)
    path: tuple[str, ...] = (options.verb,)
    options = options[options.verb]
    if path[0] in _GROUPS:
        path, options = (*path, options.what), options[options.what]
    config_type, function = _VERBS[path]
    try:
        config = config_type(**{f.name: options[f.name] for f in fields(config_type)})
        function(config, options.json)
    except DepthgateError as error:
        print(f"depthgate: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("depthgate: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
