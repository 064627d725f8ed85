"""A second copy of a rank's weights: written while the first one generates, then put into its place.

The parameters stay the objects that they are, so that what refers to them (ties, the shard map, dequantisation) need
not know: only the memory behind them changes. The copy exists from PrepareUpdate to the swap or the abort; afterwards
one of the two is given back.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import torch

from rlctl.weights.shards.load_hooks import Load, LoadHooks
from rlctl_torch.model.model import Model, refuse_bad_scales


class Shadow(LoadHooks):
    """The copy. Its memory is touched only as it is written.

    Attributes:
        shards: which slice of which checkpoint tensor lies where in the copy.
        sealed: it is complete.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        device = model.tensors[0].device
        with _computing(device):
            self._copies = [(tensor, torch.empty_like(tensor, requires_grad=False)) for tensor in model.tensors]
        if device.type == "cuda":
            # A step may still be computing with what lay there before.
            torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        self.shards = model.shards_in({id(tensor): copy for tensor, copy in self._copies})
        self.sealed = False

    @torch.no_grad()
    def prepare_load(self, load: Load) -> None:
        """Take over what the update will not write."""
        written = Counter[int]()
        if load.full:
            for shard in self.shards.shards.values():
                written[shard.local.untyped_storage().data_ptr()] += shard.local.nbytes
        for tensor, copy in self._copies:
            if written[copy.untyped_storage().data_ptr()] < copy.nbytes:
                copy.copy_(tensor)
        if self._copies and self._copies[0][1].is_cuda:
            # What is written over it comes by other threads, on streams of their own.
            torch.cuda.current_stream(self._copies[0][1].device).synchronize()

    def finalize_load(self, load: Load) -> None:  # noqa: ARG002
        """Raise WEIGHTS_INCOMPLETE for what cannot have been meant."""
        refuse_bad_scales(self.shards)

    def swap(self) -> list[torch.Tensor]:
        """Let the copy be the weights; returns the memory of those that it replaces. In the engine thread."""
        former = [tensor.data for tensor, _ in self._copies]
        parameters = {id(tensor) for tensor, _ in self._copies}
        for tensor, copy in self._copies:
            tensor.data = copy
        for name, shard in self._model.shards.shards.items():
            if id(shard.local) not in parameters:
                shard.local = self.shards.shards[name].local
        return former

    def memory(self) -> list[torch.Tensor]:
        """The copy's memory, to be let go of; the copy is of no use any more."""
        self.shards.shards.clear()
        memory = [copy for _, copy in self._copies]
        self._copies.clear()
        return memory


def _computing(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Memory that is taken inside belongs to the stream of the steps, which will compute with it."""
    return torch.cuda.stream(torch.cuda.default_stream(device)) if device.type == "cuda" else contextlib.nullcontext()
