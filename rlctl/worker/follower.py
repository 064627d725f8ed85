"""A follower rank: obeys rank 0 of its stage. The engine starts when rank 0 attaches with the engine's setup."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import of_request
from rlctl.engine import SETUP, Call, Engine
from rlctl.ports import Clock, Link
from rlctl.v1.common_pb2 import WorkerCoordinates
from rlctl.v1.control_pb2 import (
    Attach,
    Attached,
    CommandResult,
    ControlRequest,
    ControlResponse,
    ServingGrant,
)
from rlctl.v1.fleet_pb2 import RankStatus, StageReport
from rlctl.version import CONTRACT_VERSION
from rlctl.worker.worker import Worker


class Follower:
    """The commanded side of a follower's executor."""

    def __init__(
        self,
        make_engine: Callable[[Callable[[RlctlError], None]], Engine],
        coordinates: WorkerCoordinates,
        pid: int,
        clock: Clock,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = make_engine(self._engine_failed)
        self._pid = pid
        self._link: Link[ControlResponse, ControlRequest] | None = None
        self._started = False
        self.worker = Worker(self._engine, coordinates, clock)

    async def attach(self, attach: Attach, link: Link[ControlResponse, ControlRequest]) -> Attached:
        """Start the engine with the setup of rank 0.

        A second rank 0 is refused: the engines could not join each other. A rank whose engine refuses the setup is as
        before the attach.
        """
        try:
            if self._started:
                raise Reason.INCARNATION_FENCED.error("this rank belongs to a stage that is running already")
            if attach.contract_version != CONTRACT_VERSION:
                raise Reason.FIELD_INVALID.error(
                    f"rank 0 speaks contract {attach.contract_version}, this rank {CONTRACT_VERSION}",
                    field="attach.contract_version",
                )
            self._started = True
            self._link = link
            info = await self._engine.start(attach.engine_setup)
            self.worker.coordinates.CopyFrom(info.layout.workers[self.worker.coordinates.rank])
        except RlctlError as error:
            if error.field == SETUP:  # nothing has started: another rank 0 may attach
                self._started, self._link = False, None
            return Attached(error=error.detail())
        return Attached(report=self._report())

    def grant(self, grant: ServingGrant) -> None:
        """Ignore the grant: followers serve nothing by themselves."""

    async def carry_out(self, request: Message, call: Call) -> CommandResult:
        if not self._started:
            return self.refuse(Reason.ILLEGAL_STATE.error("rank 0 has not attached yet"))
        if not call.together and of_request(request).mutating:
            return self.refuse(Reason.NOT_RANK_ZERO.error())
        return CommandResult(rank=(await self.worker.carry_out(request, call))[0])

    def refuse(self, error: RlctlError) -> CommandResult:
        """Return this rank's result for a refused command."""
        return CommandResult(rank=self.worker.result(error.outcome, error))

    async def withdraw(self, command_id: str) -> None:
        """Withdraw an ordered command that rank 0 will not order."""
        await self.worker.withdraw(command_id)

    def obeys(self, link: object) -> bool:
        return self._link is not None and link is self._link

    async def stop(self) -> None:
        await self._engine.stop()

    def _engine_failed(self, error: RlctlError) -> None:
        self._loop.call_soon_threadsafe(self._failed, error)

    def _failed(self, error: RlctlError) -> None:
        self.worker.failure = error
        if self._link is not None:
            with contextlib.suppress(RlctlError):
                self._link.send(ControlResponse(report=self._report()))

    def _report(self) -> StageReport:
        failure = self.worker.failure
        return StageReport(
            ranks=[
                RankStatus(
                    coordinates=self.worker.coordinates,
                    alive=failure is None,
                    reason=str(failure) if failure else "",
                    pid=self._pid,
                )
            ]
        )
