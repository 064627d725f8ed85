"""Caches and memory regions. Both need an idle SGLang: a busy SGLang ends itself at such a call."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from rlctl_servers.server.admin_calls import Control
from rlctl_servers.updates.own_pause import OwnPause

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, MemoryTag
from rlctl.v1.verbs_pb2 import MemoryReport
from rlctl_sglang.state import MODES, TAGS, State

LOOK_S = 0.05

IDLE_S = 2.0
"""Seconds that a request may still be inside SGLang after its end."""

HANDOVER_S = 35.0
"""Seconds that a broken-off handover may stay inside a server of a pair. A decode server keeps the entries' place for
30 s, unless the prefill server announces an earlier end of its writes (``_deferred_releases``, 0.5.23).
"""


class Ranks(Protocol):
    """The ranks of one server."""

    async def caught_up(self, call: Call) -> None:
        """Wait until every rank has carried out the earlier calls to the server."""


async def flush(control: Control, idle_s: float, call: Call) -> None:
    """Empty the caches, after up to ``idle_s`` seconds for requests to end. Raises ACTIVE_REQUESTS.

    SGLang's own wait is not used. That wait includes requests back in the queue after a pause, and these hold nothing.
    """
    now = asyncio.get_running_loop().time
    until = min(now() + idle_s, call.deadline)
    while not (answer := await control.tell("/flush_cache", {}, call=call)).ok:
        if now() >= until:
            raise Reason.ACTIVE_REQUESTS.error(f"SGLang: {answer.message}")
        await asyncio.sleep(LOOK_S)


async def release(
    control: Control,
    ranks: Ranks | None,
    state: State,
    tags: Sequence[MemoryTag.ValueType],
    supported: Collection[MemoryTag.ValueType],
    call: Call,
    *,
    active: int,
    keeps_weights: bool,
) -> MemoryReport:
    """Release regions. The server is paused first: nothing can start between the check for requests and the release.

    Raises MEMORY_NOT_RELEASABLE while requests hold KV entries, FIELD_INVALID for an unknown region, and as
    ``caught_up`` with outcome UNKNOWN. ``ranks``: None for a server of one rank. ``active``: number of active requests,
    which the pause of a pair's server would end. ``keeps_weights``: the server keeps the content of its weights.
    """
    own = own_pause(control, state)
    regions = state.release(tags, supported)
    if regions:
        if state.paired and active and not state.stopped:
            raise Reason.MEMORY_NOT_RELEASABLE.error(f"{active} requests are active; pause first")
        await own.hold(call)
        try:
            remaining_s = call.deadline - asyncio.get_running_loop().time()
            await flush(control, min(HANDOVER_S, remaining_s / 2) if state.paired else IDLE_S, call)
        except RlctlError as error:
            refusal = _not_released(error)
            await own.let_go(call, refusal)
            raise refusal from error
        try:
            await control.must("/release_memory_occupation", {"tags": _names(regions)}, call=call)
        except RlctlError as error:
            if error.outcome == OUTCOME_UNKNOWN:
                state.released |= regions  # no generation before the regions are resumed
            await own.let_go(call, error)
            raise
        state.released |= regions
    await _confirm(ranks, call)
    return state.memory_report(keeps_weights=keeps_weights)


async def resume(
    control: Control,
    ranks: Ranks | None,
    state: State,
    tags: Sequence[MemoryTag.ValueType],
    supported: Collection[MemoryTag.ValueType],
    call: Call,
    *,
    keeps_weights: bool,
) -> MemoryReport:
    """Resume the released regions among ``tags``. Regions that are not released are confirmed.

    ``ranks`` and errors as in :func:`release`.
    """
    regions = state.resume(tags, supported)
    if regions:
        await control.must("/resume_memory_occupation", {"tags": _names(regions)}, call=call)
        state.released -= regions
    await _confirm(ranks, call)
    if not state.released:
        await own_pause(control, state).let_go(call)
    return state.memory_report(keeps_weights=keeps_weights)


async def _confirm(ranks: Ranks | None, call: Call) -> None:
    """Wait until every rank has released or resumed its memory: SGLang answers once rank 0 has. A failure is UNKNOWN.

    A repeated call asks again, because the call before may have had no answer of all ranks.
    """
    if ranks is None:
        return
    try:
        await ranks.caught_up(call)
    except RlctlError as error:
        error.outcome = OUTCOME_UNKNOWN
        raise


def _names(regions: Iterable[MemoryTag.ValueType]) -> list[str]:
    return [TAGS[tag] for tag in sorted(regions)]


def _not_released(error: RlctlError) -> RlctlError:
    """Return the error of a release whose flush failed: the regions are as before."""
    if error.reason is Reason.ACTIVE_REQUESTS:
        cause = f"requests hold KV entries; pause with retract or abort first ({error.message})"
        return Reason.MEMORY_NOT_RELEASABLE.error(cause)
    error.outcome = OUTCOME_REJECTED
    return error


def own_pause(control: Control, state: State) -> OwnPause:
    return OwnPause(
        state,
        lambda call: control.must("/pause_generation", {"mode": MODES[state.own_mode]}, call=call),
        lambda call: control.must("/continue_generation", {"torch_empty_cache": False}, call=call),
    )
