"""The admin half of the SDK: the table's verbs, the fleet, operations. For asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypedDict, Unpack

from google.protobuf.message import Message

from rlctl.client.connection import Connection
from rlctl.contract import min_healthy
from rlctl.contract.digests import as_verified, key_of
from rlctl.contract.durations import duration
from rlctl.contract.enums import number
from rlctl.contract.errors import OperationFailed, Reason
from rlctl.contract.verbs import of_request
from rlctl.v1 import common_pb2, coordinator_pb2, update_pb2, verbs_pb2
from rlctl.v1.coordinator_pb2 import AuditRecord
from rlctl.v1.fleet_pb2 import EngineFailure, Fleet, FleetEvent, PublishedVersion, Stage
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_RUNNING, Operation, OperationState

READ_S = 30.0
ABORT_S = 60.0
HEAL_S = 300.0
DRAIN_S = 300.0
LOADS_S = 5.0
LOOK_S = 0.2
MOST_PAGE = 1000
"""Records of a page of a list."""
QUIET_LOOKS = 2
"""Consecutive polls with an idle stage that end a drain: a request may be on its way to the stage."""

COMMIT_S = 10.0
"""Longest wait of a closing fleet for updates in commit: the outcomes are known then."""


class Targets(TypedDict, total=False):
    """The arguments of every verb: targets and call settings."""

    model: str
    slots: Sequence[str]
    stages: Sequence[str]
    timeout_s: float | None
    request_id: str
    validate_only: bool
    check: bool


class Publishing(Protocol):
    """The interface of a publisher, so that this module does not import :mod:`rlctl.trainer`."""

    async def committed(self) -> None:
        """Wait for the end of an update in commit, if the publisher has such an update."""


class AsyncAdmin:
    """Administers a fleet through the coordinator.

    Verbs return the ``Operation`` if every target confirmed. Otherwise they raise
    :class:`rlctl.contract.errors.OperationFailed` with the operation. ``model``, ``slots`` and ``stages`` name the
    targets; no targets: every stage.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._publishers: weakref.WeakSet[Publishing] = weakref.WeakSet()

    def publishes(self, publisher: Publishing) -> None:
        """Register a publisher that makes updates over this connection."""
        self._publishers.add(publisher)

    async def committed(self) -> None:
        """Wait for the ends of updates in commit, 10 s at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMIT_S):
                await asyncio.gather(*(publisher.committed() for publisher in self._publishers))

    # Verbs.

    async def call(
        self,
        request: Message,
        *,
        model: str = "",
        slots: Sequence[str] = (),
        stages: Sequence[str] = (),
        timeout_s: float | None = None,
        request_id: str = "",
        validate_only: bool = False,
        check: bool = True,
    ) -> Operation:
        """Call any verb of the table with its request message. The message is not changed.

        ``timeout_s`` bounds the operation (None: the verb's default). A repeat with the same ``request_id`` returns the
        recorded result. Without an id, here or in the request's header, every call is new. ``check=False`` returns
        operations that did not end OK instead of raising.
        """
        verb, original = of_request(request), request
        request = type(original)()
        request.CopyFrom(original)
        header: common_pb2.RequestHeader = request.header  # type: ignore[attr-defined]
        if model or slots or stages:
            header.target.CopyFrom(common_pb2.Target(model=model, slots=_listed(slots), stages=_listed(stages)))
        if timeout_s is not None:
            header.timeout.CopyFrom(duration(timeout_s))
        header.request_id = request_id or header.request_id
        header.validate_only = validate_only
        wait_s = verb.deadline_s if timeout_s is None else max(0.0, timeout_s)
        operation: Operation = await self.connection.call(verb.name, request, wait_s)
        if check and operation.state not in (OPERATION_STATE_OK, OPERATION_STATE_RUNNING):
            raise OperationFailed(operation)
        return operation

    async def pause_generation(
        self,
        mode: str = "abort",
        *,
        by: str = "",
        reason: str = "",
        ttl_s: float | None = None,
        adapter: str = "",
        **targets: Unpack[Targets],
    ) -> Operation:
        """Stop generation. Modes: abort, retract, in_place, drain.

        ``by``, ``reason``: shown while the pause is in force. ``ttl_s``: seconds after which the pause ends by itself.
        ``adapter``: stop the requests with this adapter only.
        """
        value = number(common_pb2.PauseMode.DESCRIPTOR, mode, "mode")
        request = verbs_pb2.PauseGenerationRequest(
            mode=value,  # type: ignore[arg-type]
            by=by,
            reason=reason,
            adapter=adapter,
        )
        if ttl_s is not None:
            request.ttl.CopyFrom(duration(ttl_s))
        return await self.call(request, **targets)

    async def continue_generation(self, *, adapter: str = "", **targets: Unpack[Targets]) -> Operation:
        """Start generation again; ``adapter``: of the requests with this adapter, if paused by name."""
        return await self.call(verbs_pb2.ContinueGenerationRequest(adapter=adapter), **targets)

    async def abort_requests(
        self, rids: Sequence[str] = (), *, abort_all: bool = False, **targets: Unpack[Targets]
    ) -> Operation:
        """Abort requests. An aborted request returns the tokens generated so far."""
        return await self.call(verbs_pb2.AbortRequestsRequest(rids=_listed(rids), abort_all=abort_all), **targets)

    async def flush_cache(self, *, idle_timeout_s: float | None = None, **targets: Unpack[Targets]) -> Operation:
        """Empty the KV caches. ``idle_timeout_s``: longest wait for requests to end; None: no wait."""
        wait = None if idle_timeout_s is None else duration(idle_timeout_s)
        return await self.call(verbs_pb2.FlushCacheRequest(idle_timeout=wait), **targets)

    async def release_memory(
        self, tags: Sequence[str] = (), *, keep_weights: bool = False, **targets: Unpack[Targets]
    ) -> Operation:
        """Release memory regions: kv_cache, weights, cuda_graph; no tags: all.

        ``keep_weights``: the resume restores the weights' content, so that stages serve without an update.
        """
        request = verbs_pb2.ReleaseMemoryRequest(tags=_tags(tags), keep_weights=keep_weights)
        return await self.call(request, **targets)

    async def resume_memory(self, tags: Sequence[str] = (), **targets: Unpack[Targets]) -> Operation:
        """Allocate released memory regions again; no tags: all."""
        return await self.call(verbs_pb2.ResumeMemoryRequest(tags=_tags(tags)), **targets)

    async def check_weights(
        self,
        action: str = "checksum",
        *,
        expected_digest: str = "",
        per_tensor: bool = False,
        digest: str = "",
        **targets: Unpack[Targets],
    ) -> Operation:
        """Digest weights. Actions: checksum, snapshot, reset_tensors, compare. ``digest``: sha256 or as_verified.

        The default of ``digest`` is as_verified for a checksum with neither expected_digest nor per_tensor. Otherwise
        it is the function of expected_digest, or sha256.
        """
        request = verbs_pb2.CheckWeightsRequest(
            action=number(verbs_pb2.CheckAction.DESCRIPTOR, action, "action"),  # type: ignore[arg-type]
            expected_digest=expected_digest,
            per_tensor=per_tensor,
            digest=number(verbs_pb2.DigestFunction.DESCRIPTOR, digest, "digest"),  # type: ignore[arg-type]
        )
        as_verified(request)
        return await self.call(request, **targets)

    async def update_weights_from_disk(
        self,
        model_path: str,
        *,
        version: str = "",
        options: verbs_pb2.UpdateOptions | None = None,
        expected_digest: str = "",
        apply: verbs_pb2.ApplyMode.ValueType = verbs_pb2.APPLY_MODE_UNSPECIFIED,
        max_unavailable: int = 0,
        target_modules: Sequence[str] = (),
        **targets: Unpack[Targets],
    ) -> Operation:
        """Load a checkpoint at every target, a whole update in a single call. ``model_path``: path at the engines.

        ``max_unavailable``: staged updates only; number of targets that swap at the same time, 0 for all.
        ``target_modules``: load only the tensors of these modules, as a partial update; the rest stays.
        """
        request = verbs_pb2.UpdateWeightsFromDiskRequest(
            model_path=model_path,
            weight_version=version,
            options=options,
            expected_digest=expected_digest,
            apply=apply,
            max_unavailable=max_unavailable,
            target_modules=_listed(target_modules),
        )
        return await self.call(request, **targets)

    # Adapters.

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        version: str = "",
        pinned: bool = False,
        abort_requests: bool = False,
        **targets: Unpack[Targets],
    ) -> Operation:
        """Load a LoRA adapter in PEFT's format at every stage of a model, or replace the adapter of that name.

        ``path`` is the path at the engines. ``abort_requests``: abort the requests with the old adapter instead of
        refusing.
        """
        request = verbs_pb2.LoadAdapterRequest(
            name=name, path=path, version=version, pinned=pinned, abort_requests=abort_requests
        )
        return await self.call(request, **targets)

    async def unload_adapter(self, name: str, *, abort_requests: bool = False, **targets: Unpack[Targets]) -> Operation:
        """Unload an adapter at every stage of a model. Raises ADAPTER_NOT_FOUND."""
        return await self.call(verbs_pb2.UnloadAdapterRequest(name=name, abort_requests=abort_requests), **targets)

    async def list_adapters(self, **targets: Unpack[Targets]) -> Operation:
        """Return the adapters of every rank."""
        return await self.call(verbs_pb2.ListAdaptersRequest(), **targets)

    # The fleet and its operations.

    async def status(self, model: str = "") -> Fleet:
        """Return the present state of the fleet at the coordinator."""
        fleet: Fleet = await self.connection.call("GetFleet", coordinator_pb2.GetFleetRequest(model=model), READ_S)
        return fleet

    async def watch(self, model: str = "") -> AsyncIterator[FleetEvent]:
        """Yield a snapshot of the fleet, then every change."""
        async for event in self.connection.stream("WatchFleet", coordinator_pb2.WatchFleetRequest(model=model)):
            yield event

    async def backup_journal(self) -> AsyncIterator[bytes]:
        """Yield the coordinator's journal, an SQLite file, in parts. Without an error the file is complete."""
        async for part in self.connection.stream("BackupJournal", coordinator_pb2.BackupJournalRequest()):
            yield part.data

    async def operation(self, operation_id: str) -> Operation:
        """Return the present state of an operation."""
        request = coordinator_pb2.GetOperationRequest(operation_id=operation_id)
        operation: Operation = await self.connection.call("GetOperation", request, READ_S)
        return operation

    async def operations(self, *, verb: str = "", state: str = "", page_size: int = 50) -> list[Operation]:
        """Return the newest operations, newest first. States: running, ok, partial, failed, unknown, cancelled."""
        value = number(OperationState.DESCRIPTOR, state, "state")
        request = coordinator_pb2.ListOperationsRequest(verb=verb, state=value, page_size=page_size)  # type: ignore[arg-type]
        return list((await self.connection.call("ListOperations", request, READ_S)).operations)

    async def audit(
        self, *, principal: str = "", denied: bool = False, since_s: float | None = None, limit: int = 50
    ) -> list[AuditRecord]:
        """Return changes and denied calls with callers, newest first.

        ``since_s``: age limit in seconds. ``limit``: number of records; 0: all.
        """
        request = coordinator_pb2.ListAuditRecordsRequest(principal=principal, denied=denied)
        if since_s is not None:
            request.since.FromNanoseconds(time.time_ns() - round(since_s * 1e9))
        records: list[AuditRecord] = []
        while True:
            request.page_size = min(limit - len(records), MOST_PAGE) if limit else MOST_PAGE
            answer = await self.connection.call("ListAuditRecords", request, READ_S)
            records += answer.records
            request.page_token = answer.next_page_token
            if not request.page_token or (limit and len(records) >= limit):
                return records

    async def cancel_operation(self, operation_id: str) -> Operation:
        """Cancel the commands of an operation that have not started."""
        request = coordinator_pb2.CancelOperationRequest(operation_id=operation_id)
        operation: Operation = await self.connection.call("CancelOperation", request, READ_S)
        return operation

    async def abort_update(self, update_id: str, *, reason: str = "") -> Operation:
        """Abort an open weight update of any owner, without a version. Targets past the first byte become DIRTY."""
        request = update_pb2.AbortWeightUpdateRequest(update_id=update_id, reason=reason)
        operation: Operation = await self.connection.call("AbortWeightUpdate", request, ABORT_S)
        return operation

    async def heal(
        self,
        slots: Sequence[str] = (),
        *,
        checkpoint: str = "",
        timeout_s: float | None = None,
        validate_only: bool = False,
        check: bool = True,
    ) -> Operation:
        """Bring stages to the published version without the trainer; no slots: every stage that is STALE or DIRTY.

        ``checkpoint``: directory to read instead of the version's own checkpoint, as a path at the engines.
        """
        request = coordinator_pb2.HealStageRequest(slots=_listed(slots), checkpoint=checkpoint)
        request.header.validate_only = validate_only
        if timeout_s is not None:
            request.header.timeout.CopyFrom(duration(timeout_s))
        operation: Operation = await self.connection.call("HealStage", request, timeout_s or HEAL_S)
        if check and operation.state != OPERATION_STATE_OK:
            raise OperationFailed(operation)
        return operation

    async def set_enabled(
        self,
        slots: Sequence[str],
        enabled: bool,
        *,
        reason: str = "",
        force: bool = False,
        validate_only: bool = False,
    ) -> Fleet:
        """Enable or disable stages for routing. ``reason``: shown while the stages are disabled.

        Raises MIN_HEALTHY for a disable that leaves fewer stages routable than the model's ``min_healthy``, unless
        ``force``.
        """
        request = coordinator_pb2.SetStageEnabledRequest(
            slots=_listed(slots), enabled=enabled, reason=reason, force=force
        )
        request.header.validate_only = validate_only
        fleet: Fleet = await self.connection.call("SetStageEnabled", request, READ_S)
        return fleet

    async def versions(self, model: str) -> list[PublishedVersion]:
        """Return the published versions of a model, latest first."""
        request = coordinator_pb2.ListVersionsRequest(model=model)
        answer: coordinator_pb2.ListVersionsResponse = await self.connection.call("ListVersions", request, READ_S)
        return list(answer.versions)

    async def rollback(
        self,
        model: str,
        version: str = "",
        *,
        options: verbs_pb2.UpdateOptions | None = None,
        timeout_s: float | None = None,
        validate_only: bool = False,
        check: bool = True,
    ) -> Operation:
        """Publish an earlier version of a model again, from the checkpoint, under the old label and a new sequence.

        ``version``: LABEL, LABEL#SEQUENCE or #SEQUENCE; "": the version before the latest. The weights must have the
        recorded digest, if the record has one. Raises FIELD_INVALID for a version that is not on record, or that is the
        latest; UNHEALABLE for a version without a checkpoint or with a keyed digest, since checkpoints are compared by
        SHA-256 only; and as :meth:`update_weights_from_disk`.
        """
        record = chosen(model, await self.versions(model), version)
        return await self.update_weights_from_disk(
            record.checkpoint,
            version=record.version.label,
            expected_digest=record.model_digest,
            options=options,
            model=model,
            timeout_s=timeout_s,
            validate_only=validate_only,
            check=check,
        )

    async def busy(self, slots: Sequence[str]) -> dict[str, str]:
        """Return the reason why each stage is busy, by slot; {} if all stages are idle.

        Reasons are requests, an open update of the model, and a stage that does not answer. A failed engine is idle. So
        is a stage without a link once its serving lease has ended: it serves nothing. Raises STAGE_NOT_FOUND.
        """
        slots = _listed(slots)
        fleet = await self.status()
        updates = {model.name for model in fleet.models if model.update_id}
        stages = {stage.registration.slot: stage for stage in fleet.stages}
        operation = await self.call(verbs_pb2.GetLoadsRequest(), slots=slots, timeout_s=LOADS_S, check=False)
        results = {result.slot: result for result in operation.stage_results}
        busy = {}
        for slot in slots:
            stage, loads = (
                stages.get(slot),
                [rank.loads for rank in results[slot].rank_results if rank.HasField("loads")],
            )
            requests = sum(load.running + load.waiting for load in loads)
            if stage is not None and stage.registration.model in updates:
                busy[slot] = f"an update of {stage.registration.model} is open"
            elif stage is not None and _serves_nothing(stage):
                continue
            elif not loads:
                why = results[slot].error.message or "it does not report its load"
                busy[slot] = f"its load is unknown: {why}"
            elif requests:
                busy[slot] = "1 request runs or waits" if requests == 1 else f"{requests} requests run or wait"
        return busy

    async def drain(
        self,
        slots: Sequence[str],
        *,
        reason: str = "",
        force: bool = False,
        timeout_s: float = DRAIN_S,
        on_busy: Callable[[dict[str, str]], object] = lambda _: None,
    ) -> Fleet:
        """Disable stages, and wait until all are idle; no request is aborted. Returns the fleet.

        ``on_busy`` is called with the result of every poll (:meth:`busy`). Raises DEADLINE_EXCEEDED for stages that are
        still busy; they stay disabled. Raises MIN_HEALTHY as :meth:`set_enabled`.
        """
        loop = asyncio.get_running_loop()
        deadline, busy, idle_count = loop.time() + timeout_s, dict[str, str](), 0
        await self.set_enabled(slots, False, reason=reason, force=force)
        while idle_count < QUIET_LOOKS:
            if loop.time() > deadline:
                causes = "; ".join(f"{slot}: {why}" for slot, why in busy.items()) or "polled too few times"
                raise Reason.DEADLINE_EXCEEDED.error(
                    f"not idle after {timeout_s:g} s: {causes}",
                    next_step="The stages stay disabled. `rlctl drain` waits; `rlctl abort --slot SLOT` ends requests.",
                )
            busy = await self.busy(slots)
            on_busy(busy)
            idle_count = 0 if busy else idle_count + 1
            await asyncio.sleep(LOOK_S)
        return await self.status()

    async def deregister(self, slot: str, *, boot_id: str = "", force: bool = False) -> None:
        """Remove a slot from the roster. A stage that still fills the slot registers again by itself.

        ``boot_id``: remove only if this process fills the slot; "": the process that fills the slot at the call.
        ``force``: also if the slot is a target of an open update, or if fewer stages than the model's ``min_healthy``
        remain routable. Raises INCARNATION_FENCED if another process fills the slot.
        """
        if not boot_id:
            # A repeat after a lost answer must not remove a process that has registered since.
            registrations = [stage.registration for stage in (await self.status()).stages]
            boot_id = next((each.boot_id for each in registrations if each.slot == slot), "")
        request = coordinator_pb2.DeregisterStageRequest(slot=slot, boot_id=boot_id, force=force)
        await self.connection.call("DeregisterStage", request, READ_S)

    async def report_engine_failure(self, slot: str, failure: EngineFailure) -> None:
        """Report the failure that left a slot empty, as the launcher of the engine."""
        request = coordinator_pb2.ReportEngineFailureRequest(slot=slot, failure=failure)
        await self.connection.call("ReportEngineFailure", request, READ_S)

    async def admit(
        self, slots: Sequence[str], dismissed: Sequence[str] = (), *, validate_only: bool = False
    ) -> coordinator_pb2.AdmitSlotsResponse:
        """Admit slots beyond the topology of a fleet that `rlctl up` started, and dismiss other slots."""
        request = coordinator_pb2.AdmitSlotsRequest(slots=_listed(slots), dismissed=_listed(dismissed))
        request.header.validate_only = validate_only
        answer: coordinator_pb2.AdmitSlotsResponse = await self.connection.call("AdmitSlots", request, READ_S)
        return answer

    async def take_over(self, slots: Sequence[str], *, validate_only: bool = False) -> Fleet:
        """Take over stages that obey the coordinator of a different fleet."""
        request = coordinator_pb2.TakeOverStagesRequest(slots=_listed(slots))
        request.header.validate_only = validate_only
        fleet: Fleet = await self.connection.call("TakeOverStages", request, READ_S)
        return fleet

    async def set_healing(self, model: str, *, by_hand: bool) -> Fleet:
        """Heal a model's stages automatically, or only on request (``by_hand``), until the coordinator restarts."""
        request = coordinator_pb2.SetHealingRequest(model=model, by_hand=by_hand)
        fleet: Fleet = await self.connection.call("SetHealing", request, READ_S)
        return fleet

    async def set_min_healthy(self, model: str, limit: str, *, validate_only: bool = False) -> Fleet:
        """Set the number of a model's stages that voluntary disruptions leave routable: "2", "50%", or "0" for none.

        Raises FIELD_INVALID, MODEL_NOT_FOUND.
        """
        request = coordinator_pb2.SetMinHealthyRequest(model=model, min_healthy=min_healthy.parse(limit))
        request.header.validate_only = validate_only
        fleet: Fleet = await self.connection.call("SetMinHealthy", request, READ_S)
        return fleet


def _serves_nothing(stage: Stage) -> bool:
    """Whether no request can run: the engine has failed, or the link is lost and the serving lease has ended."""
    if stage.state == common_pb2.STAGE_STATE_UNREACHABLE:
        return stage.HasField("report") and not stage.report.lease_held
    return stage.state == common_pb2.STAGE_STATE_FAILED


def chosen(model: str, versions: Sequence[PublishedVersion], wanted: str) -> PublishedVersion:
    """Return the version for a rollback. ``versions``: latest first. Raises as :meth:`AsyncAdmin.rollback`."""
    label, mark, number = wanted.partition("#")
    earlier = [
        each
        for each in versions[1:]
        if not wanted or (label in ("", each.version.label) and (not mark or number == str(each.version.sequence)))
    ]
    checkpoints = [each for each in versions[1:] if each.checkpoint and not key_of(each.model_digest)]
    readable = ", ".join(f"{each.version.label}#{each.version.sequence}" for each in checkpoints) or "none"
    if not earlier:
        raise Reason.FIELD_INVALID.error(
            f"{model} has had no earlier version {wanted!r}" if wanted else f"{model} has had no earlier version",
            field="version",
            next_step=f"`rlctl versions --model {model}` lists them; versions with a checkpoint: {readable}.",
        )
    version = earlier[0]
    if not version.checkpoint:
        raise Reason.UNHEALABLE.error(
            f"version {version.version.label}#{version.version.sequence} of {model} has no checkpoint",
            field="version",
            next_step=f"Versions with a checkpoint: {readable}. The trainer can send this version again.",
        )
    if key_of(version.model_digest):
        raise Reason.UNHEALABLE.error(
            f"version {version.version.label}#{version.version.sequence} of {model} has a keyed digest, and "
            "checkpoints are compared by SHA-256 only",
            field="version",
            next_step=f"`rlctl weights update --model-path {version.checkpoint}` publishes the checkpoint as it is.",
        )
    return version


def _tags(tags: Sequence[str]) -> Any:
    return [number(common_pb2.MemoryTag.DESCRIPTOR, tag, "tags") for tag in _listed(tags)]


def _listed(texts: Sequence[str]) -> Sequence[str]:
    """Return a sequence of texts. A single text is an entry, not a sequence of characters."""
    return [texts] if isinstance(texts, str) else texts
