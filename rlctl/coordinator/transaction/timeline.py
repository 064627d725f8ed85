"""The timeline of an update: phases, and the time of each stage and rank in a phase.

The timeline is the only record of the times of an update. The journal keeps it with the operation. Metrics read it when
the operation has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlctl.contract.durations import seconds, set_duration
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.transaction.verification_levels import Level
from rlctl.ports import Clock
from rlctl.v1.common_pb2 import (
    TRANSPORT_DISK,
    TRANSPORT_UNSPECIFIED,
    VERIFICATION_LEVEL_UNSPECIFIED,
    Transport,
)
from rlctl.v1.results_pb2 import (
    PHASE_KIND_ABORT,
    PHASE_KIND_APPLY,
    PHASE_KIND_PAUSE,
    PHASE_KIND_PREPARE,
    PHASE_KIND_RESUME,
    PHASE_KIND_SEAL,
    PHASE_KIND_TRANSFER,
    PHASE_KIND_VERIFY,
    Phase,
    PhaseKind,
    StagePhase,
    StageResult,
    Timeline,
)

KINDS: Mapping[str, PhaseKind.ValueType] = {
    "InspectCheckpoint": PHASE_KIND_PREPARE,
    "PrepareUpdate": PHASE_KIND_PREPARE,
    "PauseGeneration": PHASE_KIND_PAUSE,
    "UpdateWeightsFromTensor": PHASE_KIND_TRANSFER,
    "UpdateWeightsFromDistributed": PHASE_KIND_TRANSFER,
    "UpdateWeightsFromDisk": PHASE_KIND_TRANSFER,
    "LoadAdapter": PHASE_KIND_TRANSFER,
    "SealUpdate": PHASE_KIND_SEAL,
    "CommitUpdate": PHASE_KIND_APPLY,
    "FlushCache": PHASE_KIND_APPLY,
    "CheckWeights": PHASE_KIND_VERIFY,
    "ContinueGeneration": PHASE_KIND_RESUME,
    "AbortUpdate": PHASE_KIND_ABORT,
}
"""Phase of each verb of an update. Steps of other verbs are in no phase."""

_FROM_DISK = ("UpdateWeightsFromDisk", "LoadAdapter")

OnResult = Callable[[StageResult], None]
Transports = Callable[[], Mapping[str, Transport.ValueType]]
"""Transport of the tensors by slot, for writes that do not read from disk."""


@dataclass(slots=True)
class _Stage:
    """A stage in a phase. ``answered_at`` is on the clock's ``now``."""

    answered_at: float = 0.0
    elapsed_s: float = 0.0
    result: StageResult | None = None
    transport: Transport.ValueType = TRANSPORT_UNSPECIFIED
    failed_level: Level = VERIFICATION_LEVEL_UNSPECIFIED


@dataclass(slots=True)
class _Phase:
    kind: PhaseKind.ValueType
    started_at: float
    ended_at: float = 0.0
    steps: int = 0
    running: int = 0
    addressed: set[str] = field(default_factory=set)
    stages: dict[str, _Stage] = field(default_factory=dict)
    message: Phase | None = None
    """The written message, if nothing has changed since."""


