"""`dg.hf.convert` routes layers of a transformers model in place, so that at first nothing changes; `convert_folder`
does that from a folder to another, compares the model with the dense one, and sees that it loads again."""

import copy
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgate.config import ConvertConfig, check_neutral
from depthgate.errors import DepthgateError, InvalidValueError, check_capacity
from depthgate.files import new_folder
from depthgate.hf.calibrate import layer_changes, least_changing
from depthgate.hf.classes import config_class, install, model_class
from depthgate.hf.families import Routing, check_config_values, checked_layers, family_of
from depthgate.hf.folder import check_config, check_generation, copy_tokenizer, find_tokenizer, gguf_of, load
from depthgate.hf.layer import routed_layers
from depthgate.routing.routers import TopTokens

# How far logits may be apart, as a share of the largest: two right answers that were rounded in another order.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_CALIBRATION = (8, 256)  # sequences, and tokens of each
_WINDOW = 1024  # the longest window of attention that is looked beyond without being asked to


def convert(
    model: Any,
    capacity: float = 0.5,
    layers: str | Sequence[int] = "every_other",
    *,
    gate: str = "one_plus_tanh",
    rule: str = "predictor",
    rule_loss: float = 0.01,
    calibration: Any = None,
) -> Any:
    """Route `layers` of a transformers causal language model, in place; the model is also returned.

    Routers start at zero. The gates one_plus_tanh and straight_through are then exactly 1 (others are refused), and
    every causal rule routes all tokens: in evaluation the model is at first what it was before, and with capacity 1 in
    training, too.

    layers: 'every_other' (1, 3, ...), numbers of layers, or 'auto': the half that changes its tokens least on
    `calibration`, token ids (B, T) or a dict of the model's inputs. rule_loss: weight of the loss that teaches the
    rule; a threshold needs none.
    """
    kind = family_of(model)
    depth = model.config.num_hidden_layers
    check_neutral(gate)
    Routing((0,), capacity, gate, rule, rule_loss)  # refuse wrong values before anything is measured
    if (isinstance(layers, str) and layers == "auto") != (calibration is not None):
        raise InvalidValueError("layers='auto' and calibration go together: give both, or neither")
    chosen: Any = layers
    if isinstance(layers, str) and layers == "auto":
        chosen = least_changing(layer_changes(model, calibration))
    elif isinstance(layers, str) and layers == "every_other":
        chosen = range(1, depth, 2)
    routing = Routing(checked_layers(chosen, depth), float(capacity), gate, rule, float(rule_loss))
    before, config = model.config, copy.deepcopy(model.config)  # other models may hold the same config
    config.__class__ = config_class(kind)
    if hasattr(config, "auto_map"):  # it names code of another model
        del config.auto_map
    config.depthgate = routing.written()
    for part in model.modules():
        if getattr(part, "config", None) is before:
            part.config = config
    model.__class__ = model_class(kind)
    install(model)
    return model


def set_capacity(model: Any, capacity: float) -> None:
    """Change the capacity of all routed layers of a model, and of what is saved."""
    layers = routed_layers(model)
    if not layers:
        raise InvalidValueError("the model has no routed layers: convert it with dg.hf.convert")
    check_capacity(capacity)
    for layer in layers:
        for part in layer.depth_router.modules():  # PEFT may have wrapped the router, and keep a copy
            if isinstance(part, TopTokens):
                part.capacity = float(capacity)
    model.config.depthgate = {**model.config.depthgate, "capacity": float(capacity)}


class Converted(NamedTuple):
    """The outcome of a conversion."""

    config: Any  # of the routed model
    changes: list[float] | None  # of each layer, how much it changes its tokens, where that was measured
    difference: float  # the largest of the logits at capacity 1, as a share of the largest logit


def convert_folder(config: ConvertConfig) -> Converted:
    """Convert the model of a folder or a GGUF file, check it against the dense one, and save it."""
    source, out = Path(config.model), Path(config.out)
    check_new(out, source)
    if (source / "config.json").is_file() and gguf_of(source) is None:
        check_config_values(check_config(source / "config.json"), str(source))
    check_generation(source)
    model = load(source)
    family_of(model)
    tokenizer = find_tokenizer(source)
    changes, layers = None, config.layer_choice
    if layers == "auto":
        changes = layer_changes(model, _calibration(tokenizer, Path(config.text or ""), model, source))
        layers = least_changing(changes)
    probe, last = _probe(config, model.config)
    dense = logits(model, probe, logits_to_keep=last)
    if not dense.isfinite().all():
        raise DepthgateError(f"{source} gives logits that are not finite: its weights are damaged")
    convert(model, 1.0, layers, gate=config.gate, rule=config.rule)
    routed = (logits(model, probe, causal_routing=causal, logits_to_keep=last) for causal in (True, False))
    difference = max(distance(each, dense) for each in routed)
    if not difference <= TOLERANCE[model.dtype]:
        raise DepthgateError(
            f"at capacity 1 the logits differ from the dense model's by {difference:.1e} of the largest: nothing is "
            "written; please report this, with the model's config.json"
        )
    set_capacity(model, config.capacity)
    save(model, partial(copy_tokenizer, tokenizer, source), out, probe[:, :last])
    return Converted(model.config, changes, difference)


def check_new(out: Path, source: Path) -> None:
    """Refuse an output folder that exists, lies within the source, or cannot be written."""
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


def _probe(config: ConvertConfig, model: Any) -> tuple[Tensor, int]:
    """Random sequences for a model of this config, and the number of their last tokens that are compared. Before these
    come as many as a window holds, where there is one: only then a lost window shows."""
    room, window = model.max_position_embeddings, getattr(model, "sliding_window", None)
    last = min(config.probe, room)
    before = window if isinstance(window, int) and 0 < window <= _WINDOW else 0
    chance = torch.Generator().manual_seed(config.seed)
    return torch.randint(model.vocab_size, (2, min(before + last, room)), generator=chance), last


def _calibration(tokenizer: Any, text: Path, model: Any, source: Path) -> Tensor:
    """Token ids (B, T) from the beginning of a text."""
    rows, length = _CALIBRATION
    length = min(length, model.config.max_position_embeddings)
    if not text.is_file():
        raise DepthgateError(f"{text} is not a file: give --text a file of text")
    if tokenizer is None:
        raise DepthgateError(f"{source} has no tokenizer, which --layers auto needs: add its files, or name the layers")
    with text.open(encoding="utf-8", errors="replace") as file:
        ids = tokenizer(file.read(32 * rows * length), add_special_tokens=False)["input_ids"]
    length = min(length, len(ids))
    if length < 2:
        raise DepthgateError(f"the tokenizer of {source} makes nothing of {text}: look at both, or name the layers")
    rows = min(rows, len(ids) // length)
    return torch.tensor(ids[: rows * length]).view(rows, length)


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """Logits of a transformers model in float64."""
    found: Tensor = model(ids, use_cache=False, **kwargs).logits
    return found.double()


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def save(model: Any, write_tokenizer: Callable[[Path], None], out: Path, probe: Tensor) -> None:
    """Write a model's folder under another name, check that it loads, and only then rename it."""
    try:
        with new_folder(out) as part:
            model.save_pretrained(part)
            write_tokenizer(part)
            if distance(logits(load(part), probe), logits(model, probe)) > 0:
                raise DepthgateError(f"what was saved is not what was converted: {out} is not written")
    except OSError as error:
        raise _unwritable(out, error) from error
