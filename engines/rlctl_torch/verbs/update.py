"""The steps of a weight update at a rank: prepare, receive from groups or shared memory, seal, commit or abort.

:mod:`rlctl_torch.verbs.load_from_disk` reads weights from disk.

All ranks together make every possible refusal before the first byte. From the first byte of an in-place update the
weights are a mixture until its commit; after an abort, until the commit of a full update.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from rlctl.contract.durations import add_seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1 import common_pb2
from rlctl.v1.common_pb2 import MEMORY_TAG_WEIGHTS, OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.v1.verbs_pb2 import (
    ADAPTER_POLICY_DROP,
    APPLY_MODE_STAGED,
    UPDATE_KIND_DELTA,
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
from rlctl.weights.group.process_group import WeightGroup
from rlctl.weights.receiver import Receiver, ReceiveStats
from rlctl.weights.shards.load_hooks import Load, Loading, refuse_draft
from rlctl.weights.shards.shard_map import ShardMap
from rlctl.weights.shared_memory import segment
from rlctl.weights.shared_memory.reader import Reading
from rlctl_torch.model import sabotage
from rlctl_torch.model.shadow_copy import Shadow
from rlctl_torch.rank import OpenUpdate, Rank, Weights, refuse
from rlctl_torch.steps.background import Later
from rlctl_torch.steps.collectives import Broken
from rlctl_torch.steps.ordered_commands import Action, with_outcome

_LESS_THAN_FULL = (UPDATE_KIND_PARTIAL, UPDATE_KIND_DELTA)


class Prepare(Action):
    """PrepareUpdate. A repeat of the update starts anew: nothing counts as written."""

    def __init__(self, rank: Rank, request: PrepareUpdateRequest, update_id: str) -> None:
        if not update_id:
            raise Reason.FIELD_REQUIRED.error("PrepareUpdate opens an update", field="header.fence.update_id")
        if request.kind not in (UPDATE_KIND_UNSPECIFIED, UPDATE_KIND_FULL, *_LESS_THAN_FULL):
            name = UpdateKind.Name(request.kind)
            raise Reason.UNSUPPORTED.error(f"the torch engine takes no updates of kind {name}", field="kind")
        self._staged = request.apply == APPLY_MODE_STAGED
        if self._staged and request.abort_all_requests:
            raise Reason.FIELD_CONFLICT.error(
                "a staged update leaves requests alone until it is swapped; pause before the commit",
                field="abort_all_requests",
            )
        refuse_draft(request.selector, "selector")
        self._rank = rank
        self._update_id = update_id
        self._full = request.kind not in _LESS_THAN_FULL
        self._abort_all = request.abort_all_requests
        self._selector = request.selector
        self._digest_received, self._digest_key = request.digest_received, request.digest_key

    def admit(self) -> bool:
        """Refuse while requests are active, weights are released, or a different update is open.

        A staged update, and an update that aborts requests, allow active requests. Mixed or lost weights need a full
        update.
        """
        rank = self._rank
        if rank.update is not None and rank.update.update_id != self._update_id:
            rank.refuse_during_update()
        if MEMORY_TAG_WEIGHTS in rank.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released and cannot be written")
        if not self._full and rank.weights is not Weights.WHOLE:
            raise Reason.WEIGHTS_DIRTY.error(f"only a full update helps weights that are {rank.weights.value}")
        if not self._abort_all and not self._staged:
            rank.refuse_active()
        return True

    def run(self) -> WeightsReport | Later:
        """Open the update. From now on no request runs, unless the update is staged: its copy is made in the
        background.
        """
        if self._staged:
            self._go_first()
            return Later(self._begin)
        return self._begin()

    def _go_first(self) -> None:
        """Stop reads of the served weights, which must not delay an update."""
        self._rank.beside.stop(
            Reason.UPDATE_IN_PROGRESS.error(f"update {self._update_id} began meanwhile, and goes first")
        )

    def _begin(self) -> WeightsReport:
        rank = self._rank
        council = rank.ranks.aside if self._staged else rank.ranks
        kind: Literal["full", "partial"] = "full" if self._full else "partial"
        destinations: list[tuple[Shadow | None, Receiver, ShardMap]] = []

        def begin() -> None:
            destinations.append(self._where())
            destinations[0][1].begin(self._update_id, kind, digest=self._digest_received, key=self._digest_key)

        council.agree(begin)
        shadow, receiver, shards = destinations[0]
        if shadow is None:
            self._go_first()
        if self._abort_all and rank.scheduler is not None:
            rank.scheduler.abort_all()
        touched = False
        if rank.update is not None:
            touched = rank.update.touched
            _abandon(rank, rank.update)
        loading = Loading(shadow or rank.model, Load(self._update_id, self._full, self._selector))
        rank.update = OpenUpdate(self._update_id, loading, receiver, shards, council, shadow, touched)
        return rank.update.report

    def _where(self) -> tuple[Shadow | None, Receiver, ShardMap]:
        """Return the shadow copy of a staged update (else None), the receiver, and the shard map of the writes."""
        rank = self._rank
        if not self._staged:
            return None, rank.receiver, rank.writable
        shadow = Shadow(rank.model)
        shards = sabotage.for_updates(shadow.shards, rank.ranks.rank, rank.ranks.size)
        return shadow, Receiver(shards), shards


class InUpdate(Action):
    """Base of the actions in an open update."""

    def __init__(self, rank: Rank, update_id: str) -> None:
        self._rank = rank
        self._update_id = update_id

    def admit(self) -> bool:
        """Refuse unless the command belongs to the open update."""
        self._open()
        return True

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

    def _fill(self, work: Callable[[OpenUpdate], WeightsReport]) -> WeightsReport | Later:
        """Carry out work that fills the weights. A shadow copy or an adapter is filled in the background.

        A failure in the background is a refusal, because nothing that is served has been touched.
        """
        update = self._open()
        if not update.aside:
            return work(update)

        def staged() -> WeightsReport:
            try:
                return work(update)
            except RlctlError as error:
                raise with_outcome(error, OUTCOME_REJECTED) from error
            except Broken as broken:
                raise with_outcome(broken.error, OUTCOME_REJECTED) from broken

        return Later(staged)


class FromDistributed(InUpdate):
    """UpdateWeightsFromDistributed: receive the announced buckets over groups."""

    def __init__(
        self, rank: Rank, request: UpdateWeightsFromDistributedRequest, update_id: str, deadline: float
    ) -> None:
        """``deadline`` is on :func:`time.monotonic`'s clock. A broadcast may take the remaining time."""
        super().__init__(rank, update_id)
        self._deadline = deadline
        if request.load_format:
            raise Reason.UNSUPPORTED.error(
                f"the torch engine goes by the buckets' own formats, not by {request.load_format!r}",
                field="load_format",
            )
        refuse_draft(request.options.selector, "options.selector")
        self._stream = rank.announced.parse(request.buckets, request.group_name)

    def run(self) -> WeightsReport | Later:
        """Receive until the buckets are in place, or the receive is interrupted or fails."""
        return self._fill(self._receive)

    def _receive(self, update: OpenUpdate) -> WeightsReport:
        rank = self._rank
        groups: dict[str, WeightGroup] = {}
        update.council.agree(lambda: groups.update({name: rank.groups.get(name) for name, _ in self._stream}))
        update.council.agree(update.loading.prepare)
        try:
            stats = update.take_in(lambda: self._from_groups(update, groups))
        except RlctlError as error:
            update.touched |= error.outcome != OUTCOME_REJECTED
            raise
        update.touched = True
        return stats.add_to(update.report)

    def _from_groups(self, update: OpenUpdate, groups: dict[str, WeightGroup]) -> ReceiveStats:
        try:
            stream = [(groups[name], bucket) for name, bucket in self._stream]
            return update.receiver.receive(stream, self._deadline)
        except RlctlError as error:
            if error.reason in (Reason.GROUP_FAILED, Reason.MEMORY_FULL):
                # The sources of other ranks would wait for this rank until their timeout.
                for name, group in groups.items():
                    self._rank.groups.drop(name, group)
            raise


