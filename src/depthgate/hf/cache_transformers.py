"""Layers of a transformers cache that keep the tokens which entered a routed layer, each with its slot.

A token's slot is its place in the text, padding counted, as transformers counts. Rows hold different tokens, and
different numbers of them. `cumulative_length`, the length of a layer, is the number of tokens the model has seen.

    RaggedLayer                     holds only what entered, and grows with it
    FixedLayer, FixedWindowLayer    a place for every token, as a compiled step needs; they save nothing
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer, StaticSlidingWindowLayer

from depthgate.cache import RowsOfCache
from depthgate.errors import DepthgateError

_Layer: Any = object  # in front of layers of transformers
_ROOM = 64  # places made at a time, or a quarter: copying all of them for every new token would take long


class _Slotted(_Layer):  # type: ignore[misc]
    """Keys and values (B, H, L, d) and their slots (B, L), -1 where a place holds nothing."""

    keys: Any
    values: Any
    slots: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._store("keys", key_states), self._store("values", value_states)

    def advance(self, tokens: int) -> None:
        """Count tokens that the model has seen."""
        self.cumulative_length += tokens
        if self.is_sliding:
            self.cumulative_length_int += tokens  # the number that a window's mask is made from

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.slots is not None:
            self.slots = self.slots[indices.to(self.slots.device)]
        if self.is_initialized:
            indices = indices.to(self.keys.device)
            self.keys, self.values = self.keys[indices], self.values[indices]

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.slots is not None:
            self.batch_select_indices(torch.arange(len(self.slots)).repeat_interleave(repeats))


class RaggedLayer(_Slotted, DynamicLayer):  # type: ignore[misc]
    """The store of a layer that grows. The slots of a row ascend."""

    cumulative_length = 0

    def expect(self, slots: Tensor, batch: int, rows: Tensor | None) -> Tensor:
        """Make room for the tokens of the next `update`: slots (A, C), -1 for none, of these rows of the batch (None:
        of all). Returns the slots (A, L) of the keys and values that it will return, if possible the same tensor."""
        fresh = self.slots is None
        held = slots.new_full((batch, 0), -1) if self.slots is None else _writable(self.slots)
        row = torch.arange(batch, device=slots.device) if rows is None else rows
        real, count = slots >= 0, (held >= 0).sum(1)
        place = count[row][:, None] + real.cumsum(1) - 1
        most = int(count.index_add(0, row, real.sum(1)).max())
        if most > held.shape[1]:
            spare = min(_ROOM, most // 4) if held.shape[1] else 0
            held = F.pad(held, (0, most + spare - held.shape[1]), value=-1)
        index = row[:, None].expand_as(slots)[real], place[real]
        held[index] = slots[real]
        self.slots, self._next = held, (rows, real, index, most)
        return slots if fresh and most == slots.shape[1] else held[row, :most]

    def _store(self, name: str, new: Tensor) -> Tensor:
        rows, real, index, most = self._next
        held = _writable(getattr(self, name))
        assert self.slots is not None
        B, L = self.slots.shape
        if held.numel() == 0:
            held = new.new_zeros(B, new.shape[1], L, new.shape[3])
        elif held.shape[2] < L:
            held = F.pad(held, (0, 0, 0, L - held.shape[2]))
        put = Tensor.index_put if torch.is_grad_enabled() else Tensor.index_put_
        held = put(held.transpose(1, 2), index, new.transpose(1, 2)[real]).transpose(1, 2)
        setattr(self, name, held)
        return held[:, :, :most] if rows is None else held[rows, :, :most]

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise DepthgateError(f"crop got {tokens_to_remove}: give the number of tokens to remove as a negative one")
        self.cumulative_length = max(0, self.cumulative_length + tokens_to_remove)
        if self.slots is not None:
            self.slots = torch.where(self.slots < self.cumulative_length, self.slots, -1)

    def reset(self) -> None:
        super().reset()
        self.slots, self.cumulative_length = None, 0


def _writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it was made in inference mode and that has ended."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


class DecoderLayer(RaggedLayer):
    """The store of one layer of a Decoder (see depthgate.cache), where a slot is a position: padding has none."""

    rows = 0
    padded = False

    def append(self, k: Tensor, v: Tensor, pos: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        self.expect(pos, self.rows, rows)
        k, v = self.update(k, v)
        assert self.slots is not None
        return k, v, self.slots[slice(None) if rows is None else rows, : k.shape[2]]

    def at(self, rows: Tensor) -> RowsOfCache:
        return RowsOfCache(self, rows)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.padded:
            raise DepthgateError("a cache of rows with padding cannot be cropped: give prompts without padding")
        super().crop(tokens_to_remove)


class _Fixed(_Slotted):
    """A store of M + 1 places. The token of slot s lies at s modulo M; tokens that are not kept go to place M."""

    def expect(self, slots: Tensor, batch: int, rows: Tensor | None) -> Tensor:  # noqa: ARG002
        """Prepare for the tokens of the next `update`, as RaggedLayer does, in all rows of the batch."""
        M = self.max_cache_len
        if self.slots is None:
            self.slots = slots.new_full((batch, M + 1), -1)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.slots)  # as transformers does with keys and values
        kept = (slots >= 0) & (slots > slots.amax(1, keepdim=True) - M)
        self._place = torch.where(kept, slots % M, M)
        return self._write(self.slots, slots, self._place, 1)

    def _store(self, name: str, new: Tensor) -> Tensor:
        return self._write(getattr(self, name), new, self._place[:, None, :, None].expand_as(new), 2)

    def _write(self, held: Tensor, new: Tensor, place: Tensor, dim: int) -> Tensor:
        """Write new entries along a dimension, and return those that the call looks at. A window can store only the
        last of many, so these are appended to what it held before."""
        shown = held.narrow(dim, 0, self.max_cache_len)
        if self.is_sliding and new.shape[dim] > 1:
            shown = torch.cat((shown, new), dim)
        held.scatter_(dim, place, new)
        return shown

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.max_cache_len += 1
        super().lazy_initialization(key_states, value_states)
        self.max_cache_len -= 1

    def reset(self) -> None:
        super().reset()
        if self.slots is not None:
            self.slots.fill_(-1)


class FixedLayer(_Fixed, StaticLayer):  # type: ignore[misc]
    """The store of a layer that looks at all tokens."""


class FixedWindowLayer(_Fixed, StaticSlidingWindowLayer):  # type: ignore[misc]
    """The store of a layer that looks back a window."""


def decoder_stores(cache: Any, layers: int, pos: Any) -> list[DecoderLayer]:
    """The layers of a Decoder's cache, for new tokens at these positions (B, T)."""
    stores = [store_of(cache, i, DecoderLayer) for i in range(layers)]
    for store in stores:
        store.rows, store.padded = len(pos), store.padded or bool((pos < 0).any())
        store.advance(pos.shape[1])
    return stores


def store_of(cache: Any, index: int, made: type[RaggedLayer] = RaggedLayer) -> Any:
    """The layer of this number of a model's cache. One of transformers that is still empty is replaced by ours."""
    if not isinstance(cache, Cache):
        raise DepthgateError(f"the cache is a {type(cache).__name__}: give one of transformers, such as DynamicCache()")
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, _Slotted):
        return layer
    ours = {StaticLayer: FixedLayer, StaticSlidingWindowLayer: FixedWindowLayer}.get(type(layer))
    if cache.offloading or (layer.is_compileable and ours is None):
        what = "an offloaded cache" if cache.offloading else f"a {type(layer).__name__}"
        raise DepthgateError(f"routed layers cannot use {what}: use cache_implementation='dynamic'")
    if layer.get_seq_length():
        raise DepthgateError(f"layer {index} of the cache holds tokens of another model: start with an empty cache")
    places = getattr(layer, "max_cache_len", None)
    cache.layers[index] = made() if ours is None else ours(places, sliding_window=places)
    return cache.layers[index]
