"""Layers of a transformers cache that keep the tokens which entered a routed layer, each with its slot.

A token's slot is its place in the text, padding counted, as transformers counts. Rows hold different tokens, and
different numbers of them. The length of a layer is the number of tokens that the model has seen.

    RaggedLayer   holds only what entered, and grows with it
    FixedLayer    a place for every token, as a compiled step needs; it saves nothing
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer, StaticSlidingWindowLayer

from depthgate.errors import DepthgateError

_Static: Any = object  # in front of static layers of transformers
_ROOM = 64  # places made at a time, or a quarter: copying all of them for every new token would take long


class RaggedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values (B, H, L, d), slots (B, L), -1 where a place holds nothing; the slots of a row ascend."""

    fixed = False
    keys: Any
    values: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen = 0  # tokens the model has seen
        self.slots: Tensor | None = None
        self._next: tuple[Tensor | None, Tensor, Tensor, Tensor, int] | None = None

    def expect(self, slots: Tensor, batch: int, rows: Tensor | None) -> Tensor:
        """Make room for the tokens of the next `update`: slots (A, C), -1 for none, of these rows of the batch (None:
        of all). Returns the slots (A, L) of the keys and values that it will return."""
        if self.slots is None:
            self.slots = slots.new_full((batch, 0), -1)
        self.slots = _writable(self.slots)
        held = (self.slots >= 0).sum(1)
        row = torch.arange(batch, device=slots.device) if rows is None else rows
        real = slots >= 0
        place = held[row][:, None] + real.cumsum(1) - 1
        most = int(held.index_add(0, row, real.sum(1)).max())
        if most > self.slots.shape[1]:
            room = most + min(_ROOM, most // 4) if self.slots.shape[1] else most
            self.slots = F.pad(self.slots, (0, room - self.slots.shape[1]), value=-1)
        index = row[:, None].expand_as(slots)[real], place[real]
        self.slots[index] = slots[real]
        self._next = (rows, real, *index, most)
        return self.slots[row, :most]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        assert self.slots is not None
        assert self._next is not None
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, real, row, place, most = self._next
        self._next = None
        shown = []
        for name, new in (("keys", key_states), ("values", value_states)):
            old = _writable(getattr(self, name))
            if old.shape[2] < self.slots.shape[1]:
                old = F.pad(old, (0, 0, 0, self.slots.shape[1] - old.shape[2]))
            put = Tensor.index_put if torch.is_grad_enabled() else Tensor.index_put_
            stored = put(old.transpose(1, 2), (row, place), new.transpose(1, 2)[real]).transpose(1, 2)
            setattr(self, name, stored)
            shown.append(stored[:, :, :most] if rows is None else stored[rows, :, :most])
        return shown[0], shown[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        assert self.slots is not None
        self.dtype, self.device = key_states.dtype, key_states.device
        for name, new in (("keys", key_states), ("values", value_states)):
            setattr(self, name, new.new_zeros(len(self.slots), new.shape[1], 0, new.shape[3]))
        self.is_initialized = True

    def advance(self, tokens: int) -> None:
        """Count tokens that the model has seen."""
        self.seen += tokens

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise DepthgateError(f"crop got {tokens_to_remove}: give the number of tokens to remove as a negative one")
        self.seen = max(0, self.seen + tokens_to_remove)
        if self.slots is not None:
            self.slots = torch.where(self.slots < self.seen, self.slots, -1)

    def reset(self) -> None:
        super().reset()
        self.seen, self.slots, self._next = 0, None, None

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.slots is not None:
            self.slots = self.slots[indices.to(self.slots.device)]
        if self.is_initialized:
            indices = indices.to(self.keys.device)
            self.keys, self.values = self.keys[indices], self.values[indices]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.slots is not None:
            self.batch_select_indices(torch.arange(len(self.slots)).repeat_interleave(repeats))


def _writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it was made in inference mode and that has ended."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


class _Fixed(_Static):  # type: ignore[misc]
    """Keys and values (B, H, M + 1, d), slots (B, M + 1), -1 where a place holds nothing. The token of slot s lies at
    s modulo M; tokens that are not kept go to M. A class to put in front of a static layer of M tokens, all or a
    window."""

    fixed = True
    cumulative_length: Tensor  # tokens the model has seen

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slots: Tensor | None = None
        self._place: Tensor | None = None

    @property
    def seen(self) -> Tensor:
        return self.cumulative_length

    def advance(self, tokens: int) -> None:
        """Count tokens that the model has seen."""
        self.cumulative_length.add_(tokens)
        if self.is_sliding:
            self.cumulative_length_int += tokens  # the number that a window's mask is made from

    def expect(self, slots: Tensor) -> Tensor:
        """Prepare for the tokens of the next `update`, as RaggedLayer does, in all rows of the batch."""
        M = self.max_cache_len
        if self.slots is None:
            self.slots = slots.new_full((len(slots), M + 1), -1)
            _stay(self.slots)
        kept = (slots >= 0) & (slots > slots.amax(1, keepdim=True) - M)
        self._place = torch.where(kept, slots % M, M)
        before = self.slots[:, :M].clone() if self._joins(slots.shape[1]) else None
        self.slots.scatter_(1, self._place, slots)
        return self.slots[:, :M] if before is None else torch.cat((before, slots), 1)

    def _joins(self, tokens: int) -> bool:
        """True if new tokens are appended to the old ones for this call: a window can only store the last of many."""
        return self.is_sliding and tokens > 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        assert self._place is not None
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place, self._place = self._place[:, None, :, None], None
        shown = []
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            before = held[:, :, : self.max_cache_len]
            joined = torch.cat((before, new), 2) if self._joins(new.shape[2]) else None
            held.scatter_(2, place.expand_as(new), new)
            shown.append(before if joined is None else joined)
        return shown[0], shown[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        for name, new in (("keys", key_states), ("values", value_states)):
            room = new.new_zeros(*new.shape[:2], self.max_cache_len + 1, new.shape[3])
            setattr(self, name, room)
            _stay(room)
        self.cumulative_length = self.cumulative_length.to(self.device)
        _stay(self.cumulative_length)
        self.is_initialized = True

    def reset(self) -> None:
        super().reset()
        if self.slots is not None:
            self.slots.fill_(-1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.slots is not None:
            self.slots = self.slots[beam_idx.to(self.slots.device)]
        super().reorder_cache(beam_idx)


class FixedLayer(_Fixed, StaticLayer):  # type: ignore[misc]
    """The store of a layer that looks at all tokens."""


class FixedWindowLayer(_Fixed, StaticSlidingWindowLayer):  # type: ignore[misc]
    """The store of a layer that looks back a window."""


def _stay(tensor: Tensor) -> None:
    """Promise to compiled code that a tensor keeps its address."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)


def store_of(cache: Any, index: int) -> Any:
    """The layer of this number of a model's cache. One of transformers that is still empty is replaced by ours."""
    if not isinstance(cache, Cache):
        raise DepthgateError(
            f"the cache is a {type(cache).__name__}: give a transformers Cache, such as DynamicCache()"
        )
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, RaggedLayer | _Fixed):
        return layer
    if cache.offloading:
        raise DepthgateError("routed layers cannot use an offloaded cache: use cache_implementation='dynamic'")
    if layer.get_seq_length():
        raise DepthgateError(f"layer {index} of the cache holds tokens of another model: start with an empty cache")
    fresh: Any = RaggedLayer()
    if type(layer) is StaticSlidingWindowLayer:
        fresh = FixedWindowLayer(layer.max_cache_len, layer.max_cache_len)
    elif type(layer) is StaticLayer:
        fresh = FixedLayer(layer.max_cache_len)
    elif layer.is_compileable:
        raise DepthgateError(f"routed layers cannot use a {type(layer).__name__}: use cache_implementation='dynamic'")
    cache.layers[index] = fresh
    return fresh
