"""The port through which the coordinator reports events, for metrics and traces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rlctl.v1.journal_pb2 import OperationRecord

log = logging.getLogger(__name__)


class Observer:
    """Receives events of the coordinator. This class does nothing."""

    def operation_ended(self, record: OperationRecord, took_s: float, traceparent: str) -> None:
        """An operation has ended, with its outcomes and timeline. ``traceparent``: from the call that started the
        operation.
        """

    def fan_out_ended(self, verb: str, took_s: float) -> None:
        """All stages of a fan-out have a result."""

    def quarantined(self, model: str, reason: str) -> None:
        """A stage of a model was quarantined."""


class Observers(Observer):
    """Passes events on to several observers. An exception in an observer is logged and changes no operation."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def operation_ended(self, record: OperationRecord, took_s: float, traceparent: str) -> None:
        self._each(lambda observer: observer.operation_ended(record, took_s, traceparent))

    def fan_out_ended(self, verb: str, took_s: float) -> None:
        self._each(lambda observer: observer.fan_out_ended(verb, took_s))

    def quarantined(self, model: str, reason: str) -> None:
        self._each(lambda observer: observer.quarantined(model, reason))

    def _each(self, event: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                event(observer)
            except Exception:
                log.exception("%s failed at an event", type(observer).__name__)
