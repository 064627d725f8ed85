"""The Link port over gRPC: both ends of a bidirectional stream, Control by default."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from rlctl.contract.errors import Reason
from rlctl.ports import REFUSED
from rlctl.transport.channel import bearer, open_channel
from rlctl.transport.status import from_grpc
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.diagnosis import handshake_failure
from rlctl.transport.tls.identity import Role
from rlctl.v1.common_pb2 import OUTCOME_NOT_SENT

CONNECT_S = 5.0


class GrpcDialer:
    """Opens streams of a method: to stages, follower ranks, a trainer's lead."""

    def __init__(
        self,
        stub: Callable[[grpc.aio.Channel], Any],
        token: str | None,
        tls: Tls | None = None,
        role: Role = Role.STAGE,
        *,
        method: str = "Control",
    ) -> None:
        """``role``: of the servers."""
        self._stub = stub
        self._token = token
        self._tls = tls
        self._role = role
        self._method = method

    async def dial(self, address: str) -> DialledLink:
        """Connect. Raises UNREACHABLE, TLS_FAILED, or the peer's refusal."""
        channel = open_channel(address, self._tls, self._role)
        call = getattr(self._stub(channel), self._method)(metadata=bearer(self._token))
        try:
            async with asyncio.timeout(CONNECT_S):
                await call.wait_for_connection()
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            await channel.close()
            if isinstance(error, grpc.aio.AioRpcError):
                failure = from_grpc(error)
                if "Connection refused" in (error.details() or ""):
                    failure.metadata[REFUSED] = "true"
                elif failure.reason is Reason.UNREACHABLE:
                    failure = await handshake_failure(address, self._tls, self._role) or failure
                raise failure from None
            raise Reason.UNREACHABLE.error(f"{address} did not answer in {CONNECT_S:g} s") from None
        return DialledLink(channel, call)


class _Outbox:
    """Messages to write, in order, for one writer. The outbox is never full and so needs less than asyncio.Queue.

    Its senders bound it: a commander has at most MOST_PENDING commands under way, an executor sends two messages for
    each, and a peer that reads nothing is lost within seconds (SILENCE_S, keepalive).
    """

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._loop = asyncio.get_running_loop()  # once: in Python 3.11 the lookup costs a system call
        self._writer: asyncio.Future[None] | None = None

    def put(self, message: Any) -> None:
        """Queue a message; never waits."""
        self._messages.append(message)
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    async def get(self) -> Any:
        """Wait for the next message."""
        while not self._messages:
            self._writer = self._loop.create_future()
            await self._writer
        return self._messages.popleft()


class DialledLink:
    """The dialling end of a stream."""

    def __init__(self, channel: grpc.aio.Channel, call: Any) -> None:
        self._channel = channel
        self._call = call
        self._outbox = _Outbox()
        self._writer = asyncio.create_task(self._write())
        self._ended = False

    def send(self, message: Any) -> None:
        """Queue a message. Raises LINK_LOST."""
        if self._ended:
            raise Reason.LINK_LOST.error(outcome=OUTCOME_NOT_SENT)
        self._outbox.put(message)

    async def receive(self) -> AsyncIterator[Any]:
        """Yield messages until the stream ends. Raises the peer's error, if an error ended the stream."""
        try:
            async for message in self._call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from None
        except asyncio.CancelledError:
            if not self._ended:  # this task was cancelled, not the call by close()
                raise
        finally:
            await self.close()

    async def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._writer.cancel()
        self._call.cancel()
        await self._channel.close()

    async def _write(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader learns the cause


class ServedLink:
    """The serving end, for a handler that yields the messages of :meth:`sent`."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests
        self._outbox = _Outbox()
        self._ended = False

    def send(self, message: Any) -> None:
        """Queue a message. Raises LINK_LOST."""
        if self._ended:
            raise Reason.LINK_LOST.error(outcome=OUTCOME_NOT_SENT)
        self._outbox.put(message)

    async def receive(self) -> AsyncIterator[Any]:
        """Yield messages until the stream ends."""
        try:
            async for message in self._requests:
                yield message
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return
        finally:
            await self.close()

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        """End the stream after all queued messages."""
        if not self._ended:
            self._ended = True
            self._outbox.put(None)

    async def sent(self) -> Any:
        """Return the next message to send; None once the link is closed."""
        return await self._outbox.get()


def serve_links(
    obey: Callable[[ServedLink], Any],
) -> Callable[[AsyncIterator[Any]], AsyncGenerator[Any, None]]:
    """Return a handler that runs ``obey`` (a coroutine function) for each link. Its error ends the stream."""

    async def control(requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        link = ServedLink(requests)
        obeying = asyncio.ensure_future(obey(link))
        obeying.add_done_callback(lambda _: link.end())
        try:
            while (message := await link.sent()) is not None:
                yield message
        finally:
            obeying.cancel()
            await asyncio.gather(obeying, return_exceptions=True)
        if not obeying.cancelled():
            obeying.result()

    return control
