"""Requests to the data ports of stages, with one HTTP client for each gateway."""

from __future__ import annotations

import asyncio
import functools
import io
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
import orjson
from multidict import CIMultiDict
from yarl import URL

from rlctl.contract.errors import Reason, RlctlError
from rlctl.rollout.dispatch import Attempt
from rlctl.runtime.http_errors import REASON, error_in
from rlctl.runtime.http_forwarding import end_to_end
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Role
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN

CONNECT_S = 5.0
"""Longest time to connect to a data port, in seconds."""

KEPT_S = 60.0
"""Seconds that an idle connection is kept. Data ports keep connections longer."""

_STALE = 3
"""Attempts of a request. A closed kept connection at the last attempt counts as a failure of the stage."""

_AT_ONCE = 1 << 20
"""Bytes from which on a body is written in pieces."""

_PLACEHOLDER = re.compile(r"\{\w+(?::((?:[^{}]|\{[^{}]*\})+))?\}")

T = TypeVar("T")


def lists(routes: Collection[str], method: str, path: str) -> bool:
    """Return whether a request matches the routes of a data port."""
    if f"{method} {path}" in routes:
        return True
    return any("{" in route and _pattern(route).fullmatch(f"{method} {path}") for route in routes)


@functools.lru_cache(1024)
def _pattern(route: str) -> re.Pattern[str]:
    parts = _PLACEHOLDER.split(route)
    literals, rules = map(re.escape, parts[::2]), [rule or "[^{}/]+" for rule in parts[1::2]]
    return re.compile("".join(each for pair in zip(literals, [*rules, ""], strict=True) for each in pair))


class DataPorts:
    """The HTTP client for data ports. On one event loop."""

    def __init__(self, tls: Tls | None = None) -> None:
        """``tls`` is the gateway's; None for plain text."""
        self._tls = tls
        if tls is not None:
            tls.client_context()  # before the files can change
        self._session: aiohttp.ClientSession | None = None

    def at(self, attempt: Attempt) -> Exchange:
        if self._session is None:
            tracing = aiohttp.TraceConfig()
            tracing.on_connection_reuseconn.append(_reused)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
                auto_decompress=False,
                trace_configs=[tracing],
            )
        return Exchange(self._session, attempt, self._tls)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _reused(_: Any, context: SimpleNamespace, __: Any) -> None:
    context.trace_request_ctx.append(True)


class Exchange:
    """One request to a data port, and its response. Must be closed, also after an error.

    Attributes:
        status: HTTP status, once the response has begun.
        headers: headers, once the response has begun.
    """

    def __init__(self, session: aiohttp.ClientSession, attempt: Attempt, tls: Tls | None = None) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._session = session
        self._tls = tls
        self._registration = attempt.stage.registration
        self._response: aiohttp.ClientResponse | None = None
        self._lost: RlctlError | None = None
        self._scope: asyncio.Timeout | None = None
        self._forget = attempt.on_loss(self._lose)

    async def begin(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes, deadline: float | None
    ) -> None:
        """Send the request and wait for the head of the response.

        Raises the stage's refusal; UNREACHABLE; TLS_FAILED; DEADLINE_EXCEEDED at the ``deadline``.
        """
        if not self._registration.data_address:
            raise Reason.STAGE_NOT_SERVING.error(f"{self._registration.slot} has no data port")
        scheme = "http" if self._tls is None else "https"
        url = URL(f"{scheme}://{self._registration.data_address}{target}", encoded=True)
        response = await self._within(deadline, lambda: self._send(method, url, headers, body))
        self._response = response
        if (reason := response.headers.get(REASON)) is not None:
            raise await self._within(deadline, lambda: _refusal(reason, response))
        self.status, self.headers = response.status, CIMultiDict(end_to_end(response.headers))

    async def _send(self, method: str, url: URL, headers: Mapping[str, str], body: bytes) -> aiohttp.ClientResponse:
        context = True if self._tls is None else self._tls.client_context()
        name = None if self._tls is None else self._tls.peer_name(Role.STAGE)
        for remaining in reversed(range(_STALE)):
            reused: list[bool] = []
            data = body if len(body) < _AT_ONCE else io.BytesIO(body)
            try:
                return await self._session.request(
                    method,
                    url,
                    headers=headers,
                    data=data,
                    allow_redirects=False,
                    ssl=context,
                    server_hostname=name,
                    trace_request_ctx=reused,
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not reused or not remaining:
                    raise
        raise AssertionError("unreachable")

    async def read(self, deadline: float | None = None) -> bytes:
        """Return the next piece of the body; b"" at its end. Raises UNREACHABLE if the connection ends first."""
        assert self._response is not None
        return await self._within(deadline, self._response.content.readany)

    async def _within(self, deadline: float | None, work: Callable[[], Awaitable[T]]) -> T:
        if self._lost is not None:
            raise self._lost
        try:
            async with asyncio.timeout_at(deadline) as self._scope:
                return await work()
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
            slot = self._registration.slot
            raise Reason.TLS_FAILED.error(f"data port of {slot}: {error}", outcome=OUTCOME_UNKNOWN) from None
        except aiohttp.ClientError as error:
            slot, kind = self._registration.slot, type(error).__name__
            raise Reason.UNREACHABLE.error(f"{slot}: {kind}: {error}", outcome=OUTCOME_UNKNOWN) from None
        except TimeoutError:
            raise self._lost or Reason.DEADLINE_EXCEEDED.error(
                f"{self._registration.slot} did not answer in time", outcome=OUTCOME_UNKNOWN
            ) from None
        finally:
            self._scope = None

    def _lose(self) -> None:
        self._lost = Reason.UNREACHABLE.error(f"the coordinator has lost {self._registration.slot}")
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """End the request. The connection is closed unless the response has ended."""
        self._forget()
        if self._response is not None:
            self._response.close()


async def _refusal(reason: str, response: aiohttp.ClientResponse) -> RlctlError:
    try:
        body = orjson.loads(await response.read())
    except ValueError:
        body = None
    return error_in(reason, body)
