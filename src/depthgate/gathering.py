"""The other arguments of a block, gathered as its tokens are. Names decide; shapes tell forms of one kind apart."""

import inspect
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from depthgate.errors import InvalidValueError
from depthgate.ops.rows import check_per_token, check_shape
from depthgate.routing.plan import Slots

# Names that need no declaration: those of torch's transformer layers, of timm and of transformers.
PADDING = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")  # (B, T), True or -inf at padding
KNOWN = {
    "per_token": (*PADDING, "position_ids", "position_embeddings", "cache_position"),
    "per_pair": ("src_mask", "tgt_mask", "attn_mask", "attention_mask"),
    "per_query": ("memory_mask", "encoder_attention_mask"),  # pairs of a token and one of another sequence
    "per_row": ("memory", "memory_key_padding_mask", "encoder_hidden_states"),
}
CACHES = "but a routed block keeps no cache: call the model with use_cache=False, or use depthgate.hf.convert"
PLACES = "timm's positions of all patches in order: a routed block gets some of them; take a model without"
REFUSED = dict.fromkeys(("past_key_value", "past_key_values", "layer_past"), CACHES) | {"rope": PLACES}
TOKENS, PAIRS = ("per_token", "real"), ("per_pair", "per_query", "seen")  # kinds: see `Arguments.kind`
SEEN = ("attention_mask", "attn_mask")  # of four axes they say, in models of transformers and timm, who sees whom
CAUSAL = {"is_causal": "src_mask", "tgt_is_causal": "tgt_mask"}  # torch's hints, and the masks that they describe
OURS = ("mask", "keep", "causal", "return_plans")
MASKED = -1e4  # an additive mask of this or less hides a token for good
Given = dict[str, Any]  # arguments of a block, by name
Kinds = dict[str, str | None]  # what they belong to
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # of compile, checkpoints, FSDP1


