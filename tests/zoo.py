"""One of each layer, for tests that hold for all of them."""

import torch
from torch import nn

import depthgate as dg
from depthgate.layers import Attention, Block, MoD, MoE, SoftMoE, SwiGLU
from depthgate.routing import Plan, TopTokens, causal_bce, load_balance, z_loss
from depthgate.routing.plan import Groups, Slots

D = 16


class TwoMoD(nn.Module):
    """Two MoD blocks in a row: the scatter of one feeds the gather of the next (pytorch#171493)."""

    def __init__(self, **kwargs):
        super().__init__()
        self.layers = nn.ModuleList(MoD(_block(), TopTokens(D, 0.5, **kwargs)) for _ in range(2))

    def forward(self, x, causal=False):
        plans = ()
        for layer in self.layers:
            update, more = layer(x, causal=causal)
            x, plans = x + update, plans + more
        return x, plans


class DepthsWithPlans(dg.MixtureOfDepths):
    """MixtureOfDepths that returns its plans too; losses are added by hand."""

    def __init__(self, *args, **options):
        super().__init__(*args, losses=None, **options)

    def forward(self, x, **call):
        y, plans = super().forward(x, return_plans=True, **call)
        return y, tuple(plans)


def _block(ffn=None, dropout=0.0):
    return Block(D, Attention(D, 2), ffn or SwiGLU(D), dropout)


LAYERS = {
    "mod": lambda: TwoMoD(),
    "mod predictor": lambda: TwoMoD(rule="predictor"),
    "mod threshold": lambda: TwoMoD(rule="threshold"),
    "mixture of depths": lambda: DepthsWithPlans(
        nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, dropout=0.0), D, 0.5
    ),
    "moe tokens": lambda: MoE(D, 4, null_experts=1, shared_experts=1),
    "moe experts": lambda: MoE(D, 4, choice="experts"),
    "integrated mode": lambda: MoE(D, 4, 1, "experts", pool="batch", gate="sigmoid", shared_experts=1),
    "soft moe": lambda: SoftMoE(D, 3, 2),
    "staged mode": lambda: MoD(_block(MoE(D, 4)), TopTokens(D, 0.5)),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]()


def loss(y: torch.Tensor, plans: tuple[Plan, ...]) -> torch.Tensor:
    """Something every parameter has a part in."""
    total = y.float().pow(2).mean()
    for plan in plans:
        if isinstance(plan, Slots):
            total = total + 0.1 * z_loss(plan)
            if plan.decision.requires_grad and not plan.causal:  # a threshold has nothing to train
                total = total + 0.1 * causal_bce(plan)
        elif isinstance(plan, Groups):
            total = total + 0.1 * (load_balance(plan) + z_loss(plan))
    return total


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in module.named_parameters()}
