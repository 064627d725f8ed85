"""The metrics of a process and the HTTP server for Prometheus.

The server has a thread, and a thread for each connection. State of an event loop is read on that loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any, TypeVar, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from rlctl.contract.os_errors import unbound
from rlctl.metrics.definitions import EVENT_LOOP_LAG, Metric
from rlctl.runtime.addresses import join, split

log = logging.getLogger(__name__)

S = TypeVar("S", Counter, Histogram)

# Created metrics add a series to each counter and histogram, with the time of the first use.
disable_created_metrics()  # type: ignore[no-untyped-call]

READ_S = 5.0
"""Longest wait for an event loop at a scrape. Prometheus itself waits for 10 s by default."""

FRESH_S = 1.0
"""Age up to which a read state is served again: many scrapes cost the event loop a single read."""

MOST_CONNECTIONS = 16
"""Connections at a time. Further connections are closed at once."""

LOOK_S = 0.5
"""Time between two measurements of the lag of an event loop."""

Sample = tuple[Metric, tuple[str, ...], float]
"""A metric, the values of the labels, the value."""


class Handler(WSGIRequestHandler):
    """Handles a connection, without a log."""

    timeout = 10.0
    """Longest wait for a part of the request, seconds."""

    def parse_request(self) -> bool:
        """Read the request line and the headers. Refuse HTTP/0.9: its answers have neither status nor headers."""
        if not super().parse_request():
            return False
        if self.request_version == "HTTP/0.9":
            self.request_version = self.protocol_version
            self.send_error(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
            return False
        return True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write no log."""


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a thread for each connection, and a limit of connections."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        super().__init__((str(address[0]), port), Handler)
        self.set_app(make_wsgi_app(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread, or close the connection beyond the limit."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log the error at level debug: a slow or disconnected client is no defect."""
        log.debug("a connection for metrics has failed", exc_info=True)


class Exposition(Collector):
    """The metrics of a process, made on the process's event loop."""

    def __init__(self, metrics: Sequence[Metric], read: Callable[[], Iterable[Sample]]) -> None:
        """``read`` returns the present values of the metrics that are read; called on this loop."""
        self._loop = asyncio.get_running_loop()
        self._metrics = metrics
        self._read = read
        self._registry = CollectorRegistry()
        self._counters: dict[Metric, Counter] = {}
        self._histograms: dict[Metric, Histogram] = {}
        for metric in metrics:
            if metric.read:
                continue
            if metric.kind == "counter":
                self._counters[metric] = Counter(metric.name, metric.help, metric.labels, registry=self._registry)
            else:
                self._histograms[metric] = Histogram(
                    metric.name, metric.help, metric.labels, registry=self._registry, buckets=metric.buckets
                )
        self._series: dict[tuple[Metric, tuple[str, ...]], Counter | Histogram] = {}
        self._registry.register(self)
        PlatformCollector(self._registry)
        ProcessCollector(registry=self._registry)
        self._server: _Server | None = None
        self._reading = threading.Lock()
        self._recent: Sequence[Sample] = ()
        self._read_at = -math.inf
        self._watched: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}

    def counter(self, metric: Metric, *labels: str) -> Counter:
        """Return a counter, created at 0. Otherwise Prometheus sees no increase at the first event."""
        return self._series_of(self._counters, metric, labels)

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        return self._series_of(self._histograms, metric, labels)

    def count(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        """Add to a counter; from any thread."""
        self.counter(metric, *labels).inc(by)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Add a value to a histogram; from any thread."""
        self.histogram(metric, *labels).observe(value)

    def _series_of(self, family: Mapping[Metric, S], metric: Metric, labels: tuple[str, ...]) -> S:
        """Return the counter or histogram with these labels. The library takes a lock to find it."""
        series = self._series.get((metric, labels))
        if series is None:
            series = family[metric].labels(*labels) if labels else family[metric]
            self._series[metric, labels] = series
        return cast(S, series)

    async def start(self, listen: str) -> str:
        """Serve at ``host:port`` (port 0: any) and return the bound address. Raises FIELD_INVALID."""
        host, port = split(listen, "metrics")
        try:
            server = await asyncio.to_thread(_Server, host, port, self._registry)
        except OSError as error:
            raise unbound(listen, error, "metrics") from None
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        self._server = server
        self.watch_loop("main")
        return join(host, server.server_port)

    def watch_loop(self, name: str) -> None:
        """Measure the lag of the running loop from now on."""
        loop = asyncio.get_running_loop()

        def look(due: float) -> None:
            self.observe(EVENT_LOOP_LAG, max(0.0, loop.time() - due), name)
            self._watched[loop] = loop.call_at(loop.time() + LOOK_S, look, loop.time() + LOOK_S)

        self._watched[loop] = loop.call_at(loop.time() + LOOK_S, look, loop.time() + LOOK_S)

    async def stop(self) -> None:
        for loop, timer in self._watched.items():
            loop.call_soon_threadsafe(timer.cancel)
        if self._server is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()

    def describe(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Return the read metrics without values: the registration calls this before the loop can be read."""
        return self._families().values()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the read metrics; runs in the server's thread."""
        families = self._families()
        for metric, labels, value in self._state():
            families[metric].add_metric(labels, value)
        yield from families.values()

    def _state(self) -> Sequence[Sample]:
        """Return the state of this process, at most :data:`FRESH_S` old. Empty if the event loop does not answer."""
        with self._reading:
            if time.monotonic() - self._read_at < FRESH_S:
                return self._recent
            reading = asyncio.run_coroutine_threadsafe(self._samples(), self._loop)
            try:
                self._recent = reading.result(READ_S)
            except concurrent.futures.TimeoutError:
                reading.cancel()
                self._recent = ()
                log.warning("the event loop did not answer within %g s: a scrape has no state of this process", READ_S)
            self._read_at = time.monotonic()
            return self._recent

    def _families(self) -> dict[Metric, GaugeMetricFamily | CounterMetricFamily]:
        return {
            metric: (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                metric.name, metric.help, labels=metric.labels
            )
            for metric in self._metrics
            if metric.read
        }

    async def _samples(self) -> list[Sample]:
        return list(self._read())
