"""The samples of a call, run concurrently: returned together, or streamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlctl.contract.errors import Reason, RlctlError, typed, without_frames
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.placeholders import PREFERRED, PREFILL, SLOT
from rlctl.rollout.continuation import Progress
from rlctl.rollout.rollout import Place
from rlctl.rollout.sample import RolloutSample
from rlctl.v1.rollout_pb2 import Sample

log = logging.getLogger(__name__)

T = TypeVar("T")

_AT_ONCE = 16
"""Samples that start at a time."""


@dataclass(frozen=True)
class News:
    """New output of a sample.

    Attributes:
        index: number of the sample in the call.
        part: output since the previous news: text, tokens, log probabilities, versions and counts.
        prompt_ids: token ids of the prompt, if known.
        ended: the sample, once ended.
    """

    index: int
    part: Sample
    prompt_ids: Sequence[int]
    ended: RolloutSample | None = None


class _Text:
    """The text of a sample to stream. Text that may begin a stop string is held back.

    Engines hold such text back, too, but send it at a cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._told = 0

    def more(self, text: str) -> str:
        """Add text. Return the text to send now."""
        text = self._held + text
        overlap = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - overlap :]
        text = text[: len(text) - overlap]
        self._told += len(text)
        return text

    def rest(self, whole: str) -> str:
        """Return the unsent rest of the whole text."""
        return whole[self._told :]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text begin the stop string; never all of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)


def _joined(parts: Sequence[Sample]) -> Sample:
    joined = Sample()
    for each in parts:
        joined.output_ids.extend(each.output_ids)
        joined.output_logprobs.extend(each.output_logprobs)
        joined.versions.extend(each.versions)
        joined.cached_tokens, joined.retractions = each.cached_tokens, each.retractions
    return joined


async def whole(call: Call, samples: Sequence[RolloutSample]) -> list[RolloutSample]:
    """Return the ended samples. Raises QUOTA_EXCEEDED, and the first error; the other samples are then stopped."""
    place = await place_of(call)
    tasks: list[asyncio.Task[RolloutSample]] = []
    with call.generation.quotas.places(len(samples)):
        try:
            await _start(
                tasks,
                (call.generation.complete(sample, credentials=call.credentials, place=place) for sample in samples),
            )
            return await asyncio.gather(*tasks)
        finally:
            await _end(tasks)


async def streamed(call: Call, samples: Sequence[RolloutSample]) -> AsyncGenerator[News, None]:
    """Yield new output of any sample. Raises as :func:`whole`. Closing stops the samples.

    A slow caller gets more output at a time. The length of the samples bounds the waiting output.
    """
    waiting: dict[int, list[Sample]] = {}
    texts = [_Text(sample.request.sampling_params.stop) for sample in samples]
    prompts = [sample.prompt_ids for sample in samples]
    changed: asyncio.Queue[int | RlctlError] = asyncio.Queue()  # each sample has at most two entries
    ended: dict[int, RolloutSample] = {}
    place = await place_of(call)

    async def run(index: int) -> None:
        def tell(progress: Progress, part: Sample) -> None:
            prompts[index] = progress.prompt_ids
            if index not in waiting and not part.HasField("finish_reason"):  # a sample's end is sent complete
                changed.put_nowait(index)
            waiting.setdefault(index, []).append(part)

        try:
            ended[index] = await call.generation.complete(
                samples[index], credentials=call.credentials, place=place, on_progress=tell
            )
            changed.put_nowait(index)
        except Exception as error:
            if not isinstance(error, RlctlError):
                log.exception("sample %s failed", samples[index].request.rid)
            changed.put_nowait(without_frames(typed(error)))

    tasks: list[asyncio.Task[None]] = []
    remaining = len(samples)
    with call.generation.quotas.places(len(samples)):
        try:
            await _start(tasks, (run(index) for index in range(len(samples))))
            while remaining:
                index_or_error = await changed.get()
                if isinstance(index_or_error, RlctlError):
                    raise index_or_error
                parts = waiting.pop(index_or_error, ())
                ended_sample = ended.pop(index_or_error, None)
                remaining -= ended_sample is not None
                if parts or ended_sample is not None:
                    part = _joined(parts)
                    text = texts[index_or_error].more("".join(each.text for each in parts))
                    part.text = (
                        text if ended_sample is None else text + texts[index_or_error].rest(ended_sample.whole.text)
                    )
                    yield News(index_or_error, part, prompts[index_or_error], ended_sample)
        finally:
            await _end(tasks)


async def _start(tasks: list[asyncio.Task[T]], works: Iterable[Coroutine[Any, Any, T]]) -> None:
    """Start the works as tasks, a few at a time, so that other requests run meanwhile."""
    for number, work in enumerate(works, start=1):
        tasks.append(asyncio.create_task(work))
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)


async def place_of(call: Call) -> Place:
    """Return the stage of the URL. Raises STAGE_NOT_FOUND: a request does not wait for an unknown engine."""
    if PREFERRED in call.path:
        return Place(call.path[PREFERRED], only=False, prefill=call.path.get(PREFILL, ""))
    slot = call.path.get(SLOT, "")
    if slot and slot not in [stage.registration.slot for stage in await call.fleet.stages()]:
        raise Reason.STAGE_NOT_FOUND.error(f"there is no engine {slot!r}", field=SLOT)
    return Place(slot)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, BaseException):
            without_frames(ended)
