"""What must hold after every step, checked against what really happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlctl.ports import Delete, Put
from rlctl.simulation.fabric import Tensors
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_SKIPPED
from rlctl.v1.journal_pb2 import FleetRecord, ModelRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_RUNNING, Operation
from rlctl.v1.rollout_pb2 import GenerateResponse

if TYPE_CHECKING:
    from rlctl.simulation.engine import SimEngine
    from rlctl.simulation.fleet import Simulation
    from rlctl.simulation.hosts import StageHost

WEIGHT_UPDATES = ("WeightUpdate", "UpdateWeightsFromDisk")


@dataclass
class Violation(Exception):
    """A promise that was broken."""

    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what}"


class Observer:
    """Sees what no process sees: all of it at once."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.violations: list[Violation] = []
        self.history: list[str] = []
        self.latest: dict[str, ModelRecord] = {}
        self.epoch = 0
        self.tokens = 0
        self._made: dict[tuple[str, int], tuple[list[Tensors], frozenset[int]]] = {}
        self._applied: set[tuple[str, int, str]] = set()
        self.operations: dict[str, Operation] = {}

    def note(self, what: str) -> None:
        """Add to the history."""
        self.history.append(f"{self._sim.world.now:9.3f} {what}")

    def broken(self, invariant: str, what: str) -> None:
        """A promise was broken."""
        if any(known.invariant == invariant for known in self.violations):
            return  # one of a kind is enough to see
        violation = Violation(invariant, what)
        self.violations.append(violation)
        self.note(f"VIOLATED {violation}")

    # I4: published sequences are monotone; epochs too.

    def journaled(self, change: Put | Delete) -> None:
        """A record became durable."""
        if isinstance(change, Delete):
            return
        if change.kind == "model":
            record = ModelRecord.FromString(change.body)
            before = self.latest.get(record.name)
            if before is not None and record.latest.sequence < before.latest.sequence:
                self.broken("I4", f"{record.name} went from {before.latest.sequence} to {record.latest.sequence}")
            if before is None or record.latest != before.latest:
                self.note(f"PUBLISHED {record.name} {record.latest.sequence} {record.latest.label!r}")
            self.latest[record.name] = record
            if record.checkpoint:
                self._sim.published.setdefault(
                    (record.name, record.latest.sequence), self._sim.disks[record.checkpoint]
                )
        elif change.kind == "fleet":
            epoch = FleetRecord.FromString(change.body).fleet_epoch
            if epoch <= self.epoch:
                self.broken("I5", f"epoch {epoch} follows {self.epoch}")
            self.epoch = epoch

    # I1: tokens.

    def made(self, part: GenerateResponse, held: Sequence[Tensors], released: frozenset[int]) -> None:
        """An engine made a token from what its ranks held."""
        self._made[part.rid, part.samples[0].output_ids[0]] = [dict(weights) for weights in held], released

    def served(self, host: StageHost, part: GenerateResponse) -> None:
        """A token left a stage."""
        if not part.samples[0].output_ids:
            return
        self.tokens += 1
        held, released = self._made.pop((part.rid, part.samples[0].output_ids[0]))
        record = self.latest.get(host.model)
        version = record.latest.label if record else "(none)"
        published = self._sim.published.get((host.model, record.latest.sequence)) if record else None
        if released:
            self.broken("I1", f"{host.name} served a token while {sorted(released)} were released")
        for rank, weights in enumerate(held):
            if weights != published:
                held_now, latest = ",".join(sorted(weights.values())), sorted((published or {}).values())
                self.broken("I1", f"{host.name} rank {rank} served {held_now} while {version!r} is latest: {latest}")
                break
        stamp = part.samples[0].versions[0].version
        if record is not None and stamp.sequence != record.latest.sequence:
            self.broken("I1", f"{host.name} stamped {stamp.label!r} on a token of {version!r}")

    # I2: at most once.

    def applied(self, engine: SimEngine, verb: str, command_id: str) -> None:
        """A rank carried a command out."""
        key = (engine.node.name, engine.rank, command_id)
        if key in self._applied:
            self.broken("I2", f"{verb} {command_id} was carried out twice at {engine.node.name}")
        self._applied.add(key)

    # I3: OK implies that every rank of every target acknowledged.

    def answered(self, operation: Operation) -> None:
        """A client got an operation's outcome."""
        if operation.validate_only or operation.state == OPERATION_STATE_RUNNING:
            return
        if operation.state != OPERATION_STATE_OK:
            return
        update = operation.verb in WEIGHT_UPDATES
        good = (OUTCOME_APPLIED,) if update else (OUTCOME_APPLIED, OUTCOME_SKIPPED)
        results = {result.slot: result for result in operation.stage_results}
        for slot in operation.targets:
            result = results.get(slot)
            if result is None or result.outcome not in good:
                self.broken("I3", f"{operation.verb} {operation.operation_id} is OK, {slot} is not")
                continue
            for rank in result.rank_results:
                if rank.outcome not in good:
                    self.broken("I3", f"{operation.verb} is OK, rank {rank.coordinates.rank} of {slot} is not")

    def took(self, what: str, seconds: float, limit: float) -> None:
        """I6: a call ended after so long."""
        if seconds > limit:
            self.broken("I6", f"{what} took {seconds:.2f} s of {limit:.2f} s")
