"""Plans a weight update: targets, version and groups, or the reason for a refusal. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlctl.contract.durations import duration, seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.group_backends import BACKENDS
from rlctl.coordinator.fleet import disruptions, versions
from rlctl.coordinator.fleet.capabilities import adapter_travels, computes_keyed_digests, no_pause, unsupported
from rlctl.coordinator.fleet.model_state import ModelState
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.transaction import verification_levels
from rlctl.coordinator.transaction.process_groups import Circle, GroupBook, circle
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_WEIGHTS,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_UNSPECIFIED,
    STAGE_STATE_DIRTY,
    TRANSPORT_DISK,
    TRANSPORT_SHARED_MEMORY,
    TRANSPORT_TORCH_GLOO,
    TRANSPORT_TORCH_NCCL,
    TRANSPORT_VLLM_NCCL,
    WEIGHT_SELECTOR_DRAFT,
    PauseMode,
    Target,
    Transport,
    WeightVersion,
)
from rlctl.v1.results_pb2 import ExcludedStage
from rlctl.v1.update_pb2 import (
    DATA_PATH_DISK,
    DATA_PATH_IPC,
    DATA_PATH_UNSPECIFIED,
    BeginWeightUpdateRequest,
    BeginWeightUpdateResponse,
    UpdateTarget,
)
from rlctl.v1.verbs_pb2 import (
    AFTER_UPDATE_STAY_PAUSED,
    APPLY_MODE_STAGED,
    DIGEST_FUNCTION_KEYED,
    DIGEST_FUNCTION_PREFER_KEYED,
    DIGEST_FUNCTION_SHA256,
    DIGEST_FUNCTION_UNSPECIFIED,
    UPDATE_KIND_ADAPTER,
    UPDATE_KIND_DELTA,
    UPDATE_KIND_FULL,
    UPDATE_KIND_PARTIAL,
    UPDATE_KIND_UNSPECIFIED,
)

LEASE_TTL_S = 30.0
MOST_SOURCES = 1024

_WRITES = {
    TRANSPORT_DISK: "UpdateWeightsFromDisk",
    TRANSPORT_SHARED_MEMORY: "UpdateWeightsFromTensor",
}


class Planner:
    """Plans updates from the roster."""

    def __init__(
        self, roster: Roster, groups: GroupBook, new_id: Callable[[], str], new_key: Callable[[], bytes]
    ) -> None:
        self._roster = roster
        self._groups = groups
        self._new_id = new_id
        self._new_key = new_key
        self._tokens = 0

    def plan(self, request: BeginWeightUpdateRequest) -> tuple[BeginWeightUpdateResponse, list[Slot]]:
        """Return the answer to the request, without groups, and the frozen targets. Raises the reason for a refusal."""
        model = self._roster.model(request.model)
        self.refuse(request)
        if model.update_id:
            raise in_progress(model)
        targets, excluded, transports = self.targets(request)
        if request.rollout.max_unavailable:
            disruptions.refuse_rolling(self._roster, targets)
        self._tokens += 1
        plan = BeginWeightUpdateResponse(
            header=self._roster.header(),
            update_id=request.header.request_id or self._new_id(),
            fencing_token=self._roster.epoch << 32 | self._tokens,
            version=_version(request, model),
            targets=[
                UpdateTarget(
                    slot=slot.name,
                    incarnation=slot.record.incarnation,
                    workers=slot.workers,
                    transport=transports[slot.name],
                )
                for slot in targets
            ],
            excluded=excluded,
            attempt=1,
            lease_ttl=duration(seconds(request.lease_ttl) or LEASE_TTL_S),
            digest_key=self._digest_key(request, model),
        )
        return plan, targets

    def _digest_key(self, request: BeginWeightUpdateRequest, model: ModelState) -> bytes:
        """Return the key of an update's digests; b"": SHA-256. Raises UNSUPPORTED if a stage computes no keyed digests.

        Every stage of the model, target or not, must compute keyed digests: a later heal compares with the version's
        digest.
        """
        named = request.options.digest
        by_sha256 = request.adapter or request.path == DATA_PATH_DISK
        stages = [slot for slot in self._roster.slots.values() if slot.model == request.model]
        incapable = [slot for slot in stages if not (slot.record.retired or computes_keyed_digests(slot))]
        if request.kind == UPDATE_KIND_DELTA:
            key = versions.digest_key(model.record)
            function = DIGEST_FUNCTION_KEYED if key else DIGEST_FUNCTION_SHA256
            if named not in (DIGEST_FUNCTION_UNSPECIFIED, DIGEST_FUNCTION_PREFER_KEYED, function):
                raise Reason.FIELD_CONFLICT.error(
                    f"a delta is digested as its base was, {'with a key' if key else 'by SHA-256'}",
                    field="options.digest",
                )
        elif named == DIGEST_FUNCTION_PREFER_KEYED:
            key = b"" if by_sha256 or incapable else self._new_key()
        else:
            key = self._new_key() if named == DIGEST_FUNCTION_KEYED else b""
        if not key:
            return key
        if by_sha256:
            content = "an adapter" if request.adapter else "a checkpoint"
            raise Reason.UNSUPPORTED.error(f"{content} is digested by SHA-256", field="options.digest")
        if incapable:
            raise Reason.UNSUPPORTED.error(
                f"{incapable[0].name}'s engine computes no keyed digests",
                field="options.digest",
                next_step=(
                    "Send a full update with digest=sha256, or retire the stage."
                    if request.kind == UPDATE_KIND_DELTA
                    else "Use digest=prefer_keyed or digest=sha256, or retire the stage."
                ),
            )
        return key

    def targets(
        self, request: BeginWeightUpdateRequest
    ) -> tuple[list[Slot], list[ExcludedStage], dict[str, Transport.ValueType]]:
        """Return the targets in the present state, the excluded stages, and the transport of each target by slot.

        Raises the reason for a refusal.
        """
        selected, excluded = self._roster.select(Target(model=request.model))
        targets = []
        for slot in selected:
            obstacle = self._obstacle(request, slot)
            if obstacle is None:
                targets.append(slot)
            elif request.options.quorum:
                reason = obstacle.message.removeprefix(f"{slot.name}: ")
                excluded.append(ExcludedStage(slot=slot.name, state=slot.state, reason=reason))
            else:
                raise obstacle
        transports = {slot.name: _transport(request, slot) for slot in targets}
        size = 0 if request.apply == APPLY_MODE_STAGED else request.rollout.max_unavailable
        verification_levels.refuse_unreachable(request.options, targets, transports, targets[: size or len(targets)])
        if request.options.quorum > len(targets):
            excluded_names = ", ".join(f"{stage.slot} ({stage.reason})" for stage in excluded)
            raise Reason.FIELD_INVALID.error(
                f"quorum is {request.options.quorum}, there are {len(targets)} targets"
                + (f"; excluded: {excluded_names}" if excluded_names else ""),
                field="options.quorum",
                next_step="Wait for more stages, or lower the quorum.",
            )
        return targets, excluded, transports

    def plan_path(
        self, plan: BeginWeightUpdateResponse, request: BeginWeightUpdateRequest, targets: Sequence[Slot]
    ) -> None:
        """Plan the transports of an unwritten update anew. Raises if a target cannot be reached."""
        for slot in targets:
            obstacle = self._obstacle(request, slot)
            if obstacle is not None:
                raise obstacle
        for target, slot in zip(plan.targets, targets, strict=True):
            target.transport = _transport(request, slot)

    def add_groups(
        self, plan: BeginWeightUpdateResponse, request: BeginWeightUpdateRequest, targets: Sequence[Slot]
    ) -> list[str]:
        """Set the groups of an accepted update. Returns the names of other groups that stages may still be in.

        Adds names and generation to the model's record, which the caller journals.
        """
        del plan.groups[:]
        reached: dict[Circle, list[Slot]] = {}
        transports = {target.slot: target.transport for target in plan.targets}
        for slot in targets:
            if transports[slot.name] in BACKENDS:
                reached.setdefault(circle(slot, transports[slot.name]), []).append(slot)
        if request.path == DATA_PATH_DISK or request.implicit or not reached:
            return []
        record = self._roster.model(request.model).record
        planned = self._groups.plan(
            request.model,
            record.group_generation + 1,
            request.trainer.boot_id,
            reached,
            sources=max(1, request.num_sources),
        )
        plan.groups.extend(planned)
        record.group_generation = max(record.group_generation, *(group.generation for group in planned))
        used = [group.group_name for group in planned]
        abandoned = [name for name in record.groups if name not in used]
        record.groups.extend(name for name in used if name not in record.groups)
        return abandoned

    def only_model(self, target: Target) -> str:
        """Return the model of an adapter request. Raises FIELD_REQUIRED if the model is ambiguous."""
        if not target.model and len(self._roster.models) != 1:
            model_names = ", ".join(sorted(self._roster.models)) or "none"
            raise Reason.FIELD_REQUIRED.error(f"name the model; there are: {model_names}", field="header.target.model")
        return self._roster.model(target.model or next(iter(self._roster.models)), "header.target.model").record.name

    def only_updatable(self, target: Target) -> str:
        """Return the model of an update without a model name. Raises FIELD_REQUIRED if the model is ambiguous."""
        if target.model:
            return self._roster.model(target.model, "header.target.model").record.name
        updatable = [name for name, model in self._roster.models.items() if model.record.updatable]
        if len(updatable) != 1:
            raise Reason.FIELD_REQUIRED.error(
                f"the model is required; models that can be updated: {', '.join(sorted(updatable)) or 'none'}",
                field="header.target.model",
            )
        return updatable[0]

    def refuse(self, request: BeginWeightUpdateRequest) -> None:
        """Raise for an update that no state of the stages allows. Called first: no heal ends for such an update."""
        model = self._roster.model(request.model)
        if request.num_sources > MOST_SOURCES:
            raise Reason.FIELD_INVALID.error(
                f"num_sources is {request.num_sources}; the maximum is {MOST_SOURCES}", field="num_sources"
            )
        if not model.record.updatable and request.kind != UPDATE_KIND_ADAPTER:
            raise Reason.MODEL_FROZEN.error(f"{request.model} is frozen: it receives no weights", field="model")
        if request.trainer.incarnation < model.record.trainer_incarnation:
            newest = model.record.trainer_incarnation
            raise Reason.TRAINER_FENCED.error(
                f"incarnation {newest} of the trainer has updated {request.model}, this is incarnation "
                f"{request.trainer.incarnation}",
                field="trainer.incarnation",
                next_step=f"Stop this trainer. If no newer trainer runs, pass incarnation={newest} or a higher one.",
            )
        if request.kind == UPDATE_KIND_DELTA:
            _refuse_base(request.base, model.record.latest)
        staged, options = request.apply == APPLY_MODE_STAGED, request.options
        adapter = request.kind == UPDATE_KIND_ADAPTER  # always staged
        if adapter and request.rollout.max_unavailable:
            raise Reason.FIELD_CONFLICT.error(
                "an adapter is replaced at all stages at once, so its update cannot roll",
                field="rollout.max_unavailable",
                next_step="Omit rollout.max_unavailable.",
            )
        if adapter and options.after == AFTER_UPDATE_STAY_PAUSED:
            raise Reason.FIELD_CONFLICT.error(
                "the update of an adapter pauses the requests with that adapter only, until its commit",
                field="options.after",
                next_step="Omit it; PauseGeneration pauses the stages.",
            )
        if staged and not adapter and not options.pause and not options.abort_all_requests:
            raise Reason.FIELD_REQUIRED.error(
                "a staged update needs a pause mode for the requests that run at its swap",
                field="options.pause",
                next_step="Set a pause mode, for example retract.",
            )
        if request.rollout.max_unavailable and options.after == AFTER_UPDATE_STAY_PAUSED:
            raise Reason.FIELD_CONFLICT.error(
                "a rolling update resumes its stages, so they cannot stay paused", field="options.after"
            )

    def _obstacle(self, request: BeginWeightUpdateRequest, slot: Slot) -> RlctlError | None:
        """Return why a stage of the model cannot take this update, or None."""
        if request.path == DATA_PATH_IPC and not _shares_memory(request, slot):
            return Reason.NOT_COLOCATED.error(
                f"{slot.name}: not all of its ranks share memory with every source", field="path"
            )
        staged = request.apply == APPLY_MODE_STAGED and request.kind != UPDATE_KIND_ADAPTER
        if staged and not slot.capabilities.staged_apply:
            engine = slot.record.registration.engine
            return Reason.UNSUPPORTED.error(f"{slot.name}: engine {engine!r} keeps no shadow copy", field="apply")
        mode, paused = pause_mode(request), slot.report is not None and slot.report.paused
        if mode and not paused and (missing := no_pause(slot, mode, field="options.pause")):
            return missing
        if request.options.selector == WEIGHT_SELECTOR_DRAFT and not slot.capabilities.draft_model:
            return Reason.UNSUPPORTED.error(f"{slot.name} has no draft model", field="options.selector")
        if _waits_for_its_own_ranks(request, slot, _transport(request, slot)):
            return Reason.UNSUPPORTED.error(
                f"{slot.name}: during generation, NCCL collectives of its ranks and of the update could block each "
                "other; offer gloo or shared memory",
                field="transports",
            )
        transport = _transport(request, slot)
        writes = _WRITES.get(transport, "UpdateWeightsFromDistributed")
        missing = None
        if request.kind == UPDATE_KIND_ADAPTER:
            missing = unsupported(slot, "LoadAdapter") or unsupported(slot, "SealUpdate")
        if missing is None and (request.kind != UPDATE_KIND_ADAPTER or request.path != DATA_PATH_DISK):
            missing = unsupported(slot, writes)
        if missing is not None:
            return Reason.UNSUPPORTED.error(f"{slot.name} holds weights of {request.model}: {missing.message}")
        published = slot.capabilities.transports
        if transport in BACKENDS and (request.transports or published) and transport not in published:
            offered = " or ".join(BACKENDS[each] for each in request.transports or [transport] if each in BACKENDS)
            return Reason.UNSUPPORTED.error(f"{slot.name} joins no {offered} group", field="transports")
        if transport == TRANSPORT_VLLM_NCCL and (limit := _beyond_vllm(request)):
            return Reason.UNSUPPORTED.error(f"{slot.name}: vLLM's own engine takes {limit[0]}", field=limit[1])
        if request.kind == UPDATE_KIND_ADAPTER and not adapter_travels(slot, transport):
            engine, way = slot.record.registration.engine, "over a group" if transport in BACKENDS else "out of memory"
            return Reason.UNSUPPORTED.error(
                f"{slot.name}: engine {engine!r} takes no adapter {way}",
                field="path",
                next_step="Send it from a process on the same host, or save it and call LoadAdapter.",
            )
        dead_ranks = slot.dead_ranks()
        if dead_ranks:
            return Reason.RANK_LOST.error(f"{slot.name}: rank {', '.join(map(str, dead_ranks))} is gone")
        if slot.report is not None and MEMORY_TAG_WEIGHTS in slot.report.released:
            return Reason.MEMORY_RELEASED.error(f"{slot.name}: the weights are released")
        full = request.kind in (UPDATE_KIND_UNSPECIFIED, UPDATE_KIND_FULL)
        if not full and slot.state == STAGE_STATE_DIRTY:
            return Reason.WEIGHTS_DIRTY.error(f"{slot.name} is DIRTY", field="kind")
        latest = self._roster.model(request.model).record.latest
        needs_latest = request.kind in (UPDATE_KIND_DELTA, UPDATE_KIND_PARTIAL)
        field = "base" if request.kind == UPDATE_KIND_DELTA else "kind"
        if needs_latest and (slot.report is None or slot.report.weight_version != latest):
            # The tensors outside of the update would have a different version than at the other targets.
            return Reason.BASE_MISMATCH.error(f"{slot.name} is not at version {latest.label!r}", field=field)
        if needs_latest and slot.quarantine is not None:
            # The stage reports the version without proof. The new version's digest could be computed over wrong
            # weights.
            cause = slot.quarantine.message
            return Reason.BASE_MISMATCH.error(
                f"{slot.name} is possibly not at version {latest.label!r}: {cause}", field=field
            )
        return None


def pause_mode(request: BeginWeightUpdateRequest) -> PauseMode.ValueType:
    """Return the pause mode of an update. UNSPECIFIED: no pause before it is known that no requests are active."""
    # In an adapter update the stages abort only the requests that use the adapter.
    abort = request.options.abort_all_requests and request.kind != UPDATE_KIND_ADAPTER
    return request.options.pause or (PAUSE_MODE_ABORT if abort else PAUSE_MODE_UNSPECIFIED)


def _refuse_base(base: WeightVersion, latest: WeightVersion) -> None:
    """Raise unless a delta's base is the published version. The label alone may have been used before."""
    if not base.label:
        raise Reason.FIELD_REQUIRED.error("base is required for a delta", field="base.label")
    matches = base.label == latest.label and base.trainer_incarnation in (0, latest.trainer_incarnation)
    if not matches or base.sequence not in (0, latest.sequence):
        raise Reason.BASE_MISMATCH.error(
            f"the base is {base.label!r}, the published version {latest.label!r} (sequence {latest.sequence})",
            field="base",
        )


