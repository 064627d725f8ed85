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
    PauseMode,
)
from rlctl.v1.verbs_pb2 import MemoryReport
from rlctl_vllm.state import MODES, TAGS, State


async def release(
    control: Control,
    state: State,
    tags: Sequence[MemoryTag.ValueType],
    supported: Collection[MemoryTag.ValueType],
    active: int,
    call: Call,
) -> MemoryReport:
    """Release regions; ``active`` is the number of requests that have not ended.

    Raises MEMORY_NOT_RELEASABLE while requests are active, FIELD_INVALID for regions that vLLM cannot release.
    """
    own = own_pause(control, state)
    regions = state.release(tags, supported)
    if regions:
        await own.hold(call)
        try:
            if active:
                raise Reason.MEMORY_NOT_RELEASABLE.error(
                    f"{active} requests are active; pause with abort or drain first"
                )
            if regions == {MEMORY_TAG_KV_CACHE}:
                await control.must("/release_kv_cache_memory", {}, call=call, reason=Reason.MEMORY_NOT_RELEASABLE)
            else:
                await _sleep(control, call)
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
    supported: Collection[MemoryTag.ValueType],
    call: Call,
) -> MemoryReport:
    """Resume regions that are released; other regions are confirmed.

    vLLM starts generation again once it has all regions, so the server is paused again. Requests that started meanwhile
    are kept: abort would end them, and drain would wait for them.
    """
    regions = state.resume(tags, supported)
    if regions:
        names = "&".join(f"tags={TAGS[tag]}" for tag in sorted(regions))
        await control.must(f"/wake_up?{names}", {}, call=call)
        state.released -= regions
        if not state.released:
            state.holding = state.updating and not state.paused
            if state.paused or state.updating:
                frozen = state.paused in (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_IN_PLACE)
                mode = PAUSE_MODE_IN_PLACE if frozen else PAUSE_MODE_RETRACT
                await pause(control, mode, call, was_stopped=True)
    else:
        await own_pause(control, state).let_go(call)
    return state.memory_report(keeps_weights=True)  # level 1 keeps the weights, requested or not


async def _sleep(control: Control, call: Call) -> None:
    """Release all regions.

    Raises ENGINE_FAILED (UNKNOWN) after a failure, and the server counts as lost: some ranks may have released memory,
    and vLLM does nothing at a later wake-up.
    """
    try:
        await control.must("/sleep?level=1&mode=keep", {}, call=call)
    except RlctlError as error:
        if error.outcome == OUTCOME_UNKNOWN or error.reason is not Reason.ENGINE_FAILED:
            raise
        error.message += "; some of its ranks may have released their memory"
        error.outcome = OUTCOME_UNKNOWN
        error.next_step = "Start vLLM again, then its stage."
        raise control.lost(error) from None


async def pause(control: Control, mode: PauseMode.ValueType, call: Call, *, was_stopped: bool) -> None:
    """Pause vLLM. A failed pause may remain in force, so the former state is restored: frozen requests, or no pause.

    The outcome of the error is UNKNOWN if the former state cannot be restored.
    """
    try:
        await control.must(f"/pause?{MODES[mode]}", {}, call=call)
    except RlctlError as error:
        await restore(control, error, call, was_stopped=was_stopped)
        raise


async def restore(control: Control, error: RlctlError, call: Call, *, was_stopped: bool) -> None:
    """Restore the state before a pause that failed by ``error``."""
    if error.outcome == OUTCOME_UNKNOWN or error.reason is Reason.UNREACHABLE:
        return
    try:
        await control.must(f"/pause?{MODES[PAUSE_MODE_IN_PLACE]}" if was_stopped else "/resume", {}, call=call)
    except RlctlError as failure:
        error.message += f"; vLLM may remain paused: {failure.message}"
        error.outcome = OUTCOME_UNKNOWN


def own_pause(control: Control, state: State) -> OwnPause:
    """Return the plug-in's own pause of the server."""
    return OwnPause(
        state,
        lambda call: pause(control, PAUSE_MODE_IN_PLACE, call, was_stopped=False),
        lambda call: control.must("/resume", {}, call=call),
    )
