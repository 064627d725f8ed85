"""Heals: bring single stages to the published version from a known source, without the trainer.

A stage that joins late, was restarted or was excluded from an update is STALE. A stage whose update failed is DIRTY.
The stage reads the version's checkpoint again. Without a checkpoint, a stage at the version
broadcasts weights. The healed weights must have the published digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.digests import key_of
from rlctl.contract.errors import Conflict, Reason, RlctlError
from rlctl.contract.outcomes import acknowledged
from rlctl.contract.scopes import calling
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.fleet.versions import adoptable, computes_digest, digest_key, needs_keyed_digest, witnesses
from rlctl.coordinator.healing.from_peer import FromPeer, refuse_failed
from rlctl.coordinator.healing.orphans import HEAL_MARK
from rlctl.coordinator.healing.sources import Sources, needs_heal, unverifiable
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.transaction.adapters import CommitAdapter
from rlctl.coordinator.transaction.commit import Commit
from rlctl.coordinator.transaction.planner import in_progress
from rlctl.coordinator.transaction.update import Update
from rlctl.coordinator.transaction.verification_levels import Expected, checks_decode
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    PAUSE_MODE_RETRACT,
    STAGE_STATE_STALE,
    RequestHeader,
    Target,
)
from rlctl.v1.coordinator_pb2 import HealStageRequest
from rlctl.v1.journal_pb2 import UpdateRecord
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest, BeginWeightUpdateResponse
from rlctl.v1.verbs_pb2 import (
    UPDATE_KIND_ADAPTER,
    UPDATE_KIND_FULL,
    Adapter,
    AdapterConfig,
    CheckWeightsRequest,
    LoadAdapterRequest,
    UpdateOptions,
    UpdateWeightsFromDiskRequest,
)

log = logging.getLogger(__name__)

HEAL_S = 300.0
OWNER = "healing"

AGAIN_S = (0.1, 1.0, 3.0, 10.0, 30.0)
"""Waits between tries of a heal. A different operation may have the stage, or a begun update was refused."""

GRACE_S = 60.0
"""Default time in which a DIRTY or quarantined stage waits for the trainer's next update."""

LATER_S = 0.01
"""Delay after the due time of a heal, since timers may fire a little early."""

MAKE_WAY_S = 5.0
"""Longest wait for the end of a heal that a different operation has cancelled."""

UNVERIFIED = "a heal of the stage is not verified yet"


@dataclass(eq=False)
class _Heal:
    """A heal operation, from before the acceptance until the release of its stages.

    Attributes:
    requested: by a caller. Other heals are retried.
    """

    slots: set[str]
    requested: bool
    over: asyncio.Event = field(default_factory=asyncio.Event)
    update: Update | None = None
    """Update of the stage that is being healed."""
    work: asyncio.Task[None] | None = None
    stopped: RlctlError | None = None
    """Cause of an early end."""

    def stop(self, cause: RlctlError) -> None:
        """End the heal before the start or at its present stage."""
        self.stopped = self.stopped or cause
        if self.work is not None:
            self.work.cancel()

    async def makes_way(self, why: str, within_s: float = MAKE_WAY_S) -> bool:
        """End the heal for a different operation. False if the heal does not end in time."""
        self.stop(Reason.CANCELLED.error(why))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(within_s, MAKE_WAY_S)):
                await self.over.wait()
        return self.over.is_set()


