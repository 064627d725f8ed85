"""Weight updates of one server: prepare, write and commit, at every rank.

rlctl's code in the ranks receives tensors over groups and from shared segments. From disk the engine loads by itself,
and may end if a checkpoint does not fit. So the checkpoint is first compared with the checkpoint of the engine's start.

While an update in place is open, the fleet or the update itself pauses the server. Nothing may be computed with
half-written weights. A staged update is received into shadow copies while the server generates. The server is paused
for the copy into the weights at the commit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.serialized_tensors.payload import FLATTENED
from rlctl.engine import Call
from rlctl.v1.common_pb2 import (
    EVIDENCE_RANK,
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    WEIGHT_SELECTOR_ALL,
    WEIGHT_SELECTOR_UNSPECIFIED,
    Outcome,
    WeightSelector,
    WorkerCoordinates,
)
from rlctl.v1.results_pb2 import RankResult
from rlctl.v1.verbs_pb2 import (
    APPLY_MODE_STAGED,
    BUCKET_FORMAT_FLATTENED,
    AbortUpdateRequest,
    CommitUpdateRequest,
    PrepareUpdateRequest,
    SealUpdateRequest,
    UpdateWeightsFromDiskRequest,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
    WeightsReport,
)
from rlctl.weights.checkpoint.checkpoint import Checkpoint
from rlctl.weights.shards.load_hooks import refuse_draft
from rlctl_servers.server.admin_calls import Control, time_left, touched
from rlctl_servers.updates.checkpoints import Checkpoints, digest_of
from rlctl_servers.updates.dirty_label import Marking
from rlctl_servers.updates.open_update import opened
from rlctl_servers.updates.own_pause import OwnPause
from rlctl_servers.updates.version_labels import TRYING

log = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=Message)

ServerLoad = Callable[[str, UpdateWeightsFromDiskRequest, Call], Awaitable[None]]
"""Makes the server itself load the checkpoint in a directory. Raises ENGINE_FAILED with outcome DIRTY."""


class Ranks(Protocol):
    """Carries out a verb at every rank."""

    async def each(self, verb: str, request: Message, reply: type[Reply], call: Call) -> list[Reply]:
        """Return the answer of every rank, in order."""


@dataclass
class OpenUpdate:
    """The open update.

    Attributes:
        received: tensors have arrived, or may have.
        loaded: a checkpoint was loaded.
        dirty: weights may have been written.
        selector: the models of the update.
        checkpoint: directory that a staged update was read from, or "".
        staged: the update fills a shadow copy, and leaves the serving weights alone until its commit.
    """

    update_id: str
    staged: bool = False
    selector: WeightSelector.ValueType = WEIGHT_SELECTOR_UNSPECIFIED
    received: bool = False
    loaded: bool = False
    dirty: bool = False
    report: WeightsReport = field(default_factory=WeightsReport)
    loading_s: float = 0.0
    checkpoint: str = ""


class Updates:
    """The weight updates of one server. One verb runs at a time.

    Attributes:
        checkpoint: path of the last loaded checkpoint.
        marking: the label of the server while its weights have no version.
    """

    def __init__(
        self,
        product: str,
        control: Control,
        checkpoints: Checkpoints,
        ranks: Ranks | None,
        layout: Sequence[WorkerCoordinates],
        pause: OwnPause,
        *,
        server_load: ServerLoad | None = None,
        label: Callable[[], str] | None = None,
        draft: bool = False,
        loaders: Sequence[str] = (),
    ) -> None:
        """``ranks``: None if the server takes no tensors. ``server_load``: loads a checkpoint if the ranks do not load
        for rlctl. ``label``: see :class:`Marking`. ``draft``: there is a draft model. ``loaders``: load formats of
        tensors in memory from the server's start.
        """
        self.marking = Marking(self.name, label)
        self.checkpoint = ""
        self._product = product
        self._control = control
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._layout = layout
        self._pause = pause
        self._server_load = server_load
        self._draft = draft
        self._loaders = loaders
        self._update: OpenUpdate | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open(self) -> bool:
        return self._update is not None

    @property
    def staged(self) -> bool:
        """Return whether an open update leaves the serving weights alone until its commit."""
        return self._update is not None and self._update.staged

    @property
    def in_place(self) -> bool:
        """Return whether an open update writes the serving weights."""
        return self.open and not self.staged

    @property
    def whole(self) -> bool:
        """Return whether the weights are those of a version, neither half-written nor a mixture."""
        half_swapped = self._update is not None and self._update.dirty
        return not (self.in_place or half_swapped or self.marking.spoilt)

    def refuse(self, request: PrepareUpdateRequest, call: Call) -> None:
        """Raise if this update cannot be opened now, whether or not requests run."""
        if not call.update_id:
            raise Reason.FIELD_REQUIRED.error("PrepareUpdate opens an update", field="header.fence.update_id")
        if request.apply == APPLY_MODE_STAGED:
            self._refuse_staged(request)
        self._refuse_selector(request.selector, "selector")
        if self._update is not None and self._update.update_id != call.update_id:
            raise Reason.UPDATE_IN_PROGRESS.error(f"update {self._update.update_id} is open")

    async def prepare(self, request: PrepareUpdateRequest, call: Call) -> WeightsReport:
        """Open an update; a repeat with the same id starts anew. A staged update leaves the server generating."""
        self.refuse(request, call)
        previous, staged = self._update, request.apply == APPLY_MODE_STAGED
        update = OpenUpdate(call.update_id, staged, request.selector, dirty=previous is not None and previous.dirty)
        if not staged:
            await self._pause.begin(call)
        try:
            if self._ranks is not None:
                await self._ranks.each("PrepareUpdate", request, WeightsReport, call)
        except RlctlError as error:
            if staged:
                failure = await self._drop_copies(call)
                if failure is not None:
                    self._update = update  # the abort lets the ranks drop their copies
                    error.message += f"; a shadow copy may remain until the abort: {failure.message}"
                    error.outcome = OUTCOME_UNKNOWN
                raise _spared(error) from error
            if previous is None:
                await self._pause.end(call, error)
            raise
        self._update = update
        return update.report

    async def from_distributed(self, request: UpdateWeightsFromDistributedRequest, call: Call) -> list[RankResult]:
        if request.load_format == FLATTENED:
            flattened = UpdateWeightsFromDistributedRequest()
            flattened.CopyFrom(request)
            for bucket in flattened.buckets:
                bucket.format = BUCKET_FORMAT_FLATTENED
            request = flattened
        elif request.load_format:
            raise Reason.UNSUPPORTED.error(
                f"over a group tensors come plain or as {FLATTENED}, not as {request.load_format!r}",
                field="load_format",
            )
        self._refuse_selector(request.options.selector, "options.selector")
        return await self._take("UpdateWeightsFromDistributed", request, call)

    async def from_tensor(self, request: UpdateWeightsFromTensorRequest, call: Call) -> list[RankResult]:
        """Copy tensors out of shared segments at every rank."""
        if request.engine_payloads:
            raise Reason.UNSUPPORTED.error(
                "a payload of an engine's own form cannot be checked without running it; put the tensors into segments",
                field="engine_payloads",
            )
        if request.load_format == "direct":
            raise Reason.UNSUPPORTED.error(
                "direct loading writes fused parameters as they lie at one rank, not tensors of a checkpoint",
                field="load_format",
            )
        if request.load_format not in ("", FLATTENED, *self._loaders):
            raise Reason.UNSUPPORTED.error(
                f"there is no load format {request.load_format!r}; there are: {', '.join([FLATTENED, *self._loaders])}",
                field="load_format",
                next_step="Name a loader of your own to the server when it starts, where it takes such loaders.",
            )
        self._refuse_selector(request.options.selector, "options.selector")
        return await self._take("UpdateWeightsFromTensor", request, call)

    async def received(self, timeout_s: float) -> bool:
        """Wait until the ranks receive nothing. Return False if ``timeout_s`` ends first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def from_disk(self, request: UpdateWeightsFromDiskRequest, call: Call) -> list[RankResult] | WeightsReport:
        """Compare a checkpoint with the reference and load it. Return a single report if the server loads by itself."""
        update = opened(self._update, call)
        self._refuse_selector(request.options.selector, "options.selector")
        if self._draft and not {update.selector, request.options.selector} <= {
            WEIGHT_SELECTOR_UNSPECIFIED,
            WEIGHT_SELECTOR_ALL,
        }:
            raise Reason.UNSUPPORTED.error(f"from disk {self._product} loads both models", field="options.selector")
        if update.received:
            raise Reason.ILLEGAL_STATE.error(
                f"this update has received tensors; {self._product} loads checkpoints in updates of their own"
            )
        stored = await asyncio.to_thread(
            self._checkpoints.open, request.model_path, request.load_format, request.target_modules
        )
        try:
            await self._load(update, stored, request, call)
        finally:
            stored.close()
        return self._loaded(update)

    async def seal(self, request: SealUpdateRequest, call: Call) -> list[RankResult]:
        """Complete the shadow copies. Raises UPDATE_NOT_FOUND, WEIGHTS_INCOMPLETE."""
        update = opened(self._update, call)
        if not update.staged or self._ranks is None:
            raise Reason.UPDATE_NOT_FOUND.error(f"update {update.update_id} is not staged: there is no shadow copy")
        try:
            return self._each(await self._ranks.each("SealUpdate", request, WeightsReport, call))
        except RlctlError as error:
            raise _spared(error) from error

    async def commit(self, request: CommitUpdateRequest, label: str, call: Call) -> list[RankResult] | WeightsReport:
        """Close the update, and set the version's label last. Raises WEIGHTS_INCOMPLETE for a missing tensor."""
        update = opened(self._update, call)
        reports: list[WeightsReport] | None = None
        if self._ranks is not None and update.staged:
            reports = await self._swap(update, self._ranks, request, call)
        elif self._ranks is not None and not update.loaded:
            try:
                reports = await self._ranks.each("CommitUpdate", request, WeightsReport, call)
            except RlctlError as error:
                if error.outcome == OUTCOME_REJECTED and update.dirty:
                    error.outcome = OUTCOME_DIRTY
                raise
        else:
            if not update.loaded:
                raise Reason.WEIGHTS_INCOMPLETE.error("no tensor was written")
            await self._close(call)
        self.marking.committed()  # a label with a lost answer must not outlive the next write
        await self.name(label, call, outcome=OUTCOME_DIRTY)
        self._update = None
        self.checkpoint = update.checkpoint or self.checkpoint
        try:
            await self._pause.end(call)
        except RlctlError as error:
            error.outcome = OUTCOME_UNKNOWN
            raise
        return self._loaded(update) if reports is None else self._each(reports)

    async def load_again(self, checkpoint: str, call: Call) -> None:
        """Run the load of the trial at the start: an update from disk. The trial's outcome decides about the label."""
        await self.marking.begin_trial(call)
        await self.prepare(PrepareUpdateRequest(), call)
        try:
            await self.from_disk(UpdateWeightsFromDiskRequest(model_path=checkpoint), call)
        except RlctlError:
            await self.abort(call)
            raise
        await self.commit(CommitUpdateRequest(), TRYING, call)

    async def abort(self, call: Call) -> None:
        """Close the update; written weights stay. Confirms also if no update is open."""
        if self._update is not None:
            opened(self._update, call)
            await self._close(call)
            await self.marking.aborted(call, dirty=self._update.dirty)
            self._update = None
        await self._pause.end(call)

    async def name(self, label: str, call: Call, *, outcome: Outcome.ValueType = OUTCOME_REJECTED) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await self._control.must("/update_weight_version", body, call=call, outcome=outcome)

    async def _take(
        self,
        verb: str,
        request: UpdateWeightsFromDistributedRequest | UpdateWeightsFromTensorRequest,
        call: Call,
    ) -> list[RankResult]:
        update = opened(self._update, call)
        assert self._ranks is not None
        selector, prepared = request.options.selector, update.selector or WEIGHT_SELECTOR_ALL
        if self._draft and selector not in (WEIGHT_SELECTOR_UNSPECIFIED, prepared):
            raise Reason.FIELD_CONFLICT.error(
                f"the update is for {WeightSelector.Name(prepared)}, these tensors are for "
                f"{WeightSelector.Name(selector)}",
                field="options.selector",
            )
        if update.loaded:
            raise Reason.ILLEGAL_STATE.error("this update has loaded a checkpoint and receives no tensors")
        if not update.staged:
            await self.marking.mark(call)
        self._idle.clear()
        try:
            reports = await self._ranks.each(verb, request, WeightsReport, call)
        except RlctlError as error:
            if update.staged:
                raise _spared(error) from error
            if error.outcome in (OUTCOME_DIRTY, OUTCOME_UNKNOWN):
                update.received = update.dirty = True
            raise
        finally:
            self._idle.set()
        update.received = True
        update.dirty |= not update.staged
        return self._each(reports)

    async def _swap(
        self, update: OpenUpdate, ranks: Ranks, request: CommitUpdateRequest, call: Call
    ) -> list[WeightsReport]:
        """Copy the staged weights into the served weights at every rank, during a pause."""
        await self._pause.begin(call)
        try:
            await self.marking.mark(call)
            reports = await ranks.each("CommitUpdate", request, WeightsReport, call)
        except RlctlError as error:
            update.dirty |= error.outcome in (OUTCOME_DIRTY, OUTCOME_UNKNOWN)
            if not update.dirty:
                await self._pause.end(call, error)
            elif error.outcome == OUTCOME_REJECTED:
                error.outcome = OUTCOME_DIRTY
            raise
        update.dirty = True  # until the weights have the label of their version
        return reports

    async def _drop_copies(self, call: Call) -> RlctlError | None:
        """Let the ranks drop their shadow copies. Return the failure, or None."""
        try:
            await self._close(call)
        except RlctlError as error:
            log.warning("%s: a shadow copy may remain: %s", self._product, error)
            return error
        return None

    async def _close(self, call: Call) -> None:
        if self._ranks is not None:
            await self._ranks.each("AbortUpdate", AbortUpdateRequest(), AbortUpdateRequest, call)

    async def _load(
        self, update: OpenUpdate, stored: Checkpoint, request: UpdateWeightsFromDiskRequest, call: Call
    ) -> None:
        if request.expected_digest:
            digest = await asyncio.to_thread(digest_of, stored)
            if digest != request.expected_digest:
                raise Reason.DIGEST_MISMATCH.error(
                    f"{request.model_path} has digest {digest}, {request.expected_digest} was expected",
                    field="expected_digest",
                )
        time_left(call, "a load")  # reading may have taken all the time
        if update.staged:
            await self._load_aside(update, stored, request, call)
            return
        await self.marking.mark(call)
        started = time.perf_counter()
        try:
            if self._server_load is not None:
                await self._server_load(stored.path, request, call)
            else:
                loading = UpdateWeightsFromDiskRequest(model_path=stored.path, options=request.options)
                assert self._ranks is not None
                await self._ranks.each("UpdateWeightsFromDisk", loading, WeightsReport, call)
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

    async def _load_aside(
        self, update: OpenUpdate, stored: Checkpoint, request: UpdateWeightsFromDiskRequest, call: Call
    ) -> None:
        """Let the ranks read a checkpoint into their shadow copies."""
        assert self._ranks is not None
        loading = UpdateWeightsFromDiskRequest(model_path=stored.path, options=request.options)
        self._idle.clear()
        try:
            (update.report, *_) = await self._ranks.each("UpdateWeightsFromDisk", loading, WeightsReport, call)
        except RlctlError as error:
            raise _spared(error) from error
        finally:
            self._idle.set()
        update.loaded, update.checkpoint = True, request.model_path

    def _loaded(self, update: OpenUpdate) -> list[RankResult] | WeightsReport:
        return update.report if self._server_load is not None else self._each([update.report] * len(self._layout))

    def _each(self, reports: Sequence[WeightsReport]) -> list[RankResult]:
        return [
            RankResult(coordinates=rank, outcome=OUTCOME_APPLIED, evidence=EVIDENCE_RANK, weights=report)
            for rank, report in zip(self._layout, reports, strict=True)
        ]

    async def interrupt(self, call: Call) -> None:
        """End the receive into shadow copies. An abort follows."""
        if self.staged and not self._idle.is_set():
            await self._drop_copies(call)

    def _refuse_staged(self, request: PrepareUpdateRequest) -> None:
        if request.abort_all_requests:
            raise Reason.FIELD_CONFLICT.error(
                "a staged update leaves requests alone until it is swapped; pause before the commit",
                field="abort_all_requests",
            )
        if self._ranks is None or self._server_load is not None:
            raise Reason.UNSUPPORTED.error(
                f"rlctl's code is not in {self._product}'s ranks: so it cannot make a shadow copy", field="apply"
            )

    def _refuse_selector(self, selector: WeightSelector.ValueType, field_path: str) -> None:
        if not self._draft:
            refuse_draft(selector, field_path)
        elif selector not in WeightSelector.values():
            raise Reason.UNKNOWN_ENUM_VALUE.error(f"unknown selector {selector}", field=field_path)


def _spared(error: RlctlError) -> RlctlError:
    """Return the error of a step that writes shadow copies only. The serving weights are unchanged at all ranks."""
    if error.outcome == OUTCOME_DIRTY:
        error.outcome = OUTCOME_REJECTED
    return error