class UpdateTimeline:
    """Records the phases of an update. Steps of the same kind in the same batch and attempt are one phase.

    :meth:`write` makes the messages at the end of the operation, or for an earlier read. The engines wait during most
    steps, so no messages are made then.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._origin = clock.now()
        self._phases: list[_Phase] = []
        self._present: dict[PhaseKind.ValueType, _Phase] = {}

    def belong_to(self, run: Run) -> None:
        """Add this timeline to an operation."""
        self._origin = run.begun_at
        run.timelines.append(self.write)

    def turn(self) -> None:
        """Begin the phases of the next batch or attempt."""
        self._present = {}

    @contextlib.contextmanager
    def phase(self, kind: PhaseKind.ValueType) -> Iterator[None]:
        """Record work of the coordinator."""
        phase = self._begin(kind)
        try:
            yield
        finally:
            self._end(phase)

    @contextlib.contextmanager
    def step(self, verb: str, slots: Sequence[Slot], transports: Transports) -> Iterator[OnResult]:
        """Record a step. Yields the function that takes each result on arrival."""
        kind = KINDS.get(verb)
        if kind is None or not slots:
            yield lambda _: None
            return
        phase, now = self._begin(kind), self._clock.now
        phase.addressed.update(slot.name for slot in slots)
        writes = transports() if kind == PHASE_KIND_TRANSFER and verb not in _FROM_DISK else {}
        default = TRANSPORT_DISK if verb in _FROM_DISK else TRANSPORT_UNSPECIFIED

        def take(result: StageResult) -> None:
            stage = phase.stages.get(result.slot)
            if stage is None:
                stage = phase.stages[result.slot] = _Stage(transport=writes.get(result.slot, default))
            stage.result, stage.answered_at = result, now()
            stage.elapsed_s += seconds(result.elapsed)

        try:
            yield take
        finally:
            self._end(phase)

    def fail(self, slots: Iterable[str], level: Mapping[str, Level] | Level) -> None:
        """Record the level of verification that stages have failed: a single level or levels by slot."""
        for slot in slots:
            phase = self._present.get(PHASE_KIND_VERIFY)
            if phase is None:
                phase = self._begin(PHASE_KIND_VERIFY)
                self._end(phase)
            phase.message = None
            stage = phase.stages.setdefault(slot, _Stage(answered_at=phase.ended_at))
            stage.failed_level = level[slot] if isinstance(level, Mapping) else level

    def write(self, timeline: Timeline) -> None:
        """Add the phases, ordered by their starts."""
        for phase in sorted(self._phases, key=lambda phase: phase.started_at):
            if phase.message is None or phase.running:
                phase.message = self._message(phase)
            timeline.phases.append(phase.message)

    def _message(self, phase: _Phase) -> Phase:
        written = Phase(
            kind=phase.kind, steps=phase.steps, running=bool(phase.running), stage_count=len(phase.addressed)
        )
        ended_at = self._clock.now() if phase.running else phase.ended_at
        set_duration(written.start, max(0.0, phase.started_at - self._origin))
        set_duration(written.duration, max(0.0, ended_at - phase.started_at))
        for slot, stage in phase.stages.items():
            _write_stage(written.stages.add(slot=slot), stage, phase)
        return written

    def _begin(self, kind: PhaseKind.ValueType) -> _Phase:
        """Return the phase of a kind, with a further step that begins now."""
        phase = self._present.get(kind)
        if phase is None:
            phase = self._present[kind] = _Phase(kind, self._clock.now())
            self._phases.append(phase)
        phase.steps += 1
        phase.running += 1
        return phase

    def _end(self, phase: _Phase) -> None:
        phase.ended_at = self._clock.now()
        phase.running -= 1
        phase.message = None


def _write_stage(written: StagePhase, stage: _Stage, phase: _Phase) -> None:
    answered_s = max(0.0, stage.answered_at - phase.started_at)
    set_duration(written.duration, answered_s)
    # A stage counts from the receipt of a command: times of commands that wait for each other overlap.
    set_duration(written.elapsed, max(0.0, min(answered_s, stage.elapsed_s)))
    written.transport, written.failed_level = stage.transport, stage.failed_level
    if stage.result is None:
        return
    written.outcome = stage.result.outcome
    ranks = stage.result.rank_results
    if ranks:
        written.slowest_rank = max(ranks, key=lambda rank: seconds(rank.elapsed)).coordinates.rank
    for rank in ranks if phase.kind == PHASE_KIND_TRANSFER else ():
        if rank.HasField("weights"):
            report = rank.weights  # counts from the beginning of the attempt
            written.ranks.add(
                rank=rank.coordinates.rank, bytes=report.bytes_received, transfer=report.transfer, load=report.load
            )