class FromTensor(InUpdate):
    """UpdateWeightsFromTensor: every rank copies its slices out of the segments for its host and device."""

    def __init__(self, rank: Rank, request: UpdateWeightsFromTensorRequest, update_id: str) -> None:
        super().__init__(rank, update_id)
        for field in ("load_format", "engine_payloads"):
            if getattr(request, field):
                raise Reason.UNSUPPORTED.error(
                    "the torch engine takes tensors by name, dtype and shape out of segments", field=field
                )
        refuse_draft(request.options.selector, "options.selector")
        # Leases run from here on.
        self._segments = [segment.from_proto(s, f"segments[{i}]") for i, s in enumerate(request.segments)]

    def run(self) -> WeightsReport | Later:
        """Map and check the segments on all ranks, then copy."""
        return self._fill(self._copy)

    def _copy(self, update: OpenUpdate) -> WeightsReport:
        rank = self._rank
        checked: list[Reading] = []
        update.council.agree(lambda: checked.append(rank.segments.check(self._segments, update.receiver)))
        update.council.agree(update.loading.prepare)
        # From here on other ranks may have written, even if this rank fails.
        update.touched = True
        try:
            gently = update.aside
            stats = update.take_in(lambda: rank.segments.read(checked[0], update.receiver, gently=gently))
        except RlctlError as error:
            raise with_outcome(error, OUTCOME_DIRTY if update.stages_adapter is None else OUTCOME_REJECTED) from error
        return stats.add_to(update.report)


