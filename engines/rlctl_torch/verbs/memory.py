"""Release and resume of memory regions. Contents are lost, except weights to be kept."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS, MemoryTag
from rlctl.v1.verbs_pb2 import MemoryReport, ReleaseMemoryRequest, ResumeMemoryRequest
from rlctl_torch.rank import Rank, Weights
from rlctl_torch.steps.heap import give_back
from rlctl_torch.steps.ordered_commands import Action

TAGS = (MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS)
"""The regions of this engine."""


class Release(Action):
    """ReleaseMemory. A region that is already released is confirmed."""

    def __init__(self, rank: Rank, request: ReleaseMemoryRequest) -> None:
        self._rank = rank
        self._tags = _tags(request.tags) or set(TAGS)
        self._keep = request.keep_weights

    def admit(self) -> bool:
        """Refuse while samples hold KV entries, or an update is open."""
        rank = self._rank
        assert rank.scheduler is not None
        rank.refuse_during_update()
        if rank.scheduler.running:
            raise Reason.MEMORY_NOT_RELEASABLE.error(
                f"{rank.scheduler.running} samples hold KV entries; pause with retract or abort first",
                metadata={"count": str(rank.scheduler.running)},
            )
        return True

    def run(self) -> MemoryReport:
        """Free the regions. Raises, before any is freed, MEMORY_FULL if the host has no room for the weights, and
        ENGINE_WEDGED if the work beside generation does not end.
        """
        rank = self._rank
        rank.synchronise()
        if MEMORY_TAG_WEIGHTS in self._tags - rank.released:
            self._let_weights_go()
        size = 0
        for tag in sorted(self._tags - rank.released):
            size += _free(rank, tag)
            rank.released.add(tag)
        give_back(rank.device)
        return _report(rank, size)

    def _let_weights_go(self) -> None:
        """End the users of the weights and keep a copy on request: all ranks, or none."""
        rank = self._rank
        try:
            rank.ranks.agree(self._prepare)
        except BaseException:
            rank.model.kept = None  # a later resume would restore weights of an earlier version
            raise
        if rank.weights is Weights.WHOLE and rank.model.kept is None:
            rank.weights = Weights.LOST

    def _prepare(self) -> None:
        self._rank.beside.end(Reason.MEMORY_RELEASED.error("the weights were released meanwhile"))
        if not self._keep:
            return
        shortage = ""
        try:
            self._rank.model.keep()
        except (RuntimeError, MemoryError) as error:
            shortage = f"weights, in the memory of the host: {error}".splitlines()[0]
        if shortage:
            raise Reason.MEMORY_FULL.error(shortage)


class Resume(Action):
    """ResumeMemory. A region that is not released is confirmed. Weights that were not kept return as zeros."""

    def __init__(self, rank: Rank, request: ResumeMemoryRequest) -> None:
        self._rank = rank
        self._tags = _tags(request.tags) or set(TAGS)

    def run(self) -> MemoryReport:
        """Allocate the regions again: all regions on all ranks, or nothing. Raises MEMORY_FULL."""
        rank = self._rank
        allocated: dict[MemoryTag.ValueType, int] = {}
        try:
            rank.ranks.agree(lambda: self._take(allocated))
        except RlctlError:
            for tag in allocated:
                _free(rank, tag)
            give_back(rank.device)
            raise
        rank.released -= allocated.keys()
        if MEMORY_TAG_WEIGHTS in allocated:
            rank.model.kept = None
        return _report(rank, sum(allocated.values()))

    def _take(self, sizes: dict[MemoryTag.ValueType, int]) -> None:
        rank = self._rank
        shortage = ""
        for tag in sorted(self._tags & rank.released):
            try:
                sizes[tag] = _allocate(rank, tag)
            except RuntimeError as error:  # CUDA has an error class of its own, the host has not
                shortage = f"{MemoryTag.Name(tag).removeprefix('MEMORY_TAG_').lower()}: {error}".splitlines()[0]
                break
        if shortage:  # here the traceback, with its references to the memory, is gone
            raise Reason.MEMORY_FULL.error(shortage)


def _report(rank: Rank, size: int) -> MemoryReport:
    kept_tags = [] if rank.model.kept is None else [MEMORY_TAG_WEIGHTS]
    return MemoryReport(released=sorted(rank.released), bytes=size, kept=kept_tags)


def _allocate(rank: Rank, tag: MemoryTag.ValueType) -> int:
    if tag == MEMORY_TAG_KV_CACHE:
        rank.cache.allocate()
        return rank.cache.nbytes
    return rank.model.allocate()


def _free(rank: Rank, tag: MemoryTag.ValueType) -> int:
    if tag == MEMORY_TAG_KV_CACHE:
        rank.cache.release()
        return rank.cache.nbytes
    return rank.model.release()


def _tags(tags: Sequence[MemoryTag.ValueType]) -> set[MemoryTag.ValueType]:
    for index, tag in enumerate(tags):
        if tag not in TAGS:
            name = MemoryTag.Name(tag) if tag in MemoryTag.values() else str(tag)
            raise Reason.FIELD_INVALID.error(f"the torch engine has no region {name}", field=f"tags[{index}]")
    return set(tags)
