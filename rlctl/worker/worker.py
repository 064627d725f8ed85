"""The admin work of a rank: one mutating verb at a time, with one result for each command, never an exception."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError, from_detail, typed, without_frames
from rlctl.contract.validation import check
from rlctl.contract.verbs import Verb, of_request
from rlctl.engine import Call, Engine
from rlctl.ports import Clock
from rlctl.v1.common_pb2 import (
    EVIDENCE_ENGINE,
    EVIDENCE_RANK,
    OUTCOME_APPLIED,
    OUTCOME_SKIPPED,
    OUTCOME_UNKNOWN,
    WorkerCoordinates,
)
from rlctl.v1.results_pb2 import RankResult

log = logging.getLogger(__name__)

REMEMBERED = 1024
"""Number of ids kept of withdrawn commands that have not arrived, or had ended before."""


@dataclass
class _Withdrawable:
    accepted: bool = False
    withdrawn: bool = False


class Worker:
    """Runs admin verbs on an engine object.

    Mutating verbs that wait take turns. A turn lasts until the engine's method has ended, even if the deadline passed
    and the caller got UNKNOWN. Reads, and verbs that interrupt, do not queue.
    """

    def __init__(
        self,
        engine: Engine,
        coordinates: WorkerCoordinates,
        clock: Clock,
        *,
        others: Sequence[WorkerCoordinates] = (),
    ) -> None:
        """``others``: further ranks that the engine answers for, as processes of the engine."""
        self.engine = engine
        self.coordinates = coordinates
        self.others = others
        self.failure: RlctlError | None = None
        self._clock = clock
        self._turn = asyncio.Lock()
        self._withdrawable: dict[str, _Withdrawable] = {}
        self._withdrawn_early: dict[str, None] = {}
        self._running: set[asyncio.Future[Any]] = set()

    async def carry_out(self, request: Message, call: Call) -> list[RankResult]:
        """Return the result of the rank, or of every rank that the engine answers for. Never raises."""
        started = self._clock.now()
        verb = of_request(request)
        try:
            results = await self._answered(verb, request, call)
        except Exception as defect:  # without an answer the caller would wait until the deadline
            log.exception("%s could not be answered", verb.name)
            results = self._for_all(self.result(verb.after_defect(request), typed(without_frames(defect))))
        elapsed = self._clock.now() - started
        for result in results:
            result.elapsed.CopyFrom(duration(elapsed))
        return results

    async def _answered(self, verb: Verb, request: Message, call: Call) -> list[RankResult]:
        try:
            return await self._carry_out(verb, request, call)
        except RlctlError as error:
            without_frames(error)  # errors of an engine hold tensors
            return self._for_all(self.result(error.outcome, error))

    async def withdraw(self, command_id: str) -> None:
        """Withdraw an ordered command that will not be ordered: now, before its turn, or once the engine has accepted
        it.

        A command that has not arrived is withdrawn on arrival. Otherwise nothing would ever end that command.
        """
        command = self._withdrawable.get(command_id)
        if command is None:
            self._withdrawn_early[command_id] = None
            while len(self._withdrawn_early) > REMEMBERED:
                del self._withdrawn_early[next(iter(self._withdrawn_early))]
            return
        command.withdrawn = True
        if command.accepted:
            await self.engine.withdraw(command_id)

    def _accepted(self, command_id: str, accept: Callable[[], None]) -> None:
        command = self._withdrawable.get(command_id)
        if command is not None:
            command.accepted = True
            if command.withdrawn:
                task = asyncio.ensure_future(self.engine.withdraw(command_id))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        accept()

    def result(self, outcome: int, error: RlctlError | None = None) -> RankResult:
        return RankResult(
            coordinates=self.coordinates,
            outcome=outcome,  # type: ignore[arg-type]
            evidence=EVIDENCE_RANK,
            error=error.detail() if error else None,
        )

    async def _carry_out(self, verb: Verb, request: Message, call: Call) -> list[RankResult]:
        check(request)
        call.update_id = request.header.fence.update_id  # type: ignore[attr-defined]
        method = getattr(self.engine, verb.method, None)
        if method is None:
            raise Reason.UNSUPPORTED.error(f"engine {self.engine.name!r} has no {verb.name}", outcome=OUTCOME_SKIPPED)
        if self.failure is not None and verb.waits:
            # a refusal without effect, for any outcome of the command that first failed
            raise from_detail(self.failure.detail())
        if verb.interrupts:
            await self.engine.interrupt(call.update_id)
        command = self._withdrawable[call.command_id] = _Withdrawable()
        command.withdrawn = call.command_id in self._withdrawn_early
        queued = verb.mutates(request) and verb.waits
        try:
            if queued:
                await self._take_turn(verb, call)
            self._refuse_late(call, command, queued=queued)
        except RlctlError:
            self._withdrawable.pop(call.command_id, None)
            raise
        accept, call.accept = call.accept, lambda: self._accepted(call.command_id, accept)
        task = asyncio.ensure_future(method(request, call))
        task.add_done_callback(lambda _: self._withdrawable.pop(call.command_id, None))
        self._running.add(task)
        task.add_done_callback(self._ended)
        if queued:
            task.add_done_callback(lambda _: self._turn.release())
        if not verb.ordered:
            call.accept()
        done, _ = await asyncio.wait({task}, timeout=call.deadline - self._clock.now())
        if not done:
            raise Reason.RANK_SILENT.error(
                f"the engine was still busy with {verb.name} when the time was up", outcome=OUTCOME_UNKNOWN
            )
        return self._answer(verb, request, call, task)

    def _refuse_late(self, call: Call, command: _Withdrawable, *, queued: bool) -> None:
        late = self._clock.now() >= call.deadline
        if not late and not command.withdrawn:
            return
        if queued:
            self._turn.release()
        if late:
            raise Reason.DEADLINE_EXCEEDED.error("the time was up before the rank started")
        raise Reason.CANCELLED.error("withdrawn before the rank started")

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error as retrieved: the caller may have got UNKNOWN long ago

    async def _take_turn(self, verb: Verb, call: Call) -> None:
        try:
            async with asyncio.timeout(call.deadline - self._clock.now()):
                await self._turn.acquire()
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error(
                f"another command kept the rank busy until the time of this {verb.name} was up"
            ) from None

    def _answer(
        self, verb: Verb, request: Message, call: Call, task: asyncio.Future[Message | list[RankResult] | None]
    ) -> list[RankResult]:
        try:
            return self._results(verb, call, task.result())
        except RlctlError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            # The engine broke the promise to raise typed errors.
            outcome = verb.after_defect(request)
            raise Reason.ENGINE_FAILED.error(f"{type(error).__name__}: {error}", outcome=outcome) from error

    def _results(self, verb: Verb, call: Call, answer: Message | list[RankResult] | None) -> list[RankResult]:
        if isinstance(answer, list):
            if not all(isinstance(result, RankResult) for result in answer):
                raise TypeError(f"{verb.method} returned a list with an entry that is no RankResult")
            return answer
        result = self.result(OUTCOME_APPLIED)
        result.step = call.step
        if answer is not None:
            getattr(result, verb.data).CopyFrom(answer)
        return self._for_all(result)

    def _for_all(self, result: RankResult) -> list[RankResult]:
        """Return the engine's answer once per rank that the engine answers for, with data under the first rank only."""
        if not self.others:
            return [result]
        result.evidence = EVIDENCE_ENGINE
        results = [result]
        for coordinates in self.others:
            entry = RankResult(coordinates=coordinates, outcome=result.outcome, evidence=EVIDENCE_ENGINE)
            if result.HasField("error"):
                entry.error.CopyFrom(result.error)
            results.append(entry)
        return results
