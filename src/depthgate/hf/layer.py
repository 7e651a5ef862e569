"""A decoder layer of transformers that only some tokens enter: a class to put in front of the layer's own.

    layer.__class__ = type("MoD...", (RoutedLayer, type(layer)), {...})

Parameters keep their names; `depth_router`, a TopTokens, is added. A forward hook on it sees every plan.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from depthgate.errors import DepthgateError
from depthgate.hf.families import Family
from depthgate.hf.inputs import KEYWORD, Attended, Tokens, attention_keywords
from depthgate.ops.attention import without_cudnn
from depthgate.routing.causal import Threshold
from depthgate.routing.losses import causal_bce
from depthgate.routing.plan import Slots
from depthgate.routing.routers import TopTokens

if TYPE_CHECKING:
    _Layer = nn.Module
else:
    _Layer = object  # next to the layer's own class, which is a module


class DepthRouter(TopTokens):
    """A router that stays in float32 when its model is cast (`model.half()`), as it is when the model is loaded."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def kept(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            cast = tensor.is_floating_point() and new.dtype != torch.float32
            return tensor.to(new.device, torch.float32) if cast else new

        return super()._apply(kept, recurse)  # type: ignore[no-any-return, no-untyped-call]


class RoutedLayer(_Layer):
    """The router's choice, the layer's own forward on the chosen tokens, and the merge of both."""

    family: ClassVar[Family]
    names: ClassVar[tuple[str, ...]]  # arguments of the layer's own forward that come after hidden_states
    depth_router: TopTokens
    rule_loss: float

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x, keywords = hidden_states, {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens: Tokens | None = keywords.pop(KEYWORD, None)
        if tokens is None:
            raise DepthgateError("a routed layer was called by itself, and cannot see padding: call the whole model")
        store = self._store(keywords.get(self.family.cache))
        plan = self._plan(x, tokens, store)
        entering = _entering(plan, store)
        y = x if entering is None else self._through(x, entering, tokens.doc, keywords)
        if store is not None:
            store.advance(x.shape[1])
        return teach(y, plan, self.router, self.rule_loss)

    @property
    def router(self) -> TopTokens:
        """The router in use: within what PEFT puts around `depth_router`, its copy or the original."""
        outer: Any = self.depth_router
        if isinstance(outer, TopTokens):
            return outer
        copies = [outer.modules_to_save[name] for name in outer.active_adapters if name in outer.modules_to_save]
        return outer.original_module if outer.disable_adapters or not copies else copies[-1]  # type: ignore[no-any-return]

    @property
    def _attention(self) -> Any:
        return getattr(self, self.family.attention)

    def _store(self, cache: Any) -> Any:
        """This layer's part of the cache, if the model was given one."""
        if cache is None:
            return None
        from depthgate.hf.cache_transformers import store_of

        return store_of(cache, self._attention.layer_idx)

    def _plan(self, x: Tensor, tokens: Tokens, store: Any) -> Slots:
        causal = not self.training if tokens.causal is None else tokens.causal
        pos = None
        if tokens.valid is not None:
            start = 0 if store is None else store.seen
            pos = torch.where(tokens.valid, start + torch.arange(x.shape[1], device=x.device), -1)
        # The first call with a fixed store makes the room that later ones are compiled for, though no token may enter.
        fewest = int(store is not None and store.fixed and not torch.compiler.is_compiling())
        documents = {"doc": tokens.doc, "max_documents": tokens.max_documents}
        return self.depth_router(x, pos, causal, **documents, fewest_slots=fewest)  # type: ignore[no-any-return]

    def _through(self, x: Tensor, entering: "_Entering", doc: Tensor | None, keywords: dict[str, Any]) -> Tensor:
        """x with the chosen tokens taken through the layer."""
        plan, rows, attended = entering.plan, entering.rows, entering.attended
        attended = attended._replace(doc=None if doc is None else entering.pick(doc), window=self._window(attended))
        keywords |= attention_keywords(attended, self._attention.config._attn_implementation, x.dtype)
        for name in ("position_ids", "position_embeddings"):
            if keywords.get(name) is not None:
                keywords[name] = entering.pick(keywords[name])
        old = entering.pick(x)
        given = old if plan.filled is None else old.masked_fill(~plan.filled[:, 0, :, None], 0)
        with without_cudnn(x.is_cuda and attended.cached and attended.ordered):
            out = super().forward(given, **keywords)
        y = plan.merge(x if rows is None else x[rows], out[:, None], old)
        return y if rows is None else x.to(y.dtype).index_copy(0, rows, y)

    def _window(self, attended: Attended) -> int | None:
        """Number of slots that attention looks back, the token's own included; None: to the beginning. Configs may
        name a window that their family ignores."""
        told = self._attention.config if self.family.window else None
        window: int | None = getattr(self._attention, "sliding_window", getattr(told, "sliding_window", None))
        return None if window is None or (attended.length is not None and attended.length <= window) else window


def routed_layers(model: Any) -> list[RoutedLayer]:
    """The routed layers of a model, in order."""
    return [part for part in model.modules() if isinstance(part, RoutedLayer)]


class _Entering(NamedTuple):
    """The tokens that go through a layer in one call, and the keys that they attend to."""

    plan: Slots  # of the rows of the batch that are computed
    rows: Tensor | None  # (A,) these rows; None: all
    attended: Attended

    def pick(self, values: Any) -> Any:
        """The entries (A, C, ...) of the entering tokens, from values (B, T, ...) or (1, T, ...)."""
        if isinstance(values, tuple):
            return tuple(self.pick(value) for value in values)
        if values.shape[0] == 1:  # the same in all rows
            return values[0][self.plan.tokens[:, 0]]
        return self.plan.dispatch(values if self.rows is None else values[self.rows])[:, 0]


def _entering(plan: Slots, store: Any) -> _Entering | None:
    """The tokens that enter, by the kind of cache; None if no token does."""
    if plan.tokens.shape[-1] == 0:
        return None
    if store is not None and store.fixed:
        return _into_fixed(plan, store)
    rows, part = _computed_rows(plan)
    if rows is not None and len(rows) == 0:
        return None
    return _without_cache(part, rows) if store is None else _into_ragged(part, rows, store, len(plan.tokens))


def _without_cache(plan: Slots, rows: Tensor | None) -> _Entering:
    slots = _slots(plan, 0)
    return _Entering(plan, rows, Attended(slots, slots, plan.filled is None, cached=False, length=plan.scores.shape[1]))


def _into_ragged(plan: Slots, rows: Tensor | None, store: Any, batch: int) -> _Entering:
    slots, cached = _slots(plan, store.seen), store.slots is not None
    length, keys = store.seen + plan.scores.shape[1], store.expect(slots, batch, rows)
    return _Entering(plan, rows, Attended(slots, keys, plan.filled is None, cached, length))


def _into_fixed(plan: Slots, store: Any) -> _Entering:
    slots = _slots(plan, store.seen)
    attended = Attended(slots, store.expect(slots), plan.filled is None, cached=True, length=None, ordered=False)
    return _Entering(plan, None, attended)


def _slots(plan: Slots, start: Any) -> Tensor:
    """Place of each entering token in the text (A, C), -1 in empty slots; `start` is that of the call's first token."""
    slots: Tensor = start + plan.tokens[:, 0]
    return slots if plan.filled is None else torch.where(plan.filled[:, 0], slots, -1)


def _computed_rows(plan: Slots) -> tuple[Tensor | None, Slots]:
    """Indices of the batch rows with at least one routed token (None: all rows), and the plan restricted to them.

    With gradients all rows are computed, so that every parameter gets one (of 0)."""
    if plan.filled is None or torch.compiler.is_compiling():
        return None, plan
    if plan.causal and bool(plan.filled.all()):  # a causal choice has waited for the device already
        return None, plan._replace(filled=None)
    if torch.is_grad_enabled():
        return None, plan
    rows = plan.filled[:, 0].any(1).nonzero()[:, 0]
    return (None, plan) if len(rows) == len(plan.tokens) else (rows, plan.rows(rows, plan.tokens.shape[-1]))


def teach(y: Tensor, plan: Slots, router: TopTokens, weight: float) -> Tensor:
    """y, through which the causal rule learns from a plan of training, in training loops that know nothing of plans.

    It is the same tensor; when a gradient comes back through it, the rule's loss adds its own, or the threshold moves.
    That happens once a step with any kind of activation checkpointing, where a plan kept on the module would lose its
    gradient, and a counter would count twice. The rule's loss is not divided by the number of accumulated batches, and
    not multiplied by the scale of a gradient scaler: the layer does not know them. Where no gradient comes back, below
    the first weight that is trained, thresholds stay; and each process moves its own.
    """
    if plan.causal or not router.training or not torch.is_grad_enabled() or not y.requires_grad:
        return y
    if isinstance(router.rule, Threshold):
        return _WithCall.apply(y, lambda: router.update(plan))  # type: ignore[no-any-return, no-untyped-call]
    if weight and plan.decision.requires_grad:
        return _WithLoss.apply(y, weight * causal_bce(plan))  # type: ignore[no-any-return, no-untyped-call]
    return y


class _WithLoss(torch.autograd.Function):
    """y as it is; in the backward pass `loss` is added to the loss that is minimised."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class _WithCall(torch.autograd.Function):
    """y as it is; the backward pass also calls `then`. With a hook of y instead, torch 2.11 compiles a graph out of
    order."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return grad, None
