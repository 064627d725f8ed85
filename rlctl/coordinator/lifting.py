"""Pauses by name that end by themselves: continued once their time is up, by this coordinator or its successor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rlctl.coordinator.pausing import Pausing
from rlctl.coordinator.roster import Roster
from rlctl.errors import Reason, RlctlError
from rlctl.ports import Clock
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.journal_pb2 import PauseRecord
from rlctl.v1.results_pb2 import Operation
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often it is looked whether a pause is over: wall time may be set meanwhile."""


class Lifting:
    """One task, which sleeps while no pause has an end."""

    def __init__(
        self,
        roster: Roster,
        pausing: Pausing,
        clock: Clock,
        go_on: Callable[[ContinueGenerationRequest], Awaitable[Operation]],
    ) -> None:
        """``go_on``: carries out a continue by name."""
        self._roster = roster
        self._pausing = pausing
        self._clock = clock
        self._go_on = go_on
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._roster.until(lambda: bool(self._ending()))
            now = self._clock.wall().ToNanoseconds()
            for record in self._ending():
                if record.pause.until.ToNanoseconds() <= now:
                    await self._lift(record)
            await asyncio.sleep(LOOK_S)

    def _ending(self) -> list[PauseRecord]:
        return [record for record in self._roster.pauses.in_force if record.pause.HasField("until")]

    async def _lift(self, record: PauseRecord) -> None:
        """Continue the stages for which this pause is in force; a newer one of theirs stays."""
        key = record.pause.operation_id
        covered = self._roster.covered(record.target)
        own = [slot.name for slot in covered if slot.pause is not None and slot.pause.operation_id == key]
        others = any(slot.pause is not None and slot.pause.operation_id != key for slot in covered)
        target = Target(slots=own) if others else record.target
        try:
            if own:
                await self._go_on(ContinueGenerationRequest(header=RequestHeader(target=target)))
            left = any(slot.pause is not None and slot.pause.operation_id == key for slot in covered)
            if not left:
                await self._roster.pauses.take_back(key, ())  # nor does it hold for stages that join later
        except RlctlError as error:
            if error.reason is Reason.NO_TARGETS:
                await self._pausing.go_on_later(target)
            else:
                log.warning("pause %s is over, and cannot be lifted now: %s", key, error)
