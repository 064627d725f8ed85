"""Where a prefill and a decode engine meet over one request, and what passes between them: messages, never tensors.

Both get the same request, with a host, a port and the number of a room. The prefill engine keeps the room; the decode
engine connects, says the number, and is told where the KV entries lie once they are computed, or why there are none. It
closes the connection when it has taken them, or needs them no more; so each side notices at once when the other one is
gone. The names are SGLang's (bootstrap_host, bootstrap_port, bootstrap_room); what goes over the wire is not.

The number is 8 bytes; the answer 8 bytes of length and a ``KvHandover``; integers are little-endian.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence

from google.protobuf.message import DecodeError

from rlctl.contract.durations import duration, seconds
from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import KvHandover
from rlctl.v1.verbs_pb2 import TensorSegment
from rlctl_torch.disaggregation.kv_handover import LEASE_S, failed

ARRIVAL_S = 10.0
"""How long one of both waits for the other's half of the request: they were sent at one time."""

_LARGEST = 64 << 20
_WORD = 8


class Room:
    """One request at the prefill engine; on its event loop, except for :meth:`offer`.

    Attributes:
        number: what the decode engine names.
        asked: somebody has.
        left: that one is gone again: it has taken the entries, or does not want them.
    """

    def __init__(self, number: int, model: str, adapter: str) -> None:
        self.number = number
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self._model = model
        self._adapter = adapter
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[KvHandover] = self._loop.create_future()

    @property
    def offered(self) -> bool:
        """Whether the entries are there."""
        return self._answer.done() and not self._answer.result().HasField("error")

    def offer(
        self, prompt: Sequence[int], version: WeightVersion, adapter_version: str, segments: Sequence[TensorSegment]
    ) -> None:
        """The entries of all tokens of the prompt but the last lie there; from any thread."""
        handover = KvHandover(
            model=self._model,
            version=version,
            adapter=self._adapter,
            adapter_version=adapter_version,
            tokens=len(prompt) - 1,
            prompt_sha256=_fingerprint(prompt[:-1]),
            segments=segments,
        )
        with contextlib.suppress(RuntimeError):  # a loop that was closed has nobody left who asks
            self._loop.call_soon_threadsafe(self._settle, handover)

    def close(self, why: RlctlError) -> None:
        """There will be no entries, if there are none yet."""
        self._settle(KvHandover(error=why.detail()))

    async def answer(self) -> KvHandover:
        """What the decode engine is told, once it is known."""
        return await asyncio.shield(self._answer)

    def _settle(self, handover: KvHandover) -> None:
        if not self._answer.done():
            self._answer.set_result(handover)


