"""A trainer process in an attempt: joins groups, and sends and digests the weights.

The work runs in a thread, and every wait for this thread has a limit. After the death of a trainer rank, gathering a
tensor may hang in the trainer's own collectives.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from rlctl.contract.durations import duration, seconds
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.contract.vllm_groups import BACKEND
from rlctl.trainer.pending_update import UpdateState
from rlctl.trainer.update_progress import ByteCount
from rlctl.trainer.weights_pass import Described, Pass, in_thread
from rlctl.v1 import common_pb2
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_PARTIAL, Operation
from rlctl.v1.trainer_pb2 import AtomicList, Attempt, Offer, Sent, SpareName
from rlctl.v1.update_pb2 import GroupPlan
from rlctl.v1.verbs_pb2 import TensorDigest, TensorSegment
from rlctl.weights.group.process_group import LONGEST_S, WeightGroup, join
from rlctl.weights.group.sender import SentInPassing
from rlctl.weights.group.vllm_nccl import join_vllm
from rlctl.weights.ordered_thread import OrderedThread
from rlctl.weights.shards.mismatch import digest_parts
from rlctl.weights.shared_memory.posix import free_bytes
from rlctl.weights.shared_memory.sender import SegmentSender, SentSegment
from rlctl.weights.tensor.bucket_cache import Announced
from rlctl.weights.tensor.buckets import Bucket
from rlctl.weights.tensor.digest import ModelDigest, tensor_digest
from rlctl.weights.tensor.finite import is_finite, local_values, not_finite
from rlctl.weights.tensor.placement import CPU, device_id, host_id
from rlctl.weights.tensor.source import Weights, WeightSource, as_announced, as_offer, atomic_lists, only, spares_of
from rlctl.weights.tensor.tensors import TensorMeta, to_proto

Ship = Callable[[Sequence[TensorSegment]], Awaitable[None]]
"""Sends segments to the ranks that share memory with this process. Returns once no rank reads them."""

LOST_S = 1.0
"""Seconds after a failure of the trainer's own collectives in which the loss of a trainer rank becomes known."""

SAYS_S = 0.5
"""Seconds that the report of a rank's own failure may take."""

STOP_S = 2.0
"""Seconds that a stopped attempt may take to end."""

HANGS_S = 10.0
"""A pass without a tensor for so many seconds hangs in the trainer's own collectives."""


class SourceRank(Protocol):
    """The interface of a trainer process in the updates of a model: :class:`Part`, or a simulated process."""

    source: int | None
    """Number of this source; None: the process sends nothing."""

    @property
    def host_id(self) -> str:
        """Return the id of the host, by which ranks with shared memory are found."""

    @property
    def room(self) -> int | None:
        """Return the bytes for segments in the host's shared memory; None: no limit."""

    def describe(self, weights: WeightSource, version: str, source: int) -> Offer:
        """Return this process's offer to an update as a source."""

    async def attempt(self, weights: WeightSource, attempt: Attempt, ship: Ship, state: UpdateState) -> Sent:
        """Run this process's part of an attempt; see :meth:`Part.attempt`."""


