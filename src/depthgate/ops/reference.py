"""The naive twins: slow, plain Python and loops, and the specification of every fast op."""

import math

import torch
from torch import Tensor

from depthgate.flops import budget


def top_tokens(scores: list[float], valid: list[bool], doc: list[int] | None, capacity: float) -> list[int]:
    """Chosen positions of one row, ascending: of each document's n valid tokens the max(1, floor(capacity*n)) best."""
    documents: dict[int, list[int]] = {}
    for t, real in enumerate(valid):
        if real:
            documents.setdefault(0 if doc is None else doc[t], []).append(t)
    chosen: list[int] = []
    for tokens in documents.values():
        k = budget(capacity, len(tokens))
        ranked = sorted(tokens, key=lambda t: (math.isnan(scores[t]), -scores[t] if scores[t] == scores[t] else 0.0, t))
        chosen += ranked[:k]
    return sorted(chosen)


def compact(chosen: list[bool], slots: int) -> tuple[list[int], list[bool]]:
    """Twin of `select.compact` for one row: the chosen positions, then the others, cut to `slots`."""
    order = [t for t, c in enumerate(chosen) if c] + [t for t, c in enumerate(chosen) if not c]
    return order[:slots], [s < sum(chosen) for s in range(slots)]


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Twin of `rows.take_rows`."""
    return torch.stack([x[b, index[b]] for b in range(x.shape[0])])


def add_rows(rows: Tensor, index: Tensor, T: int) -> Tensor:
    """Twin of `rows.add_rows`."""
    out = rows.new_zeros(rows.shape[0], T, rows.shape[2])
    for b in range(rows.shape[0]):
        for n in range(rows.shape[1]):
            out[b, index[b, n]] += rows[b, n]
    return out


def put_rows(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Twin of `rows.put_rows`."""
    out = x.clone()
    for b in range(x.shape[0]):
        out[b, index[b]] = rows[b]
    return out


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Twin of `matmul.grouped_matmul`: rows ends[e-1]:ends[e] of x (N, D) times weight[e] (D, F); later rows are 0."""
    pieces, start = [], 0
    for e, end in enumerate(ends.tolist()):
        pieces.append(x[start:end] @ weight[e])
        start = end
    pieces.append(x.new_zeros(x.shape[0] - start, weight.shape[2]))
    return torch.cat(pieces)


def grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Twin of `matmul._grouped_outer`: x^T y over each expert's rows of x (N, D) and y (N, F)."""
    pieces, start = [], 0
    for end in ends.tolist():
        pieces.append(x[start:end].mT @ y[start:end])
        start = end
    return torch.stack(pieces)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Twin of `loss.linear_cross_entropy`: all logits at once."""
    losses = torch.nn.functional.cross_entropy(x @ weight.mT, targets.clamp(min=0), reduction="none")
    kept = targets >= 0
    return torch.where(kept, losses, 0.0).sum() / kept.sum().clamp(min=1)


def linear_distillation(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, targets: Tensor, t: float, text: float
) -> Tensor:
    """Twin of `loss.linear_distillation`: all logits at once."""
    p, q = (teacher_x @ teacher_weight.mT / t).softmax(-1), (x @ weight.mT / t).softmax(-1)
    kept = targets >= 0
    losses = torch.where(kept, t**2 * (p * (p / q).log()).sum(-1), 0.0).sum() / kept.sum().clamp(min=1)
    return (1 - text) * losses + text * linear_cross_entropy(x, weight, targets)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, doc: Tensor) -> Tensor:
    """Twin of `attention.packed_attention`: each query over the earlier keys of its document, softmax written out."""
    T, H, d = q.shape[1:]
    k, v = (t.repeat_interleave(H // t.shape[2], 2) for t in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(d)
    seen = (doc[:, :, None] == doc[:, None, :]) & torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    return torch.einsum("bhqk,bkhd->bqhd", logits.masked_fill(~seen[:, None], -math.inf).softmax(-1), v)


def short_attention(q: Tensor, k: Tensor, v: Tensor, doc: Tensor | None, causal: bool) -> Tensor:
    """Twin of `attention.short_attention`: of causal ones `packed_attention`; otherwise each query over all keys."""
    if causal:
        return packed_attention(q, k, v, torch.zeros(q.shape[:2], device=q.device) if doc is None else doc)
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[3])).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def soft_exponentials(x: Tensor, slots: Tensor, bound: Tensor, valid: Tensor | None) -> Tensor:
    """Twin of `soft.soft_exponentials`: tokens scaled to length one, logits and exponentials one after another."""
    unit = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-12)
    weights = torch.exp(unit @ slots - bound.detach())
    return weights if valid is None else torch.where(valid[..., None], weights, 0.0)


def weighted_means(weights: Tensor, x: Tensor) -> Tensor:
    """Twin of `soft.weighted_means`: probabilities first."""
    sums = weights.sum(-1, keepdim=True)
    return torch.where(sums > 0, weights / torch.where(sums > 0, sums, 1.0), 0.0) @ x


def scored(
    x: Tensor,
    valid: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    threshold: tuple[Tensor, Tensor] | None = None,
    normed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Twin of `route_triton.scored`."""
    scores = torch.empty(*x.shape[:2], 1)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            token = x[b, t].float()
            if normed:
                token = token / (token.square().mean() + torch.finfo(torch.float32).eps).sqrt()
            real = valid is None or bool(valid[b, t])
            scores[b, t] = (token @ weight[0] if real else 0.0) + (0.0 if bias is None else bias[0])
    if threshold is None:
        return scores, scores
    average, count = (float(each) for each in threshold)
    return scores, scores - (average / count if count else -math.inf)


