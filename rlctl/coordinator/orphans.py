"""Updates that nobody owns any more, found open at stages: ended there, however often it takes.

A stage that was out of reach when its update was aborted comes back with the update still open, and would refuse every
other one. Without a record that the update was published it is presumed aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from rlctl.coordinator.fanout import Fanout
from rlctl.coordinator.roster import Roster, Slot
from rlctl.errors import RlctlError
from rlctl.ports import Clock
from rlctl.v1.verbs_pb2 import AbortUpdateRequest

log = logging.getLogger(__name__)

HEAL_MARK = "/heal/"
"""Stands in the update ids of heals."""

ABORT_S = 30.0
AGAIN_S = (0.2, 1.0, 5.0)


class Orphans:
    """One task per stage that has an orphan."""

    def __init__(self, roster: Roster, fanout: Fanout, clock: Clock, is_open: Callable[[str], bool]) -> None:
        self._roster = roster
        self._fanout = fanout
        self._clock = clock
        self._is_open = is_open
        self._tasks: dict[Slot, asyncio.Task[None]] = {}
        self._steps = 0

    def look(self, slots: Iterable[Slot]) -> None:
        """See to the stages whose reports name an update that is not open."""
        for slot in slots:
            if slot not in self._tasks and self._orphan(slot):
                task = self._tasks[slot] = asyncio.create_task(self._end(slot))
                task.add_done_callback(lambda _, slot=slot: self._tasks.pop(slot, None))  # type: ignore[misc]

    async def stop(self) -> None:
        """Leave them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _orphan(self, slot: Slot) -> str:
        report = slot.report
        if report is None or not report.update_id or self._is_open(report.update_id):
            return ""
        healing = HEAL_MARK in report.update_id  # leads to a version that was published before, so that says nothing
        published = report.weight_version in self._roster.models[slot.model].admitted
        if report.update_committed and published and not healing:
            return ""  # the next grant admits it
        linked = slot.commander is not None and not slot.commander.lost
        return report.update_id if linked and self._roster.slots.get(slot.name) is slot else ""

    async def _end(self, slot: Slot) -> None:
        tries = 0
        while update_id := self._orphan(slot):
            self._steps += 1
            abort = AbortUpdateRequest(reason="nobody owns it any more")
            abort.header.fence.update_id = update_id
            try:
                await self._fanout.run(
                    abort,
                    [slot],
                    operation_id=update_id,
                    step=f"orphan-{self._roster.epoch}-{self._steps}",
                    deadline=self._clock.now() + ABORT_S,
                )
            except RlctlError as error:
                log.warning("%s: update %s could not be ended: %s", slot.name, update_id, error)
            await asyncio.sleep(AGAIN_S[min(tries, len(AGAIN_S) - 1)])
            tries += 1
