"""Bringing single stages to the published version from a known source, without the trainer.

A stage that joins late, was restarted, or was left out of an update is STALE; one whose update failed is DIRTY. The
version's checkpoint is read again or, where it has none, another stage that is at the version broadcasts its weights.
What the stage then holds must have the digest that was published.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from rlctl.coordinator.fanout import Fanout
from rlctl.coordinator.finish import Finish
from rlctl.coordinator.operations import Operations, Run
from rlctl.coordinator.orphans import HEAL_MARK
from rlctl.coordinator.peers import Peers
from rlctl.coordinator.planning import in_progress
from rlctl.coordinator.roster import ModelState, Roster, Slot, model_put, unsupported
from rlctl.coordinator.session import Session
from rlctl.coordinator.versions import adoptable
from rlctl.errors import Conflict, Reason, RlctlError
from rlctl.outcomes import acknowledged, blame
from rlctl.ports import Clock, Journal
from rlctl.times import duration
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_WEIGHTS,
    PAUSE_MODE_RETRACT,
    STAGE_STATE_DIRTY,
    STAGE_STATE_PAUSED,
    STAGE_STATE_READY,
    STAGE_STATE_STALE,
    RequestHeader,
    Target,
)
from rlctl.v1.coordinator_pb2 import HealStageRequest
from rlctl.v1.journal_pb2 import ModelRecord, UpdateRecord
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest, BeginWeightUpdateResponse
from rlctl.v1.verbs_pb2 import (
    BUCKET_FORMAT_TENSORS,
    CheckWeightsRequest,
    DestroyWeightsUpdateGroupRequest,
    GetModelInfoRequest,
    GroupMember,
    InitWeightsUpdateGroupRequest,
    SendWeightsRequest,
    TensorBucket,
    UpdateOptions,
    UpdateWeightsFromDiskRequest,
    UpdateWeightsFromDistributedRequest,
)

log = logging.getLogger(__name__)

HEAL_S = 300.0
JOIN_S = 30.0
OWNER = "healing"

AGAIN_S = (0.1, 1.0, 3.0, 10.0, 30.0)
"""Pauses between tries to heal a stage: something else may hold it, or an update was begun and refused."""

GRACE_S = 60.0
"""How long a stage that is DIRTY or quarantined is left to the trainer's next update before it is healed."""

MAKE_WAY_S = 5.0
"""How long an update waits for a heal to end that it has cancelled."""

_HEALABLE = (STAGE_STATE_STALE, STAGE_STATE_DIRTY)
_SOUND = (STAGE_STATE_READY, STAGE_STATE_PAUSED)
"""States of stages that need a heal only if the coordinator has quarantined them."""


@dataclass
class _Running:
    session: Session
    run: Run
    work: asyncio.Task[None]