class Rooms:
    """The rooms of a prefill engine, and the server at which they are asked for; it runs from the first one on."""

    def __init__(self, address: str) -> None:
        """Take a free port there. Raises ENGINE_FAILED."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            self._socket.bind((address, 0))
            self._socket.listen(1024)
        except OSError as error:
            self._socket.close()
            raise Reason.ENGINE_FAILED.error(f"cannot listen on {address}: {error}") from error
        self._rooms: dict[int, Room] = {}
        self._opened = asyncio.Condition()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port, *_ = self._socket.getsockname()
        return host, port

    @contextlib.asynccontextmanager
    async def open(self, number: int, model: str, adapter: str) -> AsyncIterator[Room]:
        """A room for as long as the block. Raises RID_IN_USE."""
        if number in self._rooms:
            raise Reason.RID_IN_USE.error(f"room {number} is in use", field="bootstrap_room")
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, sock=self._socket)
        room = self._rooms[number] = Room(number, model, adapter)
        async with self._opened:
            self._opened.notify_all()
        try:
            yield room
        finally:
            del self._rooms[number]
            room.close(failed("the prefill engine's request has ended"))

    def close(self) -> None:
        """Nobody is answered any more; from any thread."""
        if self._server is None:
            self._socket.close()
            return
        with contextlib.suppress(RuntimeError):  # its loop was closed, and with it the server
            self._server.get_loop().call_soon_threadsafe(self._server.close)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        room: Room | None = None
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            try:
                async with asyncio.timeout(ARRIVAL_S):
                    room = await self._find(int.from_bytes(await reader.readexactly(_WORD), "little"))
                if room is None:
                    await _send(writer, KvHandover(error=failed("somebody else has asked for them").detail()))
                    return
                await self._tell(room, reader, writer)
            finally:
                if room is not None:
                    room.left.set()
                writer.close()

    async def _find(self, number: int) -> Room | None:
        """The room, which is then this caller's; None: it is another's."""
        async with self._opened:
            await self._opened.wait_for(lambda: number in self._rooms)
        room = self._rooms[number]
        if room.asked.is_set():
            return None
        room.asked.set()
        return room

    async def _tell(self, room: Room, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = asyncio.ensure_future(reader.read(1))
        answer = asyncio.ensure_future(room.answer())
        try:
            await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await _send(writer, answer.result())
                async with asyncio.timeout(LEASE_S):
                    await gone
        finally:
            for each in (gone, answer):
                each.cancel()
            await asyncio.gather(gone, answer, return_exceptions=True)


class Coming:
    """KV entries that have arrived for one request, until each of its samples has taken them."""

    def __init__(self, handover: KvHandover, model: str, adapter: str, taken: Callable[[], None]) -> None:
        """``taken`` is called, on any thread, when every sample has them, or needs them no more."""
        self._handover = handover
        self._named = model, adapter
        self._until = time.monotonic() + min((seconds(each.lease) for each in handover.segments), default=0.0)
        self._left = 0
        self._taken = taken

    @property
    def tokens(self) -> int:
        """How many: those of the prompt's first tokens."""
        return self._handover.tokens

    def check(self, prompt: Sequence[int], version: WeightVersion, adapter_version: str) -> None:
        """Raise unless a sample may go on from the entries now, with what is served now.

        STAGE_NOT_SERVING: they are of another version, so both stages are asked again a little later. HANDOVER_FAILED:
        of another prompt, model or adapter, or nobody vouches for the memory any more.
        """
        there = self._handover
        if there.version.sequence != version.sequence:
            raise Reason.STAGE_NOT_SERVING.error(
                f"the prompt's KV entries are of version {there.version.sequence}, and {version.sequence} is served"
            )
        if (there.model, there.adapter) != self._named:
            raise failed(f"they are of {(there.model, there.adapter)}, not of {self._named} (model, adapter)")
        if there.adapter_version != adapter_version:
            raise failed(f"they are of adapter version {there.adapter_version!r}, not {adapter_version!r}")
        if there.tokens != len(prompt) - 1 or there.prompt_sha256 != _fingerprint(prompt[:-1]):
            raise failed("they are of another prompt")
        if time.monotonic() >= self._until:
            raise failed("the lease on them is over")

    def message(self) -> bytes:
        """The handover for the ranks, with what is left of its leases."""
        left = KvHandover.FromString(self._handover.SerializeToString())
        for segment in left.segments:
            segment.lease.CopyFrom(duration(max(self._until - time.monotonic(), 0.0)))
        return left.SerializeToString()

    def wait_for(self, samples: int) -> None:
        """So many samples are going to take them."""
        self._left = samples + 1
        self.took()

    def took(self) -> None:
        """One sample has them, or needs them no more."""
        self._left -= 1
        if self._left == 0:
            self._taken()


@contextlib.asynccontextmanager
async def asking(host: str, port: int, number: int) -> AsyncIterator[KvHandover]:
    """What a prefill engine hands over; it is the caller's until the block ends. Raises HANDOVER_FAILED."""
    try:
        async with asyncio.timeout(ARRIVAL_S):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise failed(f"the prefill engine at {host}:{port} cannot be reached: {error}") from error
    try:
        try:
            writer.write(number.to_bytes(_WORD, "little"))
            length = int.from_bytes(await reader.readexactly(_WORD), "little")
            if length > _LARGEST:
                raise failed(f"{host}:{port} is no prefill engine of this kind")
            handover = KvHandover.FromString(await reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError, DecodeError) as error:
            raise failed(f"the prefill engine at {host}:{port} is gone, or has no such request") from error
        if handover.HasField("error"):
            raise from_detail(handover.error)
        yield handover
    finally:
        writer.close()


async def _send(writer: asyncio.StreamWriter, handover: KvHandover) -> None:
    body = handover.SerializeToString()
    writer.write(len(body).to_bytes(_WORD, "little") + body)
    await writer.drain()


def _fingerprint(tokens: Sequence[int]) -> bytes:
    """SHA-256 over token ids, 8 bytes each, little-endian."""
    return hashlib.sha256(b"".join(token.to_bytes(_WORD, "little") for token in tokens)).digest()
