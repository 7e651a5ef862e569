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


# verb -> (configuration, function); a verb of two words is typed as two (`depthgate bench layers`)
_VERBS: dict[str, tuple[type[Any], Any]] = {
    "bench-layers": (BenchLayersConfig, _bench_layers),
    "demo": (DemoConfig, _demo),
}


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
    for verb, (config, _) in _VERBS.items():
        verbs.add_subcommand(verb, _verb_parser(config), help=_about(config))
    return parser


def _join_words(argv: Sequence[str]) -> list[str]:
    """["bench", "layers", ...] -> ["bench-layers", ...]: the parser reads yaml for one level of verbs only."""
    first = "-".join(argv[:2])
    return [first, *argv[2:]] if len(argv) > 1 and first in _VERBS else list(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 2 something the user can mend, 130 interrupted."""
    options = build_parser().parse_args(_join_words(sys.argv[1:] if argv is None else argv))
    config_type, function = _VERBS[options.verb]
    options = options[options.verb]
    try:
        config = config_type(**{f.name: options[f.name] for f in fields(config_type)})
        function(config, options.json)
    except DepthgateError as error:
        print(f"depthgate: error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "alloc" not in str(error) and "out of memory" not in str(error):
            raise
        print(f"depthgate: error: out of memory: {str(error).splitlines()[0]}; ask for less", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("depthgate: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
