"""The other arguments of a block, gathered as its tokens are. Names decide, never shapes."""

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from depthgate.errors import InvalidValueError
from depthgate.ops.rows import check_per_token
from depthgate.routing.plan import Slots

# Names that need no declaration: those of torch's transformer layers, of timm and of transformers.
PADDING = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")  # (B, T), True or -inf at padding
KNOWN = {
    "per_token": (*PADDING, "position_ids", "position_embeddings", "cache_position"),
    "per_pair": ("src_mask", "tgt_mask", "attn_mask", "attention_mask"),
    "shared": ("memory", "memory_mask", "memory_key_padding_mask", "encoder_hidden_states", "encoder_attention_mask"),
}
CACHES = ("past_key_value", "past_key_values", "layer_past")
CAUSAL = {"is_causal": "src_mask", "tgt_is_causal": "tgt_mask"}  # torch's hints, and the masks that they describe
OURS = ("mask", "keep", "causal", "return_plans")


class Arguments:
    """Which of a block's arguments belong to tokens, to pairs of tokens, or to neither."""

    def __init__(self, block: nn.Module, padding_keyword: str | None, **declared: Collection[str]) -> None:
        """declared: names for each key of KNOWN. padding_keyword: see MixtureOfDepths."""
        inner = getattr(block, "_orig_mod", block)  # of a compiled block
        parameters = list(inspect.signature(inner.forward).parameters.values())[1:]
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        accepted = {p.name for p in parameters}
        self.kinds = {name: kind for kind, names in KNOWN.items() for name in names}
        told: dict[str, str] = {}
        for kind, names in declared.items():
            if isinstance(names, str | bytes) or not isinstance(names, Collection):
                raise InvalidValueError(f"{kind} is {names!r}: it must be a list of names, such as ['pos']")
            for name in names:
                if not isinstance(name, str) or name in OURS or not (takes_any or name in accepted):
                    have = ", ".join(sorted(accepted - set(OURS))) or "none"
                    raise InvalidValueError(f"{kind} names {name!r}: the block's arguments after the first are {have}")
                if name in told:
                    raise InvalidValueError(f"{name!r} is declared as {told[name]} and as {kind}: name it once")
                told[name] = kind
        self.kinds |= told
        if padding_keyword is not None and (not isinstance(padding_keyword, str) or not padding_keyword.isidentifier()):
            raise InvalidValueError(f"padding_keyword is {padding_keyword!r}: it must be the name of a keyword")
        self.padding = padding_keyword or next((name for name in PADDING if name in accepted), None)
        if self.padding is not None:
            self.kinds[self.padding] = "per_token"
        # Their heads: nn.MultiheadAttention takes masks of all rows and heads as (B * H, T, T), and in no other form.
        self.heads = next((m.num_heads for m in inner.modules() if isinstance(m, nn.MultiheadAttention)), None)
        self.torch_layer = isinstance(inner, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Positional arguments after x, and keywords, all by name."""
        if len(args) > len(self.names):
            raise InvalidValueError(f"the block takes {len(self.names)} arguments by position after x, not {len(args)}")
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        for name in CACHES:
            if named.get(name) is not None:
                raise InvalidValueError(f"{name} is given: a routed block keeps no cache; see depthgate.hf.convert")
        return named

    def joined_mask(self, mask: Tensor | None, named: dict[str, Any], x: Tensor) -> Tensor | None:
        """mask (B, T), True at real tokens, without those that the block's own padding mask leaves out."""
        if mask is not None:
            check_per_token(mask, x, "mask", torch.bool)
        for name, value in named.items():
            if value is None or not (name in (self.padding, *PADDING) or _is_padding_of_transformers(name, value)):
                continue
            if not isinstance(value, Tensor) or value.shape != x.shape[:2]:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise InvalidValueError(f"{name} is {got}: it must be a tensor of shape {tuple(x.shape[:2])}")
            real = value != 0
            if name != "attention_mask":
                real = ~value.isneginf() if value.is_floating_point() else ~real
            mask = real if mask is None else mask & real
        return mask

    def has_mask(self, named: dict[str, Any]) -> bool:
        """True if a mask of pairs is among the arguments."""
        return any(self.kinds.get(name) == "per_pair" and value is not None for name, value in named.items())

    def gathered(self, named: dict[str, Any], plan: Slots, x: Tensor) -> dict[str, Any]:
        """The arguments for the rows (B, k, D) of a plan."""
        found = {name: self._gathered(name, value, plan, x) for name, value in named.items()}
        k = plan.tokens.shape[-1]
        for hint, mask in CAUSAL.items():
            if self.torch_layer and found.get(hint):  # tokens stay in order: what is causal for all is so for some
                found[mask] = torch.ones(k, k, dtype=torch.bool, device=x.device).triu(1)
        if self.padding is not None and plan.filled is not None:
            found[self.padding] = _padding(plan.filled[:, 0], found.get(self.padding))
        masks = [name for name in found if name in (self.padding, *KNOWN["per_pair"]) and found[name] is not None]
        if self.heads is not None and any(found[name].is_floating_point() for name in masks):
            found |= {name: _additive(found[name], x.dtype) for name in masks}  # torch wants masks of one kind
        return found

    def rows(self, named: dict[str, Any], batch: Tensor, x: Tensor) -> dict[str, Any]:
        """The arguments for some rows (N,) of the batch x (B, T, D): each tensor with an entry for every row is cut."""
        B, T = x.shape[:2]
        axes = {"per_pair": 3, "per_token": 2, "shared": 1, None: 1}  # what has fewer has none for rows

        def cut(kind: str | None, value: Tensor) -> Tensor:
            if kind == "per_pair" and self.heads is not None and value.ndim == 3 and len(value) == B * self.heads:
                return value.reshape(B, self.heads, *value.shape[1:])[batch].flatten(0, 1)
            own = value.ndim >= axes[kind] and len(value) == B and (kind != "per_token" or value.shape[1] == T)
            return value[batch] if own else value

        def cut_all(name: str, value: Any) -> Any:
            kind = self._kind(name, value)
            return pytree.tree_map_only(Tensor, lambda each: cut(kind, each), value)

        return {name: cut_all(name, value) for name, value in named.items()}

    def _kind(self, name: str, value: Any) -> str | None:
        return "per_token" if _is_padding_of_transformers(name, value) else self.kinds.get(name)

    def _gathered(self, name: str, value: Any, plan: Slots, x: Tensor) -> Any:
        kind = self._kind(name, value)
        if kind == "shared":
            return value
        gather = {"per_token": self._tokens, "per_pair": self._pairs, None: self._undeclared}[kind]
        return pytree.tree_map_only(Tensor, lambda each: gather(name, each, plan, x), value)

    def _tokens(self, name: str, value: Tensor, plan: Slots, x: Tensor) -> Tensor:
        B, T = x.shape[:2]
        if value.ndim >= 2 and value.shape[0] in (1, B) and value.shape[1] == T:
            whole = value
        elif value.ndim >= 1 and value.shape[0] == T:
            whole = value[None]
        else:
            raise InvalidValueError(
                f"{name} has shape {tuple(value.shape)}: per_token needs ({B}, {T}, ...), (1, {T}, ...) or ({T}, ...)"
            )
        return plan.dispatch(whole.expand(B, *whole.shape[1:]), fill=0)[:, 0]

    def _pairs(self, name: str, value: Tensor, plan: Slots, x: Tensor) -> Tensor:
        B, T = x.shape[:2]
        lead = tuple(value.shape[:-2])  # none; rows; rows and heads; or rows times heads
        if self.heads is not None and lead == (B * self.heads,):
            value = value.reshape(B, self.heads, *value.shape[-2:])
        elif value.shape[-2:] != (T, T) or len(lead) > 2 or (lead and lead[0] not in (1, B)):
            raise InvalidValueError(
                f"{name} has shape {tuple(value.shape)}: per_pair needs ({T}, {T}), ({B}, {T}, {T}), "
                f"({B}, 1, {T}, {T}) or ({B}, heads, {T}, {T})"
            )
        elif len(lead) < 2:
            value = value.reshape(*(lead or (1,)), 1, T, T)
        tokens = plan.tokens[:, 0]  # (B, k)
        pairs = value.take_along_dim(tokens[:, None, :, None], -2).take_along_dim(tokens[:, None, None, :], -1)
        if self.heads is not None:
            return pairs.expand(-1, self.heads, -1, -1).flatten(0, 1)
        return pairs[:, 0] if len(lead) == 1 else pairs

    def _undeclared(self, name: str, value: Tensor, plan: Slots, x: Tensor) -> Tensor:  # noqa: ARG002
        B, T = x.shape[:2]
        rows = value.ndim >= 2 and value.shape[0] in (1, B) and value.shape[1] == T
        if rows or (value.ndim >= 1 and value.shape[0] == T) or (value.ndim >= 2 and value.shape[-2:] == (T, T)):
            raise InvalidValueError(
                f"{name} has shape {tuple(value.shape)}, and x {B} rows of {T} tokens: say what it belongs to, by "
                f"per_token=[{name!r}], per_pair=[{name!r}] or shared=[{name!r}] of MixtureOfDepths"
            )
        return value


def _is_padding_of_transformers(name: str, value: Any) -> bool:
    """True for an `attention_mask` (B, T), which is not 0 at real tokens; those of four axes are per pair."""
    return name == "attention_mask" and isinstance(value, Tensor) and value.ndim == 2


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added: -inf where a boolean one is True."""
    if mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def _padding(filled: Tensor, given: Any) -> Tensor:
    """filled (B, k) -> padding (B, k), True (or -inf) at empty slots, joined with what was given. A row of empty slots
    alone looks at them, which are zeros: its result is thrown away, and looking at nothing would be 0/0."""
    empty = ~filled & filled.any(1, keepdim=True)
    if given is None:
        return empty
    return given.masked_fill(empty, -torch.inf if given.is_floating_point() else True)  # type: ignore[no-any-return]
