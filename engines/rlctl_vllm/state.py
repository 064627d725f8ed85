"""What vLLM has been told, and what it may be told next. Pure: no I/O, no time.

vLLM's own answers are not enough to go by: ``/is_sleeping`` is true when it is merely paused, and waking up takes a
pause back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlctl_servers.server.server_info import check_tags
from rlctl_servers.server.state import ServerState

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_SKIPPED,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    PAUSE_MODE_UNSPECIFIED,
    MemoryTag,
    PauseMode,
)

MODES = {
    PAUSE_MODE_ABORT: "mode=abort&clear_cache=false",
    PAUSE_MODE_RETRACT: "mode=keep&clear_cache=true",
    PAUSE_MODE_IN_PLACE: "mode=keep&clear_cache=false",
    PAUSE_MODE_DRAIN: "mode=wait&clear_cache=false",
}
"""The query of vLLM's /pause for each of rlctl's modes."""

TAGS = {MEMORY_TAG_KV_CACHE: "kv_cache", MEMORY_TAG_WEIGHTS: "weights"}
"""vLLM's memory regions."""

EVERYTHING = frozenset(TAGS)


class State(ServerState):
    """vLLM's state after the calls so far."""

    def pause(self, mode: PauseMode.ValueType) -> PauseMode.ValueType:
        """The mode to pause in. Raises UNSUPPORTED (SKIPPED) for one that vLLM does not have."""
        mode = mode or PAUSE_MODE_ABORT
        if mode not in MODES:
            raise Reason.UNSUPPORTED.error(f"vLLM has no pause mode {mode}", field="mode", outcome=OUTCOME_SKIPPED)
        return mode

    def refuse_drain(self, *, active: int, whole: bool) -> None:
        """Raise PAUSE_MODE_CONFLICT where a drain would let what is frozen in place, so many requests, go on with
        weights that nobody may generate with; ``whole``: they are those of a version.

        What a retract has sent back waits through a drain, too.
        """
        frozen = active if self.stopped and self.paused in (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_IN_PLACE) else 0
        if frozen and not whole:
            raise Reason.PAUSE_MODE_CONFLICT.error(
                f"{frozen} requests are frozen in place; drain would let them go on with weights that are not whole",
                field="mode",
            )

    def release(
        self, tags: Sequence[MemoryTag.ValueType], known: Collection[MemoryTag.ValueType]
    ) -> frozenset[MemoryTag.ValueType]:
        """The regions to release, of those that are not released yet. Empty tags: all that are known.

        Raises FIELD_INVALID for a region that vLLM does not have, and for a part of them that it cannot release: the
        KV cache alone, or everything.
        """
        check_tags("vLLM", tags, known)
        wanted = frozenset(tags or known) - self.released
        if wanted == {MEMORY_TAG_WEIGHTS}:
            what = "beside a KV cache that is released already" if self.released else "alone"
            raise Reason.FIELD_INVALID.error(f"vLLM does not release the weights {what}", field="tags")
        return wanted

    def resume(
        self, tags: Sequence[MemoryTag.ValueType], known: Collection[MemoryTag.ValueType]
    ) -> frozenset[MemoryTag.ValueType]:
        """The regions to take again, of those that are released. Raises FIELD_INVALID as :meth:`release`."""
        check_tags("vLLM", tags, known)
        return frozenset(tags or known) & self.released
