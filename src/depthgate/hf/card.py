"""The model card: README.md in a model's folder, with what a converted model is, its figures, and the command; and
with what `depthgate eval --card` has measured."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthgate.errors import DepthgateError
from depthgate.files import check_outs, write
from depthgate.options import command

CARD = "README.md"
_TEXT = """---
library_name: transformers
base_model: {base}
tags: [depthgate, mixture-of-depths]
---
# {name}

A {kind}: layers {layers} compute a share of the tokens (capacity {capacity}), the others skip them. In evaluation each
token is chosen by the causal rule (`{rule}`); routing_mode is `{mode}`.

```python
import depthgate.hf  # pip install 'depthgate[hf]'; or trust_remote_code=True
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}")
```

Made by `{command}` from {base}.

{figures}"""


def write_card(folder: Path, name: str, model: Any, verb: str, config: Any, figures: Mapping[str, Any]) -> None:
    """Write the card of a model that a command has made with these options."""
    routing = model.config.depthgate
    values = {**routing, "layers": ", ".join(map(str, routing["layers"])), "base": config.model, "name": name}
    values |= {"kind": type(model).__name__, "mode": model.config.routing_mode, "figures": _table(figures)}
    (folder / CARD).write_text(_TEXT.format(**values, command=command(verb, config)), encoding="utf-8")


def check_card(folder: Path) -> None:
    """Refuse a folder without a card that can be written to."""
    if not (folder / CARD).is_file():
        what = f"{folder} has no {CARD} to add figures to"
        raise DepthgateError(f"{what}: depthgate convert and finetune write one; or make one, or leave --card out")
    check_outs(folder / CARD)


def add_figures(folder: Path, what: str, config: Any, figures: Mapping[str, Any]) -> None:
    """Add a section of what was measured to a card, in place of an earlier one on the same; all else stays as it is."""
    check_card(folder)
    heading = f"## Measured on {what}\n\n"
    section = f"{heading}By `{command('eval', config)}`:\n\n{_table(figures)}".encode()
    own = re.escape(heading.encode()) + rb"By `depthgate eval [^\n]*\n\n(?:\|[^\n]*\n)+"
    card = (folder / CARD).read_bytes()
    written, count = re.subn(b"^" + own, lambda _: section, card, count=1, flags=re.MULTILINE)
    write(folder / CARD, written if count else card + b"\n" * (2 - card.endswith(b"\n")) + section)


def _table(figures: Mapping[str, Any]) -> str:
    """Figures by name; of lists, those of each layer."""
    rows = [f"| {key.replace('_', ' ')} | {_said(value)} |\n" for key, value in figures.items() if value != []]
    return "".join(("| figure | value |\n", "|---|---|\n", *rows))


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_said, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
