"""The key/value cache of a model part: per layer, slot and position some vectors.

What they are is the attention's business: `fields` name heads and width of each (keys and values
of grouped-query attention, or a latent and a rotary key that all heads share).  A slot is one
sequence; its positions lie together, so a step attends to plain views of the cache.
Invariant the tests check: growing, shrinking and copying keep what is kept.

Legend: L layers, N slots, H heads, S positions of a slot, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.rollout.step_plan import Copy


class CacheField(NamedTuple):
    """One kind of vector that a layer keeps for every position."""

    name: str
    heads: int
    """On this rank."""
    width: int


class SlotCache:
    """Cache tensors [L, N, H, S, D], one for each field; empty until the first `resize`."""

    def __init__(
        self,
        fields: Sequence[CacheField],
        *,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.fields = tuple(fields)
        self.num_slots = self.capacity = 0
        self._layout = (num_layers, dtype, device)
        self._tensors: list[Tensor] = []
        self._layers: list[tuple[Tensor, ...]] = []
        self.drop()

    @property
    def bytes_per_position(self) -> int:
        """Memory of one position of one sequence, all layers of this rank."""
        num_layers, dtype, _ = self._layout
        return num_layers * dtype.itemsize * sum(f.heads * f.width for f in self.fields)

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Views [N, H, S, D] of one layer's part, one for each field."""
        return self._layers[index]

    def drop(self) -> None:
        """Forget everything and give the memory back."""
        self._replace(0, 0, keep=False)

    def resize(self, num_slots: int, capacity: int) -> None:
        """Make room for so many slots and positions; what fits into the new size is kept."""
        if (num_slots, capacity) != (self.num_slots, self.capacity):
            self._replace(num_slots, capacity, keep=True)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy the beginnings of slots, one after the other."""
        for source, target, length in copies:
            for tensor in self._tensors:
                tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def _replace(self, num_slots: int, capacity: int, *, keep: bool) -> None:
        num_layers, dtype, device = self._layout
        old = self._tensors
        # Zeros, as a masked position still takes part with weight 0, and 0 * NaN is NaN.
        self._tensors = [
            torch.zeros(
                num_layers, num_slots, f.heads, capacity, f.width, dtype=dtype, device=device
            )
            for f in self.fields
        ]
        if keep:
            slots, length = min(num_slots, self.num_slots), min(capacity, self.capacity)
            for new, tensor in zip(self._tensors, old, strict=True):
                new[:, :slots, :, :length] = tensor[:, :slots, :, :length]
        self.num_slots, self.capacity = num_slots, capacity
        self._layers = [tuple(t[i] for t in self._tensors) for i in range(num_layers)]
