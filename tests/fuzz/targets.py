"""Targets of inputs: an RPC or a route of a running server, and the rules that its answers obey."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.rpc import error_details_pb2, status_pb2

from rlctl.contract.errors import DOMAIN, Reason
from rlctl.transport.status import DETAILS_KEY
from tests.fuzz import http_client, http_requests, messages
from tests.fuzz.http_client import Client
from tests.fuzz.http_requests import Fields, Route

CALL_S = 1.0
"""Deadline of the callers of RPCs."""

HTTP_S = 3.0
"""Longest wait of the callers of HTTP."""

MOST_ANSWERS = 8
"""Most messages that are read of a stream."""

MOST_SHOWN = 4000
"""Most hexadecimal digits of an input in a report."""

METADATA = (
    *(("authorization", value) for value in ("", "Bearer", "Bearer x", "Basic eA==")),
    *(("traceparent", value) for value in ("00-x", "00-" + "0" * 32 + "-" + "f" * 16 + "-ff")),
    *(("x-rlctl-client", value) for value in ("x" * 3000, "a/b/c")),
    *(("x-rlctl-on-behalf-of", "someone"), ("x-rlctl-user", "@"), ("x-odd-bin", b"\xff\x00")),
)

_DEFECT = re.compile(rb"\bINTERNAL\b|Traceback \(most recent")
_REASONS = re.compile(rb"\b(" + "|".join(Reason.__members__).encode() + rb")\b")
_IN_RESULT = b"\n\x08INTERNAL"
"""ErrorDetail.reason INTERNAL on the wire."""


_OF_AIOHTTP = re.compile(rb"Can not decode content-encoding|(deflate|gzip|br|zstd)$")
"""Refusals of aiohttp, before any route."""

_HEALTH = ("/ready", "/health", "/health_generate")
"""Routes that answer 503 while no stage serves, as those of the originals."""

_ENDED = "Internal error from Core"
"""What Python's client raises instead of a status, if a call ends while the client writes."""


class Fault(Exception):
    """An answer that breaks a rule."""


@dataclass(frozen=True)
class Input:
    """Bytes of a request. ``content``: hexadecimal, to send them again."""

    parts: tuple[bytes, ...]
    more: Any = None

    @property
    def content(self) -> str:
        text = " ".join(part.hex() for part in self.parts)
        return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text) // 2} bytes)"


class Target(Protocol):
    """An RPC or a route."""

    name: str

    def draw(self, chance: random.Random) -> Input:
        """Return an input."""

    async def send(self, given: Input) -> str:
        """Send an input and return the kind of the answer. Raises :class:`Fault`."""


