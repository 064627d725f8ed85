"""One scenario: a fault at a phase of an update, what clients see meanwhile, and that the fleet is whole afterwards."""

from __future__ import annotations

import itertools
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from chaos_fleet import ChaosFleet, Clients, Trainer, until
from history import OK, History

from rlctl.testing.chaos_proxy import ChaosProxy
from rlctl.v1 import common_pb2 as common
from rlctl.v1.fleet_pb2 import Fleet

SETTLE_S = 60.0
POLL_S = 0.01

log = logging.getLogger(__name__)

_numbers = itertools.count(1)


def _stages(state: Fleet, field: str) -> bool:
    return any(getattr(stage.report, field) for stage in state.stages)


PHASES: dict[str, Callable[[Fleet, str], bool]] = {
    "join": lambda state, _: bool(state.models[0].update_id),
    "pause": lambda state, _: _stages(state, "paused_by_update"),
    "write": lambda state, _: _stages(state, "update_prepared"),
    "commit": lambda state, _: _stages(state, "update_committed"),
    "publish": lambda state, label: state.models[0].latest.label == label,
    "resume": lambda state, label: (
        state.models[0].latest.label == label
        and any(not stage.report.paused and stage.state == common.STAGE_STATE_READY for stage in state.stages)
    ),
}
"""What of the fleet says that an update has come so far; verifying is the time between commit and publish."""


STOPPED_S = 7.0
"""Longer than what is silent is waited for, shorter than a serving lease."""


@dataclass(frozen=True)
class Fault:
    """What happens, to whom, when.

    Attributes:
        victim: a process ("coordinator", "a", "a.1", "trainer", "source"), or a stage whose links are meant.
        kind: kill, stop (SIGSTOP), latency, blackhole or reset.
        phase: of the update, by :data:`PHASES`.
        lasts_s: until it is lifted, or the process started again.
    """

    victim: str
    kind: str
    phase: str
    lasts_s: float


def matrix(victims: Sequence[str]) -> list[Fault]:
    """Each process killed, and stopped, at each phase."""
    return [
        Fault(victim, kind, phase, lasts_s)
        for phase, victim, (kind, lasts_s) in itertools.product(PHASES, victims, (("kill", 0.5), ("stop", STOPPED_S)))
    ]


def name_of(fault: Fault) -> str:
    """What a test is called."""
    return f"{fault.kind}-{fault.victim}-{fault.phase}"


def run(fleet: ChaosFleet, trainer_kind: str, history: History, fault: Fault, *, deadline_s: float) -> None:
    """Do it; raises AssertionError with everything that was wrong."""
    number = next(_numbers)
    clean, struck, after = (f"{name}-{10 * number + index}" for index, name in enumerate(("clean", "struck", "after")))
    with fleet.connect() as client:
        history.first = client.status().models[0].latest.label
    with Clients(fleet.address, history):
        trainer = Trainer(trainer_kind, fleet.address, history, [clean, struck], deadline_s)
        try:
            _await_phase(fleet, trainer, struck, fault.phase, deadline_s)
            _strike(fleet, trainer, fault)
        finally:
            trainer.wait(2 * deadline_s + 30)
        _settled(fleet)
        _updated(fleet, trainer_kind, history, after, deadline_s)
    ends = {update.label: update.state or "failed or killed" for update in history.updates}
    log.info("%s: %s, %d requests", fault, ends, len(history.generations))
    wrong = history.violations()
    assert not wrong, "\n".join([str(fault), *wrong[:20]])
    assert any(token.label == after for g in history.generations for token in g.tokens), "nobody was served afterwards"


def _await_phase(fleet: ChaosFleet, trainer: Trainer, struck: str, phase: str, deadline_s: float) -> None:
    """Wait until the trainer's update has come to the phase, or further."""
    deadline = time.monotonic() + 2 * deadline_s
    with fleet.connect() as client:
        while True:
            begun = trainer.has_begun(struck)
            state = client.status()
            if begun and (state.models[0].latest.label == struck or PHASES[phase](state, struck)):
                return
            assert trainer.runs, f"the trainer ended before {struck} came to {phase}: {trainer.updates}"
            assert time.monotonic() < deadline, f"{struck} never came to {phase}:\n{state}"
            time.sleep(POLL_S)  # a watch would not tell of the trainer's end


