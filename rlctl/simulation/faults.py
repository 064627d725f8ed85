"""What goes wrong: drawn from the seed, counted, and stopped at a known time.

Some faults come at a time, some at a step of the protocol (:mod:`.traps`), some now and then inside an engine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from rlctl.errors import Reason
from rlctl.simulation.network import Partition
from rlctl.simulation.traps import Trap
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.v1.control_pb2 import ControlRequest, ControlResponse

if TYPE_CHECKING:
    from rlctl.ports import Delete, Put
    from rlctl.simulation.engine import SimEngine
    from rlctl.simulation.fleet import Simulation
    from rlctl.simulation.trainer import Trainer
    from rlctl.simulation.world import Node

Fault = Callable[[random.Random], None]

WORK_S = 40.0
"""Time in which things are asked and faults happen."""


class Faults:
    """The faults of one seed."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.trainers: dict[str, Trainer] = {}
        self.stopped = False
        self.disk_error = 0.0
        self._refuse = 0.0
        self._hang = 0.0
        self._forget = 0.0
        self._damage = 0.0
        self._garble = 0.0
        self._traps: list[Trap] = []

    def plan(self) -> None:
        """Draw them."""
        self._rate("refusals", "_refuse", 0.4, (0.01, 0.05))
        self._rate("hangs", "_hang", 0.3, (0.002, 0.01))
        self._rate("forgotten tensors", "_forget", 0.2, (0.03,))
        self._rate("damage", "_damage", 0.3, (0.005, 0.03))
        self._rate("garbled answers", "_garble", 0.15, (0.005, 0.02))
        self._rate("disk errors", "disk_error", 0.3, (0.03,))
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
            self._sim.step(f"trap {number}", self._set_trap, fault=True)
        self._sim.network.tap = self._tap

    def _rate(self, key: str, attribute: str, likely: float, rates: tuple[float, ...]) -> None:
        def draw(chance: random.Random) -> None:
            if chance.random() < likely:
                setattr(self, attribute, chance.choice(rates))

        self._sim.step(key, draw)

    def _at(self, key: str, kinds: list[Fault]) -> None:
        def plan(chance: random.Random) -> None:
            at, fault = chance.uniform(0, WORK_S * 0.95), chance.choice(kinds)
            self._sim.timer.later(at, fault, chance)

        self._sim.step(key, plan, fault=True)

    def _set_trap(self, chance: random.Random) -> None:
        self._traps.append(Trap.drawn(chance))

    def stop(self) -> None:
        """From here on nothing goes wrong any more, and what is gone comes back."""
        self.stopped = True
        self._refuse = self._hang = self._forget = self._damage = self._garble = self.disk_error = 0.0
        self._traps.clear()
        sim = self._sim
        sim.network.slow = 0.0
        sim.store.full = False
        for node in sim.world.nodes:
            node.go_on()
        if not sim.coordinator.node.alive or sim.coordinator.coordinator is None:
            sim.start_coordinator()
        for slot, host in list(sim.stages.items()):
            if not all(node.alive for node in host.nodes):
                host.kill()
                sim.start_stage(slot)
        sim.observer.note("the faults stop")

    # At the engine.

    def engine(self, engine: SimEngine, verb: str) -> Awaitable[None] | None:
        """What befalls a verb at one rank, or None."""
        if not self._refuse and not self._hang:
            return None
        draw = engine.node.random.random()
        if draw < self._refuse:
            return self._refusing(engine, verb)
        if draw < self._refuse + self._hang:
            self._sim.observer.note(f"{verb} hangs at {engine.node.name}")
            return asyncio.sleep(engine.node.random.uniform(5, 40))
        return None

    async def _refusing(self, engine: SimEngine, verb: str) -> None:
        outcome = engine.node.random.choice((OUTCOME_REJECTED, OUTCOME_REJECTED, OUTCOME_DIRTY))
        if engine.node.random.random() < 0.1:
            raise RuntimeError(f"{verb} has a defect")
        raise Reason.ENGINE_FAILED.error(f"{verb} failed", outcome=outcome)

    def forgets(self, engine: SimEngine) -> bool:
        """Whether a rank silently forgets a tensor: of a full update, which counts, or where stages are compared."""
        if not self._forget or engine.node.random.random() >= self._forget:
            return False
        return engine.holding.full or (engine.digests and engine.holding.update_id in self._sim.compared)

    def damaged(self, engine: SimEngine, content: str) -> str:
        """What a rank really writes. It is damaged only where somebody has said which digest is right: without that
        nothing could show it.
        """
        update_id = engine.holding.update_id
        known = update_id in self._sim.digested or "/heal/" in update_id
        if not engine.digests:  # then what comes may be digested, in a trainer's update
            known = update_id in self._sim.digested and engine.holding.received is not None
        if not self._damage or not known or engine.node.random.random() >= self._damage:
            return content
        self._note(f"{content} comes damaged to {engine.node.name}")
        if engine.node.random.random() < 0.5:
            # It is cut off as soon as it has said what it holds: what it is told then does not reach it.
            slot = engine.node.host
            self._traps.append(Trap("answer", "CheckWeights", 1, "part", self._sim.world.chance(update_id), slot))
        return f"{content}, damaged at {engine.node.name}"

    # At a step of the protocol.

    def _tap(self, node: Node, message: Message) -> None:
        if not self._traps and not self._garble:
            return
        if isinstance(message, ControlResponse) and message.HasField("result") and message.result.HasField("stage"):
            if self._garble and node.random.random() < self._garble:
                self._garbled(node, message)
            self._spring("answer", message.result.command_id)
        elif isinstance(message, ControlRequest) and message.HasField("command"):
            self._spring("command", message.command.command_id)

    def _garbled(self, node: Node, message: ControlResponse) -> None:
        """A stage server with a defect: its answer does not say what its ranks did, or is not its own."""
        stage = message.result.stage
        if stage.rank_results and node.random.random() < 0.7:
            del stage.rank_results[-1]
        else:
            stage.incarnation += 1
        self._note(f"{node.name} garbles its answer to {message.result.command_id}")

    def wrote(self, change: Put | Delete) -> None:
        """A record has become durable."""
        self._spring("journal", f"{change.kind}/{change.key}")

    def _spring(self, where: str, what: str) -> None:
        for trap in list(self._traps):
            if trap.springs(where, what):
                self._traps.remove(trap)
                self._trapped(trap, what)

    def _trapped(self, trap: Trap, what: str) -> None:
        sim = self._sim
        self._note(f"{trap.action} at {trap.where} {what}")
        slot = next((part for part in what.split("/") if part in sim.stages), "")
        if trap.action == "kill coordinator":
            # The record is on the disk; what wrote it never learns.
            sim.coordinator.node.kill()
            sim.timer.later(trap.chance.uniform(0.2, 12), self._restart_coordinator)
        elif trap.action == "stop coordinator":
            sim.timer.later(0.0, self._stop_coordinator, trap.chance)
        elif trap.action == "stop trainer":
            sim.timer.later(0.0, self._stop_trainer, trap.chance)
        elif slot:
            actions = {
                "kill stage": self._kill_slot,
                "stop stage": self._stop_slot,
                "reset": self._reset_slot,
                "part": self._part_slot,
            }
            sim.timer.later(0.0, actions[trap.action], slot, trap.chance)

    # At processes and the network.

    def _stage(self, chance: random.Random) -> str:
        return chance.choice(sorted(self._sim.stages))

    def _note(self, what: str) -> None:
        self._sim.observer.note(f"FAULT {what}")

    def _kill_stage(self, chance: random.Random) -> None:
        self._kill_slot(self._stage(chance), chance)

    def _kill_slot(self, slot: str, chance: random.Random) -> None:
        if slot in self._sim.stages:
            self._note(f"{slot} is killed")
            self._sim.stages[slot].kill()
            self._sim.timer.later(chance.uniform(0.5, 20), self._replace, slot)

    def _kill_follower(self, chance: random.Random) -> None:
        hosts = [host for host in self._sim.stages.values() if len(host.nodes) > 1]
        if not hosts:
            return self._kill_stage(chance)
        host = chance.choice(hosts)
        self._note(f"rank 1 of {host.slot} is killed")
        host.nodes[1].kill()
        self._sim.timer.later(chance.uniform(5, 20), self._replace, host.slot)
        return None

    def _fail_engine(self, chance: random.Random) -> None:
        """An engine notices that it cannot go on."""
        host = self._sim.stages[self._stage(chance)]
        if not host.machine.engines:
            return
        engine = chance.choice(host.machine.engines)
        self._note(f"the engine of {engine.node.name} fails")
        engine.fail(Reason.ENGINE_FAILED.error("it has failed by itself"))
        self._sim.timer.later(chance.uniform(5, 20), self._kill_and_replace, host.slot)

    def _kill_and_replace(self, slot: str) -> None:
        if slot in self._sim.stages:
            self._sim.stages[slot].kill()
            self._replace(slot)

    def _replace(self, slot: str) -> None:
        host = self._sim.stages.get(slot)
        if host is not None and not all(node.alive for node in host.nodes):
            host.kill()
            self._sim.start_stage(slot)

    def _leave(self, chance: random.Random) -> None:
        slot = self._stage(chance)
        if len(self._sim.slots_of(self._sim.stages[slot].model)) > 3:
            self._note(f"{slot} leaves")
            self._sim.remove_stage(slot)

    def _join(self, chance: random.Random) -> None:
        model = chance.choice(sorted(self._sim.models))
        self._note(f"another stage of {model} joins")
        self._sim.add_stage(model, chance.choice((1, 1, 2)))

    def _stop_stage(self, chance: random.Random) -> None:
        self._stop_slot(self._stage(chance), chance)

    def _stop_slot(self, slot: str, chance: random.Random) -> None:
        if slot in self._sim.stages:
            self._stop(chance.choice(self._sim.stages[slot].nodes), chance.uniform(1, 30))

    def _stop(self, node: Node, seconds: float) -> None:
        self._note(f"{node.name} is stopped for {seconds:.1f} s")
        node.stop()
        self._sim.timer.later(seconds, node.go_on)

    def _reset(self, chance: random.Random) -> None:
        self._reset_slot(self._stage(chance), chance)

    def _reset_slot(self, slot: str, chance: random.Random) -> None:
        del chance
        if slot in self._sim.stages:
            self._note(f"connections of {slot} are reset")
            self._sim.network.reset(self._sim.stages[slot].node)

    def _part(self, chance: random.Random) -> None:
        slots = chance.sample(sorted(self._sim.stages), chance.randint(1, 3))
        self._cut(Partition(frozenset(slots)), chance.uniform(0.5, 25))

    def _part_slot(self, slot: str, chance: random.Random) -> None:
        self._cut(Partition(frozenset({slot})), chance.uniform(0.5, 25))

    def _cut(self, partition: Partition, seconds: float) -> None:
        other = f" from {sorted(partition.other)}" if partition.other else ""
        self._note(f"{sorted(partition.side)} are cut off{other} for {seconds:.1f} s")
        self._sim.network.part(partition, seconds, self._sim.timer)

    def _kill_coordinator(self, chance: random.Random) -> None:
        self._note("the coordinator is killed")
        self._sim.coordinator.node.kill()
        self._sim.timer.later(chance.uniform(0.2, 12), self._restart_coordinator)

    def _end_coordinator(self, chance: random.Random) -> None:
        host = self._sim.coordinator
        if host.node.alive and not host.node.stopped:
            self._note("the coordinator is told to stop")
            host.node.start(host.end())
            host.node.at_end.append(lambda: self._sim.timer.later(chance.uniform(0.2, 5), self._restart_coordinator))

    def _restart_coordinator(self) -> None:
        if not self._sim.coordinator.node.alive:
            self._sim.start_coordinator()

    def _stop_coordinator(self, chance: random.Random) -> None:
        node = self._sim.coordinator.node
        seconds = chance.uniform(1, 20)
        self._stop(node, seconds)
        if chance.random() < 0.6:
            self._sim.timer.later(seconds * chance.random(), self._take_over)

    def _take_over(self) -> None:
        if not self.stopped:
            self._note("another coordinator takes over")
            self._sim.start_coordinator()

    def _take_over_apart(self, chance: random.Random) -> None:
        """Another coordinator takes over while the one before goes on, and does not reach everybody."""
        if self.stopped or not self._sim.coordinator.node.alive:
            return
        self._take_over()
        slots = chance.sample(sorted(self._sim.stages), chance.randint(1, 2))
        apart = Partition(frozenset({self._sim.coordinator.node.host}), frozenset(slots))
        self._cut(apart, chance.uniform(5, 30))

    def _trainer(self, chance: random.Random) -> Trainer | None:
        return self.trainers[chance.choice(sorted(self.trainers))] if self.trainers else None

    def _kill_trainer(self, chance: random.Random) -> None:
        trainer = self._trainer(chance)
        if trainer is not None:
            self._note(f"the trainer of {trainer.model} is killed")
            trainer.node.kill()
            if chance.random() < 0.7:
                newer = chance.randint(-1, 1)
                self._sim.timer.later(chance.uniform(0.2, 10), self._restart_trainer, trainer, newer)

    def _restart_trainer(self, trainer: Trainer, newer: int) -> None:
        if not self.stopped and self.trainers[trainer.model] is trainer:
            self._sim.train(trainer.model, max(0, trainer.incarnation + newer))

    def _stop_trainer(self, chance: random.Random) -> None:
        trainer = self._trainer(chance)
        if trainer is not None:
            self._stop(trainer.node, chance.uniform(1, 40))

    def _replace_trainer(self, chance: random.Random) -> None:
        """A trainer is thought to be dead, and is not."""
        trainer = self._trainer(chance)
        if trainer is not None:
            self._stop(trainer.node, chance.uniform(1, 10))
            self._sim.timer.later(chance.uniform(0, 10), self._restart_trainer, trainer, 1)

    def _fill_disk(self, chance: random.Random) -> None:
        seconds = chance.uniform(0.1, 8)
        self._note(f"the journal's disk is full for {seconds:.1f} s")
        self._sim.store.full = True
        self._sim.timer.later(seconds, setattr, self._sim.store, "full", False)

    def _slow(self, chance: random.Random) -> None:
        self._note("the network is slow")
        self._sim.network.slow = chance.choice((0.05, 0.5))
        self._sim.timer.later(chance.uniform(1, 15), setattr, self._sim.network, "slow", 0.0)

    def answer_slowly(self, slot: str, chance: random.Random) -> None:
        """What one rank of a stage sends comes late for a while."""
        if not self.stopped and slot in self._sim.stages:
            node = chance.choice(self._sim.stages[slot].nodes)
            node.slow = chance.choice((0.05, 0.5))
            self._note(f"what {node.name} sends is slow")
            self._sim.timer.later(chance.uniform(1, 5), setattr, node, "slow", 0.0)

    def _stick(self, chance: random.Random) -> None:
        for group in self._sim.fabric.groups.values():
            if not group.broken and chance.random() < 0.5:
                self._note(f"collectives of {group.name} never return")
                group.stuck = True
