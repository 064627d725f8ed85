"""Memory regions: vLLM's sleep, at level 1 for everything, so that weights come back as they were. And the pause that
an update or a release needs, where the fleet has not paused the server.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from rlctl_servers.server.admin_calls import Control
from rlctl_servers.updates.own_pause import OwnPause

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS, OUTCOME_UNKNOWN, PAUSE_MODE_IN_PLACE, MemoryTag
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
    """Give regions back; ``active``: requests that have not ended.

    Raises MEMORY_NOT_RELEASABLE while there are any, FIELD_INVALID for what vLLM cannot release.
    """
    wanted = state.release(tags, known)
    if wanted:
        await hold(control, state, call)
        try:
            if active:
                raise Reason.MEMORY_NOT_RELEASABLE.error(
                    f"{active} requests are active; pause with abort or drain first"
                )
            path = "/release_kv_cache_memory" if wanted == {MEMORY_TAG_KV_CACHE} else "/sleep?level=1&mode=keep"
            await control.must(path, {}, call=call, reason=Reason.MEMORY_NOT_RELEASABLE)
        except RlctlError as error:
            if error.outcome == OUTCOME_UNKNOWN:
                state.released |= wanted  # nothing goes on before they were taken again
            await let_go(control, state, call)
            raise
        state.released |= wanted
    return _report(state)


async def resume(
    control: Control,
    state: State,
    tags: Sequence[MemoryTag.ValueType],
    known: Collection[MemoryTag.ValueType],
    call: Call,
) -> MemoryReport:
    """Take regions again, those of them that are released; what is not is confirmed.

    vLLM goes on generating once it has all of them: the pause that was asked for is asked for again.
    """
    wanted = state.resume(tags, known)
    if wanted:
        names = "&".join(f"tags={TAGS[tag]}" for tag in sorted(wanted))
        await control.must(f"/wake_up?{names}", {}, call=call)
        state.released -= wanted
        if not state.released:
            state.holding = state.updating and not state.paused
            if state.paused or state.updating:
                await control.must(f"/pause?{MODES[state.paused or PAUSE_MODE_IN_PLACE]}", {}, call=call)
    else:
        await let_go(control, state, call)
    return _report(state)


def _report(state: State) -> MemoryReport:
    """Level 1 keeps the weights, whether that was asked for or not."""
    released = sorted(state.released)
    return MemoryReport(released=released, kept=[tag for tag in released if tag == MEMORY_TAG_WEIGHTS])


def own_pause(control: Control, state: State) -> OwnPause:
    """The pause of updates."""
    return OwnPause(state, partial(hold, control, state), partial(let_go, control, state))


async def hold(control: Control, state: State, call: Call) -> None:
    """Pause, unless the server is paused: requests of any sender wait."""
    if not state.stopped:
        state.holding = True
        try:
            await control.must(f"/pause?{MODES[PAUSE_MODE_IN_PLACE]}", {}, call=call)
        except RlctlError as error:
            state.holding = error.outcome == OUTCOME_UNKNOWN
            raise


async def let_go(control: Control, state: State, call: Call) -> None:
    """End the own pause, unless the fleet has paused the server meanwhile."""
    if state.holding and not state.released and not state.updating:
        if not state.paused:
            await control.must("/resume", {}, call=call)
        state.holding = False
