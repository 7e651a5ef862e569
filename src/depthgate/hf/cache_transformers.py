"""A layer of a transformers cache that keeps only the tokens which entered a routed layer, each with its slot.

A token's slot is its place in the text, padding counted, as transformers counts. Rows hold different tokens, and
different numbers of them. To everybody who asks for a length the layer tells how many tokens the model has seen.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from depthgate.errors import DepthgateError

_GROWTH = 1.25


class RaggedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values (B, H, L, d), slots (B, L), -1 where a place holds nothing; the slots of a row ascend."""

    keys: Any
    values: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen = 0  # tokens the model has seen
        self.slots: Tensor | None = None
        self._next: tuple[Tensor | None, Tensor, Tensor, Tensor, int] | None = None

    def expect(self, slots: Tensor, batch: int, rows: Tensor | None) -> Tensor:
        """Make room for tokens at `slots` (A, C), -1 for none, of these rows of the batch (None: of all), whose keys
        and values `update` is given next. Gives the slots (A, L) of what it will return."""
        if self.slots is None:
            self.slots = slots.new_full((batch, 0), -1)
        held = (self.slots >= 0).sum(1)
        row = torch.arange(batch, device=slots.device) if rows is None else rows
        real = slots >= 0
        place = held[row][:, None] + real.cumsum(1) - 1
        most = int(held.index_add(0, row, real.sum(1)).max())
        if most > self.slots.shape[1]:
            room = max(most, int(_GROWTH * self.slots.shape[1]))
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
            old = getattr(self, name)
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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.slots is not None:
            self._take(torch.arange(len(self.slots)).repeat_interleave(repeats))

    def _take(self, rows: Tensor) -> None:
        """Go on with these rows, in this order."""
        if self.slots is not None:
            self.slots = self.slots[rows.to(self.slots.device)]
        if self.is_initialized:
            rows = rows.to(self.keys.device)
            self.keys, self.values = self.keys[rows], self.values[rows]


def ragged_layer(cache: Any, index: int) -> RaggedLayer:
    """The layer of this number of whatever cache the model was given; a still empty one is exchanged for ours."""
    if not isinstance(cache, Cache):
        raise DepthgateError(f"the cache is a {type(cache).__name__}: give a transformers Cache, as DynamicCache()")
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, RaggedLayer):
        return layer
    if cache.offloading or layer.is_compileable:
        kind = "offloaded" if cache.offloading else "static"
        raise DepthgateError(f"routed layers cannot use this {kind} cache: use cache_implementation='dynamic'")
    if layer.get_seq_length():
        raise DepthgateError(f"layer {index} of the cache holds tokens of another model: start with an empty cache")
    fresh = cache.layers[index] = RaggedLayer()
    return fresh
