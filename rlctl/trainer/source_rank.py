"""One trainer process in an attempt: it joins its groups, and sends and digests its weights.

It works in a thread of its own, and every wait for this thread has a limit. When a trainer rank has died, gathering a
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
from typing import Any

import torch

from rlctl.contract.durations import duration, seconds
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.contract.vllm_groups import BACKEND
from rlctl.trainer.pending_update import Progress
from rlctl.trainer.weights_pass import Described, Pass, in_thread
from rlctl.v1 import common_pb2
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_PARTIAL, Operation
from rlctl.v1.trainer_pb2 import AtomicList, Attempt, Offer, Sent, SpareName
from rlctl.v1.update_pb2 import GroupPlan
from rlctl.v1.verbs_pb2 import TensorDigest, TensorSegment
from rlctl.weights.group.process_group import LONGEST_S, WeightGroup, join
from rlctl.weights.group.sender import SentInPassing
from rlctl.weights.group.vllm_nccl import join_vllm
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
"""Lets the ranks that share memory with this process take segments in; returns once none of them reads them."""

LOST_S = 1.0
"""How soon after a trainer's own collectives break it is known that a rank of its is gone."""

SAYS_S = 0.5
"""How long word of a rank's own failure may be on its way."""

STOP_S = 2.0
"""How long an attempt that was stopped may take to end."""

HANGS_S = 10.0
"""A pass in which no tensor has come for so long hangs in the trainer's own collectives."""


