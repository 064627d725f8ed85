"""Implicit updates: weight updates of clients that do not name updates.

Trainers that use the HTTP interface of SGLang, slime or vLLM know pauses and buckets, not updates. Their writes under a
pause, or after a begin without an id, are one update of the model. Such an update is journaled, leased and fenced like
any update. The client's end of the update, a version that the client sets, or a continue commits it, whichever comes
first.

A write outside of a pause is a whole update. A write under a pause belongs to a full update unless the client requests
a different kind: a continue must not publish half of an update that a trainer has abandoned. The end of an update that
the client has begun may leave tensors out (``may_be_partial`` and ``partial``).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.contract.outcomes import acknowledged, blame, to_blame
from rlctl.contract.verbs import of_request
from rlctl.coordinator.fleet import versions
from rlctl.coordinator.fleet.slot import Slot, names
from rlctl.coordinator.operations.call_coalescing import Joined
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.transaction.planner import Planner, in_progress
from rlctl.coordinator.transaction.rename_version import relabel
from rlctl.coordinator.transaction.transfer import Transfer, Write
from rlctl.coordinator.transaction.update import Update
from rlctl.coordinator.updates.group_formation import Gathering
from rlctl.coordinator.updates.manager import Updates, vet_implicit
from rlctl.coordinator.updates.written_tensors import WrittenTensors, names_of, reader_of
from rlctl.v1.common_pb2 import STAGE_STATE_ASLEEP, Target
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_PARTIAL, Operation
from rlctl.v1.update_pb2 import (
    DATA_PATH_BROADCAST,
    DATA_PATH_IPC,
    BeginWeightUpdateRequest,
    BeginWeightUpdateResponse,
    CommitWeightUpdateRequest,
    Trainer,
)
from rlctl.v1.verbs_pb2 import (
    UPDATE_KIND_FULL,
    UPDATE_KIND_PARTIAL,
    UPDATE_KIND_UNSPECIFIED,
    GetModelInfoRequest,
    InitWeightsUpdateGroupRequest,
    UpdateKind,
    UpdateOptions,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
)

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""Time after the last write, in seconds, after which an implicit update without further calls is aborted."""

STORE_S = 60.0
"""Wait for the store of a client's group to listen, in seconds. Trainers call the engines first."""

ASK_S = 10.0

OWNER = "a client that names no update"


