"""`dg.hf.convert` routes layers of a transformers model in place, so that at first nothing changes; `convert_folder`
does that from a folder to another, compares the model with the dense one, and sees that it loads again."""

import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import depthgate.hf.families as families
from depthgate.config import ConvertConfig, check_neutral
from depthgate.data.sources import documents
from depthgate.errors import DepthgateError, InvalidValueError, check_capacity, check_choice
from depthgate.files import leftovers, new_folder
from depthgate.hf.adapter import collected
from depthgate.hf.card import write_card
from depthgate.hf.classes import RoutedModel, config_class, install, model_class, register_models, uninstall
from depthgate.hf.families import Routing
from depthgate.hf.folder import check_config, check_generation, copy_tokenizer, fetched, find_tokenizer, gguf_of, load
from depthgate.hf.inputs import MODES, valid_tokens
from depthgate.hf.layer import DepthRouter, routed_layers

# How far logits may be apart, as a share of the largest: two right answers that were rounded in another order.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SAVED_PROBE = 64  # tokens that a saved model is read with
_CALIBRATION = (8, 256)  # sequences, and tokens of each
_WINDOW = 1024  # the longest window of attention that is looked beyond without being asked to


def convert(
    model: Any,
    capacity: float | Sequence[float] = 0.5,
    layers: str | Sequence[int] = "every_other",
    *,
    gate: str = "one_plus_tanh",
    rule: str = "predictor",
    rule_loss: float = 0.01,
    decay: float = 0.9,
    routing_mode: str = "auto",
    capacity_by: str = "layer",
    calibration: Any = None,
) -> Any:
    """Route `layers` of a transformers model, in place; the model is also returned.

    Routers start at zero. The gates one_plus_tanh and straight_through are then exactly 1 (others are refused), and
    every causal rule routes all tokens: in evaluation, and in training at capacity 1, nothing changes at first. Give
    the whole model: one around a decoder that was converted by itself (`model.model`) is saved without the routing.

    capacity: share of the tokens that a routed layer takes, or a share for each of `layers`, in the order given there.
    layers: 'every_other' (1, 3, ...), numbers of layers, or 'auto': the half that changes its tokens least on
    `calibration`, token ids (B, T) or a dict of the model's inputs. rule_loss: weight of the loss that teaches the
    rule; a threshold needs none, and keeps a share `decay` of itself in every step. routing_mode: 'auto' (top k while
    training, causal in evaluation), 'causal' or 'top_k'; `model.routing_mode = ...` changes it. capacity_by: 'layer',
    or 'change': layers get more or less than `capacity`, their mean, as they change the tokens of `calibration`.
    """
    known = str(getattr(getattr(model, "config", None), "model_type", ""))
    if known.startswith(families.PREFIX) and not routed_layers(model):
        to_dense(model)  # of the family's own class, from the folder of a routed one
    kind = families.family_of(model)
    depth = len(families.decoder_layers(model))
    check_neutral(gate)
    check_choice(routing_mode, "routing_mode", MODES)
    check_choice(capacity_by, "capacity_by", ("layer", "change"))
    families.check_capacities(capacity)
    Routing((0,), 1.0, gate, rule, rule_loss, decay)  # refuse wrong values before anything is measured
    if capacity_by == "change" and isinstance(capacity, Sequence):
        what = "capacity_by is 'change', which gives each layer its share of one capacity"
        raise InvalidValueError(f"{what}: give one, or leave capacity_by out")
    measured = (isinstance(layers, str) and layers == "auto") or capacity_by == "change"
    if measured != (calibration is not None):
        what = "layers='auto' (or capacity_by='change') and calibration go together"
        raise InvalidValueError(f"{what}: give both, or neither")
    changes = layer_changes(model, calibration) if measured else []
    by_name = {"every_other": range(1, depth, 2), "auto": least_changing(changes)}
    named: Any = by_name.get(layers, layers) if isinstance(layers, str) else layers
    if isinstance(layers, str) and layers in by_name and not named:
        raise InvalidValueError(f"layers is {layers!r}, and the model has one layer: give layers=[0] to route it")
    named = named.tolist() if isinstance(named, Tensor | np.ndarray) else named
    chosen = families.checked_layers(named, depth)
    capacity = families.in_order(named, capacity)
    if capacity_by == "change":
        capacity = shared_out(capacity, [changes[i] for i in chosen])
    shares = tuple(map(float, capacity)) if isinstance(capacity, Sequence) else float(capacity)
    routing = Routing(chosen, shares, gate, rule, float(rule_loss), float(decay))
    config = _with_config(model, config_class(kind))
    config.depthgate, config.routing_mode = routing.written(), routing_mode
    head = {base: auto for auto, base in families.heads(kind).items()}[type(model).__name__]
    model.__class__ = model_class(kind, head)
    register_models(kind)
    install(model)
    return model