class Part:
    """A trainer process in the updates of a model. Keeps groups, one per backend, between updates."""

    def __init__(self, host: str, source: int | None, *, alone: bool = True) -> None:
        """``host``: address of this process as the engines reach it.

        ``source``: number of this source, None for no source. ``alone``: the trainer has no further process.
        """
        self.source = source
        self._host = host
        self._alone = alone
        self._groups: dict[str, WeightGroup] = {}
        self._segments: SegmentSender | None = None
        self._pass = Pass()
        self._under_way: asyncio.Future[None] | None = None
        self._announced = Announced()

    def close(self) -> None:
        """Leave the groups and remove the segments. Engines forget an old group when a new group forms."""
        self._leave()
        segments, self._segments = self._segments, None
        if segments is not None:
            segments.close()

    def _leave(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.close()

    @property
    def host_id(self) -> str:
        """Return the id of this host; see :func:`rlctl.weights.tensor.placement.host_id`."""
        return host_id()

    @property
    def room(self) -> int | None:
        """Bytes for segments in the host's shared memory; None if segments may be on a GPU instead."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        return free_bytes() if self._segments is None else self._segments.room

    def describe(self, weights: WeightSource, version: str, source: int) -> Offer:
        """Return this process's offer to an update as a source."""
        return Offer(
            version=version,
            source=source,
            host_id=host_id(),
            shared_memory_room=self.room,
            tensors=[to_proto(meta) for meta in weights.metas()],
            together=[AtomicList(names=names) for names in atomic_lists(weights)],
            spares=[
                SpareName(name=name, stands_for=spare.stands_for, explicit=spare.explicit)
                for name, spare in spares_of(weights).items()
            ],
        )

    async def read(self, weights: Weights, state: UpdateState) -> WeightSource:
        """Return the weights as a source, described in a thread.

        Describing, and collecting pairs, is the trainer's own code and may gather, hang, or call the fleet. Raises
        ILLEGAL_STATE, or the error of that code.
        """
        await self._refuse_hanging()
        self._pass = Pass()

        def describe_them() -> WeightSource:
            with state.ordering.after():
                return Described(as_offer(weights))

        work, self._under_way = in_thread(describe_them, lambda: None, "rlctl weights")
        return await asyncio.shield(work)

    async def attempt(self, weights: WeightSource, attempt: Attempt, ship: Ship, state: UpdateState) -> Sent:
        """Run this process's part of an attempt; a cancellation interrupts the work.

        In one pass the weights go over the groups and, through ``ship``, to the ranks that share memory. An attempt
        with neither only digests the weights, or checks for values that are not finite. Sets ``state.sent`` after
        the last read of the weights, if no further attempt can follow.

        Raises GROUP_FAILED, FIELD_INVALID (the weights differ from the offer), ILLEGAL_STATE (the earlier pass hangs),
        or the error of the weights.
        """
        await self._refuse_hanging()
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        shipping: list[concurrent.futures.Future[None]] = []

        def ship_from_thread(segments: Sequence[TensorSegment]) -> None:
            if stop.is_set():
                raise Reason.CANCELLED.error("the attempt was stopped")
            shipping[:] = [asyncio.run_coroutine_threadsafe(_awaited(ship(segments)), loop)]
            shipping[0].result()

        def all_read() -> None:
            state.ordering.settle()
            if attempt.last and not stop.is_set():
                loop.call_soon_threadsafe(state.sent.set)

        passing = self._pass = Pass(weights)

        def run() -> Sent:
            with state.ordering.after():
                if attempt.local:
                    return _look(weights, self._announced.parse(attempt.buckets))
                return self._work(passing, attempt, stop, ship_from_thread, all_read, state.count_to)

        def finish() -> None:
            if not self._alone and not attempt.local:
                with state.ordering.after():
                    passing.finish()

        work, self._under_way = in_thread(run, finish, "rlctl update")
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            for future in shipping:
                future.cancel()
            for group in list(self._groups.values()):
                group.interrupt()
            await asyncio.wait({work}, timeout=STOP_S)
            self._leave()
            raise
        except BaseException:
            self._leave()
            raise

    async def _refuse_hanging(self) -> None:
        if not await self.settle(HANGS_S):
            raise Reason.ILLEGAL_STATE.error(
                "going through the weights for an earlier update has not ended: the trainer's own collectives hang",
                next_step="Restart the trainer.",
            )

    async def settle(self, quiet_s: float) -> bool:
        """Wait for the end of the last pass and return True; False if no tensor comes for ``quiet_s``."""
        started = time.monotonic()
        while self._under_way is not None and not self._under_way.done():
            remaining_s = max(started, self._pass.moved) + quiet_s - time.monotonic()
            if remaining_s <= 0:
                return False
            await asyncio.wait({self._under_way}, timeout=remaining_s)
        return True

    def _work(
        self,
        weights: WeightSource,
        attempt: Attempt,
        stop: threading.Event,
        ship: Callable[[Sequence[TensorSegment]], None],
        on_all_read: Callable[[], None],
        count_to: Callable[[int], ByteCount],
    ) -> Sent:
        """Run the attempt in a thread. ``on_all_read`` is called after the last read of the weights.

        ``count_to`` is called with the bytes to send, before the first byte.
        """
        if self.source is None:
            for _ in weights.tensors():
                if stop.is_set():
                    raise Reason.CANCELLED.error("the attempt was stopped")
            on_all_read()
            return Sent()
        announced = self._announced.parse(attempt.buckets)
        dtypes = {meta.name: meta.dtype for _, bucket in announced for meta in bucket.metas}
        weights = only(weights, dtypes)
        if attempt.parts:
            return _digest_parts(weights, attempt, dtypes)
        own_groups = [group for group in attempt.groups if group.source == self.source]
        shared_bytes = sum(meta.nbytes for meta in _in_dtypes(weights, dtypes)) if attempt.shared_devices else 0
        digest = None if attempt.without_digests else ModelDigest(attempt.digest_key)
        result = Sent()
        started = time.perf_counter()
        if own_groups:
            groups = self._join(own_groups, attempt, stop)
            started = time.perf_counter()
            passing: list[SentInPassing] = []
            buckets = [[bucket for name, bucket in announced if name == group.name] for group in groups]
            count = count_to(sum(bucket.nbytes for group_buckets in buckets for bucket in group_buckets) + shared_bytes)
            for group, group_buckets in zip(groups, buckets, strict=True):
                group.announce(size for bucket in group_buckets for size in bucket.broadcasts)
            for group, group_buckets in zip(groups, buckets, strict=True):
                # The first group digests the tensors.
                own_digest = None if passing else digest
                passing.append(SentInPassing(weights, group_buckets, group, own_digest, count.add))
                weights = passing[-1]
            try:
                if attempt.shared_devices:
                    result.bytes += self._share(weights, dtypes, attempt, None, ship, on_all_read, count)
                else:
                    deque(weights.tensors(), maxlen=0)
            except BaseException:
                for group in groups:
                    group.interrupt()  # pending broadcasts may wait for tensors that no longer come
                raise
            finally:
                for sent_pass in reversed(passing):
                    sent_pass.close()
            result.bytes += sum(sent_pass.bytes for sent_pass in passing)
        elif attempt.shared_devices:
            result.bytes += self._share(weights, dtypes, attempt, digest, ship, on_all_read, count_to(shared_bytes))
        elif digest is not None or attempt.finite:
            for name, tensor in as_announced(weights, dtypes):
                if attempt.finite and not is_finite(tensor, dtypes[name]):
                    result.not_finite.append(name)
                if digest is not None:
                    digest.add(name, tensor, dtypes[name])
        if not attempt.shared_devices:
            on_all_read()
        if result.bytes:
            result.tensors = len(weights.metas())
        result.elapsed.CopyFrom(duration(time.perf_counter() - started))
        if digest is not None:
            result.digests.extend(TensorDigest(name=name, sha256=hex_) for name, hex_ in digest.digests.items())
        return result

    def _share(
        self,
        weights: WeightSource,
        dtypes: Mapping[str, torch.dtype],
        attempt: Attempt,
        digest: ModelDigest | None,
        ship: Callable[[Sequence[TensorSegment]], None],
        on_all_read: Callable[[], None],
        count: ByteCount,
    ) -> int:
        """Copy the weights, in the wire's dtypes, into segments while the ranks read the previous segment.

        Returns the bytes.
        """
        segments = self._on(_meeting_place(attempt.shared_devices))
        wire = _in_dtypes(weights, dtypes)
        lease_s = seconds(attempt.timeout)
        written = segments.write(
            weights,
            wire,
            devices=attempt.shared_devices,
            lease_s=lease_s,
            digest=digest,
            deadline=time.monotonic() + lease_s,
            on_all_read=on_all_read,
        )
        deliveries: list[concurrent.futures.Future[None]] = []
        shipper = OrderedThread("ship")
        try:
            sizes = []
            for segment in written:
                deliveries.append(shipper.submit(partial(_deliver, segment, ship, segments, count)))
                sizes.append(segment.nbytes)
            for delivery in deliveries:
                delivery.result()
            return sum(sizes)
        except BaseException:
            concurrent.futures.wait(deliveries)  # ranks read the delivered segments now
            # A late rank may read them after that. Abandon the segments; the next update allocates new memory.
            self._segments = None
            written.close()
            segments.close()
            for delivery in deliveries:
                delivery.result()  # raises the cause if the segments were closed for a failure
            raise
        finally:
            shipper.shutdown()

    def _on(self, device: torch.device) -> SegmentSender:
        """Return the segments of a device; replaces segments of a different device."""
        if self._segments is None or self._segments.pool.device != device:
            if self._segments is not None:
                self._segments.close()
            self._segments = SegmentSender(device)
        return self._segments

    def _join(self, plans: Sequence[GroupPlan], attempt: Attempt, stop: threading.Event) -> list[WeightGroup]:
        """Return the existing groups, or form new groups with every target rank."""
        if not all(group.formed and group.group_name in self._groups for group in plans):
            self._leave()
            for group in plans:
                form = join_vllm if group.backend == BACKEND else partial(join, rank=0, backend=group.backend)
                self._groups[group.group_name] = form(
                    (attempt.store_address, attempt.store_port),
                    name=group.group_name,
                    world_size=group.world_size,
                    timeout_s=seconds(attempt.timeout),
                    broadcast_timeout_s=LONGEST_S,
                    interface_host=self._host,
                    stop=stop,
                )
        groups = [self._groups[group.group_name] for group in plans]
        for standing in groups:
            standing.allow(seconds(attempt.timeout))
        return groups


def _meeting_place(readers: Sequence[str]) -> torch.device:
    """Return the best device for segments that ranks on these devices read.

    The device is this process's GPU if all ranks use this GPU. Otherwise it is the host's memory, readable by ranks on
    any GPU.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
        if set(readers) == {device_id(device)}:
            return device
    return torch.device(CPU)


def _in_dtypes(weights: WeightSource, dtypes: Mapping[str, torch.dtype]) -> list[TensorMeta]:
    return [TensorMeta(meta.name, dtypes.get(meta.name, meta.dtype), meta.shape) for meta in weights.metas()]


def _deliver(
    segment: SentSegment, ship: Callable[[Sequence[TensorSegment]], None], segments: SegmentSender, count: ByteCount
) -> None:
    """Let the ranks read a segment. On failure, release the writer that waits for a free segment."""
    try:
        ship(segment.messages)
    except BaseException:
        segments.close()
        raise
    count.add(segment.nbytes)
    segment.release()


def _look(weights: WeightSource, announced: Sequence[tuple[str, Bucket]]) -> Sent:
    """Return the names of this rank's tensors with values that are not finite."""
    dtypes = {meta.name: meta.dtype for _, bucket in announced for meta in bucket.metas}
    return Sent(not_finite=not_finite(local_values(weights) or (), dtypes))


def _digest_parts(weights: WeightSource, attempt: Attempt, dtypes: Mapping[str, torch.dtype]) -> Sent:
    """Digest the requested parts and the whole tensors, with present values."""
    result = Sent()
    for name, tensor in weights.tensors():
        result.digests.add(name=name, sha256=tensor_digest(name, tensor, dtype=dtypes[name], key=attempt.digest_key))
        result.parts.extend(digest_parts(name, tensor.detach(), attempt.parts, dtypes[name], attempt.digest_key))
    return result


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def stopped(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait for the end."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def cut_off(cause: BaseException) -> bool:
    """Whether our own broadcast failed. The answers of the target ranks explain more."""
    return (
        isinstance(cause, RlctlError) and cause.reason is Reason.GROUP_FAILED and not isinstance(cause, OperationFailed)
    )


async def explained(failure: BaseException, other_ranks: asyncio.Future[Any]) -> BaseException:
    """Return the error to raise for a failure of this trainer rank.

    If ``other_ranks`` soon fails because a rank is gone, that is the error: the lost rank also breaks the trainer's
    collectives and its groups. A defect of this source is returned unchanged; a defect of a different source explains a
    broken group.
    """
    broken = isinstance(failure, RlctlError)
    if isinstance(failure, RlctlError) and failure.reason is not Reason.GROUP_FAILED:
        return failure
    # A rank with a failed source waits LOST_S itself before it reports.
    await asyncio.wait({other_ranks}, timeout=LOST_S + SAYS_S if broken else LOST_S)
    reported = other_ranks.exception() if other_ranks.done() and not other_ranks.cancelled() else None
    if not isinstance(reported, RlctlError) or reported.reason is Reason.GROUP_FAILED:
        return failure
    if not broken and reported.reason is not Reason.TRAINER_RANK_LOST:
        return failure
    reported.__cause__ = failure
    return reported


def detail(error: BaseException) -> common_pb2.ErrorDetail:
    """Return the error for the other trainer ranks."""
    if isinstance(error, RlctlError):
        return error.detail()
    if isinstance(error, asyncio.CancelledError):
        return Reason.CANCELLED.error("the update was cancelled").detail()
    return Reason.SOURCE_FAILED.error(f"{type(error).__name__}: {error}").detail()


def refuse_unpublished(operation: Operation) -> None:
    """Raise OperationFailed for an update that ended without a version."""
    published = bool(operation.weight_version.sequence)
    if operation.state != OPERATION_STATE_OK and not (operation.state == OPERATION_STATE_PARTIAL and published):
        raise OperationFailed(operation)
