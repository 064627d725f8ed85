"""The facts of a stage, the state derived from them, and their change by verbs. Pure: no I/O, no time.

The state is derived and never stored, so facts and state cannot disagree.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message

from rlctl.contract import memory_regions
from rlctl.contract.adapter_identity import same
from rlctl.contract.digests import comparable, key_of
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import STATE_PREFIX, VERBS, Verb
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_UNKNOWN,
    MemoryTag,
    Outcome,
    PauseMode,
    StageState,
    WeightVersion,
)
from rlctl.v1.results_pb2 import RankResult
from rlctl.v1.verbs_pb2 import Adapter

POSSIBLY_DONE = (OUTCOME_APPLIED, OUTCOME_DIRTY, OUTCOME_UNKNOWN)
"""Outcomes after which the effect must be assumed where that is the safe side."""

_NEXT_STEPS = {
    common_pb2.STAGE_STATE_JOINING: "Wait until the stage has joined.",
    common_pb2.STAGE_STATE_STALE: "`rlctl heal`, or the next update.",
    common_pb2.STAGE_STATE_READY: "Begin an update first.",
    common_pb2.STAGE_STATE_PAUSED: "Begin an update first.",
    common_pb2.STAGE_STATE_ASLEEP: "`rlctl memory resume` first.",
    common_pb2.STAGE_STATE_UPDATING: "Wait for the end of the update, or `rlctl weights abort`.",
    common_pb2.STAGE_STATE_DIRTY: "`rlctl heal`, or a full update.",
}
"""Next step after the refusal of a verb in a state."""


class Weights(enum.Enum):
    """Condition of the weights in memory."""

    WHOLE = enum.auto()  # one complete version
    MIXED = enum.auto()  # partly written
    LOST = enum.auto()  # never loaded, or released without keeping the content


@dataclass
class OpenUpdate:
    """The open update of a stage.

    Attributes:
        version: version after the update.
        at: version of the tokens generated before the update opened; empty for a mixture.
        checkpoint: checkpoint loaded by the update, for an update from disk.
        touched: a byte of the served weights may have been written.
        committed: the stage has finished the update and waits for the version's admission.
        full: the update writes every parameter.
        spoilt: weights were damaged during the update, so a commit leaves a mixture.
        staged: the update fills a shadow copy.
        prepared: the shadow copy, or the adapter, is complete and sealed.
        digest: model digest of the shadow copy, hex; empty until computed.
        adapter: the adapter after an adapter update, or None. Nothing served changes before the commit.
        pauses: an adapter update stops the requests with the adapter only at the seal.
    """

    update_id: str
    version: WeightVersion
    at: WeightVersion
    checkpoint: str = ""
    touched: bool = False
    committed: bool = False
    staged: bool = False
    prepared: bool = False
    digest: str = ""
    adapter: Adapter | None = None
    full: bool = True
    spoilt: bool = False
    pauses: bool = False

    @property
    def aside(self) -> bool:
        """Whether the update has changed nothing that is served. The state of the stage ignores such an update."""
        return (self.staged or self.adapter is not None) and not (self.touched or self.committed)

    @property
    def closed_adapter(self) -> str:
        """Name of the adapter that takes no new request until the update ends, or ""."""
        closed = self.adapter is not None and (self.prepared or not self.pauses)
        return self.adapter.name if closed and self.adapter is not None else ""


@dataclass
class Facts:
    """All values that the state of a stage depends on."""

    joined: bool = False
    version: WeightVersion = field(default_factory=WeightVersion)
    weights: Weights = Weights.WHOLE
    released_at: WeightVersion = field(default_factory=WeightVersion)
    model_digest: str = ""
    sha256_digest: str = ""
    checkpoint: str = ""
    paused: bool = False
    pause_mode: PauseMode.ValueType = common_pb2.PAUSE_MODE_UNSPECIFIED
    paused_by: str = ""
    released: frozenset[MemoryTag.ValueType] = frozenset()
    cache_in_doubt: bool = False
    update: OpenUpdate | None = None
    admitted: tuple[WeightVersion, ...] = ()
    fleet_epoch: int = 0
    adapters: dict[str, Adapter] = field(default_factory=dict)
    admitted_adapters: dict[str, Adapter] = field(default_factory=dict)
    paused_adapters: dict[str, PauseMode.ValueType] = field(default_factory=dict)
    """Modes by name. A pause of an adapter does not depend on whether the stage holds the adapter."""
    withheld_adapters: frozenset[str] = frozenset()

    @property
    def state(self) -> StageState.ValueType:
        if not self.joined:
            return common_pb2.STAGE_STATE_JOINING
        if self.update is not None and not self.update.aside:
            return common_pb2.STAGE_STATE_UPDATING
        if self.weights is Weights.MIXED:
            return common_pb2.STAGE_STATE_DIRTY
        if self.released:
            return common_pb2.STAGE_STATE_ASLEEP
        if self.weights is Weights.LOST or not self.at_admitted_version:
            return common_pb2.STAGE_STATE_STALE
        return common_pb2.STAGE_STATE_PAUSED if self.paused else common_pb2.STAGE_STATE_READY

    @property
    def at_admitted_version(self) -> bool:
        return self._admits(self.version)

    @property
    def _generated_at(self) -> WeightVersion:
        """Version of the tokens generated last, also by weights that were released since."""
        return self.released_at if self.weights is Weights.LOST else self.version

    def _admits(self, version: WeightVersion) -> bool:
        sequence, label = version.sequence, version.label
        if sequence > 0:
            for admitted in self.admitted:  # any() takes twice as long, and every command calls this
                if admitted.sequence == sequence and admitted.label == label:
                    return True
        return False

    @property
    def vouched(self) -> bool:
        """Whether tokens of running requests may be sent, also during a pause, during an update or asleep.

        The weights must be at an admitted version. During an update that writes them, the version at its begin counts.
        """
        if self.update is None or self.update.aside:
            return self._admits(self._generated_at)
        return self._admits(self.update.at)

    def refuse(self, verb: Verb, request: Message) -> None:
        """Raise the reason for refusing the verb now, before any rank receives the command."""
        fence = request.header.fence  # type: ignore[attr-defined]
        if verb.mutates(request) and fence.fleet_epoch != self.fleet_epoch:
            reason = Reason.EPOCH_FENCED if fence.fleet_epoch else Reason.EPOCH_REQUIRED
            raise reason.error(
                f"the stage obeys epoch {self.fleet_epoch}, the command has epoch {fence.fleet_epoch}",
                field="header.fence.fleet_epoch",
            )
        if verb.in_update and self.update is not None and fence.update_id != self.update.update_id:
            raise Reason.UPDATE_FENCED.error(
                f"update {self.update.update_id} is open, the command belongs to {fence.update_id or 'none'}",
                field="header.fence.update_id",
            )
        if verb.in_update and self.update is not None and self.update.committed and not _ends_update(request):
            raise Reason.ILLEGAL_STATE.error("the update is finished at this stage and takes no more writes")
        if verb.in_update and not fence.update_id:
            raise Reason.FIELD_REQUIRED.error(f"{verb.name} belongs to an update", field="header.fence.update_id")
        if isinstance(request, verbs_pb2.ContinueGenerationRequest) and not request.adapter:
            self._refuse_continue()
        if isinstance(request, verbs_pb2.PrepareUpdateRequest):
            self._refuse_update(request)
        if isinstance(request, verbs_pb2.ReleaseMemoryRequest):
            self._refuse_release(request)
        if isinstance(request, verbs_pb2.CheckWeightsRequest) and MEMORY_TAG_WEIGHTS in self.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released")
        staging = self.update is not None and self.update.aside
        if staging or _of_staged(request):
            self._refuse_staged(request)
        # Steps of an update that changes nothing served are allowed in every state.
        a_step = staging and (verb.in_update or _of_staged(request) or self._checks_update(request))
        # A continue of an adapter is allowed where its pause is: whether the weights may be served, the state decides.
        like = VERBS["PauseGeneration"] if _continues_adapter(request) else verb
        if not a_step and not like.allows(self.state):
            state = StageState.Name(self.state).removeprefix(STATE_PREFIX)
            raise Reason.ILLEGAL_STATE.error(
                f"{verb.name} is for stages that are {', '.join(sorted(like.states))}; the state is {state}",
                next_step=_NEXT_STEPS.get(self.state, ""),
                metadata={"state": state},
            )

    def _refuse_continue(self) -> None:
        if self.update is None and self.weights is Weights.MIXED:
            raise Reason.WEIGHTS_DIRTY.error("the weights are a mixture of versions and may not generate")
        if self.released:
            names = ", ".join(sorted(MemoryTag.Name(t).removeprefix("MEMORY_TAG_").lower() for t in self.released))
            raise Reason.MEMORY_RELEASED.error(f"released: {names}; generation needs every region")
        if self.state == common_pb2.STAGE_STATE_STALE:
            raise Reason.WEIGHTS_STALE.error()

    def _refuse_release(self, request: verbs_pb2.ReleaseMemoryRequest) -> None:
        lost = self.weights is Weights.LOST and MEMORY_TAG_WEIGHTS in self.released
        if lost and memory_regions.keeps_weights(request):
            raise Reason.MEMORY_RELEASED.error(
                "the weights are released already, and their content was not kept", field="keep_weights"
            )

    def _refuse_staged(self, request: Message) -> None:
        """Refuse steps outside a staged update, for a different update, or out of order.

        The order is write, seal, commit.
        """
        update = self.update
        shadow = isinstance(request, verbs_pb2.CheckWeightsRequest)  # a check of an adapter names the adapter
        if update is None or not update.aside or (shadow and _of_staged(request) and not update.staged):
            raise Reason.UPDATE_NOT_FOUND.error("no staged update is open: there is no shadow copy")
        if isinstance(request, verbs_pb2.CheckWeightsRequest) and request.shadow:
            fence = request.header.fence
            if fence.update_id != update.update_id:
                raise Reason.UPDATE_FENCED.error(
                    f"the shadow copy is update {update.update_id}'s", field="header.fence.update_id"
                )
        if isinstance(request, verbs_pb2.CommitUpdateRequest) and not update.prepared:
            raise Reason.ILLEGAL_STATE.error("the update is not sealed, so its shadow copy is incomplete")
        if isinstance(request, (*_WRITES, verbs_pb2.LoadAdapterRequest)) and update.prepared:
            raise Reason.ILLEGAL_STATE.error("the update is sealed and takes no more writes")

    def _checks_update(self, request: Message) -> bool:
        """Whether a request digests the adapter staged by the open update."""
        update = self.update
        if not isinstance(request, verbs_pb2.CheckWeightsRequest) or update is None or update.adapter is None:
            return False
        return request.adapter == update.adapter.name and request.header.fence.update_id == update.update_id

    def _refuse_update(self, request: verbs_pb2.PrepareUpdateRequest) -> None:
        if self.update is not None and self.update.staged != (request.apply == verbs_pb2.APPLY_MODE_STAGED):
            raise Reason.FIELD_CONFLICT.error("the update was opened with another apply mode", field="apply")
        kind = (request.kind in _FULL, request.kind == verbs_pb2.UPDATE_KIND_ADAPTER)
        if self.update is not None and kind != (self.update.full, self.update.adapter is not None):
            raise Reason.FIELD_CONFLICT.error("the update was opened with another kind", field="kind")
        if MEMORY_TAG_WEIGHTS in self.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released and cannot be written")
        if request.kind not in _FULL and self.update is None and self.weights is not Weights.WHOLE:
            raise Reason.WEIGHTS_DIRTY.error("only a full update can start from weights that are not whole")

    def contradiction(self, request: verbs_pb2.CheckWeightsRequest, results: Sequence[RankResult]) -> RlctlError | None:
        """Return the error for a check that contradicts the facts, or None.

        Whole weights must be equal at all replicas and have the digest of the last check. Assumes that no write ran
        during the check.
        """
        if request.shadow or request.adapter or self.weights is not Weights.WHOLE:
            return None
        torn = sorted({name for result in results for name in result.check.inconsistent})
        # the verification judges this, and names the rank
        verifying = self.update is not None and self.update.committed
        if torn and not verifying:
            return Reason.DIGEST_MISMATCH.error(
                f"replicas of {torn[0]} differ between ranks ({len(torn)} tensors do): an update has missed a "
                "replica, or memory is damaged",
                metadata={"tensors": ",".join(torn)},
                outcome=OUTCOME_DIRTY,
            )
        known_digests = (self.model_digest, self.sha256_digest)
        differ = sorted(
            (later, earlier)
            for later in _digests(results)
            for earlier in filter(None, known_digests)
            if later != earlier and comparable(later, earlier)
        )
        if not differ or not _of_all(request):
            return None
        later, earlier = differ[0]
        return Reason.DIGEST_MISMATCH.error(
            f"the weights digest to {later} now, and {earlier} when they were digested last; rlctl has not written "
            "since: another program has, or memory is damaged",
            metadata={"expected": earlier, "found": later},
            outcome=OUTCOME_DIRTY,
        )

    def digest_key(self, request: verbs_pb2.CheckWeightsRequest) -> bytes:
        """Return the key of the digest for a check; b"" for SHA-256."""
        if request.digest == verbs_pb2.DIGEST_FUNCTION_AS_VERIFIED:
            return key_of(self.model_digest)
        return request.digest_key or key_of(request.expected_digest)

    def lacks_sha256(self, request: verbs_pb2.CheckWeightsRequest) -> bool:
        """Whether a check is the first by SHA-256 of weights that were verified by a keyed digest.

        Its digest will count for these weights, so the keyed digest has to be verified before.
        """
        sha256 = request.digest in (verbs_pb2.DIGEST_FUNCTION_UNSPECIFIED, verbs_pb2.DIGEST_FUNCTION_SHA256)
        digests_weights = not (request.shadow or (request.HasField("model_digest") and not request.model_digest))
        keyed_only = bool(key_of(self.model_digest)) and not self.sha256_digest
        return (
            keyed_only
            and self.weights is Weights.WHOLE
            and (sha256 and digests_weights and not self.digest_key(request))
            and _of_all(request)
            and request.action in _DIGESTS
        )

    def settle(
        self,
        verb: Verb,
        request: Message,
        outcome: Outcome.ValueType,
        results: Sequence[RankResult],
        *,
        steady: bool = True,
    ) -> bool:
        """Apply the outcome of a verb to the facts, and return whether any fact may have changed.

        If the outcome leaves the effect open, assume the case that serves nothing. ``steady``: no write to served
        weights or shadow copy ran during the verb.
        """
        applied = outcome == OUTCOME_APPLIED
        possible = outcome in POSSIBLY_DONE
        changed = True
        match request:
            case verbs_pb2.PauseGenerationRequest() if request.adapter:
                if possible:
                    self.paused_adapters[request.adapter] = request.mode or common_pb2.PAUSE_MODE_ABORT
            case verbs_pb2.ContinueGenerationRequest() if request.adapter:
                if applied:
                    self.paused_adapters.pop(request.adapter, None)
            case verbs_pb2.PauseGenerationRequest() if possible:
                # A pause by name replaces the pause of an update, but not the reverse.
                if not self.paused or not request.header.fence.update_id:
                    self.paused_by = request.header.fence.update_id
                self.paused, self.pause_mode = True, request.mode or common_pb2.PAUSE_MODE_ABORT
            case verbs_pb2.ContinueGenerationRequest() if applied:
                self.paused, self.pause_mode, self.paused_by = False, common_pb2.PAUSE_MODE_UNSPECIFIED, ""
            case verbs_pb2.ReleaseMemoryRequest() if possible:
                named = frozenset(request.tags) or frozenset({MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS})
                released = memory_regions.released(results)
                preserved = memory_regions.kept(results) if applied else frozenset[MemoryTag.ValueType]()
                self._released(released if applied else self.released | released | named, preserved)
                if MEMORY_TAG_KV_CACHE in named:
                    self.cache_in_doubt = not applied
            case verbs_pb2.ResumeMemoryRequest() if applied:
                self.released = memory_regions.released(results)
                self.cache_in_doubt &= MEMORY_TAG_KV_CACHE in self.released
            case verbs_pb2.FlushCacheRequest() if applied and self.cache_in_doubt:
                self.cache_in_doubt = False
            case verbs_pb2.PrepareUpdateRequest() if possible and self.update is None:
                staged = request.apply == verbs_pb2.APPLY_MODE_STAGED
                update_id = request.header.fence.update_id
                full = request.kind in _FULL
                self.update = OpenUpdate(update_id, request.version, self._generated_at, staged=staged, full=full)
                if request.kind == verbs_pb2.UPDATE_KIND_ADAPTER:
                    self.update.adapter = Adapter(lora_rank=request.adapter_config.lora_rank)
                    self.update.adapter.MergeFrom(request.adapter)
                    self.update.pauses = bool(request.pause)
            case verbs_pb2.PrepareUpdateRequest() if possible and self.update is not None:
                self.update.prepared, self.update.digest, self.update.checkpoint = False, "", ""
            case verbs_pb2.SealUpdateRequest() if applied and self.update is not None:
                self.update.prepared = True
            case verbs_pb2.LoadAdapterRequest() if applied and self.update is not None:
                reported = (adapter for result in results for adapter in result.adapters.adapters)
                load_id = self.update.adapter.load_id if self.update.adapter is not None else ""
                self.update.adapter = next(reported, self.update.adapter)
                if self.update.adapter is not None:
                    self.update.adapter.load_id = load_id  # unknown to engines
            case verbs_pb2.UnloadAdapterRequest() if possible:
                self.adapters.pop(request.name, None)
            case verbs_pb2.CommitUpdateRequest() if self.update is not None and self.update.adapter is not None:
                self._put_adapter(self.update.adapter, applied=applied, possible=possible)
            case verbs_pb2.CommitUpdateRequest() if possible and self.update is not None:
                if applied:
                    self._committed(self.update, request.version)
                if request.adapters == verbs_pb2.ADAPTER_POLICY_DROP:
                    self.adapters.clear()  # some ranks may have dropped theirs
            case verbs_pb2.AbortUpdateRequest() if possible and self.update is not None:
                self._aborted(self.update, applied=applied)
            case verbs_pb2.CheckWeightsRequest() if possible and request.action == verbs_pb2.CHECK_ACTION_RESET_TENSORS:
                self._mixed()
                if self.update is not None and not self.update.aside:
                    self.update.spoilt = True
            case verbs_pb2.CheckWeightsRequest() if outcome == OUTCOME_DIRTY and not request.shadow:
                self._mixed()  # written by a different program: the bytes are not the confirmed bytes
                if self.update is not None and not self.update.full:
                    self.update.spoilt = True
            case verbs_pb2.CheckWeightsRequest() if applied and steady and _of_all(request):
                self._digested(request, results)
            case verbs_pb2.UpdateWeightsFromDiskRequest() if applied and self.update is not None:
                # The stage could not start with a part of a checkpoint, or with a different load format.
                complete = not request.target_modules and request.load_format in ("", "auto", "safetensors")
                self.update.checkpoint = request.model_path if complete else ""
            case _ if isinstance(request, _FILLS) and possible and self.update is not None and self.update.checkpoint:
                self.update.checkpoint = ""  # the bytes read from disk were overwritten
            case _:
                changed = False
        finished = applied and isinstance(request, verbs_pb2.CommitUpdateRequest)
        adapter_update = self.update is not None and self.update.adapter is not None
        # A write of a staged update affects the served weights only if the engine reports DIRTY.
        unaffected = adapter_update or (self.is_aside(verb, request) and outcome != OUTCOME_DIRTY)
        if verb.writes_weights and possible and not finished and not unaffected:
            if self.update is not None:
                self.update.touched = True
            self._mixed()
            changed = True
        return changed

    def closes(self, request: Message) -> str:
        """Return the name of the adapter whose requests a step of its update is about to stop, or ""."""
        if isinstance(request, verbs_pb2.PrepareUpdateRequest):
            return "" if request.pause else request.adapter.name
        sealing = isinstance(request, verbs_pb2.SealUpdateRequest) and self.update is not None
        return self.update.adapter.name if sealing and self.update and self.update.adapter is not None else ""

    def is_aside(self, verb: Verb, request: Message) -> bool:
        """Whether a verb is a step that changes nothing served, unless the engine reports DIRTY."""
        if isinstance(request, verbs_pb2.PrepareUpdateRequest):
            return request.apply == verbs_pb2.APPLY_MODE_STAGED or request.kind == verbs_pb2.UPDATE_KIND_ADAPTER
        staging = self.update is not None and self.update.aside
        return staging and verb.in_update and not _ends_update(request)

    @property
    def servable_adapters(self) -> dict[str, str]:
        """Version by name of the servable adapters: adapters of the stage at the admitted version."""
        admitted = self.admitted_adapters
        return {
            name: adapter.version
            for name, adapter in self.adapters.items()
            if name in admitted and same(adapter, admitted[name])
        }

    def admit(
        self,
        admitted: Iterable[WeightVersion],
        adopt: WeightVersion | None,
        adapters: Iterable[Adapter] = (),
        withheld_adapters: Iterable[str] = (),
        *,
        adopt_digest: str = "",
    ) -> None:
        """Set the admitted versions and adapters, and with ``adopt`` the version of the present weights.

        ``adopt_digest``: keyed digest of these weights, as the coordinator has compared it; "": no change.
        """
        self.admitted = tuple(admitted)
        self.admitted_adapters = {adapter.name: adapter for adapter in adapters}
        self.withheld_adapters = frozenset(withheld_adapters)
        if adopt is not None and self.update is None and self.weights is Weights.WHOLE:
            self.version = adopt
            if adopt_digest:
                self._verified_by(adopt_digest)
        if self.update is not None and self.update.committed and self.at_admitted_version:
            self.update = None

    def _released(self, tags: frozenset[MemoryTag.ValueType], kept: frozenset[MemoryTag.ValueType]) -> None:
        self.released = tags
        if MEMORY_TAG_WEIGHTS in tags - kept and self.weights is not Weights.MIXED:
            self.released_at = self._generated_at
            self.weights = Weights.LOST
            self._nothing_known()

    def _mixed(self) -> None:
        self.weights = Weights.MIXED
        self._nothing_known()

    def _nothing_known(self) -> None:
        self.version = WeightVersion()
        self.model_digest = self.sha256_digest = ""
        self.checkpoint = ""

    def _digested(self, request: verbs_pb2.CheckWeightsRequest, results: Sequence[RankResult]) -> None:
        """Keep the digest of an update's verification. The SHA-256 of a different check is kept beside it."""
        update, digests = self.update, _digests(results)
        verifies = update is not None and request.header.fence.update_id == update.update_id
        if len(digests) != 1:
            if request.shadow and update is not None:
                update.digest = ""
            return
        (digest,) = digests
        if request.shadow:
            if update is not None and update.prepared:
                accepted = verifies or not update.digest or comparable(digest, update.digest)
                update.digest = digest if accepted else update.digest
        elif self.weights is Weights.WHOLE:
            previous = self.model_digest
            first = not previous and not key_of(digest)  # never a key that a caller chose
            if verifies or first or (previous and comparable(digest, previous)):
                self._verified_by(digest)
            elif not key_of(digest):
                self.sha256_digest = digest

    def _verified_by(self, digest: str) -> None:
        """Set the digest of the weights. An earlier SHA-256 of the same weights stays valid beside a keyed digest."""
        if self.model_digest and not key_of(self.model_digest) and key_of(digest):
            self.sha256_digest = self.model_digest
        self.model_digest = digest

    def _put_adapter(self, adapter: Adapter, *, applied: bool, possible: bool) -> None:
        """Commit an adapter in place of the old adapter. If ranks may disagree, remove the adapter."""
        if applied:
            self.adapters[adapter.name] = adapter
            self.update = None
        elif possible:
            self.adapters.pop(adapter.name, None)

    def _aborted(self, update: OpenUpdate, *, applied: bool) -> None:
        # Finished or not, the written bytes are unverified.
        if update.touched or update.committed:
            update.touched, update.committed = True, False
            self._mixed()
        if applied:
            self.update = None
        else:  # open at some ranks only: a further abort is the only way out
            update.prepared = False

    def _committed(self, update: OpenUpdate, version: WeightVersion) -> None:
        update.committed = True
        if update.spoilt:
            self.update = None
            self._mixed()
            return
        self.weights = Weights.WHOLE  # an update that was not full began with whole weights
        self.version = version
        self.model_digest, self.sha256_digest = update.digest, ""
        self.checkpoint = update.checkpoint


