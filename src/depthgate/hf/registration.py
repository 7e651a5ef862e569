"""Tells transformers of our model types once it is loaded, and never loads it: `import depthgate` stays light.

Only names are given, in the table that transformers keeps of its own model types. The classes behind them are made
when somebody asks for one.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from depthgate.hf.families import FAMILIES, PREFIX

_TABLE = "transformers.models.auto.configuration_auto"


def announce() -> None:
    """Now, where transformers is loaded; else as soon as it is."""
    if _TABLE in sys.modules:
        _add_names(sys.modules[_TABLE])
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds the module that holds the table as Python would, and adds our names when it has run."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != _TABLE:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _add_names(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _add_names(table: ModuleType) -> None:
    names = table.CONFIG_MAPPING_NAMES
    for kind, family in FAMILIES.items():
        if kind in names:  # else this transformers does not have it
            names[PREFIX + kind] = f"MoD{family.config}"
            sys.modules[f"transformers.models.{PREFIX}{kind}"] = sys.modules["depthgate.hf"]
