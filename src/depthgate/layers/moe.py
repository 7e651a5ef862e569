"""Mixture of experts, dropless: tokens choose experts (Shazeer et al. 2017), or experts tokens (Zhou et al. 2022).

Integrated MoDE (Raposo et al. 2024, section 4.4) is this layer where a token may be computed by no expert at all: with
experts that choose, or with null experts among those that tokens choose. Staged MoDE is MoD around a Block whose
feed-forward is this layer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from depthgate.errors import InvalidValueError, check_capacity, check_choice, check_count
from depthgate.flops import swiglu_hidden
from depthgate.layers.ffn import Experts, SwiGLU
from depthgate.ops.rows import check_tokens, masked_positions
from depthgate.routing.plan import Plans
from depthgate.routing.routers import EXPERT_GATES, TopExperts, TopTokens


class MoE(nn.Module):
    """A feed-forward of which each token uses a part. Returns the update, without the residual.

    choice="tokens": each token goes to its `top_k` best of `num_experts` and `null_experts`.
    choice="experts": each expert takes a share `capacity` of the tokens (default top_k / num_experts) of its `pool`,
    each sequence or the whole batch, so that a token has from none to all of the experts. With causal=True its `rule`
    (threshold unless told) decides token by token; before the first update of the threshold every expert takes every
    token.
    `gate`: softmax, a token's probability for the expert, by which experts also rank tokens; or sigmoid of its score.
    `activation` and `bias`: what experts are made of, see Experts.
    `shared_experts` are always on: together one SwiGLU of that many times `hidden`.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        choice: str = "tokens",
        null_experts: int = 0,
        *,
        hidden: int | None = None,
        shared_experts: int = 0,
        capacity: float | None = None,
        rule: str | nn.Module | None = None,
        pool: str | None = None,
        gate: str = "softmax",
        activation: str = "swiglu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.dim = check_count(dim, "dim")
        self.num_experts = check_count(num_experts, "num_experts")
        check_count(top_k, "top_k", maximum=num_experts)
        check_count(null_experts, "null_experts", minimum=0)
        check_count(shared_experts, "shared_experts", minimum=0)
        check_choice(choice, "choice", ("tokens", "experts"))
        hidden = swiglu_hidden(dim) if hidden is None else check_count(hidden, "hidden")
        self.router: TopExperts | TopTokens
        if choice == "tokens":
            for name, value in (("capacity", capacity), ("rule", rule), ("pool", pool)):
                if value is not None:
                    raise InvalidValueError(f"{name} is {value!r}: only choice='experts' has one; leave it out")
            self.router = TopExperts(dim, num_experts, top_k, null_experts, gate)
        else:
            capacity = top_k / num_experts if capacity is None else check_capacity(capacity)
            self.router = TopTokens(
                dim,
                capacity,
                experts=num_experts + null_experts,
                gate=torch.exp if check_choice(gate, "gate", EXPERT_GATES) == "softmax" else "sigmoid",
                rule="threshold" if rule is None else rule,
                across_experts=gate == "softmax",
                pool=pool or "sequence",
            )
        self.experts = Experts(num_experts, dim, hidden, activation=activation, bias=bias)
        self.shared = SwiGLU(dim, shared_experts * hidden) if shared_experts else None

    def forward(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        doc: Tensor | None = None,
        cache: Any = None,  # noqa: ARG002
        causal: bool = False,
        plain: bool = False,
        max_documents: int | None = None,
        *,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Plans]:
        """x (B, T, D); mask (B, T), True at real tokens, in place of pos."""
        check_tokens(x, self.dim)
        if mask is not None:
            pos, plain = masked_positions(mask, x), False
        pos = None if plain else pos
        if isinstance(self.router, TopExperts):
            plan = self.router(x, pos)
            update = plan.combine(self.experts.grouped(plan.dispatch(x), plan.ends, plan.complete))
        else:
            plan = self.router(x, pos, causal, doc=doc, max_documents=max_documents)
            real = plan.first_experts(self.num_experts)
            if causal and not torch.compiler.is_compiling():  # experts take different numbers: only those are computed
                rows, ends = real.sorted_by_expert(x)
                update = real.combine_sorted(self.experts.grouped(rows, ends, complete=True))
            else:
                update = real.combine(self.experts(real.dispatch(x, fill=0)))
        if self.shared is not None:
            real = None if pos is None else (pos >= 0)[..., None]  # padding, whatever lies in it, gets 0
            shared = self.shared(x if real is None else torch.where(real, x, 0.0))[0]
            update = update + (shared if real is None else torch.where(real, shared, 0.0))
        return update, (plan,)

    def each_alone(self, x: Tensor) -> Tensor:
        """The update of tokens (N, D), each decided causally by itself, in shapes that do not depend on the choice:
        nothing waits for the device, so that a CUDA graph can hold it."""
        N, E = len(x), self.num_experts
        shared = 0.0 if self.shared is None else self.shared(x[None])[0][0]
        if isinstance(self.router, TopExperts):
            plan = self.router(x[None])
            weights = plan.gates.new_zeros(N, plan.scores.shape[-1]).scatter(1, plan.choice[0], plan.gates[0])[:, :E]
        else:
            wanted, gates = self.router.decide(x, torch.zeros_like(x[:, 0], dtype=torch.int64))
            weights = torch.where(wanted, gates, 0.0)[:, :E]
        weights = weights.T[..., None].to(x.dtype)  # (E, N, 1)
        if x.dtype is torch.bfloat16:
            chosen = (weights != 0).flatten()
            order = torch.argsort(~chosen, stable=True)  # pairs of expert and token, by expert
            ends = chosen.view(E, N).sum(1).cumsum(0).int()
            rows = self.experts.grouped(x[order % N], ends)
            found = torch.zeros_like(rows).index_copy(0, order, rows).view(E, N, -1)
        else:
            found = self.experts(x.expand(1, E, N, -1))[0]
        return (weights * found).sum(0) + shared  # type: ignore[no-any-return]
