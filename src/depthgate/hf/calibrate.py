"""Routers that start with something to say: which tokens a layer changes most, read off the token by a linear fit.

A router of zeros ranks all tokens alike, and the top k are then the first of each document. One that was calibrated
begins with a guess, and its rule with the right share of tokens.
"""

from typing import Any

import torch
from torch import Tensor

from depthgate.hf.language import Language
from depthgate.ops.sizes import budget
from depthgate.routing.routers import TopTokens
from depthgate.routing.rules import Threshold
from depthgate.train.batches import Rows

_RIDGE = 1e-2  # of the mean square of a feature of a usual token
_SPREAD = {"straight_through": 1.0}  # of the scores; where they change the gate, it is to stay near 1
_SMALL = 0.05
_FIRST = 3.0  # how far above the others a document's first token is put, in standard deviations
_MATTERS = 10.0  # how much more than another it weighs in the fit


def is_neutral(language: Language) -> bool:
    """Whether no router has anything to say yet."""
    return not any(bool(layer.depth_router.proj.weight.any()) for layer in language.routed)


@torch.no_grad()
def calibrate(language: Language, rows: Rows, capacity: float) -> None:
    """Set neutral routers from what their layers, all of them dense, do to the tokens of some rows.

    A layer's score is the logarithm of how much it changes a token, |f(x) - x| / |x|, as well as a linear function
    of the token tells it. The first token of a document is changed little, but all others look at it: it is put first.
    """
    model, training = language.model, language.model.training
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
        _set(layer.depth_router, x, change, first, capacity, _SPREAD.get(gate, _SMALL))
        parts.clear()


def _set(router: TopTokens, x: Tensor, change: Tensor, first: Tensor, capacity: float, spread: float) -> None:
    wanted = (change - change[~first].mean()) / change[~first].std().clamp(min=1e-12)
    wanted = torch.where(first, _FIRST, wanted)
    usual = x.square().mean(-1).median().sqrt().clamp(min=1e-12)  # some tokens have a hundred times that length
    features = torch.cat([x / usual, torch.ones_like(x[:, :1])], 1).double()
    weighted = features * torch.where(first, _MATTERS, 1.0)[:, None] / len(x)
    square = weighted.mT @ features
    square.diagonal().add_(_RIDGE)
    fit = torch.linalg.solve(square, weighted.mT @ wanted.double())
    fit[:-1] /= usual
    scores = x @ fit[:-1].float()
    middle = scores.sort(descending=True).values[budget(capacity, len(scores)) - 1]
    times = spread / scores[~first].std().clamp(min=1e-12)
    router.proj.weight.copy_((fit[:-1].float() * times)[None])
    assert router.proj.bias is not None
    router.proj.bias.fill_(float(-middle * times))
    if isinstance(router.rule, Threshold):
        router.rule.average.zero_()
        router.rule.weight.fill_(1.0)
