"""`depthgate convert`: a folder in, another out. What is written was compared with the dense model, and loads again."""

import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgate.config import ConvertConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.hf.calibrate import layer_changes, least_changing
from depthgate.hf.code import check_config
from depthgate.hf.conversion import convert, set_capacity
from depthgate.hf.families import check_config_values, family_of
from depthgate.hf.folder import gguf_of, load
from depthgate.hf.tokenizer_files import check_generation, check_text, copy_text, load_tokenizer

# How far logits may be apart, as a share of the largest: two right answers that were rounded in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_CALIBRATION = (8, 256)  # sequences, and tokens of each
_WINDOW = 1024  # the longest window of attention that is looked beyond without being asked to


def run(config: ConvertConfig, as_json: bool) -> int:
    """Convert, check, save, and say what was done."""
    source, out = Path(config.model), Path(config.out)
    check_new(out, source)
    if (source / "config.json").is_file() and gguf_of(source) is None:
        check_config_values(check_config(source / "config.json"), str(source))
    check_generation(source)
    model = load(source)
    family_of(model)
    check_text(source)
    changes, layers = None, config.layer_choice
    if layers == "auto":
        changes = layer_changes(model, _calibration(source, Path(config.text or ""), model))
        layers = least_changing(changes)
    probe, last = _probe(config, model.config)
    dense = logits(model, probe, logits_to_keep=last)
    if not dense.isfinite().all():
        raise DepthgateError(f"{source} gives logits that are not finite: its weights are damaged")
    convert(model, 1.0, layers, gate=config.gate, rule=config.rule)
    routed = (logits(model, probe, causal_routing=causal, logits_to_keep=last) for causal in (True, False))
    difference = max(distance(each, dense) for each in routed)
    if not difference <= _TOLERANCE[model.dtype]:
        raise DepthgateError(
            f"at capacity 1 the logits differ from the dense model's by {difference:.1e} of the largest: nothing is "
            "written; please report this, with the model's config.json"
        )
    set_capacity(model, config.capacity)
    save(model, partial(copy_text, source), out, probe[:, :last])
    _report(model.config, changes, difference, out, as_json)
    return 0


def _probe(config: ConvertConfig, model: Any) -> tuple[Tensor, int]:
    """Random sequences for a model of this config, and how many of their last tokens are compared. They come after
    as many as a window holds, where there is one: before that, nobody could tell whether it is kept."""
    room, window = model.max_position_embeddings, getattr(model, "sliding_window", None)
    last = min(config.probe, room)
    before = window if isinstance(window, int) and 0 < window <= _WINDOW else 0
    chance = torch.Generator().manual_seed(config.seed)
    return torch.randint(model.vocab_size, (2, min(before + last, room)), generator=chance), last


def check_new(out: Path, source: Path) -> None:
    """Nothing is ever written over, or into what is read."""
    if out.exists() or out.is_symlink():
        raise InvalidValueError(f"{out} is there already: give --out a folder that is not")
    if source.is_dir() and source.resolve() in out.resolve().parents:
        raise InvalidValueError(f"{out} is within {source}, which stays as it is: give --out another folder")
    there = next(parent for parent in out.absolute().parents if os.path.exists(parent))
    try:
        tempfile.TemporaryDirectory(prefix=".depthgate.", dir=there).cleanup()
    except OSError as error:
        raise _unwritable(out, error) from None


def _unwritable(out: Path, error: OSError) -> DepthgateError:
    why = error.strerror or error
    return DepthgateError(f"cannot write {out} ({why}): give --out a folder where there is room, and which is yours")


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    logits: Tensor = model(ids, use_cache=False, **kwargs).logits
    return logits.double()


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def _calibration(folder: Path, text: Path, model: Any) -> Tensor:
    """Token ids (B, T) from the beginning of a text."""
    rows, length = _CALIBRATION
    length = min(length, model.config.max_position_embeddings)
    if not text.is_file():
        raise DepthgateError(f"{text} is no file: give --text a file of text")
    tokenizer = load_tokenizer(folder)  # --layers auto needs one
    with text.open(encoding="utf-8", errors="replace") as file:
        ids = tokenizer(file.read(32 * rows * length), add_special_tokens=False)["input_ids"]
    length = min(length, len(ids))
    if length < 2:
        raise DepthgateError(f"the tokenizer of {folder} makes nothing of {text}: look at both, or name the layers")
    rows = min(rows, len(ids) // length)
    return torch.tensor(ids[: rows * length]).view(rows, length)


def save(model: Any, tokenizer: Any, out: Path, probe: Tensor) -> None:
    """Write the folder beside where it goes, see that it loads, and only then give it its name. `tokenizer` writes its
    files into a folder."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        model.save_pretrained(part)
        tokenizer(part)
        if distance(logits(load(part), probe), logits(model, probe)) > 0:
            raise DepthgateError(f"what was saved is not what was converted: {out} is not written")
        part.rename(out)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


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
