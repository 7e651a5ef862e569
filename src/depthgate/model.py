"""The decoder language model: a pattern of layers, the residual loop, the head."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthgate.config import ROUTED_KINDS, ModelConfig
from depthgate.errors import InvalidValueError
from depthgate.layers import Attention, Block, MixtureOfExperts, MoD, SwiGLU
from depthgate.layers.attention import KeyValues
from depthgate.ops.loss import linear_cross_entropy
from depthgate.ops.sizes import swiglu_hidden
from depthgate.routing import Plans, RandomTokens, TopTokens


class Output(NamedTuple):
    """What the model says of every position, and what its routers did."""

    logits: Tensor  # (B, T, V)
    plans: Plans


def build_layer(config: ModelConfig, kind: str) -> nn.Module:
    """One layer of a kind, as an Update."""
    dim = config.dim
    hidden = config.hidden or swiglu_hidden(dim)
    attention = Attention(
        dim,
        config.heads,
        config.kv_heads,
        qk_norm=config.qk_norm,
        rope_base=config.rope_base,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
    )
    ffn: nn.Module
    if kind in ("moe", "mode"):
        ffn = MixtureOfExperts(
            dim,
            config.experts,
            config.top_k,
            null_experts=config.null_experts,
            hidden=config.expert_hidden or hidden,
            shared_experts=config.shared_experts,
        )
    else:
        ffn = SwiGLU(dim, hidden)
    block = Block(dim, attention, ffn, norm_eps=config.norm_eps)
    if kind == "random":
        return MoD(block, RandomTokens(dim, config.capacity))
    if kind in ROUTED_KINDS:
        return MoD(block, TopTokens(dim, config.capacity, gate=config.gate, rule=config.rule))
    return block


def residual(layers: Sequence[nn.Module], caches: Sequence[Any], x: Tensor, **kwargs: Any) -> tuple[Tensor, Plans]:
    """x and what each layer adds to it: the one place where residuals are added."""
    plans = Plans(())
    for layer, cache in zip(layers, caches, strict=True):
        if isinstance(layer, MoD):
            x, more = layer(x, cache=cache, onto=True, **kwargs)
        else:
            update, more = layer(x, cache=cache, **kwargs)
            x = x + update
        plans += more
    return x, plans


class Decoder(nn.Module):
    """Embedding, `layers` of the configured kinds, norm, head. Causal attention; routing by top k or causally."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(build_layer(config, kind) for kind in config.kinds)
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.through: Callable[..., tuple[Tensor, Plans]] = residual
        self.compiled = False
        self.reset_parameters()

    def compile_parts(self) -> None:
        """torch.compile what a few layers do, once for the whole pattern, and the loss; anew for every shape."""
        # Kinds, training and evaluation, and stages of a falling capacity are all versions of one function.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self.through = torch.compile(residual, dynamic=False)
        self.compiled = True

    def reset_parameters(self) -> None:
        """Normal weights of 0.02; those that write into the residual smaller, so that depth does not add up."""
        nn.init.normal_(self.embed.weight, std=0.02)
        if not self.config.tied:
            nn.init.normal_(self.head.weight, std=0.02)
        for name, weight in self.layers.named_parameters():
            if weight.ndim < 2 or "router" in name:
                continue
            writes = name.endswith(("out.weight", "down.weight", "down"))
            nn.init.normal_(weight, std=0.02 / (2 * self.config.layers) ** 0.5 if writes else 0.02)

    def hidden(
        self,
        tokens: Tensor,
        pos: Tensor | None = None,
        doc: Tensor | None = None,
        causal: bool = False,
        caches: Sequence[KeyValues] | None = None,
    ) -> tuple[Tensor, Plans]:
        """What the head reads (B, T, D), and the plans of all routed layers."""
        self._check(tokens)
        x = self.embed(tokens)
        plain = pos is None and doc is None and caches is None
        if pos is None:
            pos = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        plans = Plans(())
        # What is compiled is compiled as one: a layer reads what the one before it adds up.
        span = max(2, len(self.config.pattern.split(","))) if self.compiled else 1
        for i in range(0, len(self.layers), span):
            layers = list(self.layers)[i : i + span]
            kept = [None] * len(layers) if caches is None else caches[i : i + span]
            x, more = self.through(layers, kept, x, pos=pos, doc=doc, causal=causal, plain=plain)
            plans += more
        return self.norm(x), plans

    def forward(
        self,
        tokens: Tensor,
        pos: Tensor | None = None,
        doc: Tensor | None = None,
        causal: bool = False,
        caches: Sequence[KeyValues] | None = None,
    ) -> Output:
        """tokens (B, T); pos (B, T), negative at padding; doc (B, T), packed documents stay apart; causal, whether
        routers decide token by token (as generation does) or take the top k (as training does)."""
        x, plans = self.hidden(tokens, pos, doc, causal, caches)
        return Output(self.head(x), plans)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        pos: Tensor | None = None,
        doc: Tensor | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Plans]:
        """Mean cross-entropy in nats over targets (B, T) that are not negative, and the plans. The logits are made a
        part at a time and never held whole."""
        x, plans = self.hidden(tokens, pos, doc, causal)
        loss = linear_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten(), compiled=self.compiled)
        return loss, plans

    def _check(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor) or tokens.ndim != 2:
            got = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InvalidValueError(f"tokens is {got}: it must be a tensor of shape (batch, tokens)")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise InvalidValueError(f"tokens has dtype {tokens.dtype}: it must be int64 or int32")
        # A CUDA device would have to be waited for: whoever has ids from elsewhere checks them before.
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            low, high = (int(t) for t in tokens.aminmax())
            if low < 0 or high >= self.config.vocab:
                wrong = low if low < 0 else high
                raise InvalidValueError(f"tokens holds {wrong}: ids are from 0 to {self.config.vocab - 1}")
