"""Ending requests at an engine server, against one that is slow to hear of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from rlctl_servers.requests.requests import Requests
from rlctl_servers.requests.running import ABORT_S

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import MOST_SAMPLES
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, FinishReason, GenerateRequest, GenerateResponse, Sample


class Stream:
    """A sample of a server's that says one token after the other, until it is ended."""

    def __init__(self, server: Server, rid: str) -> None:
        self.tokens = 0
        self.over = False
        self._server = server
        self._rid = rid

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async for each in self._events():
                yield each
        finally:
            self._server.closed.append(self._rid)

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        self._server.asked.set()
        await self._server.reached.wait()
        if self._server.ended_at_once:
            yield {"end": True}
            return
        while self._rid not in self._server.ended:
            yield {}
            await asyncio.sleep(0)
        yield {"end": True}

    def take(self, told: dict[str, Any]) -> GenerateResponse:
        self.over = "end" in told
        self.tokens += not self.over
        reason = FinishReason(type=FINISH_TYPE_ABORT) if self.over else None
        return GenerateResponse(samples=[Sample(completion_tokens=self.tokens, finish_reason=reason)])


class Server:
    """One that gets requests only when ``reached`` is set, and then has none of what it was told before."""

    product = "test"

    def __init__(self, *, ended_at_once: bool = False) -> None:
        self.begun = asyncio.Event()
        self.reached = asyncio.Event()
        self.aborting = asyncio.Event()
        self.ended_at_once = ended_at_once
        self.stopped = False
        self.asked = asyncio.Event()
        self.closed: list[str] = []
        self.ended: list[str] = []

    async def begin(self, request: GenerateRequest, engine_rids: Sequence[str]) -> Sequence[Stream]:
        self.begun.set()
        return [Stream(self, rid) for rid in engine_rids]

    def admit(self, request: GenerateRequest) -> None:
        if self.stopped:
            raise Reason.STAGE_NOT_SERVING.error("it is paused")

    def new_rid(self) -> str:
        return uuid.uuid4().hex

    def prepares(self, request: GenerateRequest) -> bool:
        return False

    def ends(self, *, heard: bool) -> bool:
        return True

    async def end(self, engine_rids: Sequence[str] | None) -> None:
        if engine_rids is not None:
            self.ended += engine_rids
            return
        # It has looked, and found nothing; requests come in before it says so.
        self.reached.set()
        await self.aborting.wait()


async def generated(requests: Requests, heard: asyncio.Event) -> list[GenerateResponse]:
    parts = []
    async for part in requests.generate(GenerateRequest(rid="r")):
        parts.append(part)
        heard.set()
    return parts


async def test_what_reaches_the_server_while_it_ends_all_the_others_is_ended_too() -> None:
    server, heard = Server(), asyncio.Event()
    requests = Requests(server)
    running = asyncio.create_task(generated(requests, heard))
    await server.begun.wait()
    aborting = asyncio.create_task(requests.abort([], all_of_them=True))
    await asyncio.wait_for(heard.wait(), 5)
    server.aborting.set()
    assert await aborting == (1, [])
    parts = await asyncio.wait_for(running, 5)
    assert parts[-1].samples[0].finish_reason.type == FINISH_TYPE_ABORT
    assert len(server.ended) == 1


async def test_what_the_server_has_ended_is_not_ended_again() -> None:
    server, heard = Server(ended_at_once=True), asyncio.Event()
    requests = Requests(server)
    running = asyncio.create_task(generated(requests, heard))
    await server.begun.wait()
    server.aborting.set()
    assert await requests.abort([], all_of_them=True) == (1, [])
    assert len(await asyncio.wait_for(running, 5)) == 1
    assert server.ended == []


async def test_nothing_is_sent_to_a_server_that_has_stopped() -> None:
    server = Server()
    server.stopped = True
    requests = Requests(server)
    with pytest.raises(RlctlError, match="it is paused"):
        await generated(requests, asyncio.Event())
    assert requests.active == 0
    assert server.closed == []


async def test_what_a_stopped_server_has_said_nothing_of_is_left_before_it_goes_on() -> None:
    """Also when whoever stops it does so from another thread's loop; what it has begun to tell it ends itself."""
    server, heard = Server(), asyncio.Event()
    requests = Requests(server)
    running = asyncio.create_task(generated(requests, heard))
    await server.asked.wait()
    server.stopped = True
    before = asyncio.get_running_loop().time()
    await asyncio.to_thread(asyncio.run, requests.cut())
    assert len(server.closed) == 1, "once it returns"
    [end] = await asyncio.wait_for(running, 5)
    assert end.samples[0].finish_reason.type == FINISH_TYPE_ABORT
    assert asyncio.get_running_loop().time() - before < ABORT_S, "it does not wait for what cannot come"

    server.stopped, server.closed = False, []
    running = asyncio.create_task(generated(requests, heard))
    server.reached.set()
    await asyncio.wait_for(heard.wait(), 5)
    await asyncio.to_thread(asyncio.run, requests.cut())
    assert server.closed == []
    server.ended += [each for one in requests._running.values() for each in one.engine_rids]
    assert len(await asyncio.wait_for(running, 5)) > 1


async def test_a_sample_that_fails_unforeseen_ends_its_request() -> None:
    class Broken(Server):
        async def begin(self, request: GenerateRequest, engine_rids: Sequence[str]) -> Sequence[Stream]:
            streams = await super().begin(request, engine_rids)
            for each in streams:
                each.events = self._events  # type: ignore[method-assign]
            return streams

        async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
            yield {}
            raise KeyError("meta_info")

    requests = Requests(Broken())
    with pytest.raises(RlctlError, match="meta_info"):
        await asyncio.wait_for(generated(requests, asyncio.Event()), 5)
    assert requests.active == 0


async def test_a_request_that_is_ended_twice_at_once_does_not_run_for_ever() -> None:
    """gRPC ends a call at its deadline, and the stage ends its request then."""
    server = Server()
    requests = Requests(server)
    running = asyncio.create_task(generated(requests, asyncio.Event()))
    await server.asked.wait()
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert requests.active == 0
    assert len(server.closed) == 1


async def test_too_many_samples_are_refused_before_they_are_made() -> None:
    request = GenerateRequest()
    request.sampling_params.n = MOST_SAMPLES + 1
    server = Server()
    with pytest.raises(RlctlError) as refused:
        await anext(Requests(server).generate(request))
    assert (refused.value.reason, refused.value.field) == (Reason.FIELD_INVALID, "sampling_params.n")
    assert not server.begun.is_set()
