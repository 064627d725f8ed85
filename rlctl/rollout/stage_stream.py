"""Connection to a stage's RolloutService: a channel, with one stream for all requests under the same token."""

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
"""Idle streams of other bearer tokens that stay open."""

LEFT_S = 5.0
"""Seconds for an unused line to tell the stage about abandoned requests before the line closes."""


class Parts(Protocol):
    """Answers of a request, in order. Raises RlctlError. Closing aborts the request if it still runs."""

    def __aiter__(self) -> AsyncIterator[GenerateResponse]: ...

    async def __anext__(self) -> GenerateResponse: ...

    async def aclose(self) -> None:
        """Stop reading, and abort the request if it still runs."""


class Line:
    """Requests to the stage at an address. On one event loop.

    Attributes:
        users: number of present users.
    """

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self.users = 0
        self._channel = LastingChannel(address, tls, Role.STAGE, RolloutServiceStub)
        self._streams: dict[Metadata, _Stream] = {}

    def ask(self, request: GenerateRequest, deadline: float, metadata: Metadata) -> Answers:
        """Send a request and return its answers, until ``deadline`` on the loop's clock.

        Raises MESSAGE_TOO_LARGE, FIELD_INVALID.
        """
        stream = self._streams.pop(metadata, None)
        if stream is None or stream.over:
            if stream is not None:
                self._channel.failed()
            self._make_way()
            stream = _Stream(self._channel.stub.GenerateMany(metadata=metadata))
        self._streams[metadata] = stream  # the most recently used stream is last
        return stream.begin(request, deadline)

    def _make_way(self) -> None:
        """Finish the least recently used idle streams. Callers come and go, each with a token."""
        idle = [metadata for metadata, stream in self._streams.items() if stream.idle]
        for metadata in idle[: max(len(idle) - KEPT, 0)]:
            self._streams.pop(metadata).finish()

    async def abort(self, rid: str, metadata: Metadata, timeout_s: float) -> bool:
        """Abort a request at the engine, so the request returns its output so far.

        Returns whether the engine had the request. Raises RlctlError.
        """
        try:
            answer = await self._channel.stub.Abort(AbortRequest(rids=[rid]), timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from None
        except asyncio.CancelledError:
            refuse_closed()
            raise
        return rid not in answer.unknown_rids

    async def explained(self, failure: RlctlError) -> RlctlError:
        """Return a failure to reach the stage, or TLS_FAILED if a certificate is the cause."""
        return await self._channel.explained(failure)

    async def close(self, grace_s: float | None = None) -> None:
        """Close the line. With ``grace_s``, first wait up to that long until the stage has been told of abandoned
        requests.
        """
        for stream in self._streams.values():
            stream.finish()
        await self._channel.close(grace_s)
        await asyncio.gather(*(stream.closed() for stream in self._streams.values()))


class Answers:
    """Answers of a request. Must be closed, also after an error.

    Attributes:
        on_end: called when nothing more is expected.
    """

    def __init__(self, stream: _Stream, number: int, deadline: float) -> None:
        self._stream = stream
        self._number = number
        self._parts: deque[GenerateResponse] = deque()  # bounded by the length of the request's samples
        self._waiting: asyncio.Future[None] | None = None
        self._ended = False
        self._error: RlctlError | None = None
        self.on_end: Callable[[], None] | None = None
        self._timer = asyncio.get_running_loop().call_at(deadline, self._time_up)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerateResponse:
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._parts.popleft()

    def take(self, part: NumberedResponse) -> None:
        """Add a message of the stage."""
        if part.HasField("response"):
            self._parts.append(part.response)
        if part.ended:
            self._end(from_detail(part.error) if part.HasField("error") else None)
        self._wake()

    def fail(self, error: RlctlError) -> None:
        """End the answers with an error, after the messages that have arrived."""
        if not self._ended:
            self._stream.leave(self._number)
            self._end(error)
        self._wake()

    async def aclose(self) -> None:
        """Stop reading. The stage aborts the request if it still runs."""
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
    """A call of GenerateMany. Requests that arrive during a write are sent in the next message.

    Attributes:
        over: the stream accepts no more requests.
    """

    def __init__(self, call: Any) -> None:
        self.over = False
        self._call = call
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answers] = {}
        self._unsent: deque[GenerateManyRequest] = deque()  # of callers that wait for their answers
        self._bytes_of_last = 0
        self._news = asyncio.Event()
        self._reading, self._writing = asyncio.create_task(self._read()), asyncio.create_task(self._write())

    @property
    def idle(self) -> bool:
        return not self._answers

    def begin(self, request: GenerateRequest, deadline: float) -> Answers:
        size = request.ByteSize()
        refuse_large(request.DESCRIPTOR.name, size)
        number = next(self._numbers)
        message = self._next_message(size)
        try:
            entry = message.begin.add(number=number, request=request)
        except (ValueError, DecodeError) as error:
            name = request.DESCRIPTOR.name
            raise Reason.FIELD_INVALID.error(f"the request is no valid {name}: {error}", field=name) from None
        if deadline != float("inf"):
            remaining = max(deadline - asyncio.get_running_loop().time(), 0.0)
            entry.timeout.CopyFrom(duration(remaining))
        answers = self._answers[number] = Answers(self, number, deadline)
        return answers

    def leave(self, number: int) -> None:
        if not self.over:
            self._next_message(1).leave.append(number)

    def forget(self, number: int) -> None:
        self._answers.pop(number, None)

    def finish(self) -> None:
        """Begin no more requests. The stage ends the call once it has read everything."""
        self.over = True
        self._news.set()

    async def closed(self) -> None:
        """Wait for the tasks, after the channel is closed."""
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
            pass  # the reader gets the cause
        except Exception as error:  # noqa: BLE001 every waiting caller gets the error
            self._break(error)

    async def _read(self) -> None:
        failure = Reason.UNREACHABLE.error("the stage has ended", outcome=OUTCOME_UNKNOWN)
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                for count, part in enumerate(message.parts, start=1):
                    answers = self._answers.get(part.number)
                    if answers is not None:
                        answers.take(part)
                    if count % AT_ONCE == 0:
                        await asyncio.sleep(0)
                await give_way()  # send the callers' next requests before further reads
        except grpc.aio.AioRpcError as error:
            failure = from_grpc(error)
        except asyncio.CancelledError:
            failure = closed(OUTCOME_UNKNOWN)
        except Exception as error:  # noqa: BLE001 every waiting caller gets the error
            self._break(error)
            return
        self._fail(failure)

    def _break(self, error: Exception) -> None:
        """Fail all answers after a defect here, and cancel the call so that the stage notices."""
        log.error("a stream of requests has failed", exc_info=error)
        self._call.cancel()
        self._fail(typed(error))

    def _fail(self, failure: RlctlError) -> None:
        self.over = True
        self._writing.cancel()  # a write to an absent peer may block for ever
        for answers in list(self._answers.values()):
            answers.fail(failure)