class Implicit:
    """The implicit updates of all models, and the coalesced calls of their clients."""

    def __init__(self, context: Context, updates: Updates, planner: Planner, transfer: Transfer) -> None:
        self._context = context
        self._roster = context.roster
        self._operations = context.operations
        self._clock = context.clock
        self._planner = planner
        self._transfer = transfer
        self._updates = updates
        self.joining = updates.joining
        self._gathering = Gathering(self.joining)
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By model: only one update of a model is begun at a time."""
        self._came: dict[str, WrittenTensors] = {}
        """Tensors written so far, by update."""
        self._unended: dict[str, Run] = {}
        """By model: a client's update that a version or a continue has committed before the client's end."""

    async def run(self, request: Message, timeout_s: float, start: Callable[[], Coroutine[Any, Any, Run]]) -> Joined:
        """Return the operation of a verb, or the operation that the verb is part of.

        ``start``: accepts the request as one for the whole model.
        """
        header = request.header  # type: ignore[attr-defined]
        model = self._model(header.target, header.for_slot)
        header.target.CopyFrom(Target(model=model))
        engines = self._engines(model)
        match request:
            case InitWeightsUpdateGroupRequest():
                engine = self._roster.slot(header.for_slot, "header.for_slot")

                async def form(group: InitWeightsUpdateGroupRequest) -> Run:
                    joining = [self._roster.slot(name) for name in sorted(member.slot for member in group.members)]

                    async def join(run: Run) -> None:
                        await self._transfer.join_group(group, joining, run, timeout_s, patient_s=STORE_S)

                    return await self._operations.start(
                        request, verb="InitWeightsUpdateGroup", targets=joining, excluded=[], work=join,
                        exclusive=False, model=model,
                    )  # fmt: skip

                return await self._gathering.run(request, engine, self._targets, form, timeout_s)
            case UpdateWeightsFromDistributedRequest() | UpdateWeightsFromTensorRequest():
                write = functools.partial(self._write, request, model, timeout_s)
                reader = reader_of(request)
                return await self.joining.run(request, model, [reader] if reader else engines, write)
        return await self.joining.run(request, model, engines, start)

    async def answer(self, joined: Joined, *, wait: bool = True) -> Operation:
        """Return the operation of a call as :meth:`Run.answer`, and record that the call has an answer."""
        answer = await joined.run.answer(replayed=joined.replayed, wait=wait)
        self.joining.answered(joined)
        return answer

    # Open.

    async def begin(self, request: BeginWeightUpdateRequest, timeout_s: float | None) -> BeginWeightUpdateResponse:
        """Open an implicit update, or confirm an open update without writes. Raises UPDATE_IN_PROGRESS."""
        begin = BeginWeightUpdateRequest()
        begin.CopyFrom(request)
        begin.model = self._model(Target(model=request.model), request.header.for_slot)
        async with self._opening[begin.model]:
            existing = self._operations.known(request.header.request_id, request)
            if existing is not None:
                return self._updates.get(existing.operation.update_id).record.plan
            update = self._updates.implicit_of(begin.model)
            if update is None or not self._takes_writes(update) or update.written:
                if update is not None and self._takes_writes(update) and not request.header.validate_only:
                    self._came[update.update_id].contested = True
                if request.header.validate_only:
                    return (await self._updates.begin_validated(self._complete(begin), vet_implicit)).record.plan
                update = await self._open(begin, timeout_s, request=request)
            elif not request.header.validate_only:
                update.owner.renew(self._clock.now())
                await self._operations.join(update.run, request)
        return update.record.plan

    async def _open(
        self, begin: BeginWeightUpdateRequest, timeout_s: float | None, request: Message | None = None
    ) -> Update:
        reference = await self._partial_reference(begin) if begin.may_be_partial and not begin.kind else None
        begin.kind = begin.kind if reference is None else UPDATE_KIND_PARTIAL
        self._complete(begin)
        update = await self._updates.begin_implicit(begin, timeout_s, request=request)
        self._came = {key: tensors for key, tensors in self._came.items() if self._updates.is_open(key)}
        self._came[update.update_id] = WrittenTensors(reference)
        self._unended.pop(begin.model, None)
        return update

    async def _partial_reference(self, begin: BeginWeightUpdateRequest) -> set[str] | None:
        """Return every tensor of the model if its stages can take a partial update. None: the update must be full."""
        partial = BeginWeightUpdateRequest()
        partial.CopyFrom(begin)
        partial.kind = UPDATE_KIND_PARTIAL
        try:
            targets, _, _ = self._planner.targets(self._complete(partial))
            return await self._reference(targets) or None if targets else None
        except RlctlError as error:
            log.info("the next update of %s must be full: %s", begin.model, error.message)
            return None

    def _complete(self, begin: BeginWeightUpdateRequest) -> BeginWeightUpdateRequest:
        """Set the fields that such a client does not send. Returns the request."""
        model = self._roster.model(begin.model)
        begin.implicit = True
        begin.path = begin.path or DATA_PATH_BROADCAST
        begin.kind = begin.kind or UPDATE_KIND_FULL
        begin.version = begin.version or f"update-{versions.reserved(model, 0).reserved_sequence}"
        if not begin.HasField("lease_ttl"):
            begin.lease_ttl.CopyFrom(duration(LEASE_S))
        begin.trainer.MergeFrom(Trainer(name=begin.trainer.name or OWNER, incarnation=model.record.trainer_incarnation))
        return begin

    # Write.

    async def _write(self, request: Write, model: str, timeout_s: float) -> Run:
        async with self._opening[model]:
            update = self._updates.implicit_of(model)
            if update is None:
                if self._roster.models[model].update_id:
                    raise in_progress(self._roster.models[model])
                targets = self._targets(model)
                begin = BeginWeightUpdateRequest(
                    model=model, version=request.weight_version, kind=request.kind, options=request.options
                )
                _by_path(begin, request, targets)
                if not any(map(_paused_by_name, targets)):
                    _refuse_part(request, targets)
                    return await self._alone(begin, request, targets, timeout_s)
                update = await self._open(begin, None)
            else:
                self._refuse(update, request)
        return await self._into(update, request, timeout_s)

    async def _alone(
        self, begin: BeginWeightUpdateRequest, request: Write, targets: list[Slot], timeout_s: float
    ) -> Run:
        """Carry out a write that is a whole update."""
        if begin.kind == UPDATE_KIND_UNSPECIFIED:
            begin.kind = await self._kind(request, targets)
        begin.header.request_id = request.header.request_id
        self._complete(begin)
        body = type(request).FromString(request.SerializeToString())
        WrittenTensors().number(body)

        async def content(update: Update) -> None:
            body.header.fence.update_id = update.update_id
            await self._transfer.receive(update, body, update.run, timeout_s)
            update.owner.decide()

        verb = of_request(request).name
        # The record of the operation has the hash of the request as received.
        received = type(request).FromString(request.SerializeToString())
        return (await self._updates.begin_implicit(begin, timeout_s, request=received, verb=verb, content=content)).run

    async def _kind(self, request: Write, targets: list[Slot]) -> UpdateKind.ValueType:
        """Return FULL for a write with every parameter of the model. Engines without a list decide themselves."""
        return UPDATE_KIND_FULL if await self._reference(targets) <= names_of(request) else UPDATE_KIND_PARTIAL

    async def _reference(self, targets: list[Slot]) -> set[str]:
        """Return every tensor that the first target lists, empty if its engine lists no tensors."""
        [result] = await self._context.fanout.run(
            GetModelInfoRequest(reference=True),
            targets[:1],
            operation_id=self._clock.new_id(),
            step="reference",
            deadline=self._clock.now() + ASK_S,
        )
        if not acknowledged(result, update=False):
            raise blame(result)
        return {tensor.name for rank in result.rank_results for tensor in rank.model_info.reference}

    def _takes_writes(self, update: Update) -> bool:
        """Whether further writes may join an update: not decided, and not a whole update of a single write."""
        return update.update_id in self._came and not update.owner.decided.is_set()

    def _refuse(self, update: Update, request: Write) -> None:
        """Raise for a write that does not fit into the open update."""
        begin = update.record.request
        if not self._takes_writes(update):
            raise in_progress(update.model)
        tensors = self._came[update.update_id]
        tensors.announce(request)
        tensors.refuse_other_kind(request, begin.kind)
        proposed = BeginWeightUpdateRequest()
        _by_path(proposed, request, update.targets)
        if proposed.path == begin.path and list(proposed.host_ids) == list(begin.host_ids):
            return
        if update.written:
            raise Reason.FIELD_CONFLICT.error("an update receives tensors over groups or from memory, not both")
        begin.path = proposed.path
        begin.host_ids[:] = proposed.host_ids
        self._planner.plan_path(update.record.plan, begin, update.targets)

    async def _into(self, update: Update, request: Write, timeout_s: float) -> Run:
        """Carry out a write as a part of the open update, and renew the lease."""
        tensors = self._came[update.update_id]
        body = type(request).FromString(request.SerializeToString())
        body.header.fence.update_id = update.update_id
        tensors.announce(request)
        tensors.refuse_other_source(body)
        added = tensors.number(body)
        update.owner.renew(self._clock.now())

        async def work(run: Run) -> None:
            if request.weight_version:
                update.record.plan.version.label = request.weight_version
            options = update.record.request.options
            options.flush_cache = _flushes(options) or _flushes(request.options)
            try:
                await self._transfer.receive(update, body, run, timeout_s)
            finally:
                update.owner.renew(self._clock.now())
                failed = [result for result in run.operation.stage_results if not acknowledged(result, update=True)]
                if update.broken:
                    # No client can retry by update id. The next write opens a new update.
                    update.owner.decide(verdict=blame(to_blame(failed)) if failed else Reason.GROUP_FAILED.error())
                    await update.run.ended.wait()
                elif failed:
                    tensors.forget(body, added)
                elif run.operation.stage_results:
                    tensors.done(body, {slot.name for slot in update.targets})

        try:
            return await self._operations.start(
                request,
                verb=of_request(request).name,
                targets=self._updates.targets(update.update_id, request),
                excluded=[],
                work=work,
                exclusive=False,
                model=update.model.record.name,
                update_id=update.update_id,
            )
        except BaseException:
            tensors.take_back(body, added)
            raise

    # End.

    async def commit(self, request: CommitWeightUpdateRequest) -> Joined:
        """Commit the open implicit update of a model. Without an open update, relabel the published version.

        Raises UPDATE_NOT_FOUND.
        """
        model = self._model(request.header.target, request.header.for_slot)
        request.header.target.CopyFrom(Target(model=model))
        commit = functools.partial(self._commit, request, model)
        return await self.joining.run(request, model, self._engines(model), commit)

    async def _commit(self, request: CommitWeightUpdateRequest, model: str) -> Run:
        update = self._updates.implicit_of(model)
        if update is not None:
            return await self._end(update, request)
        if self._roster.models[model].update_id:
            raise in_progress(self._roster.models[model])
        if not request.version:
            unfinished = self._unended.get(model)
            if request.partial and unfinished is not None and self._is_latest(unfinished, model):
                return unfinished
            raise Reason.UPDATE_NOT_FOUND.error(f"no implicit update of {model} is open")
        return await relabel(request, model, self._context)

    def _is_latest(self, run: Run, model: str) -> bool:
        """Whether an update has published the model's latest version."""
        published = run.operation.weight_version.sequence
        return bool(published) and published == self._roster.models[model].record.latest.sequence

    async def _end(self, update: Update, request: CommitWeightUpdateRequest) -> Run:
        async with update.requests.all_turns():  # running writes are part of the update
            if request.version and not update.owner.decided.is_set():
                update.record.plan.version.label = request.version
            if update.record.request.may_be_partial and not request.partial:
                self._unended[update.model.record.name] = update.run
            if not self._refuse_incomplete(update, partial=request.partial):
                self._updates.decide(update, request)
        return update.run

    def _refuse_incomplete(self, update: Update, *, partial: bool) -> bool:
        """Decide an update against its version if tensors are missing. Returns whether tensors are missing.

        Engines that were prepared for a full update check for missing tensors themselves.
        """
        tensors = self._came.get(update.update_id)
        if tensors is None or not update.written or update.owner.decided.is_set():
            return False
        error = tensors.uneven({slot.name for slot in update.targets}) or tensors.incomplete(partial=partial)
        if error is not None:
            update.owner.decide(verdict=error)
        elif tensors.reference is None:
            return False
        elif tensors.whole:
            update.record.request.kind = UPDATE_KIND_FULL
        else:
            log.info("update %s of %s is partial", update.update_id, update.model.record.name)
        return error is not None

    async def settle(self, targets: Iterable[Slot]) -> None:
        """Commit the open implicit updates of stages before generation continues or memory is resumed.

        An update without writes is dropped. Raises the cause if an update was not published.
        """
        for model in sorted({slot.model for slot in targets}):
            update = self._updates.implicit_of(model)
            if update is None:
                continue
            if not update.written:
                update.owner.decide(verdict=Reason.CANCELLED.error("generation continues, and nothing was written"))
                await update.run.ended.wait()
                continue
            run = await self._end(update, CommitWeightUpdateRequest())
            await run.ended.wait()
            if run.operation.state not in (OPERATION_STATE_OK, OPERATION_STATE_PARTIAL):
                error = from_detail(run.operation.error)
                error.message = f"update {run.operation.operation_id} was not published: {error.message}"
                raise error

    def flushed_in(self, targets: Sequence[Slot]) -> str:
        """Return the open update that a flush of targets is a step of, or "". The client does not name updates.

        verl flushes after the last write.
        """
        models = {slot.model for slot in targets}
        update = self._updates.implicit_of(models.pop()) if len(models) == 1 else None
        if update is None or update.owner.decided.is_set():
            return ""
        return update.update_id if set(names(targets)) <= set(names(update.targets)) else ""

    def _engines(self, model: str) -> list[str]:
        return [slot.name for slot in self._roster.slots.values() if slot.model == model]

    def _targets(self, model: str) -> list[Slot]:
        return self._roster.select(Target(model=model))[0]

    def _model(self, target: Target, for_slot: str) -> str:
        if not for_slot:
            return self._planner.only_updatable(target)
        model = self._roster.slot(for_slot, "header.for_slot").model
        if target.model not in ("", model):
            raise Reason.FIELD_CONFLICT.error(f"{for_slot} serves {model}, not {target.model}", field="header.for_slot")
        return model


