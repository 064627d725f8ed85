"""The port through which the coordinator reports events, for metrics."""

from __future__ import annotations

from rlctl.v1.journal_pb2 import OperationRecord


class Observer:
    """Receives events of the coordinator. This one ignores them."""

    def operation_ended(self, record: OperationRecord, took_s: float) -> None:
        """An operation has ended, with its outcomes and its timeline."""

    def fan_out_ended(self, verb: str, took_s: float) -> None:
        """All stages of a fan-out have a result."""

    def quarantined(self, model: str, reason: str) -> None:
        """A stage of a model was quarantined."""
