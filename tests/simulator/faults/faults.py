"""Faults: drawn from the seed, counted, and stopped at a known time.

Some faults come at a time, some at a step of the protocol (:mod:`.protocol_step_faults`), some at random inside an
engine (:mod:`tests.simulator.engine_faults`).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.ports import Delete, Put
from rlctl.v1.control_pb2 import ControlRequest, ControlResponse
from rlctl.v1.coordinator_pb2 import CancelOperationRequest
from tests.simulator.callers.operators_and_clients import Caller
from tests.simulator.callers.trainer import Trainer
from tests.simulator.callers.trainer_schedule import Trainers
from tests.simulator.faults.protocol_step_faults import KINDS, Refusal, Trap
from tests.simulator.ports.network import Partition
from tests.simulator.ports.virtual_time import Node
from tests.simulator.processes.fleet import Fleet
from tests.simulator.processes.stage import StageHost

Fault = Callable[[random.Random], None]

WORK_S = 40.0
"""Time of requests and faults."""

SECOND_EVERY, SECOND_AT = 7, 1
"""Seeds with slots that are filled twice."""


class Faults:
    """The faults of a seed."""

    def __init__(self, fleet: Fleet, trainers: Trainers) -> None:
        self._fleet = fleet
        self._trainers = trainers
        self._sim = fleet.sim
        self._timer = fleet.sim.world.timer
        self._garbled = 0.0
        self._traps: list[Trap] = []
        self._refusals: list[Refusal] = []
        self._operator: Node | None = None
        self._at_slot = {
            "kill stage": self._kill_slot,
            "stop stage": self._stop_slot,
            "reset": self._reset_slot,
            "part": self._part_slot,
        }

    def plan(self) -> None:
        at_engines = self._sim.engine_faults
        at_engines.refusals = self._rate("refusals", 0.4, (0.01, 0.05))
        at_engines.hangs = self._rate("hangs", 0.3, (0.002, 0.01))
        at_engines.forgotten = self._rate("forgotten tensors", 0.2, (0.03,))
        at_engines.damage = self._rate("damage", 0.3, (0.005, 0.03))
        self._garbled = self._rate("garbled answers", 0.15, (0.005, 0.02))
        at_engines.disk_errors = self._rate("disk errors", 0.3, (0.03,))
        at_engines.cut_off = self._cut_off
        kinds: list[Fault] = [
            self._kill_stage,
            self._kill_follower,
            self._stop_stage,
            self._reset,
            self._part,
            self._kill_coordinator,
            self._stop_coordinator,
            self._kill_trainer,
            self._stop_trainer,
            self._replace_trainer,
            self._fill_disk,
            self._slow,
            self._stick,
            self._take_over_apart,
            self._leave,
            self._join,
            self._fail_engine,
            self._end_coordinator,
        ]
        chance = self._sim.world.chance("faults")
        for number in range(chance.randint(8, 14)):
            self._at(f"fault {number}", kinds)
        for number in range(chance.randint(0, 5)):
            self._sim.step(f"trap {number}", self._set_trap(Trap.drawn), fault=True)
        self._plan_rarer()
        if self._sim.world.seed % SECOND_EVERY == SECOND_AT:
            for number in range(2):
                self._at(f"second {number}", [self._fill_twice])
        self._sim.network.tap = self._tap

    def _plan_rarer(self) -> None:
        """Draw the faults of only some seeds, each kind from its own source of randomness."""
        store, chance = self._sim.store, self._sim.world.chance
        store.detached = self._sim.drawn("detached writes") and chance("detached writes").random() < 0.3
        store.refuses = self._refuses
        rarer: dict[str, Callable[[random.Random], object]] = {
            "refused write": self._refuse_write,
            "double trap": self._set_trap(Trap.double),
            "cancelling": self._set_trap(Trap.cancelling),
            "another model": self._sometime(self._fill_as_another),
            "engine restart": self._sometime(self._restart_engine),
        }
        for name, plan in rarer.items():
            for number in range(chance(name).choice((0, 0, 0, 0, 0, 1, 2, 3))):
                self._sim.step(f"{name} {number}", plan, fault=True)

    def _rate(self, key: str, likely: float, rates: tuple[float, ...]) -> float:
        """Return the rate of a fault: mostly zero."""
        chance = self._sim.world.chance(key)
        return chance.choice(rates) if self._sim.drawn(key) and chance.random() < likely else 0.0

    def _at(self, key: str, kinds: list[Fault]) -> None:
        def plan(chance: random.Random) -> None:
            at, fault = chance.uniform(0, WORK_S * 0.95), chance.choice(kinds)
            self._timer.later(at, fault, chance)

        self._sim.step(key, plan, fault=True)

    def _sometime(self, fault: Fault) -> Fault:
        return lambda chance: self._timer.later(chance.uniform(0, WORK_S * 0.95), fault, chance)

    def _set_trap(self, drawn: Callable[[random.Random], Trap]) -> Callable[[random.Random], None]:
        return lambda chance: self._traps.append(drawn(chance))

    def _refuse_write(self, chance: random.Random) -> None:
        """Let the disk refuse a write of a kind, and perhaps the next writes."""
        self._refusals.append(Refusal(chance.choice(KINDS), chance.randint(1, 60), chance.choice((1, 1, 2, 5))))

    def _refuses(self, changes: Sequence[Put | Delete]) -> bool:
        return any(refusal.meets(changes) for refusal in self._refusals)

    def _cut_off(self, node: Node, update_id: str) -> None:
        """Cut a rank's stage off after a report of weights."""
        self._traps.append(Trap("answer", "CheckWeights", 1, "part", self._sim.world.chance(update_id), node.host))

    def stop(self) -> None:
        """Stop all faults, and restart the missing processes."""
        sim = self._sim
        sim.settling = True
        sim.engine_faults.stop()
        self._garbled = 0.0
        self._traps.clear()
        self._refusals.clear()
        sim.network.slow = 0.0
        sim.store.full = False
        for node in sim.world.nodes:
            node.go_on()
        if not self._fleet.coordinator.node.alive or self._fleet.coordinator.coordinator is None:
            self._fleet.start_coordinator()
        chance = sim.world.chance("formers")
        for former in self._fleet.formers:
            if chance.random() < 0.5:  # otherwise two processes keep the slot unnoticed
                former.kill()
        for slot, host in list(self._fleet.stages.items()):
            if not all(node.alive for node in host.nodes):
                host.kill()
                self._fleet.start_stage(slot)
        sim.observer.note("the faults stop")

    # At a step of the protocol.

    def _tap(self, node: Node, message: Message) -> None:
        if not self._traps and not self._garbled:
            return
        if isinstance(message, ControlResponse) and message.HasField("result") and message.result.HasField("stage"):
            if self._garbled and node.random.random() < self._garbled:
                self._garble(node, message)
            self._spring("answer", message.result.command_id)
        elif isinstance(message, ControlRequest) and message.HasField("command"):
            self._spring("command", message.command.command_id)

    def _garble(self, node: Node, message: ControlResponse) -> None:
        """Garble an answer, like a defective stage server: a rank's result is missing, or the incarnation is wrong."""
        stage = message.result.stage
        if stage.rank_results and node.random.random() < 0.7:
            del stage.rank_results[-1]
        else:
            stage.incarnation += 1
        self._note(f"{node.name} garbles its answer to {message.result.command_id}")

    def wrote(self, change: Put | Delete) -> None:
        """Spring traps for a durable record."""
        self._spring("journal", f"{change.kind}/{change.key}")

    def _spring(self, where: str, what: str) -> None:
        for trap in list(self._traps):
            if trap.springs(where, what):
                self._traps.remove(trap)
                self._trapped(trap, what)

    def _trapped(self, trap: Trap, what: str) -> None:
        self._note(f"{trap.action} at {trap.where} {what}")
        slot = next((part for part in what.split("/") if part in self._fleet.stages), "")
        if trap.follows:
            self._timer.later(trap.chance.choice((0.0, 0.001, 0.01, 0.1)), self._follow, trap, slot)
        if trap.action == "cancel":
            self._cancel(what.partition("/")[0])
        elif trap.action == "kill coordinator":
            # The record is on the disk; its writer never learns this.
            self._fleet.coordinator.node.kill()
            self._timer.later(trap.chance.uniform(0.2, 12), self._restart_coordinator)
        elif trap.action == "stop coordinator":
            self._timer.later(0.0, self._stop_coordinator, trap.chance)
        elif trap.action == "stop trainer":
            self._timer.later(0.0, self._stop_trainer, trap.chance)
        elif slot:
            self._timer.later(0.0, self._at_slot[trap.action], slot, trap.chance)

    def _follow(self, trap: Trap, slot: str) -> None:
        """Cause a second fault before the recovery from the first."""
        if self._sim.settling:
            return
        chance = trap.chance
        match trap.follows:
            case "kill coordinator":
                self._kill_coordinator(chance)
            case "kill trainer":
                self._kill_trainer(chance)
            case "refuse a write":
                self._note("the next writes are refused")
                self._refusals.append(Refusal("", 1, chance.choice((1, 2, 5))))
            case other:
                self._at_slot[other](slot or self._stage(chance), chance)

    def _cancel(self, operation_id: str) -> None:
        if self._operator is None:
            self._operator = self._sim.world.spawn("canceller")
        caller = Caller(self._fleet, self._operator)
        request = CancelOperationRequest(operation_id=operation_id)
        self._operator.start(_quietly(caller.call("CancelOperation", request, 60.0)))

    # At processes and the network.

    def _stage(self, chance: random.Random) -> str:
        return chance.choice(sorted(self._fleet.stages))

    def _note(self, what: str) -> None:
        self._sim.observer.note(f"FAULT {what}")

    def _kill_stage(self, chance: random.Random) -> None:
        self._kill_slot(self._stage(chance), chance)

    def _kill_slot(self, slot: str, chance: random.Random) -> None:
        if slot in self._fleet.stages:
            self._note(f"{slot} is killed")
            self._fleet.stages[slot].kill()
            self._timer.later(chance.uniform(0.5, 20), self._replace, slot)

    def _kill_follower(self, chance: random.Random) -> None:
        hosts = [host for host in self._fleet.stages.values() if len(host.nodes) > 1]
        if not hosts:
            return self._kill_stage(chance)
        host = chance.choice(hosts)
        self._note(f"rank 1 of {host.slot} is killed")
        host.nodes[1].kill()
        self._timer.later(chance.uniform(5, 20), self._replace, host.slot)
        return None

    def _fail_engine(self, chance: random.Random) -> None:
        """Let an engine report its failure."""
        host = self._fleet.stages[self._stage(chance)]
        if not host.machine.engines:
            return
        engine = chance.choice(host.machine.engines)
        self._note(f"the engine of {engine.node.name} fails")
        engine.fail(Reason.ENGINE_FAILED.error("it has failed by itself"))
        self._timer.later(chance.uniform(5, 20), self._kill_and_replace, host.slot)

    def _kill_and_replace(self, slot: str) -> None:
        if slot in self._fleet.stages:
            self._fleet.stages[slot].kill()
            self._replace(slot)

    def _replace(self, slot: str) -> None:
        host = self._fleet.stages.get(slot)
        if host is not None and not all(node.alive for node in host.nodes):
            host.kill()
            self._fleet.start_stage(slot)

    def _fill_twice(self, chance: random.Random) -> None:
        """Fill a slot twice: the former stage is cut off, stopped or well."""
        slot = self._stage(chance)
        former = self._fleet.stages[slot]
        if not former.alive or len(self._fleet.filling(slot)) > 1:
            return
        match chance.choice(("cut off", "stopped", "well")):
            case "cut off":
                self._cut(Partition(frozenset({former.node.host})), chance.uniform(5, 25))
            case "stopped":
                self._stop(former.node, chance.uniform(5, 25))
        self._timer.later(chance.uniform(0, 10), self._start_second, former)

    def _start_second(self, former: StageHost) -> None:
        if former.alive and self._fleet.stages.get(former.slot) is former and not self._sim.settling:
            self._note(f"{former.slot} is filled a second time")
            self._fleet.start_second(former.slot)

    def _fill_as_another(self, chance: random.Random) -> None:
        """Replace a dead stage, or a stage that is cut off, by a stage of a different model."""
        slot = self._stage(chance)
        former = self._fleet.stages[slot]
        others = [model for model in sorted(self._fleet.models) if model != former.model]
        if not others or len(self._fleet.models[former.model]) < 4 or len(self._fleet.filling(slot)) > 1:
            return
        if chance.random() < 0.3:
            former.kill()
        else:
            self._cut(Partition(frozenset({former.node.host})), chance.uniform(5, 25))
        self._note(f"{slot} is filled with a stage of {others[0]}")
        self._fleet.start_as_another(slot, others[0])

    def _restart_engine(self, chance: random.Random) -> None:
        """Restart a failed engine inside its living stage server."""
        hosts = [self._fleet.stages[slot] for slot in sorted(self._fleet.stages)]
        hosts = [host for host in hosts if host.alive and host.stage is not None and len(host.nodes) == 1]
        if hosts:
            host = chance.choice(hosts)
            self._note(f"the engine of {host.name} fails, and is started anew in its process")
            for engine in host.machine.engines:
                engine.fail(Reason.ENGINE_FAILED.error("it has failed by itself"))
            host.node.later(chance.choice((0.0, 1.0)), lambda: host.node.start(host.restart()))

    def _leave(self, chance: random.Random) -> None:
        slot = self._stage(chance)
        if len(self._fleet.models[self._fleet.stages[slot].model]) > 3:
            self._note(f"{slot} leaves")
            self._fleet.remove_stage(slot)

    def _join(self, chance: random.Random) -> None:
        model = chance.choice(sorted(self._fleet.models))
        self._note(f"another stage of {model} joins")
        self._fleet.add_stage(model, chance.choice((1, 1, 2)))

    def _stop_stage(self, chance: random.Random) -> None:
        self._stop_slot(self._stage(chance), chance)

    def _stop_slot(self, slot: str, chance: random.Random) -> None:
        if slot in self._fleet.stages:
            self._stop(chance.choice(self._fleet.stages[slot].nodes), chance.uniform(1, 30))

    def _stop(self, node: Node, seconds: float) -> None:
        self._note(f"{node.name} is stopped for {seconds:.1f} s")
        node.stop()
        self._timer.later(seconds, node.go_on)

    def _reset(self, chance: random.Random) -> None:
        self._reset_slot(self._stage(chance), chance)

    def _reset_slot(self, slot: str, chance: random.Random) -> None:
        del chance
        if slot in self._fleet.stages:
            self._note(f"connections of {slot} are reset")
            self._sim.network.reset(self._fleet.stages[slot].node)

    def _part(self, chance: random.Random) -> None:
        slots = chance.sample(sorted(self._fleet.stages), chance.randint(1, 3))
        self._cut(Partition(frozenset(slots)), chance.uniform(0.5, 25))

    def _part_slot(self, slot: str, chance: random.Random) -> None:
        self._cut(Partition(frozenset({slot})), chance.uniform(0.5, 25))

    def _cut(self, partition: Partition, seconds: float) -> None:
        other = f" from {sorted(partition.other)}" if partition.other else ""
        self._note(f"{sorted(partition.side)} are cut off{other} for {seconds:.1f} s")
        self._sim.network.part(partition, seconds)

    def _kill_coordinator(self, chance: random.Random) -> None:
        self._note("the coordinator is killed")
        self._fleet.coordinator.node.kill()
        self._timer.later(chance.uniform(0.2, 12), self._restart_coordinator)

    def _end_coordinator(self, chance: random.Random) -> None:
        host = self._fleet.coordinator
        if host.node.alive and not host.node.stopped:
            self._note("the coordinator is told to stop")
            host.node.start(host.end())
            host.node.at_end.append(lambda: self._timer.later(chance.uniform(0.2, 5), self._restart_coordinator))

    def _restart_coordinator(self) -> None:
        if not self._fleet.coordinator.node.alive:
            self._fleet.start_coordinator()

    def _stop_coordinator(self, chance: random.Random) -> None:
        node = self._fleet.coordinator.node
        seconds = chance.uniform(1, 20)
        self._stop(node, seconds)
        if chance.random() < 0.6:
            self._timer.later(seconds * chance.random(), self._take_over)

    def _take_over(self) -> None:
        if not self._sim.settling:
            self._note("another coordinator takes over")
            self._fleet.start_coordinator()

    def _take_over_apart(self, chance: random.Random) -> None:
        """Start a second coordinator beside the first, without a connection to some stages."""
        if self._sim.settling or not self._fleet.coordinator.node.alive:
            return
        self._take_over()
        slots = chance.sample(sorted(self._fleet.stages), chance.randint(1, 2))
        apart = Partition(frozenset({self._fleet.coordinator.node.host}), frozenset(slots))
        self._cut(apart, chance.uniform(5, 30))

    def _trainer(self, chance: random.Random) -> Trainer | None:
        running = self._trainers.running
        return running[chance.choice(sorted(running))] if running else None

    def _rank(self, trainer: Trainer) -> Node:
        """Draw a process of a trainer, rank 0 most often."""
        chance = self._sim.world.chance(f"rank of {trainer.node.name} at {self._sim.world.now}")
        return trainer.node if chance.random() < 0.6 else chance.choice(trainer.nodes)

    def _kill_trainer(self, chance: random.Random) -> None:
        trainer = self._trainer(chance)
        if trainer is not None:
            node = self._rank(trainer)
            self._note(f"{node.name} is killed")
            node.kill()
            if chance.random() < 0.7:
                newer = chance.randint(-1, 1)
                self._timer.later(chance.uniform(0.2, 10), self._restart_trainer, trainer, newer)

    def _restart_trainer(self, trainer: Trainer, newer: int) -> None:
        if not self._sim.settling and self._trainers.running[trainer.model] is trainer:
            self._trainers.start(trainer.model, max(0, trainer.incarnation + newer))

    def _stop_trainer(self, chance: random.Random) -> None:
        trainer = self._trainer(chance)
        if trainer is not None:
            self._stop(self._rank(trainer), chance.uniform(1, 40))

    def _replace_trainer(self, chance: random.Random) -> None:
        """Replace a stopped trainer that is still alive."""
        trainer = self._trainer(chance)
        if trainer is not None:
            self._stop(trainer.node, chance.uniform(1, 10))
            self._timer.later(chance.uniform(0, 10), self._restart_trainer, trainer, 1)

    def _fill_disk(self, chance: random.Random) -> None:
        seconds = chance.uniform(0.1, 8)
        self._note(f"the journal's disk is full for {seconds:.1f} s")
        self._sim.store.full = True
        self._timer.later(seconds, setattr, self._sim.store, "full", False)

    def _slow(self, chance: random.Random) -> None:
        self._note("the network is slow")
        self._sim.network.slow = chance.choice((0.05, 0.5))
        self._timer.later(chance.uniform(1, 15), setattr, self._sim.network, "slow", 0.0)

    def _stick(self, chance: random.Random) -> None:
        for group in self._sim.fabric.groups.values():
            if not group.broken and chance.random() < 0.5:
                self._note(f"collectives of {group.name} never return")
                group.stuck = True


async def _quietly(call: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(RlctlError):
        await call