def _paused_by_name(slot: Slot) -> bool:
    """Whether a stage is paused by name or ASLEEP, so that a later continue is expected."""
    paused = slot.report is not None and slot.report.paused and not slot.paused_by_update
    return paused or slot.state == STAGE_STATE_ASLEEP


def _by_path(begin: BeginWeightUpdateRequest, request: Write, targets: Sequence[Slot]) -> None:
    """Set the path of a write. Segments for a single stage do not describe the segments for other stages on other
    hosts.
    """
    begin.path = DATA_PATH_BROADCAST
    if not isinstance(request, UpdateWeightsFromTensorRequest) or not request.segments:
        return
    begin.path = DATA_PATH_IPC
    hosts = {segment.node for segment in request.segments}
    if reader_of(request):
        hosts |= {worker.host_id for slot in targets for worker in slot.workers} - {""}
    begin.host_ids[:] = sorted(hosts)


def _refuse_part(request: Write, targets: Sequence[Slot]) -> None:
    """Refuse a write to a single stage as a whole update of several. Outside of a pause no further write could join."""
    reader = reader_of(request)
    excluded = sorted(slot.name for slot in targets if slot.name != reader)
    if reader and excluded:
        raise Reason.ILLEGAL_STATE.error(
            f"the tensors are for {reader} alone, and {', '.join(excluded)} serve the same model",
            next_step="Pause generation or begin an update first, write to every engine, then continue.",
        )


def _flushes(options: UpdateOptions) -> bool:
    return not options.HasField("flush_cache") or options.flush_cache
