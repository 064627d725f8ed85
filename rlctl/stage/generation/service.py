"""RolloutService of a stage: generation on its own event loop, behind the gate."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import cast

from google.protobuf.message import Message

from rlctl.contract.durations import duration
from rlctl.contract.partial_responses import Merged
from rlctl.contract.sampling import check_pair_version
from rlctl.contract.validation import check
from rlctl.engine import Engine
from rlctl.ports import Clock
from rlctl.stage.generation.gate_watch import Ongoing
from rlctl.stage.generation.request_stream import Multiplexed
from rlctl.stage.serving_state import Serving
from rlctl.transport.denials import Denials
from rlctl.transport.quotas import Quotas
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import AbortRequest, GenerateManyResponse, GenerateRequest, GenerateResponse

Measure = Callable[[int], contextlib.AbstractContextManager[Callable[[GenerateResponse], None] | None]]
"""A block of a request for a number of samples. It may yield a function to call with each part of the answer."""


def unmeasured(_samples: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Generation:
    """The methods of RolloutService.

    ``engine`` returns the running engine. ``serving`` returns the present state of the stage, read at every message.
    """

    def __init__(
        self,
        engine: Callable[[], Engine],
        serving: Callable[[], Serving],
        clock: Clock,
        quotas: Quotas | None = None,
        measure: Measure = unmeasured,
    ) -> None:
        """``quotas``: of the stage, shared with the data port. ``measure`` is entered for each request."""
        self._engine = engine
        self._serving = serving
        self._clock = clock
        self._quotas = quotas or Quotas(Denials())
        self._measure = measure
        self._ongoing = Ongoing(serving, clock)
        self._many: set[Multiplexed] = set()
        self._closed = False

    async def generate(self, request: Message, remaining_s: float | None) -> GenerateResponse:
        """Return all samples of a prompt in one message."""
        merged = Merged()
        async with contextlib.aclosing(self.stream(request, remaining_s)) as parts:
            async for part in parts:
                merged.add(part)
        return merged.message()

    async def many(self, requests: AsyncIterator[Message]) -> AsyncGenerator[GenerateManyResponse, None]:
        """Yield the new parts of many requests of one caller."""
        multiplexed = Multiplexed(self.stream)
        self._many.add(multiplexed)
        if self._closed:
            multiplexed.end()
        try:
            async with contextlib.aclosing(multiplexed.serve(requests)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._many.discard(multiplexed)

    def close(self) -> None:
        """Accept no more requests on streams of many requests. Each stream ends with its last running request."""
        self._closed = True
        for multiplexed in self._many:
            multiplexed.end()

    async def stream(self, request: Message, remaining_s: float | None) -> AsyncGenerator[GenerateResponse, None]:
        """Yield new parts of an answer. At the deadline, the request is aborted at the engine."""
        request = cast(GenerateRequest, request)
        with self._measure(request.sampling_params.n) as take:
            check(request)
            request.rid = request.rid or self._clock.new_id()
            started = self._clock.now()
            serving = self._serving()
            serving.refuse(
                self._clock, model=request.model, min_version_seq=request.min_version_seq, adapter=request.adapter
            )
            check_pair_version(request, serving.version.sequence)
            deadline = float("inf") if remaining_s is None else started + remaining_s
            version: WeightVersion | None = None
            with self._quotas.places():
                ongoing = self._ongoing.begin(deadline, request.adapter)
                try:
                    async with contextlib.aclosing(self._engine().generate(request)) as parts:
                        while (part := await ongoing.next(parts)) is not None:
                            part.slot, part.incarnation = serving.slot, serving.incarnation
                            part.elapsed.CopyFrom(duration(self._clock.now() - started))
                            if version is not (version := self._serving().version):
                                part.weight_version.CopyFrom(version)
                            if take is not None:
                                take(part)
                            yield part
                finally:
                    self._ongoing.end(ongoing)

    async def abort(self, request: Message, _remaining_s: float | None) -> Message:
        """Abort requests by rid, or all."""
        request = cast(AbortRequest, request)
        check(request)
        return await self._engine().abort(request)
