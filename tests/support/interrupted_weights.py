"""Weights in whose midst something happens, to a trainer or to an engine that is taking them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlctl.weights.tensor.finite import Held, local_values
from rlctl.weights.tensor.source import WeightSource, as_source
from rlctl.weights.tensor.tensors import TensorMeta


class Interrupted:
    """Weights of a model; something happens once, half way through them.

    Attributes:
        passes: times that they were gone through, or begun to be.
    """

    def __init__(self, model: Any, happens: Callable[[], None]) -> None:
        """``happens`` is called from the thread that iterates."""
        self._source: WeightSource = as_source(model)
        self._happens = happens
        self.passes = 0

    def metas(self) -> list[TensorMeta]:
        """See :class:`rlctl.weights.tensor.source.WeightSource`."""
        return self._source.metas()

    def local(self) -> Iterator[Held] | None:
        """See :class:`rlctl.weights.tensor.finite.LocalSource`."""
        return local_values(self._source)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, and what happens."""
        self.passes += 1
        half = len(self.metas()) // 2
        for index, pair in enumerate(self._source.tensors()):
            if index == half and self.passes == 1:
                self._happens()
            yield pair
