"""Sending an update over a group, at the source.

Work besides the broadcasts (gathering, casting, packing, digesting) overlaps with broadcasts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import torch

from rlctl.contract.errors import RlctlError
from rlctl.v1 import common_pb2
from rlctl.weights.group.process_group import WeightGroup
from rlctl.weights.ordered_thread import OrderedThread
from rlctl.weights.tensor.buckets import Bucket, put, room_for, unpack
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.source import WeightSource, check_given, is_stable, refuse_lacking, unannounced, unfit
from rlctl.weights.tensor.tensors import TensorMeta, castable
from rlctl.weights.tensor.work import digesting_threads

_AHEAD = 4
"""Maximum number of a stable source's tensors in broadcast or digest while the next tensor is taken."""


@dataclass(frozen=True)
class SendStats:
    """Statistics of a send.

    Attributes:
        bytes: bytes that went over the group.
        seconds: time from the request for the first tensor to the end of the last broadcast.
    """

    bytes: int
    seconds: float


def send(
    source: WeightSource, buckets: Sequence[Bucket], group: WeightGroup, digest: ModelDigest | None = None
) -> SendStats:
    """Send a source's tensors bucket by bucket in one pass, as rank 0 of the group.

    ``buckets`` are the announced buckets, planned over the source's order. Tensors are cast to the dtypes of the
    buckets. ``digest`` digests exactly the sent bytes, in parallel. While a packed bucket is sent the next bucket is
    filled. A large tensor of a source that is not ``stable`` is sent before the next tensor is taken. After the return
    the source's tensors may be overwritten.

    Raises FIELD_INVALID if source and buckets differ (an unknown or missing tensor, a different shape or order; before
    the first byte, a dtype that a cast would ruin), GROUP_FAILED. The outcome is DIRTY after the first sent byte.
    Errors of the source itself pass through.
    """
    transfer = SentInPassing(source, buckets, group, digest)
    started = time.perf_counter()
    for _ in transfer.tensors():
        pass
    return SendStats(transfer.bytes, time.perf_counter() - started)


