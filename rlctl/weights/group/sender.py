"""Sending an update over a group: the source's side.

What takes time besides the broadcasts (gathering, casting, packing, digesting) happens while something is on its way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from rlctl.contract.errors import RlctlError
from rlctl.v1 import common_pb2
from rlctl.weights.group.process_group import WeightGroup
from rlctl.weights.tensor.buckets import Bucket, put, room_for, unpack
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.source import WeightSource, check_given, is_stable, refuse_lacking, unannounced, unfit
from rlctl.weights.tensor.tensors import TensorMeta, castable
from rlctl.weights.tensor.work import digesting_threads

_AHEAD = 4
"""Tensors of a stable source that are on their way, or being digested, while the next one is taken."""


@dataclass(frozen=True)
class SendStats:
    """What was sent.

    Attributes:
        bytes: bytes that went over the group.
        seconds: time from the first tensor asked for to the last byte sent.
    """

    bytes: int
    seconds: float


def send(
    source: WeightSource, buckets: Sequence[Bucket], group: WeightGroup, digest: ModelDigest | None = None
) -> SendStats:
    """Send a source's tensors bucket by bucket, going through it once; rank 0 of the group.

    ``buckets`` are what the receivers were told, planned over the source's order. Tensors are cast to the dtypes that
    the buckets say. ``digest`` takes in exactly what is sent, beside the sending. While a packed bucket is on its way
    the next one is filled; a large tensor of a source that is not ``stable`` is waited for. On return the source's
    tensors may be overwritten.

    Raises FIELD_INVALID when the source and the buckets do not fit each other (an unknown or missing tensor, another
    shape, another order; before anything is sent, a dtype that a cast would ruin), GROUP_FAILED; the outcome is DIRTY
    once something was sent. What the source itself raises passes through.
    """
    sent = SentInPassing(source, buckets, group, digest)
    started = time.perf_counter()
    for _ in sent.tensors():
        pass
    return SendStats(sent.bytes, time.perf_counter() - started)


class SentInPassing:
    """A source that is sent over a group, as by :func:`send`, while somebody goes through it, once.

    Attributes:
        bytes: bytes that went over the group, once the iteration has ended.
    """

    def __init__(
        self, source: WeightSource, buckets: Sequence[Bucket], group: WeightGroup, digest: ModelDigest | None
    ) -> None:
        """Raises FIELD_INVALID for a dtype that a cast would ruin."""
        given = {meta.name: meta.dtype for meta in source.metas()}
        for meta in (meta for bucket in buckets for meta in bucket.metas):
            if not castable(given.get(meta.name, meta.dtype), meta.dtype):
                raise unfit(
                    f"{meta.name} is {given[meta.name]}, and {meta.dtype} was announced: that takes more than a cast"
                )
        self.bytes = 0
        self.stable = is_stable(source)
        self._source = source
        self._sending = _Sending(buckets, group, digest, stable=self.stable)
        self._tensors = self._pass()

    def metas(self) -> list[TensorMeta]:
        """The source's."""
        return self._source.metas()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The source's; each is sent, or kept until its bucket is full. At the end all have arrived."""
        return self._tensors

    def close(self) -> None:
        """End an iteration that whoever goes through it has broken off."""
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
    """Bytes that are being broadcast and digested, and the buffer that is free again afterwards, if they lie in one."""

    jobs: list[Future[None]]
    buffer: torch.Tensor | None


class _Sending:
    """The state of one :func:`send`: the caller's thread takes tensors and packs, another broadcasts in order."""

    def __init__(
        self, buckets: Sequence[Bucket], group: WeightGroup, digest: ModelDigest | None, *, stable: bool
    ) -> None:
        self.sent = 0
        self._group = group
        self._digest = digest
        self._stable = stable
        self._queue = list(buckets)
        self._awaited = {meta.name: (bucket, index) for bucket in buckets for index, meta in enumerate(bucket.metas)}
        # Tensors of a bucket that have come; and, of a packed one, its buffer.
        self._filled: dict[int, int] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._spare: list[torch.Tensor] = []
        self._on_their_way: deque[_OnItsWay] = deque()
        self._stream = torch.cuda.current_stream() if group.backend == "nccl" else None

    def __enter__(self) -> _Sending:
        # Both release the GIL. One thread broadcasts, so that the order holds.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="send")
        key = self._digest.key if self._digest is not None else b""
        self._digesters = ThreadPoolExecutor(digesting_threads(key), "digest")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._sender.shutdown(cancel_futures=True)
        self._digesters.shutdown(cancel_futures=True)
        if self.sent and isinstance(error, RlctlError):
            error.outcome = common_pb2.OUTCOME_DIRTY

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take the next tensor of the source: send it, or keep a copy until its bucket is full."""
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
        """The source is at its end: what is on its way arrives."""
        refuse_lacking(self._awaited)
        self._await(0)

    def _in_order(self, bucket: Bucket, in_bucket: bool) -> None:
        if not in_bucket or self._queue[0] is not bucket:
            raise unfit(f"the source's order is not that of the buckets (at bucket {bucket.sequence})")

    def _room(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A buffer to pack into. There are two: one is filled while the other one is on its way."""
        while sum(way.buffer is not None for way in self._on_their_way) > 1:
            self._await(len(self._on_their_way) - 1)
        return room_for(nbytes, self._spare.pop() if self._spare else None, device)

    def _start(
        self, data: torch.Tensor, tensors: list[tuple[str, torch.Tensor]], buffer: torch.Tensor | None = None
    ) -> None:
        jobs = [self._sender.submit(self._broadcast, data)]
        if self._digest is not None:
            jobs += [self._digesters.submit(self._take_in, self._digest, *named) for named in tensors]
        self._on_their_way.append(_OnItsWay(jobs, buffer))

    def _await(self, left: int) -> None:
        """Wait until no more than so many are on their way; raises what became of them."""
        over = len(self._on_their_way) - left
        if over > 0:
            # They end in order. Whoever wakes up for each of them takes the interpreter from the thread that starts
            # the next one.
            wait(self._on_their_way[over - 1].jobs)
        for _ in range(over):
            way = self._on_their_way.popleft()
            for job in way.jobs:
                job.result()
            if way.buffer is not None:
                self._spare.append(way.buffer)

    def _broadcast(self, data: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            self._group.broadcast(data)
        self.sent += data.nbytes

    def _take_in(self, digest: ModelDigest, name: str, tensor: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            digest.add(name, tensor)


def wire_device(group: WeightGroup, device: torch.device) -> torch.device:
    """Where tensors must lie to go over a group, given where they lie: gloo takes them from the host."""
    if group.backend == "gloo":
        return torch.device("cpu")
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
