"""The steps of a weight update at one rank: prepare, take weights in from a group or shared memory, commit or abort.

Reading them from disk is in :mod:`rlctl_torch.disk`.

Whatever can be refused is refused before the first byte, by all ranks together. From the first byte on the weights are
a mixture until a full update is committed.
"""

from __future__ import annotations

from typing import Literal

from google.protobuf.duration_pb2 import Duration

from rlctl.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import MEMORY_TAG_WEIGHTS, OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.v1.verbs_pb2 import (
    ADAPTER_POLICY_DROP,
    APPLY_MODE_IN_PLACE,
    APPLY_MODE_UNSPECIFIED,
    UPDATE_KIND_FULL,
    UPDATE_KIND_PARTIAL,
    UPDATE_KIND_UNSPECIFIED,
    CommitUpdateRequest,
    PrepareUpdateRequest,
    UpdateKind,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
    WeightsReport,
)
from rlctl.weights import segments
from rlctl.weights.buckets import from_proto
from rlctl.weights.groups import WeightGroup
from rlctl.weights.loading import Load, Loading, refuse_draft
from rlctl.weights.segment_reader import Reading
from rlctl.weights.transfer import ReceiveStats
from rlctl_torch.commands import with_outcome
from rlctl_torch.rank import OpenUpdate, Rank, Weights


class Prepare:
    """PrepareUpdate. The same update again starts anew: nothing counts as written."""

    def __init__(self, rank: Rank, request: PrepareUpdateRequest, update_id: str) -> None:
        if not update_id:
            raise Reason.FIELD_REQUIRED.error("PrepareUpdate opens an update", field="header.fence.update_id")
        if request.kind not in (UPDATE_KIND_UNSPECIFIED, UPDATE_KIND_FULL, UPDATE_KIND_PARTIAL):
            name = UpdateKind.Name(request.kind)
            raise Reason.UNSUPPORTED.error(f"the torch engine takes no updates of kind {name}", field="kind")
        if request.apply not in (APPLY_MODE_UNSPECIFIED, APPLY_MODE_IN_PLACE):
            raise Reason.UNSUPPORTED.error("the torch engine keeps no shadow copy of its weights", field="apply")
        refuse_draft(request.selector, "selector")
        self._rank = rank
        self._update_id = update_id
        self._full = request.kind != UPDATE_KIND_PARTIAL
        self._abort_all = request.abort_all_requests
        self._selector = request.selector

    def admit(self) -> bool:
        """Refuse while requests are active, memory is missing, or another update is open."""
        rank = self._rank
        if rank.update is not None and rank.update.update_id != self._update_id:
            rank.refuse_during_update()
        if MEMORY_TAG_WEIGHTS in rank.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released; there is nothing to write into")
        if not self._full and rank.weights is not Weights.WHOLE:
            raise Reason.WEIGHTS_DIRTY.error(f"only a full update helps weights that are {rank.weights.value}")
        if not self._abort_all:
            rank.refuse_active()
        return True

    def give_up(self) -> None:
        """Nothing to undo."""

    def run(self) -> WeightsReport:
        """Open the update; from now on no request runs."""
        rank = self._rank
        kind: Literal["full", "partial"] = "full" if self._full else "partial"
        rank.ranks.agree(lambda: rank.receiver.begin(self._update_id, kind))
        if self._abort_all and rank.scheduler is not None:
            rank.scheduler.abort_all()
        touched = False
        if rank.update is not None:
            rank.update.loading.abandon()
            touched = rank.update.touched
        loading = Loading(rank.model, Load(self._update_id, self._full, self._selector))
        rank.update = OpenUpdate(self._update_id, loading, rank.receiver, touched)
        return rank.update.report


class InUpdate:
    """A step of the open update."""

    def __init__(self, rank: Rank, update_id: str) -> None:
        self._rank = rank
        self._update_id = update_id

    def admit(self) -> bool:
        """Refuse unless the command belongs to the update that is open."""
        self._open()
        return True

    def give_up(self) -> None:
        """Nothing to undo."""

    def _open(self) -> OpenUpdate:
        update = self._rank.update
        if update is None:
            raise Reason.UPDATE_NOT_FOUND.error(f"update {self._update_id or '(none)'} is not open at this rank")
        if update.update_id != self._update_id:
            raise Reason.UPDATE_FENCED.error(
                f"update {update.update_id} is open, the command belongs to {self._update_id or 'none'}",
                field="header.fence.update_id",
            )
        return update


