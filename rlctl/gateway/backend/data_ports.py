"""Requests to the data ports of stages, with one HTTP client for each gateway."""

from __future__ import annotations

import asyncio
import functools
import re
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeVar

import orjson
from multidict import CIMultiDict

from rlctl.contract.errors import Reason, RlctlError
from rlctl.rollout.dispatch import Attempt
from rlctl.runtime.addresses import split
from rlctl.runtime.http_client import Broken, Client, NotConnected, Origin, Response
from rlctl.runtime.http_errors import REASON, error_in
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Role
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN

CONNECT_S = 5.0
"""Longest time to connect to a data port, in seconds."""

KEPT_S = 60.0
"""Seconds that an idle connection is kept. Data ports keep connections longer."""

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
        self._client: Client | None = None

    def at(self, attempt: Attempt) -> Exchange:
        if self._client is None:
            self._client = Client(connect_s=CONNECT_S, keep_s=KEPT_S)
        return Exchange(self._client, attempt, self._tls)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class Exchange:
    """One request to a data port, and its response. Must be closed, also after an error.

    Attributes:
        status: HTTP status, once the response has begun.
        headers: headers, once the response has begun.
    """

    def __init__(self, client: Client, attempt: Attempt, tls: Tls | None = None) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._client = client
        self._tls = tls
        self._registration = attempt.stage.registration
        self._response: Response | None = None
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
        pairs, origin = list(headers.items()), self._origin()
        response = await self._within(deadline, lambda: self._client.request(origin, method, target, pairs, body))
        self._response = response
        self.status, self.headers = response.status, CIMultiDict(response.headers)
        if (reason := self.headers.get(REASON)) is not None:
            raise await self._within(deadline, lambda: _refusal(reason, response))
        if response.length:
            self.headers["Content-Length"] = response.length

    def _origin(self) -> Origin:
        address = self._registration.data_address
        host, port = split(address, "data_address")
        if self._tls is None:
            return Origin(address, host, port)
        return Origin(address, host, port, self._tls.client_context(), self._tls.peer_name(Role.STAGE))

    async def read(self, deadline: float | None = None) -> bytes:
        """Return the next piece of the body; b"" at its end. Raises UNREACHABLE if the connection ends first."""
        assert self._response is not None
        return await self._within(deadline, self._response.read)

    async def _within(self, deadline: float | None, work: Callable[[], Awaitable[T]]) -> T:
        if self._lost is not None:
            raise self._lost
        try:
            async with asyncio.timeout_at(deadline) as self._scope:
                return await work()
        except (NotConnected, Broken) as error:
            raise self._failed(error) from None
        except TimeoutError:
            raise self._lost or Reason.DEADLINE_EXCEEDED.error(
                f"{self._registration.slot} did not answer in time", outcome=OUTCOME_UNKNOWN
            ) from None
        finally:
            self._scope = None

    def _failed(self, error: NotConnected | Broken) -> RlctlError:
        slot = self._registration.slot
        if isinstance(error.__cause__, ssl.SSLError):
            return Reason.TLS_FAILED.error(f"data port of {slot}: {error}", outcome=OUTCOME_UNKNOWN)
        return Reason.UNREACHABLE.error(f"{slot}: {error}", outcome=OUTCOME_UNKNOWN)

    def _lose(self) -> None:
        self._lost = Reason.UNREACHABLE.error(f"the coordinator has lost {self._registration.slot}")
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """End the request. The connection is closed unless the response has ended."""
        self._forget()
        if self._response is not None:
            self._response.close()


async def _refusal(reason: str, response: Response) -> RlctlError:
    try:
        body = orjson.loads(await response.read_all())
    except ValueError:
        body = None
    error = error_in(reason, body)
    error.http_status = response.status
    return error
