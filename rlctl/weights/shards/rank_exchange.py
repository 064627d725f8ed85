"""The exchange between the ranks of a stage for the digests of divided tensors.

The model digest needs no more of the engine's ranks than an :class:`Exchange`. :class:`GroupExchange` implements the
exchange over a torch process group, which must have no other user at the same time.
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
    """The ranks of one stage. All ranks call every method, in the same order, with matching arguments."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, part: torch.Tensor, sizes: Sequence[int], dst: int) -> list[torch.Tensor] | None:
        """Bring every rank's bytes to rank ``dst``.

        ``part`` has this rank's bytes, 1-d uint8; ``sizes`` has the number of bytes of each rank, 0 for none. Returns
        the parts by rank, on the host, at ``dst``; None elsewhere.
        """

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Bring every rank's data to all ranks; return it by rank. Lengths may differ."""


class LocalExchange:
    """The exchange of a stage with a single rank."""

    rank = 0
    size = 1

    def gather(self, part: torch.Tensor, sizes: Sequence[int], dst: int) -> list[torch.Tensor] | None:  # noqa: ARG002
        return [part.cpu()]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


class GroupExchange:
    """An exchange over a torch process group (a gloo or NCCL backend, or a ``ProcessGroup``) without other users.

    The methods raise GROUP_FAILED if a rank is gone or after the group's timeout.
    """

    def __init__(self, group: Any, *, device: str = "cpu") -> None:
        """Wrap a group; ``device`` is the device of the group's tensors: the rank's own device for NCCL."""
        self._group = group
        self._device = torch.device(device)
        self.rank: int = group.rank()
        self.size: int = group.size()

    def gather(self, part: torch.Tensor, sizes: Sequence[int], dst: int) -> list[torch.Tensor] | None:
        """Gather as :meth:`Exchange.gather`, point to point."""
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
        """Gather as :meth:`Exchange.all_gather_bytes`, padded to the longest."""
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
