"""Fan-out of verbs in which ranks of several stages wait for each other. The first failure ends the waits of other
ranks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from google.protobuf.message import Message

from rlctl.contract.errors import Reason
from rlctl.contract.outcomes import acknowledged, blame, taken_back
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.fanout import Fanout
from rlctl.ports import Clock
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED, OUTCOME_UNKNOWN
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.verbs_pb2 import DestroyWeightsUpdateGroupRequest, InitWeightsUpdateGroupRequest

PROBE_S = 10.0
"""Time for every rank to check whether the rank can join a group."""

RENDEZVOUS_S = 30.0
"""Time for the rendezvous, once all ranks can join."""

LEAVE_S = 10.0

AGAIN_S = 0.2
"""Wait before a store that was unreachable is tried again."""


class Together:
    """Collective fan-outs of several stages in groups, under a single operation."""

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
        self._leaves: list[StageResult] = []
        """Results of the steps that let the ranks leave after a failure."""
        self._failed: StageResult | None = None

    async def join(
        self, request: InitWeightsUpdateGroupRequest, timeout_s: float, *, patient_s: float = 0.0
    ) -> list[StageResult]:
        """Join every rank into a group, once each rank can.

        A group of the same name may stand with a different store or shape. Its source has ended or forms the group
        anew, so the ranks leave first. ``patient_s``: longest wait for the store to be reachable. If a rank does not
        join, all ranks leave, and no stage's result is APPLIED.
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
                self._take_back(results)
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
        return results if self._leaving is None else self._take_back(results)

    def _take_back(self, results: Sequence[StageResult]) -> list[StageResult]:
        """Return and file the results after all ranks have left: no stage is in the group."""
        why = "the operation was cancelled" if self._failed is None else f"{self._failed.slot} did not join"
        remaining = {leave.slot: leave for leave in self._leaves if not has_left(leave)}
        changed = []
        for result in results:
            if acknowledged(result, update=True):
                cause, outcome = f"the group was not formed: {why}", OUTCOME_REJECTED
                if result.slot in remaining:
                    cause += f"; the stage may still be in the group: {remaining[result.slot].error.message}"
                    outcome = OUTCOME_UNKNOWN
                result = taken_back(result, cause, outcome)
                self._on_result(result)
            changed.append(result)
        return changed

    async def run(
        self,
        request: Message,
        timeout_s: float,
        *,
        step: str = "1",
        aside: bool = False,
        spares: Callable[[StageResult], bool] | None = None,
    ) -> list[StageResult]:
        """Send a verb. Returns results in the order of the stages. ``spares``: failures that do not end the waits of
        other ranks.
        """

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
            again=False,  # the other ranks would wait meanwhile
        )
        await self.has_left()
        return results

    def refuse_failed(self) -> None:
        """Raise the first failure, the cause of later failures."""
        if self._failed is not None:
            raise blame(self._failed)

    def leave(self) -> None:
        """Let all ranks leave the groups. This ends the waits inside."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())

    async def has_left(self) -> None:
        """Wait for the end of a started :meth:`leave`."""
        if self._leaving is not None:
            await self._leaving

    async def _leave(self) -> None:
        self._leaves = await self._destroy("leave")

    async def _destroy(self, step: str) -> list[StageResult]:
        results: list[StageResult] = []
        for name in self._group_names:
            results += await self._fanout.run(
                DestroyWeightsUpdateGroupRequest(group_name=name),
                self._slots,
                operation_id=self._operation_id,
                step=f"{step}-{name}",
                deadline=self._clock.now() + LEAVE_S,
            )
        return results


def _comes(result: StageResult) -> bool:
    """Whether the only failure is a store that does not listen yet, as the stage itself reports."""
    error = result.error
    rejected = result.outcome == OUTCOME_REJECTED and error.field == "master_address"
    return rejected and error.reason == Reason.UNREACHABLE.name


def _stands(result: StageResult) -> bool:
    """Whether the only failure is an existing group of the same name."""
    return result.outcome == OUTCOME_REJECTED and result.error.reason == Reason.GROUP_EXISTS.name


def has_left(result: StageResult) -> bool:
    """Whether every rank of a stage has left a group, or was not in the group."""
    not_found = Reason.GROUP_NOT_FOUND.name
    ranks = result.rank_results
    return bool(ranks) and all(rank.outcome == OUTCOME_APPLIED or rank.error.reason == not_found for rank in ranks)
