"""The state machine of a stage: the checks of a command before it reaches the ranks, and the effect of its outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.message import Message

from rlctl.contract import adapter_identity, digests, memory_regions, outcomes
from rlctl.contract.durations import seconds, set_duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.validation import check
from rlctl.contract.verbs import Verb, of_request, spoils
from rlctl.engine import Call, Engine
from rlctl.ports import Clock, Link
from rlctl.stage.facts import Facts
from rlctl.stage.relay import Relay
from rlctl.stage.serving_state import Serving
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.common_pb2 import (
    EVIDENCE_UNSPECIFIED,
    OUTCOME_APPLIED,
    OUTCOME_REJECTED,
    StageState,
)
from rlctl.v1.control_pb2 import (
    Attach,
    Attached,
    CommandResult,
    ControlRequest,
    ControlResponse,
    ServingGrant,
)
from rlctl.v1.fleet_pb2 import EngineFailure, PausedAdapter, RankStatus, StageRegistration, StageReport
from rlctl.v1.results_pb2 import RankResult
from rlctl.version import CONTRACT_VERSION

MOST_AHEAD = 100
"""Highest excess of a commander's epoch over the epoch at registration and the present epoch. Restarts raise epochs."""

MOST_EPOCH = 1 << 63
"""Highest accepted epoch. No fleet reaches this epoch, and a higher epoch can still follow."""

_LOOKED = (OUTCOME_APPLIED, OUTCOME_REJECTED)
"""Outcomes of a completed check, also with an unexpected result."""


