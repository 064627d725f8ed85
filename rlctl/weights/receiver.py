"""Receives the tensors of an update at a rank, from groups or shared memory, into the places of its shard map.

The sending side is :mod:`rlctl.weights.group.sender`. The buckets are announced over the control plane in advance; a
group carries only the bytes of the tensors. The receiver checks the announced buckets against its shard map before the
first byte.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from rlctl.contract.durations import add_seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1 import common_pb2
from rlctl.v1.verbs_pb2 import WeightsReport
from rlctl.weights.group.process_group import INTERRUPTED, WeightGroup
from rlctl.weights.group.sender import SendStats, send, wire_device
from rlctl.weights.shards.shard_map import ShardMap
from rlctl.weights.tensor.buckets import Bucket, room_for, unpack
from rlctl.weights.tensor.digest import ModelDigest, tensor_digests
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes, castable
from rlctl.weights.tensor.work import memory_full

__all__ = ["ReceiveStats", "Receiver", "SendStats", "send"]


@dataclass
class ReceiveStats:
    """Statistics of a receive.

    Attributes:
        tensors: tensors that were written, wholly or the rank's slice.
        transfer_s: time inside broadcasts, seconds.
        load_s: time of placement and digests, seconds.
    """

    tensors: int = 0
    bytes_received: int = 0
    transfer_s: float = 0.0
    load_s: float = 0.0

    def add_to(self, report: WeightsReport) -> WeightsReport:
        report.tensors += self.tensors
        report.bytes_received += self.bytes_received
        add_seconds(report.transfer, self.transfer_s)
        add_seconds(report.load, self.load_s)
        return report


class Receiver:
    """Receives updates at one rank. One thread receives; :meth:`interrupt` may come from any thread.

    Attributes:
        update_id: the last update that was begun, or "".
        kind: "full" or "partial".
        written: checkpoint names of the tensors that this update has placed.
    """

    def __init__(self, shards: ShardMap) -> None:
        self.update_id = ""
        self.kind: Literal["full", "partial"] = "full"
        self.written: set[str] = set()
        self._begun: set[str] = set()
        self._received: ModelDigest | None = None
        self._shards = shards
        self._next: dict[str, int] = {}
        self._buffer: torch.Tensor | None = None
        self._largest = 0
        self._lock = threading.Lock()
        self._busy = ""
        self._groups: list[WeightGroup] = []
        self._interrupted = ""
        self._late: WeightGroup | None = None

    @property
    def at_risk(self) -> bool:
        """Whether an interrupted broadcast may still write into the weights.

        The broadcast ends by its own timeout at the latest. Until then no placed tensor is safe.
        """
        return self._late is not None and self._late.under_way

    @property
    def begun(self) -> Collection[str]:
        """Names of the tensors whose placement has begun in this update."""
        return self._begun

    @property
    def received_digest(self) -> str:
        """Digest of the tensors received in this update, as received, hex; "" without ``digest`` in :meth:`begin`."""
        return "" if self._received is None else self._received.digest()

    def begin(
        self, update_id: str, kind: Literal["full", "partial"] = "full", *, digest: bool = False, key: bytes = b""
    ) -> None:
        """Start an update and forget what an earlier update wrote.

        ``digest``: digest the received tensors, with ``key``. A repeated begin of the same update starts anew;
        half-written tensors must still be written.

        Raises FIELD_INVALID for another kind, OPERATION_CONFLICT during a receive, GROUP_FAILED while the weights are
        :attr:`at_risk`.
        """
        if kind not in ("full", "partial"):
            raise Reason.FIELD_INVALID.error(f"an update of kind {kind!r} cannot be received", field="options.kind")
        if self.at_risk:
            raise Reason.GROUP_FAILED.error(
                "a broadcast of an earlier update may still write into the weights", next_step="Try again in a while."
            )
        with self._lock:
            self._check_idle()
            if update_id != self.update_id:
                self._begun = set()
            self.update_id, self.kind = update_id, kind
            self.written = set()
            self._received = ModelDigest(key) if digest else None
            self._next = {}
            self._interrupted = ""
            self._late = None

    def receive(self, stream: Sequence[tuple[WeightGroup, Bucket]], deadline: float | None = None) -> ReceiveStats:
        """Receive the next buckets, each over its group, in the given order; block until all are placed.

        ``deadline`` is on :func:`time.monotonic`'s clock; each broadcast may take the remaining time. None: the group's
        limit. All ranks that share groups must have the same order, so that no two sources wait for each other. Every
        group numbers its buckets from 0, over all calls since :meth:`begin`. A tensor that is whole here and is sent
        alone is received in place. Other tensors arrive in one buffer, from which the rank's part is copied.

        Raises before the first byte: ILLEGAL_STATE (no update was begun), OPERATION_CONFLICT (a receive is running),
        FIELD_INVALID (a gap or repeat in the sequence, an unknown name, a shape or dtype unfit for the shard map),
        GROUP_FAILED with outcome REJECTED (interrupted, or the group is spent). Afterwards: GROUP_FAILED, DIRTY; the
        tensors of an incomplete bucket are not ``written``. At any time: MEMORY_FULL, DIRTY from the first written
        tensor on. After the first byte any error spends the groups, so that no member waits for this rank.
        """
        with self._claim(groups=[group for group, _ in stream]):
            self._check(stream)
            stats = ReceiveStats()
            # One buffer for all buckets: a replaced smaller buffer would stay with the allocator.
            self._largest = max((bucket.nbytes for _, bucket in stream if bucket.flattened), default=0)
            for group, bucket in stream:
                names = {meta.name for meta in bucket.metas}
                self.writing(names)
                if deadline is not None:
                    group.allow(deadline - time.monotonic())
                try:
                    with _enough_memory():
                        self._take_bucket(group, bucket, stats)
                except BaseException as error:
                    # An interrupted broadcast may still write into the buffer: the buffer goes with the group.
                    self._buffer = None
                    for member in self._groups:
                        member.interrupt("a rank gave up")  # the other members would wait for this rank
                    if stats.tensors and isinstance(error, RlctlError):
                        error.outcome = common_pb2.OUTCOME_DIRTY
                    raise
                self._next[group.name] = bucket.sequence + 1
                self.wrote(names)
            self._synchronise()
        return stats

    def copy(
        self,
        source: str,
        tensors: Sequence[tuple[str, torch.Tensor]],
        proceed: Callable[[], None],
        *,
        threads: int = 1,
    ) -> ReceiveStats:
        """Copy full tensors from memory into place. :meth:`check` must have accepted the tensors.

        ``source`` names the memory in errors. ``proceed`` is called before the first tensor, after each tensor and
        after all device work, in any of the threads. It raises if the memory is no longer valid. The tensors are
        ``written`` only if no call raised. ``threads``: maximum number of copying threads.

        Raises ILLEGAL_STATE, OPERATION_CONFLICT, CANCELLED (interrupted), MEMORY_FULL and errors of ``proceed``; the
        outcome is DIRTY after the copying has begun.
        """
        started = time.perf_counter()
        with self._claim(source):
            proceed()
            names = {name for name, _ in tensors}
            self.writing(names)
            if self._on_gpu and self._received is None:
                threads = 1  # a GPU copies by itself; several threads would only contend
            # The largest tensor first, so that the threads end together.
            queue = deque(sorted(tensors, key=lambda entry: -entry[1].nbytes))
            try:
                with ThreadPoolExecutor(threads, thread_name_prefix="copy") as helpers:
                    jobs = [helpers.submit(self._copy_from, queue, source, proceed) for _ in range(threads - 1)]
                    self._copy_from(queue, source, proceed)
                for job in jobs:
                    job.result()
                self._synchronise()
                proceed()
            except BaseException as error:
                # Wait also for enqueued copies: the memory is released afterwards.
                self._synchronise()
                if isinstance(error, RlctlError):
                    error.outcome = common_pb2.OUTCOME_DIRTY
                raise
            self.wrote(names)
        nbytes = sum(tensor.nbytes for _, tensor in tensors)
        return ReceiveStats(len(tensors), nbytes, load_s=time.perf_counter() - started)

    def _copy_from(self, queue: deque[tuple[str, torch.Tensor]], source: str, proceed: Callable[[], None]) -> None:
        try:
            while True:
                try:
                    name, tensor = queue.popleft()
                except IndexError:
                    return
                with _enough_memory():
                    self._shards.place(name, tensor)
                    if self._received is not None:
                        self._received.add(name, tensor)
                if self._interrupted:
                    raise self._broken_off(source)
                proceed()
        except BaseException:
            # The other threads stop after their present tensor.
            queue.clear()
            raise

    @property
    def _on_gpu(self) -> bool:
        return any(shard.local.is_cuda for shard in self._shards.shards.values())

    def _synchronise(self) -> None:
        if self._on_gpu:
            # Copies into place are only enqueued, and generation may use another stream.
            torch.cuda.synchronize()

    def writing(self, names: Collection[str]) -> None:
        """Record the start of a placement, also of tensors that were placed before.

        The tensors are not ``written`` until their placement is complete. An update that ends before is incomplete.
        """
        self.written.difference_update(names)
        self._begun.update(names)

    def wrote(self, names: Collection[str]) -> None:
        """Record tensors whose placement is complete."""
        self.written.update(names)

    def undone(self) -> None:
        """Record that all weights are as before the update."""
        self.written, self._begun = set(), set()

    def missing(self) -> list[str]:
        """Return the names of the reference that this update has not written, sorted."""
        return sorted(self._shards.shards.keys() - self.written)

    def incomplete(self) -> list[str]:
        """Return the names that must still be written before a commit, sorted.

        For a full update all :meth:`missing` names; for a partial update the begun tensors and their atomic lists.
        """
        if self.kind == "full":
            return self.missing()
        started = self._begun | self.written
        atomic_lists = (names for names in self._shards.together if not started.isdisjoint(names))
        return sorted(started.union(*atomic_lists) - self.written)

    def interrupt(self, update_id: str = "", cause: str = INTERRUPTED) -> None:
        """End a receive with GROUP_FAILED (or CANCELLED, see :meth:`copy`). Refuse more until :meth:`begin`.

        With ``update_id``, only if that update is the present update; ``cause`` is the text of the error. Never blocks.
        """
        with self._lock:
            if update_id and update_id != self.update_id:
                return
            self._interrupted = cause
            groups = self._groups
        for group in groups:
            group.interrupt(cause)

    def finish(self) -> None:
        """Free the buffer after the update. Written names stay known until the next begin."""
        self._buffer = None

    @contextmanager
    def _claim(self, source: str = "", groups: Iterable[WeightGroup] = ()) -> Iterator[None]:
        """Exclude other receives meanwhile; ``source`` or the groups are named in their errors."""
        with self._lock:
            self._check_idle()
            if not self.update_id:
                raise Reason.ILLEGAL_STATE.error("no update was begun")
            if self._interrupted:
                raise self._broken_off(source)
            self._groups = list(dict.fromkeys(groups))
            self._busy = source or f"group {', '.join(group.name for group in self._groups)}"
        try:
            yield
        finally:
            with self._lock:
                self._busy, self._groups = "", []

    def _broken_off(self, source: str) -> RlctlError:
        reason = Reason.CANCELLED if source else Reason.GROUP_FAILED
        return reason.error(f"receiving update {self.update_id}: {self._interrupted}")

    def _check_idle(self) -> None:
        if self._busy:
            raise Reason.OPERATION_CONFLICT.error(f"tensors are being received from {self._busy}")

    def _check(self, stream: Sequence[tuple[WeightGroup, Bucket]]) -> None:
        expected = dict(self._next)
        for position, (group, bucket) in enumerate(stream):
            field = f"buckets[{position}]"
            expected_sequence = expected.get(group.name, 0)
            if bucket.sequence != expected_sequence:
                problem = "repeats one" if bucket.sequence < expected_sequence else "leaves a gap"
                raise Reason.FIELD_INVALID.error(
                    f"bucket {bucket.sequence} of group {group.name} {problem}: {expected_sequence} comes next",
                    field=f"{field}.sequence",
                )
            expected[group.name] = expected_sequence + 1
            for index, meta in enumerate(bucket.metas):
                if not self.fits(meta):
                    self.check(meta, *(f"{field}.{part}[{index}]" for part in ("names", "dtypes", "shapes")))

    def fits(self, meta: TensorMeta) -> bool:
        """Return whether a tensor equals the shard map's entry, so that :meth:`check` is not needed."""
        shard = self._shards.shards.get(meta.name)
        return shard is not None and meta == shard.meta

    def check(self, meta: TensorMeta, name: str, dtype: str, shape: str) -> None:
        """Raise FIELD_INVALID if a tensor cannot be placed; the other arguments are fields of the request."""
        shard = self._shards.shards.get(meta.name)
        if shard is None:
            raise Reason.FIELD_INVALID.error(f"the model has no tensor {meta.name!r}", field=name)
        if meta.shape != shard.meta.shape:
            raise Reason.FIELD_INVALID.error(
                f"{meta.name}: shape {meta.shape} instead of {shard.meta.shape}", field=shape
            )
        if not castable(meta.dtype, shard.meta.dtype):
            raise Reason.FIELD_INVALID.error(f"{meta.name}: {meta.dtype} instead of {shard.meta.dtype}", field=dtype)

    def _take_bucket(self, group: WeightGroup, bucket: Bucket, stats: ReceiveStats) -> None:
        if bucket.flattened:
            self._take_packed(group, bucket, stats)
            return
        take = self._take_part if bucket.parts else self._take_tensor
        for meta in bucket.metas:
            take(group, meta, stats)

    def _take_packed(self, group: WeightGroup, bucket: Bucket, stats: ReceiveStats) -> None:
        device = wire_device(group, self._shards.shards[bucket.metas[0].name].local.device)
        self._buffer = room_for(max(bucket.nbytes, self._largest), self._buffer, device)
        self._receive(group, self._buffer[: bucket.nbytes], stats)
        self._place(unpack(bucket, self._buffer), stats)

    def _take_tensor(self, group: WeightGroup, meta: TensorMeta, stats: ReceiveStats) -> None:
        local = self._shards.shards[meta.name].local
        device = wire_device(group, local.device)
        target = self._shards.full_in_place(meta.name)
        if target is not None and target.dtype == meta.dtype and target.device == device:
            try:
                self._receive(group, as_bytes(target), stats)
            finally:
                self._late = group if group.under_way else self._late
            stats.tensors += 1
            self._digest([(meta.name, target)], stats)
            return
        self._buffer = room_for(meta.nbytes, self._buffer, device)
        data = self._buffer[: meta.nbytes]
        self._receive(group, data, stats)
        self._place([(meta.name, data.view(meta.dtype).reshape(meta.shape))], stats)

    def _take_part(self, group: WeightGroup, meta: TensorMeta, stats: ReceiveStats) -> None:
        target = self._shards.part_in_place(meta.name)
        device = wire_device(group, target.device)
        if target.dtype == meta.dtype and target.device == device and target.is_contiguous():
            try:
                self._receive(group, as_bytes(target), stats)
            finally:
                self._late = group if group.under_way else self._late
        else:
            size = target.numel() * meta.dtype.itemsize
            self._buffer = room_for(size, self._buffer, device)
            self._receive(group, self._buffer[:size], stats)
            self._shards.place_local(meta.name, self._buffer[:size].view(meta.dtype).reshape(target.shape))
        stats.tensors += 1

    def _receive(self, group: WeightGroup, into: torch.Tensor, stats: ReceiveStats) -> None:
        started = time.perf_counter()
        group.broadcast(into)
        stats.transfer_s += time.perf_counter() - started
        stats.bytes_received += into.nbytes

    def _digest(self, tensors: list[tuple[str, torch.Tensor]], stats: ReceiveStats) -> None:
        if self._received is not None:
            started = time.perf_counter()
            for name, digest in tensor_digests(
                {name: (tensor, tensor.dtype) for name, tensor in tensors}, key=self._received.key
            ).items():
                self._received.add_digest(name, digest)
            stats.load_s += time.perf_counter() - started

    def _place(self, tensors: list[tuple[str, torch.Tensor]], stats: ReceiveStats) -> None:
        self._digest(tensors, stats)
        started = time.perf_counter()
        for name, tensor in tensors:
            stats.tensors += 1  # a failed placement may have written a part
            self._shards.place(name, tensor)
        stats.load_s += time.perf_counter() - started


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Raise MEMORY_FULL if a device has no memory for a buffer: this refuses an update, and does not end the engine."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise memory_full(error) from error
