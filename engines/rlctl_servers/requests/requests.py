"""Requests at an engine server. Each sample is a separate stream under a unique id."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Protocol

from rlctl.contract.errors import Reason, RlctlError, typed
from rlctl.contract.sampling import check_samples
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, FinishReason, GenerateRequest, GenerateResponse, Sample
from rlctl_servers.requests.passed_bodies import Reading
from rlctl_servers.requests.running import ABORT_S, HELD_S, PassedRequest, RunningRequest, SampledRequest

ABORT_CALL_S = 25.0
"""Seconds that a server may take to answer an abort: after a thousand new requests it reacts to nothing else for
seconds. Less than the deadline of AbortRequests.
"""

LEFT_S = 5.0
"""SGLang ends requests with a closed connection within this time (``_REQUEST_STATE_WAIT_TIMEOUT``, 4 s, 0.5.23)."""

_CUT = Reason.CANCELLED.error("the request's connection was closed")
"""Last event of a cut sample without output."""

_Event = tuple[int, dict[str, Any] | RlctlError | None]


class SampleStream(Protocol):
    """One sample at the server."""

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the server's events. Closing the generator ends the sample. Raises the error for the caller."""

    def take(self, event: dict[str, Any]) -> GenerateResponse | None:
        """Return the new part of an event. The first event of the first sample includes the facts of the prompt."""

    @property
    def tokens(self) -> int:
        """Return the number of output tokens so far."""

    @property
    def over(self) -> bool:
        """Return whether the server has reported the end."""


class Dialect(Protocol):
    """Calls that differ between kinds of servers."""

    product: str

    async def begin(self, request: GenerateRequest, engine_rids: Sequence[str]) -> Sequence[SampleStream]:
        """Return a sample for each id, before anything is sent. Raises if the request is invalid."""

    def new_rid(self) -> str:
        """Return an id for a sample that was never used at the server."""

    def admit(self, request: GenerateRequest) -> None:
        """Raise if a request must not be sent. The request is already within reach of :meth:`Requests.cut`."""

    def admit_passed(self, *, prepared: bool) -> None:
        """Do as :meth:`admit`, for a request that is passed on unchanged."""

    def prepares(self, request: GenerateRequest) -> bool:
        """Return whether a pause may leave the request stuck at the server before it has begun."""

    def ends(self, *, heard: bool) -> bool:
        """Return whether the server can end a sample now. ``heard``: the server has sent output of the sample."""

    async def end(self, engine_rids: Sequence[str] | None) -> None:
        """End samples early; None: all samples of the server. Raises as :meth:`Http.call`."""