def marked(
    decision: Tensor, valid: Tensor | None, scores: Tensor, gate: str, slots: int, lacking: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Twin of `route_triton.marked`."""
    B, T, _ = decision.shape
    index, slot = torch.empty(B, 1, slots, dtype=torch.int64), torch.full((B, 1, T), -1)
    gates, filled, many = torch.zeros(B, 1, slots), torch.zeros(B, 1, slots, dtype=torch.bool), torch.zeros(B).int()
    for b in range(B):
        wanted = [bool(decision[b, t] >= 0) and (valid is None or bool(valid[b, t])) for t in range(T)]
        index[b, 0], filled[b, 0] = (torch.tensor(each) for each in compact(wanted, slots))
        for place, t in enumerate([t for t in range(T) if wanted[t]][:slots]):
            slot[b, 0, t], gates[b, 0, place] = place, _gate(float(scores[b, t]), gate)
        many[b] = sum(wanted)
    if lacking is not None:
        lacking.fill_(max(int(lacking), int(many.max()) - slots))
    flat = (index + T * torch.arange(B)[:, None, None]).flatten()
    return (index, filled, slot, gates, flat), many


def taken(
    x: Tensor, index: Tensor, rotary: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Twin of `route_triton.taken`."""
    rows = take_rows(x, index[:, 0])
    if rotary is None:
        return rows, None
    cos, sin = (take_rows(each.expand(len(x), -1, -1), index[:, 0]) for each in rotary)
    return rows, (cos, sin)


def scaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Twin of `layer_triton.scaled`."""
    wide = x.float()
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `layer_triton.turned`."""

    def each(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

    return each(q), each(k)


def _gate(score: float, name: str) -> float:
    safe = 0.0 if math.isnan(score) else max(-1e4, min(1e4, score))
    sigmoid = 1 / (1 + math.exp(-safe)) if safe > -700 else 0.0
    return {"one_plus_tanh": 1 + math.tanh(safe), "sigmoid": sigmoid, "raw": safe, "straight_through": 1.0}[name]


def merged(x: Tensor, rows: Tensor, slot: Tensor, gates: Tensor) -> Tensor:
    """Twin of `route_triton.merged`."""
    out = x.clone()
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            if (at := int(slot[b, 0, t])) >= 0:
                out[b, t] = torch.lerp(x[b, t].float(), rows[b, at].float(), gates[b, 0, at]).to(x.dtype)
    return out
