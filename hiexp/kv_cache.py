"""The keys and values of `TorchEngine`: rows of different lengths in fixed slots, handed to any transformers model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache


class SlotCache(Cache):
    """Keys and values [slots, heads, capacity, dim] per layer, where each row has its own length.

    `aim` says, before a forward, which rows it reads, where the new tokens go and how much of the cache is in use.
    The last place of every slot is `trash`: padding writes there and nothing reads it.
    """

    def __init__(self, device: torch.device) -> None:
        self.layers = []  # `Cache` reads per-layer objects here; this class keeps whole tensors instead
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.slots, self.capacity, self.device = 0, 0, device

    @property
    def trash(self) -> int:
        return self.capacity - 1

    def reserve(self, slots: int, length: int) -> None:
        """Room for `slots` rows of `length` tokens; contents are kept."""
        if slots <= self.slots and length < self.capacity:
            return
        old_slots, used = self.slots, self.capacity
        self.slots = max(slots, self.slots)
        if length >= self.capacity:  # a quarter to spare: growing copies everything
            self.capacity = (length * 5 // 4 // 64 + 1) * 64
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                store[layer] = self._allocate(old)
                store[layer][:old_slots, :, :used] = old[:, :, :used]

    def aim(self, rows: slice | Tensor, index: Tensor, places: Tensor, length: int) -> None:
        """rows: what is read; index [n]: the same rows for writing; places [n, S]: where; length: L, all included."""
        self._rows, self._index, self._places, self._length = rows, index[:, None], places, length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self.keys):
            self.keys.append(self._allocate(key_states))
            self.values.append(self._allocate(value_states))
        read = []
        for store, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            store[self._index, :, self._places] = new.transpose(1, 2)
            read.append(store[self._rows, :, : self._length])
        return read[0], read[1]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Row `from` over row `to`, for each (from, to)."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.device).T
            for store in (*self.keys, *self.values):
                store[targets] = store[sources]

    def swap(self, left: Sequence[int], right: Sequence[int]) -> None:
        if left:
            one, other = torch.tensor(left, device=self.device), torch.tensor(right, device=self.device)
            for store in (*self.keys, *self.values):
                store[torch.cat([one, other])] = store[torch.cat([other, one])]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros((self.slots, like.shape[1], self.capacity, like.shape[3]))
