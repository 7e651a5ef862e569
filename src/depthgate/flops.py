"""Sizes, parameters and FLOPs of a model from its configuration alone. Imports no torch.

A FLOP is a multiply or an add of a matrix product, as torch's FlopCounterMode counts with attention written out: a
causal mask saves nothing, and norms, activations, gathers and sorts are free. Routed layers count the top-k choice of
one document a sequence; the empty slots that packed documents need (at most one less than there are) are not counted.
Experts that choose out of a batch choose out of all its `sequences`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from depthgate.config import EXPERT_KINDS, ROUTED_KINDS, ModelConfig
from depthgate.vision import ViTConfig

SLACK = 1e-8  # of a token: 0.29 * 100 is 28.999999999999996 in floating point, and means 29


def budget(capacity: float, tokens: int) -> int:
    """Number of the `tokens` valid tokens that are routed, k. At least one, unless there are none."""
    return min(tokens, max(1, math.floor(capacity * tokens + SLACK)))


def swiglu_hidden(dim: int) -> int:
    """The hidden size at which SwiGLU has the weights of a plain MLP four times as wide: 8/3 dim, a multiple of 8."""
    return -(-8 * dim // 24) * 8


def predictor_hidden(dim: int) -> int:
    """The hidden size of the MLP that predicts a router's choice."""
    return max(1, min(64, dim // 2))


@dataclass(frozen=True)
class Cost:
    """Weights used, and FLOPs of one sequence: forward, and forward with backward."""

    parameters: int = 0
    forward: float = 0
    training: float = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.parameters + other.parameters, self.forward + other.forward, self.training + other.training)

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.parameters * times, self.forward * times, self.training * times)


def _linear(rows: float, inputs: int, outputs: int, *, bias: bool = False, input_gradient: bool = True) -> Cost:
    """A product with a matrix of weights; each gradient costs as much as the product itself."""
    forward = 2 * rows * inputs * outputs
    return Cost(inputs * outputs + bias * outputs, forward, forward * (3 if input_gradient else 2))


def _swiglu(config: ModelConfig, rows: float, hidden: int) -> Cost:
    return _linear(rows, config.dim, 2 * hidden) + _linear(rows, hidden, config.dim)


def _attention(config: ModelConfig, rows: int) -> Cost:
    """Rows of one sequence that attend to each other."""
    d, heads, kv = config.head_size, config.heads, config.kv_heads or config.heads
    cost = _linear(rows, config.dim, (heads + 2 * kv) * d) + _linear(rows, heads * d, config.dim)
    scores = 2 * rows * rows * heads * d  # q k^T over all heads; the weights times v cost the same
    norms = Cost(2 * d) if config.qk_norm else Cost()
    return cost + Cost(0, 2 * scores, 3 * 2 * scores) + norms


def expert_hidden(config: ModelConfig) -> int:
    """The width of an expert: as given, or that at which the experts of a token, shared ones included, cost what a
    dense feed-forward does; a multiple of 8."""
    hidden, null = config.hidden or swiglu_hidden(config.dim), config.null_experts
    used = config.top_k * config.experts / (config.experts + null) + config.shared_experts
    return config.expert_hidden or max(8, round(hidden / used / 8) * 8)


def _feed_forward(config: ModelConfig, rows: int, kind: str, expert_share: float | None, sequences: int) -> Cost:
    if kind not in EXPERT_KINDS:
        return _swiglu(config, rows, config.hidden or swiglu_hidden(config.dim))
    hidden, experts, null = expert_hidden(config), config.experts, config.null_experts
    used: float = rows * config.top_k * experts / (experts + null)
    if expert_share is not None:
        used = rows * config.top_k * expert_share
    elif config.experts_choose(kind):
        pool = sequences if config.pool == "batch" else 1
        used = experts * budget(config.top_k / experts, rows * pool) / pool
    router = _linear(rows, config.dim, experts + null, bias=bool(config.experts_choose(kind)))
    shared, each = _swiglu(config, rows, config.shared_experts * hidden), _swiglu(config, used, hidden)
    return router + shared + Cost(each.parameters * experts, each.forward, each.training)


def _router(config: ModelConfig, tokens: int) -> Cost:
    """Scores of all tokens, and those of the predictor where that is the rule; the other rules have no weights."""
    cost = _linear(tokens, config.dim, 1, bias=True)
    if config.rule == "predictor":
        hidden = predictor_hidden(config.dim)
        cost += _linear(tokens, config.dim, hidden, bias=True, input_gradient=False)
        cost += _linear(tokens, hidden, 1, bias=True)
    return cost


