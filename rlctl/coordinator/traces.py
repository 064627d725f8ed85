"""Spans of operations, made at the end of an operation from the record that GetOperation sends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from google.protobuf.duration_pb2 import Duration
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer, set_span_in_context

from rlctl.contract.enums import short_name
from rlctl.coordinator.fleet.observer import Observer
from rlctl.traces.tracing import fail, parent
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_SKIPPED, Outcome, Transport, VerificationLevel
from rlctl.v1.journal_pb2 import OperationRecord
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_OK,
    OperationState,
    Phase,
    PhaseKind,
    RankTransfer,
    StagePhase,
    StageResult,
)

log = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Ended operations whose spans are not made yet. Further ones get no trace: a record may have 300 kB."""

Attributes = Mapping[str, str | int | float]


class OperationTraces(Observer):
    """Makes a trace of every operation, in a thread, since an operation of a large fleet has thousands of spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._thread = ThreadPoolExecutor(1, "rlctl traces")
        self._places = threading.BoundedSemaphore(MOST_WAITING)

    def stop(self) -> None:
        """Wait for the spans of ended operations."""
        self._thread.shutdown()

    def operation_ended(self, record: OperationRecord, took_s: float, traceparent: str) -> None:
        if not self._places.acquire(blocking=False):
            log.warning("%s has no trace: %d operations wait for theirs", record.operation.operation_id, MOST_WAITING)
            return
        self._thread.submit(self._trace, record, took_s, traceparent)

    def _trace(self, record: OperationRecord, took_s: float, traceparent: str) -> None:
        try:
            _Spans(self._tracer, record, took_s).make(traceparent)
        except Exception:
            log.exception("%s has no trace", record.operation.operation_id)
        finally:
            self._places.release()


class _Spans:
    """The spans of an operation. Times are nanoseconds since 1970: acceptance of the operation plus times of the
    record.
    """

    def __init__(self, tracer: Tracer, record: OperationRecord, took_s: float) -> None:
        self._tracer = tracer
        self._record = record
        self._start = record.operation.create_time.ToNanoseconds()
        self._end = self._start + int(took_s * 1e9)

    def make(self, traceparent: str) -> None:
        operation = self._record.operation
        attributes: Attributes = {
            "rlctl.operation_id": operation.operation_id,
            "rlctl.model": operation.model,
            "rlctl.adapter": operation.adapter,
            "rlctl.state": short_name(OperationState.DESCRIPTOR, operation.state),
            "rlctl.weight_version": operation.weight_version.label,
            "rlctl.weight_version_seq": operation.weight_version.sequence,
        }
        span = self._tracer.start_span(
            operation.verb, parent(traceparent), SpanKind.SERVER, _set(attributes), start_time=self._start
        )
        if span.is_recording():
            if operation.state != OPERATION_STATE_OK:
                fail(span, operation.error.reason)
            inside = set_span_in_context(span)
            for phase in self._record.timeline.phases:
                self._phase(phase, inside)
            if not self._record.timeline.phases:
                for result in operation.stage_results:
                    self._result(result, inside)
        span.end(self._end)

    def _phase(self, phase: Phase, inside: Context) -> None:
        start = self._start + phase.start.ToNanoseconds()
        name = short_name(PhaseKind.DESCRIPTOR, phase.kind)
        within = self._span(name, inside, start, phase.duration, {"rlctl.steps": phase.steps})
        for stage in phase.stages:
            self._stage(stage, within, start)

    def _stage(self, stage: StagePhase, inside: Context, start: int) -> None:
        attributes: Attributes = {
            "rlctl.slot": stage.slot,
            "rlctl.elapsed_s": stage.elapsed.ToNanoseconds() / 1e9,
            "rlctl.slowest_rank": stage.slowest_rank,
            "rlctl.transport": short_name(Transport.DESCRIPTOR, stage.transport),
            "rlctl.failed_level": short_name(VerificationLevel.DESCRIPTOR, stage.failed_level),
        }
        within = self._span(f"stage {stage.slot}", inside, start, stage.duration, attributes, stage.outcome)
        for rank in stage.ranks:
            self._transfer(rank, within, start, stage.duration.ToNanoseconds())

    def _transfer(self, rank: RankTransfer, inside: Context, start: int, longest: int) -> None:
        elapsed = Duration()
        elapsed.FromNanoseconds(min(longest, rank.transfer.ToNanoseconds() + rank.load.ToNanoseconds()))
        attributes = {
            "rlctl.rank": rank.rank,
            "rlctl.bytes": rank.bytes,
            "rlctl.transfer_s": rank.transfer.ToNanoseconds() / 1e9,
            "rlctl.load_s": rank.load.ToNanoseconds() / 1e9,
        }
        self._span(f"rank {rank.rank}", inside, start, elapsed, attributes)

    def _result(self, result: StageResult, inside: Context) -> None:
        within = self._span(
            f"stage {result.slot}", inside, self._start, result.elapsed, {"rlctl.slot": result.slot}, result.outcome
        )
        for entry in result.rank_results:
            rank = entry.coordinates.rank
            self._span(f"rank {rank}", within, self._start, entry.elapsed, {"rlctl.rank": rank}, entry.outcome)

    def _span(
        self,
        name: str,
        inside: Context,
        start: int,
        took: Duration,
        attributes: Attributes,
        outcome: Outcome.ValueType = OUTCOME_APPLIED,
    ) -> Context:
        """Make a span. Returns the context for child spans. A span ends with the operation at the latest."""
        span = self._tracer.start_span(name, inside, attributes=_set(attributes), start_time=start)
        if outcome not in (OUTCOME_APPLIED, OUTCOME_SKIPPED):
            fail(span, short_name(Outcome.DESCRIPTOR, outcome).upper())
        span.end(min(self._end, start + took.ToNanoseconds()))
        return set_span_in_context(span)


def _set(attributes: Attributes) -> Attributes:
    """Return the attributes with a value. Numbers always have a value."""
    return {name: value for name, value in attributes.items() if value != ""}
