"""Sends a verb to many stages, and returns one result for each, also after failures of link or stage."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.outcomes import of_ranks, one_per_rank
from rlctl.contract.verbs import Verb, of_request
from rlctl.coordinator.fleet.capabilities import incapable
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.fleet.stage_links import Peers
from rlctl.coordinator.operations.run import Run
from rlctl.ports import Clock
from rlctl.v1.common_pb2 import (
    OUTCOME_DIRTY,
    OUTCOME_NOT_SENT,
    OUTCOME_REJECTED,
    OUTCOME_SKIPPED,
    OUTCOME_UNKNOWN,
    Outcome,
)
from rlctl.v1.control_pb2 import CommandResult
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest

log = logging.getLogger(__name__)

_WITHOUT_RANKS = (OUTCOME_REJECTED, OUTCOME_SKIPPED, OUTCOME_NOT_SENT, OUTCOME_UNKNOWN)
"""Outcomes of a stage, or of the coordinator, that may come without results of ranks."""


AT_ONCE = 8
"""Number of commands that are issued between two sends. The first stages then work while further commands are
issued."""


@contextlib.contextmanager
def continuing(slots: Sequence[Slot], adapter: str) -> Iterator[None]:
    """Mark stages that a ContinueGeneration addresses. Such stages do not count as paused, regardless of reports."""
    for slot in slots:
        slot.continuing[adapter] += 1
    try:
        yield
    finally:
        for slot in slots:
            slot.continuing[adapter] -= 1


class Fanout:
    """Sends verbs to stages over the links."""

    def __init__(self, roster: Roster, peers: Peers, clock: Clock) -> None:
        self._roster = roster
        self._peers = peers
        self._clock = clock
        self._turn = asyncio.Lock()
        self._withdrawn: dict[tuple[str, str], bool] = {}
        """For each step that is being issued: whether the rest must not be sent."""

    async def run(
        self,
        request: Message,
        slots: Sequence[Slot],
        *,
        operation_id: str,
        step: str,
        deadline: float,
        on_result: Callable[[StageResult], None] = lambda _: None,
        aside: bool = False,
        again: bool = True,
        lenient: bool = False,
    ) -> list[StageResult]:
        """Return results in the order of ``slots``. The request is serialised once, with the fence.

        A stage is quarantined if a mutating verb ends UNKNOWN or DIRTY there, unless the verb touches no served weights
        (groups, steps of a staged update). Reads quarantine no stage: the stage reports its own state, and the answer
        may be old.

        Args:
            step: name of the fan-out within the operation. Operation, slot, incarnation and step identify a command, so
                that a repeat after a broken link gets the recorded result.
            aside: a step that touches no served weights. Only DIRTY then quarantines.
            again: repeat the command over the next link after a broken link.
            lenient: return the results even if a quarantine could not be recorded; the record is retried. Otherwise
                JOURNAL_FAILED is raised, since a crash would forget the quarantine and no decision may depend on it.
        """
        verb = of_request(request)
        started = self._clock.now()
        changes = verb.mutates(request)
        results: dict[Slot, StageResult] = {}
        waiting: dict[Slot, tuple[asyncio.Future[CommandResult], str]] = {}
        unanswered = set(slots)
        all_answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        given_up = False

        def settle(slot: Slot, done: asyncio.Future[CommandResult]) -> None:
            unanswered.discard(slot)
            if not unanswered and not all_answered.done():
                all_answered.set_result(None)
            file(slot, self._answer(slot, done))

        def file(slot: Slot, result: StageResult) -> None:
            if slot not in results and not given_up:
                results[slot] = self._vetted(slot, verb, result, changes=changes, mutates=changes and not aside)
                on_result(results[slot])

        def issue(slot: Slot, packed: Any, obstacle: RlctlError | None) -> None:
            command_id = f"{operation_id}/{slot.name}/{slot.record.incarnation}/{step}"
            try:
                self._refuse_incapable(slot, request)
                if obstacle is not None:
                    raise obstacle
                issued = self._peers.issue(slot, command_id, operation_id, packed, deadline, again=again)
            except RlctlError as error:
                unanswered.discard(slot)
                file(slot, self._failed(slot, error))
            else:
                waiting[slot] = issued.result, command_id
                issued.result.add_done_callback(functools.partial(settle, slot))

        # No task or wait for each stage: these would cost as much as the commands. But the first commands are sent
        # while the rest is issued. No other fan-out comes between, so all stages receive two fan-outs in the same
        # order. Epoch, journal ownership and cancellation are checked again after each yield to other tasks.
        self._withdrawn[operation_id, step] = False
        marks = contextlib.ExitStack()
        if isinstance(request, ContinueGenerationRequest):
            marks.enter_context(continuing(slots, request.adapter))
        try:
            async with self._turn:
                epoch, packed = self._roster.epoch, self._pack(request)
                for first in range(0, len(slots), AT_ONCE):
                    if first:
                        await asyncio.sleep(0)
                    if epoch != self._roster.epoch:
                        epoch, packed = self._roster.epoch, self._pack(request)
                    obstacle = self._peers.succession()
                    if obstacle is None and self._withdrawn[operation_id, step]:
                        obstacle = Reason.CANCELLED.error("cancelled before it was sent", outcome=OUTCOME_REJECTED)
                    for slot in slots[first : first + AT_ONCE]:
                        issue(slot, packed, obstacle)
            if unanswered:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                        await all_answered
            for slot, (answer, command_id) in waiting.items():
                if slot not in results:
                    file(slot, self._answer(slot, answer) if answer.done() else self._late(slot, command_id))
        finally:
            given_up = True
            self._withdrawn.pop((operation_id, step), None)
            marks.close()
            self._roster.observer.fan_out_ended(verb.name, self._clock.now() - started)
        if changes and verb.waits:
            spoiling = (OUTCOME_DIRTY,) if aside else (OUTCOME_UNKNOWN, OUTCOME_DIRTY)
            spoilt = {slot: r.error for slot, r in results.items() if r.outcome in spoiling}
            try:
                await self._roster.quarantine(spoilt)
            except RlctlError as error:
                if not lenient:
                    raise
                log.warning(
                    "%s %s: the quarantine of its targets could not be recorded: %s", verb.name, operation_id, error
                )
            for slot in slots:
                if slot.record.HasField("quarantine"):
                    self._peers.grant(slot)
        return [results[slot] for slot in slots]

    async def step(
        self,
        request: Message,
        slots: Sequence[Slot],
        run: Run,
        deadline: float,
        *,
        step: str = "1",
        lenient: bool = False,
    ) -> list[StageResult]:
        """Run a step of an operation, which gets the results. A cancellation of the operation cancels the commands."""
        operation_id = run.operation.operation_id
        run.cancel = lambda: self.cancel(slots, operation_id, step)
        return await self.run(
            request, slots, operation_id=operation_id, step=step, deadline=deadline, on_result=run.add, lenient=lenient
        )

    def cancel(self, slots: Sequence[Slot], operation_id: str, step: str) -> None:
        """Cancel commands that stages have not started. Unsent commands are not sent."""
        if (operation_id, step) in self._withdrawn:
            self._withdrawn[operation_id, step] = True
        for slot in slots:
            self._peers.cancel(slot, f"{operation_id}/{slot.name}/{slot.record.incarnation}/{step}")

    def _pack(self, request: Message) -> Any:
        command = type(request)()
        command.CopyFrom(request)
        header = command.header  # type: ignore[attr-defined]
        header.fence.fleet_epoch = self._roster.epoch
        for name in ("target", "timeout", "for_slot", "unkeyed"):
            header.ClearField(name)
        packed = Any()
        packed.Pack(command)
        return packed

    @staticmethod
    def _refuse_incapable(slot: Slot, request: Message) -> None:
        missing = incapable(slot, request)
        if missing is not None:
            missing.outcome = OUTCOME_SKIPPED
            raise missing

    def _answer(self, slot: Slot, done: asyncio.Future[CommandResult]) -> StageResult:
        try:
            return done.result().stage
        except RlctlError as error:
            return self._failed(slot, error)

    def _late(self, slot: Slot, command_id: str) -> StageResult:
        self._peers.cancel(slot, command_id)
        return self._failed(
            slot,
            Reason.DEADLINE_EXCEEDED.error(
                "no answer by the deadline; the outcome is unknown", outcome=OUTCOME_UNKNOWN
            ),
        )

    def _failed(self, slot: Slot, error: RlctlError) -> StageResult:
        return StageResult(
            header=self._roster.header(),
            slot=slot.name,
            incarnation=slot.record.incarnation,
            outcome=error.outcome,
            error=error.detail(),
            state=slot.state,
        )

    def _vetted(self, slot: Slot, verb: Verb, result: StageResult, *, changes: bool, mutates: bool) -> StageResult:
        """Return a valid result unchanged, otherwise an UNKNOWN result with the cause.

        A valid result is by this incarnation of the stage, under this epoch. There is an entry for every rank, and no
        entry is worse than the whole.
        """
        problem = ""
        if (result.slot, result.incarnation) != (slot.name, slot.record.incarnation):
            problem = f"the answer is from incarnation {result.incarnation} of {result.slot!r}"
        elif changes and result.header.fleet_epoch not in (0, self._roster.epoch):
            problem = f"its epoch is {result.header.fleet_epoch}, the fleet is at {self._roster.epoch}"
        elif result.outcome not in _WITHOUT_RANKS or result.rank_results:
            entries = one_per_rank(slot.workers, result.rank_results)
            outcome = of_ranks(verb, entries, mutates=mutates)
            if outcome != result.outcome:
                problem = (
                    f"its outcome is {Outcome.Name(result.outcome)}, its ranks' results make {Outcome.Name(outcome)}"
                )
        if not problem:
            return result
        error = Reason.ANSWER_INVALID.error(f"{slot.name}'s answer cannot be right: {problem}", outcome=OUTCOME_UNKNOWN)
        invalid = self._failed(slot, error)
        invalid.rank_results.extend(one_per_rank(slot.workers, result.rank_results))
        return invalid
