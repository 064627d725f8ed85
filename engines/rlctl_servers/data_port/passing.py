"""Requests at the data port of a stage, passed on to the server as they came."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import HttpExchange, HttpHead, HttpRequest
from rlctl_servers.adapters.lora_table import Held, LoraTable
from rlctl_servers.data_port.answers import Labels, relabelled
from rlctl_servers.requests.cache_salts import salt_of
from rlctl_servers.requests.passed_bodies import Reading, overridden
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.http import Http
from rlctl_servers.updates.version_labels import Stamps


class Reader(Protocol):
    """Reads request bodies for one kind of server."""

    def read(self, request: HttpRequest) -> Reading:
        """Read a body. Raises FIELD_INVALID, and UNSUPPORTED for a body that would harm the server."""

    def with_adapter(self, request: HttpRequest, reading: Reading, held: Held) -> Reading:
        """Return the reading with the server's name of the adapter."""

    def salted(self, request: HttpRequest, reading: Reading, salt: str) -> Reading:
        """Return the reading with a cache salt, at routes with a salt field."""


class Passing:
    """Passes requests on to one server."""

    def __init__(self, http: Http, reader: Reader, requests: Requests, stamps: Stamps, adapters: LoraTable) -> None:
        self._http = http
        self._reader = reader
        self._requests = requests
        self._stamps = stamps
        self._adapters = adapters

    def read(self, request: HttpRequest) -> HttpExchange:
        """Read a request. Raises as :meth:`Reader.read`."""
        reading = self._reader.read(request) if request.gated else Reading()
        answer = self._gated if request.gated else self._open
        return _Exchange(reading, lambda: answer(request, reading))

    async def _open(self, request: HttpRequest, reading: Reading) -> AsyncGenerator[HttpHead | bytes, None]:
        names = {adapter.name: name for name, adapter in self._adapters.by_name.items()}
        answer = self._sent(request, reading)
        labelled = relabelled(answer, Labels(self._stamps, names, strict=False))
        async with aclosing(answer), aclosing(labelled):
            async for part in labelled:
                yield part

    async def _gated(self, request: HttpRequest, reading: Reading) -> AsyncGenerator[HttpHead | bytes, None]:
        with self._adapters.using(reading.adapter) as adapter:
            if adapter is not None:
                reading = self._reader.with_adapter(request, reading, adapter)
            # Only after the gate has admitted the request: an update may have ended while the request waited.
            salt = salt_of(self._stamps.present, adapter.name if adapter is not None else "")
            reading = self._reader.salted(request, reading, salt)
            answer = self._sent(request, reading)
            del request  # a large body is not kept during its answer
            parts = self._requests.pass_on(reading, answer)
            if reading.labelled:
                parts = relabelled(parts, Labels(self._stamps, reading.names))
            async with aclosing(parts):
                async for part in parts:
                    yield part

    def _sent(self, request: HttpRequest, reading: Reading) -> AsyncGenerator[HttpHead | bytes, None]:
        """Return the answer of the server. The server gets the request when the first part is read."""
        replaced = {name.lower() for name in reading.headers}
        headers = {name: value for name, value in request.headers.items() if name.lower() not in replaced}
        body = overridden(request.body, reading.fields)
        return _unreached(self._http.forward(request.method, request.target, {**headers, **reading.headers}, body))


async def _unreached(parts: AsyncGenerator[HttpHead | bytes, None]) -> AsyncGenerator[HttpHead | bytes, None]:
    """Yield the same parts. Report an unreachable server as not serving."""
    try:
        async with aclosing(parts):
            async for part in parts:
                yield part
    except RlctlError as error:
        if error.reason is not Reason.UNREACHABLE:
            raise
        raise Reason.STAGE_NOT_SERVING.error(error.message) from error


class _Exchange(HttpExchange):
    def __init__(self, reading: Reading, answer: Callable[[], AsyncGenerator[HttpHead | bytes, None]]) -> None:
        self.adapter = reading.adapter
        self.model = reading.model
        self._answer: Callable[[], AsyncGenerator[HttpHead | bytes, None]] | None = answer

    def answer(self) -> AsyncGenerator[HttpHead | bytes, None]:
        """Return the answer, once. See :meth:`rlctl.engine.HttpExchange.answer`."""
        answer, self._answer = self._answer, None
        assert answer is not None
        return answer()
