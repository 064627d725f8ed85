"""The exchange between the ranks of one stage that the digests of split tensors need.

An :class:`Exchange` is all that the model digest needs of the engine's ranks. :class:`GroupExchange` does it over any
torch process group; it needs one that nothing else uses at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import AllgatherOptions

from rlctl.contract.errors import Reason
from rlctl.weights.group.torch_errors import cause_of

_TAG = 0


class Exchange(Protocol):
    """The ranks of one stage. Every method is called by all of them, in the same order, with matching arguments."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def gather(self, part: torch.Tensor, sizes: Sequence[int], dst: int) -> list[torch.Tensor] | None:
        """Bring every rank's bytes to rank ``dst``.

        ``part`` is this rank's, 1-d uint8; ``sizes`` says how many bytes each rank has, 0 for none. Returns the parts
        by rank, on the host, at ``dst``; None elsewhere.
        """

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Bring every rank's data to all; returned by rank. Lengths may differ."""


class LocalExchange:
    """The exchange of a stage that has one rank."""

    rank = 0
    size = 1

    def gather(self, part: torch.Tensor, sizes: Sequence[int], dst: int) -> list[torch.Tensor] | None:  # noqa: ARG002
        """The part itself."""
        return [part.cpu()]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The data itself."""
        return [data]


class GroupExchange:
    """An exchange over a process group of torch (a gloo or NCCL backend, or a ``ProcessGroup``), made for it alone.

    Its methods raise GROUP_FAILED when a rank is gone or the group's timeout is over.
    """

    def __init__(self, group: Any, *, device: str = "cpu") -> None:
        """``device`` is where the group wants its tensors: the rank's own device for NCCL."""
        self._group = group
        self._device = torch.device(device)
        self.rank: int = group.rank()
        self.size: int = group.size()

    def gather(self, part: torch.Tensor, sizes: Sequence[int], dst: int) -> list[torch.Tensor] | None:
        """As :meth:`Exchange.gather`, point to point."""
        if self.rank != dst:
            if sizes[self.rank]:
                self._wait([self._group.send([part.to(self._device).contiguous()], dst, _TAG)])
            return None
        parts = [
            part if rank == dst else torch.empty(size, dtype=torch.uint8, device=self._device)
            for rank, size in enumerate(sizes)
        ]
        self._wait(
            [self._group.recv([parts[rank]], rank, _TAG) for rank, size in enumerate(sizes) if size and rank != dst]
        )
        return [received.cpu() for received in parts]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """As :meth:`Exchange.all_gather_bytes`, padded to the longest."""
        lengths = [int(length) for length in self._all_gather(torch.tensor([len(data)]))]
        longest = max(1, *lengths)
        gathered = self._all_gather(torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8))
        return [bytes(row[:length].numpy()) for row, length in zip(gathered, lengths, strict=True)]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine, device=self._device) for _ in range(self.size)]
        self._wait([self._group.allgather([rows], [mine.to(self._device)], AllgatherOptions())])
        return [row.cpu() for row in rows]

    def _wait(self, works: Sequence[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise Reason.GROUP_FAILED.error(f"the ranks of the stage could not exchange: {cause_of(error)}") from error
