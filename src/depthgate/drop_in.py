"""`MixtureOfDepths`: Mixture-of-Depths around other people's blocks, which add their own residual."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from depthgate.errors import InvalidValueError, check_count
from depthgate.layers import Attention, Block, MixtureOfExperts, MoD, SoftMoE, SwiGLU
from depthgate.layers.mod import SoftMoD
from depthgate.ops.rows import check_tokens, masked_positions
from depthgate.routing.gates import Gate
from depthgate.routing.plan import Plan, Plans, Slots, Soft
from depthgate.routing.routers import TopTokens


class MixtureOfDepths(nn.Module):
    """Mixture-of-Depths around any module that maps (B, T, D) to (B, T, D) and has its own residual.

        y, plans = MixtureOfDepths(nn.TransformerEncoderLayer(64, 4, batch_first=True), 64, capacity=0.25)(x)

    Of each row's n valid tokens the max(1, floor(capacity * n)) with the best scores go through `block`; every other
    token stays as it is, bit for bit. A routed token moves from x (gate 0) to the block's result (gate 1).

    With a mask or `causal=True` rows route different numbers of tokens. A block that takes a padding mask gets them in
    one call, the shorter rows filled up with zeros (`padding_keyword`). Any other block is called once for each number,
    with the rows that have it: right for every block, but more calls, none of them in a full graph, and FSDP2 must then
    shard this layer, not the block within, with `always_call=True` if it also runs without gradients.
    """

    def __init__(
        self,
        block: nn.Module,
        dim: int,
        capacity: float = 0.125,
        *,
        gate: str | Gate = "one_plus_tanh",
        rule: str | nn.Module = "scores",
        per_token: Collection[str] | None = None,
        padding_keyword: str | None = None,
        always_call: bool = False,
    ) -> None:
        """gate: one_plus_tanh, sigmoid, raw or straight_through, or a function of scores.
        rule: how `causal=True` decides: scores, predictor or threshold, or a module (see depthgate.routing.causal).
        per_token: names of the block's keywords that travel with the tokens; unless given, shapes tell.
        padding_keyword: the block's keyword for a (B, k) mask, True at padding; known for nn.TransformerEncoderLayer.
        always_call: call the block, for one empty slot, where a causal choice takes no token: processes that share its
            weights (FSDP2) would else wait for each other. With gradients that is so in any case.
        """
        super().__init__()
        self.dim = check_count(dim, "dim")
        _check_block(block)
        if isinstance(getattr(block, "_orig_mod", block), nn.TransformerEncoderLayer):  # compiled, perhaps
            padding_keyword = padding_keyword or "src_key_padding_mask"
        if padding_keyword is not None and (not isinstance(padding_keyword, str) or not padding_keyword.isidentifier()):
            raise InvalidValueError(f"padding_keyword is {padding_keyword!r}: it must be the name of a keyword")
        if per_token is not None and (
            isinstance(per_token, str | bytes)
            or not isinstance(per_token, Collection)
            or not all(isinstance(name, str) for name in per_token)
        ):
            raise InvalidValueError(f"per_token is {per_token!r}: it must be a list of names, such as ['pos']")
        self.router = TopTokens(dim, capacity, gate=gate, rule=rule)
        self.block = block
        self.per_token = None if per_token is None else frozenset({*per_token, padding_keyword or ""})
        self.padding_keyword = padding_keyword
        self.always_call = always_call

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False, **kwargs: Any
    ) -> tuple[Tensor, Plans]:
        """x (B, T, D); mask (B, T), True at real tokens; causal, decide by the causal rule instead of the top k.

        Other keywords go to the block. Tensors of shape (B, T, ...) or (1, T, ...), alone or within tuples, lists and
        dicts, are per token and travel with the tokens; everything else is handed on as it is. Where a shape may
        deceive (a memory as long as x, a (T, T) mask when B = T), name the per-token ones in `per_token`.
        """
        check_tokens(x, self.dim)
        pos = None if mask is None else masked_positions(mask, x)
        plan = self.router(x, pos, causal, fewest_slots=int(self.always_call))
        if x.numel() == 0 or plan.tokens.shape[-1] == 0:
            return x, (plan,)
        nested = isinstance(self.block, MixtureOfDepths)
        if plan.filled is None or nested or self.padding_keyword is not None:
            return self._through_block(x, plan, kwargs)
        y = x
        inner: Plans = ()
        counts = plan.filled.sum(-1)[:, 0]  # (B,)
        # Rows without any stay out. Where all are, gradients still want one call: every parameter is to get one (of 0).
        called_empty = [0] if torch.is_grad_enabled() or self.always_call else []
        for k in counts[counts > 0].unique().tolist() or called_empty:
            batch = (counts == k).nonzero()[:, 0]
            part = plan.rows(batch, max(k, 1))
            part = part._replace(filled=None) if k else part
            rows, plans = self._through_block(x[batch], part, _for_rows(kwargs, batch, x))
            y = y.to(rows.dtype).index_copy(0, batch, rows)
            inner += plans[1:]
        return y, (plan, *inner)

    def _through_block(self, x: Tensor, plan: Slots, kwargs: dict[str, Any]) -> tuple[Tensor, Plans]:
        rows = plan.dispatch(x, fill=0)[:, 0]
        moving = {k: v for k, v in kwargs.items() if self.per_token is None or k in self.per_token}
        kwargs = {**kwargs, **_for_tokens(moving, plan, x)}
        if isinstance(self.block, MixtureOfDepths):
            kwargs["causal"] = plan.causal
            kwargs["mask"] = None if plan.filled is None else plan.filled[:, 0]
        elif self.padding_keyword is not None and plan.filled is not None:
            kwargs[self.padding_keyword] = _padding(plan.filled[:, 0], kwargs.get(self.padding_keyword))
        out = self.block(rows, **kwargs)
        inner: Plans = ()
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], tuple):  # a block that routes, too
            out, inner = out
        self._check_result(out, inner, rows, plan.causal)
        return plan.merge(x, out[:, None]), (plan, *inner)

    @staticmethod
    def _check_result(out: Any, inner: Plans, rows: Tensor, causal: bool) -> None:
        if not isinstance(out, Tensor) or out.shape != rows.shape or not out.is_floating_point():
            got = f"{out.dtype} of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise InvalidValueError(
                f"block returned {got} for an input of shape {tuple(rows.shape)}: "
                "it must return a floating tensor of the same shape, with its own residual"
            )
        if not all(isinstance(plan, Plan) for plan in inner):
            raise InvalidValueError("block returned a tuple: it must return a tensor, or a tensor and a tuple of plans")
        if causal and any(isinstance(plan, Soft) or not getattr(plan, "causal", True) for plan in inner):
            raise InvalidValueError(
                "block routes by the top k, or by Soft MoE, within a causal call, which would leak the future: "
                "let it decide causally, or call without causal=True"
            )


def _check_block(block: Any) -> None:
    """Refuse what would be silently wrong: an Update (its result lacks the residual), and tokens before batch."""
    if not isinstance(block, nn.Module):
        raise InvalidValueError(f"block is a {type(block).__name__}: it must be an nn.Module")
    if isinstance(block, Block | MoD | SoftMoD | MixtureOfExperts | SoftMoE | SwiGLU | Attention):
        raise InvalidValueError(
            f"block is a {type(block).__name__}, which returns an update without the residual: use depthgate.layers.MoD"
        )
    layers = block.layers if isinstance(block, nn.TransformerEncoder) else [block]
    if any(isinstance(layer, nn.TransformerEncoderLayer) and not layer.self_attn.batch_first for layer in layers):
        raise InvalidValueError("block has batch_first=False: build it with batch_first=True, x is (B, T, dim)")


def _padding(filled: Tensor, given: Any) -> Tensor:
    """filled (B, k) -> padding (B, k), True (or -inf) at empty slots, joined with what was given. A row of empty slots
    alone looks at them, which are zeros: its result is thrown away, and looking at nothing would be 0/0."""
    empty = ~filled & filled.any(1, keepdim=True)
    if given is None:
        return empty
    if not isinstance(given, Tensor) or given.shape != filled.shape:
        got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise InvalidValueError(f"the block's padding mask is {got}: it must be a tensor of shape (batch, tokens)")
    return given.masked_fill(empty, -torch.inf if given.is_floating_point() else True)


def _per_token(value: Any, x: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.ndim >= 2
        and value.shape[0] in (1, x.shape[0])
        and value.shape[1] == x.shape[1]
    )


def _for_tokens(kwargs: dict[str, Any], plan: Slots, x: Tensor) -> dict[str, Any]:
    """Per-token tensors gathered as the tokens are; the rest untouched."""

    def gather(value: Any) -> Any:
        if not _per_token(value, x):
            return value
        return plan.dispatch(value.expand(x.shape[0], *value.shape[1:]), fill=0)[:, 0]

    return pytree.tree_map(gather, kwargs) if kwargs else kwargs


def _for_rows(kwargs: dict[str, Any], batch: Tensor, x: Tensor) -> dict[str, Any]:
    """Every tensor of the batch's length, cut to some of its rows."""

    def cut(value: Any) -> Any:
        rows = isinstance(value, Tensor) and value.ndim >= 1 and value.shape[0] == x.shape[0]
        return value[batch] if rows else value

    return pytree.tree_map(cut, kwargs) if kwargs else kwargs
