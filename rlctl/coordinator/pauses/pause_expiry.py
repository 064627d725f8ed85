"""Ends pauses by name at the ttl, also after a restart of the coordinator.

The time of a pause runs on the monotonic clock: a wall clock that is set ends no pause. Only a restarted coordinator
reads the wall clock, for the rest of the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rlctl.contract.errors import RlctlError
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.pauses.pause import Pausing
from rlctl.v1.common_pb2 import STAGE_STATE_PAUSED, RequestHeader, Target
from rlctl.v1.journal_pb2 import PauseRecord
from rlctl.v1.results_pb2 import Operation
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two checks."""

AGAIN_S = (0.0, 1.0, 5.0, 15.0)
"""Waits between tries to end a pause. Each try may be an operation on record."""


class Lifting:
    """Ends pauses with a task that sleeps while no pause has an end."""

    def __init__(
        self, context: Context, pausing: Pausing, go_on: Callable[[ContinueGenerationRequest], Awaitable[Operation]]
    ) -> None:
        """``go_on``: carries out a continue by name."""
        self._roster = context.roster
        self._pausing = pausing
        self._clock = context.clock
        self._go_on = go_on
        self._tries: dict[str, tuple[int, float]] = {}
        """Number of tries for each pause with an end, and time of the next try."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._roster.until(lambda: bool(self._ending()))
            ending = self._ending()
            self._tries = {_key(record): self._tries.get(_key(record)) or (0, self._end(record)) for record in ending}
            for record in ending:
                _, due = self._tries[_key(record)]
                if self._clock.now() >= due:
                    await self._try(record)
            await asyncio.sleep(LOOK_S)

    def _ending(self) -> list[PauseRecord]:
        return [record for record in self._roster.pauses.in_force if record.pause.HasField("until")]

    def _end(self, record: PauseRecord) -> float:
        """Return the end of a pause that is new here, on the clock's ``now``."""
        pause, wall_ns = record.pause, self._clock.wall().ToNanoseconds()
        ttl_ns = pause.until.ToNanoseconds() - pause.since.ToNanoseconds()
        return self._clock.now() + min(ttl_ns, pause.until.ToNanoseconds() - wall_ns) / 1e9

    async def _try(self, record: PauseRecord) -> None:
        key = _key(record)
        try:
            await self._lift(record)
        except RlctlError as error:
            log.warning("pause %s is over, and cannot be lifted now: %s", key, error)
        tries, _ = self._tries[key]
        self._tries[key] = tries + 1, self._clock.now() + AGAIN_S[min(tries, len(AGAIN_S) - 1)]

    async def _lift(self, record: PauseRecord) -> None:
        """End a pause. Stages without a further pause continue, now or as soon as possible."""
        key, pauses = _key(record), self._roster.pauses
        if record.pause.adapter:
            await self._lift_adapter(record)
            return
        to_continue = [slot for slot in self._own(record) if not pauses.beside(slot, key)]
        paused = [slot.name for slot in to_continue if slot.state == STAGE_STATE_PAUSED]
        if paused:
            await self._go_on(ContinueGenerationRequest(header=RequestHeader(target=Target(slots=paused))))
        later = [slot.name for slot in self._own(record) if slot in to_continue and slot.state != STAGE_STATE_PAUSED]
        if later:
            await self._pausing.go_on_later(Target(slots=later))
        if not any(slot in to_continue for slot in self._own(record)):
            await pauses.expire(key)  # an older pause may decide again; stages that join later generate

    async def _lift_adapter(self, record: PauseRecord) -> None:
        """End a pause of an adapter. Stages without a further pause continue the adapter, absent stages on return."""
        key, adapter, pauses = _key(record), record.pause.adapter, self._roster.pauses
        to_continue = [slot for slot in self._own(record) if not pauses.beside(slot, key)]
        paused = [slot.name for slot in to_continue if slot.linked and adapter in slot.paused_adapters]
        if paused:
            header = RequestHeader(target=Target(slots=paused))
            await self._go_on(ContinueGenerationRequest(header=header, adapter=adapter))
        absent = [slot.name for slot in self._own(record) if slot in to_continue and slot.name not in paused]
        if absent:
            await self._pausing.end_with(adapter, Target(slots=absent))
        if not any(slot in to_continue for slot in self._own(record)):
            await pauses.expire(key)

    def _own(self, record: PauseRecord) -> list[Slot]:
        """Return the slots for which this pause is in force."""
        pauses = {
            slot: self._roster.pauses.of(slot).get(record.pause.adapter) for slot in self._roster.covered(record.target)
        }
        return [slot for slot, pause in pauses.items() if pause is not None and _key(pause) == _key(record)]


def _key(record: PauseRecord) -> str:
    return record.pause.operation_id
