"""Routers that start with something to say, and learn at the same pace whatever the size of what they see.

A router of zeros ranks all tokens alike, and the top k are then the first of each document. One that was calibrated
begins with a guess: which tokens its layer changes most, as far as a linear function of the token tells it.

Routers look at tokens as they are. In a pretrained model some channels are a thousand times larger than others, and
one step of AdamW would turn a router over; a scaled one learns as if every channel had the size 1.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from depthgate.data.batches import Rows
from depthgate.flops import budget
from depthgate.hf.adapter import HFLanguageModel
from depthgate.routing.causal import Predictor, Threshold
from depthgate.routing.routers import TopTokens

_RIDGE = 1e-2  # of the mean square of a channel
_SPREAD = {"straight_through": 1.0}  # of the scores; where they change the gate, it is to stay near 1
_SMALL = 0.05
_FIRST = 3.0  # how far above the others a document's first token is put, in standard deviations
_MATTERS = 10.0  # how much more than another it weighs in the fit


@cache
def _scaled_class(base: Any) -> Any:
    """A class whose weight is what it learns times the scale of each channel. One for all modules of a class, so that
    what is compiled for one of them serves all (parametrizations of torch make a class for each)."""
    return type(f"Scaled{base.__name__}", (base,), {"weight": property(lambda self: self.learnt * self.scale)})


def _is_scaled(part: Any) -> bool:
    return "learnt" in part._parameters


def _readers(router: TopTokens) -> list[Any]:
    """The parts of a router that look at tokens."""
    return [router.proj, router.rule.up] if isinstance(router.rule, Predictor) else [router.proj]


def scaled(language: HFLanguageModel) -> None:
    """Let routers learn with a scale for each channel, which `calibrate` sets."""
    for layer in language.routed:
        for part in _readers(layer.depth_router):
            part.learnt = part._parameters.pop("weight")
            part.register_buffer("scale", torch.ones(part.learnt.shape[-1], device=part.learnt.device))
            kind: Any = type(part)
            part.__class__ = _scaled_class(kind)


def unscaled(language: HFLanguageModel) -> None:
    """Plain weights again, of the same value."""
    for layer in language.routed:
        for part in _readers(layer.depth_router):
            if _is_scaled(part):
                part.learnt.data = part.weight.detach()
                part.__class__ = type(part).__bases__[0]
                part.weight = part._parameters.pop("learnt")
                del part.scale


def _write(part: Any, weight: Tensor) -> None:
    """Have a part's weight be this."""
    if _is_scaled(part):
        part.learnt.copy_(weight / part.scale)
    else:
        part.weight.copy_(weight)


def _set_scale(router: TopTokens, scale: Tensor) -> None:
    """Weights keep their value, except for those of a predictor that has said nothing yet, which take the scale on."""
    for part in filter(_is_scaled, _readers(router)):
        weight = part.weight
        new = isinstance(router.rule, Predictor) and part is router.rule.up and not router.rule.down.weight.any()
        part.scale.copy_(scale)
        _write(part, weight * scale if new else weight)


def is_neutral(language: HFLanguageModel) -> bool:
    """Whether no router has anything to say yet."""
    return not any(bool(layer.depth_router.proj.weight.any()) for layer in language.routed)


@torch.no_grad()
def calibrate(language: HFLanguageModel, rows: Rows, capacity: float) -> None:
    """Set scales, and routers that are neutral, from what their layers, all dense, do to the tokens of some rows.

    A layer's score is the logarithm of how much it changes a token, |f(x) - x| / |x|, as well as a linear function
    of the token tells it. The first token of a document is changed little, but all others look at it: it is put first.
    """
    model, training, neutral = language.model, language.model.training, is_neutral(language)
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in language.routed]

    def noted(i: int) -> Any:
        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            x = (args[0] if args else kwargs["hidden_states"]).float()
            change = (out.float() - x).norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-12)
            kept[i].append((x.flatten(0, 1), change.clamp(min=1e-6).log().flatten()))

        return note

    hooks = [layer.register_forward_hook(noted(i), with_kwargs=True) for i, layer in enumerate(language.routed)]
    before = [layer.depth_router.capacity for layer in language.routed]
    try:
        model.eval()
        for layer in language.routed:
            layer.depth_router.capacity = 1.0
        for tokens, pos in zip(rows.tokens, rows.pos, strict=True):
            language.hidden(tokens[None].to(language.device), pos[None].to(language.device), causal=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
        for layer, share in zip(language.routed, before, strict=True):
            layer.depth_router.capacity = share
    first = (rows.pos == 0).flatten().to(language.device)
    gate = language.model.config.depthgate["gate"]
    for layer, parts in zip(language.routed, kept, strict=True):
        x, change = (torch.cat(part) for part in zip(*parts, strict=True))
        _set_scale(layer.depth_router, 1 / x.square().mean(0).sqrt().clamp(min=1e-6))
        if neutral:
            _set(layer.depth_router, x, change, first, capacity, _SPREAD.get(gate, _SMALL))
        parts.clear()


def _set(router: TopTokens, x: Tensor, change: Tensor, first: Tensor, capacity: float, spread: float) -> None:
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
