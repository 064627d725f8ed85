"""The exchange between the ranks of a stage for the digests of divided tensors.

The model digest needs no more of the engine's ranks than an :class:`Exchange`. :class:`GroupExchange` implements the
exchange over a torch process group, which must have no other user at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import AllgatherOptions

from rlctl.contract.errors import Reason, from_detail
from rlctl.v1 import common_pb2
from rlctl.weights.group.torch_errors import cause_of
from rlctl.weights.tensor.work import Stop

_TAG = 0

NOTHING = torch.empty(0, dtype=torch.uint8)


class Exchange(Protocol):
    """The ranks of one stage. All ranks call every method, in the same order, with matching arguments."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def buffers(self, part: torch.Tensor, sizes: Sequence[int], dst: int) -> list[torch.Tensor]:
        """Return the memory for :meth:`gather`, by rank. Work of this rank alone, which may lack memory.

        ``part`` has this rank's bytes, 1-d uint8; ``sizes`` has the number of bytes of each rank, 0 for none. Ranks
        other than ``dst`` need a buffer for themselves only.
        """

    def gather(self, buffers: Sequence[torch.Tensor], dst: int) -> None:
        """Bring every rank's bytes to rank ``dst``, into its buffers."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Bring every rank's data to all ranks; return it by rank. Lengths may differ."""


class LocalExchange:
    """The exchange of a stage with a single rank."""

    rank = 0
    size = 1

    def buffers(self, part: torch.Tensor, sizes: Sequence[int], dst: int) -> list[torch.Tensor]:  # noqa: ARG002
        return [part]

    def gather(self, buffers: Sequence[torch.Tensor], dst: int) -> None:
        """Return at once: the bytes are here."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


class GroupExchange:
    """An exchange over a torch process group (a gloo or NCCL backend, or a ``ProcessGroup``) without other users.

    The methods raise GROUP_FAILED if a rank is gone or after the group's timeout.

    Attributes:
        failed: a method has raised GROUP_FAILED; other ranks may still wait for this rank.
    """

    failed = False

    def __init__(self, group: Any, *, device: str = "cpu") -> None:
        """Wrap a group; ``device`` is the device of the group's tensors: the rank's own device for NCCL."""
        self._group = group
        self._device = torch.device(device)
        self.rank: int = group.rank()
        self.size: int = group.size()

    def buffers(self, part: torch.Tensor, sizes: Sequence[int], dst: int) -> list[torch.Tensor]:
        """Allocate as :meth:`Exchange.buffers`, on the group's device."""
        if self.rank != dst:
            return [part.to(self._device).contiguous() if rank == self.rank else NOTHING for rank in range(self.size)]
        return [
            part if rank == dst else torch.empty(size, dtype=torch.uint8, device=self._device)
            for rank, size in enumerate(sizes)
        ]

    def gather(self, buffers: Sequence[torch.Tensor], dst: int) -> None:
        """Gather as :meth:`Exchange.gather`, point to point."""
        if self.rank == dst:
            awaited = [(rank, buffer) for rank, buffer in enumerate(buffers) if rank != dst and buffer.numel()]
            self._wait([partial(self._group.recv, [buffer], rank, _TAG) for rank, buffer in awaited])
        elif buffers[self.rank].numel():
            self._wait([partial(self._group.send, [buffers[self.rank]], dst, _TAG)])

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather as :meth:`Exchange.all_gather_bytes`, padded to the longest."""
        lengths = [int(length) for length in self._all_gather(torch.tensor([len(data)]))]
        if not any(lengths):
            return [b""] * self.size
        gathered = self._all_gather(torch.frombuffer(bytearray(data.ljust(max(lengths))), dtype=torch.uint8))
        return [bytes(row[:length].numpy()) for row, length in zip(gathered, lengths, strict=True)]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(tensor, device=self._device) for _ in range(self.size)]
        part = tensor.to(self._device)
        self._wait([lambda: self._group.allgather([rows], [part], AllgatherOptions())])
        return [row.cpu() for row in rows]

    def _wait(self, starts: Sequence[Callable[[], Any]]) -> None:
        """Start operations of the group, and wait for their ends."""
        try:
            for work in [start() for start in starts]:
                self._await(work)
        except RuntimeError as error:
            self.failed = True
            raise Reason.GROUP_FAILED.error(f"the ranks of the stage could not exchange: {cause_of(error)}") from error

    def _await(self, work: Any) -> None:
        """Wait for the end of an operation, for the group's own time."""
        work.wait()


def agree_to_go_on(exchange: Exchange, stop: Stop) -> None:
    """Raise the cause of any rank's stop at every rank. All ranks call together.

    A rank without a cause raises a copy of another rank's cause, with the number of that rank.
    """
    cause = stop.cause
    answers = exchange.all_gather_bytes(b"" if cause is None else cause.detail().SerializeToString())
    if cause is not None:
        raise cause
    for rank, answer in enumerate(answers):
        if answer:
            copy = from_detail(common_pb2.ErrorDetail.FromString(answer))
            copy.message = f"rank {rank}: {copy.message}"
            raise copy
