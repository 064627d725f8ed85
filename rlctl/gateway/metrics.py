"""Metrics of a gateway: HTTP requests and samples, ended and under way."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import web

from rlctl.contract.errors import typed
from rlctl.gateway.backend.service import Generation, Settings
from rlctl.metrics import definitions as m
from rlctl.metrics.exposition import Exposition, Sample
from rlctl.rollout.continuation import Progress
from rlctl.rollout.rollout import ANYWHERE, OnProgress, Place
from rlctl.rollout.sample import RolloutSample
from rlctl.sdk.aio import AsyncFleet
from rlctl.transport.channel import Credentials
from rlctl.transport.tls.credentials import Tls
from rlctl.v1.rollout_pb2 import Sample as GeneratedSample

UNLISTED = "unlisted"
"""Route label of requests outside the dialect's routes."""

CLOSED = "499"


class GatewayMetrics:
    """Counts requests and samples, and serves the metrics."""

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls
        self._generations: list[Generation] = []
        self.exposition = Exposition(m.of(m.GATEWAY), self._state)

    def generation(self, fleet: AsyncFleet, settings: Settings) -> Generation:
        """Return a generation that counts its samples."""
        generation = _MeasuredGeneration(fleet, settings, self)
        self._generations.append(generation)
        return generation

    @web.middleware
    async def request(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Count a request. The outermost middleware."""
        started, status = time.monotonic(), CLOSED
        try:
            response = await handler(request)
            status = str(response.status)
            return response
        except web.HTTPException as answer:
            status = str(answer.status)
            raise
        finally:
            resource = request.match_info.route.resource
            route = UNLISTED if resource is None else resource.canonical
            method = request.method if resource is not None else ""
            self.exposition.count(m.HTTP_REQUESTS, route, method, status)
            self.exposition.observe(m.HTTP_SECONDS, time.monotonic() - started, route, method)

    def refused(self, principal: str) -> None:
        """Count a request that a quota has refused."""
        self.exposition.count(m.QUOTA_REFUSALS, principal)

    def ended(self, model: str, outcome: str, tokens: int) -> None:
        self.exposition.count(m.SAMPLES, model, outcome)
        if tokens:
            self.exposition.count(m.SAMPLE_TOKENS, model, by=tokens)

    def _state(self) -> Iterator[Sample]:
        if self._tls is not None:
            yield m.CERTIFICATE_EXPIRY, (), self._tls.material.expires.timestamp()
        if self._generations:
            inflight = sum(each.inflight for each in self._generations)
            yield m.INFLIGHT, (), inflight
            yield m.INFLIGHT_BYTES, (), sum(each.inflight_bytes for each in self._generations)
            yield m.WAITING, (), max(0, inflight - sum(each.placed for each in self._generations))


class _MeasuredGeneration(Generation):
    def __init__(self, fleet: AsyncFleet, settings: Settings, metrics: GatewayMetrics) -> None:
        super().__init__(fleet, settings)
        self._metrics = metrics

    def _like(self, settings: Settings) -> Generation:
        return self._metrics.generation(self.fleet, settings)

    async def complete(
        self,
        sample: RolloutSample,
        *,
        credentials: Credentials,
        place: Place = ANYWHERE,
        on_progress: OnProgress | None = None,
    ) -> RolloutSample:
        started, first, outcome, tokens = time.monotonic(), True, "cancelled", 0

        def tell(progress: Progress, part: GeneratedSample) -> None:
            nonlocal first
            if first and part.output_ids:
                first = False
                took_s = time.monotonic() - started
                self._metrics.exposition.observe(m.SAMPLE_FIRST, took_s, sample.request.model)
            if on_progress is not None:
                on_progress(progress, part)

        try:
            ended = await super().complete(sample, credentials=credentials, place=place, on_progress=tell)
            tokens = len(ended.output_ids)
            cut_reason = "aborted" if ended.error is None else ended.error.reason.name
            outcome = "ok" if ended.finished else cut_reason
            return ended
        except Exception as error:
            outcome = typed(error).reason.name
            raise
        finally:
            self._metrics.ended(sample.request.model, outcome, tokens)