def in_progress(model: ModelState) -> RlctlError:
    """Return the refusal that names the owner of the open update."""
    return Reason.UPDATE_IN_PROGRESS.error(
        f"{model.update_owner} is updating {model.record.name} (update {model.update_id})",
        metadata={"holder": model.update_id, "owner": model.update_owner},
    )


def _version(request: BeginWeightUpdateRequest, model: ModelState) -> WeightVersion:
    """Return the version after an update: the next version, or for an adapter the latest version."""
    if request.kind == UPDATE_KIND_ADAPTER:
        return model.record.latest
    return WeightVersion(
        label=request.version,
        sequence=versions.reserved(model, 0).reserved_sequence,
        trainer_incarnation=request.trainer.incarnation,
    )


def _transport(request: BeginWeightUpdateRequest, slot: Slot) -> Transport.ValueType:
    if request.path == DATA_PATH_DISK:
        return TRANSPORT_DISK
    if request.path in (DATA_PATH_UNSPECIFIED, DATA_PATH_IPC) and _shares_memory(request, slot):
        return TRANSPORT_SHARED_MEMORY
    return _by_group(request, slot)


def _by_group(request: BeginWeightUpdateRequest, slot: Slot) -> Transport.ValueType:
    """Return the first of the sources' transports by which a target can take the update, else the first transport."""
    supported = [transport for transport in request.transports or [TRANSPORT_TORCH_GLOO] if transport in BACKENDS]
    if not supported:
        raise Reason.NOT_IMPLEMENTED.error("none of these transports is implemented", field="transports")
    offered = slot.capabilities.transports
    usable = (
        candidate
        for candidate in supported
        if candidate in offered and not _waits_for_its_own_ranks(request, slot, candidate)
    )
    return next(usable, supported[0])


def _waits_for_its_own_ranks(request: BeginWeightUpdateRequest, slot: Slot, transport: Transport.ValueType) -> bool:
    """Whether the update's NCCL collectives would run concurrently with the collectives of the target's steps."""
    single = len(slot.workers) == 1
    staged = request.apply == APPLY_MODE_STAGED or request.kind == UPDATE_KIND_ADAPTER
    return staged and not single and transport == TRANSPORT_TORCH_NCCL


def _beyond_vllm(request: BeginWeightUpdateRequest) -> tuple[str, str] | None:
    """Return the limit of vLLM's own transfer that an update exceeds, with the field, or None."""
    if request.num_sources > 1:
        return "weights from one source", "num_sources"
    if request.kind in (UPDATE_KIND_PARTIAL, UPDATE_KIND_DELTA):
        # vLLM would fill missing parts of a fused layer with arbitrary memory.
        return "full updates", "kind"
    return None


def _shares_memory(request: BeginWeightUpdateRequest, slot: Slot) -> bool:
    workers = slot.workers
    shared = all(worker.host_id and worker.host_id in request.host_ids for worker in workers)
    return shared and TRANSPORT_SHARED_MEMORY in slot.capabilities.transports
