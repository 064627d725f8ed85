"""The way to one stage's RolloutService: a channel, and on it one stream for all requests under the same token."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, Self

from google.protobuf.message import DecodeError

from rlctl.client.connection import closed, refuse_closed
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError, from_detail, typed
from rlctl.runtime.event_loops import give_way
from rlctl.transport import grpc
from rlctl.transport.channel import AT_ONCE, BATCH_BYTES, LastingChannel, refuse_large
from rlctl.transport.status import from_grpc
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Role
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl.v1.rollout_pb2 import (
    AbortRequest,
    GenerateManyRequest,
    GenerateRequest,
    GenerateResponse,
    NumberedResponse,
)
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

log = logging.getLogger(__name__)

Metadata = Sequence[tuple[str, str]]

KEPT = 16
"""Streams of other tokens that stay open though nothing runs on them."""

LEFT_S = 5.0
"""How long a line that nobody needs any more may take to tell the stage who has left."""


class Parts(Protocol):
    """What comes of a request, one after the other; raises RlctlError. Closing it aborts what still runs."""

    def __aiter__(self) -> AsyncIterator[GenerateResponse]:
        """Itself."""

    async def __anext__(self) -> GenerateResponse:
        """What is new."""

    async def aclose(self) -> None:
        """Want no more of it."""


class Line:
    """Requests to the stage at an address. On one event loop.

    Attributes:
        users: how many have it in use.
    """

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self.users = 0
        self._channel = LastingChannel(address, tls, Role.STAGE, RolloutServiceStub)
        self._streams: dict[Metadata, _Stream] = {}

    def ask(self, request: GenerateRequest, deadline: float, metadata: Metadata) -> Answers:
        """Send a request; what comes of it until ``deadline`` on the loop's clock. Raises MESSAGE_TOO_LARGE,
        FIELD_INVALID.
        """
        stream = self._streams.pop(metadata, None)
        if stream is None or stream.over:
            if stream is not None:
                self._channel.failed()
            self._make_way()
            stream = _Stream(self._channel.stub.GenerateMany(metadata=metadata))
        self._streams[metadata] = stream  # after those that were used before it
        return stream.begin(request, deadline)

    def _make_way(self) -> None:
        """Callers come and go, and each has a token: those that were used longest ago end."""
        idle = [metadata for metadata, stream in self._streams.items() if stream.idle]
        for metadata in idle[: max(len(idle) - KEPT, 0)]:
            self._streams.pop(metadata).finish()

    async def abort(self, rid: str, metadata: Metadata, timeout_s: float) -> bool:
        """End a request at the engine; it comes back with what it has. Returns whether the engine had it. Raises
        RlctlError.
        """
        try:
            answer = await self._channel.stub.Abort(AbortRequest(rids=[rid]), timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from None
        except asyncio.CancelledError:
            refuse_closed()
            raise
        return rid not in answer.unknown_rids

    async def close(self, grace_s: float | None = None) -> None:
        """End it; ``grace_s``: once the stage knows who has left, if that takes no longer."""
        for stream in self._streams.values():
            stream.finish()
        await self._channel.close(grace_s)
        await asyncio.gather(*(stream.closed() for stream in self._streams.values()))


class Answers:
    """What comes of one request over a line. To be closed, however it ended.

    Attributes:
        on_end: called once nothing more is waited for.
    """

    def __init__(self, stream: _Stream, number: int, deadline: float) -> None:
        self._stream = stream
        self._number = number
        self._parts: deque[GenerateResponse] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._ended = False
        self._error: RlctlError | None = None
        self.on_end: Callable[[], None] | None = None
        self._timer = asyncio.get_running_loop().call_at(deadline, self._time_up)

    def __aiter__(self) -> Self:
        """Itself."""
        return self

    async def __anext__(self) -> GenerateResponse:
        """What is new."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._parts.popleft()

    def take(self, part: NumberedResponse) -> None:
        """The stage has said something."""
        if part.HasField("response"):
            self._parts.append(part.response)
        if part.ended:
            self._end(from_detail(part.error) if part.HasField("error") else None)
        self._wake()

    def fail(self, error: RlctlError) -> None:
        """Nothing more comes, for this reason; what is here already does."""
        if not self._ended:
            self._stream.leave(self._number)
            self._end(error)
        self._wake()

    async def aclose(self) -> None:
        """Want no more of it: the stage aborts what still runs."""
        if not self._ended:
            self._stream.leave(self._number)
            self._end(None)

    def _time_up(self) -> None:
        self.fail(Reason.DEADLINE_EXCEEDED.error("the time was up before the request ended", outcome=OUTCOME_UNKNOWN))

    def _end(self, error: RlctlError | None) -> None:
        self._ended, self._error = True, error
        self._timer.cancel()
        self._stream.forget(self._number)
        if self.on_end is not None:
            self.on_end()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class _Stream:
    """One call of GenerateMany. What is to be sent while a message is under way goes as the next one.

    Attributes:
        over: it takes no more requests.
    """

    def __init__(self, call: Any) -> None:
        self.over = False
        self._call = call
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answers] = {}
        self._unsent: deque[GenerateManyRequest] = deque()
        self._bytes_of_last = 0
        self._news = asyncio.Event()
        self._reading, self._writing = asyncio.create_task(self._read()), asyncio.create_task(self._write())

    @property
    def idle(self) -> bool:
        """Nobody waits for anything on it."""
        return not self._answers

    def begin(self, request: GenerateRequest, deadline: float) -> Answers:
        size = request.ByteSize()
        refuse_large(request.DESCRIPTOR.name, size)
        number = next(self._numbers)
        message = self._next_message(size)
        try:
            begun = message.begin.add(number=number, request=request)
        except (ValueError, DecodeError) as error:
            name = request.DESCRIPTOR.name
            raise Reason.FIELD_INVALID.error(f"no {name} can be made of it: {error}", field=name) from None
        if deadline != float("inf"):
            left = max(deadline - asyncio.get_running_loop().time(), 0.0)
            begun.timeout.CopyFrom(duration(left))
        answers = self._answers[number] = Answers(self, number, deadline)
        return answers

    def leave(self, number: int) -> None:
        if not self.over:
            self._next_message(1).leave.append(number)

    def forget(self, number: int) -> None:
        self._answers.pop(number, None)

    def finish(self) -> None:
        """Begin nothing more; the stage ends it once it has heard everything."""
        self.over = True
        self._news.set()

    async def closed(self) -> None:
        """Once its channel is."""
        self._reading.cancel()
        await asyncio.gather(self._reading, self._writing, return_exceptions=True)

    def _next_message(self, size: int) -> GenerateManyRequest:
        if not self._unsent or self._bytes_of_last > BATCH_BYTES:
            self._unsent.append(GenerateManyRequest())
            self._bytes_of_last = 0
        self._bytes_of_last += size
        self._news.set()
        return self._unsent[-1]

    async def _write(self) -> None:
        try:
            while not self.over or self._unsent:
                await self._news.wait()
                self._news.clear()
                while self._unsent:
                    await self._call.write(self._unsent.popleft())
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # the reader learns why
        except Exception as error:  # noqa: BLE001 those that wait are told
            self._break(error)

    async def _read(self) -> None:
        failure = Reason.UNREACHABLE.error("the stage has ended", outcome=OUTCOME_UNKNOWN)
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                for taken, part in enumerate(message.parts, start=1):
                    answers = self._answers.get(part.number)
                    if answers is not None:
                        answers.take(part)
                    if taken % AT_ONCE == 0:
                        await asyncio.sleep(0)
                await give_way()  # what their callers ask next is on its way before more is read
        except grpc.aio.AioRpcError as error:
            failure = from_grpc(error)
        except asyncio.CancelledError:
            failure = closed(OUTCOME_UNKNOWN)
        except Exception as error:  # noqa: BLE001 those that wait are told
            self._break(error)
            return
        self._fail(failure)

    def _break(self, error: Exception) -> None:
        """A defect here: nobody may go on waiting, and the stage has to hear of it."""
        log.error("a stream of requests has failed", exc_info=error)
        self._call.cancel()
        self._fail(typed(error))

    def _fail(self, failure: RlctlError) -> None:
        self.over = True
        self._writing.cancel()  # a write to nobody may wait for ever
        for answers in list(self._answers.values()):
            answers.fail(failure)
