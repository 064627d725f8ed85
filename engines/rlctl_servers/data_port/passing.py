"""Requests at the data port of a stage, passed on to the server as they came."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import HttpExchange, HttpHead, HttpRequest
from rlctl.runtime.http_client import Broken, Response
from rlctl_servers.adapters.lora_table import Held, LoraTable
from rlctl_servers.data_port.answers import Labels, Relabelling
from rlctl_servers.requests.cache_salts import salt_of
from rlctl_servers.requests.passed_bodies import Reading, overridden
from rlctl_servers.requests.requests import Requests
from rlctl_servers.requests.running import PassedRequest
from rlctl_servers.server.http import AGAIN, Http
from rlctl_servers.updates.version_labels import Stamps

_OF_SERVER = frozenset({"date", "server"})
"""Headers that the stage writes itself."""

T = TypeVar("T")


class Reader(Protocol):
    """Reads request bodies for one kind of server."""

    def read(self, request: HttpRequest) -> Reading:
        """Read a body. Raises FIELD_INVALID, and UNSUPPORTED for a body that would harm the server."""

    def read_open(self, request: HttpRequest) -> Reading:
        """Read the body of a request at a route without the gate: its names of model and adapter."""

    def put_adapter(self, request: HttpRequest, reading: Reading, held: Held) -> None:
        """Put the server's name of the adapter into the reading."""

    def put_salt(self, request: HttpRequest, reading: Reading, salt: str) -> None:
        """Put a cache salt into the reading, at routes with a salt field."""


@dataclass(frozen=True)
class Passing:
    """Passes requests on to one server."""

    http: Http
    reader: Reader
    requests: Requests
    stamps: Stamps
    adapters: LoraTable

    def read(self, request: HttpRequest) -> HttpExchange:
        """Read a request. Raises as :meth:`Reader.read`."""
        reading = self.reader.read(request) if request.gated else self.reader.read_open(request)
        return _Exchange(self, request, reading)


class _Exchange(HttpExchange):
    def __init__(self, passing: Passing, request: HttpRequest, reading: Reading) -> None:
        self.adapter = reading.adapter
        self.model = reading.model
        self._passing = passing
        self._request: HttpRequest | None = request
        self._reading = reading
        self._running: PassedRequest | None = None
        self._response: Response | None = None
        self._relabelling: Relabelling | None = None
        self._ends = ExitStack()

    async def begin(self) -> HttpHead:
        """See :meth:`rlctl.engine.HttpExchange.begin`. An answer with a length, or with names, is read whole."""
        request, self._request = self._request, None  # frees the caller's body: the server gets a changed body
        assert request is not None
        labels = self._prepare(request) if request.gated else self._open_labels()
        sending = self._sent(request)
        del request
        body = await self._next(lambda: self._fetch(sending, labels))
        response, relabelling = self._response, self._relabelling
        assert response is not None
        assert relabelling is not None
        if body is not None:
            body = relabelling.put_whole(body)
        headers = [pair for pair in response.headers if pair[0].lower() not in _OF_SERVER]
        return HttpHead(response.status, headers, body)

    async def read(self) -> bytes:
        """Return the next piece with rlctl's names."""
        assert self._relabelling is not None
        while True:
            piece = await self._next(self._piece)
            relabelled = self._relabelling.put_into(piece)
            if relabelled or not piece:
                return relabelled

    def close(self) -> None:
        """See :meth:`rlctl.engine.HttpExchange.close`."""
        self._ends.close()

    def _prepare(self, request: HttpRequest) -> Labels:
        """Register a request that the gate has admitted, and put the adapter and the salt into its reading.

        An update may have ended while the request waited for the gate.
        """
        passing, reading = self._passing, self._reading
        adapter = self._ends.enter_context(passing.adapters.using(reading.adapter))
        if adapter is not None:
            passing.reader.put_adapter(request, reading, adapter)
        salt = salt_of(passing.stamps.present, adapter.name if adapter is not None else "")
        passing.reader.put_salt(request, reading, salt)
        labels = Labels(passing.stamps, reading.names)
        self._running = self._ends.enter_context(passing.requests.accept(reading))
        return labels

    def _open_labels(self) -> Labels:
        names = {adapter.name: name for name, adapter in self._passing.adapters.by_name.items()}
        return Labels(self._passing.stamps, names | self._reading.names, strict=False)

    def _sent(self, request: HttpRequest) -> Callable[[], Awaitable[Response]]:
        """Return the call that sends the request, with the fields and headers of the reading."""
        reading = self._reading
        headers = list(request.headers)
        if reading.headers:
            replaced = {name.lower() for name in reading.headers}
            headers = [pair for pair in headers if pair[0].lower() not in replaced]
            headers += reading.headers.items()
        method, target, body = request.method, request.target, overridden(request.body, reading.fields)
        return lambda: self._passing.http.forward(method, target, headers, body)

    async def _fetch(self, send: Callable[[], Awaitable[Response]], labels: Labels) -> bytes | None:
        """Send the request and wait for its answer. Return the body, if it is to be read whole."""
        try:
            response = self._response = await send()
        except RlctlError as error:
            if error.reason is not Reason.UNREACHABLE:
                raise
            raise Reason.STAGE_NOT_SERVING.error(error.message) from error
        self._ends.callback(response.close)
        relabelling = self._relabelling = Relabelling(labels, response.content_type)
        if not response.has_length and not relabelling.whole:
            return None
        if self._running is not None:
            self._running.begun = True  # the server sends this head with the body
        try:
            return await response.read_all()
        except Broken as error:
            raise self._passing.http.broken(error, AGAIN) from error

    async def _piece(self) -> bytes:
        assert self._response is not None
        try:
            return await self._response.read()
        except Broken as error:
            raise self._passing.http.broken(error, AGAIN) from error

    async def _next(self, read: Callable[[], Awaitable[T]]) -> T:
        return await (read() if self._running is None else self._running.next(read))
