"""Shadow copy: a second copy of a rank's weights, written during generation, then swapped in.

The parameters stay the same objects, and only the memory behind them changes. So ties, shard map and dequantisation
need no change. The copy exists from PrepareUpdate to the swap or the abort; then the unused memory of the two is freed.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import torch

from rlctl.weights.shards.load_hooks import Load, LoadHooks
from rlctl_torch.model.model import Model, refuse_bad_scales


class Shadow(LoadHooks):
    """Shadow copy of a rank's weights. The memory of each tensor is touched only by its write.

    Attributes:
        shards: slice and memory of every checkpoint tensor in the copy.
        sealed: the copy is complete.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        device = model.tensors[0].device
        with _computing(device):
            self._copies = [(tensor, torch.empty_like(tensor, requires_grad=False)) for tensor in model.tensors]
        if device.type == "cuda":
            # A step may still be computing with the former contents of this memory.
            torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        self.shards = model.shards_in({id(tensor): copy for tensor, copy in self._copies})
        self.sealed = False

    @torch.no_grad()
    def prepare_load(self, load: Load) -> None:
        """Copy the weights that the update will not write."""
        written_bytes = Counter[int]()
        if load.full:
            for shard in self.shards.shards.values():
                written_bytes[shard.local.untyped_storage().data_ptr()] += shard.local.nbytes
        for tensor, copy in self._copies:
            if written_bytes[copy.untyped_storage().data_ptr()] < copy.nbytes:
                copy.copy_(tensor)
        if self._copies and self._copies[0][1].is_cuda:
            # Other threads write over this memory, on streams of their own.
            torch.cuda.current_stream(self._copies[0][1].device).synchronize()

    def finalize_load(self, load: Load) -> None:  # noqa: ARG002
        """Raise WEIGHTS_INCOMPLETE for scales that no source can have sent."""
        refuse_bad_scales(self.shards)

    def swap(self) -> list[torch.Tensor]:
        """Make the copy the weights and return the replaced memory; engine thread only."""
        previous = [tensor.data for tensor, _ in self._copies]
        parameters = {id(tensor) for tensor, _ in self._copies}
        for tensor, copy in self._copies:
            tensor.data = copy
        for name, shard in self._model.shards.shards.items():
            if id(shard.local) not in parameters:
                shard.local = self.shards.shards[name].local
        return previous

    def memory(self) -> list[torch.Tensor]:
        """Return the copy's memory, to be freed. The copy is unusable afterwards."""
        self.shards.shards.clear()
        memory = [copy for _, copy in self._copies]
        self._copies.clear()
        return memory


def _computing(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Allocate memory inside on the stream of the steps, which will use that memory."""
    return torch.cuda.stream(torch.cuda.default_stream(device)) if device.type == "cuda" else contextlib.nullcontext()
