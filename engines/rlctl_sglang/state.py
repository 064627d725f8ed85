"""SGLang's state after the calls so far, and the calls that may come next. Pure: no I/O, no time.

SGLang believes its callers: some calls in the wrong state end the whole server, others never return. Such a call is
refused here, or turned into a harmless call, before it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlctl_servers.server.state import ServerState

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_CUDA_GRAPH,
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_SKIPPED,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    PauseMode,
)

MODES = {PAUSE_MODE_ABORT: "abort", PAUSE_MODE_RETRACT: "retract", PAUSE_MODE_IN_PLACE: "in_place"}
"""SGLang's pause modes."""

PAIR_MODES = (PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT)
"""Modes of a prefill or decode server. Each ends the active requests, see :meth:`State.pause`."""

TAGS = {MEMORY_TAG_KV_CACHE: "kv_cache", MEMORY_TAG_WEIGHTS: "weights", MEMORY_TAG_CUDA_GRAPH: "cuda_graph"}
"""SGLang's memory regions."""


@dataclass
class State(ServerState):
    """SGLang's state after the calls so far.

    Attributes:
        paired: the server is a prefill or decode server.
    """

    product: ClassVar[str] = "SGLang"

    paired: bool = False

    @property
    def own_mode(self) -> PauseMode.ValueType:
        """Return the mode of the plug-in's own pause."""
        return PAUSE_MODE_ABORT if self.paired else PAUSE_MODE_IN_PLACE

    def pause(self, mode: PauseMode.ValueType, *, active: int) -> str:
        """Return the mode to send for a pause. ``active``: number of active requests.

        In a pair the mode is always abort. A decode server would have retracted requests computed anew by the prefill
        server, which it calls without the key. Handovers that a pause has caught half-way keep the caches from being
        flushed.

        Raises UNSUPPORTED (SKIPPED) for a mode that SGLang does not have. Raises PAUSE_MODE_CONFLICT for an abort of
        requests that are frozen in place: that call never returns, and nothing helps the server afterwards.
        """
        mode = mode or PAUSE_MODE_ABORT
        if mode not in (PAIR_MODES if self.paired else MODES):
            name = PauseMode.Name(mode).removeprefix("PAUSE_MODE_").lower() if mode in PauseMode.values() else mode
            part = " as one of a pair" if self.paired else ""
            raise Reason.UNSUPPORTED.error(
                f"SGLang has no pause mode {name}{part}", field="mode", outcome=OUTCOME_SKIPPED
            )
        if self.paired:
            return MODES[PAUSE_MODE_ABORT]
        # The plug-in pauses in place. A failed release may have left this pause, with requests under it.
        stale_pause = self.holding and not self.paused and not self.released and not self.updating
        frozen = stale_pause or self.paused == PAUSE_MODE_IN_PLACE
        if frozen and mode == PAUSE_MODE_ABORT:
            if active:
                raise Reason.PAUSE_MODE_CONFLICT.error(
                    f"{active} requests are frozen in place; SGLang hangs when frozen requests are aborted",
                    field="mode",
                )
            return MODES[PAUSE_MODE_RETRACT]  # no active requests: the same effect, without the danger
        return MODES[mode]
