"""What an engine of a pair does with a request: its half. On the generation loop.

A prefill engine computes the prompt, scores it if that was asked for, and gives its KV entries away; it ends the
request when they were taken. A decode engine waits for them and goes on from there; it computes the prompt's last token
itself, so that the first token is drawn like every other one. A sample that it sends back to waiting later (a pause, no
slots) it computes anew by itself.
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
    """Compute a prompt for a decode engine; yields its log probabilities if they were asked for. It ends when the
    entries have been taken. Raises as :meth:`Intake.submit`, RID_IN_USE, HANDOVER_FAILED.
    """
    async with rooms.open(request.bootstrap_room, request.model, request.adapter) as room:
        stream = intake.prefill(request, scheduler, room)
        watching = asyncio.create_task(_look_after(room, stream, scheduler))
        try:
            async with aclosing(stream.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            scheduler.drop(stream)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _look_after(room: Room, stream: Stream, scheduler: Scheduler) -> None:
    """End the request when the entries were taken, or nobody is there to take them."""
    answer, left = asyncio.ensure_future(room.answer()), asyncio.ensure_future(room.left.wait())
    try:
        await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        if not room.offered:
            scheduler.drop(stream, "the decode engine has left")
            return
        async with asyncio.timeout(ARRIVAL_S):
            await room.asked.wait()
        await left
        scheduler.hand_over(stream)
    except TimeoutError:
        scheduler.refuse(stream, failed(f"no decode engine has asked for them within {ARRIVAL_S:g} s"))
    finally:
        answer.cancel()
        left.cancel()
        await asyncio.gather(answer, left, return_exceptions=True)


async def decode(
    request: GenerateRequest, intake: Intake, scheduler: Scheduler
) -> AsyncGenerator[GenerateResponse, None]:
    """Generate from a prompt that a prefill engine computes. Raises as :meth:`Intake.submit`, HANDOVER_FAILED,
    STAGE_NOT_SERVING where the entries are of another version.
    """
    stream, awaited = intake.decode(request, scheduler)
    fetching = asyncio.create_task(_fetch(request, stream, scheduler)) if awaited else None
    try:
        async with aclosing(stream.messages()) as messages:
            async for message in messages:
                yield message
    finally:
        scheduler.drop(stream)
        if fetching is not None:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)


async def _fetch(request: GenerateRequest, stream: Stream, scheduler: Scheduler) -> None:
    """Get the entries, and keep them until the samples have them."""
    loop, taken = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        loop.call_soon_threadsafe(taken.set)

    try:
        async with asking(request.bootstrap_host, request.bootstrap_port, request.bootstrap_room) as handover:
            scheduler.arrive(stream, Coming(handover, request.model, request.adapter, tell))
            await taken.wait()
    except RlctlError as error:
        scheduler.refuse(stream, error)