def _with_config(model: Any, made: Any) -> Any:
    """Give a model a copy of its config, of another class: other models may hold the same config."""
    before, config = model.config, copy.deepcopy(model.config)
    config.__class__ = made
    for name in ("auto_map", "model_type", "depthgate", "routing_mode"):  # of another model
        vars(config).pop(name, None)
    # PEFT and TRL would take the model of its old path for its base or reference.
    model.name_or_path = config._name_or_path = "a model changed in memory: save it, and load it from its folder"
    for part in model.modules():
        if getattr(part, "config", None) is before:
            part.config = config
    return config


def to_dense(model: Any) -> Any:
    """Take the routers out of a converted model, in place: it is a model of its family again, in which all tokens go
    through all layers, with the weights that it has now. The model is also returned."""
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    if not kind.startswith(families.PREFIX) or hasattr(model, "merge_and_unload"):
        hint = (
            "merge_and_unload() comes first" if hasattr(model, "merge_and_unload") else "there is nothing to take out"
        )
        raise InvalidValueError(f"model is a {type(model).__name__}, not a converted model: {hint}")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    uninstall(model)
    _with_config(model, CONFIG_MAPPING[kind.removeprefix(families.PREFIX)])
    return model


def shared_out(capacity: Any, changes: Sequence[float]) -> tuple[float, ...]:
    """A capacity for each layer in proportion to how much it changes its tokens, within half and twice their mean,
    which is `capacity`."""
    mean, least = check_capacity(capacity), max(1e-6 * max(changes), 1e-30)  # of layers that change next to nothing
    low, high, times = mean / 2, min(1.0, 2 * mean), [0.0, 2 * mean / least]
    for _ in range(80):  # bisection
        middle = sum(times) / 2
        shares = [min(high, max(low, middle * max(each, least))) for each in changes]
        times[sum(shares) > mean * len(changes)] = middle
    return tuple(round(share, 4) for share in shares)


def set_capacity(model: Any, capacity: float | Sequence[float]) -> None:
    """Change the capacity of all routed layers of a model, or of each, and of what is saved."""
    routed = [part for part in model.modules() if isinstance(part, RoutedModel) and "routing" in vars(part)]
    layers = routed_layers(model)
    if not layers:
        raise InvalidValueError("the model has no routed layers: convert it with dg.hf.convert")
    routing = replace(routed[0].routing, capacity=tuple(capacity) if isinstance(capacity, list) else capacity)
    if len({*routing.capacities}) == 1:
        routing = replace(routing, capacity=routing.capacities[0])
    for layer, share in zip(layers, routing.capacities, strict=True):
        for part in layer.modules():
            if isinstance(part, DepthRouter):  # copies that PEFT keeps among them
                part.capacity = share
    for part in routed:
        part.routing = routing
        part.config.depthgate = {**part.config.depthgate, "capacity": routing.written()["capacity"]}


def layer_changes(model: Any, batch: Any) -> list[float]:
    """The mean over tokens of |f(x) - x| / |x| for each layer of a dense model, on a batch: token ids (B, T), or a dict
    of the model's inputs. The model is left as it was."""
    families.family_of(model)  # refuses others
    inputs, mask = calibration_inputs(model, batch)
    with watched(model, families.decoder_layers(model)) as seen:
        model.base_model(**{**inputs, "use_cache": False})  # a head may need more, such as a padding token
    return [float(change[mask.to(change.device)].mean()) for ((_, change),) in seen]


