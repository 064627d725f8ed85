"""The fan-out of verbs in which ranks of several stages wait for each other in groups. The first failure ends the waits
of the other ranks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from google.protobuf.message import Message

from rlctl.contract.errors import Reason
from rlctl.contract.outcomes import acknowledged, blame
from rlctl.coordinator.fleet.roster import Slot
from rlctl.coordinator.operations.fanout import Fanout
from rlctl.ports import Clock
from rlctl.v1.common_pb2 import OUTCOME_REJECTED
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.verbs_pb2 import DestroyWeightsUpdateGroupRequest, InitWeightsUpdateGroupRequest

PROBE_S = 10.0
"""Time for every rank to find out whether it could join a group."""

RENDEZVOUS_S = 30.0
"""Time for the ranks to meet once all of them can."""

LEAVE_S = 10.0

AGAIN_S = 0.2
"""Until a store that could not be reached is looked for again."""


class Together:
    """What some stages do together in some groups, under one operation."""

    def __init__(
        self,
        fanout: Fanout,
        clock: Clock,
        slots: Sequence[Slot],
        operation_id: str,
        group_names: Sequence[str],
        on_result: Callable[[StageResult], None] = lambda _: None,
    ) -> None:
        self._fanout = fanout
        self._clock = clock
        self._slots = slots
        self._operation_id = operation_id
        self._group_names = group_names
        self._on_result = on_result
        self._leaving: asyncio.Task[None] | None = None
        self._failed: StageResult | None = None

    async def join(
        self, request: InitWeightsUpdateGroupRequest, timeout_s: float, *, patient_s: float = 0.0
    ) -> list[StageResult]:
        """Join every rank into a group, once each has found that it can.

        A group that stands under this name with another store or shape is of a source that has ended, or that forms it
        anew: the ranks leave that one first. ``patient_s``: how long it may take until the store can be reached.
        """
        probe = InitWeightsUpdateGroupRequest()
        probe.CopyFrom(request)
        probe.probe_only = True
        patient_until = self._clock.now() + min(timeout_s, patient_s)
        patient, replaced = False, False

        def passes(result: StageResult) -> bool:
            return (patient and _comes(result)) or (not replaced and _stands(result))

        for attempt in itertools.count():
            patient = self._clock.now() < patient_until
            step = f"probe-{attempt}" if attempt else "probe"
            results = await self.run(probe, min(timeout_s, PROBE_S), step=step, spares=passes)
            failed = [result for result in results if not acknowledged(result, update=True)]
            if self._leaving is not None and self._failed is None:
                raise Reason.CANCELLED.error("cancelled before the group was formed")
            if not (failed and all(map(passes, failed))):
                break
            if any(map(_stands, failed)):
                await self._destroy("replace")
                replaced = True
            else:
                await asyncio.sleep(AGAIN_S)
        if all(acknowledged(result, update=True) for result in results):
            results = await self.run(request, min(timeout_s, RENDEZVOUS_S))
        return results

    async def run(
        self,
        request: Message,
        timeout_s: float,
        *,
        step: str = "1",
        aside: bool = False,
        spares: Callable[[StageResult], bool] | None = None,
    ) -> list[StageResult]:
        """One verb, in the order of the stages. ``spares``: failures that do not end the others."""

        def took(result: StageResult) -> None:
            self._on_result(result)
            if not acknowledged(result, update=True) and not (spares and spares(result)):
                self._failed = self._failed or result
                self.leave()

        results = await self._fanout.run(
            request,
            self._slots,
            operation_id=self._operation_id,
            step=step,
            deadline=self._clock.now() + timeout_s,
            on_result=took,
            aside=aside,
            again=False,  # the others would wait for it meanwhile
        )
        await self.left()
        return results

    def refuse_failed(self) -> None:
        """Raise what the first one said that failed: what the others say follows from it."""
        if self._failed is not None:
            raise blame(self._failed)

    def leave(self) -> None:
        """Let all ranks leave the groups, and break what waits in them."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())

    async def left(self) -> None:
        """Wait until they have, if they were told to."""
        if self._leaving is not None:
            await self._leaving

    async def _leave(self) -> None:
        await self._destroy("leave")

    async def _destroy(self, step: str) -> None:
        for name in self._group_names:
            await self._fanout.run(
                DestroyWeightsUpdateGroupRequest(group_name=name),
                self._slots,
                operation_id=self._operation_id,
                step=f"{step}-{name}",
                deadline=self._clock.now() + LEAVE_S,
            )


def _comes(result: StageResult) -> bool:
    """Whether nothing is wrong but that the store does not listen yet: the stage itself says so."""
    error = result.error
    said = result.outcome == OUTCOME_REJECTED and error.field == "master_address"
    return said and error.reason == Reason.UNREACHABLE.name


def _stands(result: StageResult) -> bool:
    """Whether nothing is wrong but that another group of this name stands."""
    return result.outcome == OUTCOME_REJECTED and result.error.reason == Reason.GROUP_EXISTS.name
