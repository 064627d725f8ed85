"""The KV cache: keys and values in a slot per token, and a table of the slots of each sequence.

The tensors exist on every rank. Only rank 0's :class:`SlotAllocator` knows the free slots; step plans carry slots to
the followers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PADDING_SLOT = 0
"""Slot that is never allocated and always zero. Padded positions read this slot, so that entries of other sequences
cannot reach the padding.
"""


@dataclass(frozen=True)
class LayerShape:
    """Storage of a token in an attention layer of this rank: heads, and sizes of keys and values.

    Attributes:
        window: number of tokens that the layer sees, including the newest token; None: all.
    """

    heads: int
    key_size: int
    value_size: int
    window: int | None = None


class KVCache:
    """Key and value tensors of this rank's layers, and the slot table.

    Attributes:
        layers: shapes of the layers.
        keys, values: for each layer ``[1 + tokens, heads, size]``; row :data:`PADDING_SLOT` is zero. Empty while
            released.
        table: ``[rows, longest]`` int64, the slot of every position of the sequence in that row.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        tokens: int,
        rows: int,
        longest: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tokens = tokens
        self.layers = list(layers)
        self._rows = rows
        self._longest = longest
        self._dtype = dtype
        self._device = device
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.table = torch.empty(0)
        self.allocate()

    def alike(self, tokens: int, sequences: int = 1) -> KVCache:
        """Return a new cache of the same layers, with room for ``sequences`` sequences of ``tokens`` tokens each."""
        return KVCache(
            self.layers,
            tokens=tokens * sequences,
            rows=sequences,
            longest=tokens,
            dtype=self._dtype,
            device=self._device,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, allocated or released."""
        per_token = sum(layer.heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return (self.tokens + 1) * per_token * self._dtype.itemsize + self._rows * self._longest * 8

    def allocate(self) -> None:
        """Allocate all tensors, zeroed. If memory runs out, allocate nothing and raise."""
        try:
            for layer in self.layers:
                shape = (self.tokens + 1, layer.heads)
                self.keys.append(torch.zeros(*shape, layer.key_size, dtype=self._dtype, device=self._device))
                self.values.append(torch.zeros(*shape, layer.value_size, dtype=self._dtype, device=self._device))
            self.table = torch.zeros(self._rows, self._longest, dtype=torch.int64, device=self._device)
        except RuntimeError:
            self.release()
            raise

    def release(self) -> None:
        """Drop the tensors; their memory goes back to the allocator."""
        self.keys, self.values, self.table = [], [], torch.empty(0)


class SlotAllocator:
    """Free slots and free rows of the table. Rank 0 only."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.tokens = tokens
        self._slots = list(range(tokens, PADDING_SLOT, -1))
        self._rows = list(range(rows - 1, -1, -1))
        self.dropped = 0
        """Slots given back since the last :meth:`take_dropped`."""

    @property
    def free(self) -> int:
        return len(self._slots)

    @property
    def used(self) -> int:
        return self.tokens - len(self._slots)

    @property
    def free_rows(self) -> int:
        return len(self._rows)

    def take(self, count: int) -> list[int]:
        """Take ``count`` slots. The caller has checked :attr:`free`."""
        if count == 1:
            return [self._slots.pop()]
        slots = self._slots[-count:]
        del self._slots[-count:]
        return slots

    def take_row(self) -> int:
        """Take a row of the table. The caller has checked :attr:`free_rows`."""
        return self._rows.pop()

    def give_back(self, slots: list[int], row: int) -> None:
        self._slots.extend(slots)
        self._rows.append(row)
        self.dropped += len(slots)

    def take_dropped(self) -> int:
        """Return the number of entries dropped since the last call."""
        dropped, self.dropped = self.dropped, 0
        return dropped