class Part:
    """One trainer process in the updates of one model. It keeps its groups, one a backend, from update to update."""

    def __init__(self, host: str, source: int | None, *, alone: bool = True) -> None:
        """``host``: address of this process as the engines reach it; ``source``: which source it is, None for none;
        ``alone``: the trainer has no other process.
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
        """Leave the groups, and remove the segments. Engines that are told of new groups forget them."""
        self._leave()
        segments, self._segments = self._segments, None
        if segments is not None:
            segments.close()

    def _leave(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.close()

    @property
    def room(self) -> int | None:
        """Bytes that segments may take in the host's shared memory; None where they may lie on a GPU instead."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        return free_bytes() if self._segments is None else self._segments.room

    def describe(self, weights: WeightSource, version: str, source: int) -> Offer:
        """What this process brings to an update as a source."""
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

    async def read(self, weights: Weights, progress: Progress) -> WeightSource:
        """The weights as a source. Describing them, and collecting pairs, is the trainer's own code, which may gather,
        hang, or call the fleet: it happens in a thread, too. Raises ILLEGAL_STATE, or what that code raises.
        """
        await self._refuse_hanging()
        self._pass = Pass()

        def describe_them() -> WeightSource:
            with progress.ordering.after():
                return Described(as_offer(weights))

        work, self._under_way = in_thread(describe_them, lambda: None, "rlctl weights")
        return await asyncio.shield(work)

    async def attempt(self, weights: WeightSource, attempt: Attempt, ship: Ship, progress: Progress) -> Sent:
        """Do this process's part; cancelling it breaks what is under way. Says in ``progress`` when the weights have
        been read for the last time, if no other attempt can follow.

        In one pass the weights go over the groups and, through ``ship``, to the ranks that share memory. With neither
        in the attempt, what would be sent is only digested, or looked through for values that are not finite.

        Raises GROUP_FAILED, FIELD_INVALID (the weights are not what was offered), ILLEGAL_STATE (the pass before
        hangs), or what the weights themselves raise.
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

        def left() -> None:
            progress.ordering.settle()
            if attempt.last and not stop.is_set():
                loop.call_soon_threadsafe(progress.sent.set)

        passing = self._pass = Pass(weights)

        def run() -> Sent:
            with progress.ordering.after():
                if attempt.local:
                    return _look(weights, self._announced.parse(attempt.buckets))
                return self._work(passing, attempt, stop, ship_from_thread, left)

        def finish() -> None:
            if not self._alone and not attempt.local:
                with progress.ordering.after():
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
        """Wait for the last pass through the weights to end, unless no tensor comes for ``quiet_s``; whether it has."""
        started = time.monotonic()
        while self._under_way is not None and not self._under_way.done():
            left = max(started, self._pass.moved) + quiet_s - time.monotonic()
            if left <= 0:
                return False
            await asyncio.wait({self._under_way}, timeout=left)
        return True

    def _work(
        self,
        weights: WeightSource,
        attempt: Attempt,
        stop: threading.Event,
        ship: Callable[[Sequence[TensorSegment]], None],
        left: Callable[[], None],
    ) -> Sent:
        """``left`` is called once the weights have been read for the last time."""
        if self.source is None:
            for _ in weights.tensors():
                if stop.is_set():
                    raise Reason.CANCELLED.error("the attempt was stopped")
            left()
            return Sent()
        announced = self._announced.parse(attempt.buckets)
        dtypes = {meta.name: meta.dtype for _, bucket in announced for meta in bucket.metas}
        weights = only(weights, dtypes)
        if attempt.parts:
            return _digest_parts(weights, attempt, dtypes)
        wanted = [group for group in attempt.groups if group.source == self.source]
        digest = None if attempt.without_digests else ModelDigest(attempt.digest_key)
        sent = Sent()
        started = time.perf_counter()
        if wanted:
            groups = self._join(wanted, attempt, stop)
            started = time.perf_counter()
            passing: list[SentInPassing] = []
            buckets = [[bucket for name, bucket in announced if name == group.name] for group in groups]
            for group, own in zip(groups, buckets, strict=True):
                group.announce(size for bucket in own for size in bucket.broadcasts)
            for group, own in zip(groups, buckets, strict=True):
                # What goes over the first group is digested there.
                passing.append(SentInPassing(weights, own, group, None if passing else digest))
                weights = passing[-1]
            try:
                if attempt.shared_devices:
                    sent.bytes += self._share(weights, dtypes, attempt, None, ship, left)
                else:
                    deque(weights.tensors(), maxlen=0)
            except BaseException:
                for group in groups:
                    group.interrupt()  # what is on its way there may wait for what no longer comes here
                raise
            finally:
                for each in reversed(passing):
                    each.close()
            sent.bytes += sum(each.bytes for each in passing)
        elif attempt.shared_devices:
            sent.bytes += self._share(weights, dtypes, attempt, digest, ship, left)
        elif digest is not None or attempt.finite:
            for name, tensor in as_announced(weights, dtypes):
                if attempt.finite and not is_finite(tensor, dtypes[name]):
                    sent.not_finite.append(name)
                if digest is not None:
                    digest.add(name, tensor, dtypes[name])
        if not attempt.shared_devices:
            left()
        if sent.bytes:
            sent.tensors = len(weights.metas())
        sent.elapsed.CopyFrom(duration(time.perf_counter() - started))
        if digest is not None:
            sent.digests.extend(TensorDigest(name=name, sha256=sha256) for name, sha256 in digest.digests.items())
        return sent

    def _share(
        self,
        weights: WeightSource,
        dtypes: Mapping[str, torch.dtype],
        attempt: Attempt,
        digest: ModelDigest | None,
        ship: Callable[[Sequence[TensorSegment]], None],
        left: Callable[[], None],
    ) -> int:
        """Copy the weights, in the wire's dtypes, into segments, while the ranks take in the one before; returns the
        bytes.
        """
        segments = self._on(_meeting_place(attempt.shared_devices))
        wire = [TensorMeta(meta.name, dtypes.get(meta.name, meta.dtype), meta.shape) for meta in weights.metas()]
        lease_s = seconds(attempt.timeout)
        written = segments.write(
            weights,
            wire,
            devices=attempt.shared_devices,
            lease_s=lease_s,
            digest=digest,
            deadline=time.monotonic() + lease_s,
            left=left,
        )
        deliveries: list[concurrent.futures.Future[None]] = []
        try:
            with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ship") as shipper:
                sizes = []
                for segment in written:
                    deliveries.append(shipper.submit(_deliver, segment, ship, segments))
                    sizes.append(segment.nbytes)
            for delivery in deliveries:
                delivery.result()
            return sum(sizes)
        except BaseException:
            # Somebody may still read what was lent: it is left to them, and the next update gets memory of its own.
            self._segments = None
            written.close()
            segments.close()
            for delivery in deliveries:
                delivery.result()  # why the segments were closed, if they were
            raise

    def _on(self, device: torch.device) -> SegmentSender:
        """The segments that there are on a device, or new ones in place of those on another."""
        if self._segments is None or self._segments.pool.device != device:
            if self._segments is not None:
                self._segments.close()
            self._segments = SegmentSender(device)
        return self._segments

    def _join(self, wanted: Sequence[GroupPlan], attempt: Attempt, stop: threading.Event) -> list[WeightGroup]:
        """The groups that stand, or new ones that every target rank joins with us."""
        if not all(group.formed and group.group_name in self._groups for group in wanted):
            self._leave()
            for group in wanted:
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
        groups = [self._groups[group.group_name] for group in wanted]
        for standing in groups:
            standing.allow(seconds(attempt.timeout))
        return groups


def _meeting_place(readers: Sequence[str]) -> torch.device:
    """Where segments lie best for ranks on these devices: on this process's GPU if it is all of theirs, else in the
    host's memory, which ranks on any GPU read as well.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        own = torch.device("cuda", torch.cuda.current_device())
        if set(readers) == {device_id(own)}:
            return own
    return torch.device(CPU)