_FULL = (verbs_pb2.UPDATE_KIND_UNSPECIFIED, verbs_pb2.UPDATE_KIND_FULL)

_FILLS = (
    verbs_pb2.UpdateWeightsFromDiskRequest,
    verbs_pb2.UpdateWeightsFromTensorRequest,
    verbs_pb2.UpdateWeightsFromDistributedRequest,
)

_DIGESTS = (
    verbs_pb2.CHECK_ACTION_UNSPECIFIED,
    verbs_pb2.CHECK_ACTION_CHECKSUM,
    verbs_pb2.CHECK_ACTION_SNAPSHOT,
    verbs_pb2.CHECK_ACTION_COMPARE,
)
"""Actions of checks that report a model digest."""

_WRITES = (*_FILLS, verbs_pb2.SealUpdateRequest)
"""Requests that fill the weights or the shadow copy, including the seal."""


def _of_staged(request: Message) -> bool:
    """Whether a request needs a shadow copy."""
    return isinstance(request, verbs_pb2.SealUpdateRequest) or (
        isinstance(request, verbs_pb2.CheckWeightsRequest) and request.shadow
    )


def _of_all(request: verbs_pb2.CheckWeightsRequest) -> bool:
    """Whether a check covers all base weights."""
    return not (request.skip_tensors or request.adapter)


def _digests(results: Sequence[RankResult]) -> set[str]:
    """Return the model digests that ranks computed, including unexpected digests."""
    mismatch = Reason.DIGEST_MISMATCH.name
    damaged = {result.error.metadata.get("found", "") for result in results if result.error.reason == mismatch}
    return ({result.check.model_digest for result in results} | damaged) - {""}


def _continues_adapter(request: Message) -> bool:
    return isinstance(request, verbs_pb2.ContinueGenerationRequest) and bool(request.adapter)


def _ends_update(request: Message) -> bool:
    return isinstance(request, verbs_pb2.CommitUpdateRequest | verbs_pb2.AbortUpdateRequest)