def _strike(fleet: ChaosFleet, trainer: Trainer, fault: Fault) -> None:
    with ExitStack() as repairs:
        match fault.kind, fault.victim:
            case "kill", "trainer" | "source" as who:
                trainer.signal(signal.SIGKILL, source=who == "source")
            case "stop", "trainer" | "source" as who:
                trainer.signal(signal.SIGSTOP, source=who == "source")
                repairs.callback(trainer.signal, signal.SIGCONT, source=who == "source")
            case "kill", name:
                fleet.process(name).kill()
                repairs.callback(fleet.revive, name)
            case "stop", name:
                fleet.signal(name, signal.SIGSTOP)
                repairs.callback(fleet.signal, name, signal.SIGCONT)
            case "reset", slot:
                fleet.network(slot, ChaosProxy.reset)
            case "blackhole", slot:
                fleet.network(slot, lambda proxy: setattr(proxy, "blackhole", True))
                repairs.callback(fleet.network, slot, lambda proxy: setattr(proxy, "blackhole", False))
            case "latency", slot:
                fleet.network(slot, lambda proxy: setattr(proxy, "latency_s", 0.3))
                repairs.callback(fleet.network, slot, lambda proxy: setattr(proxy, "latency_s", 0.0))
        time.sleep(fault.lasts_s)  # how long a fault lasts is part of the scenario; nothing is waited for


def _settled(fleet: ChaosFleet) -> None:
    """Nothing is open, and nothing stays paused: nobody asked for a pause by name, so none has an owner. A stage
    that has lost a rank waits for its restart.
    """

    def condition(state: Fleet) -> bool:
        slots = {spec.slot for spec in fleet.engines}
        there = {stage.registration.slot for stage in state.stages if stage.state != common.STAGE_STATE_UNREACHABLE}
        return (
            there >= slots
            and not state.models[0].update_id
            and not any(
                stage.report.update_id or (stage.report.paused and stage.state != common.STAGE_STATE_DIRTY)
                for stage in state.stages
                if not stage.report.HasField("quarantine")
            )
        )

    until(fleet, condition, SETTLE_S, "settled")


def _restart_lost(fleet: ChaosFleet) -> None:
    """What `rlctl up` does with an engine that has lost a rank: one whose rank 0 was stopped for longer than its links
    bear, say. Nothing but a restart brings it back.
    """
    with fleet.connect() as client:
        stages = client.status().stages
    for stage in stages:
        if not all(rank.alive for rank in stage.report.ranks):
            fleet.restart(stage.registration.slot)


def _updated(fleet: ChaosFleet, kind: str, history: History, label: str, deadline_s: float) -> None:
    """One more update, without faults: it is OK, and then every stage serves it. A heal may be in its way at first."""
    labels: Sequence[str] = [label, f"again-{label}"]
    for name in labels:
        _restart_lost(fleet)
        (update,) = Trainer(kind, fleet.address, history, [name], deadline_s).wait(deadline_s + 30)
        if update.state == OK and not update.excluded:
            break
    assert update.state == OK, update

    def condition(state: Fleet) -> bool:
        return (
            len(state.stages) == len(fleet.engines)
            and all(stage.routable and not stage.report.paused for stage in state.stages)
            and {stage.report.weight_version.label for stage in state.stages} == {update.label}
            and state.models[0].latest.label == update.label
        )

    until(fleet, condition, SETTLE_S, f"serving {update.label} everywhere")
    with fleet.connect() as client:
        digests = {
            rank.check.model_digest for stage in client.check_weights().stage_results for rank in stage.rank_results
        }
        assert digests == {client.status().models[0].model_digest}
        running = [operation for operation in client.operations() if operation.state == 1]
        assert not running, running