def _deliver(segment: SentSegment, ship: Callable[[Sequence[TensorSegment]], None], segments: SegmentSender) -> None:
    """Let the ranks take a segment in. When they do not, whoever waits to write another one is let go."""
    try:
        ship(segment.messages)
    except BaseException:
        segments.close()
        raise
    segment.release()


def _look(weights: WeightSource, announced: Sequence[tuple[str, Bucket]]) -> Sent:
    """The tensors in which this rank holds values that are not finite."""
    dtypes = {meta.name: meta.dtype for _, bucket in announced for meta in bucket.metas}
    return Sent(not_finite=not_finite(local_values(weights) or (), dtypes))


def _digest_parts(weights: WeightSource, attempt: Attempt, dtypes: Mapping[str, torch.dtype]) -> Sent:
    """The parts that are asked for, and the tensors that they are of, as they are now."""
    sent = Sent()
    for name, tensor in weights.tensors():
        sent.digests.add(name=name, sha256=tensor_digest(name, tensor, dtype=dtypes[name], key=attempt.digest_key))
        sent.parts.extend(digest_parts(name, tensor.detach(), attempt.parts, dtypes[name], attempt.digest_key))
    return sent


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def stopped(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel what is under way and wait for its end."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def cut_off(cause: BaseException) -> bool:
    """Whether our own broadcast failed, which says less than what the target ranks say."""
    return (
        isinstance(cause, RlctlError) and cause.reason is Reason.GROUP_FAILED and not isinstance(cause, OperationFailed)
    )


async def explained(failure: BaseException, others: asyncio.Future[Any]) -> BaseException:
    """What a failure of this trainer rank's own is raised as: where ``others`` soon fails because a rank is gone, as
    that, since such a rank breaks the trainer's own collectives too, and the groups that it sends over. A source's
    defect stays what it is; another source's is what has broken a group.
    """
    broken = isinstance(failure, RlctlError)
    if isinstance(failure, RlctlError) and failure.reason is not Reason.GROUP_FAILED:
        return failure
    # A rank whose source has failed waits as long itself before it says so.
    await asyncio.wait({others}, timeout=LOST_S + SAYS_S if broken else LOST_S)
    told = others.exception() if others.done() and not others.cancelled() else None
    if not isinstance(told, RlctlError) or told.reason is Reason.GROUP_FAILED:
        return failure
    if not broken and told.reason is not Reason.TRAINER_RANK_LOST:
        return failure
    told.__cause__ = failure
    return told


def detail(error: BaseException) -> common_pb2.ErrorDetail:
    """What the other trainer ranks are told of an error."""
    if isinstance(error, RlctlError):
        return error.detail()
    if isinstance(error, asyncio.CancelledError):
        return Reason.CANCELLED.error("the update was cancelled").detail()
    return Reason.SOURCE_FAILED.error(f"{type(error).__name__}: {error}").detail()


def refuse_unpublished(operation: Operation) -> None:
    """Raises OperationFailed for an update that has ended without a version."""
    published = bool(operation.weight_version.sequence)
    if operation.state != OPERATION_STATE_OK and not (operation.state == OPERATION_STATE_PARTIAL and published):
        raise OperationFailed(operation)
