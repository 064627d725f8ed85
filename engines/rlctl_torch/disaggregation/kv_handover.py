"""KV entries of a prompt between engines: what a rank of a prefill engine puts into shared memory, and what a rank of a
decode engine takes out of it.

Every rank has a segment of its own with the heads that it holds. A taker maps them all and copies the heads that are
its own, so the two may be cut over different numbers of ranks. Segments are lent like those of weights
(:mod:`rlctl.weights.shared_memory.pool`): for a time, under a number that says whether the contents still stand, and
their files go with their owner however it ends. On a GPU the entries pass through the host's memory.
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
"""How long a decode engine may read what was given to it."""

MOST = 8
"""Prompts whose entries lie in shared memory at a time; others keep their slots until one was taken."""

_WHOLE = 1 << 62


class Handovers:
    """A rank's side of both. On the engine thread, all ranks together and in one order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pool: SegmentPool | None = None
        self._reader: SegmentReader | None = None
        self._lent: dict[int, Memory] = {}

    def give(self, cache: KVCache, room: int, slots: Sequence[int]) -> list[TensorSegment]:
        """Copy entries into shared memory, lent for :data:`LEASE_S`; returns every rank's segment, rank 0's first.

        Raises HANDOVER_FAILED, at every rank when at one; then nothing is lent.
        """
        written: list[TensorSegment] = []
        try:
            self._ranks.agree(lambda: written.append(self._write(cache, room, slots)))
        except RlctlError as error:
            self.let_go(room)
            raise failed(f"they were not put into shared memory: {error.message}") from error
        with self._ranks.exchanging() as exchange:
            answers = exchange.all_gather_bytes(written[0].SerializeToString())
        return [TensorSegment.FromString(answer) for answer in answers]

    def let_go(self, room: int) -> None:
        """The memory of a room may be used again; nothing happens when there is none."""
        memory = self._lent.pop(room, None)
        if memory is not None and self._pool is not None:
            self._pool.give_back(memory, room)

    def take(self, cache: KVCache, row: int, slots: Sequence[int], handover: KvHandover) -> None:
        """Copy this rank's heads of another engine's entries into these slots: a row's first ones.

        Raises HANDOVER_FAILED, at every rank when at one; what the slots hold then is not to be used.
        """
        index = torch.tensor(slots, device=cache.table.device)
        cache.table[row, : len(slots)] = index
        try:
            self._ranks.agree(lambda: self._read(cache, index, handover))
        except RlctlError as error:
            raise failed(error.message) from error

    def close(self) -> None:
        """Remove the segments, forget those of others."""
        if self._pool is not None:
            self._pool.close()
        if self._reader is not None:
            self._reader.close()

    def _write(self, cache: KVCache, room: int, slots: Sequence[int]) -> TensorSegment:
        if self._pool is None:
            self._pool = SegmentPool(torch.device(CPU), MOST)
        index = torch.tensor(slots, device=cache.table.device)
        tensors = {name: entries[index] for name, entries in _named(cache, self._ranks.rank)}
        [bucket] = plan([TensorMeta.of(*each) for each in tensors.items()], bucket_bytes=_WHOLE, large_bytes=_WHOLE)
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
        segments = [from_proto(each, f"segments[{rank}]") for rank, each in enumerate(handover.segments)]
        reading = self._reader.open(at(segments, host_id(), CPU))
        given = dict(reading.tensors())
        if len(given) != len(segments) * 2 * len(cache.keys):
            raise failed(f"they are of {len(given)} tensors, not of two for each of {len(cache.keys)} layers")
        for name, entries in _named(cache, None):
            self._place(name, entries, index, [given.get(f"{rank}.{name}") for rank in range(len(segments))], reading)
        reading.proceed()

    def _place(
        self,
        name: str,
        entries: torch.Tensor,
        index: torch.Tensor,
        parts: Sequence[torch.Tensor | None],
        reading: Reading,
    ) -> None:
        """One tensor's heads: of each giver's those that are this rank's."""
        own = entries.shape[1]
        first, start = self._ranks.rank * own, 0
        for part in parts:
            shape = None if part is None else (part.shape[0], *part.shape[2:], part.dtype)
            if part is None or shape != (len(index), *entries.shape[2:], entries.dtype):
                raise failed(f"{name} is {shape}, which is not this model's, or not in its KV dtype")
            begin, end = max(first, start), min(first + own, start + part.shape[1])
            if begin < end:
                heads = part[:, begin - start : end - start].to(entries.device)
                entries[:, begin - first : end - first][index] = heads
            start += part.shape[1]
            reading.proceed()
        if start != own * self._ranks.size:
            raise failed(f"{name} has {start} heads, not {own * self._ranks.size}")


def failed(why: str) -> RlctlError:
    """HANDOVER_FAILED."""
    return Reason.HANDOVER_FAILED.error(f"the prompt's KV entries did not come over: {why}")


def _named(cache: KVCache, rank: int | None) -> list[tuple[str, torch.Tensor]]:
    """The cache's tensors by the names that they travel under; rank None: without the rank's number."""
    prefix = "" if rank is None else f"{rank}."
    kinds = (("k", cache.keys), ("v", cache.values))
    return [(f"{prefix}{kind}.{layer}", entries) for kind, each in kinds for layer, entries in enumerate(each)]
