"""Receives the tensors of an update at a rank, from groups or from shared memory, into the places of its shard map. The
sending side is :mod:`rlctl.weights.group.sender`.

The buckets are announced over the control plane in advance. A group carries only the bytes of the tensors. The receiver
checks the announced buckets against its shard map before it takes the first byte.
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

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1 import common_pb2
from rlctl.weights.group.process_group import INTERRUPTED, WeightGroup
from rlctl.weights.group.sender import SendStats, send, wire_device
from rlctl.weights.shards.shard_map import ShardMap
from rlctl.weights.tensor.buckets import Bucket, room_for, unpack
from rlctl.weights.tensor.digest import ModelDigest, tensor_digests
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes, castable

__all__ = ["ReceiveStats", "Receiver", "SendStats", "send"]


@dataclass
class ReceiveStats:
    """What was taken in.

    Attributes:
        tensors: tensors that were written, wholly or the rank's slice.
        bytes_received: bytes that arrived.
        transfer_s: time inside broadcasts, seconds.
        load_s: time spent putting slices into place, seconds.
    """

    tensors: int = 0
    bytes_received: int = 0
    transfer_s: float = 0.0
    load_s: float = 0.0


class Receiver:
    """Takes updates in at one rank. Receiving happens in one thread; :meth:`interrupt` comes from any.

    Attributes:
        update_id: the update that was begun last, or "".
        kind: "full" or "partial".
        written: checkpoint names of the tensors that this update has put into place.
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
        """Whether a broadcast that was given up may still write into the weights.

        It ends by its own timeout at the latest; until then nothing that is put into place is safe.
        """
        return self._late is not None and self._late.under_way

    @property
    def begun(self) -> Collection[str]:
        """Names of the tensors whose placing has begun in this update."""
        return self._begun

    @property
    def received_digest(self) -> str:
        """Digest over the tensors that came in this update, as they came, hex; "" unless :meth:`begin` was told so."""
        return "" if self._received is None else self._received.digest()

    def begin(
        self, update_id: str, kind: Literal["full", "partial"] = "full", *, digest: bool = False, key: bytes = b""
    ) -> None:
        """Start an update; what an earlier one wrote is forgotten. ``digest``: digest what comes, with this key.

        The same update again starts anew, but what it has left half-written must still be written.

        Raises FIELD_INVALID for another kind, OPERATION_CONFLICT while buckets are being received, GROUP_FAILED while
        the weights are :attr:`at_risk`.
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
        """Take in the buckets that come next, each over its group, in the order given; blocks until they are in place.

        ``deadline``: on :func:`time.monotonic`'s clock; a broadcast may take what is left. None: what a group allows.
        All ranks that share groups must be given the same order: then no two sources wait for each other.
        Every group counts its buckets from 0 on, over all calls since :meth:`begin`. A tensor that is whole here and
        comes on its own is received in place; the others come through one buffer, of which the rank's part is copied.

        Raises, before anything is received: ILLEGAL_STATE (no update was begun), OPERATION_CONFLICT (a receive is
        under way), FIELD_INVALID (a gap or repeat in the sequence, an unknown name, a shape or dtype that does not
        fit the shard map), GROUP_FAILED with outcome REJECTED (interrupted, or the group is spent). Afterwards:
        GROUP_FAILED, DIRTY; the tensors of a bucket that did not come completely are not ``written``. At any time:
        MEMORY_FULL, DIRTY past the first tensor; the others still wait for this rank then.
        """
        with self._claim(groups=[group for group, _ in stream]):
            self._check(stream)
            stats = ReceiveStats()
            # One buffer for all: a smaller one that a larger replaces would stay with the allocator.
            self._largest = max((bucket.nbytes for _, bucket in stream if bucket.flattened), default=0)
            for group, bucket in stream:
                names = {meta.name for meta in bucket.metas}
                self.writing(names)
                if deadline is not None:
                    group.allow(deadline - time.monotonic())
                try:
                    with _enough_memory():
                        self._take_bucket(group, bucket, stats)
                except RlctlError as error:
                    # What was given up may still write into the buffer: it goes with the group.
                    self._buffer = None
                    if stats.tensors:
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
        """Copy full tensors that lie in memory at hand into place, once :meth:`check` has found that they fit.

        ``source`` says in words where they lie. ``proceed`` is asked before the first tensor, after each one and when
        all device work is done, in any of the threads; it raises when the memory is no longer good to read. The
        tensors are ``written`` only if it never did. ``threads``: at most so many copy at the same time.

        Raises ILLEGAL_STATE, OPERATION_CONFLICT, CANCELLED (it was interrupted), MEMORY_FULL and what ``proceed``
        raises; the outcome is DIRTY past the first tensor.
        """
        started = time.perf_counter()
        with self._claim(source):
            proceed()
            names = {name for name, _ in tensors}
            self.writing(names)
            if self._on_gpu and self._received is None:
                threads = 1  # a GPU copies by itself: threads that only tell it to stand in each other's way
            # The largest first, so that the threads end together.
            queue = deque(sorted(tensors, key=lambda entry: -entry[1].nbytes))
            try:
                with ThreadPoolExecutor(threads, thread_name_prefix="copy") as helpers:
                    jobs = [helpers.submit(self._copy_from, queue, source, proceed) for _ in range(threads - 1)]
                    self._copy_from(queue, source, proceed)
                for job in jobs:
                    job.result()
                self._synchronise()
                proceed()
            except RlctlError as error:
                # What was only enqueued ends here too: the memory is let go of after this.
                self._synchronise()
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
            # The other threads stop after the tensor that each of them is at.
            queue.clear()
            raise

    @property
    def _on_gpu(self) -> bool:
        return any(shard.local.is_cuda for shard in self._shards.shards.values())

    def _synchronise(self) -> None:
        if self._on_gpu:
            # Copies into place are only enqueued; what generates may be on another stream.
            torch.cuda.synchronize()

    def writing(self, names: Collection[str]) -> None:
        """These tensors are about to be put into place, also if they were before: until all of it is, they are none
        of those that are ``written``, and an update that leaves it at that is not complete.
        """
        self.written.difference_update(names)
        self._begun.update(names)

    def wrote(self, names: Collection[str]) -> None:
        """These tensors have come completely."""
        self.written.update(names)

    def undone(self) -> None:
        """Everything is again as it was before the update."""
        self.written, self._begun = set(), set()

    def missing(self) -> list[str]:
        """Names of the reference that this update has not written, sorted."""
        return sorted(self._shards.shards.keys() - self.written)

    def incomplete(self) -> list[str]:
        """Names that must still be written before this update can be committed, sorted.

        Of a full update all that are :meth:`missing`; of a partial one what was begun, and what belongs to it.
        """
        if self.kind == "full":
            return self.missing()
        begun = self._begun | self.written
        together = (names for names in self._shards.together if not begun.isdisjoint(names))
        return sorted(begun.union(*together) - self.written)

    def interrupt(self, update_id: str = "", cause: str = INTERRUPTED) -> None:
        """End what is under way with GROUP_FAILED (or CANCELLED, see :meth:`copy`); refuse more until :meth:`begin`.

        With ``update_id``, only if that update is the present one; ``cause`` is what the error says. Never blocks.
        """
        with self._lock:
            if update_id and update_id != self.update_id:
                return
            self._interrupted = cause
            groups = self._groups
        for group in groups:
            group.interrupt(cause)

    def finish(self) -> None:
        """The update is over: give the buffer's memory back. What was written stays known until the next begin."""
        self._buffer = None

    @contextmanager
    def _claim(self, source: str = "", groups: Iterable[WeightGroup] = ()) -> Iterator[None]:
        """Nobody else receives meanwhile: from groups, or from what ``source`` says."""
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
            due = expected.get(group.name, 0)
            if bucket.sequence != due:
                what = "repeats one" if bucket.sequence < due else "leaves a gap"
                raise Reason.FIELD_INVALID.error(
                    f"bucket {bucket.sequence} of group {group.name} {what}: {due} comes next",
                    field=f"{field}.sequence",
                )
            expected[group.name] = due + 1
            for index, meta in enumerate(bucket.metas):
                if not self.fits(meta):
                    self.check(meta, *(f"{field}.{part}[{index}]" for part in ("names", "dtypes", "shapes")))

    def fits(self, meta: TensorMeta) -> bool:
        """Whether a tensor is exactly what the shard map has: there is nothing to :meth:`check`."""
        shard = self._shards.shards.get(meta.name)
        return shard is not None and meta == shard.meta

    def check(self, meta: TensorMeta, name: str, dtype: str, shape: str) -> None:
        """Raise FIELD_INVALID when a tensor cannot be put into place; the rest say where the request has its fields."""
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
            self._digest([(meta.name, target)], stats)
            stats.tensors += 1
            return
        self._buffer = room_for(meta.nbytes, self._buffer, device)
        data = self._buffer[: meta.nbytes]
        self._receive(group, data, stats)
        self._place([(meta.name, data.view(meta.dtype).reshape(meta.shape))], stats)

    def _take_part(self, group: WeightGroup, meta: TensorMeta, stats: ReceiveStats) -> None:
        """Take in just what this rank holds of a tensor."""
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
            self._shards.place(name, tensor)
        stats.load_s += time.perf_counter() - started
        stats.tensors += len(tensors)


@contextmanager
def _enough_memory() -> Iterator[None]:
    """A device without memory for a buffer refuses an update; it is no defect that an engine would have to end for."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Reason.MEMORY_FULL.error(str(error).splitlines()[0]) from error
