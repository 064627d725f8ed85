"""The half of a request that a prefill engine or a decode engine runs; generation loop only.

A prefill engine computes the prompt, scores it if requested, and gives its KV entries away. The request ends when the
entries were taken. A decode engine waits for the entries and continues from there. The decode engine computes the
prompt's last token itself, so that the first token is drawn like every other token. A sample that goes back to waiting
later (a pause, no slots) is recomputed at the decode engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rlctl.contract.errors import RlctlError
from rlctl.v1.rollout_pb2 import GenerateRequest, GenerateResponse
from rlctl_torch.disaggregation.bootstrap import ARRIVAL_S, Coming, Room, Rooms, asking
from rlctl_torch.disaggregation.kv_handover import failed
from rlctl_torch.generation.output_stream import Stream
from rlctl_torch.generation.scheduler import Scheduler
from rlctl_torch.requests.intake import Intake


async def prefill(
    request: GenerateRequest, intake: Intake, rooms: Rooms, scheduler: Scheduler
) -> AsyncGenerator[GenerateResponse, None]:
    """Compute a prompt for a decode engine, and yield its log probabilities if requested.

    Ends when the entries have been taken. Raises as :meth:`Intake.submit`, and RID_IN_USE and HANDOVER_FAILED.
    """
    async with rooms.open(request.bootstrap_room, request.model, request.adapter) as room:
        stream = intake.prefill(request, scheduler, room)
        watcher = asyncio.create_task(_look_after(room, stream, scheduler))
        try:
            async with aclosing(stream.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            scheduler.drop(stream)
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)


async def _look_after(room: Room, stream: Stream, scheduler: Scheduler) -> None:
    """End the request when the entries were taken, or when no decode engine is there to take entries."""
    answer, departure = asyncio.ensure_future(room.answer()), asyncio.ensure_future(room.departed.wait())
    try:
        await asyncio.wait({answer, departure}, return_when=asyncio.FIRST_COMPLETED)
        if not room.offered:
            scheduler.drop(stream, "the decode engine has left")
            return
        async with asyncio.timeout(ARRIVAL_S):
            await room.claimed.wait()
        await departure
        scheduler.hand_over(stream)
    except TimeoutError:
        scheduler.refuse(stream, failed(f"no decode engine has asked for them within {ARRIVAL_S:g} s"))
    finally:
        answer.cancel()
        departure.cancel()
        await asyncio.gather(answer, departure, return_exceptions=True)


async def decode(
    request: GenerateRequest, intake: Intake, scheduler: Scheduler
) -> AsyncGenerator[GenerateResponse, None]:
    """Generate from a prompt that a prefill engine computes.

    Raises as :meth:`Intake.submit`, and HANDOVER_FAILED; STAGE_NOT_SERVING if the entries' version is not served.
    """
    stream, awaits_entries = intake.decode(request, scheduler)
    fetch = asyncio.create_task(_fetch(request, stream, scheduler)) if awaits_entries else None
    try:
        async with aclosing(stream.messages()) as messages:
            async for message in messages:
                yield message
    finally:
        scheduler.drop(stream)
        if fetch is not None:
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)


async def _fetch(request: GenerateRequest, stream: Stream, scheduler: Scheduler) -> None:
    """Fetch the entries, and keep the connection until the samples have taken all entries."""
    loop, transferred = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        loop.call_soon_threadsafe(transferred.set)

    try:
        async with asking(request.bootstrap_host, request.bootstrap_port, request.bootstrap_room) as handover:
            scheduler.arrive(stream, Coming(handover, request.model, request.adapter, tell))
            await transferred.wait()
    except RlctlError as error:
        scheduler.refuse(stream, error)
