"""An accepted operation: its record, its results in the order of the targets, and its end."""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections.abc import AsyncIterator, Callable

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.outcomes import explain_operation, of_targets
from rlctl.ports import Delete, Put
from rlctl.v1.common_pb2 import OUTCOME_NOT_SENT, OUTCOME_UNKNOWN
from rlctl.v1.journal_pb2 import OperationRecord
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_OK,
    OPERATION_STATE_RUNNING,
    Operation,
    StageResult,
    Timeline,
)

log = logging.getLogger(__name__)


def _nothing() -> None:
    """Cancel nothing: the operation cannot be cancelled, or has ended."""


class Run:
    """An accepted operation, running or ended."""

    def __init__(self, record: OperationRecord) -> None:
        self.record = record
        self.ended = asyncio.Event()
        self.place = record.operation.create_time.ToNanoseconds()
        """Place in the order of acceptance: the acceptance in nanoseconds, if no clock was set back before it."""
        self.begun_at = 0.0
        """Time of the acceptance, on the clock's ``now``."""
        self.ended_at = float("inf")
        """Time of the end, on the clock's ``now``."""
        self.step = False
        """Whether the operation is a step of an open update. The quota of its caller does not count steps."""
        self.traceparent = ""
        """W3C trace context of the call that started the operation."""
        self.task: asyncio.Task[None] | None = None
        self.cancel: Callable[[], None] = _nothing
        """Cancels running work; see :meth:`give_up`."""
        self.given_up = False
        """Whether the operation is cancelled. Work that has not begun then does not begin."""
        self.refused: RlctlError | None = None
        """Error of the journal that has prevented the acceptance."""
        self.changes_at_end: list[Put | Delete] = []
        """Journal changes to write with the end of the operation."""
        self.timelines: list[Callable[[Timeline], None]] = []
        """Functions that add the phases of a weight update or a heal, until the operation has ended."""
        self._changed = asyncio.Condition()
        self._places: dict[str, int] = {}
        """Place of each target in the order of the results; empty before the first result. Further stages come last."""
        self._filed: list[int] = []
        """Places of the present results, in ascending order."""
        if self.operation.state != OPERATION_STATE_RUNNING:
            self.ended.set()

    def give_up(self) -> None:
        """Cancel the parts that have not started."""
        self.given_up = True
        self.cancel()

    def refuse_given_up(self) -> None:
        """Raise CANCELLED if the operation was cancelled. Called before the first byte is sent."""
        if self.given_up:
            raise Reason.CANCELLED.error("cancelled before it began", outcome=OUTCOME_NOT_SENT)

    @property
    def operation(self) -> Operation:
        return self.record.operation

    def time_at(self, now: float) -> Timestamp:
        """Return the wall time of ``now`` by this operation's account: its acceptance, and the time since then.

        So an operation takes as long as it took, also if the wall clock is set meanwhile.
        """
        time = Timestamp()
        since_ns = round((now - self.begun_at) * 1e9)
        time.FromNanoseconds(self.operation.create_time.ToNanoseconds() + since_ns)
        return time

    def add(self, result: StageResult) -> None:
        """Add or replace the result of a target, in target order."""
        if not self._places:
            self._places = {name: index for index, name in enumerate(self.operation.targets)}
        place = self._places.setdefault(result.slot, len(self._places))
        filed = self.operation.stage_results
        index = bisect.bisect_left(self._filed, place)
        if index < len(self._filed) and self._filed[index] == place:
            filed[index].CopyFrom(result)
        elif index == len(self._filed):  # cheaper than an insert
            self._filed.append(place)
            filed.append(result)
        else:
            self._filed.insert(index, place)
            filed.insert(index, result)

    def conclude(self, *, update: bool = False, cause: RlctlError | None = None) -> None:
        """Set the final state and error from the targets' results. A target without a result becomes UNKNOWN.

        ``cause``: error of targets without a result. None: a missing result is a defect (INTERNAL).
        """
        operation = self.operation
        filed = list(operation.stage_results)  # each iteration over the field makes a thousand objects
        missing = set(operation.targets).difference(result.slot for result in filed)
        if missing:
            unfiled = cause or Reason.INTERNAL.error("no result was recorded for this target")
            for name in (name for name in operation.targets if name in missing):
                self.add(StageResult(slot=name, outcome=OUTCOME_UNKNOWN, error=unfiled.detail()))
            filed = list(operation.stage_results)
        operation.state = of_targets(filed, update=update)
        error = explain_operation(operation, update=update) if operation.state != OPERATION_STATE_OK else None
        if error is not None:
            operation.error.CopyFrom(error)

    def write_timeline(self) -> None:
        """Bring the record's timeline up to date. A failure is logged and does not end the operation."""
        if self.timelines:
            self.record.ClearField("timeline")
            for write in self.timelines:
                try:
                    write(self.record.timeline)
                except Exception:
                    log.exception("%s %s has a partial timeline", self.operation.verb, self.operation.operation_id)

    async def answer(self, *, replayed: bool = False, wait: bool = True) -> Operation:
        """Return the ended operation, which continues if the caller disconnects. Raises the cause of a refusal."""
        if wait:
            await self.ended.wait()
        if self.refused is not None:
            raise self.refused
        answer = Operation()
        answer.CopyFrom(self.operation)
        answer.replayed = replayed
        return answer

    async def end(self) -> None:
        """Notify waiting callers of the end, and drop everything but the record."""
        self.cancel = _nothing
        self._places, self._filed = {}, []
        self.ended.set()
        async with self._changed:
            self._changed.notify_all()

    async def watch(self) -> AsyncIterator[Operation]:
        """Yield the operation now and at its end."""
        while True:
            snapshot = Operation()
            snapshot.CopyFrom(self.operation)
            yield snapshot
            if snapshot.state != OPERATION_STATE_RUNNING:
                return
            async with self._changed:
                if self.operation.state == OPERATION_STATE_RUNNING:
                    await self._changed.wait()
