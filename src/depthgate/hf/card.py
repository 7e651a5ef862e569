"""The model card of a converted model: README.md in its folder, with what it is, its figures, and the command."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from depthgate.options import Options

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

| figure | value |
|---|---|
{rows}
"""


def write_card(folder: Path, name: str, model: Any, verb: str, config: Options, figures: Mapping[str, Any]) -> None:
    """Write the card of a model that a command has made with these options."""
    asked = {
        each.name: getattr(config, each.name) for each in fields(config) if getattr(config, each.name) != each.default
    }
    rows = [f"| {key.replace('_', ' ')} | {f'{v:.6g}' if isinstance(v, float) else v} |" for key, v in figures.items()]
    routing = model.config.depthgate
    values = {**routing, "layers": ", ".join(map(str, routing["layers"])), "base": asked["model"], "name": name}
    values |= {"kind": type(model).__name__, "mode": model.config.routing_mode, "rows": "\n".join(rows)}
    command = " ".join(["depthgate", verb, *(f"--{key} {value}" for key, value in asked.items())])
    (folder / CARD).write_text(_TEXT.format(**values, command=command), encoding="utf-8")
