"""Memory regions of vLLM, and the pause of an update or a release at a server that the fleet has not paused.

vLLM sleeps at level 1 for all regions, so that weights return unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlctl_servers.server.admin_calls import Control
from rlctl_servers.updates.own_pause import OwnPause

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_KV_CACHE,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    PAUSE_MODE_UNSPECIFIED,
    MemoryTag,
)
from rlctl.v1.verbs_pb2 import MemoryReport
from rlctl_vllm.state import MODES, TAGS, State


async def release(
    control: Control,
    state: State,
    tags: Sequence[MemoryTag.ValueType],
    known: Collection[MemoryTag.ValueType],
    active: int,
    call: Call,
) -> MemoryReport:
    """Release regions; ``active`` is the number of requests that have not ended.

    Raises MEMORY_NOT_RELEASABLE while requests are active, FIELD_INVALID for regions that vLLM cannot release.
    """
    own = own_pause(control, state)
    regions = state.release(tags, known)
    if regions:
        await own.hold(call)
        try:
            if active:
                raise Reason.MEMORY_NOT_RELEASABLE.error(
                    f"{active} requests are active; pause with abort or drain first"
                )
            path = "/release_kv_cache_memory" if regions == {MEMORY_TAG_KV_CACHE} else "/sleep?level=1&mode=keep"
            await control.must(path, {}, call=call, reason=Reason.MEMORY_NOT_RELEASABLE)
        except RlctlError as error:
            if error.outcome == OUTCOME_UNKNOWN:
                state.released |= regions  # nothing continues before a resume of these regions
            await own.let_go(call, error)
            raise
        state.released |= regions
    return state.memory_report(keeps_weights=True)  # level 1 keeps the weights, requested or not


async def resume(
    control: Control,
    state: State,
    tags: Sequence[MemoryTag.ValueType],
    known: Collection[MemoryTag.ValueType],
    call: Call,
) -> MemoryReport:
    """Resume regions that are released; other regions are confirmed.

    vLLM starts generation again once it has all regions, so the server is paused again. Requests that started meanwhile
    are kept: abort would end them, and drain would wait for them.
    """
    regions = state.resume(tags, known)
    if regions:
        names = "&".join(f"tags={TAGS[tag]}" for tag in sorted(regions))
        await control.must(f"/wake_up?{names}", {}, call=call)
        state.released -= regions
        if not state.released:
            state.holding = state.updating and not state.paused
            if state.paused or state.updating:
                frozen = state.paused in (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_IN_PLACE)
                mode = PAUSE_MODE_IN_PLACE if frozen else PAUSE_MODE_RETRACT
                await control.must(f"/pause?{MODES[mode]}", {}, call=call)
    else:
        await own_pause(control, state).let_go(call)
    return state.memory_report(keeps_weights=True)  # level 1 keeps the weights, requested or not


def own_pause(control: Control, state: State) -> OwnPause:
    """Return the plug-in's own pause of the server."""
    return OwnPause(
        state,
        lambda call: control.must(f"/pause?{MODES[PAUSE_MODE_IN_PLACE]}", {}, call=call),
        lambda call: control.must("/resume", {}, call=call),
    )