class Arguments:
    """Which of a block's arguments belong to tokens, to pairs of tokens, or to neither."""

    def __init__(self, block: nn.Module, padding_keyword: str | None, **declared: Collection[str]) -> None:
        """declared: names of arguments by kind, and padding_keyword: see MixtureOfDepths."""
        inner = block
        while found := [each for name in WRAPPERS if (each := getattr(inner, name, None)) is not None]:
            inner = found[0]
        parameters = list(inspect.signature(inner.forward).parameters.values())
        star = inspect.Parameter.VAR_POSITIONAL
        self.first = "" if not parameters or parameters[0].kind is star else parameters.pop(0).name
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        self.rest = next((p.name for p in parameters if p.kind is star), None)  # *args, a tuple of that name
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        accepted = {p.name for p in parameters}
        have = ", ".join(sorted(accepted)) or "none"
        self.kinds = {name: kind for kind, names in KNOWN.items() for name in names}
        told: dict[str, str] = {}
        for kind, names in declared.items():
            if isinstance(names, str | bytes) or not isinstance(names, Collection):
                raise InvalidValueError(f"{kind} is {names!r}: it must be a list of names, such as ['pos']")
            for name in names:
                if not isinstance(name, str) or not (name in accepted or (takes_any and name not in OURS)):
                    raise InvalidValueError(f"{kind} names {name!r}: the block's arguments after the first are {have}")
                if name in OURS[2:]:
                    raise InvalidValueError(
                        f"{kind} names {name!r}, an argument of MixtureOfDepths: rename the block's"
                    )
                if name in told:
                    raise InvalidValueError(f"{name!r} is declared as {told[name]} and as {kind}: name it once")
                told[name] = kind
        self.kinds |= told
        self.told = frozenset(told)
        others = {*self.unnamed, self.rest, *(name for name, kind in told.items() if kind != "per_token")}
        if padding_keyword is not None and (
            padding_keyword in others or not (padding_keyword in accepted or takes_any)
        ):
            raise InvalidValueError(
                f"padding_keyword is {padding_keyword!r}: it must name an argument per token, of {have}"
            )
        self.padding = padding_keyword or next((name for name in PADDING if name in accepted), None)
        if self.padding is not None:
            self.kinds[self.padding] = "per_token"
        # Their heads: nn.MultiheadAttention takes masks of all rows and heads as (B * H, T, T), and in no other form.
        self.heads = next((m.num_heads for m in inner.modules() if isinstance(m, nn.MultiheadAttention)), None)
        self.torch_layer = isinstance(inner, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)

    def named(self, args: tuple[Any, ...], kwargs: Given) -> Given:
        """Positional arguments after x, and keywords, all by name."""
        named = dict(zip(self.names, args, strict=False))
        more = args[len(self.names) :]
        if more and self.rest is None:
            raise InvalidValueError(f"the block takes {len(self.names)} arguments by position after x, not {len(args)}")
        for name in kwargs:
            if name in named or name in (self.first, self.rest, *self.unnamed):
                raise InvalidValueError(f"{name} is given by name, but also, or to be given, by position: give it once")
        named |= kwargs | ({self.rest: more} if self.rest is not None and more else {})
        for name, why in REFUSED.items():
            if named.get(name) is not None and name not in self.told:
                raise InvalidValueError(f"{name} is given, {why}")
        return named

    def call(self, block: nn.Module, rows: Tensor, named: Given) -> Any:
        """The block's result; arguments that it takes by position are given so."""
        more = named.get(self.rest, ()) if self.rest is not None else ()
        first = [name for name in (self.names if more else self.unnamed) if name in named]
        others = {name: value for name, value in named.items() if name not in (*first, self.rest)}
        return block(rows, *(named[name] for name in first), *more, **others)

    def kind(self, name: str, value: Any, x: Tensor) -> str | None:
        """What an argument belongs to, in a call with x (B, T, D). Masks of transformers and timm have several forms
        under one name, and two kinds of their own: real, (B, T), not 0 at real tokens; and seen, (B, 1, T, T) or
        (B, 1, 1, T), True or 0 where a query sees a key, but in a block with an nn.MultiheadAttention False or 0."""
        (B, T), kind, undeclared = x.shape[:2], self.kinds.get(name), name not in self.told
        axes = value.ndim if isinstance(value, Tensor) else 0
        if name == "encoder_attention_mask" and axes == 2 and undeclared:
            return "per_row"  # (B, S)
        if name in SEEN and axes == 4 and undeclared:
            if name == "attention_mask" and self.heads is not None and not value.is_floating_point():
                raise InvalidValueError(
                    f"attention_mask is {value.dtype} of four axes, True at what is seen in transformers, and at what "
                    "is hidden in the nn.MultiheadAttention of this block: say per_pair=['attention_mask'], and give "
                    "padding by mask="
                )
            return "seen"
        if name != "attention_mask" or axes != 2 or name == self.padding:
            return kind
        if undeclared and value.shape in ((B, T), (1, T)) and (B == T or value.is_floating_point()):
            raise InvalidValueError(
                f"attention_mask is {value.dtype} of shape {tuple(value.shape)}, and x {B} rows of {T} tokens, which "
                f"may mean several things: say per_token=[{name!r}] if it is not 0 at real tokens, "
                f"padding_keyword={name!r} if it is True or -inf at padding, per_pair=[{name!r}] if it is (T, T)"
            )
        of_tokens = value.shape != (T, T) and not value.is_floating_point() if undeclared else kind == "per_token"
        return "real" if of_tokens else kind

    def joined_mask(self, mask: Tensor | None, named: Given, kinds: Kinds, x: Tensor) -> Tensor | None:
        """mask (B, T), True at real tokens, without those that the block's own masks leave out: its padding mask, an
        `attention_mask` (B, T) of transformers, and masks of four axes, of transformers and timm."""
        if mask is not None:
            check_per_token(mask, x, "mask", torch.bool)
        for name, value in named.items():
            real = None
            if value is not None and name in (self.padding, *PADDING):
                check_shape(value, x, name)
                real = value > MASKED if value.is_floating_point() else value == 0
            elif kinds[name] == "real":
                check_shape(value, x, name)
                real = value != 0
            elif kinds[name] == "seen" and value.shape[-1] == x.shape[1] and len(value) in (1, len(x)):
                seen = value > MASKED if value.is_floating_point() else (value != 0) != (self.heads is not None)
                real = seen.flatten(1, 2).any(1).expand(x.shape[:2])  # a key that no query sees is padding
            if real is not None:
                mask = real if mask is None else mask & real
        return mask

    def is_causal(self, named: Given) -> bool:
        """True if torch's masks, or hints, among the arguments hide all later tokens. Compiled code cannot look into a
        mask, and takes any as one that does."""
        masks = [named[mask] for mask in CAUSAL.values() if named.get(mask) is not None]
        if any(named.get(hint) for hint in CAUSAL) or (masks and torch.compiler.is_compiling()):
            return True
        hidden = [mask <= MASKED if mask.is_floating_point() else mask for mask in masks]  # (..., T, T)
        return any(bool((each | torch.ones_like(each).tril()).all()) for each in hidden)

    def takes_padding(self, kinds: Kinds) -> bool:
        """True if the block can be told of empty slots: by its padding mask, or by a mask that says who sees whom."""
        return self.padding is not None or (self.heads is None and "seen" in kinds.values())

    def gathered(self, named: Given, kinds: Kinds, plan: Slots, x: Tensor) -> Given:
        """The arguments for the rows (B, k, D) of a plan."""
        found = {name: self._gathered(name, kinds[name], value, plan, x) for name, value in named.items()}
        k = plan.tokens.shape[-1]
        for hint, mask in CAUSAL.items():
            if self.torch_layer and found.get(hint):  # tokens stay in order: what is causal for all is so for some
                found[mask] = torch.ones(k, k, dtype=torch.bool, device=x.device).triu(1)
        if found.get("memory_mask") is not None and found.get("memory_is_causal"):  # true of all queries, not of some
            found["memory_is_causal"] = False
        if plan.filled is not None:
            if self.padding is not None:
                found[self.padding] = _padding(plan.filled[:, 0], found.get(self.padding))
            elif self.heads is None:
                seen = [name for name, kind in kinds.items() if kind == "seen"]
                found |= {name: _pairs_padding(plan.filled[:, 0], found[name]) for name in seen}
        masks = [name for name in found if name in (self.padding, *KNOWN["per_pair"]) and found[name] is not None]
        hidden = {name: found[name] for name in masks if not found[name].is_floating_point()}
        if self.heads is not None and len(hidden) < len(masks):  # torch wants masks of one kind
            found |= {n: torch.zeros_like(m, dtype=x.dtype).masked_fill(m, -torch.inf) for n, m in hidden.items()}
        return found

    def rows_are_known(self, named: Given, kinds: Kinds, x: Tensor) -> bool:
        """False if it is not known whether a tensor as long as the batch has an entry for each row."""
        others = [value for name, value in named.items() if kinds[name] in ("shared", None)]
        return not any(isinstance(v, Tensor) and v.shape[:1] == x.shape[:1] for v in pytree.tree_leaves(others))

    def rows(self, named: Given, kinds: Kinds, batch: Tensor, x: Tensor) -> Given:
        """The arguments for some rows (N,) of the batch x (B, T, D); shared and undeclared ones as they are."""
        B, T = x.shape[:2]

        def cut(kind: str | None, value: Tensor) -> Tensor:
            if kind in PAIRS and self.heads and value.ndim == 3 and len(value) == B * self.heads:
                return value.reshape(B, self.heads, *value.shape[1:])[batch].flatten(0, 1)
            axes = 3 if kind in PAIRS else 2 if kind in TOKENS else 1
            each = value.ndim >= axes and len(value) == B and (kind not in TOKENS or value.shape[1] == T)
            return value[batch] if each else value

        mine = {name: value for name, value in named.items() if kinds[name] not in ("shared", None)}
        return named | {n: pytree.tree_map_only(Tensor, partial(cut, kinds[n]), value) for n, value in mine.items()}

    def _gathered(self, name: str, kind: str | None, value: Any, plan: Slots, x: Tensor) -> Any:
        B, T = x.shape[:2]
        for leaf in [] if kind == "shared" else pytree.tree_leaves(value):
            if not isinstance(leaf, Tensor):
                inside = getattr(leaf, "__dict__", {}).values()
                if kind != "per_row" and any(isinstance(each, Tensor) for each in inside):
                    what = f"{name} has tensors in a {type(leaf).__name__}"
                    raise InvalidValueError(f"{what}: unpack it, or shared=[{name!r}]")
            elif kind == "per_row" and leaf.shape[:1] != x.shape[:1]:
                text = f"{name} has shape {tuple(leaf.shape)}, and x {B} rows: per_row needs ({B}, ...)"
                raise InvalidValueError(f"{text}, or declare it otherwise, such as shared=[{name!r}]")
            elif kind is None and T > 1 and T in leaf.shape:  # of one token there is nothing to leave out
                names = f"per_token=[{name!r}], per_pair=[{name!r}], per_row=[{name!r}] or shared=[{name!r}]"
                text = f"{name} has shape {tuple(leaf.shape)}, and x {B} rows of {T} tokens: say what it belongs to"
                raise InvalidValueError(f"{text}, by {names} of MixtureOfDepths")
        if kind in TOKENS:
            return pytree.tree_map_only(Tensor, lambda each: self._tokens(name, each, plan, x), value)
        if kind in PAIRS:
            axes = (-2,) if kind == "per_query" else (-2, -1)
            return pytree.tree_map_only(Tensor, lambda each: self._pairs(name, each, plan, x, axes), value)
        return value

    def _tokens(self, name: str, value: Tensor, plan: Slots, x: Tensor) -> Tensor:
        B, T = x.shape[:2]
        of_rows = value.ndim >= 2 and value.shape[0] in (1, B) and value.shape[1] == T
        whole = value if of_rows else value[None]
        if whole.shape[1:2] != (T,):
            raise InvalidValueError(
                f"{name} has shape {tuple(value.shape)}: per_token needs ({B}, {T}, ...), (1, {T}, ...) or ({T}, ...)"
            )
        return plan.dispatch(whole.expand(B, *whole.shape[1:]), fill=0)[:, 0]

    def _pairs(self, name: str, value: Tensor, plan: Slots, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        B, T = x.shape[:2]
        lead = tuple(value.shape[:-2])  # none; rows; rows and heads; or rows times heads
        flat = self.heads is not None and lead == (B * self.heads,)
        sides = value.ndim >= 2 and all(value.shape[axis] in ((1, T) if value.ndim == 4 else (T,)) for axis in axes)
        if not sides or not (flat or (len(lead) <= 2 and lead[:1] in ((), (1,), (B,)))):
            one, what = (f"{T}, {T}", "per_pair") if len(axes) == 2 else (f"{T}, S", "it")
            told = f"({one}), ({B}, {one}), ({B}, 1, {one}) or ({B}, heads, {one})"
            raise InvalidValueError(f"{name} has shape {tuple(value.shape)}: {what} needs {told}")
        by_head = value[:, None] if len(lead) == 1 else value[(None,) * (4 - value.ndim)]
        pairs = value.reshape(B, -1, *value.shape[-2:]) if flat else by_head
        for axis in axes:
            if pairs.shape[axis] == T:
                index = plan.tokens[:, 0, :, None] if axis == -2 else plan.tokens[:, 0, None]
                pairs = pairs.take_along_dim(index[:, None], axis)
        if self.heads is not None and (name in (*KNOWN["per_pair"], *KNOWN["per_query"]) or flat):
            return pairs.expand(B, self.heads, *pairs.shape[2:]).flatten(0, 1)
        return pairs[:, 0] if len(lead) == 1 else pairs


def _pairs_padding(filled: Tensor, given: Tensor) -> Tensor:
    """filled (B, k), given (B, 1, k, k) -> given, in which no query sees an empty slot, and an empty slot itself alone:
    its result is thrown away, and looking at nothing would be 0/0."""
    itself = torch.eye(filled.shape[1], dtype=torch.bool, device=filled.device) & ~filled[:, None, :, None]
    hidden = ~filled[:, None, None] & ~itself
    if not given.is_floating_point():
        return (((given != 0) & ~hidden) | itself).to(given.dtype)
    return given.masked_fill(hidden, torch.finfo(given.dtype).min).masked_fill(itself, 0)


def _padding(filled: Tensor, given: Any) -> Tensor:
    """filled (B, k) -> padding (B, k), True (or -inf) at empty slots, joined with what was given. A row of empty slots
    alone looks at them, which are zeros: its result is thrown away, and looking at nothing would be 0/0."""
    empty = ~filled & filled.any(1, keepdim=True)
    if given is None:
        return empty
    return given.masked_fill(empty, -torch.inf if given.is_floating_point() else True)  # type: ignore[no-any-return]