class Requests:
    """The requests at one server. ``generate`` runs on one loop; the other methods may run on other loops."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._running: dict[str, RunningRequest] = {}
        self._lock = threading.Lock()
        self._held = False
        self._paused: set[str] = set()
        """Requests with these adapters are refused."""

    def is_paused(self, adapter: str) -> bool:
        return adapter in self._paused

    def pause(self, adapter: str) -> None:
        """Refuse requests with an adapter from now on, except the requests that :meth:`using` already returns."""
        self._paused.add(adapter)

    def go_on(self, adapter: str) -> None:
        """Accept requests with a paused adapter again."""
        self._paused.discard(adapter)

    def hold(self) -> None:
        """Hold back all output of the server until :meth:`release`."""
        self._held = True

    def release(self) -> None:
        """Pass on the output that was held back, and later output."""
        self._held = False

    @property
    def active(self) -> int:
        return len(self._all())

    @property
    def samples(self) -> int:
        """Return the number of samples of the active requests."""
        return sum(running.samples for running in self._all())

    def _all(self) -> list[RunningRequest]:
        """Return each request once. A request may have several ids of its caller."""
        with self._lock:
            return list({id(running): running for running in self._running.values()}.values())

    def using(self, adapter: str) -> list[str]:
        """Return the ids of the active requests with this adapter."""
        with self._lock:
            return [rid for rid, running in self._running.items() if running.adapter == adapter]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
        check_samples(request.sampling_params)
        rid = request.rid
        engine_rids = [self._dialect.new_rid() for _ in range(request.sampling_params.n or 1)]
        samples = dict(enumerate(await self._dialect.begin(request, engine_rids)))
        running = SampledRequest(engine_rids, request.adapter, prepared=self._dialect.prepares(request))
        self._register([rid], running)
        # Bounded by the length of the samples. A bound of its own would let a caller that reads slowly delay the end of
        # the request at the server, for which a pause waits.
        events: asyncio.Queue[_Event] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []
        try:
            # Registered first, so that a later stop of the server reaches the request.
            self._dialect.admit(request)
            self._refuse_paused(request.adapter)
            for index, sample in samples.items():
                running.silent[index] = asyncio.create_task(_pump(index, sample, events, running.silent))
            running.sent = True
            tasks += running.silent.values()
            while samples:
                event = await _next(events, running.cut)
                while self._held and not running.cut.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(running.cut.wait(), HELD_S)
                if event is None or self._held:
                    # The server holds the samples back, and nothing ends them there. A closed connection ends each as
                    # soon as it could run.
                    for index, sample in samples.items():
                        yield GenerateResponse(rid=rid, samples=[_cut_off(index, sample)])
                    return
                index, payload = event
                if index not in samples:
                    continue
                if payload is _CUT:
                    yield GenerateResponse(rid=rid, samples=[_cut_off(index, samples.pop(index))])
                    continue
                if isinstance(payload, RlctlError):
                    raise payload
                if payload is None:
                    raise Reason.ENGINE_FAILED.error(
                        f"{self._dialect.product} ended its answer before the sample had ended"
                    )
                engine_rid, sample = engine_rids[index], samples[index]
                response = sample.take(payload)
                if running.cut.is_set() and not running.heard(engine_rid) and not sample.over:
                    await self._dialect.end([engine_rid])  # held back when its end was requested
                running.heard_of.add(engine_rid)
                if response is None:
                    continue
                response.rid = rid
                if response.samples[0].HasField("finish_reason"):
                    del samples[index]
                yield response
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also if the caller cancels again
                self._forget([rid])

    @contextmanager
    def accept(self, reading: Reading) -> Iterator[PassedRequest]:
        """Yield a request that is passed on as it came. At the end of the block its connection must be closed.

        Raises RID_IN_USE, STAGE_NOT_SERVING.
        """
        running, rids = PassedRequest(reading, lambda: self._held), list(reading.rids) or [secrets.token_hex(16)]
        self._register(rids, running)
        try:
            self._dialect.admit_passed(prepared=reading.prepared)
            self._refuse_paused(reading.adapter)
            running.sent = True
            yield running
        finally:
            running.over()
            self._forget(rids)

    def _register(self, rids: Sequence[str], running: RunningRequest) -> None:
        with self._lock:
            for rid in rids:
                if rid in self._running:
                    raise Reason.RID_IN_USE.error(f"a request {rid!r} is running", field="rid")
            self._running |= dict.fromkeys(rids, running)

    def _forget(self, rids: Sequence[str]) -> None:
        with self._lock:
            for rid in rids:
                self._running.pop(rid, None)

    def _refuse_paused(self, adapter: str) -> None:
        if self.is_paused(adapter):
            raise Reason.STAGE_NOT_SERVING.error(f"adapter {adapter!r} is paused by name")

    async def cut(self) -> None:
        """Keep a stopped server from beginning requests that it has received. Begun samples have ended by then.

        Samples without output end as aborted. Returns once their connections are closed.
        """
        await asyncio.gather(*(running.leave() for running in self._all()))

    async def end_prepared(self, deadline: float) -> bool:
        """End samples that the server may still only prepare, before the server is stopped.

        Return whether the samples have ended by ``deadline`` on the loop's clock. Raises as :meth:`Http.call`.
        """
        prepared = [running for running in self._all() if running.leaves]
        if prepared:
            if asyncio.get_running_loop().time() + LEFT_S >= deadline:
                return False
            await asyncio.gather(*(running.leave() for running in prepared))
            await asyncio.sleep(LEFT_S)
        while rids := self._prepared():
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await self._dialect.end(rids)
            await asyncio.sleep(HELD_S)
        return True

    def _prepared(self) -> list[str]:
        return [rid for running in self._all() if running.prepared and not running.leaves for rid in running.not_heard]

    async def abort(self, rids: Sequence[str], *, all_of_them: bool) -> tuple[int, list[str]]:
        """End requests. Return their number, and the unknown ids. Raises as :meth:`Http.call`."""
        with self._lock:
            chosen = list(self._running) if all_of_them else list(dict.fromkeys(rids))
            matches = {rid: self._running[rid] for rid in chosen if rid in self._running}
        ended = list({id(running): running for running in matches.values()}.values())
        # Marked first: a request that reaches the server after the next call is ended at its first output.
        for running in ended:
            running.end()
        if all_of_them:
            await self._dialect.end(None)
        else:
            ids = (
                (running, engine_rid) for running in ended if not running.leaves for engine_rid in running.engine_rids
            )
            if ending := [
                engine_rid for running, engine_rid in ids if self._dialect.ends(heard=running.heard(engine_rid))
            ]:
                await self._dialect.end(ending)
        return len(ended), [rid for rid in chosen if rid not in matches]


async def _pump(
    index: int, sample: SampleStream, events: asyncio.Queue[_Event], silent: dict[int, asyncio.Task[None]]
) -> None:
    try:
        async with aclosing(sample.events()) as stream:
            async for payload in stream:
                silent.pop(index, None)
                events.put_nowait((index, payload))
        events.put_nowait((index, None))
    except Exception as error:  # noqa: BLE001 - the reader would wait for ever
        events.put_nowait((index, typed(error)))
    except asyncio.CancelledError:
        events.put_nowait((index, _CUT))
        raise
    finally:
        silent.pop(index, None)


def _cut_off(index: int, sample: SampleStream) -> Sample:
    """Return the end of an aborted sample without an answer of the server."""
    return Sample(
        index=index,
        completion_tokens=sample.tokens,
        finish_reason=FinishReason(type=FINISH_TYPE_ABORT, message="aborted"),
    )


async def _next(events: asyncio.Queue[_Event], cut: asyncio.Event) -> _Event | None:
    """Return the next event, or None if the request was cut and no event came."""
    arrival = asyncio.ensure_future(events.get())
    cut_wait = asyncio.ensure_future(cut.wait())
    try:
        await asyncio.wait({arrival, cut_wait}, return_when=asyncio.FIRST_COMPLETED)
        if not arrival.done():
            await asyncio.wait({arrival}, timeout=ABORT_S)
        return arrival.result() if arrival.done() else None
    finally:
        for task in (arrival, cut_wait):
            task.cancel()
