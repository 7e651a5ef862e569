"""Gates: what a routed row is multiplied by, as a function of its router score."""

from collections.abc import Callable

import torch
from torch import Tensor

from depthgate.errors import check_choice

Gate = Callable[[Tensor], Tensor]


def one_plus_tanh(scores: Tensor) -> Tensor:
    """1 + tanh(r): one at a zero score, so that an untrained router changes nothing; in (0, 2)."""
    return 1 + torch.tanh(scores)


def sigmoid(scores: Tensor) -> Tensor:
    """sigmoid(r), in (0, 1)."""
    return torch.sigmoid(scores)


def raw(scores: Tensor) -> Tensor:
    """r itself: equation 1 of the Mixture-of-Depths paper."""
    return scores


def straight_through(scores: Tensor) -> Tensor:
    """Exactly one, with the gradient of a sigmoid."""
    soft = torch.sigmoid(scores)
    return 1 + (soft - soft.detach())


GATES: dict[str, Gate] = {gate.__name__: gate for gate in (one_plus_tanh, sigmoid, raw, straight_through)}


def gate_from(gate: str | Gate) -> Gate:
    """A gate by name, or any function of scores as it is."""
    return gate if callable(gate) else GATES[check_choice(gate, "gate", GATES)]
