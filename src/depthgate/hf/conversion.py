"""`dg.hf.convert` routes layers of a transformers model in place, so that at first nothing changes; `convert_folder`
does that from a folder to another, compares the model with the dense one, and sees that it loads again."""

import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.config import ConvertConfig, check_neutral
from depthgate.errors import DepthgateError, InvalidValueError, check_capacity
from depthgate.files import new_folder
from depthgate.hf.adapter import collected
from depthgate.hf.classes import config_class, install, model_class
from depthgate.hf.families import OURS, Routing, check_config_values, checked_layers, decoder_layers, family_of
from depthgate.hf.folder import check_config, check_generation, copy_tokenizer, find_tokenizer, gguf_of, load
from depthgate.hf.layer import DepthRouter, routed_layers

# How far logits may be apart, as a share of the largest: two right answers that were rounded in another order.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SAVED_PROBE = 64  # tokens that a saved model is read with
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
    every causal rule routes all tokens: in evaluation, and in training at capacity 1, nothing changes at first.

    layers: 'every_other' (1, 3, ...), numbers of layers, or 'auto': the half that changes its tokens least on
    `calibration`, token ids (B, T) or a dict of the model's inputs. rule_loss: weight of the loss that teaches the
    rule; a threshold needs none.
    """
    kind = family_of(model)
    depth = model.config.num_hidden_layers
    check_neutral(gate)
    Routing((0,), capacity, gate, rule, rule_loss)  # refuse wrong values before anything is measured
    name = layers if isinstance(layers, str) else None
    if (name == "auto") != (calibration is not None):
        raise InvalidValueError("layers='auto' and calibration go together: give both, or neither")
    chosen: Any = range(1, depth, 2) if name == "every_other" else layers
    if name == "auto":
        chosen = least_changing(layer_changes(model, calibration))
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
    routers = [part for part in model.modules() if isinstance(part, DepthRouter)]  # copies that PEFT keeps among them
    if not routers:
        raise InvalidValueError("the model has no routed layers: convert it with dg.hf.convert")
    check_capacity(capacity)
    for router in routers:
        router.capacity = float(capacity)
    model.config.depthgate = {**model.config.depthgate, "capacity": float(capacity)}


def layer_changes(model: Any, batch: Any) -> list[float]:
    """The mean over tokens of |f(x) - x| / |x| for each layer of a dense model, on a batch: token ids (B, T), or a dict
    of the model's inputs. The model is left as it was."""
    family_of(model)  # refuses others
    inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    ids, vocab = inputs.get("input_ids"), model.get_input_embeddings().num_embeddings
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.numel() == 0:
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise InvalidValueError(f"calibration is {got}: layers='auto' needs token ids of shape (batch, tokens)")
    if wrong := [i for i in (int(ids.min()), int(ids.max())) if not 0 <= i < vocab]:
        what = f"calibration has the id {wrong[0]}, but the model's ids are 0 to {vocab - 1}"
        raise InvalidValueError(f"{what}: use the model's own tokenizer")
    mask = inputs.get("attention_mask")
    with watched(model, decoder_layers(model)) as seen:
        model(**inputs, use_cache=False)
    means = []
    for ((_, change),) in seen:
        weight = torch.ones_like(change) if mask is None else mask.to(change)
        means.append(float((change * weight).sum() / weight.sum().clamp(min=1)))
    return means