def layer_cost(
    config: ModelConfig,
    kind: str,
    tokens: int,
    expert_share: float | None = None,
    sequences: int = 1,
    entered: int | None = None,
) -> Cost:
    """One layer of a kind over one sequence of `tokens` tokens, in a batch of `sequences`.

    expert_share: the experts that compute a token, on average, over `top_k`; unless given, all that choose have their
    share of tokens, and of those that are chosen null ones are chosen as often as the others. entered: tokens that a
    routed layer takes, its capacity's unless given.
    """
    routed = kind in ROUTED_KINDS
    rows = tokens if not routed else budget(config.capacity, tokens) if entered is None else entered
    cost = _attention(config, rows) + Cost(2 * config.dim)
    cost += _feed_forward(config, rows, kind, expert_share, sequences)
    return cost + _router(config, tokens) if routed and kind != "random" else cost


def _mlp(rows: float, dim: int, hidden: int) -> Cost:
    return _linear(rows, dim, hidden, bias=True) + _linear(rows, hidden, dim, bias=True)


def _vit_layer(config: ViTConfig, kind: str) -> Cost:
    dim, tokens = config.dim, config.context
    rows = budget(config.capacity, tokens) if kind == "mod" else tokens
    scores = 4 * rows * rows * dim  # q k^T and the weights times v, over all heads
    cost = _linear(rows, dim, 3 * dim, bias=True) + _linear(rows, dim, dim, bias=True) + Cost(4 * dim)
    cost += Cost(0, scores, 3 * scores)
    if kind == "mod":
        cost += _linear(tokens, dim, 1, bias=True)
    if kind in ("dense", "mod"):
        return cost + _mlp(rows, dim, config.mlp_hidden)
    each = _mlp(1, dim, config.hidden_of_experts(kind))
    if kind == "moe":
        used = rows * config.top_k
        cost += _linear(rows, dim, config.experts)
    else:
        used = config.experts * config.slots
        mixing = 4 * rows * used * dim  # into the slots, and back
        cost += _linear(rows, dim, used) + Cost(1, mixing, 3 * mixing)  # and the scale
    return cost + Cost(each.parameters * config.experts, each.forward * used, each.training * used)


def vit_cost(config: ViTConfig) -> Cost:
    """A whole vision transformer over one image. Layers whose weights are uniform count as learnt ones do."""
    (high, wide), (rows, columns), dim = config.patch_size, config.grid, config.dim
    down, across = config.size
    cost = Cost()
    for number, (before, after, stride) in enumerate(config.convolutions):
        down, across = down // stride[0], across // stride[1]
        cost += _linear(down * across, 9 * before, after, bias=True, input_gradient=number > 0)
    if not config.stem:
        cost += _linear(rows * columns, config.channels * high * wide, dim, bias=True, input_gradient=False)
    cost += Cost((config.context + 2) * dim) + _linear(1, dim, config.classes, bias=True)  # positions, norm, head
    for kind, layers in Counter(config.kinds).items():
        cost += _vit_layer(config, kind) * layers
    return cost


def model_cost(
    config: ModelConfig | ViTConfig, tokens: int, expert_share: float | None = None, sequences: int = 1
) -> Cost:
    """The whole model over one sequence or image, head included."""
    if isinstance(config, ViTConfig):
        return vit_cost(config)
    cost = Cost(config.vocab * config.dim + config.dim)  # embedding and final norm
    head = _linear(tokens, config.dim, config.vocab)
    cost += Cost(0, head.forward, head.training) if config.tied else head
    for kind, layers in Counter(config.kinds).items():
        cost += layer_cost(config, kind, tokens, expert_share, sequences) * layers
    return cost


def sequence_flops(config: ModelConfig, tokens: int, entered: Sequence[int] | None = None) -> float:
    """Forward FLOPs of one sequence, of which `entered` tokens went into each routed layer; None: all of them into all
    layers, with no router to ask."""
    unrouted = [{"mod": "dense", "random": "dense", "mode_staged": "moe"}.get(kind, kind) for kind in config.kinds]
    flops = model_cost(replace(config, pattern=",".join(unrouted), first=None), tokens).forward
    for i, rows in zip(config.routed, entered, strict=True) if entered is not None else ():
        flops += layer_cost(config, config.kinds[i], tokens, entered=rows).forward
        flops -= layer_cost(config, unrouted[i], tokens).forward
    return flops


def parameters(config: ModelConfig | ViTConfig) -> int:
    """Number of weights of the model."""
    return model_cost(config, 1).parameters


def forward_flops(
    config: ModelConfig | ViTConfig, tokens: int | None = None, expert_share: float | None = None
) -> float:
    """Forward FLOPs a token, in a sequence of `tokens`; see `layer_cost`."""
    tokens = tokens or config.context
    return model_cost(config, tokens, expert_share).forward / tokens


def training_flops(
    config: ModelConfig | ViTConfig, tokens: int | None = None, expert_share: float | None = None, sequences: int = 1
) -> float:
    """Forward and backward FLOPs a token, in a sequence of `tokens`; see `layer_cost`."""
    tokens = tokens or config.context
    return model_cost(config, tokens, expert_share, sequences).training / tokens