class Healer:
    """Runs at most a single heal per model at a time. An update ends the heal, since the update reaches the stage too.

    A verb by name, such as a pause, ends a heal that no caller requested. Otherwise trainers would be refused at
    random.
    """

    def __init__(self, context: Context, *, by_hand: Collection[str], grace_s: float = GRACE_S) -> None:
        """``by_hand``: models whose stages are healed only on request. ``grace_s``: wait of a DIRTY or quarantined
        stage for the trainer's next update.
        """
        self._grace_s = grace_s
        self._context = context
        self._roster = context.roster
        self._peers = context.peers
        self._operations = context.operations
        self._clock = context.clock
        self._by_hand = set(by_hand)
        self._sources = Sources(context.roster)
        self._heals: list[_Heal] = []
        self._looking: dict[Slot, asyncio.Task[None]] = {}

    def policy(self, model: str, *, by_hand: bool) -> None:
        """Switch the automatic heals of a model off (``by_hand``) or on, beginning with stages that need a heal.

        Raises MODEL_NOT_FOUND.
        """
        self._roster.model(model)
        if by_hand:
            self._by_hand.add(model)
        else:
            self._by_hand.discard(model)
        for slot in list(self._roster.slots.values()):
            if slot.model == model:
                self.look(slot)

    async def heal(self, request: HealStageRequest, timeout_s: float | None, *, requested: bool = True) -> Run:
        """Heal stages, one after the other. Raises if no stage needs or can have a heal, or if a named stage cannot.

        ``requested``: a caller requested the heal, not this coordinator.
        """
        existing = self._operations.known(request.header.request_id, request)
        if existing is not None:
            return existing
        named = (self._roster.slot(name, f"slots[{index}]") for index, name in enumerate(request.slots))
        slots = list(dict.fromkeys(named))
        all_slots = self._roster.slots.values()
        slots = slots or [slot for slot in all_slots if needs_heal(slot) or self._sources.lacks_adapters(slot)]
        if not slots:
            raise Reason.NO_TARGETS.error("no stage is STALE, DIRTY or quarantined, or lacks an adapter")
        slots = self._healable(slots, request.checkpoint, named=bool(request.slots))
        if request.header.validate_only:
            return self._operations.hypothetical("HealStage", slots)
        deadline = self._clock.now() + (timeout_s or HEAL_S)
        heal = _Heal({slot.name for slot in slots}, requested)

        async def work(run: Run) -> None:
            run.cancel = lambda: heal.stop(Reason.CANCELLED.error("the heal was cancelled"))
            if run.given_up:
                run.cancel()
            try:
                await one_after_the_other(run)
            finally:
                self._over(heal)

        async def one_after_the_other(run: Run) -> None:
            failure: RlctlError | None = None
            for index, slot in enumerate(slots):
                source: str | Slot = ""
                try:
                    if needs_heal(slot) or not self._sources.lacks_adapters(slot):
                        source = self._sources.of(slot, request.checkpoint)
                        update = self._new_update(run, slot, deadline)
                        await self._one(heal, slot, update, self._carry_out(update, run, source))
                        slot.misread, source = False, ""
                    for adapter in self._sources.obtainable(slot):
                        update = self._new_update(run, slot, deadline, adapter)
                        await self._one(heal, slot, update, self._load(update, run, adapter))
                except RlctlError as error:
                    failure = failure or error
                    if source and error.reason is not Reason.CANCELLED:
                        # The files may be gone, or have a different version. The next try prefers a stage, and the
                        # try after that the checkpoint again.
                        slot.misread = isinstance(source, str) and not request.checkpoint
                    # A canceller waits for this operation, and all its stages are busy.
                    stopped = error.reason is Reason.CANCELLED
                    # A result of a read, or of a heal before a missing adapter, does not say that the stage is healed.
                    results = run.operation.stage_results
                    failed_slots = {result.slot for result in results if not acknowledged(result, update=True)}
                    for unhealed in slots[index:] if stopped else [slot]:
                        if unhealed.name not in failed_slots:
                            run.add(_not_healed(unhealed, error))
                    if stopped:
                        break
            if failure is not None and len(slots) == 1:
                raise failure

        self._heals.append(heal)  # owns the stages before the record does
        try:
            return await self._operations.start(
                request, verb="HealStage", targets=slots, excluded=[], work=work, exclusive=True
            )
        except BaseException:
            self._over(heal)
            raise

    def _over(self, heal: _Heal) -> None:
        self._heals.remove(heal)
        heal.over.set()

    def _healable(self, slots: Sequence[Slot], checkpoint: str, *, named: bool) -> list[Slot]:
        """Return the stages with a heal source. Raises the cause if a ``named`` stage, or every stage, has no
        source.
        """
        failure: RlctlError | None = None
        healable = []
        for slot in slots:
            try:
                if needs_heal(slot) or not self._sources.lacks_adapters(slot):
                    self._sources.of(slot, checkpoint)
                healable.append(slot)
            except RlctlError as error:
                failure = failure or error
        if failure is not None and (named or not healable):
            raise failure
        return healable

    def _is_due(self, slot: Slot) -> bool:
        """Whether a stage that needs a heal or lacks an adapter is to be healed now.

        A late stage, or a stage that lacks an adapter of the model, is healed at once. After a failed update or heal
        the stage waits first.
        """
        if slot.state == STAGE_STATE_STALE and slot.late:
            if needs_keyed_digest(self._roster, slot):
                return False  # first_weights.py compares the weights
            return not adoptable(self._roster, slot) and not self._is_admitted(slot)  # the next grant says so
        if not needs_heal(slot) and slot.heal_at is None:
            return True
        if slot.heal_at is None:
            self._postpone(slot, self._grace_s)
        assert slot.heal_at is not None
        return self._clock.now() >= slot.heal_at

    def _postpone(self, slot: Slot, wait_s: float) -> None:
        """Plan a heal of a stage. An update that reaches the stage first makes the heal unnecessary."""
        slot.heal_at = self._clock.now() + wait_s
        slot.heal_time = Timestamp()
        slot.heal_time.FromNanoseconds(self._clock.wall().ToNanoseconds() + round(wait_s * 1e9))
        asyncio.get_running_loop().call_later(wait_s + LATER_S, self.look, slot)
        self._roster.changed()

    def _clear(self, slot: Slot, *, unhealable: str) -> None:
        """Plan no heal of a stage."""
        if (slot.heal_at, slot.unhealable) != (None, unhealable):
            slot.heal_at, slot.heal_time, slot.unhealable = None, None, unhealable
            self._roster.changed()

    def abandoned(self, slots: Collection[Slot]) -> None:
        """Heal the targets of a lost owner now, since no next update of that owner can be expected."""
        for slot in slots:
            self._postpone(slot, 0.0)

    def _is_admitted(self, slot: Slot) -> bool:
        return slot.report is not None and slot.report.weight_version in self._roster.models[slot.model].admitted

    def look(self, slot: Slot) -> None:
        """Start a heal that is due and that the policy allows. Without a source, record the cause instead, also before
        the heal is due.
        """
        if self._roster.slots.get(slot.name) is not slot:
            return
        needed = needs_heal(slot) or self._sources.lacks_adapters(slot)
        if not needed:
            self._clear(slot, unhealable="")
        elif slot.model in self._by_hand:
            # A cause from before the switch holds until a source appears.
            self._clear(slot, unhealable=slot.unhealable and self._obstacle(slot))
        if not needed or slot.model in self._by_hand:
            return
        due = self._is_due(slot)
        if not due and slot.heal_at is None:
            return
        if self._holding(slot.model) or slot in self._looking or self._roster.models[slot.model].update_id:
            return
        obstacle = self._obstacle(slot)
        changed = slot.unhealable != obstacle
        if changed:
            slot.unhealable = obstacle
            self._roster.changed()
        if not due:
            return
        if obstacle:
            if changed or slot.heal_time is not None:
                log.info("%s is not healed: %s", slot.name, obstacle)
            slot.heal_time = None
            return
        task = self._looking[slot] = asyncio.create_task(self._heal_alone(slot))
        task.add_done_callback(lambda _: self._looking.pop(slot, None))

    def _obstacle(self, slot: Slot) -> str:
        """Return why a stage has no heal source, or ""."""
        try:
            if needs_heal(slot):
                self._sources.of(slot, "")
        except RlctlError as error:
            return error.message
        return ""

    def is_open(self, update_id: str) -> bool:
        return any(update.update_id == update_id for update in self.updates())

    def updates(self) -> list[Update]:
        """Return the updates of the running heals."""
        return [heal.update for heal in self._heals if heal.update is not None]

    async def make_way(self, model: str) -> None:
        """End the heals of a model before an update begins. The update reaches the stages too.

        The begin is refused with the name of a heal that does not end.
        """
        while (heal := self._holding(model)) is not None and await heal.makes_way(
            "an update of the trainer's goes first"
        ):
            pass

    async def make_way_by_itself(self, model: str, verb: str, within_s: float) -> None:
        """End the heals of a model that no caller requested, before a verb by name. The heals are retried.

        While one stage is healed, the next try for another stage may have begun.
        """
        while (heal := self._holding(model)) is not None and not heal.requested:
            if not await heal.makes_way(f"{verb} goes first", within_s):
                break

    def _holding(self, model: str) -> _Heal | None:
        """Return a heal with stages of a model, also while the heal is at a stage of a different model."""
        if not self._heals:
            return None
        names = {slot.name for slot in self._roster.slots.values() if slot.model == model}
        return next((heal for heal in self._heals if not names.isdisjoint(heal.slots)), None)

    async def stop(self) -> None:
        """End running heals. An operation that takes longer continues to the end."""
        tasks = list(self._looking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for heal in list(self._heals):
            await heal.makes_way("the coordinator stops")

    async def _heal_alone(self, slot: Slot) -> None:
        calling.set(None)  # the call that started this task did not request the heal
        for pause in AGAIN_S:
            try:
                run = await self.heal(HealStageRequest(slots=[slot.name]), None, requested=False)
                await run.ended.wait()
            except RlctlError as error:
                log.info("%s cannot be healed now: %s", slot.name, error)
                if not isinstance(error, Conflict):
                    break
            await asyncio.sleep(pause)
            done = not needs_heal(slot) and not self._sources.lacks_adapters(slot)
            if done or self._roster.slots.get(slot.name) is not slot:
                break
        if needs_heal(slot):
            self._postpone(slot, self._grace_s)
            slot.late = False  # from now on retried after each grace
        elif self._sources.lacks_adapters(slot):
            self._postpone(slot, self._grace_s)
        # Other stages may wait for a turn.
        for peer in list(self._roster.slots.values()):
            if peer.model == slot.model and peer is not slot:
                self.look(peer)

    async def _one(self, heal: _Heal, slot: Slot, update: Update, steps: Coroutine[Any, Any, None]) -> None:
        model = self._roster.models[slot.model]
        if heal.stopped is not None or model.update_id:
            steps.close()
            raise heal.stopped or in_progress(model)
        model.update_id, model.update_owner = update.update_id, f"{OWNER} {slot.name}"
        heal.update, heal.work = update, asyncio.create_task(steps)
        self._roster.changed()
        try:
            await asyncio.gather(heal.work)
            slot.late = slot.late and update.adapter is not None
        except BaseException as error:  # noqa: BLE001 - no stage may stay in an open update
            cause = error if isinstance(error, RlctlError) else heal.stopped or Reason.CANCELLED.error()
            await update.abort(cause)
            raise cause from None
        finally:
            heal.update = heal.work = None
            slot.restoring = False
            self._peers.grant(slot)
            model.update_id = model.update_owner = ""
            self._roster.changed()

    def _new_update(self, run: Run, slot: Slot, deadline: float, adapter: Adapter | None = None) -> Update:
        model = self._roster.models[slot.model]
        update_id = f"{run.operation.operation_id}{HEAL_MARK}{slot.name}"
        options = UpdateOptions(pause=PAUSE_MODE_RETRACT)
        memory_released = slot.report is not None and slot.report.released
        if model.record.verification.decode and checks_decode(slot) and not memory_released:
            options.decode_check = True  # as at the other stages of the version
        config: AdapterConfig | None = None
        if adapter is not None:
            update_id += f"/{adapter.name}"
            config = adapter.config if adapter.HasField("config") else None
            options = UpdateOptions()
        plan = BeginWeightUpdateResponse(update_id=update_id, version=model.record.latest)
        begin = BeginWeightUpdateRequest(
            header=RequestHeader(target=Target(slots=[slot.name])),
            model=slot.model,
            version=model.record.latest.label,
            kind=UPDATE_KIND_FULL if adapter is None else UPDATE_KIND_ADAPTER,
            options=options,
            adapter_config=config,
        )
        if adapter is not None:
            without_config = Adapter()
            without_config.CopyFrom(adapter)
            without_config.ClearField("config")
            adapter = without_config
        update = Update(self._context, UpdateRecord(request=begin, plan=plan), model, [slot], deadline, adapter)
        update.accept(run)
        return update

    async def _load(self, update: Update, run: Run, adapter: Adapter) -> None:
        """Let a stage read an adapter of the model again, or receive the adapter from a peer. The digest must match."""
        (slot,) = update.targets
        if adapter.path:
            await update.ready()
            read = LoadAdapterRequest(
                name=adapter.name, path=adapter.path, version=adapter.version, pinned=adapter.pinned
            )
            self._file(run, await update.step(read, update.targets))
        else:
            holder = self._sources.holder(slot, adapter)
            if holder is None:
                raise Reason.UNHEALABLE.error(f"no stage can send adapter {adapter.name!r}")
            self._file(run, await self._from_peer(update, holder).receive())
        await CommitAdapter(update, self._context).restore(Expected(digest=adapter.digest))

    async def _carry_out(self, update: Update, run: Run, source: str | Slot) -> None:
        await self._peers.hold_back(update.targets, UNVERIFIED)
        (slot,) = update.targets
        update.reference = next(iter(witnesses(self._roster, slot)), None)
        if isinstance(source, Slot):
            self._file(run, await self._from_peer(update, source).receive())
        else:
            await update.ready()
            self._file(run, await update.step(UpdateWeightsFromDiskRequest(model_path=source), update.targets))
        (slot,) = update.targets
        digest = update.model.record.model_digest
        if not digest or not computes_digest(slot, digest):
            digest = await self._digest_of_peer(update)
        comparable = key_of(digest) == digest_key(update.model.record)
        expected = Expected(digest=digest, fingerprints=update.model.fingerprints if comparable else b"")
        await Commit(update, self._context).restore(expected)

    def _from_peer(self, update: Update, peer: Slot) -> FromPeer:
        return FromPeer(update, peer, self._context)

    async def _digest_of_peer(self, update: Update) -> str:
        """Return the SHA-256 of a version from a witness. Raises UNHEALABLE.

        The version was published without digest, or with a keyed digest that the healed stage does not compute.
        """
        (slot,) = update.targets
        for witness in witnesses(self._roster, slot):
            (result,) = await self._context.fanout.run(
                CheckWeightsRequest(),
                [witness],
                operation_id=update.update_id,
                step="digest",
                deadline=update.deadline,
            )
            digests = {rank.check.model_digest for rank in result.rank_results}
            if result.outcome == OUTCOME_APPLIED and len(digests) == 1 and (digest := digests.pop()):
                return digest
        raise unverifiable()

    def _file(self, run: Run, results: Sequence[StageResult]) -> None:
        for result in results:
            run.add(result)
        refuse_failed(results)


def _not_healed(slot: Slot, error: RlctlError) -> StageResult:
    return StageResult(
        slot=slot.name,
        incarnation=slot.record.incarnation,
        outcome=error.outcome,
        error=error.detail(),
        state=slot.state,
    )
