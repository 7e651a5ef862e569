"""Calibration by how much layers change their tokens: which layers to route, and routers that begin with a guess.

A router of zeros ranks all tokens alike, and the top k are then the first of each document. A calibrated one begins
with a guess: the tokens that its layer changes most, as far as a linear function of the token tells it.

Routers look at tokens as they are. In a pretrained model some channels are a thousand times larger than others, and
one step of AdamW would turn a router over; a scaled one learns as if every channel had the size 1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.data.batches import Rows
from depthgate.errors import InvalidValueError
from depthgate.flops import budget
from depthgate.hf.families import decoder_layers, family_of
from depthgate.hf.layer import RoutedLayer
from depthgate.routing.causal import Predictor, Threshold
from depthgate.routing.routers import TopTokens

_RIDGE = 1e-2  # of the mean square of a channel
_SPREAD = {"straight_through": 1.0}  # of the scores; where they change the gate, it is to stay near 1
_SMALL = 0.05
_FIRST = 3.0  # how far above the others a document's first token is put, in standard deviations
_MATTERS = 10.0  # how much more than another it weighs in the fit


def layer_changes(model: Any, batch: Any) -> list[float]:
    """The mean over tokens of |f(x) - x| / |x| for each layer of a dense model, on a batch: token ids (B, T), or a dict
    of the model's inputs. The model is left as it was."""
    inputs = _inputs(batch, model.get_input_embeddings().num_embeddings)
    mask = inputs.get("attention_mask")
    means: list[Tensor] = []

    def see(_: int, x: Tensor, y: Tensor) -> None:
        change = _change(x.to(y.device), y)  # a hook of accelerate moves x after this one
        weight = torch.ones_like(change) if mask is None else mask.to(change)
        means.append((change * weight).sum() / weight.sum().clamp(min=1))

    family_of(model)  # refuses others
    with torch.no_grad(), _watched(model, decoder_layers(model), see):
        model(**inputs, use_cache=False)
    return [float(mean) for mean in means]


def least_changing(changes: list[float]) -> list[int]:
    """The half of the layers that changes its tokens least, in order."""
    order = sorted(range(len(changes)), key=lambda i: changes[i])
    return sorted(order[: len(changes) // 2])


def _inputs(batch: Any, vocab: int) -> dict[str, Any]:
    inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.numel() == 0:
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise InvalidValueError(f"calibration is {got}: layers='auto' needs token ids of shape (batch, tokens)")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise InvalidValueError(
            f"calibration has the id {low if low < 0 else high}, but the model's ids are 0 to {vocab - 1}: use the "
            "model's own tokenizer"
        )
    return inputs


def _change(x: Tensor, y: Tensor) -> Tensor:
    """|y - x| / |x| of each token."""
    x, y = x.float(), y.float()
    change: Tensor = (y - x).norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-12)
    return change


@contextmanager
def _watched(
    model: nn.Module, layers: Sequence[nn.Module], see: Callable[[int, Tensor, Tensor], None]
) -> Iterator[None]:
    """Evaluation mode, in which `see` is given the number, the input and the output of each layer that runs."""

    def hook(i: int) -> Any:
        return lambda _, args, kwargs, y: see(i, args[0] if args else kwargs["hidden_states"], y)

    hooks = [layer.register_forward_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers)]
    training = model.training
    try:
        model.eval()
        yield
    finally:
        model.train(training)
        for handle in hooks:
            handle.remove()


@cache
def _scaled_class(base: Any) -> Any:
    """A class whose weight is what it learns times the scale of each channel. One class for all modules of a kind, so
    that code compiled for one of them serves all (parametrizations of torch make a class for each)."""
    return type(f"Scaled{base.__name__}", (base,), {"weight": property(lambda self: self.learnt * self.scale)})


def _is_scaled(part: Any) -> bool:
    return "learnt" in part._parameters


def _readers(router: TopTokens) -> list[Any]:
    """The parts of a router that look at tokens."""
    return [router.proj, router.rule.up] if isinstance(router.rule, Predictor) else [router.proj]


def scale_routers(layers: Sequence[RoutedLayer]) -> None:
    """Let routers learn with a scale for each channel, which `calibrate` sets."""
    for part in (part for layer in layers for part in _readers(layer.depth_router)):
        part.learnt = part._parameters.pop("weight")
        part.register_buffer("scale", torch.ones(part.learnt.shape[-1], device=part.learnt.device))
        kind: Any = type(part)
        part.__class__ = _scaled_class(kind)


