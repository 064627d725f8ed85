"""The timeline of one update: its phases, and the time of each stage and rank in them.

The timeline is the only record of where the time of an update went. It is journaled with the operation; metrics read it
when the operation has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rlctl.contract.durations import seconds, set_duration
from rlctl.coordinator.fleet.roster import Slot
from rlctl.coordinator.operations.operations import Run
from rlctl.coordinator.transaction.verification_levels import Level
from rlctl.ports import Clock
from rlctl.v1.common_pb2 import TRANSPORT_DISK, Transport
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
    RankResult,
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
"""Kind of the phase that a step of an update belongs to, by verb. Steps of other verbs are in no phase."""

_FROM_DISK = ("UpdateWeightsFromDisk", "LoadAdapter")

OnResult = Callable[[StageResult], None]
Transports = Callable[[], Mapping[str, Transport.ValueType]]
"""Transport of the tensors by slot, for writes that do not read from disk."""


class UpdateTimeline:
    """Records the phases of one update. Steps of one kind in one batch and attempt are one phase."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timeline = Timeline()
        self._origin = clock.now()
        self._phases: dict[PhaseKind.ValueType, Phase] = {}
        self._stages: dict[tuple[PhaseKind.ValueType, str], StagePhase] = {}

    def belong_to(self, run: Run) -> None:
        """Record into the operation of a run. Steps before this call are not recorded."""
        self._timeline, self._origin = run.record.timeline, run.begun_at

    def turn(self) -> None:
        """Begin the phases of another batch or attempt."""
        self._phases, self._stages = {}, {}

    @contextlib.contextmanager
    def phase(self, kind: PhaseKind.ValueType) -> Iterator[None]:
        """Record work of the coordinator."""
        started = self._clock.now()
        try:
            yield
        finally:
            self._phase(kind, started)

    @contextlib.contextmanager
    def step(self, verb: str, slots: Sequence[Slot], transports: Transports) -> Iterator[OnResult]:
        """Record a step. Yields the function that takes each result when it comes."""
        kind = KINDS.get(verb)
        started = self._clock.now()
        answers: list[tuple[StageResult, float]] = []
        try:
            yield lambda result: answers.append((result, self._clock.now()))
        finally:
            if kind is not None and slots:
                phase = self._phase(kind, started)
                writes = transports() if kind == PHASE_KIND_TRANSFER and verb not in _FROM_DISK else {}
                for result, at in answers:
                    stage = self._stage(kind, phase, result.slot)
                    _add(stage, result, at - self._origin - seconds(phase.start))
                    if kind == PHASE_KIND_TRANSFER:
                        stage.transport = writes.get(result.slot, TRANSPORT_DISK)
                        _replace_transfers(stage, result.rank_results)

    def fail(self, slots: Iterable[str], level: Mapping[str, Level] | Level) -> None:
        """Record the level of verification that stages have failed, for all or by slot."""
        for slot in slots:
            phase = self._phases.get(PHASE_KIND_VERIFY) or self._phase(PHASE_KIND_VERIFY, self._clock.now())
            stage = self._stage(PHASE_KIND_VERIFY, phase, slot)
            stage.failed_level = level[slot] if isinstance(level, Mapping) else level

    def _phase(self, kind: PhaseKind.ValueType, started: float) -> Phase:
        """The phase of this kind, with one more step, which ends now."""
        phase = self._phases.get(kind)
        if phase is None:
            phase = self._phases[kind] = self._timeline.phases.add(kind=kind)
            set_duration(phase.start, max(0.0, started - self._origin))
        set_duration(phase.duration, max(0.0, self._clock.now() - self._origin - seconds(phase.start)))
        phase.steps += 1
        return phase

    def _stage(self, kind: PhaseKind.ValueType, phase: Phase, slot: str) -> StagePhase:
        stage = self._stages.get((kind, slot))
        if stage is None:
            stage = self._stages[kind, slot] = phase.stages.add(slot=slot)
        return stage


def _add(stage: StagePhase, result: StageResult, answered_s: float) -> None:
    """``answered_s``: time of the answer, from the start of the phase."""
    stage.outcome = result.outcome
    answered_s = max(answered_s, seconds(stage.duration))
    set_duration(stage.duration, answered_s)
    # A stage counts from the receipt of a command: the times of commands that wait for each other overlap.
    set_duration(stage.elapsed, min(answered_s, seconds(stage.elapsed) + seconds(result.elapsed)))
    slowest = max(result.rank_results, key=lambda rank: seconds(rank.elapsed), default=None)
    if slowest is not None:
        stage.slowest_rank = slowest.coordinates.rank


def _replace_transfers(stage: StagePhase, ranks: Sequence[RankResult]) -> None:
    """Take in what ranks report of the transfer. Their reports count from the beginning of the attempt."""
    reported = [rank for rank in ranks if rank.HasField("weights")]
    if reported:
        del stage.ranks[:]
    for rank in reported:
        report = rank.weights
        stage.ranks.add(
            rank=rank.coordinates.rank, bytes=report.bytes_received, transfer=report.transfer, load=report.load
        )
