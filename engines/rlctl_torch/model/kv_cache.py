"""Where keys and values of computed tokens live: one slot per token, and a table of the slots of each sequence.

The tensors exist on every rank; which slot is free is known to rank 0's :class:`SlotAllocator` alone and reaches the
others in the step plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PADDING_SLOT = 0
"""Never given out and always zero: what padded positions read, so that nothing left behind by others can reach them."""


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer of this rank stores for a token: heads and sizes of keys and values.

    Attributes:
        window: how many tokens it sees, the newest among them; None: all.
    """

    heads: int
    key_size: int
    value_size: int
    window: int | None = None


class KVCache:
    """Key and value tensors of this rank's layers, and the slot table.

    Attributes:
        layers: what they are for.
        keys, values: for each layer ``[1 + tokens, heads, size]``, row :data:`PADDING_SLOT` is zero; empty lists
            while released.
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
        """Another one of the same layers, with room for sequences of so many tokens each."""
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
        """Bytes that the tensors take (or would take)."""
        per_token = sum(layer.heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return (self.tokens + 1) * per_token * self._dtype.itemsize + self._rows * self._longest * 8

    def allocate(self) -> None:
        """Allocate everything, zeroed; where there is no room for all of it, nothing."""
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
    """Which slots and which rows of the table are free. Rank 0 only."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.tokens = tokens
        self._slots = list(range(tokens, PADDING_SLOT, -1))
        self._rows = list(range(rows - 1, -1, -1))
        self.dropped = 0
        """Slots given back since :meth:`take_dropped` was last called."""

    @property
    def free(self) -> int:
        """Free slots."""
        return len(self._slots)

    @property
    def used(self) -> int:
        """Slots that hold entries."""
        return self.tokens - len(self._slots)

    @property
    def free_rows(self) -> int:
        """Rows of the table without a sequence."""
        return len(self._rows)

    def take(self, count: int) -> list[int]:
        """That many slots; the caller has checked :attr:`free`."""
        if count == 1:
            return [self._slots.pop()]
        taken = self._slots[-count:]
        del self._slots[-count:]
        return taken

    def take_row(self) -> int:
        """A row of the table; the caller has checked :attr:`free_rows`."""
        return self._rows.pop()

    def give_back(self, slots: list[int], row: int) -> None:
        """Return a sequence's slots and its row."""
        self._slots.extend(slots)
        self._rows.append(row)
        self.dropped += len(slots)

    def take_dropped(self) -> int:
        """Entries dropped since the last call."""
        dropped, self.dropped = self.dropped, 0
        return dropped
