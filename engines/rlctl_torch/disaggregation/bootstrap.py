"""Bootstrap of a request between a prefill and a decode engine: messages about KV entries, never tensors.

Both engines get the same request, with host, TCP port and room number. The prefill engine keeps the room. The decode
engine connects and sends the number. The answer says where the KV entries lie once they are computed, or why there are
no entries. The decode engine closes the connection when it has taken the entries or no longer needs them. So each side
notices at once when the other side disconnects. The field names are SGLang's (bootstrap_host, bootstrap_port,
bootstrap_room); the wire format is not.

The number is 8 bytes. The answer is 8 bytes of length and a ``KvHandover``. Integers are little-endian. An answer takes
any time to begin, since the prompt may wait, but must arrive soon after its first byte. TCP's keepalive ends the wait
for a host that is gone.
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
from rlctl.runtime.keepalive import keep_alive
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import KvHandover
from rlctl.v1.verbs_pb2 import TensorSegment
from rlctl_torch.disaggregation.kv_handover import LEASE_S, failed

ARRIVAL_S = 10.0
"""Seconds that an engine waits for the other engine's half of the request. The caller sends both halves at once."""

_LARGEST = 64 << 20
"""Maximum bytes of an answer. It describes tensors, and holds none."""

_WORD = 8


class Room:
    """One request at the prefill engine. All methods except :meth:`offer` belong to the event loop.

    Attributes:
        claimed: set once a decode engine has sent the number of the room.
        departed: set once that decode engine has disconnected. The entries are taken or not needed.
    """

    def __init__(self, number: int, model: str, adapter: str) -> None:
        self.number = number
        self.claimed = asyncio.Event()
        self.departed = asyncio.Event()
        self._model = model
        self._adapter = adapter
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[KvHandover] = self._loop.create_future()

    @property
    def offered(self) -> bool:
        return self._answer.done() and not self._answer.result().HasField("error")

    def offer(
        self, prompt: Sequence[int], version: WeightVersion, adapter_version: str, segments: Sequence[TensorSegment]
    ) -> None:
        """Answer that ``segments`` hold the entries of all prompt tokens but the last; from any thread."""
        handover = KvHandover(
            model=self._model,
            version=version,
            adapter=self._adapter,
            adapter_version=adapter_version,
            tokens=len(prompt) - 1,
            prompt_sha256=_fingerprint(prompt[:-1]),
            segments=segments,
        )
        with contextlib.suppress(RuntimeError):  # a closed loop has no caller
            self._loop.call_soon_threadsafe(self._settle, handover)

    def close(self, why: RlctlError) -> None:
        """Answer with an error, unless there is an answer already."""
        self._settle(KvHandover(error=why.detail()))

    async def answer(self) -> KvHandover:
        """Wait for the answer to the decode engine."""
        return await asyncio.shield(self._answer)

    def _settle(self, handover: KvHandover) -> None:
        if not self._answer.done():
            self._answer.set_result(handover)


