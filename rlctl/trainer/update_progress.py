"""The progress of an update, as a trainer's program sees it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rlctl.contract.enums import short_name
from rlctl.v1.results_pb2 import Operation, Phase, PhaseKind

WAIT = "wait"
"""Phase of the time in which the coordinator waits for the trainer, as in a timeline."""

DONE = "done"
"""Phase of the last report of an update whose version is served."""


@dataclass(frozen=True)
class UpdateProgress:
    """Progress of a running update, at one moment.

    Attributes:
        update_id: id of the update and of its operation. "" until the coordinator has accepted the update.
        model: name of the model.
        version: label of the version.
        phase: the phase that began last, in the words of the timeline: prepare, pause, transfer, seal, apply, verify,
            publish, admit, resume, abort; wait between phases; done in the last report of a served version.
        elapsed_s: seconds since the call of ``update``.
        stages_done: stages that have answered in this phase. In a transfer of tensors 0 until all bytes are sent.
        stages_total: stages that this phase addresses. Of a rolling update, the stages of the batch. 0: none.
        bytes_sent: bytes that this trainer rank has sent in this attempt and batch, over all paths.
        bytes_total: bytes that this trainer rank sends in this attempt and batch. 0: nothing is sent yet, or the
            engines read a checkpoint.
        attempt: number of the attempt, from 1.
        batch: number of the batch of a rolling update in place, from 1. 0: every other update.
    """

    update_id: str
    model: str
    version: str
    phase: str
    elapsed_s: float
    stages_done: int
    stages_total: int
    bytes_sent: int
    bytes_total: int
    attempt: int
    batch: int


class ByteCount:
    """Bytes of a pass at this trainer rank. Sending threads add, and the event loop reads."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.sent = 0
        self._adding = threading.Lock()

    def add(self, number: int) -> None:
        """Count further bytes."""
        with self._adding:
            self.sent += number


@dataclass(frozen=True)
class PhaseNow:
    """Phase of an operation, with the numbers of stages that have answered and that are addressed."""

    name: str = WAIT
    done: int = 0
    total: int = 0

    @classmethod
    def of(cls, operation: Operation) -> PhaseNow:
        """Return the running phase that began last."""
        running = [phase for phase in operation.timeline.phases if phase.running]
        return cls._of(running[-1], len(operation.targets)) if running else cls()

    @classmethod
    def _of(cls, phase: Phase, target_count: int) -> PhaseNow:
        # Coordinators of older releases send no stage_count.
        total = phase.stage_count or (target_count if phase.stages else 0)
        return cls(short_name(PhaseKind.DESCRIPTOR, phase.kind), len(phase.stages), total)
