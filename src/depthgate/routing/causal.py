"""Causal rules: whether a token is routed, decided from that token alone. Each returns a logit; >= 0 routes.

Scores     the router's own score; `causal_bce` teaches it to be >= 0 for the top k
           (Raposo et al. 2024, section 3.5, first method)
Predictor  a small MLP on the detached token; the same loss teaches it to tell the top k, and nothing flows
           back into the model (same section, second method)
Threshold  the score against a moving average of the k-th best score, moved by `update`
           (Expert-Threshold routing, arXiv 2603.11535): no loss, and the same rule can be used in training
"""

import math
from collections.abc import Callable
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthgate.errors import check_choice, check_count, check_number
from depthgate.flops import predictor_hidden
from depthgate.ops.matmul import linear
from depthgate.ops.select import budgets

Mask = Tensor | None  # bool
_NEWEST = 12.0  # the newest of the updates, one in so many, make most of a threshold


class Rule(Protocol):
    """x (B, T, D) and scores (B, T, E), both fp32 -> decision logits (B, T, E)."""

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor: ...


class Scores(nn.Module):
    """The router's own score decides."""

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        return scores


class _Linear(nn.Linear):
    """Computes in the dtype of its input, whatever its weights are stored in. A module that is called, since hooks may
    have to fetch the weights (accelerate's offloading)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.out_features == 1 and torch.compiler.is_compiling():  # fused with what made x, where a product is not
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            return (wide * self.weight[0]).sum(-1, keepdim=True) + self.bias
        return linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Predictor(nn.Module):
    """A small MLP on the detached token decides; it sees every token, so it must cost next to nothing."""

    def __init__(self, dim: int, experts: int = 1) -> None:
        super().__init__()
        hidden = predictor_hidden(check_count(dim, "dim"))
        self.up = _Linear(dim, hidden)
        self.down = _Linear(hidden, check_count(experts, "experts"))

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        decision: Tensor = self.down(F.silu(self.up(x.detach())))
        return decision.to(scores.dtype)


class Threshold(nn.Module):
    """A moving average of each expert's k-th best score decides. Before the first update everything is routed.

    A share `decay` of the average is kept in an update; less in the first ones, where scores move fast: about the
    newest twelfth of them counts. The average belongs to the state dict; `update` moves it, a call of the rule never.
    """

    average: Tensor
    weight: Tensor

    def __init__(self, experts: int = 1, decay: float = 0.99) -> None:
        super().__init__()
        self.decay = check_number(decay, "decay", "[0, 1)")
        self.register_buffer("average", torch.zeros(check_count(experts, "experts")))
        self.register_buffer("weight", torch.zeros(()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """A model that is cast to half precision leaves the average in float32, where small steps still move it."""

        def kept(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return new if new.dtype.itemsize >= 4 else tensor.to(new.device)

        return super()._apply(kept, recurse)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def threshold(self) -> Tensor:
        """(E,) the average, below which a score is not routed; -inf before the first update."""
        return (self.average / self.weight).nan_to_num(-torch.inf, torch.inf, -torch.inf)  # 0 / 0 before it

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        return scores.detach() - self.threshold.to(scores.dtype)

    @torch.no_grad()
    def update(
        self, scores: Tensor, valid: Mask, capacity: float | Tensor, unless: Mask = None, keep: Mask = None
    ) -> None:
        """Move towards the k-th best of all valid scores (B, T, E) of the batch, k = `budget(capacity, valid)`; the
        tokens of `keep` (B, T) take their places of the k, whatever their scores, and the rest goes to the others. In
        place of `capacity` may stand how many of the others each expert took (E,). A batch without a valid, finite k-th
        score moves nothing, nor does one with `unless` true. No host sync."""
        if scores.numel() == 0:
            return
        flat = scores.detach().flatten(0, 1)  # (B*T, E)
        flat = torch.where(flat.isnan(), -torch.inf, flat)
        count = torch.full((), flat.shape[0], device=flat.device)
        if valid is not None:
            flat = torch.where(valid.flatten()[:, None], flat, -torch.inf)
            count = valid.sum()
        k = capacity if isinstance(capacity, Tensor) else budgets(capacity, count)
        if keep is not None:
            kept = keep if valid is None else keep & valid
            flat, k = torch.where(kept.flatten()[:, None], -torch.inf, flat), k if k is capacity else k - kept.sum()
        last = (k - 1).clamp(min=0).expand(1, flat.shape[1])
        kth = flat.sort(dim=0, descending=True).values.gather(0, last)[0]  # (E,); an index would be a host sync
        self.move(kth, count > 0 if unless is None else (count > 0) & ~unless)

    @torch.no_grad()
    def move(self, kth: Tensor, usable: Tensor | bool = True) -> None:
        """Move towards the k-th best scores (E,) of a batch, if they are finite and `usable`."""
        usable, kth = kth.isfinite().all() & usable, kth.to(self.average.dtype)
        weight = self.decay * self.weight + (1 - self.decay)  # 1 - decay^n after n updates: it counts them
        before = (1 - self.weight).log() / math.log(max(self.decay, 1e-30))
        share = (_NEWEST / (before + _NEWEST)).clamp(min=1 - self.decay)
        mean = torch.where(self.weight > 0, self.average / self.weight, kth)
        mean = mean + share * (kth - mean)
        # Lower by more than it may be rounded up: where all batches are alike, the k-th token is routed.
        average = weight * (mean - 5e-7 * mean.abs())
        self.average.copy_(torch.where(usable, average, self.average))
        # As one element: torch 2.13 loses what compiled code writes into a float64 tensor of no axis.
        self.weight.view(1).copy_(torch.where(usable, weight, self.weight).view(1))


RULES: dict[str, Callable[[int, int], nn.Module]] = {
    "scores": lambda dim, experts: Scores(),  # noqa: ARG005
    "predictor": Predictor,
    "threshold": lambda dim, experts: Threshold(experts),  # noqa: ARG005
}


def rule_from(rule: str | nn.Module, dim: int, experts: int) -> nn.Module:
    """A causal rule by name, or any module of the same call as it is."""
    return rule if isinstance(rule, nn.Module) else RULES[check_choice(rule, "rule", RULES)](dim, experts)
