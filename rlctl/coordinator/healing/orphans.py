"""Orphans: remainders of updates, pauses and adapters at stages. The coordinator retries until they are cleared.

- An update that is not open at the coordinator is aborted, unless the stage has committed it and its version is
  admitted. An ended heal is always aborted. A stage that was unreachable during the abort returns with such an update,
  and would refuse every other update.
- A stage that an ended update has paused continues. So does a stage that was continued while unreachable or with
  released memory.
- A stage that returns under a pause by name is paused.
- Pauses of single adapters follow the record of pauses by name.
- A stage that was unreachable when an adapter was unloaded unloads the adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from rlctl.contract.errors import RlctlError
from rlctl.contract.verbs import VERBS, of_request
from rlctl.coordinator.fleet.capabilities import unsupported
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.fleet.versions import surplus
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.pauses.continue_when_resident import Waking
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, STAGE_STATE_PAUSED, STAGE_STATE_READY, STAGE_STATE_STALE
from rlctl.v1.fleet_pb2 import Pause, StageReport
from rlctl.v1.verbs_pb2 import (
    AbortUpdateRequest,
    ContinueGenerationRequest,
    PauseGenerationRequest,
    UnloadAdapterRequest,
)

log = logging.getLogger(__name__)

HEAL_MARK = "/heal/"
"""Part of the update ids of heals."""

END_S = 30.0
AGAIN_S = (0.2, 1.0, 5.0)


Leftover = AbortUpdateRequest | PauseGenerationRequest | ContinueGenerationRequest | UnloadAdapterRequest

_UNLOADING = (STAGE_STATE_STALE, STAGE_STATE_READY, STAGE_STATE_PAUSED)


class Orphans:
    """Clears orphans, with a task for each stage."""

    def __init__(self, context: Context, is_open: Callable[[str], bool]) -> None:
        self._roster = context.roster
        self._fanout = context.fanout
        self._clock = context.clock
        self._waking = Waking(context)
        self._is_open = is_open
        self._is_held = context.operations.holds  # an exclusive operation may be about to pause the stage by name
        self._tasks: dict[Slot, asyncio.Task[None]] = {}
        self._steps = 0

    def look(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot not in self._tasks and self._orphan(slot) is not None:
                task = self._tasks[slot] = asyncio.create_task(self._end(slot))
                task.add_done_callback(lambda _, slot=slot: self._tasks.pop(slot, None))  # type: ignore[misc]

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _orphan(self, slot: Slot) -> Leftover | None:
        """Return the request that clears a stage's next orphan."""
        report = slot.report
        linked = slot.commander is not None and not slot.commander.lost
        if report is None or not linked or self._roster.slots.get(slot.name) is not slot:
            return None
        model = self._roster.models[slot.model]
        if report.update_id:
            if self._is_open(report.update_id):
                return None
            healing = HEAL_MARK in report.update_id  # heals lead to a version that is published already
            if report.update_committed and report.weight_version in model.admitted and not healing:
                return None  # the next grant admits it
            abort = AbortUpdateRequest(reason="the update has no owner any more")
            abort.header.fence.update_id = report.update_id
            return abort
        paused_by = report.paused_by_update
        if slot.pause is not None and (slot.owes_pause or slot.paused_by_update):
            return self._due_pause(slot, slot.pause)
        leftover = slot.record.continue_when_resident or (paused_by and not self._is_open(paused_by))
        ownerless = leftover and slot.pause is None
        if ownerless and report.state == STAGE_STATE_PAUSED and not (model.update_id or self._is_held(slot)):
            # The stage continues as before the update. A pause by name stays in force.
            return ContinueGenerationRequest()
        scoped = self._due_scoped(slot, report)
        if scoped is not None:
            return scoped
        if not model.update_id and report.state in _UNLOADING and unsupported(slot, "UnloadAdapter") is None:
            # The stage was unreachable when the adapter was unloaded. Nothing is served with the adapter.
            for adapter in surplus(self._roster, slot):
                return UnloadAdapterRequest(name=adapter.name, abort_requests=True)
        return None

    def _due_pause(self, slot: Slot, pause: Pause) -> PauseGenerationRequest | None:
        """Return the pause of a stage that owes a pause by name, or that only an update has paused."""
        assert slot.report is not None
        # A stage that joins later serves no requests yet, so any of its modes will do.
        mode = pause.mode if slot.pauses_in(pause.mode) else slot.capabilities.pause_modes[0]
        # For requests that an update has frozen, the stage could refuse a different mode.
        request = PauseGenerationRequest(mode=slot.report.pause_mode if slot.paused_by_update else mode)
        busy = self._roster.models[slot.model].update_id or self._is_held(slot) or slot.in_hand[""]
        allowed = of_request(request).allows(slot.report.state) and not slot.report.HasField("quarantine")
        return request if allowed and not busy else None

    def _due_scoped(self, slot: Slot, report: StageReport) -> PauseGenerationRequest | ContinueGenerationRequest | None:
        """Return the pause of an owed adapter, or the continue of an adapter without a pause by name."""
        busy = self._roster.models[slot.model].update_id or self._is_held(slot)
        allowed = VERBS["PauseGeneration"].allows(report.state) and not report.HasField("quarantine")
        modes = slot.capabilities.adapter_pause_modes
        if busy or not allowed or not modes or unsupported(slot, "LoadAdapter") is not None:
            return None
        for adapter in slot.owed_adapters:
            mode = slot.adapter_pauses[adapter].mode
            return PauseGenerationRequest(adapter=adapter, mode=mode if mode in modes else modes[0])
        for adapter in slot.unkept_adapters:
            return ContinueGenerationRequest(adapter=adapter)
        return None

    async def _end(self, slot: Slot) -> None:
        tries = 0
        while request := self._orphan(slot):
            self._steps += 1
            update_id = request.header.fence.update_id or type(request).DESCRIPTOR.name
            try:
                if isinstance(request, PauseGenerationRequest) and not request.adapter:
                    # The pause may be taken back or end before the operation includes this stage.
                    await self._waking.remember([slot])
                [result] = await self._fanout.run(
                    request,
                    [slot],
                    operation_id=update_id,
                    step=f"orphan-{self._roster.epoch}-{self._steps}",
                    deadline=self._clock.now() + END_S,
                )
                continued = isinstance(request, ContinueGenerationRequest) and not request.adapter
                if continued and result.outcome == OUTCOME_APPLIED:
                    await self._waking.forget([slot])
            except RlctlError as error:
                log.warning("%s: %s could not be ended: %s", slot.name, update_id, error)
            await asyncio.sleep(AGAIN_S[min(tries, len(AGAIN_S) - 1)])
            tries += 1
