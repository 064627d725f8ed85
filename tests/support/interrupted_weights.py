"""Weights with an event half-way through, for a trainer or a receiving engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlctl.weights.tensor.finite import Held, local_values
from rlctl.weights.tensor.source import WeightSource, as_source
from rlctl.weights.tensor.tensors import TensorMeta


class Interrupted:
    """Weights of a model, with a callback half-way through the first pass.

    Attributes:
        passes: number of passes begun.
    """

    def __init__(self, model: Any, happens: Callable[[], None]) -> None:
        """``happens``: called from the iterating thread."""
        self._source: WeightSource = as_source(model)
        self._happens = happens
        self.passes = 0

    def metas(self) -> list[TensorMeta]:
        return self._source.metas()

    def local(self) -> Iterator[Held] | None:
        return local_values(self._source)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, with the callback in between."""
        self.passes += 1
        half = len(self.metas()) // 2
        for index, pair in enumerate(self._source.tensors()):
            if index == half and self.passes == 1:
                self._happens()
            yield pair
