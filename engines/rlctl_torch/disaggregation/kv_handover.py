"""KV entries of a prompt between a prefill and a decode engine, through shared memory.

Every rank of the prefill engine writes its heads into a segment of its own. Every rank of the decode engine maps all
segments and copies its own heads, so the engines may have different numbers of ranks. Segments are lent for a time,
like segments of weights (:mod:`rlctl.weights.shared_memory.pool`). A generation number shows whether the contents are
still valid. The files are removed with their owner, however the owner ends. On a GPU the entries pass through host
memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.rollout_pb2 import KvHandover
from rlctl.v1.verbs_pb2 import TensorSegment
from rlctl.weights.shared_memory.pool import Memory, SegmentPool
from rlctl.weights.shared_memory.reader import Reading, SegmentReader
from rlctl.weights.shared_memory.segment import at, from_proto, to_proto
from rlctl.weights.tensor.buckets import plan, unpack
from rlctl.weights.tensor.placement import CPU, host_id
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl_torch.model.kv_cache import KVCache
from rlctl_torch.steps.collectives import Ranks

LEASE_S = 60.0
"""Seconds in which a decode engine may read lent entries."""

MOST = 8
"""Prompts with entries in shared memory at a time. Further prompts keep their slots until a segment is free."""

_WHOLE = 1 << 62


class Handovers:
    """A rank's part in giving and taking KV entries. Engine thread only, on all ranks together in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pool: SegmentPool | None = None
        self._reader: SegmentReader | None = None
        self._lent: dict[int, Memory] = {}

    def give(self, cache: KVCache, room: int, slots: Sequence[int]) -> list[TensorSegment]:
        """Copy entries into shared memory, lent for :data:`LEASE_S`. Return the segments of all ranks, rank 0's first.

        Raises HANDOVER_FAILED on every rank if any rank fails. Then nothing is lent.
        """
        segments: list[TensorSegment] = []
        try:
            self._ranks.agree(lambda: segments.append(self._write(cache, room, slots)))
        except RlctlError as error:
            self.let_go(room)
            raise failed(f"they were not put into shared memory: {error.message}") from error
        with self._ranks.exchanging() as exchange:
            answers = exchange.all_gather_bytes(segments[0].SerializeToString())
        return [TensorSegment.FromString(answer) for answer in answers]

    def let_go(self, room: int) -> None:
        """Free the memory of a room, if there is any."""
        memory = self._lent.pop(room, None)
        if memory is not None and self._pool is not None:
            self._pool.give_back(memory, room)

    def take(self, cache: KVCache, row: int, slots: Sequence[int], handover: KvHandover) -> None:
        """Copy this rank's heads of a prefill engine's entries into ``slots``, the first slots of ``row``.

        Raises HANDOVER_FAILED on every rank if any rank fails. The contents of the slots are then invalid.
        """
        index = torch.tensor(slots, device=cache.table.device)
        cache.table[row, : len(slots)] = index
        try:
            self._ranks.agree(lambda: self._read(cache, index, handover))
        except RlctlError as error:
            raise failed(error.message) from error

    def close(self) -> None:
        """Remove this rank's segments, and unmap the segments of other engines."""
        if self._pool is not None:
            self._pool.close()
        if self._reader is not None:
            self._reader.close()

    def _write(self, cache: KVCache, room: int, slots: Sequence[int]) -> TensorSegment:
        if self._pool is None:
            self._pool = SegmentPool(torch.device(CPU), MOST)
        index = torch.tensor(slots, device=cache.table.device)
        tensors = {name: entries[index] for name, entries in _named(cache, self._ranks.rank)}
        [bucket] = plan([TensorMeta.of(*item) for item in tensors.items()], bucket_bytes=_WHOLE, large_bytes=_WHOLE)
        memory = self._pool.take(bucket.nbytes, time.monotonic())
        try:
            for name, view in unpack(bucket, memory.data):
                view.copy_(tensors[name])
            generation = self._pool.lend(memory, room, LEASE_S)
        except BaseException:
            self._pool.give_back(memory)
            raise
        self._lent[room] = memory
        message = to_proto(bucket, start=memory.start, node=host_id(), generation=generation, lease_s=LEASE_S)
        message.device = CPU
        memory.address(message)
        return message

    def _read(self, cache: KVCache, index: torch.Tensor, handover: KvHandover) -> None:
        if self._reader is None:
            self._reader = SegmentReader(torch.device(CPU))
        segments = [from_proto(segment, f"segments[{rank}]") for rank, segment in enumerate(handover.segments)]
        reading = self._reader.open(at(segments, host_id(), CPU))
        tensors = dict(reading.tensors())
        if len(tensors) != len(segments) * 2 * len(cache.keys):
            raise failed(f"they are of {len(tensors)} tensors, not of two for each of {len(cache.keys)} layers")
        for name, entries in _named(cache, None):
            self._place(name, entries, index, [tensors.get(f"{rank}.{name}") for rank in range(len(segments))], reading)
        reading.proceed()

    def _place(
        self,
        name: str,
        entries: torch.Tensor,
        index: torch.Tensor,
        parts: Sequence[torch.Tensor | None],
        reading: Reading,
    ) -> None:
        """Copy this rank's heads of a tensor out of the parts of all giving ranks."""
        head_count = entries.shape[1]
        first, start = self._ranks.rank * head_count, 0
        for part in parts:
            shape = None if part is None else (part.shape[0], *part.shape[2:], part.dtype)
            if part is None or shape != (len(index), *entries.shape[2:], entries.dtype):
                raise failed(f"{name} is {shape}, which is not this model's, or not in its KV dtype")
            begin, end = max(first, start), min(first + head_count, start + part.shape[1])
            if begin < end:
                heads = part[:, begin - start : end - start].to(entries.device)
                entries[:, begin - first : end - first][index] = heads
            start += part.shape[1]
            reading.proceed()
        if start != head_count * self._ranks.size:
            raise failed(f"{name} has {start} heads, not {head_count * self._ranks.size}")


def failed(why: str) -> RlctlError:
    return Reason.HANDOVER_FAILED.error(f"the prompt's KV entries did not come over: {why}")


def _named(cache: KVCache, rank: int | None) -> list[tuple[str, torch.Tensor]]:
    """Return the cache's tensors by wire name. With rank None the names have no rank prefix."""
    prefix = "" if rank is None else f"{rank}."
    kinds = (("k", cache.keys), ("v", cache.values))
    return [(f"{prefix}{kind}.{layer}", entries) for kind, layers in kinds for layer, entries in enumerate(layers)]
