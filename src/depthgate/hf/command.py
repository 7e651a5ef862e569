"""`depthgate convert`: a folder in, another out. What is written was compared with the dense model, and loads again."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.hf.change import layer_changes, least_changing
from depthgate.hf.config import ConvertConfig
from depthgate.hf.conversion import convert, set_capacity
from depthgate.hf.families import family_of

# How far logits may be apart, as a share of the largest: two right answers that were rounded in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# What lies beside the weights and is about text, not about the model.
_TEXT_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
_CALIBRATION = (8, 256)  # sequences, and tokens of each


def run(config: ConvertConfig, as_json: bool) -> int:
    """Convert, check, save, and say what was done."""
    source, out = Path(config.model), Path(config.out)
    if out.exists() or out.is_symlink():
        raise InvalidValueError(f"{out} is there already: give --out a folder that is not")
    model = load(source)
    family_of(model)
    changes, layers = None, config.layer_choice
    if layers == "auto":
        changes = layer_changes(model, _calibration(source, Path(config.text or ""), model))
        layers = least_changing(changes)
    length = min(config.probe, model.config.max_position_embeddings)
    chance = torch.Generator().manual_seed(config.seed)
    probe = torch.randint(model.config.vocab_size, (2, length), generator=chance)
    dense = _logits(model, probe)
    convert(model, 1.0, layers, gate=config.gate, rule=config.rule)
    difference = max(_distance(_logits(model, probe, causal_routing=causal), dense) for causal in (True, False))
    if not difference <= _TOLERANCE[model.dtype]:
        raise DepthgateError(
            f"at capacity 1 the logits differ from the dense model's by {difference:.1e} of the largest: nothing is "
            f"written; use the gate one_plus_tanh or straight_through (this was {config.gate})"
        )
    set_capacity(model, config.capacity)
    _save(model, source, out, probe)
    _report(model.config, changes, difference, out, as_json)
    return 0


def load(folder: Path) -> Any:
    """A model from a folder, whole or not at all. Nothing in the folder is executed."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise DepthgateError("transformers is missing: pip install 'depthgate[hf]'") from None
    if not (folder / "config.json").is_file():
        raise DepthgateError(f"{folder} has no config.json: give the folder of a Hugging Face model")
    if '"auto_map"' in (folder / "config.json").read_text(encoding="utf-8", errors="replace"):
        raise DepthgateError(f"{folder}/config.json names code to run (auto_map), which is never done: take it out")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # a damaged file may be anything
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise DepthgateError(f"{folder} cannot be loaded: {why}") from None
    for what in ("missing", "mismatched", "unexpected"):
        if keys := sorted(map(str, info.get(f"{what}_keys") or ())):
            raise DepthgateError(
                f"{folder} has {what} weights ({', '.join(keys)[:200]}): it is of another model, or cut"
            )
    return model.eval()


@torch.no_grad()
def _logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    logits: Tensor = model(ids, use_cache=False, **kwargs).logits
    return logits.double()


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def _calibration(folder: Path, text: Path, model: Any) -> Tensor:
    """Token ids (B, T) from the beginning of a text."""
    from transformers import AutoTokenizer

    rows, length = _CALIBRATION
    length = min(length, model.config.max_position_embeddings)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise DepthgateError(f"{folder} has no tokenizer that loads, which --layers auto needs: {why}") from None
    if not text.is_file():
        raise DepthgateError(f"{text} is no file: give --text a file of text")
    with text.open(encoding="utf-8", errors="replace") as file:
        ids = tokenizer(file.read(32 * rows * length), add_special_tokens=False)["input_ids"]
    length = min(length, len(ids))
    if length < 2:
        raise DepthgateError(f"the tokenizer of {folder} makes nothing of {text}: look at both, or name the layers")
    rows = min(rows, len(ids) // length)
    return torch.tensor(ids[: rows * length]).view(rows, length)


def _save(model: Any, source: Path, out: Path, probe: Tensor) -> None:
    """Write the folder beside where it goes, see that it loads, and only then give it its name."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        write(model, source, part)
        if _distance(_logits(load(part), probe), _logits(model, probe)) > 0:
            raise DepthgateError(f"what was saved is not what was converted: {out} is not written")
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write(model: Any, source: Path, folder: Path) -> None:
    """The model, and what lies beside its weights in `source` and is about text."""
    model.save_pretrained(folder)
    for pattern in _TEXT_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def _report(config: Any, changes: list[float] | None, difference: float, out: Path, as_json: bool) -> None:
    routed = config.depthgate["layers"]
    if as_json:
        found = {"out": str(out), "routing": config.depthgate, "difference": difference, "changes": changes}
        print(json.dumps(found))
        return
    print(f"{'layer':>5} {'change':>8}  tokens that enter")
    for i in range(config.num_hidden_layers):
        change = "" if changes is None else f"{changes[i]:.4f}"
        print(f"{i:5} {change:>8}  {config.depthgate['capacity'] if i in routed else 1:.0%}")
    if changes is not None:
        print("change: mean |f(x) - x| / |x| over the tokens of the text")
    print(f"at capacity 1 the logits are the dense model's (largest difference {difference:.1e} of the largest)")
    print(f"wrote {out}")
