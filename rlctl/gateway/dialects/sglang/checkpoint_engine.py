"""Answers checkpoint-engine's parameter servers on behalf of an engine's ranks.

Each parameter server binds its own ZeroMQ socket, named after its GPU. The server sends a handle of its buffer, then
one message for each filling of the buffer, and waits for a reply to each. The tensors reach the ranks as segments.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.serialized_tensors.checkpoint_engine import Ended, read_bucket, read_buffer
from rlctl.contract.serialized_tensors.handles import Tensor
from rlctl.contract.serialized_tensors.payload import Placed
from rlctl.gateway.dialects.sglang.serialized_tensors import Reader, readers_of
from rlctl.runtime.zmq_reply import ReplySocket
from rlctl.v1.fleet_pb2 import Stage

log = logging.getLogger(__name__)

FIELD = "zmq_handles"

CONNECT_S = 30.0
"""Seconds for a parameter server to bind its socket. Other parameter servers may call the engines earlier."""

MESSAGE_S = 300.0
"""Seconds for a parameter server to fill its buffer."""

LAST_S = 30.0
"""Seconds for a parameter server to end the update after an error."""

MOST_BYTES = 16 << 20
"""Limit of a message: names, dtypes and shapes of one bucket."""

_ADDRESS = re.compile(r"ipc://@(checkpoint-engine-[A-Za-z0-9._-]{1,80}\.sock)")


@dataclass(frozen=True)
class Peer:
    """A parameter server, and the rank that it feeds.

    Attributes:
        where: field with the server's address.
        name: name of the server's abstract socket.
        device: device of the rank.
    """

    where: str
    name: str
    device: str


def peers_of(handles: Mapping[str, Any], stages: Sequence[Stage]) -> tuple[list[Peer], list[Reader]]:
    """Return the parameter servers and their ranks. Handles are keyed by GPU; ranks without GPU are matched in order.

    Raises FIELD_INVALID, LENGTH_MISMATCH and NOT_COLOCATED.
    """
    readers = readers_of(stages)
    if len(handles) != len(readers):
        raise Reason.LENGTH_MISMATCH.error(
            f"{len(handles)} handles for the {len(readers)} ranks of "
            f"{', '.join(stage.registration.slot for stage in stages)}",
            field=FIELD,
            next_step="Send one handle for each rank, to each engine at its own address.",
        )
    by_gpu = {f"GPU-{worker.device.removeprefix('GPU-')}": (slot, worker) for slot, worker in readers}
    on_gpus = all(worker.device != "cpu" for _, worker in readers)
    peers, matched = [], []
    for index, (key, address) in enumerate(handles.items()):
        field = f"{FIELD}.{key[:100]}"
        match = _ADDRESS.fullmatch(address) if type(address) is str else None
        if match is None:
            raise Reason.FIELD_INVALID.error("the address is not a socket of checkpoint-engine", field=field)
        if on_gpus and key not in by_gpu:
            raise Reason.NOT_COLOCATED.error(f"the ranks are on {', '.join(sorted(by_gpu))}", field=field)
        slot, worker = by_gpu[key] if on_gpus else readers[index]
        peers.append(Peer(field, match[1], worker.device))
        matched.append((slot, worker))
    return peers, matched


class Conversation:
    """Messages to and from the parameter servers of all ranks. Leaving the context ends every exchange."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers
        self._sockets: list[ReplySocket] = []
        self._buffers: list[Tensor] = []
        self._owed = False
        """The parameter servers wait for a reply."""

    async def __aenter__(self) -> Self:
        """Connect, and receive the handles of the buffers. Raises UNREACHABLE, FIELD_INVALID."""
        connecting = [
            asyncio.create_task(
                ReplySocket.connect(f"\0{peer.name}", peer.where, most_bytes=MOST_BYTES, timeout_s=CONNECT_S)
            )
            for peer in self._peers
        ]
        await asyncio.wait(connecting)
        self._sockets = [task.result() for task in connecting if task.exception() is None]
        try:
            for task in connecting:
                task.result()
            handles = await self._receive(MESSAGE_S)
            self._buffers = [
                await asyncio.to_thread(read_buffer, data, peer.device, peer.where)
                for data, peer in zip(handles, self._peers, strict=True)
            ]
        except RlctlError as error:
            await self._end(error)
            raise
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Send an error to the parameter servers. Without an error they already have their last reply."""
        await self._end(error)

    async def buckets(self) -> AsyncIterator[list[Placed]]:
        """Yield the content of each rank's buffer, filling by filling. On resumption, confirm the tensors as read.

        After the last filling the parameter servers free their buffers, and wait for :meth:`confirm`. Raises CANCELLED
        if a parameter server ends the update, FIELD_INVALID, UNREACHABLE, DEADLINE_EXCEEDED.
        """
        while True:
            await self._reply(b"")
            messages = await self._receive(MESSAGE_S)
            placed = [
                await self._read(data, buffer, peer.where)
                for data, buffer, peer in zip(messages, self._buffers, self._peers, strict=True)
            ]
            filled = [each for each in placed if each is not None]
            if len(filled) not in (0, len(placed)):
                raise Reason.FIELD_INVALID.error("some ranks have tensors and others have none", field=FIELD)
            if not filled:
                break
            yield filled
        await self._reply(b"")
        messages = await self._receive(MESSAGE_S)
        for data, buffer, peer in zip(messages, self._buffers, self._peers, strict=True):
            if await self._read(data, buffer, peer.where) is not None:
                raise Reason.FIELD_INVALID.error("tensors come after the buffer was freed", field=peer.where)

    async def confirm(self) -> None:
        """Reply that the update is published."""
        await self._reply(b"")

    async def _read(self, data: bytes, buffer: Tensor, where: str) -> Placed | None:
        try:
            return await asyncio.to_thread(read_bucket, data, buffer, where)
        except Ended as error:
            self._owed = False
            raise Reason.CANCELLED.error(f"checkpoint-engine ends the update: {error}", field=where) from None

    async def _receive(self, timeout_s: float) -> list[bytes]:
        messages = await asyncio.gather(*(socket.receive(timeout_s) for socket in self._sockets))
        self._owed = True
        return messages

    async def _reply(self, data: bytes) -> None:
        await asyncio.gather(*(socket.reply(data) for socket in self._sockets))
        self._owed = False

    async def _end(self, error: BaseException | None) -> None:
        """Reply an error if a reply is due.

        A parameter server then sends a last message to end the update. The message must be received, or the server
        waits.
        """
        try:
            if error is not None and self._owed:
                await self._reply(str(error).encode() or b"failed")
                await self._receive(LAST_S)
        except RlctlError as lost:
            log.info("checkpoint-engine did not take the error: %s", lost)
        finally:
            for socket in self._sockets:
                socket.close()
