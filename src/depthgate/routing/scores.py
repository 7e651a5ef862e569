"""Scores of tokens, and gates: what a routed row is multiplied by, as a function of its score.

    scorer(tokens (B, T, D), pos (B, T) or None, capacity) -> scores (B, T, E)

Scores are fp32 (float64 for float64 tokens) whatever surrounds them, autocast included.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.errors import InvalidValueError, check_choice
from depthgate.ops.matmul import linear
from depthgate.ops.rows import plain_positions

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


def gate_name(gate: Gate) -> str | None:
    """The name of a gate; None of a function of the user's own."""
    return next((name for name, known in GATES.items() if known is gate), None)


class Scorer(nn.Module):
    """Learnt scores W x + b. They depend on neither position nor capacity."""

    def __init__(self, dim: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, dim))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, tokens: Tensor, pos: Tensor | None = None, capacity: float = 1.0) -> Tensor:  # noqa: ARG002
        with torch.autocast(tokens.device.type, enabled=False):
            x = features(tokens, None)
            weight = self.weight.to(x.dtype)
            if len(weight) == 1 and torch.compiler.is_compiling():
                # The compiler fuses this with the cast to fp32; for a product it would write all tokens in fp32 first.
                scores = (x * weight[0]).sum(-1, keepdim=True)
                return scores if self.bias is None else scores + self.bias.to(x.dtype)
            return linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))

    def extra_repr(self) -> str:
        return f"dim={self.weight.shape[1]}, outputs={len(self.weight)}, bias={self.bias is not None}"


class RandomScorer(nn.Module):
    """Scores by chance: the control that a learnt router is compared with (Raposo et al. 2024, section 4.1). Uniform,
    and at least 0 for a share `capacity` of the tokens. While the model trains, scores are drawn in every pass;
    otherwise a token's score is that of its position, so that the same are taken with a cache and without."""

    salt: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("salt", torch.randint(2**31, ()))  # layers differ

    def forward(self, tokens: Tensor, pos: Tensor | None = None, capacity: float = 1.0) -> Tensor:
        if self.training:
            uniform = torch.rand(tokens.shape[:2], device=tokens.device, dtype=tokens.dtype)
        else:
            pos = plain_positions(tokens) if pos is None else pos
            uniform = _hashed(pos + self.salt).to(tokens.dtype) / 2**31
        return (uniform - (1 - capacity))[..., None]


def _hashed(number: Tensor) -> Tensor:
    """31 well-mixed bits of each number (the finalizer of MurmurHash3, modulo 2^31)."""
    h = number & 0x7FFFFFFF
    for factor, shift in ((0x45D9F3B, 16), (0x45D9F3B, 15)):
        h = ((h ^ (h >> shift)) * factor) & 0x7FFFFFFF
    return h ^ (h >> 16)


def features(x: Tensor, valid: Tensor | None) -> Tensor:
    """Tokens in fp32 or better, with zeros at padding, whatever lies in it: the input of every scorer."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if valid is None else torch.where(valid[..., None], x, 0.0)


def checked(result: Any, shape: tuple[int, ...], name: str) -> Tensor:
    """Return the result of a user's own scorer, gate or rule, if it is one number for each score."""
    if not isinstance(result, Tensor) or result.shape != shape or not result.is_floating_point():
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise InvalidValueError(f"{name} returned {got}: it must return a floating tensor of shape {tuple(shape)}")
    return result
