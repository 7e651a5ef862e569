"""The decoder language model: a pattern of layers, the residual loop, the head."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthgate.config import EXPERT_KINDS, ROUTED_KINDS, ModelConfig
from depthgate.errors import InvalidValueError
from depthgate.flops import expert_hidden, swiglu_hidden
from depthgate.layers import Attention, Block, MoD, MoE, SwiGLU
from depthgate.layers.attention import KeyValues
from depthgate.ops.loss import linear_cross_entropy
from depthgate.ops.rows import plain_positions
from depthgate.routing import Plans, RandomScorer, TopTokens


class Output(NamedTuple):
    """Logits of every position, and the plans of all routed layers."""

    logits: Tensor  # (B, T, V)
    plans: Plans


def build_layer(config: ModelConfig, kind: str, scores_have_no_loss: bool = False) -> nn.Module:
    """One layer of a kind, as an Update. scores_have_no_loss: see TopTokens."""
    dim = config.dim
    attention = Attention(
        dim,
        config.heads,
        config.kv_heads,
        qk_norm=config.qk_norm,
        rope_base=config.rope_base,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        key_shift=config.key_shift,
    )
    ffn: nn.Module
    if kind in EXPERT_KINDS:
        choose = config.experts_choose(kind)
        ffn = MoE(
            dim,
            config.experts,
            config.top_k,
            "experts" if choose else "tokens",
            config.null_experts,
            hidden=expert_hidden(config),
            shared_experts=config.shared_experts,
            pool=config.pool if choose else None,
            gate=config.expert_gate or ("sigmoid" if kind == "mode" else "softmax"),
        )
    else:
        ffn = SwiGLU(dim, config.hidden or swiglu_hidden(dim))
    block = Block(dim, attention, ffn, norm_eps=config.norm_eps)
    if kind == "random":
        return MoD(block, TopTokens(dim, config.capacity, gate=torch.ones_like, scorer=RandomScorer()))
    if kind in ROUTED_KINDS:
        router = TopTokens(
            dim,
            config.capacity,
            gate=config.gate,
            rule=config.rule,
            scores_have_no_loss=scores_have_no_loss,
            normed=config.router_norm,
        )
        return MoD(block, router)
    return block


def _single_documents(pos: Tensor | None, doc: Tensor | None) -> bool:
    """True if every row is known to be one document, counted from 0. Only a CPU is asked: another device would wait."""
    if pos is None or doc is None or pos.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return bool((doc == doc[:, :1]).all() and (pos == plain_positions(pos)).all())


def residual(layers: Sequence[nn.Module], caches: Sequence[Any], x: Tensor, **call: Any) -> tuple[Tensor, Plans]:
    """x plus the updates of the layers, one after another, and their plans."""
    plans: Plans = ()
    for layer, cache in zip(layers, caches, strict=True):
        x, more = layer.add_to(x, cache=cache, **call)  # type: ignore[operator]
        plans += more
    return x, plans


def generator_of(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Random numbers that depend on a seed and on the name of a weight alone."""
    return torch.Generator(device).manual_seed((seed + zlib.crc32(name.encode())) % 2**63)


class Decoder(nn.Module):
    """Embedding, `layers` of the configured kinds, norm, head. Causal attention; routing by top k or causally."""

    def __init__(self, config: ModelConfig, *, scores_have_no_loss: bool = False) -> None:
        """scores_have_no_loss: a promise that no loss reads the routers' scores (see TopTokens), which saves memory."""
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise InvalidValueError(f"config is {config!r}: it must be a ModelConfig, or use Decoder.from_preset(name)")
        self.config = config
        seed = int(torch.randint(2**62, (), device="cpu"))  # before the layers draw anything
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(build_layer(config, kind, scores_have_no_loss) for kind in config.kinds)
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.reset_parameters(seed)

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Self:
        """A new model of a preset's shape, such as "tiny-mod", with other values of ModelConfig if given."""
        from depthgate.recipes import train_config

        return cls(replace(train_config(name).model, **changes))

    def reset_parameters(self, seed: int | None = None) -> None:
        """Normal weights of 0.02; those that write into the residual smaller, so that the layers a token visits do not
        add up. A weight's values depend on the seed, its name and its shape alone: models that differ elsewhere start
        alike."""
        seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        visited = sum(self.config.capacity if kind in ROUTED_KINDS else 1.0 for kind in self.config.kinds)
        for name, weight in self.named_parameters():
            if weight.ndim < 2 or weight.is_meta or "router.rule" in name:
                continue
            writes = name.endswith(("out.weight", "down.weight", "down"))
            random = generator_of(seed, name, weight.device)
            nn.init.normal_(weight, std=0.02 / (2 * visited) ** 0.5 if writes else 0.02, generator=random)

    def hidden(
        self,
        tokens: Tensor,
        pos: Tensor | None = None,
        doc: Tensor | None = None,
        causal: bool = False,
        caches: Sequence[KeyValues] | None = None,
        max_documents: int | None = None,
    ) -> tuple[Tensor, Plans]:
        """The input of the head (B, T, D), and the plans of all routed layers."""
        self._check(tokens)
        x = self.embed(tokens)
        if self.config.embed_norm:
            x = F.rms_norm(x, x.shape[-1:])
        plain = caches is None and ((pos is None and doc is None) or _single_documents(pos, doc))
        doc = None if plain else doc
        if pos is None:
            pos = plain_positions(tokens)
        each = [None] * len(self.layers) if caches is None else caches
        call = {"pos": pos, "doc": doc, "causal": causal, "plain": plain, "max_documents": max_documents}
        x, plans = self.through_layers(x, each, **call)
        return self.norm(x), plans

    def through_layers(self, x: Tensor, caches: Sequence[Any], **call: Any) -> tuple[Tensor, Plans]:
        """The residual stream after all layers. `train` overrides it, to compile a few layers at a time."""
        return residual(list(self.layers), caches, x, **call)

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
        max_documents: int | None = None,
    ) -> tuple[Tensor, Plans]:
        """Mean cross-entropy in nats over targets (B, T) that are not negative, and the plans. The logits are made a
        part at a time and never held whole."""
        x, plans = self.hidden(tokens, pos, doc, causal, max_documents=max_documents)
        return self.head_loss(x.flatten(0, 1), targets.flatten()), plans

    def head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the head over rows x (N, D). `train` overrides it, to compile it."""
        return linear_cross_entropy(x, self.head.weight, targets)

    def _check(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor) or tokens.ndim != 2:
            got = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InvalidValueError(f"tokens is {got}: it must be a tensor of shape (batch, tokens)")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise InvalidValueError(f"tokens has dtype {tokens.dtype}: it must be int64 or int32")
        # On CUDA the check would wait for the device: ids from elsewhere are to be checked before they get there.
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            low, high = (int(t) for t in tokens.aminmax())
            if low < 0 or high >= self.config.vocab:
                wrong = low if low < 0 else high
                raise InvalidValueError(f"tokens holds {wrong}: ids are from 0 to {self.config.vocab - 1}")