def least_changing(changes: list[float]) -> list[int]:
    """The half of the layers that changes its tokens least, in order."""
    order = sorted(range(len(changes)), key=lambda i: changes[i])
    return sorted(order[: len(changes) // 2])


@contextmanager
def watched(model: Any, layers: Sequence[nn.Module]) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """Evaluation mode, in which each layer's inputs x (B, T, D) are kept, with |f(x) - x| / |x| of every token."""

    def measure(args: Any, kwargs: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        x = (args[0] if args else kwargs["hidden_states"]).to(y.device)  # a hook of accelerate moves x after this one
        return x, (y.float() - x.float()).norm(dim=-1) / x.float().norm(dim=-1).clamp(min=1e-12)

    training = model.training
    try:
        with torch.no_grad(), collected(layers, measure) as seen:
            model.eval()
            yield seen
    finally:
        model.train(training)


def convert_folder(config: ConvertConfig) -> tuple[Any, list[float] | None, float]:
    """Convert the model of a folder or a GGUF file, check it against the dense one, and save it. Returns its config,
    what layer_changes measured for layers='auto', and what check_same measured at capacity 1."""
    source, out = Path(config.model), Path(config.out)
    check_new(out, source)
    if gguf_of(source) is None:
        check_config_values(check_config(source), str(source))
    check_generation(source)
    model = load(source)
    family_of(model)
    changes, layers = None, config.layer_choice
    tokenizer = find_tokenizer(source)
    if layers == "auto":
        changes = layer_changes(model, _calibration(tokenizer, Path(config.text or ""), model))
        layers = least_changing(changes)
    probe, last = probe_for(config, model.config)
    with torch.no_grad():
        dense = model(probe, use_cache=False, logits_to_keep=last).logits
    if not dense.isfinite().all():
        raise DepthgateError(f"{source} gives logits that are not finite: its weights are damaged")
    convert(model, 1.0, layers, gate=config.gate or "one_plus_tanh", rule=config.rule or "predictor")
    difference = check_same(model, probe, (dense, dense))
    set_capacity(model, config.capacity or 0.5)
    save(model, partial(copy_tokenizer, tokenizer, source), out)
    return model.config, changes, difference


def check_new(out: Path, source: Path) -> None:
    """Refuse an output folder that exists, lies within the source, or cannot be written."""
    if out.exists() or out.is_symlink():
        raise InvalidValueError(f"{out} is there already: give --out a folder that is not")
    if source.is_dir() and source.resolve() in out.resolve().parents:
        raise InvalidValueError(f"{out} is within {source}, which stays as it is: give --out another folder")
    there = next(parent for parent in out.absolute().parents if os.path.exists(parent))
    with _writing(out):
        tempfile.TemporaryDirectory(prefix=".depthgate.", dir=there).cleanup()


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"cannot write {out} ({error.strerror or error})"
        raise DepthgateError(f"{why}: give --out a folder where there is room, and which is yours") from error


def probe_for(config: ConvertConfig, model: Any) -> tuple[Tensor, int]:
    """Random sequences for a model of this config, and the number of their last tokens that are compared. Before these
    come as many as a window holds, where there is one: only then a lost window shows."""
    room, window = model.max_position_embeddings, getattr(model, "sliding_window", None)
    last = min(config.probe, room)
    before = window if isinstance(window, int) and 0 < window <= _WINDOW else 0
    chance = torch.Generator().manual_seed(config.seed)
    return torch.randint(model.vocab_size, (2, min(before + last, room)), generator=chance), last


def _calibration(tokenizer: Any, text: Path, model: Any) -> Tensor:
    """Token ids (B, T) from the beginning of a text."""
    rows, length = _CALIBRATION
    if not text.is_file():
        raise DepthgateError(f"{text} is not a file: give --text a file of text")
    if tokenizer is None:
        raise DepthgateError("the model has no tokenizer, which --layers auto needs: add its files, or name the layers")
    with text.open(encoding="utf-8", errors="replace") as file:
        ids = tokenizer(file.read(32 * rows * length), add_special_tokens=False)["input_ids"]
    length = min(length, model.config.max_position_embeddings, len(ids))
    if length < 2:
        raise DepthgateError(f"the model's tokenizer makes nothing of {text}: look at both, or name the layers")
    rows = min(rows, len(ids) // length)
    return torch.tensor(ids[: rows * length]).view(rows, length)


@torch.no_grad()
def check_same(model: Any, probe: Tensor, wanted: Sequence[Tensor]) -> float:
    """The largest difference of a model's last logits, by the causal choice and by the top k, from those wanted, as a
    share of the largest. More than rounding is refused."""
    routes = routed_layers(model) or model.config.model_type == OURS
    ways = [{"causal_routing": causal} if routes else {} for causal in (True, False)]
    want = torch.stack([*wanted]).double()
    found = torch.stack([model(probe, use_cache=False, logits_to_keep=want.shape[2], **how).logits for how in ways])
    difference = float((found - want).abs().max() / want.abs().max().clamp(min=1e-12))
    if not difference <= TOLERANCE[model.dtype]:
        what = f"the logits differ from those of the source by {difference:.1e} of the largest"
        raise DepthgateError(f"{what}: nothing is written; please report this, with the model's config.json")
    return difference


@torch.no_grad()
def save(model: Any, write_tokenizer: Callable[[Path], None], out: Path, last: str | None = None) -> None:
    """Write the folder of a model on the CPU under another name, check that it loads as the same model, and only then
    rename it (see new_folder)."""
    with _writing(out), new_folder(out, last) as part:
        model.save_pretrained(part)
        write_tokenizer(part)
        loaded = load(part)
        mine, its = model.state_dict(), loaded.state_dict()
        same = mine.keys() == its.keys() and all(torch.equal(its[name], weight) for name, weight in mine.items())
        # What is not among the weights, such as the kind of positions, shows in the logits.
        ids = torch.arange(min(_SAVED_PROBE, model.config.max_position_embeddings))[None] % model.config.vocab_size
        with torch.compiler.set_stance("force_eager"):
            pair = loaded(ids, use_cache=False).logits, model(ids, use_cache=False).logits
        apart = TOLERANCE[model.dtype]
        same = same and torch.allclose(*pair, rtol=apart, atol=apart, equal_nan=True)
        routing = [getattr(each.config, "depthgate", None) for each in (loaded, model)]
        if not same or routing[0] != routing[1]:
            raise DepthgateError(f"what was saved is not what was in memory: {out} is not written")