class SentInPassing:
    """A source that is also sent over a group, as by :func:`send`, while a caller iterates it once.

    Attributes:
        bytes: bytes that went over the group, after the iteration.
    """

    def __init__(
        self,
        source: WeightSource,
        buckets: Sequence[Bucket],
        group: WeightGroup,
        digest: ModelDigest | None,
        on_sent: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Prepare the send. Raises FIELD_INVALID for a dtype that a cast would ruin.

        ``on_sent`` is called with the bytes of each broadcast after its end, in the sending thread.
        """
        dtypes = {meta.name: meta.dtype for meta in source.metas()}
        for meta in (meta for bucket in buckets for meta in bucket.metas):
            if not castable(dtypes.get(meta.name, meta.dtype), meta.dtype):
                raise unfit(
                    f"{meta.name} is {dtypes[meta.name]}, and {meta.dtype} was announced: that takes more than a cast"
                )
        self.bytes = 0
        self.stable = is_stable(source)
        self._source = source
        self._sending = _Sending(buckets, group, digest, on_sent, stable=self.stable)
        self._tensors = self._pass()

    def metas(self) -> list[TensorMeta]:
        return self._source.metas()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the source's tensors. Each is sent, or kept until its bucket is full. At the end all have arrived."""
        return self._tensors

    def close(self) -> None:
        self._tensors.close()

    def _pass(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        with self._sending as sending:
            for name, tensor in self._source.tensors():
                sending.add(name, tensor)
                yield name, tensor
            sending.finish()
            self.bytes = sending.sent


@dataclass
class _OnItsWay:
    """Bytes in broadcast and digest, with their buffer, if any. The buffer is free afterwards."""

    jobs: list[Future[None]]
    buffer: torch.Tensor | None


class _Sending:
    """State of one :func:`send`. The caller's thread takes and packs tensors; another thread broadcasts in order."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: WeightGroup,
        digest: ModelDigest | None,
        on_sent: Callable[[int], None],
        *,
        stable: bool,
    ) -> None:
        self.sent = 0
        self._on_sent = on_sent
        self._group = group
        self._digest = digest
        self._stable = stable
        self._queue = list(buckets)
        self._awaited = {meta.name: (bucket, index) for bucket in buckets for index, meta in enumerate(bucket.metas)}
        # By bucket: the number of added tensors, and the buffer of a packed bucket.
        self._filled: dict[int, int] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._spare: list[torch.Tensor] = []
        self._on_their_way: deque[_OnItsWay] = deque()
        self._stream = torch.cuda.current_stream() if group.backend == "nccl" else None

    def __enter__(self) -> _Sending:
        # Both release the GIL. A single thread broadcasts, so that the order holds.
        self._sender = OrderedThread("send")
        key = self._digest.key if self._digest is not None else b""
        self._digesters = ThreadPoolExecutor(digesting_threads(key), "digest")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._sender.shutdown()
        self._digesters.shutdown(cancel_futures=True)
        if self.sent and isinstance(error, RlctlError):
            error.outcome = common_pb2.OUTCOME_DIRTY

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add the next tensor of the source: send the tensor, or copy its bytes until the bucket is full."""
        if name not in self._awaited:
            raise unannounced(name)
        bucket, index = self._awaited.pop(name)
        meta = bucket.metas[index]
        check_given(tensor, meta)
        wire = tensor.detach().to(device=wire_device(self._group, tensor.device), dtype=meta.dtype)
        filled = self._filled[bucket.sequence] = self._filled.get(bucket.sequence, 0) + 1
        if bucket.flattened:
            if filled == 1:
                self._buffers[bucket.sequence] = self._room(bucket.nbytes, wire.device)
            put(bucket, index, wire, self._buffers[bucket.sequence])
        else:
            self._in_order(bucket, filled == index + 1)
            self._start(wire.contiguous(), [(name, wire)])
            if not self._stable:
                self._await(0)
            elif len(self._on_their_way) > _AHEAD:
                self._await(1)
        if filled == len(bucket.metas):
            self._in_order(bucket, True)
            if bucket.flattened:
                packed = self._buffers.pop(bucket.sequence)
                self._start(packed[: bucket.nbytes], unpack(bucket, packed), packed)
            self._queue.pop(0)

    def finish(self) -> None:
        """Check that the source is complete, and wait for the end of all broadcasts."""
        refuse_lacking(self._awaited)
        self._await(0)

    def _in_order(self, bucket: Bucket, in_bucket: bool) -> None:
        if not in_bucket or self._queue[0] is not bucket:
            raise unfit(f"the source's order is not that of the buckets (at bucket {bucket.sequence})")

    def _room(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return a buffer for packing. There are two buffers: a bucket is filled while the previous bucket is sent."""
        while sum(way.buffer is not None for way in self._on_their_way) > 1:
            self._await(len(self._on_their_way) - 1)
        return room_for(nbytes, self._spare.pop() if self._spare else None, device)

    def _start(
        self, data: torch.Tensor, tensors: list[tuple[str, torch.Tensor]], buffer: torch.Tensor | None = None
    ) -> None:
        jobs = [self._sender.submit(partial(self._broadcast, data))]
        if self._digest is not None:
            jobs += [self._digesters.submit(self._take_in, self._digest, *entry) for entry in tensors]
        self._on_their_way.append(_OnItsWay(jobs, buffer))

    def _await(self, most: int) -> None:
        """Wait until at most ``most`` sends remain; raise their errors."""
        surplus = len(self._on_their_way) - most
        if surplus > 0:
            # Sends end in order. A wake-up for each end would take the interpreter from the thread that starts the next
            # send.
            wait(self._on_their_way[surplus - 1].jobs)
        for _ in range(surplus):
            way = self._on_their_way.popleft()
            for job in way.jobs:
                job.result()
            if way.buffer is not None:
                self._spare.append(way.buffer)

    def _broadcast(self, data: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            self._group.broadcast(data)
        self.sent += data.nbytes
        self._on_sent(data.nbytes)

    def _take_in(self, digest: ModelDigest, name: str, tensor: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            digest.add(name, tensor)


def wire_device(group: WeightGroup, device: torch.device) -> torch.device:
    """Return the device for tensors of a broadcast: the host for gloo, else the tensor's or the current GPU."""
    if group.backend == "gloo":
        return torch.device("cpu")
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
