"""A client that is closed while calls of its are under way: whoever waits is told so, in words, and in time."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
import torch
from updating import Held
from waiting import eventually

import rlctl
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.ports import new_uuid7
from rlctl.rollout.rollout import AsyncRollout
from rlctl.sdk import aio
from rlctl.sdk.blocking import Fleet
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.trainer.pending_update import Pending
from rlctl.trainer.publisher import AsyncPublisher
from rlctl.transport.channel import LastingChannel
from rlctl.transport.tls.identity import Role
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, RequestHeader
from rlctl.v1.coordinator_pb2 import GetOperationRequest, WatchFleetRequest
from rlctl.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from rlctl.v1.results_pb2 import OPERATION_STATE_UNKNOWN
from rlctl.weights.tensor.tensors import TensorMeta


async def failures(calls: Iterable[asyncio.Future]) -> list[tuple[Reason, int]]:
    ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert [error for error in ended if not isinstance(error, RlctlError)] == []
    return [(error.reason, error.outcome) for error in ended]


async def test_what_is_under_way_may_have_been_done(fleet: InProcessFleet) -> None:
    held = Held(fleet, "flush_cache")
    client = await aio.connect(fleet.server.address)
    watching = asyncio.Event()

    async def watch() -> None:
        async with aclosing(client.watch()) as news:
            async for _ in news:
                watching.set()

    calls = [asyncio.ensure_future(call) for call in (client.flush_cache(), watch())]
    await held.begun.wait()
    await watching.wait()
    await client.close()
    assert await failures(calls) == [(Reason.CANCELLED, OUTCOME_UNKNOWN)] * 2
    held.may_end.set()


async def test_a_call_that_is_cancelled_is_cancelled(fleet: InProcessFleet) -> None:
    held = Held(fleet, "flush_cache")
    async with await aio.connect(fleet.server.address) as client:
        call = asyncio.create_task(client.flush_cache())
        await held.begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    held.may_end.set()


async def test_a_thread_that_waits_is_told(fleet: InProcessFleet) -> None:
    held = Held(fleet, "flush_cache")
    client = await asyncio.to_thread(rlctl.connect, fleet.server.address)
    watching = asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch() -> None:
        for _ in client.watch():
            loop.call_soon_threadsafe(watching.set)

    calls = [asyncio.ensure_future(asyncio.to_thread(call)) for call in (client.flush_cache, watch)]
    await held.begun.wait()
    await watching.wait()
    await asyncio.to_thread(client.close)
    assert await failures(calls) == [(Reason.CANCELLED, OUTCOME_UNKNOWN)] * 2
    held.may_end.set()


class Source:
    """One tensor, once it may be had."""

    def __init__(self) -> None:
        self.asked, self.given = threading.Event(), threading.Event()

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta("w", torch.float32, (1,))]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.asked.set()
        assert self.given.wait(30)
        yield "w", torch.zeros(1)


FORKS = """
import os, sys, time
import rlctl

client = rlctl.connect(sys.argv[1])
client.generate("x", max_new_tokens=1)
if os.fork() == 0:
    for call in (client.status, lambda: rlctl.connect(sys.argv[1], timeout_s=60)):
        try:
            call()
        except rlctl.RlctlError as error:
            print(error, flush=True)
    os._exit(0)
os.wait()
client.status()
client.close()
"""


async def lines_of(program: str, address: str) -> list[str]:
    """What a program says that ends well."""
    arguments = ["-c", program, address]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    said, _ = await asyncio.wait_for(process.communicate(), 50)
    assert process.returncode == 0
    return said.decode().splitlines()


async def test_a_child_of_a_fork_is_told_that_it_cannot_connect(fleet: InProcessFleet) -> None:
    """Nothing would ever come over its connections, as if nobody was there."""
    asked, connected = await lines_of(FORKS, fleet.server.address)
    assert asked.startswith("CANCELLED: the client belongs to the parent of this forked process")
    assert connected.startswith("UNSUPPORTED: this process was forked from a process with open connections")
    assert "spawn" in connected


FORKS_ONLY = """
import os, sys, threading
import rlctl