def calibration_inputs(model: Any, batch: Any) -> tuple[dict[str, Any], Tensor]:
    """A batch as the inputs of a model, and where it has tokens (B, T); refused if it does not hold token ids (B, T) of
    the model's vocabulary."""
    inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    ids, vocab = inputs.get("input_ids"), model.get_input_embeddings().num_embeddings
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.numel() == 0:
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise InvalidValueError(f"calibration is {got}: it needs token ids of shape (batch, tokens)")
    if wrong := [i for i in (int(ids.min()), int(ids.max())) if not 0 <= i < vocab]:
        what = f"calibration has the id {wrong[0]}, but the model's ids are 0 to {vocab - 1}"
        raise InvalidValueError(f"{what}: use the model's own tokenizer")
    mask = valid_tokens(inputs.get("attention_mask", torch.ones_like(ids)), ids.shape)
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    if int((mask.cumsum(1) > 1).sum()) < 2:
        raise InvalidValueError("calibration has texts of one token: give longer ones, a few hundred tokens in all")
    return inputs, mask


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
    out = Path(config.out)
    check_new(out, Path(config.model))
    source = fetched(config.model)
    if gguf_of(source) is None:
        families.check_config_values(check_config(source), str(source))
    check_generation(source)
    model = load(source)
    families.family_of(model)
    tokenizer, layers = find_tokenizer(source), config.layer_choice
    batch = None if config.text is None else _calibration(tokenizer, config.text, model)
    changes = None if batch is None else layer_changes(model, batch)
    how: dict[str, Any] = {"capacity_by": config.capacity_by, "routing_mode": config.routing_mode}
    how |= {"gate": config.gate or "one_plus_tanh", "rule": config.rule or "predictor"}
    how["calibration"] = batch if config.capacity_by == "change" else None
    if layers == "auto":
        layers = least_changing(changes or [])
    probe, last = probe_for(config, model.config)
    with torch.no_grad():
        dense = model(probe, use_cache=False, logits_to_keep=last).logits
    if not dense.isfinite().all():
        raise DepthgateError(f"{source} gives logits that are not finite: its weights are damaged")
    shares = config.capacities
    asked = convert(model, shares[0] if len(shares) == 1 else shares, layers, **how).routing.capacity
    set_capacity(model, 1.0)
    difference = check_same(model, probe, (dense, dense))
    set_capacity(model, asked)

    def write(folder: Path) -> None:
        copy_tokenizer(tokenizer, source, folder)
        write_card(folder, out.name, model, "convert", config, {"largest_difference_at_capacity_1": difference})

    save(model, write, out)
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


def _calibration(tokenizer: Any, text: str, model: Any) -> Tensor:
    """Token ids (B, T) from the beginning of a text."""
    rows, length = _CALIBRATION
    begin = ""
    for document in documents(text):
        begin += document
        if len(begin) >= 32 * rows * length:
            break
    if tokenizer is None:
        raise DepthgateError("the model has no tokenizer, which --layers auto needs: add its files, or name the layers")
    ids = tokenizer(begin[: 32 * rows * length], add_special_tokens=False)["input_ids"]
    length = min(length, model.config.max_position_embeddings, len(ids))
    if length < 2:
        what = f"the model's tokenizer makes {len(ids)} tokens of {text}, and two at least are needed"
        raise DepthgateError(f"{what}: give a longer text, or name the layers")
    rows = min(rows, len(ids) // length)
    return torch.tensor(ids[: rows * length]).view(rows, length)


@torch.no_grad()
def check_same(model: Any, probe: Tensor, wanted: Sequence[Tensor]) -> float:
    """The largest difference of a model's last logits, by the causal choice and by the top k, from those wanted, as a
    share of the largest. More than rounding is refused."""
    routes = routed_layers(model) or model.config.model_type == families.OURS
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
    for left in leftovers(out):
        shutil.rmtree(left, ignore_errors=True)
