"""The answer that every timed layer must give: its equations with plain loops, over the layer's own weights.

Nothing here calls the library's routers, plans or ops, so that a mistake there cannot hide in both sides.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthgate.layers import Attention, Block, MoD, MoE, SoftMoE, SwiGLU

# How far a right answer may be, as a share of the norm of what it should be.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def update_of(result: object) -> Tensor:
    """The update of a layer that returns it alone or with its plans."""
    update = result[0] if isinstance(result, tuple) else result
    assert isinstance(update, Tensor)
    return update


def with_gradients(layer: nn.Module, fn: Callable[[Tensor], object], x: Tensor, grad: Tensor) -> list[Tensor]:
    """[answer, gradient of x, gradients of the layer's parameters], where `grad` is the gradient of the answer."""
    x = x.detach().requires_grad_()
    answer = update_of(fn(x))
    return [answer.detach(), *torch.autograd.grad(answer, [x, *layer.parameters()], grad, materialize_grads=True)]


def weights_as_one(parts: Sequence[Tensor]) -> list[Tensor]:
    """`with_gradients` with the gradients of all parameters as one vector. For comparisons in low precision: a gradient
    that is one number, such as a router's bias, is a sum over all tokens that nearly cancels, and its rounding is large
    next to itself but not next to the rest."""
    answer, grad_x, *weights = parts
    return [answer, grad_x, torch.cat([w.flatten().float() for w in weights])]


def agree(got: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """True if each tensor is what it should be, to the tolerance of `dtype`; NaN never is."""
    return all(_distance(g, w) <= TOLERANCE[dtype] for g, w in zip(got, wanted, strict=True))


def _distance(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().float(), wanted.detach().float()
    scale = max(float(wanted.norm()), torch.finfo(torch.float32).tiny)
    return float((got - wanted).norm()) / scale


def block(layer: Block, x: Tensor, pos: Tensor) -> Tensor:
    """x (B, T, D) at ascending positions pos (B, T): causal attention, then SwiGLU."""
    attention, ffn = layer.attention, layer.ffn
    assert isinstance(attention, Attention)
    assert isinstance(ffn, SwiGLU)
    B, T, D = x.shape
    H, d = attention.heads, attention.head_dim
    q, k, v = (attention.qkv(layer.attention_norm(x))).view(B, T, 3, H, d).unbind(2)
    # Rotary positions as complex numbers: the pair (i, i + d/2) turned by pos / base^(2i/d).
    angle = pos[..., None, None] / attention.rope_base ** (torch.arange(0, d, 2, device=x.device) / d)
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.view_as_real(torch.complex(*a.float().chunk(2, -1)) * turn).mT.flatten(-2) for a in (q, k))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(d)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1), -torch.inf)
    attended = attention.out(
        torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.float()).reshape(B, T, D).to(x.dtype)
    )
    gate, up = ffn.up(layer.ffn_norm(x + attended)).chunk(2, -1)
    return attended + ffn.down(gate * torch.sigmoid(gate) * up)  # type: ignore[no-any-return]


def plain_block(layer: Block, x: Tensor) -> Tensor:
    """`block` of whole rows at positions 0, 1, 2, ..."""
    return block(layer, x, torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]).float())


def mod(layer: MoD, x: Tensor) -> Tensor:
    """Row by row: the k best tokens through the block at their own positions, times 1 + tanh(score)."""
    assert isinstance(layer.block, Block)
    rows = []
    for row in x:
        scores = row @ layer.router.proj.weight[0] + layer.router.proj.bias  # (T,)
        chosen = scores.topk(max(1, math.floor(layer.router.capacity * len(row)))).indices.sort().values
        update = block(layer.block, row[None, chosen], chosen[None].float())[0]
        rows.append(torch.zeros_like(row).index_put((chosen,), update * (1 + scores[chosen].tanh())[:, None]))
    return torch.stack(rows)


def _swiglu_expert(layer: MoE, e: int, x: Tensor) -> Tensor:
    gate, up = (x @ layer.experts.up[e]).chunk(2, -1)
    return gate * torch.sigmoid(gate) * up @ layer.experts.down[e]


def token_choice(layer: MoE, x: Tensor, top_k: int) -> Tensor:
    """Token by token: the probability of each of its `top_k` best experts, times that expert."""
    out = []
    for token in x.flatten(0, 1):
        scores = layer.router.proj.weight.to(torch.float32) @ token.float()  # (E,)
        picked, experts = scores.topk(top_k)
        gates = picked.softmax(0) if top_k > 1 else scores.softmax(0)[experts]
        parts = [g.to(x.dtype) * _swiglu_expert(layer, int(e), token) for g, e in zip(gates, experts, strict=True)]
        out.append(torch.stack(parts).sum(0))
    return torch.stack(out).view_as(x)


def expert_choice(layer: MoE, x: Tensor, capacity: float) -> Tensor:
    """Row by row and expert by expert: its k most probable tokens, each weighted by that probability."""
    rows = []
    for row in x:
        probability = (row @ layer.router.proj.weight.T + layer.router.proj.bias).softmax(-1)  # (T, E)
        out = torch.zeros_like(row)
        for e in range(layer.num_experts):
            chosen = probability[:, e].topk(max(1, math.floor(capacity * len(row)))).indices
            update = _swiglu_expert(layer, e, row[chosen]) * probability[chosen, e, None]
            out = out.index_add(0, chosen, update)
        rows.append(out)
    return torch.stack(rows)


def soft_moe(layer: SoftMoE, x: Tensor) -> Tensor:
    """Section 2 of arXiv 2308.00951, as its einsums, with the normalisation of section 2.3."""
    router, experts = layer.router, layer.experts
    assert experts.up_bias is not None
    assert experts.down_bias is not None
    phi = router.scale * F.normalize(router.phi, dim=0).view(layer.dim, router.num_experts, router.slots_per_expert)
    logits = torch.einsum("btd,dec->btec", F.normalize(x, dim=-1), phi)
    into, back = logits.softmax(1), logits.flatten(2).softmax(-1).view_as(logits)
    slots = torch.einsum("btec,btd->becd", into, x)
    hidden = F.gelu(torch.einsum("becd,edf->becf", slots, experts.up) + experts.up_bias[:, None])
    out = torch.einsum("becf,efd->becd", hidden, experts.down) + experts.down_bias[:, None]
    return torch.einsum("btec,becd->btd", back, out)