with rlctl.connect(sys.argv[1]) as client:
    over = threading.Event()

    def busy():
        while not over.is_set():
            client.status()

    asking = threading.Thread(target=busy)
    asking.start()
    for _ in range(40):
        child = os.fork()
        if child == 0:
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
    over.set()
    asking.join()
"""


async def test_a_child_of_a_fork_that_asks_for_nothing_lives(fleet: InProcessFleet) -> None:
    """A data loader's worker, say. With gRPC's own handlers of forks such children ended in a segmentation fault."""
    assert await lines_of(FORKS_ONLY, fleet.server.address) == ["0"] * 40


async def start(client: Fleet, source: Source, checkpoint: str) -> Pending:
    publisher = await asyncio.to_thread(client.publisher, "actor")
    settings = {"version": "two", "checkpoint": checkpoint, "verify": "none"}
    return await asyncio.to_thread(publisher.update_async, source, **settings)


async def test_an_update_that_has_ended_is_told_after_the_end(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    client, source = await asyncio.to_thread(rlctl.connect, fleet.server.address), Source()
    pending = await start(client, source, checkpoint("two"))
    source.given.set()
    await eventually(pending.done)
    await asyncio.to_thread(client.close)
    assert (await asyncio.to_thread(pending.wait)).version.label == "two"
    await asyncio.to_thread(pending.wait_sent)
    assert not await asyncio.to_thread(pending.cancel)


async def test_an_update_that_is_ended_with_its_client_is_told_as_it_has_ended(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("source_rank", "lead", "publisher"):
        monkeypatch.setattr(f"rlctl.trainer.{module}.STOP_S", 0.1)
    client, source = await asyncio.to_thread(rlctl.connect, fleet.server.address), Source()
    pending = await start(client, source, checkpoint("two"))
    waits = [asyncio.ensure_future(asyncio.to_thread(wait)) for wait in (pending.wait, pending.wait_sent)]
    await asyncio.to_thread(source.asked.wait, 10)
    await asyncio.to_thread(client.close)
    assert await failures(waits) == [(Reason.CANCELLED, OUTCOME_REJECTED)] * 2
    source.given.set()


async def test_an_update_that_is_being_committed_is_seen_to_its_end(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    held = Held(fleet, "flush_cache")
    client, source = await asyncio.to_thread(rlctl.connect, fleet.server.address), Source()
    source.given.set()
    pending = await start(client, source, checkpoint("two"))
    waiting = asyncio.ensure_future(asyncio.to_thread(pending.wait))
    await held.begun.wait()
    closing = asyncio.ensure_future(asyncio.to_thread(client.close))
    await asyncio.wait({closing, waiting}, timeout=0.2)
    assert not closing.done()
    held.may_end.set()
    assert (await asyncio.wait_for(waiting, 10)).version.label == "two"
    await asyncio.wait_for(closing, 10)


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_commit_that_takes_long_keeps_nobody_from_closing(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, *, blocking: bool
) -> None:
    monkeypatch.setattr("rlctl.client.admin.COMMIT_S", 0.2)
    held, source, path = Held(fleet, "flush_cache"), Source(), checkpoint("two")
    source.given.set()
    if blocking:
        client = await asyncio.to_thread(rlctl.connect, fleet.server.address)
        pending = await start(client, source, path)
        wait, close = asyncio.to_thread(pending.wait), asyncio.to_thread(client.close)
    else:
        asynchronous = await aio.connect(fleet.server.address)
        publisher = asynchronous.publisher("actor")
        wait = publisher.update(source, version="two", checkpoint=path, verify="none")
        close = asynchronous.close()
    waiting = asyncio.ensure_future(wait)
    await held.begun.wait()
    await asyncio.wait_for(close, 10)
    assert await failures([waiting]) == [(Reason.CANCELLED, OUTCOME_UNKNOWN)]
    held.may_end.set()


async def test_several_threads_may_close_it(fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    first, may_end = asyncio.Event(), threading.Event()
    loop, committed = asyncio.get_running_loop(), aio.AsyncFleet.committed

    async def slow(self: aio.AsyncFleet) -> None:
        loop.call_soon_threadsafe(first.set)
        await asyncio.to_thread(may_end.wait, 10)
        await committed(self)

    monkeypatch.setattr(aio.AsyncFleet, "committed", slow)
    client = await asyncio.to_thread(rlctl.connect, fleet.server.address)
    closing = [asyncio.ensure_future(asyncio.to_thread(client.close))]
    await first.wait()
    closing.append(asyncio.ensure_future(asyncio.to_thread(client.close)))
    await asyncio.wait(closing, timeout=0.1)
    may_end.set()
    await asyncio.wait_for(asyncio.gather(*closing), 10)


async def test_a_coordinator_that_stops_does_not_wait_for_all_of_an_operations_time(
    make_fleet: Callable[..., Any],
) -> None:
    async with make_fleet(a=1) as fleet:
        held = Held(fleet, "pause_generation")
        header = RequestHeader(request_id=new_uuid7(), timeout=duration(3600))
        pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header)))
        await held.begun.wait()
        await asyncio.wait_for(fleet.server.stop(), 20)
        await asyncio.gather(pausing, return_exceptions=True)
        await fleet.channel.close()
        await fleet.start_coordinator(fleet.server.address)
        told = await fleet.stub.GetOperation(GetOperationRequest(operation_id=header.request_id))
        assert told.state == OPERATION_STATE_UNKNOWN
        assert [(r.slot, r.outcome, r.error.reason) for r in told.stage_results] == [
            ("a", OUTCOME_UNKNOWN, "LINK_LOST")
        ]
        held.may_end.set()


async def test_a_finalizer_that_comes_to_run_on_the_clients_own_loop_waits_for_nobody(fleet: InProcessFleet) -> None:
    client = await asyncio.to_thread(rlctl.connect, fleet.server.address)

    async def collected() -> None:
        for end in (client.status, client.close):
            with pytest.raises(RlctlError) as caught:
                end()
            assert caught.value.reason is Reason.ILLEGAL_STATE

    await asyncio.wait_for(client.loop.acall(collected()), 10)
    await asyncio.to_thread(client.close)


async def test_a_client_on_another_loop_than_its_own_is_refused(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    """It would not hear of new versions there, nor be woken."""

    async def misuse(client: aio.AsyncFleet, rollout: AsyncRollout, publisher: AsyncPublisher) -> None:
        async def watch() -> None:
            async with aclosing(client.watch()) as news:
                async for _ in news:
                    pass

        update = publisher.update(Source(), version="two", checkpoint=checkpoint("two"))
        for call in (client.status(), client.models(), client.generate([0]), rollout.generate([0]), watch(), update):
            with pytest.raises(RlctlError, match="another event loop") as caught:
                await asyncio.wait_for(call, 10)
            assert caught.value.reason is Reason.ILLEGAL_STATE

    async with await aio.connect(fleet.server.address) as client, client.publisher("actor") as publisher:
        for max_inflight_samples in (None, 1):
            rollout = client.rollout("actor", max_inflight_samples=max_inflight_samples)
            # Before it has heard of the fleet, and after.
            await asyncio.to_thread(asyncio.run, misuse(client, rollout, publisher))
            assert (await rollout.generate([0], max_new_tokens=1))[0].finished


async def test_former_channels_are_closed_within_one_grace(fleet: InProcessFleet) -> None:
    channel = LastingChannel(fleet.server.address, None, Role.COORDINATOR, CoordinatorServiceStub)
    watches = []
    for _ in range(4):
        watches.append(channel.stub.WatchFleet(WatchFleetRequest()))
        await watches[-1].read()
        channel._former.append(channel._channel)
        channel._open()  # as after a renewed certificate
    async with asyncio.timeout(1.5):
        await channel.close(0.5)
    assert all(watch.done() for watch in watches)
