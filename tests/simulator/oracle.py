"""Invariants after every step, checked against events that the processes report.

Invariants without an event are checked by :mod:`.inspection`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlctl.contract.errors import Reason
from rlctl.ports import Delete, Put
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED, OUTCOME_SKIPPED, WeightVersion
from rlctl.v1.journal_pb2 import (
    UPDATE_PHASE_PUBLISHED,
    FleetRecord,
    ModelRecord,
    OperationRecord,
    PauseRecord,
    SlotRecord,
    UpdateRecord,
)
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_OK,
    OPERATION_STATE_PARTIAL,
    OPERATION_STATE_RUNNING,
    OPERATION_STATE_UNKNOWN,
    Operation,
    StageResult,
)
from rlctl.v1.rollout_pb2 import GenerateResponse
from tests.simulator.model.profiles import SimSlot
from tests.simulator.model.rank_weights import Holding
from tests.simulator.ports.journal import SimJournal, Store
from tests.simulator.ports.process_groups import Tensors
from tests.simulator.ports.virtual_time import EPOCH_S, Node, World

LEASE_S = 10.0
"""Serving lease of the coordinators, seconds."""

WEIGHT_UPDATES = ("WeightUpdate", "UpdateWeightsFromDisk", "LoadAdapter")

MOST_REPORTS = 100
"""Most reports of a stage in a second: five times the need of a busy stage."""

_STEPS = ("PauseGeneration", "ContinueGeneration", "FlushCache", "ReleaseMemory", "ResumeMemory", "CheckWeights")
"""Verbs that all ranks carry out at one step of their engine."""

_GO_ON = ("ContinueGeneration", "ResumeMemory")
"""Verbs that end a pause by name."""

PUBLISHED = (OPERATION_STATE_OK, OPERATION_STATE_PARTIAL)
"""States of an update whose version is served."""


@dataclass
class Violation(Exception):
    """A broken promise."""

    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what}"


@dataclass(frozen=True)
class _Made:
    """The weights behind a token, by rank."""

    weights: list[Tensors]
    released: frozenset[int]
    adapter: str
    adapters: list[Tensors]
    stale: bool


class Observer:
    """Sees all processes at once, unlike any process.

    Attributes:
        history: lines of events, if a history is requested.
        published: contents of each version of a model, by model and sequence.
        adapters: contents of each adapter, by model, name and version.
        digested: updates with an expected digest from the trainer.
        compared: partial updates whose targets are compared with each other.
        mistaken: updates with a probe that their weights fail.
        nameless: every tensor sent in implicit updates.
        may_end_early: open updates with writes of kind PARTIAL: the sequence of each, by model.
        begun: model and sequence of each trainer's update, by lead process and label.
    """

    def __init__(
        self, world: World, store: Store, disks: dict[str, Tensors], slots: dict[str, SimSlot], *, telling: bool
    ) -> None:
        self._world = world
        self._store = store
        self._disks = disks
        self._slots = slots
        self._telling = telling
        self.violations: list[Violation] = []
        self.history: list[str] = []
        self.published: dict[tuple[str, int], Tensors] = {}
        self.adapters: dict[tuple[str, str, str], Tensors] = {}
        self.digested: set[str] = set()
        self.compared: set[str] = set()
        self.mistaken: set[str] = set()
        self.nameless: set[str] = set()
        self.may_end_early: dict[str, int] = {}
        self.begun: dict[tuple[str, str], tuple[str, int]] = {}
        self._on_record: set[tuple[str, int]] = set()
        """Versions that the journal has had as a model's latest, by model and sequence."""
        self._refused: dict[tuple[str, int], str] = {}
        """Trainer processes that reported a version as not served, by model and sequence."""
        self.latest: dict[str, ModelRecord] = {}
        self.epoch = 0
        self.tokens = 0
        self._stale_decodes: set[tuple[str, int, int]] = set()
        self._made: dict[tuple[str, int], _Made] = {}
        self._applied: set[tuple[str, int, str]] = set()
        self._acknowledged: dict[tuple[str, str], dict[str, set[int]]] = {}
        """Ranks that carried a step out, by operation, slot and step."""
        self._outcomes: dict[str, int] = {}
        self._incarnations: dict[str, int] = {}
        self._reign: tuple[SimJournal | None, int] = (None, 0)
        """The journal of the coordinator whose writes count, and its first epoch: adoption may raise it."""
        self._loaded: dict[tuple[str, int], dict[str, str]] = {}
        """Versions of adapters by name while a sequence was a model's latest: served as long as the sequence."""
        self._unloading: dict[tuple[str, str], str] = {}
        """Versions of unloaded adapters, by model and name, until the caller of the unload has its answer."""
        self._reports: dict[str, int] = {}
        self._paused: dict[tuple[str, int, str], str] = {}
        """Operation that paused an incarnation of a stage by name, or an adapter there, until a continue."""
        self._pauses_of_the_fleet: dict[str, tuple[PauseRecord, set[str]]] = {}
        """OK pauses by name, by operation, until a continue; with slots that were continued since."""
        self._retired: set[str] = set()
        """Slots that are retired on record."""
        self._recorded: dict[str, PauseRecord] = {}
        """Every pause by name on record."""
        self._continuing: dict[tuple[str, str], dict[str, list[set[str]]]] = {}
        """Running continues by operation and adapter: slots, and the sets of continued slots that each came into."""
        self._continued: dict[tuple[str, str], int] = {}
        """Time of the last continue, by slot and adapter, in nanoseconds of the wall clock."""
        self._rolling: dict[tuple[str, str, int], int] = {}
        """Models whose latest version has not reached all targets: the update, and the replaced sequence; with the
        first epoch of the coordinator in charge.
        """

    def note(self, what: str) -> None:
        if self._telling:
            self.history.append(f"{self._world.now:9.3f} {what}")

    def broken(self, invariant: str, what: str) -> None:
        if any(known.invariant == invariant for known in self.violations):
            return  # one violation of a kind is enough
        violation = Violation(invariant, what)
        self.violations.append(violation)
        self.note(f"VIOLATED {violation}")

    def sequence(self, model: str) -> int:
        """Return the published sequence of a model."""
        return self.latest[model].latest.sequence if model in self.latest else 0

    # Durable records. I4: published sequences are monotone; epochs too. I8: an outcome never changes.

    def journaled(self, change: Put | Delete) -> None:
        if isinstance(change, Delete):
            if change.kind == "update":  # a successor deletes the record, and its admitted versions run out
                self._rolled(lambda entry: entry[1] == change.key and self._rolling[entry] == self._reign[1])
            elif change.kind == "operation":  # dropped, perhaps before its end could be recorded
                self._outcomes.pop(change.key, None)
            elif change.kind == "slot":
                self._retired.discard(change.key)
            elif change.kind == "pause":
                self._over(self._recorded.pop(change.key, None))
                self._pauses_of_the_fleet.pop(change.key, None)
            return
        if change.kind == "model":
            self._published(ModelRecord.FromString(change.body))
        elif change.kind == "update":
            record = UpdateRecord.FromString(change.body)
            if record.request.rollout.max_unavailable and record.phase != UPDATE_PHASE_PUBLISHED:
                self._rolling[record.request.model, change.key, self.sequence(record.request.model)] = self._reign[1]
        elif change.kind == "slot":
            (self._retired.add if SlotRecord.FromString(change.body).retired else self._retired.discard)(change.key)
        elif change.kind == "pause":
            self._over(self._recorded.get(change.key))
            pause = self._recorded[change.key] = PauseRecord.FromString(change.body)
            if change.key in self._pauses_of_the_fleet:
                _, going = self._pauses_of_the_fleet[change.key]
                self._pauses_of_the_fleet[change.key] = pause, going
        elif change.kind == "operation":
            operation = OperationRecord.FromString(change.body).operation
            self._ended(operation)
            before = self._outcomes.get(change.key, OPERATION_STATE_RUNNING)
            if before not in (OPERATION_STATE_RUNNING, operation.state):
                self.broken("I8", f"{operation.verb} {change.key} was {before} on record, and is {operation.state} now")
            self._outcomes[change.key] = operation.state
        elif change.kind == "fleet":
            epoch = FleetRecord.FromString(change.body).fleet_epoch
            if epoch <= self.epoch:
                self.broken("I5", f"epoch {epoch} follows {self.epoch}")
            self.epoch = epoch
            if self._reign[0] is not self._store.holder:
                self._reign = self._store.holder, epoch
                # Versions that an earlier coordinator admitted beside the latest are served no longer than its leases.
                self._world.timer.later(LEASE_S + 1.0, self._rolled, lambda entry: self._rolling[entry] < epoch)

    def _over(self, record: PauseRecord | None) -> None:
        """End an expired pause when its record changes, perhaps without a command to any stage."""
        if record is None or not record.pause.HasField("until"):
            return
        if record.pause.until.ToNanoseconds() / 1e9 <= EPOCH_S + self._world.now:
            by = record.pause.operation_id
            self._paused = {key: paused_by for key, paused_by in self._paused.items() if paused_by != by}

    def _ended(self, operation: Operation) -> None:
        """Check that no operation ends in a defect, and that targets reported as APPLIED have acted."""
        what = f"{operation.verb} {operation.operation_id}"
        self._pauses(operation)
        if operation.verb == "UnloadAdapter" and operation.state != OPERATION_STATE_RUNNING:
            models = {self._slots[target].model for target in operation.targets}
            if operation.state == OPERATION_STATE_OK:
                self._unloaded(models)
            else:  # its promise is then kept by the leases
                self._world.timer.later(LEASE_S + 1.0, self._unloaded, models)
        for result in operation.stage_results:
            if result.error.reason == Reason.INTERNAL.name:
                self.broken("I0", f"{what} ended in a defect at {result.slot}: {result.error.message}")
            if not self._carried_out(operation, result):
                self.broken("I3", f"{what} is said to be APPLIED by ranks of {result.slot} that have not done it")
        if operation.error.reason == Reason.INTERNAL.name:
            self.broken("I0", f"{what} ended in a defect: {operation.error.message}")

    def _pauses(self, operation: Operation) -> None:
        """Record pauses by name and continues."""
        scope = (operation.operation_id, operation.adapter)
        if operation.verb in _GO_ON and operation.state == OPERATION_STATE_RUNNING:
            # A continue reaches absent stages at their return. An operation names no retired slots.
            absent = {each.slot for each in operation.excluded} | {
                slot for slot in self._retired if operation.model in ("", self._slots[slot].model)
            }
            absent = absent if operation.verb == "ContinueGeneration" else set()
            adapter = operation.adapter
            allowed = self._continuing.setdefault(scope, {})
            for slot in (*operation.targets, *absent):
                self._continued[slot, adapter] = operation.create_time.ToNanoseconds()
                self._paused = {key: by for key, by in self._paused.items() if key[::2] != (slot, adapter)}
                added = [going for going in self._going_on(adapter) if slot not in going]
                allowed.setdefault(slot, []).extend(added)
                for going in added:
                    going.add(slot)
        elif operation.verb in _GO_ON:
            # A refusing stage stays under its pause, unless an earlier continue has reached the stage or a replaced
            # process of its slot. After an unknown outcome the stage may generate.
            began, adapter = operation.create_time.ToNanoseconds(), operation.adapter
            allowed = self._continuing.pop(scope, {})
            refused = [result.slot for result in operation.stage_results if result.outcome == OUTCOME_REJECTED]
            for slot in refused if operation.verb == "ContinueGeneration" else ():
                if self._continued.get((slot, adapter)) == began:
                    for going in allowed.get(slot, ()):
                        going.discard(slot)
        elif operation.verb == "PauseGeneration" and not operation.update_id:
            # To the microsecond: the end is the acceptance plus a time in floats.
            ended, adapter = operation.done_time.ToMicroseconds() * 1000, operation.adapter
            record = self._recorded.get(operation.operation_id)
            # The pause of an adapter at a stage follows the record, and may be over before a drain is.
            results = operation.stage_results if record is not None or not adapter else ()
            # A continue that came during the pause and ends after it has the last word.
            later = {slot for (_, of), allowed in self._continuing.items() if of == adapter for slot in allowed}
            for result in results:
                is_paused = ended > self._continued.get((result.slot, adapter), 0) and result.slot not in later
                if result.outcome == OUTCOME_APPLIED and is_paused:
                    self._paused[result.slot, result.incarnation, adapter] = operation.operation_id
            if operation.state == OPERATION_STATE_OK and record is not None:
                going = {slot for (slot, of), asked in self._continued.items() if of == adapter and asked > ended}
                self._pauses_of_the_fleet.setdefault(operation.operation_id, (record, going | later))

    def _going_on(self, adapter: str) -> list[set[str]]:
        """Return the slots continued since, for each pause of the fleet of this scope."""
        return [going for record, going in self._pauses_of_the_fleet.values() if record.pause.adapter == adapter]

    def generates(self, slot: str, model: str, incarnation: int, adapter: str = "") -> None:
        """Check I11: a generating stage, and its adapter, are not paused by name."""
        what = f"{slot} generates with adapter {adapter!r}" if adapter else f"{slot} generates"
        for scope in {"", adapter}:
            by = self._paused.get((slot, incarnation, scope))
            if by is not None:
                self.broken("I11", f"{what}, which was paused by {by}, and nobody has asked for it to go on")
        known = self._slots[slot]
        for key, (record, going) in self._pauses_of_the_fleet.items():
            target = record.target
            scope = record.pause.adapter
            meant = target.model in ("", model) and (not target.slots or slot in target.slots)
            meant = meant and scope in ("", adapter) and slot not in {*record.continued, *going}
            if meant and (scope or not known.may_skip("PauseGeneration")):
                self.broken("I11", f"{what}, and pause {key} of its model is in force")

    def _unloaded(self, models: set[str]) -> None:
        """End the service of unloaded adapters of these models."""
        self._unloading = {key: version for key, version in self._unloading.items() if key[0] not in models}

    def unended(self) -> list[str]:
        """Return the operations that are running on record."""
        return [key for key, state in self._outcomes.items() if state == OPERATION_STATE_RUNNING]

    def _rolled(self, done: Callable[[tuple[str, str, int]], bool]) -> None:
        for entry in [entry for entry in self._rolling if done(entry)]:
            del self._rolling[entry]

    def _published(self, record: ModelRecord) -> None:
        before = self.latest.get(record.name)
        again = before is not None and before.latest.sequence == record.latest.sequence
        loaded = {each.name: each.version for each in record.adapters}
        former = self._loaded.get((record.name, record.latest.sequence), {})
        self._loaded[record.name, record.latest.sequence] = loaded
        self._unloading |= {(record.name, name): former[name] for name in former.keys() - loaded.keys()}
        if before is not None and record.latest.sequence < before.latest.sequence:
            self.broken("I4", f"{record.name} went from {before.latest.sequence} to {record.latest.sequence}")
        if before is None or record.latest != before.latest:
            self.note(f"PUBLISHED {record.name} {record.latest.sequence} {record.latest.label!r}")
            replaced = self.sequence(record.name)
            if not replaced:  # an update may have begun before the first version
                begun = [entry for entry in self._rolling if entry[0] == record.name and entry[2] == 0]
                for name, update_id, _ in begun:
                    self._rolling[name, update_id, record.latest.sequence] = self._rolling.pop((name, update_id, 0))
            self._rolled(lambda entry: not again and entry[0] == record.name and entry[2] != replaced)
        self.latest[record.name] = record
        version = (record.name, record.latest.sequence)
        self._on_record.add(version)
        if version in self._refused:
            self.broken(
                "I13", f"{self._refused[version]} refused {record.latest.label}, which was published after that"
            )
        if record.checkpoint:
            self.published.setdefault((record.name, record.latest.sequence), self._disks[record.checkpoint])

    # I13: every trainer process learns whether the version is served.

    def reported_served(self, who: str, lead: str, label: str) -> None:
        """Take the report of a trainer process that the version of its update is published."""
        version = self.begun.get((lead, label))
        if version is not None and version not in self._on_record:
            self.broken("I13", f"{who} reported {label} as served, and it was not published")

    def reported_refused(self, who: str, lead: str, label: str) -> None:
        """Take the report of a trainer process that the version of its update is not served, and will not be."""
        version = self.begun.get((lead, label))
        if version is not None:
            self._refused[version] = who
            if version in self._on_record:
                self.broken("I13", f"{who} reported {label} as not served, and it was published")

    # I1: only published weights are served.

    def _servable(self, model: str) -> list[int]:
        """Return servable sequences: the latest, and the previous sequence while an update rolls."""
        return sorted({self.sequence(model), *(entry[2] for entry in self._rolling if entry[0] == model)})

    def made(
        self, part: GenerateResponse, adapter: str, held: Sequence[Holding], released: frozenset[int], *, stale: bool
    ) -> None:
        """Record a token and its ranks' contents; ``stale``: also from KV entries of different weights."""
        adapters = [rank.adapters.get(adapter, (None, {}))[1] for rank in held] if adapter else []
        weights = [dict(rank.weights) for rank in held]
        self._made[part.rid, part.samples[0].output_ids[0]] = _Made(weights, released, adapter, adapters, stale)

    def served(self, name: str, model: str, part: GenerateResponse) -> None:
        """Check a token that left a stage."""
        if not part.samples[0].output_ids:
            return
        self.tokens += 1
        made = self._made.pop((part.rid, part.samples[0].output_ids[0]))
        self.generates(part.slot, model, part.incarnation, made.adapter)
        if made.released:
            self.broken("I1", f"{name} served a token while {sorted(made.released)} were released")
        if made.stale:
            self.broken("I1", f"{name} served a token with KV entries of other weights")
        span = part.samples[0].versions[0]
        self.right(name, model, span.version.sequence, made.weights, "served a token of")
        known = self._loaded.get((model, span.version.sequence), {})
        servable = (known.get(made.adapter), self._unloading.get((model, made.adapter)))
        wanted = self.adapters.get((model, made.adapter, span.adapter_version))
        if made.adapter and (span.adapter_version not in servable or any(a != wanted for a in made.adapters)):
            self.broken(
                "I1",
                f"{name} served a token with {made.adapters} as {made.adapter} {span.adapter_version!r}, {known}",
            )

    def goes_on(self, model: str) -> None:
        """End an update that may be partial with its present content: generation continues, or memory is resumed.

        The first stage that serves the version defines the content for all.
        """
        if model in self.may_end_early:
            self.published.pop((model, self.may_end_early.pop(model)), None)

    def right(self, name: str, model: str, sequence: int, held: Sequence[Tensors], doing: str) -> None:
        """Check that every rank has a servable version."""
        servable = self._servable(model)
        if sequence not in servable:
            self.broken("I1", f"{name} {doing} version {sequence} while {servable} may be served")
            return
        published = self.published.get((model, sequence))
        if published is None and held and self.nameless.intersection(held[0].values()):
            # The sequence was unknown at the begin: the first stage that serves the version defines the content for
            # all.
            published = self.published[model, sequence] = dict(held[0])
        for rank, weights in enumerate(held):
            if weights != published:
                now, right = ",".join(sorted(weights.values())), ",".join(sorted((published or {}).values()))
                self.broken("I1", f"{name} {doing} version {sequence}; rank {rank} holds {now}, not {right}")
                return

    # I2: at most once.

    def decodes(self, slot: str, rank: int, version: WeightVersion, *, stale: bool) -> None:
        """Record whether a rank's decode steps use a committed version or earlier weights."""
        key = (slot, rank, version.sequence)
        (self._stale_decodes.add if stale else self._stale_decodes.discard)(key)

    def applied(self, node: Node, rank: int, verb: str, command_id: str) -> None:
        """Check that a rank carries a command out only once."""
        key = (node.name, rank, command_id)
        if key in self._applied:
            self.broken("I2", f"{verb} {command_id} was carried out twice at {node.name}")
        self._applied.add(key)
        operation_id, slot, _, step = command_id.rsplit("/", 3)
        self._acknowledged.setdefault((operation_id, slot), {}).setdefault(step, set()).add(rank)

    # I3: OK implies that every rank of every target acknowledged.

    def answered(self, operation: Operation) -> None:
        """Check an operation's outcome at a client."""
        for answer in operation.stage_results:
            if answer.outcome != OUTCOME_APPLIED or not answer.verification.decode:
                continue
            ranks, version = range(self._slots[answer.slot].ranks), answer.weight_version
            if any((answer.slot, rank, version.sequence) in self._stale_decodes for rank in ranks):
                self.broken("I3", f"{operation.operation_id}: {answer.slot} decodes with other weights")
        if operation.validate_only or operation.state != OPERATION_STATE_OK:
            return
        update = operation.verb in WEIGHT_UPDATES
        good = (OUTCOME_APPLIED,) if update else (OUTCOME_APPLIED, OUTCOME_SKIPPED)
        results = {result.slot: result for result in operation.stage_results}
        if operation.operation_id in self.mistaken:
            self.broken("I3", f"{operation.verb} {operation.operation_id} is OK, its probe does not pass")
        for slot in operation.targets:
            result = results.get(slot)
            if result is None or result.outcome not in good:
                self.broken("I3", f"{operation.verb} {operation.operation_id} is OK, {slot} is not")
                continue
            if result.outcome == OUTCOME_SKIPPED and self._slots[slot].may_skip(operation.verb):
                continue
            answers = {rank.coordinates.rank: rank.outcome for rank in result.rank_results}
            for rank in range(self._slots[slot].ranks):
                if answers.get(rank) not in good:
                    self.broken("I3", f"{operation.verb} {operation.operation_id} is OK, rank {rank} of {slot} is not")

    def _carried_out(self, operation: Operation, result: StageResult) -> bool:
        """Return True if the ranks of a target acted as reported: the step of a verb, or the commit of an update."""
        update = operation.verb in WEIGHT_UPDATES
        if not update and operation.verb not in _STEPS:
            return True
        if update and (operation.state not in PUBLISHED or result.outcome != OUTCOME_APPLIED):
            return True
        said = {rank.coordinates.rank for rank in result.rank_results if rank.outcome == OUTCOME_APPLIED}
        if self._slots[result.slot].speaker:
            said &= {0}  # the process that answers for all ranks
        steps = self._acknowledged.get((operation.operation_id, result.slot), {})
        counted = [did for step, did in steps.items() if not update or step.endswith("CommitUpdate")]
        return not said or any(did >= said for did in counted)

    # I2: a repeat changes nothing.

    def repeated(self, first: Operation, second: Operation, *, same: bool) -> None:
        """Check the answer to a repeated request; ``same`` False: with a different body."""
        what = f"{first.verb} {first.operation_id}"
        if not same:
            self.broken("I2", f"{what} was answered although its body was another")
        elif first.create_time != second.create_time:
            self.broken("I2", f"{what} was repeated, and begun anew")
        elif second.state not in (first.state, OPERATION_STATE_UNKNOWN):
            self.broken("I2", f"{what} was {first.state} and then {second.state}")

    # I5: a fenced trainer updates nothing.

    def began(self, model: str, incarnation: int) -> None:
        """Check an accepted begin of a trainer."""
        newest = self._incarnations.get(model, 0)
        if incarnation < newest:
            self.broken("I5", f"trainer {incarnation} updates {model} after {newest} has")
        self._incarnations[model] = max(newest, incarnation)

    # I10: no stage repeats its report endlessly.

    def reported(self, name: str, reports: int) -> None:
        """Check the number of a stage's reports; called once a second."""
        latest = reports - self._reports.get(name, 0)
        self._reports[name] = reports
        if latest > MOST_REPORTS:
            self.broken("I10", f"{name} has reported {latest} times in a second")

    # I6: every call ends in time.

    def took(self, what: str, seconds: float, limit: float) -> None:
        """Check the duration of a call."""
        if seconds > limit:
            self.broken("I6", f"{what} took {seconds:.2f} s of {limit:.2f} s")
