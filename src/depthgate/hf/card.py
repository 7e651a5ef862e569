"""The model card of a converted model: README.md in its folder, with what it is, its figures, and the command."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

| figure | value |
|---|---|
{rows}
"""


def write_card(folder: Path, name: str, model: Any, verb: str, config: Any, figures: Mapping[str, Any]) -> None:
    """Write the card of a model that a command has made with these options."""
    rows = [f"| {key.replace('_', ' ')} | {f'{v:.6g}' if isinstance(v, float) else v} |" for key, v in figures.items()]
    routing = model.config.depthgate
    values = {**routing, "layers": ", ".join(map(str, routing["layers"])), "base": config.model, "name": name}
    values |= {"kind": type(model).__name__, "mode": model.config.routing_mode, "rows": "\n".join(rows)}
    (folder / CARD).write_text(_TEXT.format(**values, command=command(verb, config)), encoding="utf-8")
