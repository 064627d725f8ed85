"""A staged update at one rank: received into a shadow copy during generation, digested there, swapped at the commit.

All steps but the swap run on the rank's background thread. A failure before the swap leaves the weights unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rlctl.contract.durations import add_seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.serialized_tensors.payload import FLATTENED
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.weights.checkpoint.checkpoint import open_checkpoint
from rlctl.weights.group.rank_groups import Groups
from rlctl.weights.receiver import Receiver
from rlctl.weights.shards.load_hooks import Load
from rlctl.weights.shards.shard_map import ShardMap
from rlctl.weights.shared_memory import segment as segments
from rlctl.weights.shared_memory.reader import SegmentReader
from rlctl_servers.ranks.model import RankModel
from rlctl_servers.ranks.receiving import Announced, check_complete, groups_of, receive
from rlctl_servers.ranks.shadow_copy import ShadowCopy

ABORTED = "the update was aborted"


class StagedUpdate:
    """One update. :meth:`swap` and :meth:`abandon` belong to the engine's thread, the other steps to the background.

    Attributes:
        load: the update for the engine's hooks.
    """

    def __init__(
        self,
        model: RankModel,
        shadow: ShadowCopy,
        load: Load,
        request: v.PrepareUpdateRequest,
        groups: Groups,
        reader: SegmentReader,
    ) -> None:
        """``reader``: used by the background thread."""
        self.load = load
        self._model = model
        self._shadow = shadow
        self._groups = groups
        self._reader = reader
        self._request = request
        self._receiver = Receiver(ShardMap({}))
        self._report = v.WeightsReport()
        self._sealed = False
        self._aborted = False

    def prepare(self) -> v.WeightsReport:
        """Allocate the copy. Raises MEMORY_FULL, CANCELLED."""
        self._shadow.allocate(self._proceed)
        receiver = Receiver(self._shadow.shards)
        kind: Literal["full", "partial"] = "full" if self.load.full else "partial"
        request = self._request
        receiver.begin(self.load.update_id, kind, digest=request.digest_received, key=request.digest_key)
        self._receiver = receiver
        self._proceed()  # abandon() may have interrupted the earlier receiver
        return self._report

    def from_groups(self, announced: Announced, timeout_s: float) -> v.WeightsReport:
        with self._filling():
            joined = groups_of(announced, self._groups, self._model.product)
            return receive(announced, joined, self._groups, self._receiver, timeout_s).add_to(self._report)

    def from_segments(self, request: v.UpdateWeightsFromTensorRequest) -> v.WeightsReport:
        with self._filling():
            if request.load_format not in ("", FLATTENED):
                raise Reason.UNSUPPORTED.error(
                    f"a staged update writes memory; loader {request.load_format!r} would write the weights that serve",
                    field="load_format",
                )
            offered = [
                segments.from_proto(message, f"segments[{index}]") for index, message in enumerate(request.segments)
            ]
            checked = self._reader.check(offered, self._receiver)
            return self._reader.read(checked, self._receiver, gently=True).add_to(self._report)

    def from_disk(self, request: v.UpdateWeightsFromDiskRequest) -> v.WeightsReport:
        """Read a checkpoint that the stage server has compared with the reference."""
        with self._filling():
            stored = open_checkpoint(request.model_path)
            try:
                started = time.perf_counter()
                names = self._shadow.shards.select(stored)
                self._receiver.writing(names)
                for name in names:
                    self._proceed()
                    self._shadow.shards.place(name, stored.read(name))
                stored.check_unchanged()
                self._receiver.wrote(names)
                add_seconds(self._report.load, time.perf_counter() - started)
                self._report.tensors += len(names)
                self._report.bytes_received += sum(stored.metas[name].nbytes for name in names)
            finally:
                stored.close()
            return self._report

    def seal(self) -> v.WeightsReport:
        """Complete the copy; later writes are refused. Raises GROUP_FAILED, WEIGHTS_INCOMPLETE."""
        if self._sealed:
            return self._report
        with self._filling():
            check_complete(self._receiver, may_be_nothing=self._request.kind == v.UPDATE_KIND_DELTA)
            self._report.received_digest = self._receiver.received_digest
            self._receiver.finish()
            self._sealed = True
            return self._report

    @property
    def shards(self) -> ShardMap:
        """Return the parts of the checkpoint's tensors in the copy."""
        return self._shadow.shards

    def swap(self) -> v.WeightsReport:
        """Write the sealed copy to the weights. Raises ILLEGAL_STATE, INTERNAL; after a write ENGINE_FAILED (DIRTY)."""
        if not self._sealed:
            raise Reason.ILLEGAL_STATE.error("the shadow copy is not sealed and may be incomplete")
        targets = self._shadow.targets()
        write_started = False

        def copy() -> None:
            nonlocal write_started
            write_started = True
            self._shadow.swap(targets)

        try:
            self._model.swap(self.load, copy)
        except Exception as error:
            if isinstance(error, RlctlError) and not write_started:
                raise
            cause = f"the swap failed: {type(error).__name__}: {error}"
            raise Reason.ENGINE_FAILED.error(cause, outcome=OUTCOME_DIRTY) from error
        return self._report

    def abandon(self) -> None:
        """End the background work. The copy is freed with the last reference to this object."""
        self._aborted = True
        self._receiver.interrupt(cause=ABORTED)

    def _proceed(self) -> None:
        if self._aborted:
            raise Reason.CANCELLED.error(f"update {self.load.update_id}: {ABORTED}")

    @contextmanager
    def _filling(self) -> Iterator[None]:
        """Run a step that writes only the copy. Its failure leaves the served weights unchanged."""
        self._proceed()
        if self._sealed:
            raise Reason.ILLEGAL_STATE.error("the update is sealed and takes no more writes")
        try:
            yield
        except RlctlError as error:
            error.outcome = OUTCOME_REJECTED
            raise