class Seal(InUpdate):
    """SealUpdate: the shadow copy or the adapter is complete, and receives no more writes.

    The seal of an adapter stops the requests with the replaced adapter until the commit or the abort.
    """

    def admit(self) -> bool:
        """Refuse unless there is a shadow copy or an adapter. A drain waits for the requests with the adapter."""
        rank, update = self._rank, self._open()
        if not update.aside:
            raise Reason.UPDATE_NOT_FOUND.error(f"update {self._update_id} is not staged: there is no shadow copy")
        if update.stages_adapter is None or rank.paused or rank.scheduler is None:
            return True
        name = update.stages_adapter.name
        if rank.scheduler.is_paused(name):
            return True
        match update.pause:
            case common_pb2.PAUSE_MODE_UNSPECIFIED:
                refuse(rank.scheduler.using(name), f"are waiting or running with adapter {name!r}")
            case common_pb2.PAUSE_MODE_DRAIN:
                rank.scheduler.drain_adapter(name)
                return not rank.scheduler.runs_with(name)
        return True

    def give_up(self) -> None:
        """Let waiting requests with the adapter start again."""
        if self._rank.scheduler is not None:
            self._rank.scheduler.release_adapter()

    def run(self) -> WeightsReport | Later:
        """Check on all ranks that everything was written. Then finalise the load, or stop the adapter's requests."""
        update = self._open()
        if update.stages_adapter is not None:
            return self._seal_adapter(update, update.stages_adapter.name)
        return self._fill(self._seal)

    def _seal_adapter(self, update: OpenUpdate, name: str) -> WeightsReport:
        rank = self._rank
        try:
            rank.ranks.agree(update.check_complete)
        except RlctlError:
            self.give_up()
            raise
        if rank.scheduler is not None:
            rank.scheduler.hold_adapter(name, update.pause)
        return update.report

    def _seal(self, update: OpenUpdate) -> WeightsReport:
        assert update.shadow is not None
        if not update.shadow.sealed:
            update.council.agree(update.check_complete)
            # A delta without differences from its base sends nothing: the copy is the base.
            update.council.agree(update.loading.prepare)
            update.council.agree(update.loading.finalise)
            update.report.received_digest = update.receiver.received_digest
            update.shadow.sealed = True
        return update.report


