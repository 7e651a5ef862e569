"""Scorers: one number a token and expert, in fp32 (float64 for float64 tokens) inside autocast too.

scorer(tokens (B, T, D), pos (B, T) or None, capacity) -> scores (B, T, E)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthgate.ops.tokens import plain_positions


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
            else:
                scores = F.linear(x, weight)
            return scores if self.bias is None else scores + self.bias.to(x.dtype)


class RandomScorer(nn.Module):
    """Scores by chance: the control that a learnt router is compared with (Raposo et al. 2024, section 4.1).

    Uniform, and at least 0 for a share `capacity` of the tokens. While the model trains, scores are drawn in every
    pass; otherwise a token's score is that of its position, so that the same tokens are taken with a cache and without.
    """

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