class FromDistributed(InUpdate):
    """UpdateWeightsFromDistributed: take the announced buckets in over a group."""

    def __init__(self, rank: Rank, request: UpdateWeightsFromDistributedRequest, update_id: str) -> None:
        super().__init__(rank, update_id)
        if request.load_format:
            raise Reason.UNSUPPORTED.error(
                f"the torch engine goes by the buckets' own formats, not by {request.load_format!r}",
                field="load_format",
            )
        refuse_draft(request.options.selector, "options.selector")
        self._stream = [
            (bucket.group_name or request.group_name, from_proto(bucket, f"buckets[{i}]"))
            for i, bucket in enumerate(request.buckets)
        ]

    def run(self) -> WeightsReport:
        """Receive; blocks until the buckets are in place, or the receive is interrupted or fails."""
        rank, update = self._rank, self._open()
        groups: dict[str, WeightGroup] = {}
        rank.ranks.agree(lambda: groups.update({name: rank.groups.get(name) for name, _ in self._stream}))
        rank.ranks.agree(update.loading.prepare)
        try:
            stats = update.take_in(rank.ranks, lambda: self._receive(update, groups))
        except RlctlError as error:
            update.touched |= error.outcome != OUTCOME_REJECTED
            raise
        update.touched = True
        return _add(update.report, stats)

    def _receive(self, update: OpenUpdate, groups: dict[str, WeightGroup]) -> ReceiveStats:
        try:
            return update.receiver.receive([(groups[name], bucket) for name, bucket in self._stream])
        except RlctlError as error:
            if error.reason is Reason.GROUP_FAILED:
                # The sources of the others would wait for this rank until their timeout.
                for name, group in groups.items():
                    self._rank.groups.drop(name, group)
            raise


class FromTensor(InUpdate):
    """UpdateWeightsFromTensor: every rank copies its slices out of the segments for its place."""

    def __init__(self, rank: Rank, request: UpdateWeightsFromTensorRequest, update_id: str) -> None:
        super().__init__(rank, update_id)
        for field in ("load_format", "engine_payloads"):
            if getattr(request, field):
                raise Reason.UNSUPPORTED.error(
                    "the torch engine takes tensors by name, dtype and shape out of segments", field=field
                )
        refuse_draft(request.options.selector, "options.selector")
        # Leases run from here on.
        self._segments = [segments.from_proto(s, f"segments[{i}]") for i, s in enumerate(request.segments)]

    def run(self) -> WeightsReport:
        """Map and check on all ranks, then copy."""
        rank, update = self._rank, self._open()
        checked: list[Reading] = []
        rank.ranks.agree(lambda: checked.append(rank.segments.check(self._segments, update.receiver)))
        rank.ranks.agree(update.loading.prepare)
        # From here on another rank may have written, whatever becomes of this one.
        update.touched = True
        try:
            stats = update.take_in(rank.ranks, lambda: rank.segments.read(checked[0], update.receiver))
        except RlctlError as error:
            raise with_outcome(error, OUTCOME_REJECTED if update.stages_adapter else OUTCOME_DIRTY) from error
        return _add(update.report, stats)


class Commit(InUpdate):
    """CommitUpdate: the weights are one version again, or an adapter takes its place."""

    def __init__(self, rank: Rank, request: CommitUpdateRequest, update_id: str) -> None:
        super().__init__(rank, update_id)
        self._drop_adapters = request.adapters == ADAPTER_POLICY_DROP

    def run(self) -> WeightsReport:
        """Check on all ranks that everything was written, then close the update."""
        rank, update = self._rank, self._open()
        if update.stages_adapter is not None:
            return self._commit_adapter(update)
        try:
            rank.ranks.agree(update.check_complete)
            rank.ranks.agree(update.loading.finalise)
        except RlctlError as error:
            raise with_outcome(error, OUTCOME_DIRTY if update.touched else OUTCOME_REJECTED) from error
        rank.synchronise()
        rank.receiver.finish()
        rank.weights = Weights.WHOLE
        rank.checkpoint = update.checkpoint or rank.checkpoint
        if update.touched:
            # Only what one read wrote, and nobody else wrote to, can be read again.
            alone = update.origin is not None and update.report.tensors == len(rank.writable.shards)
            rank.read_from(update.origin if alone else None)
        for name in rank.adapters.loaded if self._drop_adapters else ():
            rank.drop_adapter(name)
        rank.update = None
        return update.report

    def _commit_adapter(self, update: OpenUpdate) -> WeightsReport:
        """Every rank at this step, once all have all of it; until then nothing has changed."""
        rank = self._rank
        rank.ranks.agree(update.check_complete)
        assert update.adapter is not None
        update.receiver.finish()
        rank.put_adapter(update.adapter)
        rank.update = None
        return update.report


class Abort(InUpdate):
    """AbortUpdate. Confirms when no update is open."""

    def admit(self) -> bool:
        """Refuse when another update is open."""
        if self._rank.update is not None:
            self._open()
        return True

    def run(self) -> None:
        """Close the update; what it touched is a mixture now."""
        rank = self._rank
        if rank.update is not None:
            rank.update.loading.abandon()
            rank.update.receiver.finish()
            if rank.update.touched and rank.update.stages_adapter is None:
                rank.weights = Weights.MIXED
                rank.read_from(None)
        rank.receiver.finish()
        rank.update = None


def _add(report: WeightsReport, stats: ReceiveStats) -> WeightsReport:
    report.tensors += stats.tensors
    report.bytes_received += stats.bytes_received
    add_seconds(report.transfer, stats.transfer_s)
    add_seconds(report.load, stats.load_s)
    return report


def add_seconds(total: Duration, seconds: float) -> None:
    """Add to a duration in a message."""
    nanos = total.nanos + round(seconds * 1e9)
    total.seconds += nanos // 10**9
    total.nanos = nanos % 10**9
