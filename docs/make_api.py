"""Write docs/api.md from the docstrings of every public name.

python docs/make_api.py
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import depthgate as dg

PAGE = Path(__file__).with_name("api.md")
HEAD = """# The public names

Made by `python docs/make_api.py` from the docstrings. `import depthgate as dg`. Letters: B batch, T tokens, D width,
E experts, C slots of an expert, K experts of a token, N routed rows, H heads, V vocabulary. Guides:
[layers](layers.md), [language models](language-model.md), [Hugging Face models](huggingface.md).
"""


def page() -> str:
    """The whole page."""
    names = {name: getattr(dg, name) for name in dg.__all__ if name != "__version__"}
    values = {name: value for name, value in names.items() if not isinstance(value, ModuleType)}
    parts = [HEAD, *(entry(f"dg.{name}", value) for name, value in values.items()), "## Packages\n"]
    for name, value in names.items():
        if isinstance(value, ModuleType):
            parts.append(f"### dg.{name}\n\n{text(value)}\n{''.join(lines(value))}")
    return "\n".join(parts)


def entry(name: str, value: Any) -> str:
    """A class with its constructor's options and its methods, or a function."""
    said = [f"## {name}\n", f"    {name}{signature(value)}\n", text(value)]
    if inspect.isclass(value):
        said.append(text(vars(value).get("__init__")))
        for method, found in vars(value).items():
            function = inspect.unwrap(getattr(found, "__func__", found))
            if (
                (method == "forward" or not method.startswith("_"))
                and inspect.isfunction(function)
                and function.__doc__
            ):
                said.append(f"**{method}**`{signature(function)}`\n\n{text(function)}")
    return "\n".join(part for part in said if part)


def lines(module: ModuleType) -> Iterator[str]:
    """The names of a package, each with the first sentence of its docstring."""
    for name in getattr(module, "__all__", [n for n, v in vars(module).items() if _is_own(module, n, v)]):
        value = getattr(module, name)
        said = " ".join((value.__doc__ or "").split()) if inspect.isclass(value) or inspect.isfunction(value) else ""
        yield f"- `{name}`{': ' if said else ''}{re.split(r'(?<=[.;:]) ', said)[0].rstrip(';:')}\n"


def _is_own(module: ModuleType, name: str, value: Any) -> bool:
    return not name.startswith("_") and getattr(value, "__module__", "").startswith(module.__name__)


def signature(value: Any) -> str:
    try:
        found = inspect.signature(value)
    except ValueError:
        return ""
    names = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name not in ("self", "cls")]
    return str(found.replace(parameters=names, return_annotation=found.empty))


def text(value: Any) -> str:
    """The docstring, with a list of the arguments that it describes."""
    said = inspect.getdoc(value) if value is not None and value.__doc__ else None
    listed = re.sub(
        r'^ *([a-z]\w*(="\w+")?(, \w+)*): ', r"- **\1**: ", (said or "").replace("Args:\n", ""), flags=re.MULTILINE
    )
    return f"{listed}\n" if said else ""


if __name__ == "__main__":
    PAGE.write_text(page())
