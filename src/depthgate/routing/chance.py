"""Routing by chance: the control that a learnt router is to be compared with (Raposo et al. 2024, section 4.1)."""

import torch
from torch import Tensor

from depthgate.ops.positions import plain_positions
from depthgate.routing.routers import TopTokens


class RandomTokens(TopTokens):
    """Takes tokens by chance: what a router that learns is to be compared with. Gates are 1, nothing is trained.

    While the model trains, scores are drawn anew; otherwise a token's score is that of its position, so that the same
    tokens are taken again, with a cache and without.
    """

    salt: Tensor

    def __init__(self, dim: int, capacity: float) -> None:
        super().__init__(dim, capacity, gate=torch.ones_like, rule="scores")
        del self.proj
        self.register_buffer("salt", torch.randint(2**31, ()))  # layers differ

    def _logits(self, tokens: Tensor, pos: Tensor | None) -> Tensor:
        """Uniform, and at least 0 for a share of `capacity`."""
        shape = tokens.shape[:2]
        if self.training:
            uniform = torch.rand(shape, device=tokens.device, dtype=tokens.dtype)
        else:
            pos = plain_positions(tokens) if pos is None else pos
            uniform = _hashed(pos + self.salt).to(tokens.dtype) / 2**31
        return (uniform - (1 - self.capacity))[..., None]

    def _routed_scores(self, x: Tensor, index: Tensor, filled: Tensor | None, place: Tensor | None) -> Tensor:  # noqa: ARG002
        return torch.zeros(index.shape, device=x.device)  # gates do not look at them


def _hashed(number: Tensor) -> Tensor:
    """31 well-mixed bits of each number (the finalizer of MurmurHash3, modulo 2^31)."""
    h = number & 0x7FFFFFFF
    for factor, shift in ((0x45D9F3B, 16), (0x45D9F3B, 15)):
        h = ((h ^ (h >> shift)) * factor) & 0x7FFFFFFF
    return h ^ (h >> 16)
