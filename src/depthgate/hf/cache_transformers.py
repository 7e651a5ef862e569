"""Layers of a transformers cache that keep the tokens which entered a routed layer, each with its slot.

A token's slot is its place in the text, padding counted. Rows hold different tokens, and different numbers of them.
`cumulative_length`, the length of a layer, is the number of tokens the model has seen. Ragged layers hold what entered;
fixed ones have a place for every token, as a compiled step needs, and save nothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

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
    """The store of a layer that grows. The slots of a row ascend, and come before places that hold nothing."""

    cumulative_length = 0
    empty_last = True  # in the slots of a call, too
    most = 0  # at least the number of entries of the fullest row: known without waiting for the device

    def expect(self, slots: Tensor, batch: int, rows: Tensor | None, all_real: bool = False) -> Tensor:
        """Make room for the tokens of the next `update`: slots (A, C), -1 for none unless they are `all_real`, of these
        rows of the batch (None: of all). Returns the slots (A, L) of the keys and values that it will return, if
        possible the same tensor."""
        C = slots.shape[1]
        if self.slots is None and rows is None and self.empty_last:  # what comes is kept as it is
            self.slots, self.most, self._next = slots, C, None
            return slots
        held = slots.new_full((batch, 0), -1) if self.slots is None else _writable(self.slots)
        row = torch.arange(batch, device=slots.device) if rows is None else rows
        count, self.most = (held >= 0).sum(1), self.most + C
        if self.most >= held.shape[1]:  # the last place is for tokens that are not kept
            # Waits for the device, once for many tokens.
            self.most = int(count.index_add(0, row, (slots >= 0).sum(1)).max())
        if self.most >= held.shape[1]:
            spare = max(1, min(_ROOM, self.most // 4 if held.shape[1] else 0))
            held = F.pad(held, (0, self.most + spare - held.shape[1]), value=-1)
        place = (count if rows is None else count[row])[:, None] + torch.arange(C, device=slots.device)
        if not all_real:
            place = torch.where(slots >= 0, place - (slots < 0).cumsum(1), held.shape[1] - 1)
        index = row[:, None].expand_as(slots), place
        self.slots, self._next = _put(held, index, slots), (rows, index)
        return self.slots[:, : self.most] if rows is None else self.slots[rows, : self.most]

    def _store(self, name: str, new: Tensor) -> Tensor:
        if self._next is None:
            setattr(self, name, new)
            return new
        (rows, index), held = self._next, _writable(getattr(self, name))
        assert self.slots is not None
        B, L = self.slots.shape
        if held.numel() == 0:
            held = new.new_zeros(B, new.shape[1], L, new.shape[3])
        elif held.shape[2] < L:
            held = F.pad(held, (0, 0, 0, L - held.shape[2]))
        held = _put(held.transpose(1, 2), index, new.transpose(1, 2)).transpose(1, 2)
        setattr(self, name, held)
        return held[:, :, : self.most] if rows is None else held[rows, :, : self.most]

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


class RaggedWindowLayer(RaggedLayer):
    """The store of a layer that looks back a window: what has left it is dropped, unless tokens may be taken back."""

    record_past = False

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def activate_past_recording(self) -> None:
        """Keep everything until the next `crop`."""
        self.record_past = True

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        if not self.record_past:
            self._drop(wait=tokens > 1)

    def _drop(self, wait: bool) -> None:
        """Drop what the next token does not look at. Waiting for the device makes the room as small as can be."""
        width = self.window - 1
        if self.slots is None or self.slots.shape[1] <= width:
            return
        kept = self.slots > self.cumulative_length - self.window
        if wait and not torch.compiler.is_compiling():
            width = min(width, int((kept & (self.slots >= 0)).sum(1).max()))
        slots = torch.where(kept, self.slots, -1)
        order = torch.where(slots < 0, torch.iinfo(slots.dtype).max, slots).argsort(1)[:, :width]
        self.slots, self.most = slots.gather(1, order), min(self.most, width)
        if self.is_initialized:
            for name in ("keys", "values"):
                held = getattr(self, name)
                index = order[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3]).to(held.device)
                setattr(self, name, held.gather(2, index))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.cumulative_length >= self.window and not self.record_past:
            what = "tokens were taken back out of a window, which has dropped those before it"
            raise DepthgateError(f"{what}: call activate_past_recording() of the cache before they are read")
        super().crop(tokens_to_remove)
        self._drop(wait=True)


def _put(held: Tensor, index: tuple[Tensor, ...], new: Tensor) -> Tensor:
    """Entries written at an index: in place, or with gradients into a copy."""
    return held.index_put(index, new) if torch.is_grad_enabled() else held.index_put_(index, new)


def _writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it was made in inference mode and that has ended."""
    if torch.compiler.is_compiling():
        return tensor
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


class DecoderLayer(RaggedLayer):
    """The store of one layer of a Decoder (see depthgate.cache), where a slot is a position: padding has none."""

    rows = 0
    padded = False
    empty_last = False

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

    def expect(self, slots: Tensor, batch: int, rows: Tensor | None, all_real: bool = False) -> Tensor:  # noqa: ARG002
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
        last of many, so these are appended to what it held before, if it held anything."""
        shown = held.narrow(dim, 0, self.max_cache_len)
        if self.is_sliding and new.shape[dim] > 1:
            shown = torch.cat((shown, new), dim) if self.cumulative_length_int else new
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
    static = {StaticLayer: FixedLayer, StaticSlidingWindowLayer: FixedWindowLayer}.get(type(layer))
    if static is None and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise DepthgateError(f"routed layers cannot use a {type(layer).__name__}: use cache_implementation='dynamic'")
    if layer.get_seq_length():
        what = f"layer {index} of the cache holds tokens that this model has not read (of another, or of prefix tuning)"
        raise DepthgateError(f"{what}: start with an empty cache; prefix tuning is not supported, prompt tuning is")
    places = getattr(layer, "max_cache_len", None)
    if static is not None:
        cache.layers[index] = static(places, sliding_window=places)
    elif type(layer) is DynamicSlidingWindowLayer and made is RaggedLayer:
        cache.layers[index] = RaggedWindowLayer(layer.sliding_window)
        cache.layers[index].record_past = getattr(layer, "record_past", False)
    else:
        cache.layers[index] = made()
    return cache.layers[index]
