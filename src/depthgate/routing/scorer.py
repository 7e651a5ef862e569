"""What routers score tokens with: fp32 whatever surrounds it, autocast included."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Scorer(nn.Module):
    """Scores W x + b, in fp32 (or in float64 for float64 tokens), inside autocast too."""

    def __init__(self, dim: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, dim))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = features(x, valid)
            weight = self.weight.to(x.dtype)
            if len(weight) == 1 and torch.compiler.is_compiling():
                # The compiler fuses this with the cast to fp32; for a product it would write all tokens in fp32 first.
                scores = (x * weight[0]).sum(-1, keepdim=True)
            else:
                scores = F.linear(x, weight)
            return scores if self.bias is None else scores + self.bias.to(x.dtype)


def features(x: Tensor, valid: Tensor | None) -> Tensor:
    """What routers look at: tokens in fp32 or better, padding as zeros, whatever lies in it."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if valid is None else torch.where(valid[..., None], x, 0.0)
