"""Links without a network: two ends in one loop that can be cut, and record the sent messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import OUTCOME_NOT_SENT
from rlctl.v1.control_pb2 import ControlRequest, ControlResponse

Out = TypeVar("Out")
In = TypeVar("In")


class MemoryLink(Generic[Out, In]):
    """An end of an in-memory link."""

    def __init__(self) -> None:
        self.peer: MemoryLink[In, Out] | None = None
        self.sent: list[Out] = []
        self.muted = False
        self._inbox: asyncio.Queue[In | None] = asyncio.Queue()
        self._ended = False

    def send(self, message: Out) -> None:
        """Deliver to the other end; a muted end loses its messages. Raises LINK_LOST once cut."""
        if self._ended or self.peer is None:
            raise Reason.LINK_LOST.error(outcome=OUTCOME_NOT_SENT)
        self.sent.append(message)
        if not self.muted:
            self.peer._inbox.put_nowait(message)

    async def receive(self) -> AsyncIterator[In]:
        """Yield messages until the link is cut."""
        while (message := await self._inbox.get()) is not None:
            yield message

    async def close(self) -> None:
        """Cut both ends."""
        self.cut()

    def cut(self) -> None:
        """Cut both ends."""
        for end in (self, self.peer):
            if end is not None and not end._ended:
                end._ended = True
                end._inbox.put_nowait(None)


def memory_link() -> tuple[MemoryLink[ControlRequest, ControlResponse], MemoryLink[ControlResponse, ControlRequest]]:
    """Return both ends: (commanding, commanded)."""
    commanding: MemoryLink[ControlRequest, ControlResponse] = MemoryLink()
    commanded: MemoryLink[ControlResponse, ControlRequest] = MemoryLink()
    commanding.peer, commanded.peer = commanded, commanding
    return commanding, commanded
