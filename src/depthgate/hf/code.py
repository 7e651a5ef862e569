"""How a saved model is opened where nobody has imported depthgate:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

The folder's config names a small file beside it (auto_map), and that imports depthgate. Imports nothing heavy.
"""

import json
from pathlib import Path
from typing import Any

from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.hf.families import FAMILIES, PREFIX

_NAME = "modeling_depthgate"
_MOST = 2**24  # bytes of a config that are looked at


def code_names(model_type: str) -> dict[str, str]:
    """The auto_map of a routed model."""
    family = FAMILIES[model_type.removeprefix(PREFIX)]
    return {"AutoConfig": f"{_NAME}.MoD{family.config}", "AutoModelForCausalLM": f"{_NAME}.MoD{family.model}"}


def write_code(model_type: str, folder: Path) -> None:
    """The file that it names."""
    names = ", ".join(name.partition(".")[2] for name in code_names(model_type).values())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{_NAME}.py").write_text(
        '"""Opens this model with from_pretrained(folder, trust_remote_code=True).\n\n'
        'Its code is that of the package depthgate: pip install depthgate\n"""\n\n'
        f"from depthgate.hf.classes import {names}\n",
        encoding="utf-8",
    )


def is_model(folder: Path) -> bool:
    """Whether a folder is one of a transformers model: its config.json, damaged or not, names a type of model, and that
    of a run does not."""
    path = folder / "config.json"
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return b'"model_type"' in file.read(_MOST)
    except OSError:
        return False


def check_code(named: Any, model_type: str) -> None:
    """Refuse an auto_map that is not ours: whoever can write a config must not choose what is executed."""
    if named is not None and (not model_type.startswith(PREFIX) or named != code_names(model_type)):
        raise InvalidValueError(
            f"the config names code to run (auto_map is {str(named)[:120]}), which is never done: take it out"
        )


def check_config(path: Path) -> dict[str, Any]:
    """A model's config.json, if it is one and names no code of somebody else's."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DepthgateError(f"{path} cannot be loaded: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise DepthgateError(f"{path} cannot be loaded: it does not name a model_type")
    kind = config["model_type"]
    for name in ("num_hidden_layers", "n_layer"):
        depth = config.get(name, 1)
        if isinstance(depth, int) and depth < 1:  # transformers would make a model without layers
            raise DepthgateError(f"{path} cannot be loaded: {name} is {depth}: it must be a whole number from 1")
    for name in ("max_position_embeddings", "n_positions"):
        most = config.get(name, 2)
        if isinstance(most, int) and most < 2:
            raise DepthgateError(f"{path} cannot be loaded: {name} is {most}: it must be a whole number from 2")
    for name in ("attn_implementation", "_attn_implementation"):
        if "/" in str(config.get(name)):  # transformers would fetch a kernel of that name, and run it
            raise DepthgateError(
                f"{path} names code to run ({name} is {str(config[name])[:120]}), which is never done: take it out"
            )
    check_code(config.get("auto_map"), kind if kind.removeprefix(PREFIX) in FAMILIES else "")
    return config


def check_tokenizer(path: Path) -> None:
    """Nor may a tokenizer's configuration name code, which would be copied with it."""
    try:
        named = json.loads(path.read_bytes()).get("auto_map") if path.is_file() else None
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise DepthgateError(f"{path} cannot be loaded: {error}") from None
    check_code(named, "")
