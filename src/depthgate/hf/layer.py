"""A decoder layer of transformers that only some tokens enter: a class to put in front of the layer's own.

    layer.__class__ = type("MoD...", (RoutedLayer, type(layer)), {...})

Parameters keep their names; `depth_router`, a TopTokens, is added. A forward hook on it sees every plan.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from depthgate.errors import DepthgateError
from depthgate.hf.families import Family
from depthgate.hf.inputs import KEYWORD, Tokens
from depthgate.hf.masks import Seen, as_asked
from depthgate.hf.rule_loss import teach
from depthgate.ops.attention import without_cudnn
from depthgate.routing.plan import Slots
from depthgate.routing.routers import TopTokens

if TYPE_CHECKING:
    _Layer = nn.Module
else:
    _Layer = object  # beside the layer's own class, which is a module


class DepthRouter(TopTokens):
    """A router that stays in float32 whatever its model is cast to (`model.half()`): as it is loaded again."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def kept(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            cast = tensor.is_floating_point() and new.dtype != torch.float32
            return tensor.to(new.device, torch.float32) if cast else new

        return super()._apply(kept, recurse)  # type: ignore[no-any-return, no-untyped-call]


class RoutedLayer(_Layer):
    """The router's choice, the layer's own forward on the rows it chose, and the merge of both."""

    family: ClassVar[Family]
    names: ClassVar[tuple[str, ...]]  # of the arguments of the layer's own forward that come after hidden_states
    depth_router: TopTokens
    rule_loss: float

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = hidden_states
        call = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens: Tokens | None = call.pop(KEYWORD, None)
        if tokens is None:
            raise DepthgateError("a routed layer was called by itself, and cannot see padding: call the whole model")
        store = self._store(call.get(self.family.cache))
        start = 0 if store is None else store.seen
        causal = not self.training if tokens.causal is None else tokens.causal
        pos = None
        if tokens.valid is not None:
            pos = torch.where(tokens.valid, start + torch.arange(x.shape[1], device=x.device), -1)
        # A fixed store is compiled for: its first call makes the room, though no token may enter.
        fewest = int(store is not None and store.fixed and not torch.compiler.is_compiling())
        documents = {"doc": tokens.doc, "max_documents": tokens.max_documents}
        plan = self.depth_router(x, pos, causal, **documents, fewest_slots=fewest)
        y = x if plan.tokens.shape[-1] == 0 else self._through(x, plan, start, tokens.doc, store, call)
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

    def _store(self, cache: Any) -> Any:
        if cache is None:
            return None
        from depthgate.hf.cache_transformers import store_of

        return store_of(cache, self._attention.layer_idx)

    @property
    def _attention(self) -> Any:
        return getattr(self, self.family.attention)

    def _through(
        self, x: Tensor, plan: Slots, start: Any, doc: Tensor | None, store: Any, call: dict[str, Any]
    ) -> Tensor:
        """x with the chosen tokens taken through the layer."""
        fixed = store is not None and store.fixed
        rows, part = (None, plan) if fixed else self._entering(plan)
        if rows is not None and len(rows) == 0:
            return x
        mine = x if rows is None else x[rows]

        def chosen(values: Any) -> Any:
            """Of something a token has, (B, T, ...) or (1, T, ...), that of the chosen ones."""
            if isinstance(values, tuple):
                return tuple(chosen(value) for value in values)
            if values.shape[0] == 1:  # the same in all rows
                return values[0][part.tokens[:, 0]]
            return part.dispatch(values if rows is None else values[rows])[:, 0]

        slots = start + part.tokens[:, 0]
        if part.filled is not None:
            slots = torch.where(part.filled[:, 0], slots, -1)
        before = store is not None and store.slots is not None
        keys = slots if store is None else store.expect(slots, x.shape[0], rows)
        window = self._window()
        if window is not None and not fixed and start + x.shape[1] <= window:
            window = None  # it reaches back to the beginning
        plain = part.filled is None and doc is None and window is None and not before and not fixed
        seen = Seen(slots, keys, None if doc is None else chosen(doc), window, plain, not fixed)
        call |= as_asked(seen, self._attention.config._attn_implementation, x.dtype)
        for name in ("position_ids", "position_embeddings"):
            if call.get(name) is not None:
                call[name] = chosen(call[name])
        old = part.dispatch(mine)[:, 0]
        given = old if part.filled is None else old.masked_fill(~part.filled[:, 0, :, None], 0)
        with without_cudnn(x.is_cuda and before and not fixed):
            out = super().forward(given, **call)
        y = part.merge(mine, out[:, None], old)
        return y if rows is None else x.to(y.dtype).index_copy(0, rows, y)

    @staticmethod
    def _entering(plan: Slots) -> tuple[Tensor | None, Slots]:
        """The rows of the batch that anybody of enters (None: all), and their plan. With gradients all rows are
        computed, so that every parameter gets one (of 0)."""
        if plan.filled is None or torch.compiler.is_compiling():
            return None, plan
        if plan.causal and bool(plan.filled.all()):  # whoever decides causally has waited for the device already
            return None, plan._replace(filled=None)
        if torch.is_grad_enabled():
            return None, plan
        rows = plan.filled[:, 0].any(1).nonzero()[:, 0]
        return (None, plan) if len(rows) == len(plan.tokens) else (rows, plan.rows(rows, plan.tokens.shape[-1]))

    def _window(self) -> int | None:
        """How many slots back attention looks, its own among them; None: all. Configs may name a window that their
        family does not look at."""
        attention = self._attention
        told = attention.config if self.family.window else None
        window: int | None = getattr(attention, "sliding_window", getattr(told, "sliding_window", None))
        return window
