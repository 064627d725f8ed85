"""Weight updates: rlctl's prepare, write and commit in terms of vLLM.

Over groups and out of shared segments the extension takes tensors in, at every rank. From disk vLLM loads by itself,
and ends when what it is told to load does not fit; so everything is checked here first, against the checkpoint that it
was started with. Nothing may be generated while an update is open: vLLM's weights are on the meta device then. So the
server is paused, by whoever asked for it or by the update itself, until the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message
from rlctl_servers.server.admin_calls import Control, time_left, touched
from rlctl_servers.updates.checkpoints import Checkpoints, digest_of
from rlctl_servers.updates.dirty_label import Marking
from rlctl_servers.updates.open_update import opened
from rlctl_servers.updates.version_labels import TRYING

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import (
    EVIDENCE_RANK,
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_IN_PLACE,
    Outcome,
    WorkerCoordinates,
)
from rlctl.v1.results_pb2 import RankResult
from rlctl.v1.verbs_pb2 import (
    APPLY_MODE_IN_PLACE,
    APPLY_MODE_UNSPECIFIED,
    AbortUpdateRequest,
    CommitUpdateRequest,
    PrepareUpdateRequest,
    UpdateWeightsFromDiskRequest,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
    WeightsReport,
)
from rlctl.weights.checkpoint.checkpoint import Checkpoint
from rlctl.weights.shards.load_hooks import refuse_draft
from rlctl_vllm.state import MODES, State
from rlctl_vllm.updates.native_nccl import Native
from rlctl_vllm.updates.worker_calls import Workers


@dataclass
class OpenUpdate:
    """The update that is open.

    Attributes:
        taken: tensors have come, or were to come, through the extension or vLLM's own engine.
        loaded: a checkpoint was loaded.
        dirty: something may have been written.
    """

    update_id: str
    taken: bool = False
    loaded: bool = False
    dirty: bool = False
    report: WeightsReport = field(default_factory=WeightsReport)
    loading_s: float = 0.0


class Updates:
    """The weight updates of one server; one verb at a time.

    Attributes:
        checkpoint: path of the checkpoint that was loaded last.
    """

    def __init__(
        self,
        control: Control,
        state: State,
        checkpoints: Checkpoints,
        workers: Workers | Native | None,
        ranks: Sequence[WorkerCoordinates],
        label: Callable[[], str] | None = None,
    ) -> None:
        """``workers``: None where the server takes no tensors in. ``label``: as :class:`Marking` takes it."""
        self._marking = Marking(self.name, label)
        self._control = control
        self._state = state
        self._checkpoints = checkpoints
        self._workers = workers
        self._ranks = ranks
        self._update: OpenUpdate | None = None
        self.checkpoint = ""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open(self) -> bool:
        """Whether an update is open."""
        return self._update is not None

    @property
    def whole(self) -> bool:
        """Whether the weights are those of a version: no update is open, and none has left a mixture."""
        return self._update is None and not self._marking.spoilt

    def refuse(self, request: PrepareUpdateRequest, call: Call) -> None:
        """Raise why such an update cannot be opened now, whatever runs."""
        if not call.update_id:
            raise Reason.FIELD_REQUIRED.error("PrepareUpdate opens an update", field="header.fence.update_id")
        if request.apply not in (APPLY_MODE_UNSPECIFIED, APPLY_MODE_IN_PLACE):
            raise Reason.UNSUPPORTED.error("vLLM keeps no shadow copy of its weights", field="apply")
        refuse_draft(request.selector, "selector")
        if self._update is not None and self._update.update_id != call.update_id:
            raise Reason.UPDATE_IN_PROGRESS.error(f"update {self._update.update_id} is open")

    async def prepare(self, request: PrepareUpdateRequest, call: Call) -> WeightsReport:
        """Open an update; the same one again starts anew."""
        self.refuse(request, call)
        before = self._update
        await hold(self._control, self._state, call)
        try:
            if self._workers is not None:
                await self._workers.each("PrepareUpdate", request, WeightsReport, call)
        except RlctlError:
            if before is None:
                await let_go(self._control, self._state, call)
            raise
        self._update = OpenUpdate(call.update_id, dirty=before is not None and before.dirty)
        return self._update.report

    async def from_distributed(self, request: UpdateWeightsFromDistributedRequest, call: Call) -> list[RankResult]:
        """Take buckets in over groups, at every rank."""
        if request.load_format:
            raise Reason.UNSUPPORTED.error(
                f"the extension goes by the buckets' own formats, not by {request.load_format!r}", field="load_format"
            )
        refuse_draft(request.options.selector, "options.selector")
        return await self._take("UpdateWeightsFromDistributed", request, call)

    async def from_tensor(self, request: UpdateWeightsFromTensorRequest, call: Call) -> list[RankResult]:
        """Copy tensors out of shared segments, at every rank."""
        for name in ("load_format", "engine_payloads"):
            if getattr(request, name):
                raise Reason.UNSUPPORTED.error(
                    "the extension takes tensors by name, dtype and shape out of segments", field=name
                )
        refuse_draft(request.options.selector, "options.selector")
        return await self._take("UpdateWeightsFromTensor", request, call)

    async def received(self, timeout_s: float) -> bool:
        """Wait until nothing is being received; returns whether that came about."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def from_disk(self, request: UpdateWeightsFromDiskRequest, call: Call) -> WeightsReport:
        """Load a checkpoint that was found to fit."""
        update = opened(self._update, call)
        refuse_draft(request.options.selector, "options.selector")
        if update.taken:
            raise Reason.ILLEGAL_STATE.error("this update has taken tensors in; vLLM loads checkpoints on their own")
        stored = await asyncio.to_thread(
            self._checkpoints.open, request.model_path, request.load_format, request.target_modules
        )
        try:
            await self._load(update, stored, request, call)
        finally:
            stored.close()
        return update.report

    async def commit(self, request: CommitUpdateRequest, label: str, call: Call) -> list[RankResult] | WeightsReport:
        """Close the update; vLLM's own label for the version comes last. Refuses when a tensor was not written."""
        update = opened(self._update, call)
        reports: list[WeightsReport] | None = None
        if self._workers is not None and not update.loaded:
            try:
                reports = await self._workers.each("CommitUpdate", request, WeightsReport, call)
            except RlctlError as error:
                if error.outcome == OUTCOME_REJECTED and update.dirty:
                    error.outcome = OUTCOME_DIRTY
                raise
        else:
            if not update.loaded:
                raise Reason.WEIGHTS_INCOMPLETE.error("nothing was written")
            await self._close(call)
        await self.name(label, call, outcome=OUTCOME_DIRTY)
        self._marking.committed()
        self._update = None
        await let_go(self._control, self._state, call)
        return update.report if reports is None else self._each(reports)

    async def load_again(self, checkpoint: str, call: Call) -> None:
        """The load of the trial at the start: an update from disk that leaves the server's label to its outcome."""
        await self._marking.begin_trial(call)
        await self.prepare(PrepareUpdateRequest(), call)
        try:
            await self.from_disk(UpdateWeightsFromDiskRequest(model_path=checkpoint), call)
        except RlctlError:
            await self.abort(call)
            raise
        await self.commit(CommitUpdateRequest(), TRYING, call)

    async def abort(self, call: Call) -> None:
        """Close the update; what it wrote stays. Confirms when none is open."""
        if self._update is not None:
            opened(self._update, call)
            await self._close(call)
            await self._marking.aborted(call, dirty=self._update.dirty)
            self._update = None
        await let_go(self._control, self._state, call)

    async def _take(self, verb: str, request: Message, call: Call) -> list[RankResult]:
        update = opened(self._update, call)
        assert self._workers is not None
        if update.loaded:
            raise Reason.ILLEGAL_STATE.error("this update has loaded a checkpoint; it takes no tensors in")
        await self._marking.mark(call)
        update.taken = True
        self._idle.clear()
        try:
            reports = await self._workers.each(verb, request, WeightsReport, call)
        except RlctlError as error:
            update.dirty |= error.outcome in (OUTCOME_DIRTY, OUTCOME_UNKNOWN)
            raise
        finally:
            self._idle.set()
        update.dirty = True
        return self._each(reports)

    async def name(self, label: str, call: Call, *, outcome: Outcome.ValueType = OUTCOME_REJECTED) -> None:
        """Give the server a label."""
        await self._control.must("/update_weight_version", {"new_version": label}, call=call, outcome=outcome)

    async def _close(self, call: Call) -> None:
        if self._workers is not None:
            await self._workers.each("AbortUpdate", AbortUpdateRequest(), AbortUpdateRequest, call)

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
        await self._marking.mark(call)
        started = time.perf_counter()
        try:
            if isinstance(self._workers, Workers):  # which do not fail vLLM's call where the load fails
                loading = UpdateWeightsFromDiskRequest(model_path=stored.path)
                await self._workers.each("UpdateWeightsFromDisk", loading, WeightsReport, call)
            else:
                body = {"method": "reload_weights", "kwargs": {"weights_path": stored.path}}
                await self._control.must("/collective_rpc", body, call=call, outcome=OUTCOME_DIRTY)
            update.dirty = True
            stored.check_unchanged()
        except RlctlError as error:
            update.dirty |= error.reason is not Reason.UNREACHABLE
            raise touched(error) from error
        update.loading_s += time.perf_counter() - started
        update.loaded = True
        update.report.tensors += len(stored.metas)
        update.report.bytes_received += sum(meta.nbytes for meta in stored.metas.values())
        update.report.load.CopyFrom(duration(update.loading_s))
        self.checkpoint = request.model_path

    def _each(self, reports: Sequence[WeightsReport]) -> list[RankResult]:
        return [
            RankResult(coordinates=rank, outcome=OUTCOME_APPLIED, evidence=EVIDENCE_RANK, weights=report)
            for rank, report in zip(self._ranks, reports, strict=True)
        ]


async def hold(control: Control, state: State, call: Call) -> None:
    """Pause, unless it is paused already: new requests wait, whoever sends them."""
    if not state.stopped:
        state.held = True
        try:
            await control.must(f"/pause?{MODES[PAUSE_MODE_IN_PLACE]}", {}, call=call)
        except RlctlError as error:
            state.held = error.outcome == OUTCOME_UNKNOWN
            raise


async def let_go(control: Control, state: State, call: Call) -> None:
    """Undo the plug-in's own pause, unless somebody has asked for one meanwhile."""
    if state.held and not state.released:
        if not state.paused:
            await control.must("/resume", {}, call=call)
        state.held = False
