"""Weight updates: rlctl's prepare, write and commit in terms of SGLang's sessions.

SGLang checks little of what it is told: a tensor with a name that it does not know is skipped with success, one that is
missing is not missed, and a broadcast that it refuses leaves the sender waiting. So everything is checked here first,
against the checkpoint that it was started with. Caches are never flushed and versions never set by a write: the flush
and the version are steps of their own, which come last.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rlctl_servers.server.admin_calls import Control, time_left, touched
from rlctl_servers.updates.checkpoints import Checkpoints, digest_of
from rlctl_servers.updates.dirty_label import Marking
from rlctl_servers.updates.open_update import opened
from rlctl_servers.updates.version_labels import TRYING

from rlctl.contract.durations import duration, seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED, OUTCOME_UNKNOWN, Outcome, WeightSelector
from rlctl.v1.verbs_pb2 import (
    APPLY_MODE_IN_PLACE,
    APPLY_MODE_UNSPECIFIED,
    UPDATE_KIND_DELTA,
    UPDATE_KIND_PARTIAL,
    PrepareUpdateRequest,
    UpdateKind,
    UpdateWeightsFromDiskRequest,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
    WeightsReport,
)
from rlctl.weights.checkpoint.checkpoint import Checkpoint
from rlctl.weights.group.torch_errors import cause_of
from rlctl.weights.shards.load_hooks import refuse_draft
from rlctl.weights.shared_memory import segment as segments
from rlctl.weights.shared_memory.reader import SegmentReader
from rlctl.weights.tensor.buckets import Bucket, from_proto
from rlctl.weights.tensor.placement import CPU, host_id
from rlctl.weights.tensor.tensors import TensorMeta, castable, dtype_name
from rlctl_sglang.server.facts import FLATTENED, Facts
from rlctl_sglang.state import State
from rlctl_sglang.updates.from_tensor import Handed
from rlctl_sglang.updates.groups import DESTROY

_LESS_THAN_FULL = (UPDATE_KIND_PARTIAL, UPDATE_KIND_DELTA)


@dataclass
class OpenUpdate:
    """The update that is open.

    Attributes:
        kind: a full one must write every tensor of the reference; a delta may have nothing to write.
        selector: which of SGLang's models it is for.
        written: names that were written so far.
        dirty: something may have been written.
    """

    update_id: str
    kind: UpdateKind.ValueType
    selector: str
    written: set[str] = field(default_factory=set)
    dirty: bool = False
    report: WeightsReport = field(default_factory=WeightsReport)
    loading_s: float = 0.0


class Updates:
    """The weight updates of one server; one verb at a time.

    Attributes:
        checkpoint: path of the checkpoint that was loaded last.
        marking: what the server is called meanwhile.
    """

    def __init__(
        self,
        control: Control,
        state: State,
        checkpoints: Checkpoints,
        facts: Facts,
        label: Callable[[], str] | None = None,
    ) -> None:
        """``label``: as :class:`Marking` takes it."""
        self._control = control
        self.marking = Marking(self.name, label)
        self._state = state
        self._checkpoints = checkpoints
        self._facts = facts
        self._segments = SegmentReader(torch.device(CPU))
        self._update: OpenUpdate | None = None
        self.checkpoint = ""
        self._idle = asyncio.Event()
        self._idle.set()
        self._interrupted = False

    @property
    def open(self) -> bool:
        """Whether an update is open."""
        return self._update is not None

    @property
    def _reference(self) -> Mapping[str, TensorMeta]:
        return self._checkpoints.reference

    def refuse(self, request: PrepareUpdateRequest, call: Call) -> None:
        """Raise why such an update cannot be opened now, whatever runs."""
        if not call.update_id:
            raise Reason.FIELD_REQUIRED.error("PrepareUpdate opens an update", field="header.fence.update_id")
        if request.apply not in (APPLY_MODE_UNSPECIFIED, APPLY_MODE_IN_PLACE):
            raise Reason.UNSUPPORTED.error("SGLang keeps no shadow copy of its weights", field="apply")
        self._selector(request.selector, "selector")
        if self._update is not None and self._update.update_id != call.update_id:
            raise Reason.UPDATE_IN_PROGRESS.error(f"update {self._update.update_id} is open")

    def prepare(self, request: PrepareUpdateRequest, call: Call) -> WeightsReport:
        """Open an update; the same one again starts anew."""
        self.refuse(request, call)
        selector = self._selector(request.selector, "selector")
        before = self._update
        self._update = OpenUpdate(call.update_id, request.kind, selector)
        self._update.dirty = before is not None and before.dirty
        self._interrupted = False
        return self._update.report

    async def from_distributed(self, request: UpdateWeightsFromDistributedRequest, call: Call) -> WeightsReport:
        """Take buckets in over groups. Refuses before the first byte what SGLang would fail on, or ignore."""
        update = opened(self._update, call)
        self._selector(request.options.selector, "options.selector")
        if request.load_format not in ("", FLATTENED):
            raise Reason.UNSUPPORTED.error(
                f"over a group SGLang takes plain tensors or {FLATTENED}, not {request.load_format!r}",
                field="load_format",
            )
        stream = []
        for index, message in enumerate(request.buckets):
            bucket = from_proto(message, f"buckets[{index}]")
            if request.load_format and not bucket.flattened:
                bucket = Bucket(bucket.sequence, bucket.metas, flattened=True)
            self._check(bucket, f"buckets[{index}]")
            stream.append((message.group_name or request.group_name, bucket))
        self._state.refuse_without({name for name, _ in stream})
        self._idle.clear()
        try:
            await self._begin(update, call)
            for group, bucket in stream:
                if self._interrupted:
                    raise Reason.CANCELLED.error(
                        "the update was aborted", outcome=OUTCOME_DIRTY if update.dirty else OUTCOME_REJECTED
                    )
                await self._receive(update, group, bucket, call)
        except RlctlError:
            # The senders would wait for these ranks until their timeout.
            for name in {name for name, _ in stream}:
                with contextlib.suppress(RlctlError):
                    await self.leave(name, call)
            raise
        finally:
            self._idle.set()
        update.report.load.CopyFrom(duration(update.loading_s))
        return update.report

    async def from_tensor(self, request: UpdateWeightsFromTensorRequest, call: Call) -> WeightsReport:
        """Copy segments that lie in memory here, and hand the copies to every rank, which takes its part.

        They are read as :mod:`rlctl.weights.shared_memory.reader` reads them, nothing of them is unpickled; their lease
        need not last longer than the copying.
        """
        update = opened(self._update, call)
        selector = self._selector(request.options.selector, "options.selector")
        self._refuse_format(request)
        told = [segments.from_proto(message, f"segments[{i}]") for i, message in enumerate(request.segments)]
        mine = segments.at(told, host_id(), CPU)
        for segment in mine:
            for index, (meta, _) in enumerate(segment.tensors):
                self._check_tensor(meta, f"{segment.field}.tensors[{index}].name")
        started = time.perf_counter()
        reading = await asyncio.to_thread(self._segments.open, mine)
        tensors = await asyncio.to_thread(reading.tensors)
        handed = await asyncio.to_thread(Handed, tensors, reading.proceed)
        update.report.transfer.CopyFrom(duration(seconds(update.report.transfer) + time.perf_counter() - started))
        await self._begin(update, call)
        body = {
            "serialized_named_tensors": [handed.payload() for _ in range(self._facts.ranks)],
            "load_format": request.load_format if request.load_format in self._facts.loaders else None,
            "flush_cache": False,
            "torch_empty_cache": request.options.torch_empty_cache,
            "selector": selector,
        }
        await self._load_timed(update, "/update_weights_from_tensor", body, call)
        self._written(update, [meta for segment in mine for meta, _ in segment.tensors])
        return update.report

    async def interrupted(self, update_id: str, timeout_s: float) -> bool:
        """Take in nothing more of an update, and wait for the broadcast that is under way; returns whether it ended."""
        if self._update is not None and self._update.update_id == update_id:
            self._interrupted = True
        return await self.received(timeout_s)

    async def received(self, timeout_s: float) -> bool:
        """Wait until no broadcast is awaited; returns whether that came about."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def from_disk(self, request: UpdateWeightsFromDiskRequest, call: Call) -> WeightsReport:
        """Load a checkpoint that was found to fit."""
        update = opened(self._update, call)
        selector = self._selector(request.options.selector, "options.selector")
        if selector != "all" and self._facts.draft:
            raise Reason.UNSUPPORTED.error("from disk SGLang loads both models", field="options.selector")
        stored = await asyncio.to_thread(
            self._checkpoints.open, request.model_path, request.load_format, request.target_modules
        )
        try:
            await self._load(update, stored, request, call)
        finally:
            stored.close()
        return update.report

    async def commit(self, label: str, call: Call) -> WeightsReport:
        """Close the update; SGLang's own label for the version comes last. Refuses when a tensor was not written."""
        update = opened(self._update, call)
        full = update.kind not in _LESS_THAN_FULL
        missing = sorted(self._reference.keys() - update.written) if full else []
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise Reason.WEIGHTS_INCOMPLETE.error(
                f"{len(missing)} tensors were not written: {shown}",
                metadata={"missing": "\n".join(missing)},
                outcome=OUTCOME_DIRTY if update.dirty else OUTCOME_REJECTED,
            )
        if not update.dirty and not update.written and update.kind != UPDATE_KIND_DELTA:
            raise Reason.WEIGHTS_INCOMPLETE.error("nothing was written")
        await self._end(call)
        await self.name(label, call, outcome=OUTCOME_DIRTY)
        self.marking.committed()
        self._update = None
        return update.report

    async def load_again(self, checkpoint: str, call: Call) -> None:
        """The load of the trial at the start: an update from disk that leaves the server's label to its outcome."""
        await self.marking.begin_trial(call)
        self.prepare(PrepareUpdateRequest(), call)
        try:
            await self.from_disk(UpdateWeightsFromDiskRequest(model_path=checkpoint), call)
        except RlctlError:
            await self.abort(call)
            raise
        await self.commit(TRYING, call)

    async def abort(self, call: Call) -> None:
        """Close the update; what it wrote stays. Confirms when none is open."""
        if self._update is not None:
            opened(self._update, call)
            if self._state.session:
                await self._end(call)
            await self.marking.aborted(call, dirty=self._update.dirty)
            self._update = None

    async def leave(self, group: str, call: Call) -> None:
        """Leave a group, whatever has become of it. Raises GROUP_NOT_FOUND when the ranks are in none of that name."""
        self._state.refuse_without({group})
        # A group that SGLang fails to take apart is abandoned all the same: no name is used twice.
        self._state.groups.pop(group)
        await self._control.tell(DESTROY, {"group_name": group}, call=call)

    async def _receive(self, update: OpenUpdate, group: str, bucket: Bucket, call: Call) -> None:
        body = {
            "names": [meta.name for meta in bucket.metas],
            "dtypes": [dtype_name(meta.dtype).removeprefix("torch.") for meta in bucket.metas],
            "shapes": [list(meta.shape) for meta in bucket.metas],
            "group_name": group,
            "load_format": FLATTENED if bucket.flattened else None,
            "selector": update.selector,
            "flush_cache": False,
        }
        started = time.perf_counter()
        try:
            answer = await self._control.tell("/update_weights_from_distributed", body, call=call)
        except RlctlError as error:
            update.dirty |= error.outcome == OUTCOME_UNKNOWN
            if update.dirty:  # by a bucket before this one
                error.outcome = max(error.outcome, OUTCOME_DIRTY)
            raise
        update.loading_s += time.perf_counter() - started
        if not answer.ok:
            # One rank that could not receive has written nothing. Of several, the others may have.
            before = not update.dirty and self._facts.ranks == 1 and answer.message.startswith("Failed to receive")
            update.dirty |= not before
            raise Reason.GROUP_FAILED.error(
                f"bucket {bucket.sequence} over {group}: {cause_of(answer.message)}",
                outcome=OUTCOME_REJECTED if before else OUTCOME_DIRTY,
            )
        update.dirty = True
        self._written(update, bucket.metas)

    async def _load(
        self, update: OpenUpdate, stored: Checkpoint, request: UpdateWeightsFromDiskRequest, call: Call
    ) -> None:
        if request.expected_digest:
            found = await asyncio.to_thread(digest_of, stored)
            if found != request.expected_digest:
                raise Reason.DIGEST_MISMATCH.error(
                    f"{request.model_path} has digest {found}, {request.expected_digest} was expected",
                    field="expected_digest",
                )
        time_left(call, "a load")  # reading may take as long as there was
        if self._state.session:
            await self._end(call)  # a load from disk packs and unpacks by itself
        await self._mark(call)
        body = {
            "model_path": stored.path,
            "load_format": "auto",  # by itself it takes the one that it was started with
            "flush_cache": False,
            "recapture_cuda_graph": request.options.recapture_cuda_graph,
            "torch_empty_cache": request.options.torch_empty_cache,
            "token_step": request.token_step,
        }
        await self._load_timed(update, "/update_weights_from_disk", body, call)
        try:
            stored.check_unchanged()
        except RlctlError as error:
            raise touched(error) from error
        self._written(update, stored.metas.values())
        self.checkpoint = request.model_path

    async def _load_timed(self, update: OpenUpdate, path: str, body: dict[str, Any], call: Call) -> None:
        """A call that writes. Whatever goes wrong once SGLang has heard of it leaves a mixture."""
        started = time.perf_counter()
        try:
            await self._control.must(path, body, call=call, outcome=OUTCOME_DIRTY)
            update.dirty = True
        except RlctlError as error:
            update.dirty |= error.reason is not Reason.UNREACHABLE
            raise touched(error) from error
        finally:
            update.loading_s += time.perf_counter() - started
            update.report.load.CopyFrom(duration(update.loading_s))

    def _written(self, update: OpenUpdate, metas: Iterable[TensorMeta]) -> None:
        for meta in metas:
            update.written.add(meta.name)
            update.report.tensors += 1
            update.report.bytes_received += meta.nbytes

    async def name(self, label: str, call: Call, *, outcome: Outcome.ValueType = OUTCOME_REJECTED) -> None:
        """Give the server a label."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._control.must("/update_weight_version", body, call=call, outcome=outcome)

    async def _mark(self, call: Call) -> None:
        """Before the first byte."""
        if await self.marking.mark(call) and not self._state.session:
            # A stage server that has ended has left one open; nobody else closes it, a load from disk neither.
            await self._control.tell("/end_weight_update", {}, call=call)

    async def _begin(self, update: OpenUpdate, call: Call) -> None:
        if not self._state.session:
            await self._mark(call)
            await self._control.must("/begin_weight_update", {"selector": update.selector}, call=call)
            self._state.session = True

    async def _end(self, call: Call) -> None:
        if self._state.session:
            await self._control.must("/end_weight_update", {}, call=call, outcome=OUTCOME_DIRTY)
            self._state.session = False

    def _check(self, bucket: Bucket, field_path: str) -> None:
        """Raise CHECKPOINT_MISMATCH or UNSUPPORTED for what SGLang would skip, fail on half-way, or read wrongly."""
        for index, meta in enumerate(bucket.metas):
            self._check_tensor(meta, f"{field_path}.names[{index}]")
        if bucket.flattened and bucket.nbytes != sum(meta.nbytes for meta in bucket.metas):
            raise Reason.UNSUPPORTED.error(
                "tensors of this packed bucket lie apart, which SGLang does not read", field=field_path
            )

    def _check_tensor(self, meta: TensorMeta, where: str) -> None:
        known = self._reference.get(meta.name)
        if known is None:
            raise Reason.CHECKPOINT_MISMATCH.error(f"the model has no tensor {meta.name!r}", field=where)
        if known.shape != meta.shape:
            raise Reason.CHECKPOINT_MISMATCH.error(
                f"{meta.name} has shape {known.shape}, not {meta.shape}", field=where
            )
        if not castable(meta.dtype, known.dtype):
            raise Reason.CHECKPOINT_MISMATCH.error(
                f"{meta.name} is {known.dtype}, and {meta.dtype} cannot be cast to it", field=where
            )

    def _refuse_format(self, request: UpdateWeightsFromTensorRequest) -> None:
        if request.engine_payloads:
            raise Reason.UNSUPPORTED.error(
                "what is in a payload of SGLang's own cannot be checked without running it, and SGLang ends on one "
                "that does not fit; put the tensors into segments",
                field="engine_payloads",
            )
        if request.load_format == "direct":
            raise Reason.UNSUPPORTED.error(
                "direct loading writes SGLang's fused parameters as they lie at one rank, not tensors of a checkpoint",
                field="load_format",
            )
        if request.load_format not in ("", FLATTENED, *self._facts.loaders):
            known = ", ".join([FLATTENED, *self._facts.loaders])
            raise Reason.UNSUPPORTED.error(
                f"there is no load format {request.load_format!r}; there are: {known}",
                field="load_format",
                next_step="Name a loader of your own to the server when it starts: --option custom_weight_loader=PATH.",
            )

    def close(self) -> None:
        """Let go of shared memory."""
        self._segments.close()

    def _selector(self, selector: WeightSelector.ValueType, field_path: str) -> str:
        if not self._facts.draft:
            refuse_draft(selector, field_path)
            return "all"
        if selector not in WeightSelector.values():
            raise Reason.UNKNOWN_ENUM_VALUE.error(f"unknown selector {selector}", field=field_path)
        return WeightSelector.Name(selector or WeightSelector.Value("WEIGHT_SELECTOR_ALL")).rpartition("_")[2].lower()
