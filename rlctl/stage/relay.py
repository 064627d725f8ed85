"""Relay of rank 0: sends a command to every rank of the stage and collects one result from each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message

from rlctl.command_stream.commander import Commander, Issued, taken_along
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.outcomes import one_per_rank
from rlctl.contract.verbs import Verb
from rlctl.engine import Call, Engine
from rlctl.ports import Clock
from rlctl.v1.common_pb2 import EVIDENCE_UNSPECIFIED, OUTCOME_UNKNOWN, WorkerCoordinates
from rlctl.v1.control_pb2 import CommandResult
from rlctl.v1.results_pb2 import RankResult
from rlctl.worker.worker import Worker

log = logging.getLogger(__name__)

SETTLE_S = 1.0
"""Seconds kept back of a command's time, at most a fifth of it, to withdraw a command that is not ordered."""


REMEMBERED = 1024
"""Number of ordered commands whose progress is kept. A command without a caller may still be in the stream."""


class Rank(Protocol):
    """A rank as its stage sees it."""

    @property
    def coordinates(self) -> WorkerCoordinates: ...

    def issue(self, request: Message, call: Call) -> tuple[asyncio.Future[None], asyncio.Future[list[RankResult]]]:
        """Start a command and return futures of its acceptance and results. Both fail with RlctlError only."""

    async def withdraw(self, command_id: str) -> None:
        """Withdraw a command that was not ordered."""


class LocalRank:
    """Rank 0, in this process."""

    def __init__(self, worker: Worker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock
        self._tasks: set[asyncio.Task[list[RankResult]]] = set()

    @property
    def coordinates(self) -> WorkerCoordinates:
        return self._worker.coordinates

    def issue(self, request: Message, call: Call) -> tuple[asyncio.Future[None], asyncio.Future[list[RankResult]]]:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        now = self._clock.now()
        deadline = now + taken_along(call.deadline - now)  # answers before the caller stops waiting
        local = Call(call.command_id, deadline, call.update_id, accept=lambda: _done(accepted))
        task = asyncio.create_task(self._worker.carry_out(request, local))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: _done(accepted))
        return accepted, task

    async def withdraw(self, command_id: str) -> None:
        await self._worker.withdraw(command_id)


class RemoteRank:
    """A follower behind its link. A lost follower stays lost: an engine with a lost rank must be restarted."""

    def __init__(self, coordinates: WorkerCoordinates, commander: Commander) -> None:
        self._coordinates = coordinates
        self._commander = commander

    @property
    def coordinates(self) -> WorkerCoordinates:
        return self._coordinates

    def issue(self, request: Message, call: Call) -> tuple[asyncio.Future[None], asyncio.Future[list[RankResult]]]:
        packed = Any()
        packed.Pack(request)
        issued: Issued = self._commander.issue(call.command_id, "", packed, call.deadline)
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[None] = loop.create_future()
        results: asyncio.Future[list[RankResult]] = loop.create_future()
        issued.result.add_done_callback(lambda answer: _translate(answer, results))
        # After the callback of the result: a rank that answers without acceptance must not pass as accepted.
        issued.accepted.add_done_callback(lambda _: _done(accepted))
        return accepted, results

    async def withdraw(self, command_id: str) -> None:
        self._commander.cancel(command_id)


@dataclass
class _Ordering:
    """Progress of an ordered command.

    Attributes:
        begun: rank 0 was told to order the command. Only rank 0 knows whether the stream has the command.
        withdrawn: the command must not be ordered any more.
    """

    begun: bool = False
    withdrawn: bool = False


class Relay:
    """Sends commands to every rank of a stage and collects a result from each."""

    def __init__(
        self, engine: Engine, ranks: Sequence[Rank], workers: Sequence[WorkerCoordinates], clock: Clock
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._workers = workers
        self._clock = clock
        self._orderings: dict[str, _Ordering] = {}

    async def run(self, verb: Verb, request: Message, call: Call) -> list[RankResult]:
        """Return one entry per rank, rank 0 first; UNKNOWN for a rank without an answer by the deadline.

        Ordered verbs go in two steps: every rank accepts, then rank 0 orders. Unless all accept, all withdraw and no
        rank runs the command.
        """
        started = [rank.issue(request, call) for rank in self._ranks]
        accepted = [a for a, _ in started]
        results = [r for _, r in started]
        if verb.ordered:
            await self._order(call, accepted, results)
        await self._wait(results, call.deadline)
        entries: list[RankResult] = []
        for rank, future in zip(self._ranks, results, strict=True):
            entries += self._entries(rank, future)
        return one_per_rank(self._workers, entries)

    async def withdraw(self, command_id: str) -> None:
        """Withdraw a command at every rank, or only at rank 0's engine once ordering has begun.

        A follower must not forget a command that the stream is about to reach: the other ranks would lose that
        follower.
        """
        ordering = self._orderings.get(command_id, _Ordering())
        ordering.withdrawn = True
        if ordering.begun:
            await self._engine.withdraw(command_id)
        else:
            await self._withdraw(command_id)

    async def _withdraw(self, command_id: str) -> None:
        await asyncio.gather(*(rank.withdraw(command_id) for rank in self._ranks))

    async def _order(
        self,
        call: Call,
        accepted: Sequence[asyncio.Future[None]],
        results: Sequence[asyncio.Future[list[RankResult]]],
    ) -> None:
        ordering = self._orderings[call.command_id] = _Ordering()
        while len(self._orderings) > REMEMBERED:
            del self._orderings[next(iter(self._orderings))]
        remaining = call.deadline - self._clock.now()
        await self._wait(accepted, call.deadline - min(SETTLE_S, remaining / 5))
        remaining = call.deadline - self._clock.now()  # not positive if this process was stopped
        ready = all(a.done() for a in accepted) and not any(r.done() for r in results)
        if ready and remaining > 0 and not ordering.withdrawn:
            ordering.begun = True
            try:
                async with asyncio.timeout(remaining):
                    await self._engine.order(call.command_id)
                return
            except TimeoutError:
                return  # the stream may have the command: a silent rank is UNKNOWN
            except Exception:
                log.exception("rank 0 did not order command %s; the ranks withdraw it", call.command_id)
        if not all(r.done() for r in results):
            await self._withdraw(call.command_id)

    async def _wait(
        self,
        futures: Sequence[asyncio.Future[None]] | Sequence[asyncio.Future[list[RankResult]]],
        until: float,
    ) -> None:
        await asyncio.wait(futures, timeout=max(0.0, until - self._clock.now()))

    def _entries(self, rank: Rank, future: asyncio.Future[list[RankResult]]) -> list[RankResult]:
        try:
            if not future.done():
                raise Reason.RANK_SILENT.error(outcome=OUTCOME_UNKNOWN)
            return future.result()
        except RlctlError as error:
            return [
                RankResult(
                    coordinates=rank.coordinates,
                    outcome=error.outcome,
                    evidence=EVIDENCE_UNSPECIFIED,
                    error=error.detail(),
                )
            ]


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _translate(answer: asyncio.Future[CommandResult], results: asyncio.Future[list[RankResult]]) -> None:
    if results.done():
        return
    error = answer.exception()
    if error is not None:
        results.set_exception(error)
        results.exception()  # marked as retrieved: the relay may have stopped waiting
    else:
        results.set_result([answer.result().rank])
