"""Requests at the data port of a stage: passed on to the server as they came."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import HttpExchange, HttpHead, HttpRequest
from rlctl_servers.adapters.lora_table import Held, LoraTable
from rlctl_servers.data_port.answers import Labels, relabelled
from rlctl_servers.requests.passed_bodies import Reading, overridden
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.http import Http
from rlctl_servers.updates.version_labels import Stamps


class Reader(Protocol):
    """What one kind of server takes."""

    def read(self, request: HttpRequest) -> Reading:
        """What a body says. Raises FIELD_INVALID, UNSUPPORTED for what would harm the server."""

    def with_adapter(self, request: HttpRequest, reading: Reading, held: Held) -> Reading:
        """The same with the server's name of the adapter."""


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
        return _Exchange(
            reading, lambda: self._gated(request, reading) if request.gated else self._open(request, reading)
        )

    async def _open(self, request: HttpRequest, reading: Reading) -> AsyncGenerator[HttpHead | bytes, None]:
        labels = Labels(self._stamps, reading.names, strict=False)
        sent = self._send(request, reading)
        labelled = relabelled(sent, labels)
        async with aclosing(sent), aclosing(labelled):
            async for part in labelled:
                yield part

    async def _gated(self, request: HttpRequest, reading: Reading) -> AsyncGenerator[HttpHead | bytes, None]:
        with self._adapters.using(reading.adapter) as held:
            if held is not None:
                reading = self._reader.with_adapter(request, reading, held)
            passed = self._requests.pass_on(reading, lambda: self._send(request, reading))
            labelled = relabelled(passed, Labels(self._stamps, reading.names))
            async with aclosing(passed), aclosing(labelled):
                async for part in labelled:
                    yield part

    async def _send(self, request: HttpRequest, reading: Reading) -> AsyncGenerator[HttpHead | bytes, None]:
        body = overridden(request.body, reading.fields)
        sent = self._http.forward(request.method, request.target, {**request.headers, **reading.headers}, body)
        try:
            async with aclosing(sent):
                async for part in sent:
                    yield part
        except RlctlError as error:
            if error.reason is not Reason.UNREACHABLE:
                raise
            raise Reason.STAGE_NOT_SERVING.error(error.message) from error


class _Exchange(HttpExchange):
    """One request."""

    def __init__(self, reading: Reading, answer: Callable[[], AsyncGenerator[HttpHead | bytes, None]]) -> None:
        self.adapter = reading.adapter
        self.model = reading.model
        self._answer = answer

    def answer(self) -> AsyncGenerator[HttpHead | bytes, None]:
        """See :meth:`rlctl.engine.HttpExchange.answer`."""
        return self._answer()
