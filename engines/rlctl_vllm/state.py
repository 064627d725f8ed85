"""State of vLLM after the calls so far, and the calls that are allowed next. Pure: no I/O, no time.

vLLM's own answers do not suffice: ``/is_sleeping`` is true during a mere pause, and a wake-up ends a pause.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

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
from rlctl_vllm.options import PRODUCT

MODES = {
    PAUSE_MODE_ABORT: "mode=abort&clear_cache=false",
    PAUSE_MODE_RETRACT: "mode=keep&clear_cache=true",
    PAUSE_MODE_IN_PLACE: "mode=keep&clear_cache=false",
    PAUSE_MODE_DRAIN: "mode=wait&clear_cache=false",
}
"""Query of vLLM's /pause for each of rlctl's modes."""

TAGS = {MEMORY_TAG_KV_CACHE: "kv_cache", MEMORY_TAG_WEIGHTS: "weights"}
"""vLLM's names of memory regions."""


class State(ServerState):
    """vLLM's state after the calls so far."""

    product: ClassVar[str] = PRODUCT

    def pause(self, mode: PauseMode.ValueType) -> PauseMode.ValueType:
        """Return the mode of a pause. Raises UNSUPPORTED (SKIPPED) for a mode that vLLM does not have."""
        mode = mode or PAUSE_MODE_ABORT
        if mode not in MODES:
            raise Reason.UNSUPPORTED.error(f"vLLM has no pause mode {mode}", field="mode", outcome=OUTCOME_SKIPPED)
        return mode

    def refuse_drain(self, *, active: int, whole: bool) -> None:
        """Raise PAUSE_MODE_CONFLICT if a drain would let frozen requests continue with weights of no version.

        ``active``: the number of requests. ``whole``: the weights are of a version. Retracted requests wait through a
        drain, too.
        """
        frozen = active if self.stopped and self.paused in (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_IN_PLACE) else 0
        if frozen and not whole:
            raise Reason.PAUSE_MODE_CONFLICT.error(
                f"{frozen} requests are frozen in place; drain would continue requests with incomplete weights",
                field="mode",
            )

    def release(
        self, tags: Sequence[MemoryTag.ValueType], supported: Collection[MemoryTag.ValueType]
    ) -> frozenset[MemoryTag.ValueType]:
        """Do as :meth:`ServerState.release`.

        Raises FIELD_INVALID also for the weights alone: vLLM releases the KV cache alone, or everything.
        """
        regions = super().release(tags, supported)
        if regions == {MEMORY_TAG_WEIGHTS}:
            situation = "beside a KV cache that is released already" if self.released else "alone"
            raise Reason.FIELD_INVALID.error(f"vLLM does not release the weights {situation}", field="tags")
        return regions