class Stage:
    """One stage. All state but ``serving`` belongs to the admin event loop."""

    def __init__(
        self,
        registration: StageRegistration,
        engine: Engine,
        relay: Relay,
        ranks: Sequence[RankStatus],
        clock: Clock,
    ) -> None:
        self.registration = registration
        self.incarnation = 0
        self.home_epoch: int | None = None
        """Epoch of the stage's own coordinator at the last registration; None without such a coordinator."""
        self.facts = Facts(checkpoint=registration.checkpoint, model_digest=registration.model_digest)
        self.attached = asyncio.Event()
        self.unattached = asyncio.Event()
        """``attached`` is set while a coordinator is attached, ``unattached`` otherwise. Exactly one event is set, so a
        task that waits for both in turn misses no change, however short a link lives.
        """
        self.unattached.set()
        self._engine = engine
        self._relay = relay
        self._ranks = list(ranks)
        self._clock = clock
        self._link: Link[ControlResponse, ControlRequest] | None = None
        self._turn = asyncio.Lock()
        self._waiting: dict[str, bool] = {}  # ids of waiting commands; True once withdrawn
        self._lease_until = float("-inf")
        self._grant_number = 0
        self._confirmed_grant = 0
        self._obstacle: RlctlError | None = None
        self._engine_failure: EngineFailure | None = None
        self._spoiling = self._closing = self._pausing = ""
        self._aborting = 0
        """Aborts of updates that are under way at the ranks. Some ranks may have let their requests continue."""
        self._writing = self._written = 0
        """Numbers of running and of ended commands that write weights, including the shadow copy."""
        self._revision = 0
        self._reported: bytes = b""
        self._standing: tuple[object, ...] = ()
        """The part of the last report that a grant can change."""
        self.serving = self._serving()

    # Calls of the coordinator.

    async def attach(self, attach: Attach, link: Link[ControlResponse, ControlRequest]) -> Attached:
        """Accept a coordinator of the same or a higher epoch, and close the link of the earlier coordinator."""
        try:
            if not attach.incarnation:  # a query of the registration
                return Attached(registration=self.registration, report=self.report())
            self._refuse_attach(attach)
        except RlctlError as error:
            return Attached(error=error.detail())
        former, self._link = self._link, link
        if attach.fleet_epoch > self.facts.fleet_epoch:
            self._confirmed_grant = 0  # each coordinator counts its own grants
        if former is not link:
            # Grant numbers count per link. A number of an earlier link would make the stage ignore all later grants.
            self._grant_number = 0
        self.facts.fleet_epoch = attach.fleet_epoch
        self.facts.joined = True
        self.incarnation = attach.incarnation
        self.unattached.clear()
        self.attached.set()
        self._changed(tell=False)
        if former is not None and former is not link:
            await former.close()  # last: a higher epoch may attach meanwhile, and nothing of this epoch may follow
        return Attached(registration=self.registration, report=self.report())

    def _refuse_attach(self, attach: Attach) -> None:
        limit = MOST_EPOCH
        if self.home_epoch is not None:
            limit = min(max(self.home_epoch, self.facts.fleet_epoch) + MOST_AHEAD, MOST_EPOCH)
        if attach.fleet_epoch > limit:
            hint = "" if self.home_epoch is None else f": the fleet's coordinator is at {self.home_epoch}"
            raise Reason.EPOCH_FENCED.error(
                f"epoch {attach.fleet_epoch} is not this fleet's{hint}", field="attach.fleet_epoch"
            )
        if attach.fleet_epoch < self.facts.fleet_epoch:
            raise Reason.EPOCH_FENCED.error(
                f"epoch {attach.fleet_epoch} is over: the stage obeys epoch {self.facts.fleet_epoch}",
                field="attach.fleet_epoch",
            )
        if attach.slot and attach.slot != self.registration.slot:
            raise Reason.STAGE_NOT_FOUND.error(
                f"this stage is {self.registration.slot!r}, not {attach.slot!r}", field="attach.slot"
            )
        if abs(attach.contract_version - CONTRACT_VERSION) > 1:
            raise Reason.FIELD_INVALID.error(
                f"the coordinator speaks contract {attach.contract_version}, this stage {CONTRACT_VERSION}",
                field="attach.contract_version",
            )

    def obeys(self, link: object) -> bool:
        return self._link is not None and link is self._link

    def detached(self, link: object) -> None:
        """Forget the coordinator's link after its end. The lease runs out by itself."""
        if link is self._link:
            self._link = None
            self.attached.clear()
            self.unattached.set()

    async def leave(self) -> None:
        """Close the coordinator's stream from this side."""
        if self._link is not None:
            await self._link.close()

    def grant(self, grant: ServingGrant) -> None:
        """Take a serving grant. Ignore a grant of a different epoch, or an overtaken grant."""
        if grant.fleet_epoch != self.facts.fleet_epoch or grant.number <= self._grant_number:
            return
        self._grant_number = grant.number
        if grant.confirm:
            self._confirmed_grant = grant.number
        adopt = grant.adopt if grant.HasField("adopt") else None
        self.facts.admit(
            grant.admitted, adopt, grant.adapters, grant.withheld_adapters, adopt_digest=grant.adopt_digest
        )
        if adopt is not None and self.facts.version == adopt:
            self._engine.set_version(adopt)
        lease_s = seconds(grant.lease)
        self._lease_until = grant.echo / 1e6 + lease_s if lease_s > 0 and grant.echo else float("-inf")
        self._changed(granted=adopt is None)

    async def carry_out(self, request: Message, call: Call) -> CommandResult:
        """Check a command, relay it to the ranks, aggregate the results and apply the outcome."""
        started = self._clock.now()
        try:
            result = await self._carry_out(of_request(request), request, call)
        except RlctlError as error:
            result = self._refused(error)
        set_duration(result.stage.elapsed, self._clock.now() - started)
        return result

    def refuse(self, error: RlctlError) -> CommandResult:
        """Return the result of a command that was refused before any check."""
        return self._refused(error)

    async def withdraw(self, command_id: str) -> None:
        """Withdraw a command that waits for its turn or is not ordered yet."""
        if command_id in self._waiting:
            self._waiting[command_id] = True
        await self._relay.withdraw(command_id)

    # Events at the stage itself.

    def rank_seen(self, rank: int, pid: int) -> None:
        self._ranks[rank].pid = pid
        self._changed()

    def rank_lost(self, rank: int, error: RlctlError) -> None:
        """Mark a rank whose process or engine is gone.

        The stage serves and changes nothing until the engine restarts.
        """
        status = self._ranks[rank]
        status.alive = False
        status.reason = status.reason or error.message
        if self._obstacle is None:
            self._obstacle = Reason.RANK_LOST.error(outcomes.of_rank(rank, error.message))
        self._changed()

    def engine_failed(self, failure: EngineFailure) -> None:
        """Report the failure of an engine whose ranks are lost."""
        self._engine_failure = failure
        self._changed()

    # State and reports.

    @property
    def state(self) -> StageState.ValueType:
        """FAILED if a rank is lost, otherwise the state derived from the facts."""
        return common_pb2.STAGE_STATE_FAILED if self._obstacle is not None else self.facts.state

    def report(self) -> StageReport:
        facts = self.facts
        return StageReport(
            incarnation=self.incarnation,
            state=self.state,
            weight_version=facts.version,
            model_digest=facts.model_digest,
            checkpoint=facts.checkpoint,
            update_id=facts.update.update_id if facts.update else "",
            update_committed=facts.update is not None and facts.update.committed,
            paused=facts.paused,
            pause_mode=facts.pause_mode,
            released=sorted(facts.released),
            cache_in_doubt=facts.cache_in_doubt,
            quarantine=self._obstacle.detail() if self._obstacle else None,
            ranks=self._ranks,
            revision=self._revision,
            fleet_epoch=facts.fleet_epoch,
            lease_held=self.serving.has_lease(self._clock),
            paused_by_update=facts.paused_by,
            grant_number=self._confirmed_grant,
            update_staged=facts.update is not None and facts.update.aside,
            update_prepared=facts.update is not None and facts.update.prepared,
            adapters=[adapter for _, adapter in sorted(facts.adapters.items())],
            closed_adapter=self._closed_adapter,
            engine_failure=self._engine_failure,
            paused_adapters=[
                PausedAdapter(name=name, mode=mode) for name, mode in sorted(facts.paused_adapters.items())
            ],
        )

    @property
    def _closed_adapter(self) -> str:
        update = self.facts.update
        return self._closing or (update.closed_adapter if update is not None else "")

    def _serving(self) -> Serving:
        return Serving(
            self.registration.slot,
            self.registration.model,
            self.incarnation,
            self.facts.state,
            self.facts.version,
            self.facts.vouched,
            self._lease_until,
            self._obstacle,
            self.facts.servable_adapters,
            frozenset(self.facts.adapters),
            frozenset(self.facts.admitted_adapters),
            self._spoiling,
            self._closed_adapter,
            self.facts.update is not None and self.facts.update.prepared and not self._aborting,
            frozenset(self.facts.paused_adapters) | ({self._pausing} - {""}),
            self.facts.withheld_adapters,
        )

    def _changed(self, *, tell: bool = True, granted: bool = False) -> None:
        """Update ``serving`` and report changes.

        ``granted``: the cause is a grant, and most grants only prolong the lease.
        """
        self.serving = self._serving()
        has_lease = self.serving.has_lease(self._clock)
        standing = (self.serving.state, has_lease, self._confirmed_grant, self.facts.update is None)
        if granted and standing == self._standing:
            return
        self._standing = standing
        report = self.report()
        report.ClearField("revision")
        content = report.SerializeToString(deterministic=True)
        if content == self._reported:
            return
        self._reported = content
        self._revision += 1
        report.revision = self._revision
        if tell and self._link is not None:
            with contextlib.suppress(RlctlError):
                self._link.send(ControlResponse(report=report))

    async def _carry_out(self, verb: Verb, request: Message, call: Call) -> CommandResult:
        check(request)
        written = self._written
        mutates = verb.mutates(request)
        if mutates and request.header.validate_only:  # type: ignore[attr-defined]
            raise Reason.FIELD_INVALID.error(
                "a stage does not support validate_only",
                field="header.validate_only",
                next_step="Send the call to the coordinator.",
            )
        if isinstance(request, verbs_pb2.ReleaseMemoryRequest):
            unkept = memory_regions.unkept(self.registration.capabilities, request)
            if unkept is not None:
                raise unkept
        if isinstance(request, verbs_pb2.CheckWeightsRequest):
            refusal = digests.keyed_digest_refusal(self.registration.capabilities, request)
            if refusal is not None:
                raise refusal
            if self.facts.lacks_sha256(request):
                proof = verbs_pb2.CheckWeightsRequest(header=request.header)
                proof.digest = verbs_pb2.DIGEST_FUNCTION_AS_VERIFIED
                proving = replace(call, command_id=f"{call.command_id}-verified")
                verified = await self._relayed(verb, proof, proving, written)
                if verified.stage.outcome != OUTCOME_APPLIED:
                    return verified
        if isinstance(request, verbs_pb2.PauseGenerationRequest):
            unpaused = adapter_identity.unpaused(self.registration.capabilities, request)
            if unpaused is not None:
                raise unpaused
        if mutates and self._obstacle is not None:
            raise self._obstacle.with_traceback(None)  # the traceback would hold every request that raised this error
        if not mutates or not verb.waits or verb.interrupts:
            # A write since the start of a proof may have kept the proof from being compared.
            return await self._relayed(verb, request, call, written)
        if self._turn.locked() or self._waiting:  # a free turn may be promised to a waiting command
            await self._wait_for_turn(call)
        else:
            await self._turn.acquire()
        try:
            return await self._relayed(verb, request, call, self._written)
        finally:
            self._turn.release()

    async def _wait_for_turn(self, call: Call) -> None:
        self._waiting[call.command_id] = False
        try:
            async with asyncio.timeout(call.deadline - self._clock.now()):
                await self._turn.acquire()
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error("another command kept the stage busy until the time was up") from None
        finally:
            withdrawn = self._waiting.pop(call.command_id)
        if withdrawn:
            self._turn.release()
            raise Reason.CANCELLED.error("cancelled before it was started")

    async def _relayed(self, verb: Verb, request: Message, call: Call, written: int) -> CommandResult:
        """Run a command at all ranks. ``written``: number of writes before its first look at the weights."""
        self.facts.refuse(verb, request)
        self._place(request)
        staging, spoiling = self.facts.is_aside(verb, request), spoils(request)
        if spoiling:  # a rank may be done long before the last rank answers
            self._spoiling = verb.name
        # Close the adapter first. Otherwise the ranks would have to stop requests that arrive meanwhile.
        closing = self.facts.closes(request)
        pausing = request.adapter if isinstance(request, verbs_pb2.PauseGenerationRequest) else ""
        if closing:
            self._closing = closing
        if pausing:
            self._pausing = pausing
        if closing:
            self._changed()
        aborting = isinstance(request, verbs_pb2.AbortUpdateRequest)
        self._aborting += aborting
        if spoiling or pausing or aborting:
            self.serving = self._serving()
        writes = verb.writes_weights or spoiling
        self._writing += writes
        try:
            results = await self._relay.run(verb, request, call)
        finally:
            self._writing -= writes
            self._written += writes
            if closing:
                self._closing = ""
            self._aborting -= aborting
            if pausing:
                self._pausing = ""
            if spoiling:
                self._spoiling = ""  # takes effect once the outcome is settled
        outcome = outcomes.of_ranks(verb, results, mutates=verb.mutates(request) and not staging)
        if isinstance(request, verbs_pb2.GetModelInfoRequest):
            self._name_version(results)
        steady = not self._writing and self._written == written
        if isinstance(request, verbs_pb2.CheckWeightsRequest) and outcome in _LOOKED and steady:
            outcome = self._contradicted(request, results) or outcome
        changed = self.facts.settle(verb, request, outcome, results, steady=steady)
        if isinstance(request, verbs_pb2.CommitUpdateRequest) and outcome == OUTCOME_APPLIED:
            self._engine.set_version(self.facts.version)
        if changed or spoiling or closing or pausing or aborting:
            self._changed()
        return self._result(outcome, results, outcomes.explain(outcome, results))

    def _contradicted(
        self, request: verbs_pb2.CheckWeightsRequest, results: Sequence[RankResult]
    ) -> common_pb2.Outcome.ValueType | None:
        """Return the outcome of a check that contradicts the facts, or None.

        The error is added to each rank result.
        """
        contradiction = self.facts.contradiction(request, results)
        if contradiction is None:
            return None
        for result in results:
            result.outcome = contradiction.outcome
            result.error.CopyFrom(contradiction.detail())
        return contradiction.outcome

    def _name_version(self, results: Sequence[RankResult]) -> None:
        """Replace the version in rank results by the stage's version: ranks are written and confirmed together.

        An engine names the last version set, even if the weights are a mixture now. Followers have no version.
        """
        for result in results:
            if result.HasField("model_info"):
                result.model_info.weight_version.CopyFrom(self.facts.version)

    def _place(self, request: Message) -> None:
        """Add values to a request that only the stage knows.

        A group's members are named for the whole fleet: the stage adds its place there. A check gets the digest key.
        """
        if isinstance(request, verbs_pb2.CheckWeightsRequest):
            request.digest_key = self.facts.digest_key(request)
            request.ClearField("digest")
        if isinstance(request, verbs_pb2.InitWeightsUpdateGroupRequest):
            for member in request.members:
                if member.slot == self.registration.slot:
                    request.rank_offset = member.rank_offset
                    request.num_ranks = member.num_ranks

    def _refused(self, error: RlctlError) -> CommandResult:
        outcome = error.outcome or OUTCOME_REJECTED
        return self._result(outcome, [], error.detail())

    def _result(
        self,
        outcome: common_pb2.Outcome.ValueType,
        results: Sequence[RankResult],
        error: common_pb2.ErrorDetail | None,
    ) -> CommandResult:
        # Filled in place: protobuf copies a message that is assigned to a field, and every command has such a result.
        answer = CommandResult()
        result, header = answer.stage, answer.stage.header
        header.fleet_epoch = self.facts.fleet_epoch
        header.served_by = result.slot = self.registration.slot
        header.observed_at.CopyFrom(self._clock.wall())
        result.incarnation = self.incarnation
        result.outcome = outcome
        result.evidence = outcomes.evidence_of(results) if results else EVIDENCE_UNSPECIFIED
        if error is not None:
            result.error.CopyFrom(error)
        result.state = self.state
        result.weight_version.CopyFrom(self.facts.version)
        result.rank_results.extend(results)
        return answer