class Commit(InUpdate):
    """CommitUpdate: the weights are one version again, or an adapter is put in place."""

    def __init__(self, rank: Rank, request: CommitUpdateRequest, update_id: str) -> None:
        super().__init__(rank, update_id)
        self._drop_adapters = request.adapters == ADAPTER_POLICY_DROP

    def admit(self) -> bool:
        """Refuse a swap during requests, which would continue with KV entries of other weights."""
        if self._open().shadow is not None:
            self._rank.refuse_active()
        return True

    def run(self) -> WeightsReport:
        """Check on all ranks that everything was written, then close the update."""
        rank, update = self._rank, self._open()
        if update.stages_adapter is not None:
            return self._commit_adapter(update)
        if update.shadow is None:
            self._complete(update)
            update.report.received_digest = update.receiver.received_digest
        else:
            self._swap(update, update.shadow)
        update.receiver.finish()
        rank.weights = Weights.WHOLE
        rank.checkpoint = update.checkpoint or rank.checkpoint
        if update.touched:
            # Only weights that a single read has written can be read again.
            is_sole_source = update.origin is not None and update.report.tensors == len(rank.writable.shards)
            rank.read_from(update.origin if is_sole_source else None)
        for name in rank.adapters.loaded if self._drop_adapters else ():
            rank.drop_adapter(name)
        rank.update = None
        return update.report

    def _complete(self, update: OpenUpdate) -> None:
        rank = self._rank
        try:
            rank.ranks.agree(update.check_complete)
            rank.ranks.agree(update.loading.finalise)
        except RlctlError as error:
            raise with_outcome(error, OUTCOME_DIRTY if update.touched else OUTCOME_REJECTED) from error
        rank.synchronise()

    def _swap(self, update: OpenUpdate, shadow: Shadow) -> None:
        rank = self._rank

        def check() -> None:
            if not shadow.sealed:
                raise Reason.ILLEGAL_STATE.error("the shadow copy is not sealed and may be incomplete")

        rank.ranks.agree(check)
        rank.beside.stop(Reason.UPDATE_IN_PROGRESS.error(f"update {self._update_id} has replaced the weights"))
        previous = shadow.swap()
        if rank.last_step:
            add_seconds(update.report.swap, time.perf_counter() - rank.last_step)
        rank.beside.let_go(previous)

    def _commit_adapter(self, update: OpenUpdate) -> WeightsReport:
        """Put the adapter in place at this step, once every rank has all tensors. Nothing changes before."""
        rank = self._rank
        rank.ranks.agree(update.check_complete)
        rank.synchronise()  # the adapter was filled on a stream of its own
        assert update.adapter is not None
        update.receiver.finish()
        rank.put_adapter(update.adapter)
        _let_go_on(rank)
        rank.update = None
        return update.report


class Abort(InUpdate):
    """AbortUpdate. Confirms if no update is open."""

    def admit(self) -> bool:
        """Refuse if a different update is open."""
        if self._rank.update is not None:
            self._open()
        return True

    def run(self) -> None:
        """Close the update. Weights touched in place are a mixture now; a shadow copy is dropped."""
        rank = self._rank
        if rank.update is not None:
            _abandon(rank, rank.update)
            if rank.update.touched and rank.in_place and rank.update.stages_adapter is None:
                rank.weights = Weights.MIXED
                rank.read_from(None)
            rank.update.receiver.finish()
            _let_go_on(rank)
        rank.update = None


def _let_go_on(rank: Rank) -> None:
    if rank.scheduler is not None:
        rank.scheduler.release_adapter()


def _abandon(rank: Rank, update: OpenUpdate) -> None:
    update.loading.abandon()
    if update.origin is not None:
        update.origin.stored.close()
    if update.shadow is not None:
        rank.beside.let_go(update.shadow.memory())
