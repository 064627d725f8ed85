"""Giving memory regions back and taking them again. What they held is lost."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.errors import Reason
from rlctl.v1.common_pb2 import MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS, MemoryTag
from rlctl.v1.verbs_pb2 import MemoryReport, ReleaseMemoryRequest, ResumeMemoryRequest
from rlctl_torch.heap import give_back
from rlctl_torch.rank import Rank, Weights

TAGS = (MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS)
"""The regions that this engine has."""


class Release:
    """ReleaseMemory. A region that is released already is confirmed."""

    def __init__(self, rank: Rank, request: ReleaseMemoryRequest) -> None:
        self._rank = rank
        self._tags = _tags(request.tags) or set(TAGS)

    def admit(self) -> bool:
        """Refuse while requests hold KV entries, or an update is open."""
        rank = self._rank
        assert rank.scheduler is not None
        rank.refuse_during_update()
        if rank.scheduler.running:
            raise Reason.MEMORY_NOT_RELEASABLE.error(
                f"{rank.scheduler.running} samples hold KV entries; pause with retract or abort first",
                metadata={"count": str(rank.scheduler.running)},
            )
        return True

    def give_up(self) -> None:
        """Nothing to undo."""

    def run(self) -> MemoryReport:
        """Free the regions."""
        rank = self._rank
        rank.synchronise()
        freed = 0
        for tag in sorted(self._tags - rank.released):
            if tag == MEMORY_TAG_KV_CACHE:
                freed += rank.cache.nbytes
                rank.cache.release()
            else:
                freed += rank.model.release()
                if rank.weights is Weights.WHOLE:
                    rank.weights = Weights.LOST
            rank.released.add(tag)
        give_back(rank.device)
        return MemoryReport(released=sorted(rank.released), bytes=freed)


class Resume:
    """ResumeMemory. A region that is not released is confirmed. Weights come back as zeros."""

    def __init__(self, rank: Rank, request: ResumeMemoryRequest) -> None:
        self._rank = rank
        self._tags = _tags(request.tags) or set(TAGS)

    def admit(self) -> bool:
        """Always possible."""
        return True

    def give_up(self) -> None:
        """Nothing to undo."""

    def run(self) -> MemoryReport:
        """Allocate the regions again."""
        rank = self._rank
        taken = 0
        for tag in sorted(self._tags & rank.released):
            if tag == MEMORY_TAG_KV_CACHE:
                rank.cache.allocate()
                taken += rank.cache.nbytes
            else:
                taken += rank.model.allocate()
            rank.released.discard(tag)
        return MemoryReport(released=sorted(rank.released), bytes=taken)


def _tags(tags: Sequence[MemoryTag.ValueType]) -> set[MemoryTag.ValueType]:
    for index, tag in enumerate(tags):
        if tag not in TAGS:
            name = MemoryTag.Name(tag) if tag in MemoryTag.values() else str(tag)
            raise Reason.FIELD_INVALID.error(f"the torch engine has no region {name}", field=f"tags[{index}]")
    return set(tags)
