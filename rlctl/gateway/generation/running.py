"""The samples of one call, side by side: as a whole, or as they come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.client.rollout import Place
from rlctl.errors import Reason, RlctlError, typed
from rlctl.gateway.call import Call
from rlctl.rollout.progress import Progress
from rlctl.rollout.sample import RolloutSample
from rlctl.v1.rollout_pb2 import Sample

log = logging.getLogger(__name__)

SLOT, PREFERRED, PREFILL = "slot", "preferred", "prefill"
"""Placeholders of routes that ask one engine, and of those that ask it if they can, also to compute the prompt."""
ANY = "-"
"""Stands where a slot's name stands, and is none: whoever serves first is asked."""


@dataclass(frozen=True)
class News:
    """What is new of one sample.

    Attributes:
        index: its number in the call.
        parts: what has come since the last time.
        ended: all of it, once it has ended.
    """

    index: int
    parts: Sequence[Sample]
    ended: RolloutSample | None = None

    @property
    def part(self) -> Sample:
        """What has come, as one: its text, tokens and log probabilities."""
        joined = Sample(text="".join(each.text for each in self.parts))
        for each in self.parts:
            joined.output_ids.extend(each.output_ids)
            joined.output_logprobs.extend(each.output_logprobs)
        return joined


async def whole(call: Call, samples: Sequence[RolloutSample]) -> list[RolloutSample]:
    """All of them, as they ended. Raises what the first to fail fails with; the others are ended then."""
    place = await _place(call)
    tasks = [asyncio.create_task(call.generation.complete(sample, token=call.token, place=place)) for sample in samples]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def streamed(call: Call, samples: Sequence[RolloutSample]) -> AsyncGenerator[News, None]:
    """What is new, of whichever sample has something. Raises as :func:`whole`. Closing it ends them.

    A caller that reads slowly gets more at a time: what waits for it is bounded by the samples' length.
    """
    waiting: dict[int, list[Sample]] = {}
    changed: asyncio.Queue[int | RlctlError] = asyncio.Queue()
    ended: dict[int, RolloutSample] = {}
    place = await _place(call)

    async def run(index: int) -> None:
        def tell(_progress: Progress, part: Sample) -> None:
            if index not in waiting and not part.HasField(
                "finish_reason"
            ):  # an end is told with all that belongs to it
                changed.put_nowait(index)
            waiting.setdefault(index, []).append(part)

        try:
            ended[index] = await call.generation.complete(samples[index], token=call.token, place=place, told=tell)
            changed.put_nowait(index)
        except Exception as error:
            if not isinstance(error, RlctlError):
                log.exception("sample %s failed", samples[index].request.rid)
            changed.put_nowait(typed(error))

    tasks = [asyncio.create_task(run(index)) for index in range(len(samples))]
    left = len(tasks)
    try:
        while left:
            told = await changed.get()
            if isinstance(told, RlctlError):
                raise told
            parts = waiting.pop(told, ())
            over = ended.pop(told, None)
            left -= over is not None
            if parts or over is not None:
                yield News(told, parts, over)
    finally:
        await _end(tasks)


async def _place(call: Call) -> Place:
    """Where the address says. Raises STAGE_NOT_FOUND: nobody waits for an engine that there is not."""
    if PREFERRED in call.path:
        return Place(call.path[PREFERRED], only=False, prefill=call.path.get(PREFILL, ""))
    slot = call.path.get(SLOT, "")
    if slot and slot not in [stage.registration.slot for stage in await call.fleet.stages()]:
        raise Reason.STAGE_NOT_FOUND.error(f"there is no engine {slot!r}", field=SLOT)
    return Place(slot)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
