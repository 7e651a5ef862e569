"""A decoder layer of transformers that only some tokens enter: a class to put in front of the layer's own. Parameters
keep their names; `depth_router`, a TopTokens, is added. A forward hook on it sees every plan."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.autograd import Variable

from depthgate.errors import DepthgateError
from depthgate.hf.families import Family
from depthgate.hf.inputs import KEYWORD, Tokens, attention_keywords
from depthgate.ops.attention import without_cudnn
from depthgate.ops.rows import put_rows
from depthgate.ops.select import few_launches, top_of_documents
from depthgate.routing.causal import Threshold
from depthgate.routing.losses import causal_bce, with_loss
from depthgate.routing.plan import Slots
from depthgate.routing.routers import TopTokens
from depthgate.routing.training import warn_of_scaler

BOUND_STEPS = 64  # a bound of slots is counted in parts of all tokens
_FIRST_SPARE = 1 / 32  # of the capacity, until a pass needs more
_FEWEST_SLOTS = 16  # beyond any share: in short texts shares differ more
_Layer: Any = object  # next to the layer's own class, which is a module


class DepthRouter(TopTokens):
    """A router that stays in float32 when its model is cast (`model.half()`), as it is when the model is loaded."""

    bound = 0  # slots of a causal pass that does not wait, in 1/BOUND_STEPS of the tokens; 0: none was exceeded yet

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def kept(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            cast = tensor.is_floating_point() and new.dtype != torch.float32
            return tensor.to(new.device, torch.float32) if cast else new

        return super()._apply(kept, recurse)  # type: ignore[no-any-return, no-untyped-call]


class NoCache:
    """The store of a call without a cache: a new token looks at the others of the call."""

    cumulative_length, is_compileable = 0, False

    def expect(self, slots: Tensor, *_: Any) -> Tensor:
        """The slots of the keys."""
        return slots

    def advance(self, tokens: int) -> None:
        """Count nothing."""


class RoutedLayer(_Layer):  # type: ignore[misc]
    """The router's choice, the layer's own forward on the chosen tokens, and the merge of both."""

    family: ClassVar[Family]
    names: ClassVar[tuple[str, ...]]  # arguments of the layer's own forward that come after hidden_states
    depth_router: DepthRouter

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x, keywords = hidden_states, {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens: Tokens | None = keywords.pop(KEYWORD, None)
        if tokens is None:
            raise DepthgateError("a routed layer was called by itself, and cannot see padding: call the whole model")
        store: Any = NoCache()
        if keywords.get(self.family.cache) is not None:
            from depthgate.hf.cache_transformers import store_of

            store = store_of(keywords[self.family.cache], self._attention.layer_idx)
        (B, T, _), slots = x.shape, None
        causal = not self.training if tokens.causal is None else tokens.causal
        documents = {"doc": tokens.doc, "max_documents": tokens.max_documents}
        lacking = None if tokens.lacking is None or tokens.lacking.device != x.device else tokens.lacking
        if causal and lacking is not None and (torch.compiler.is_compiling() or few_launches(x)):
            slots = _bounded_slots(self.depth_router, T)
        elif causal and T == 1 < B:
            slots = 1
        # The first call with a static cache makes the room that later ones are compiled for, though no token may enter.
        fewest = int(store.is_compileable and not torch.compiler.is_compiling())
        rotary = keywords.get("position_embeddings") if isinstance(store, NoCache) else None
        given = {**documents, "fewest_slots": fewest, "slots": slots, "lacking": lacking, "rotary": rotary}
        plan: Slots = self.depth_router(x, tokens.pos, causal, **given)
        y = self._through(x, plan, tokens.doc, store, keywords)
        store.advance(T)
        return teach(y, plan, self.depth_router, tokens)

    @property
    def _attention(self) -> Any:
        return getattr(self, self.family.attention)

    def _through(self, x: Tensor, plan: Slots, doc: Tensor | None, store: Any, keywords: dict[str, Any]) -> Tensor:
        """x with the chosen tokens taken through the layer."""
        start, static = store.cumulative_length, store.is_compileable
        rows, plan = (None, plan) if static else _computed_rows(plan, x.shape[1])
        if plan.tokens.numel() == 0:
            return x

        def pick(values: Tensor) -> Tensor:
            """The entries (A, C, ...) of the entering tokens, from values (B, T, ...), or (1, T, ...) for all rows."""
            if values.shape[0] == 1:
                return values[0][plan.tokens[:, 0]]
            return plan.dispatch(values)[:, 0] if rows is None else values[rows]

        kind, window = self._attention.config._attn_implementation, self._window(None if static else start + x.shape[1])
        query: Tensor = plan.tokens[:, 0] if isinstance(store, NoCache) else start + plan.tokens[:, 0]
        by_itself = isinstance(store, NoCache) and kind == "sdpa" and doc is None and window is None
        if plan.filled is not None and not by_itself:
            query = query.masked_fill(~plan.filled[:, 0], -1)
        key = store.expect(query, x.shape[0], rows, plan.filled is None)
        first = None if doc is None else pick(doc)
        alone = x.shape[1] == 1 and plan.filled is None and not static  # a new token in each row: it sees all there is
        keywords |= attention_keywords(kind, query, key, first, window, x.dtype, alone)
        rotary, by_kernels = keywords.get("position_embeddings"), rows is None and few_launches(x)
        if by_kernels and plan.taken is None:
            from depthgate.ops import route_triton

            old, picked = route_triton.taken(x, plan.tokens, rotary)
        else:
            old, picked = pick(x) if plan.taken is None else plan.taken, plan.rotary
        if picked is None:
            picked = None if rotary is None else (pick(rotary[0]), pick(rotary[1]))
        if picked is not None:
            keywords["position_embeddings"] = picked
        if keywords.get("position_ids") is not None:  # not read where tokens are turned by the above
            unread = picked is not None and "flash" not in kind
            keywords["position_ids"] = None if unread else pick(keywords["position_ids"])
        given = old
        if plan.filled is not None and plan.valid is not None:  # whatever lies in padding
            given = old.masked_fill(~plan.filled[:, 0, :, None], 0)
        with without_cudnn(x.is_cuda and key is not query and not static):
            out = super().forward(given, **keywords)
        if by_kernels and plan.slot is not None and out.dtype == x.dtype:
            from depthgate.ops import route_triton

            return route_triton.merged(x, out, plan.slot.mT, plan.gates)
        # As Slots.merge, in fewer operations: rows are finite here. In half precision a difference may overflow.
        dtype = torch.promote_types(x.dtype, out.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        new = torch.lerp(given.to(wide), out.to(wide), plan.gates[:, 0, :, None].to(wide)).to(dtype)
        if plan.filled is not None:
            new = torch.where(plan.filled[:, 0, :, None], new, old)
        if rows is not None:
            return x.to(dtype).index_copy(0, rows, new)
        return put_rows(x.to(dtype), plan.tokens[:, 0], new, plan.flat)

    def _window(self, length: int | None) -> int | None:
        """Number of slots that attention looks back, the token's own included; None: to the beginning of a text that
        has this length, if known. Configs may name a window that their family ignores."""
        told = self._attention.config if self.family.window else None
        window: int | None = getattr(self._attention, "sliding_window", getattr(told, "sliding_window", None))
        return None if window is None or (length is not None and length <= window) else window


def routed_layers(model: Any) -> list[RoutedLayer]:
    """The routed layers of a model, in order."""
    return [part for part in model.modules() if isinstance(part, RoutedLayer)]


def _bounded_slots(router: Any, tokens: int) -> int:
    """Slots that a causal pass over so many tokens gets where nothing is to wait for the device: a few more than the
    capacity, or its bound, says."""
    bound: int = max(router.bound, math.ceil(BOUND_STEPS * router.capacity * (1 + _FIRST_SPARE)))
    return min(tokens, tokens * bound // BOUND_STEPS + _FEWEST_SLOTS)


def _computed_rows(plan: Slots, tokens: int) -> tuple[Tensor | None, Slots]:
    """Indices of the batch rows with a routed token (None: all rows), and the plan with their slots alone, for a single
    token a row; of several, all rows are computed. With gradients, too, so that every parameter gets one (of 0)."""
    if plan.filled is None or tokens > 1 or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None, plan
    rows = plan.filled[:, 0, 0].nonzero()[:, 0]  # waits for the device
    if len(rows) == len(plan.tokens):
        return None, plan._replace(filled=None)
    return rows, plan._replace(tokens=plan.tokens[rows], gates=plan.gates[rows], filled=None, flat=None)


def teach(y: Tensor, plan: Slots, router: TopTokens, tokens: Tokens) -> Tensor:
    """y, through which the causal rule learns from a plan of training, in training loops that know nothing of plans:
    when a gradient comes back through it, once a step with any kind of activation checkpointing, the rule's loss adds
    its own, or the threshold moves, in each process by itself."""
    if not router.training or not torch.is_grad_enabled() or not y.requires_grad:
        return y
    rule, capacity = router.rule, router.capacity  # PEFT may be around the router, and hands on those of its copy
    if isinstance(rule, Threshold):
        move = partial(rule.update, plan.scores, plan.valid, capacity)
        if plan.causal and not torch.compiler.is_compiling():
            # The choice reads the threshold, and activation checkpointing may still have to make it again.
            return with_loss(y, None, partial(Variable._execution_engine.queue_callback, move))
        return with_loss(y, None, move)
    if not tokens.rule_loss or not plan.decision.requires_grad:
        return y
    if plan.causal:  # the rule learns what the top k would have been
        best = top_of_documents(plan.scores.detach().mT, plan.valid, tokens.doc, capacity)
        plan = plan._replace(slot=torch.where(best, 0, -1).mT, causal=False)
    warn_of_scaler(y, "train in bfloat16, or by the rule 'threshold', or multiply rule_loss= of each call by its scale")
    return with_loss(y, tokens.rule_loss * causal_bce(plan))
