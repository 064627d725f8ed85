"""A coordinator's process around its state machine, on the simulation's network instead of gRPC as in
``rlctl/coordinator/server.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.errors import RlctlError
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.service import Coordinator
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest, CommitWeightUpdateRequest
from tests.simulator.context import Simulation
from tests.simulator.oracle import LEASE_S
from tests.simulator.ports.journal import SimJournal
from tests.simulator.ports.virtual_time import SimClock

COORDINATOR = "coordinator:1"
"""Address of the present coordinator."""

FOREIGN_TOKEN = 1
"""A fencing token that no update has."""

_PLAIN = {
    "BeginWeightUpdate": "begin_weight_update",
    "JoinWeightUpdate": "join_weight_update",
    "RetryWeightUpdate": "retry_weight_update",
    "CommitBatch": "commit_batch",
    "CommitWeightUpdate": "commit_weight_update",
    "AbortWeightUpdate": "abort_weight_update",
    "RenewLease": "renew_lease",
    "ReserveRequestId": "reserve_request_id",
    "RegisterStage": "register_stage",
    "DeregisterStage": "deregister_stage",
    "GetOperation": "get_operation",
    "CancelOperation": "cancel_operation",
    "SetStageEnabled": "set_stage_enabled",
    "AdmitSlots": "admit_slots",
    "TakeOverStages": "take_over_stages",
    "SetHealing": "set_healing",
    "HealStage": "heal_stage",
    "ConfirmFleet": "confirm_fleet",
    "GetFleet": "get_fleet",
    "ListOperations": "list_operations",
}

_WATCHES = {"WatchFleet": "watch_fleet", "WatchOperation": "watch_operation"}

WATCH_S = 5.0


async def _watched(events: AsyncGenerator[Any, None]) -> list[Any]:
    """Return the events of a watch within WATCH_S."""
    told: list[Any] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WATCH_S), contextlib.aclosing(events):
            async for event in events:
                told.append(event)  # noqa: PERF401 - what came before the time was up counts
    return told


class CoordinatorHost:
    """A coordinator's process. ``again`` is called after a failed start."""

    def __init__(self, sim: Simulation, name: str, again: Callable[[CoordinatorHost], None]) -> None:
        self.sim = sim
        self._again = again
        self.node = sim.world.spawn(name)
        self.coordinator: Coordinator | None = None
        self.node.start(self._run())

    async def _run(self) -> None:
        sim, node = self.sim, self.node
        journal = SimJournal(sim.store, node)
        coordinator = Coordinator(
            journal, sim.network.dialer(node), SimClock(node), lease_s=LEASE_S, retained=sim.retained
        )
        # The oracle learns of a continue when it reaches the coordinator, before an open update is committed for it.
        settle = coordinator.implicit.settle

        async def observed(targets: Sequence[Slot]) -> None:
            for model in {slot.model for slot in targets}:
                sim.observer.goes_on(model)
            await settle(targets)

        coordinator.implicit.settle = observed  # type: ignore[method-assign, assignment]
        try:
            await coordinator.start()
        except RlctlError as error:
            sim.observer.note(f"{node.name} cannot start: {error}")
            sim.world.timer.later(1.0, self._again, self)
            node.kill()
            return
        self.coordinator = coordinator
        sim.network.answer(node, COORDINATOR, self._answer)

    async def end(self) -> None:
        """Handle SIGTERM with an orderly stop."""
        if self.coordinator is not None:
            await self.coordinator.stop()
        self.node.kill()

    async def _answer(self, method: str, request: Message, remaining_s: float) -> Any:
        assert self.coordinator is not None
        if method == "Verb":
            return await self.coordinator.verb(request, remaining_s)
        if method == "Adopt":
            return await self.coordinator.adopt(request.registration.address)  # type: ignore[attr-defined]
        if method in _WATCHES:
            return await _watched(getattr(self.coordinator, _WATCHES[method])(request))
        fenced = self._fenced(request)
        answer = await getattr(self.coordinator, _PLAIN[method])(request)
        if fenced:
            self.sim.observer.broken("I5", f"{method} was not refused: {request}")
        if isinstance(request, BeginWeightUpdateRequest) and not (request.implicit or request.header.validate_only):
            self.sim.observer.began(request.model, request.trainer.incarnation)
        return answer

    def _fenced(self, request: Message) -> bool:
        """Return True if a non-owner decides an open update. The result of an ended update is open to all."""
        assert self.coordinator is not None
        return (
            isinstance(request, CommitWeightUpdateRequest)
            and request.fencing_token == FOREIGN_TOKEN
            and self.coordinator.updates.is_open(request.update_id)
        )