class Rooms:
    """Rooms of a prefill engine, and the server that answers for the rooms. The server starts with the first room."""

    def __init__(self, address: str) -> None:
        """Bind a free TCP port of ``address``. Raises ENGINE_FAILED."""
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
        host, port, *_ = self._socket.getsockname()
        return host, port

    @contextlib.asynccontextmanager
    async def open(self, number: int, model: str, adapter: str) -> AsyncIterator[Room]:
        """Keep a room open for the duration of the block. Raises RID_IN_USE."""
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
        """Answer no further decode engine; from any thread."""
        if self._server is None:
            self._socket.close()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the server with it
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
                    room.departed.set()
                writer.close()

    async def _find(self, number: int) -> Room | None:
        """Return the room, claimed for this caller, or None if the room is claimed already."""
        async with self._opened:
            await self._opened.wait_for(lambda: number in self._rooms)
        room = self._rooms[number]
        if room.claimed.is_set():
            return None
        room.claimed.set()
        return room

    async def _tell(self, room: Room, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        disconnect = asyncio.ensure_future(reader.read(1))
        answer = asyncio.ensure_future(room.answer())
        try:
            await asyncio.wait({disconnect, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await _send(writer, answer.result())
                async with asyncio.timeout(LEASE_S):
                    await disconnect
        finally:
            for future in (disconnect, answer):
                future.cancel()
            await asyncio.gather(disconnect, answer, return_exceptions=True)


class Coming:
    """KV entries that have arrived for a request, until every sample has taken the entries."""

    def __init__(self, handover: KvHandover, model: str, adapter: str, on_received: Callable[[], None]) -> None:
        """``on_received`` is called, on any thread, when every sample has taken the entries or needs no entries."""
        self._handover = handover
        self._named = model, adapter
        self._until = time.monotonic() + min((seconds(segment.lease) for segment in handover.segments), default=0.0)
        self._left = 0
        self._on_received = on_received

    @property
    def tokens(self) -> int:
        """Number of tokens with entries, from the start of the prompt."""
        return self._handover.tokens

    def check(self, prompt: Sequence[int], version: WeightVersion, adapter_version: str) -> None:
        """Raise unless a sample may continue from the entries at the version served now.

        STAGE_NOT_SERVING: the entries' version is not served, so both stages are tried again a little later.
        HANDOVER_FAILED: prompt, model, adapter or adapter version differ, or the lease on the entries is over.
        """
        handover = self._handover
        if handover.version.sequence != version.sequence:
            raise Reason.STAGE_NOT_SERVING.error(
                f"the prompt's KV entries are of version {handover.version.sequence}, and {version.sequence} is served"
            )
        if (handover.model, handover.adapter) != self._named:
            raise failed(f"they are of {(handover.model, handover.adapter)}, not of {self._named} (model, adapter)")
        if handover.adapter_version != adapter_version:
            raise failed(f"they are of adapter version {handover.adapter_version!r}, not {adapter_version!r}")
        if handover.tokens != len(prompt) - 1 or handover.prompt_sha256 != _fingerprint(prompt[:-1]):
            raise failed("they are of another prompt")
        if time.monotonic() >= self._until:
            raise failed("the lease on them is over")

    def message(self) -> bytes:
        """Serialise the handover for the ranks, with the remaining time of its leases."""
        handover = KvHandover.FromString(self._handover.SerializeToString())
        for segment in handover.segments:
            segment.lease.CopyFrom(duration(max(self._until - time.monotonic(), 0.0)))
        return handover.SerializeToString()

    def wait_for(self, samples: int) -> None:
        """Set the number of samples that will take the entries."""
        self._left = samples + 1
        self.took()

    def took(self) -> None:
        """Count a sample that has taken the entries or needs no entries."""
        self._left -= 1
        if self._left == 0:
            self._on_received()


@contextlib.asynccontextmanager
async def asking(host: str, port: int, number: int) -> AsyncIterator[KvHandover]:
    """Yield the handover of a prefill engine. The entries belong to the caller until the block ends.

    Raises HANDOVER_FAILED.
    """
    try:
        async with asyncio.timeout(ARRIVAL_S):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, ValueError, TimeoutError) as error:  # ValueError: a name that cannot be encoded
        raise failed(f"the prefill engine at {host}:{port} cannot be reached: {error}") from error
    try:
        try:
            keep_alive(writer.get_extra_info("socket"))
            writer.write(number.to_bytes(_WORD, "little"))
            first = await reader.readexactly(1)
            async with asyncio.timeout(ARRIVAL_S):
                length = int.from_bytes(first + await reader.readexactly(_WORD - 1), "little")
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
    try:
        async with asyncio.timeout(ARRIVAL_S):
            await writer.drain()
    except TimeoutError:
        writer.transport.abort()  # a close would wait for the reader
        raise


def _fingerprint(tokens: Sequence[int]) -> bytes:
    """Return the SHA-256 of token ids, 8 bytes each, little-endian."""
    return hashlib.sha256(b"".join(token.to_bytes(_WORD, "little") for token in tokens)).digest()