class RpcTarget:
    """A method of a gRPC server.

    ``metadata``: credentials of the caller. ``refused``: no call may succeed.
    """

    def __init__(
        self,
        world: str,
        method: MethodDescriptor,
        channel: grpc.aio.Channel,
        words: messages.Words,
        metadata: Sequence[tuple[str, str]] = (),
        *,
        refused: bool = False,
    ) -> None:
        self.name = f"{world}/{method.full_name.removeprefix('rlctl.v1.')}"
        self._method = method
        self._words = words
        self._metadata = tuple(metadata)
        self._refused = refused
        self._typed = method.full_name.startswith("rlctl.")
        self._answer_type = message_factory.GetMessageClass(method.output_type)
        path = f"/{method.containing_service.full_name}/{method.name}"
        kinds = {(False, False): "unary_unary", (False, True): "unary_stream", (True, True): "stream_stream"}
        kind = kinds[method.client_streaming, method.server_streaming]
        self._call: Any = getattr(channel, kind)(path)

    def draw(self, chance: random.Random) -> Input:
        count = chance.choice((1, 1, 2, 3, 8)) if self._method.client_streaming else 1
        parts = tuple(messages.drawn(chance, self._method.input_type, self._words) for _ in range(count))
        metadata: tuple[Any, ...] = self._metadata
        if chance.random() < 0.03:
            metadata = (*(chance.choice(((), metadata))), chance.choice(METADATA))
        return Input(parts, metadata)

    async def send(self, given: Input) -> str:
        try:
            answers = await self._answers(given)
        except grpc.aio.AioRpcError as error:
            return self._judge(error)
        except asyncio.CancelledError:
            raise Fault("the call was cancelled") from None
        for answer in answers or ():
            if _IN_RESULT in answer:
                raise Fault(f"a result names a defect: {self._answer_type.FromString(answer)}")
        if answers is None:
            return "waits"
        if self._refused:
            raise Fault("the call was not refused")
        return "OK"

    async def _answers(self, given: Input) -> list[bytes] | None:
        """Return the answers; None if a stream has none yet."""
        if not self._method.server_streaming:
            return [await self._call(given.parts[0], timeout=CALL_S, metadata=given.more)]
        request: Any = given.parts[0]
        if self._method.client_streaming:
            request = _slowly(given.parts)
        call = self._call(request, timeout=CALL_S, metadata=given.more)
        answers: list[bytes] = []
        try:
            async with asyncio.timeout(CALL_S / 4):
                async for answer in call:
                    answers.append(answer)
                    if len(answers) == MOST_ANSWERS:
                        break
        except TimeoutError:
            return answers or None
        finally:
            call.cancel()
        return answers

    def _judge(self, error: grpc.aio.AioRpcError) -> str:
        code = error.code()
        trailing: Any = error.trailing_metadata() or ()
        details = dict(trailing).get(DETAILS_KEY)
        if details is None:
            if code is grpc.StatusCode.DEADLINE_EXCEEDED or error.details() == _ENDED:
                return code.name
            if not self._typed and code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
                return code.name
            raise Fault(f"{code.name} without a reason: {error.details()}")
        info = error_details_pb2.ErrorInfo()
        status = status_pb2.Status.FromString(details)
        if not (status.details and status.details[0].Unpack(info) and info.domain == DOMAIN):
            raise Fault(f"{code.name} without a reason: {error.details()}")
        if info.reason not in Reason.__members__ or info.reason == "INTERNAL" or code.name in ("UNKNOWN", "INTERNAL"):
            raise Fault(f"{code.name} {info.reason}: {error.details()}")
        return str(info.reason)


async def _slowly(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    await asyncio.sleep(CALL_S / 4)


class HttpTarget:
    """A route of an HTTP server.

    ``headers``: credentials of the caller. ``typed``: errors name a reason of rlctl. ``refused``: no request may
    succeed.
    """

    def __init__(
        self,
        world: str,
        server: str,
        route: Route,
        client: Client,
        fields: Fields,
        headers: Mapping[str, str] | None = None,
        *,
        typed: bool = True,
        refused: bool = False,
    ) -> None:
        self.name = f"{world}/{server} {route.method} {route.path}"
        self._route = route
        self._client = client
        self._fields = fields
        self._headers = dict(headers or {})
        self._typed = typed
        self._refused = refused

    def draw(self, chance: random.Random) -> Input:
        request = http_requests.drawn(chance, self._route, self._fields, self._headers)
        return Input((request.data,), request)

    async def send(self, given: Input) -> str:
        request: http_requests.Request = given.more
        try:
            async with asyncio.timeout(HTTP_S):
                answer = await self._client.exchange(request)
        except TimeoutError:
            return "waits"  # the caller disconnects
        if answer.status == 0:
            if request.whole and self._typed:  # servers of metrics close connections beyond their limit
                raise Fault("the connection was closed without a whole answer")
            return "closed"
        if answer.status == 500 or answer.status > 504 or _DEFECT.search(answer.body):
            raise Fault(f"{answer.status} {answer.body[:500]!r}")
        if answer.status >= 400 and request.whole and not request.head and not self._has_reason(answer):
            raise Fault(f"{answer.status} without a reason: {answer.body[:500]!r}")
        if self._refused and answer.status < 400:
            raise Fault(f"the request was not refused: {answer.status} {answer.body[:500]!r}")
        return str(answer.status)

    def _has_reason(self, answer: http_client.Answer) -> bool:
        if not self._typed or _OF_AIOHTTP.match(answer.body) or _REASONS.search(answer.body):
            return True
        return b'"results":[' in answer.body or (answer.status == 503 and self._route.path.endswith(_HEALTH))