class Healer:
    """At most one heal per model at a time; an update ends it and reaches the stage by itself."""

    def __init__(
        self,
        roster: Roster,
        peers: Peers,
        fanout: Fanout,
        operations: Operations,
        journal: Journal,
        clock: Clock,
        *,
        automatic: bool,
    ) -> None:
        """``automatic``: heal late joiners and restarted engines without being asked."""
        self._roster = roster
        self._peers = peers
        self._fanout = fanout
        self._operations = operations
        self._journal = journal
        self._clock = clock
        self._automatic = automatic
        self._running: dict[str, _Running] = {}
        self._looking: dict[Slot, asyncio.Task[None]] = {}
        self._spoilt: dict[Slot, float] = {}

    async def heal(self, request: HealStageRequest, timeout_s: float | None) -> Run:
        """Heal stages, one after the other. Raises when none needs it, or one that is named cannot be healed."""
        known = self._operations.known(request.header.request_id, request)
        if known is not None:
            return known
        slots = [self._roster.slot(name, f"slots[{index}]") for index, name in enumerate(request.slots)]
        slots = slots or [slot for slot in self._roster.slots.values() if _needs_heal(slot)]
        if not slots:
            raise Reason.NO_TARGETS.error("no stage is STALE, DIRTY or quarantined")
        for slot in slots:
            self._source(slot, request.checkpoint)
        if request.header.validate_only:
            return self._operations.hypothetical("HealStage", slots)
        deadline = self._clock.now() + (timeout_s or HEAL_S)

        async def work(run: Run) -> None:
            failure: RlctlError | None = None
            for slot in slots:
                try:
                    await self._one(run, slot, self._source(slot, request.checkpoint), deadline)
                except RlctlError as error:
                    failure = failure or error
                    if not any(result.slot == slot.name for result in run.operation.stage_results):
                        run.add(_not_healed(slot, error))
            if failure is not None and len(slots) == 1:
                raise failure

        return await self._operations.start(
            request, verb="HealStage", targets=slots, excluded=[], work=work, exclusive=True
        )

    def _is_due(self, slot: Slot) -> bool:
        """Whether a stage is to be healed now: at once when it came late, after a while when something spoilt it."""
        if not _needs_heal(slot):
            self._spoilt.pop(slot, None)
            slot.unhealable = ""
            return False
        if slot.state == STAGE_STATE_STALE and slot.late:
            return not adoptable(self._roster, slot) and not self._is_admitted(slot)  # the next grant says so
        since = self._spoilt.setdefault(slot, self._clock.now())
        return self._clock.now() - since >= GRACE_S

    def _is_admitted(self, slot: Slot) -> bool:
        return slot.report is not None and slot.report.weight_version in self._roster.models[slot.model].admitted

    def look(self, slot: Slot) -> None:
        """Heal a stage that came late or was spoilt, if that is the policy and there is a source; otherwise say that
        there is none.
        """
        if not self._automatic or self._roster.slots.get(slot.name) is not slot or not self._is_due(slot):
            return
        if slot.model in self._running or slot in self._looking or self._roster.models[slot.model].update_id:
            return
        try:
            self._source(slot, "")
            slot.unhealable = ""
        except RlctlError as error:
            if slot.unhealable != error.message:
                log.info("%s is not healed: %s", slot.name, error)
                slot.unhealable = error.message
                self._roster.changed()
            return
        task = self._looking[slot] = asyncio.create_task(self._heal_alone(slot))
        task.add_done_callback(lambda _: self._looking.pop(slot, None))

    def is_open(self, update_id: str) -> bool:
        """Whether a heal of this id is running."""
        return any(running.session.update_id == update_id for running in self._running.values())

    async def make_way(self, model: str) -> None:
        """End a heal of this model: an update is about to begin, and reaches its stage too."""
        while (running := self._running.get(model)) is not None:
            running.work.cancel()
            try:
                async with asyncio.timeout(MAKE_WAY_S):
                    await running.run.ended.wait()
            except TimeoutError:
                raise in_progress(self._roster.models[model]) from None

    async def stop(self) -> None:
        """End what runs."""
        for model in list(self._running):
            await self.make_way(model)
        looking = list(self._looking.values())
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)

    async def _heal_alone(self, slot: Slot) -> None:
        for pause in AGAIN_S:
            try:
                header = RequestHeader(request_id=self._clock.new_id())
                run = await self.heal(HealStageRequest(header=header, slots=[slot.name]), None)
                await run.ended.wait()
            except RlctlError as error:
                log.info("%s cannot be healed now: %s", slot.name, error)
                if not isinstance(error, Conflict):
                    break
            await asyncio.sleep(pause)
            if not _needs_heal(slot) or self._roster.slots.get(slot.name) is not slot:
                break
        if _needs_heal(slot):
            self._spoilt[slot] = self._clock.now()
            slot.late = False  # from now on it is tried once in a while
        # Another one may have waited for its turn.
        for other in list(self._roster.slots.values()):
            if other.model == slot.model and other is not slot:
                self.look(other)

    def _source(self, slot: Slot, checkpoint: str) -> str | Slot:
        """What to heal from: a checkpoint, or another stage. Raises why the stage cannot be healed."""
        model = self._roster.models[slot.model].record
        if not _needs_heal(slot):
            raise Reason.ILLEGAL_STATE.error(f"{slot.name} needs no heal", field="slots")
        if slot.report is not None and MEMORY_TAG_WEIGHTS in slot.report.released:
            raise Reason.MEMORY_RELEASED.error(f"{slot.name}: the weights are released", field="slots")
        if not model.latest.sequence:
            raise Reason.UNHEALABLE.error(f"no version of {model.name} is published", field="slots")
        found = checkpoint or model.checkpoint or self._peer(slot)
        if not found:
            raise Reason.UNHEALABLE.error(
                f"version {model.latest.label!r} of {model.name} is in no checkpoint, and no other stage can send it",
                field="slots",
            )
        return found

    def _peer(self, slot: Slot) -> Slot | None:
        """A stage that is at the version and can send it."""
        return self._at_version(self._roster.models[slot.model], [slot], sends=True)

    def _at_version(self, model: ModelState, but: Sequence[Slot], *, sends: bool = False) -> Slot | None:
        for peer in self._roster.slots.values():
            if (
                peer.model == model.record.name
                and peer not in but
                and peer.state in (STAGE_STATE_READY, STAGE_STATE_PAUSED)
                and peer.report is not None
                and peer.report.weight_version == model.record.latest
                and peer.quarantine is None
                and not (sends and unsupported(peer, "SendWeights"))
                and not (sends and not peer.record.registration.layout.store_host)
            ):
                return peer
        return None

    async def _one(self, run: Run, slot: Slot, source: str | Slot, deadline: float) -> None:
        model = self._roster.models[slot.model]
        if model.update_id:
            raise in_progress(model)
        session = self._session(model, slot, run.operation.operation_id, deadline)
        model.update_id, model.update_owner = session.update_id, f"{OWNER} {slot.name}"
        running = _Running(session, run, asyncio.create_task(self._carry_out(session, run, source)))
        self._running[slot.model] = running
        self._roster.changed()
        try:
            await asyncio.gather(running.work)
            slot.late = False
        except BaseException as error:  # noqa: BLE001 - the stage must not be left in an open update
            cancelled = Reason.CANCELLED.error("an update of the trainer's goes first")
            typed = error if isinstance(error, RlctlError) else cancelled
            await session.abort(run, typed)
            raise typed from None
        finally:
            del self._running[slot.model]
            slot.restoring = False
            self._peers.grant(slot)
            model.update_id = model.update_owner = ""
            self._roster.changed()

    def _session(self, model: ModelState, slot: Slot, operation_id: str, deadline: float) -> Session:
        plan = BeginWeightUpdateResponse(update_id=f"{operation_id}{HEAL_MARK}{slot.name}", version=model.record.latest)
        options = UpdateOptions(pause=PAUSE_MODE_RETRACT)
        begin = BeginWeightUpdateRequest(
            header=RequestHeader(target=Target(slots=[slot.name])),
            model=slot.model,
            version=model.record.latest.label,
            options=options,
        )
        return Session(
            UpdateRecord(request=begin, plan=plan),
            model,
            [slot],
            deadline,
            roster=self._roster,
            peers=self._peers,
            fanout=self._fanout,
            journal=self._journal,
            clock=self._clock,
        )

    async def _carry_out(self, session: Session, run: Run, source: str | Slot) -> None:
        # The version is admitted already, and the stage must not serve what has not been verified: not while this runs,
        # and, through the quarantine, not after a failure or under another coordinator either.
        (slot,) = session.targets
        unverified = Reason.WEIGHTS_STALE.error("it is being brought to the published version, and not verified yet")
        await self._roster.quarantine({slot: unverified.detail()})
        slot.restoring = True
        self._peers.grant(slot)
        if isinstance(source, Slot):
            await self._receive(session, run, source)
        else:
            await session.ready()
            self._file(run, await session.step(UpdateWeightsFromDiskRequest(model_path=source), session.targets))
        digest = session.model.record.model_digest or await self._digest_of_peer(session)
        await Finish(session, self._roster, self._peers, self._clock).restore(run, digest)

    async def _digest_of_peer(self, session: Session) -> str:
        """Digest of a version that was published without one: what a stage that serves it holds. Raises UNHEALABLE."""
        peer = self._at_version(session.model, session.targets)
        if peer is not None:
            results = await self._to(session, CheckWeightsRequest(), [peer], "digest", session.deadline)
            digests = {rank.check.model_digest for rank in results[0].rank_results}
            if len(digests) == 1 and (digest := digests.pop()):
                return digest
        raise Reason.UNHEALABLE.error("nobody knows the version's digest, so nothing could be verified", field="slots")

    async def _receive(self, session: Session, run: Run, peer: Slot) -> None:
        """Let a stage take in what another one broadcasts, over a group of their own."""
        (slot,) = session.targets
        group = await self._new_group(session.model)
        ranks = len(slot.record.registration.layout.workers)
        layout = peer.record.registration.layout
        join = InitWeightsUpdateGroupRequest(
            master_address=layout.store_host,
            master_port=layout.store_port,
            world_size=1 + ranks,
            group_name=group,
            backend="gloo",
            members=[
                GroupMember(slot=peer.name, rank_offset=0, num_ranks=1),
                GroupMember(slot=slot.name, rank_offset=1, num_ranks=ranks),
            ],
            group_timeout=duration(JOIN_S),
        )
        try:
            self._refuse_failed(await self._to(session, join, [peer, slot], "join", JOIN_S))
            buckets = await self._buckets(session, peer)
            await session.ready()
            send = SendWeightsRequest(group_name=group, buckets=buckets)
            receive = UpdateWeightsFromDistributedRequest(group_name=group, buckets=buckets)
            sending = asyncio.create_task(self._to(session, send, [peer], "send", session.deadline))
            receiving = asyncio.create_task(session.step(receive, session.targets))
            try:
                await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    # One that does not send would be waited for until the deadline.
                    self._refuse_failed(sending.result())
                self._file(run, await receiving)
            finally:
                sending.cancel()
                receiving.cancel()
                await asyncio.gather(sending, receiving, return_exceptions=True)
        finally:
            leave = DestroyWeightsUpdateGroupRequest(group_name=group)
            await asyncio.shield(self._to(session, leave, [peer, slot], "leave", JOIN_S))

    async def _new_group(self, model: ModelState) -> str:
        record = ModelRecord()
        record.CopyFrom(model.record)
        record.group_generation += 1
        await self._journal.write([model_put(record)])
        model.record = record
        return f"{record.name}-{record.group_generation}-heal"

    async def _buckets(self, session: Session, peer: Slot) -> list[TensorBucket]:
        """Every tensor of the model, each in a broadcast of its own."""
        asked = await self._to(session, GetModelInfoRequest(reference=True), [peer], "reference", JOIN_S)
        self._refuse_failed(asked)
        listed = asked[0].rank_results[0].model_info.reference
        return [
            TensorBucket(
                sequence=0,
                names=[tensor.name for tensor in listed],
                dtypes=[tensor.dtype for tensor in listed],
                shapes=[tensor.shape for tensor in listed],
                format=BUCKET_FORMAT_TENSORS,
            )
        ]

    async def _to(
        self, session: Session, request: Message, slots: Sequence[Slot], step: str, limit_s: float
    ) -> list[StageResult]:
        return await self._fanout.run(
            request,
            slots,
            operation_id=session.update_id,
            step=step,
            deadline=min(session.deadline, self._clock.now() + limit_s),
        )

    def _refuse_failed(self, results: Sequence[StageResult]) -> None:
        for result in results:
            if not acknowledged(result, update=True):
                raise blame(result)

    def _file(self, run: Run, results: Sequence[StageResult]) -> None:
        for result in results:
            run.add(result)
        self._refuse_failed(results)


def _needs_heal(slot: Slot) -> bool:
    return slot.state in _HEALABLE or (slot.record.HasField("quarantine") and slot.state in _SOUND)


def _not_healed(slot: Slot, error: RlctlError) -> StageResult:
    return StageResult(
        slot=slot.name,
        incarnation=slot.record.incarnation,
        outcome=error.outcome,
        error=error.detail(),
        state=slot.state,
    )
