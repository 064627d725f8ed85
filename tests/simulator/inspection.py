"""Invariants judged by a look into the processes: the weights that stages would serve, and whether stages rest."""

from __future__ import annotations

import contextlib

from rlctl.contract.errors import RlctlError
from rlctl.coordinator.fleet.slot import Slot
from rlctl.v1.common_pb2 import STAGE_STATE_ASLEEP, STAGE_STATE_PAUSED, STAGE_STATE_READY, StageState
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, Operation
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest, BeginWeightUpdateResponse
from tests.simulator.processes.fleet import Fleet

_WHOLE = (STAGE_STATE_READY, STAGE_STATE_PAUSED, STAGE_STATE_ASLEEP)


def look(fleet: Fleet) -> None:
    """Check I1: the weights that every stage would serve now; I10: the number of its reports."""
    for host in (*fleet.stages.values(), *fleet.formers):
        stage = host.stage
        if stage is None:
            continue
        fleet.sim.observer.reported(host.name, stage._revision)
        if stage.serving.state != STAGE_STATE_READY or not host.alive or host.node.stopped:
            continue
        with contextlib.suppress(RlctlError):
            stage.serving.refuse(host.clock)
            fleet.sim.observer.generates(host.slot, host.model, stage.incarnation)
            held = [engine.holding.weights for engine in host.machine.engines]
            fleet.sim.observer.right(host.name, host.model, stage.serving.version.sequence, held, "would serve")
            if any(engine.stale for engine in host.machine.engines):
                fleet.sim.observer.broken("I1", f"{host.name} would serve with KV entries of other weights")
            for engine in host.machine.engines:
                engine.computes()
            for adapter in sorted(stage.facts.adapters):
                with contextlib.suppress(RlctlError):
                    stage.serving.refuse(host.clock, adapter=adapter)
                    fleet.sim.observer.generates(host.slot, host.model, stage.incarnation, adapter)


def staged(
    fleet: Fleet, operation: Operation, plan: BeginWeightUpdateResponse, begin: BeginWeightUpdateRequest
) -> None:
    """Check I9: a failed staged update, or adapter's update, leaves no target at its version."""
    if operation.state != OPERATION_STATE_FAILED:
        return
    for target in plan.targets:
        host = fleet.stages.get(target.slot)  # the stage may have left since
        stage = host.stage if host is not None else None
        if stage is None or stage.incarnation != target.incarnation:
            continue
        facts = stage.facts
        if begin.adapter:
            there = begin.adapter in facts.adapters and facts.adapters[begin.adapter].version == begin.version
        else:
            there = facts.state in _WHOLE and facts.version == plan.version
        if there:
            fleet.sim.observer.broken("I9", f"{begin.version} was not published, {target.slot} is at it")


def unsettled(fleet: Fleet) -> list[tuple[str, str]]:
    """Return violations of I7 and I8: stages and operations that have not come to an end."""
    coordinator, counts = fleet.coordinator.coordinator, fleet.sim.counts
    if coordinator is None:
        return [("I7", "the coordinator did not start")]
    found = [
        ("I8", f"{run.operation.verb} {run.operation.operation_id} has no outcome")
        for run in coordinator.operations._runs.values()
        if not run.ended.is_set()
    ]
    found += [("I8", f"{key} has no outcome on record") for key in fleet.sim.observer.unended()]
    slots = {name: coordinator.roster.slots.get(name) for name in fleet.stages}
    counts.unhealable = sum(slot is not None and bool(slot.unhealable) for slot in slots.values())
    counts.quarantined = sum(slot is not None and _quarantined(slot) for slot in slots.values())
    for name, slot in slots.items():
        why = _restless(slot) if slot is not None else "it is not registered"
        if why:
            found.append(("I7", f"{name} is not settled: {why}"))
    return found


def _quarantined(slot: Slot) -> bool:
    """Return True if the engine has lost a rank: only a restart helps."""
    return (
        not slot.unhealable
        and slot.not_routable() != ""
        and slot.report is not None
        and slot.report.HasField("quarantine")
    )


def _restless(slot: Slot) -> str:
    """Return the reason that a stage has not come to rest, or ""."""
    if slot.unhealable or not slot.not_routable() or _quarantined(slot):
        return ""
    report = slot.report
    if slot.state == STAGE_STATE_PAUSED and report is not None and not report.paused_by_update:
        return ""
    if slot.state == STAGE_STATE_ASLEEP or (slot.state == STAGE_STATE_READY and not slot.record.enabled):
        return ""
    return f"{StageState.Name(slot.state).removeprefix('STAGE_STATE_')}, {slot.not_routable()}"
