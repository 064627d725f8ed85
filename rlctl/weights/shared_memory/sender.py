"""The source's side of shared segments: copies tensors into pooled segments and describes each segment."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rlctl.v1 import verbs_pb2
from rlctl.weights.shared_memory.pool import Memory, SegmentPool
from rlctl.weights.shared_memory.posix import free_bytes, sweep
from rlctl.weights.shared_memory.segment import to_proto
from rlctl.weights.tensor.buckets import Bucket, plan, unpack
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.placement import CPU, host_id
from rlctl.weights.tensor.source import WeightSource, check_given, unannounced, unfit
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.tensor.work import digesting_threads

SEGMENT_BYTES = 1 << 30
"""Maximum bytes of tensors in a segment; a larger tensor has its own segment."""

SHARES = 4
"""A segment in host memory takes at most 1/SHARES of the room in /dev/shm, or the largest tensor if that is more.

The room must suffice for two segments of a sender, and for the copies that engine servers make for their ranks.
"""

SEGMENTS = 2
"""Segments of a sender: a segment is written while the other segment is read."""

LEASE_S = 300.0
"""Default time in which receivers may read a segment: the verb's own deadline."""

_WHOLE = 1 << 62


@dataclass(frozen=True)
class SentSegment:
    """A segment that was written and lent to the receivers.

    Attributes:
        messages: the segment's message, once for each device.
        nbytes: bytes that were copied.
        seconds: duration of the copy, seconds.
        release: frees the memory for reuse; to be called after every receiver has answered for certain and reads no
            more. Without a call, as after an UNKNOWN answer, the memory is reused only after the lease. Idempotent.
    """

    messages: list[verbs_pb2.TensorSegment]
    nbytes: int
    seconds: float
    release: Callable[[], None]


class SegmentSender:
    """Writes one source's updates into segments, for ranks on the same host. One update at a time."""

    def __init__(
        self, device: torch.device | str = CPU, *, segment_bytes: int = SEGMENT_BYTES, segments: int = SEGMENTS
    ) -> None:
        """Use segments in shared memory, or on the GPU ``device`` for ranks on that GPU, without an allocation yet.

        Removes segments of crashed senders.
        """
        self._pool = SegmentPool(torch.device(device), segments)
        self._segment_bytes = segment_bytes
        sweep()

    @property
    def pool(self) -> SegmentPool:
        return self._pool

    @property
    def room(self) -> int:
        """Bytes that this sender's segments may take in host memory, including its existing segments."""
        pool_bytes = self._pool.nbytes if self._pool.device_id == CPU else 0
        return free_bytes() + pool_bytes

    def write(
        self,
        source: WeightSource,
        wire: Sequence[TensorMeta],
        *,
        devices: Sequence[str] = (),
        lease_s: float = LEASE_S,
        digest: ModelDigest | None = None,
        deadline: float | None = None,
        on_all_read: Callable[[], None] = lambda: None,
    ) -> Generator[SentSegment, None, None]:
        """Copy a source's tensors into segments in one pass; yield each segment after its write.

        Segments are smaller if /dev/shm has little room, down to the largest tensor.

        ``wire``: names, full shapes and wire dtypes of the tensors, in the source's order. ``devices``: device
        identities of the ranks on this host that read; empty: the sender's own. ``lease_s``: at least the timeout of
        the calls that announce the segments; receivers stop at the earlier end. ``digest`` digests exactly the sent
        bytes, in parallel; it is complete at the end of the iterator. If all segments are lent, the iterator waits for
        a release or the end of a lease, until ``deadline`` (on :func:`time.monotonic`'s clock; None: twice ``lease_s``
        from now). ``on_all_read`` is called at the end of the source, after the iterator has yielded the last segment.
        The source's tensors may then be overwritten.

        Raises FIELD_INVALID if source and wire differ; SHARED_MEMORY_FULL, DEADLINE_EXCEEDED, CANCELLED (closed).
        Errors of the source itself pass through.
        """
        buckets = plan(wire, bucket_bytes=self._most_bytes(wire), large_bytes=_WHOLE)
        tensors = source.tensors()
        digesting: dict[int, list[Future[None]]] = {}
        limit = time.monotonic() + 2 * lease_s if deadline is None else deadline
        with ThreadPoolExecutor(digesting_threads(digest.key if digest else b""), "digest") as digesters:
            for bucket in buckets:
                memory = self._pool.take(bucket.nbytes, limit)
                views: list[tuple[str, torch.Tensor]] = []
                try:
                    for future in digesting.pop(id(memory), []):
                        future.result()
                    started = time.perf_counter()
                    views = unpack(bucket, memory.data)
                    for index, meta in enumerate(bucket.metas):
                        tensor = _next(tensors, meta)
                        views[index][1].copy_(tensor)  # casts in one pass, from any device and layout
                    segment = self._lend(bucket, memory, devices or [self._pool.device_id], lease_s, started)
                except BaseException:
                    views.clear()  # or a kept traceback would keep the memory mapped
                    self._pool.give_back(memory)
                    raise
                if digest is not None:
                    digesting[id(memory)] = [digesters.submit(digest.add, name, view) for name, view in views]
                yield segment
            if (extra := next(tensors, None)) is not None:
                raise unannounced(extra[0])
            on_all_read()
            for future in itertools.chain(*digesting.values()):
                future.result()

    def _most_bytes(self, wire: Sequence[TensorMeta]) -> int:
        """Return the present maximum bytes of tensors in a segment.

        A power of two, so that small changes of room have no effect.
        """
        if self._pool.device_id != CPU:
            return self._segment_bytes
        share = self.room // SHARES
        return min(self._segment_bytes, max(1 << share.bit_length() >> 1, largest(wire)))

    def close(self) -> None:
        self._pool.close()

    def _lend(
        self, bucket: Bucket, memory: Memory, devices: Sequence[str], lease_s: float, started: float
    ) -> SentSegment:
        borrower = object()
        generation = self._pool.lend(memory, borrower, lease_s)
        messages = []
        for device in devices:
            message = to_proto(bucket, start=memory.start, node=host_id(), generation=generation, lease_s=lease_s)
            message.device = device
            memory.address(message)
            messages.append(message)
        release = functools.partial(self._pool.give_back, memory, borrower)
        return SentSegment(messages, bucket.nbytes, time.perf_counter() - started, release)


def largest(metas: Sequence[TensorMeta]) -> int:
    """Return the bytes of the largest tensor, the minimum size of a segment."""
    return max((meta.nbytes for meta in metas), default=1) or 1


def _next(tensors: Iterator[tuple[str, torch.Tensor]], meta: TensorMeta) -> torch.Tensor:
    """Return the source's next tensor. Raises FIELD_INVALID if another tensor was announced."""
    name, tensor = next(tensors, ("", None))
    if tensor is None:
        raise unfit(f"the source ends before {meta.name!r}, which was announced")
    if name != meta.name:
        raise unfit(f"the source yields {name!r} {tuple(tensor.shape)}; {meta.name!r} {meta.shape} was announced")
    check_given(tensor, meta)
    return tensor.detach()