def unscale_routers(layers: Sequence[RoutedLayer]) -> None:
    """Turn scaled weights into plain ones of the same value."""
    for part in (part for layer in layers for part in _readers(layer.depth_router) if _is_scaled(part)):
        part.learnt.data = part.weight.detach()
        part.__class__ = type(part).__bases__[0]
        part.weight = part._parameters.pop("learnt")
        del part.scale


def _write(part: Any, weight: Tensor) -> None:
    """Give a part this weight."""
    if _is_scaled(part):
        part.learnt.copy_(weight / part.scale)
    else:
        part.weight.copy_(weight)


def _set_scale(router: TopTokens, scale: Tensor) -> None:
    """Set the scale. Weights keep their value, except for those of an untrained predictor, which take the scale on."""
    for part in filter(_is_scaled, _readers(router)):
        weight = part.weight
        new = isinstance(router.rule, Predictor) and part is router.rule.up and not router.rule.down.weight.any()
        part.scale.copy_(scale)
        _write(part, weight * scale if new else weight)


def are_neutral(layers: Sequence[RoutedLayer]) -> bool:
    """True if the scores of all routers are still zero."""
    return not any(bool(layer.depth_router.proj.weight.any()) for layer in layers)


@torch.no_grad()
def calibrate(language: Any, rows: Rows, capacity: float) -> None:
    """Set the scales of the routers of an HFLanguageModel, and routers that are neutral, from what their layers, all
    dense, do to the tokens of some rows.

    A layer's score is the logarithm of how much it changes a token, |f(x) - x| / |x|, as well as a linear function
    of the token tells it. The first token of a document is changed little, but all others look at it: it is put first.
    """
    layers: list[RoutedLayer] = language.routed
    neutral, before = are_neutral(layers), [layer.depth_router.capacity for layer in layers]
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]

    def see(i: int, x: Tensor, y: Tensor) -> None:
        kept[i].append((x.float().flatten(0, 1), _change(x, y).clamp(min=1e-6).log().flatten()))

    try:
        for layer in layers:
            layer.depth_router.capacity = 1.0
        with _watched(language.model, layers, see):
            for tokens, pos in zip(rows.tokens, rows.pos, strict=True):
                language.hidden(tokens[None].to(language.device), pos[None].to(language.device), causal=False)
    finally:
        for layer, share in zip(layers, before, strict=True):
            layer.depth_router.capacity = share
    first = (rows.pos == 0).flatten().to(language.device)
    spread = _SPREAD.get(language.model.config.depthgate["gate"], _SMALL)
    for layer, parts in zip(layers, kept, strict=True):
        x, change = (torch.cat(part) for part in zip(*parts, strict=True))
        _set_scale(layer.depth_router, 1 / x.square().mean(0).sqrt().clamp(min=1e-6))
        if neutral:
            _fit(layer.depth_router, x, change, first, capacity, spread)
        parts.clear()


def _fit(router: TopTokens, x: Tensor, change: Tensor, first: Tensor, capacity: float, spread: float) -> None:
    """Set a router by ridge regression, so that a share of `capacity` of the tokens has scores of at least 0."""
    wanted = (change - change[~first].mean()) / change[~first].std().clamp(min=1e-12)
    wanted = torch.where(first, _FIRST, wanted)
    size = x.square().mean(0).sqrt().clamp(min=1e-6)
    features = torch.cat([x / size, torch.ones_like(x[:, :1])], 1).double()
    weighted = features * torch.where(first, _MATTERS, 1.0)[:, None] / len(x)
    square = weighted.mT @ features
    square.diagonal().add_(_RIDGE)
    fit = torch.linalg.solve(square, weighted.mT @ wanted.double())
    fit[:-1] /= size
    scores = x @ fit[:-1].float()
    middle = scores.sort(descending=True).values[budget(capacity, len(scores)) - 1]
    times = spread / scores[~first].std().clamp(min=1e-12)
    _write(router.proj, (fit[:-1].float() * times)[None])
    assert router.proj.bias is not None
    router.proj.bias.fill_(float(-middle * times))
    if isinstance(router.rule, Threshold):
        router.rule.average.zero_()
        router.rule.weight.fill_(1.0)
