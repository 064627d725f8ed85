"""What SGLang may be told when: the model of its states, without a server."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rlctl_servers.server.http import Answer
from rlctl_sglang.server import memory
from rlctl_sglang.state import State

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_CUDA_GRAPH,
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_REJECTED,
    OUTCOME_SKIPPED,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    PAUSE_MODE_UNSPECIFIED,
    Outcome,
)

KNOWN = (MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS)


def test_an_abort_of_what_is_frozen_is_never_sent() -> None:
    """It never returns, and nothing helps the server afterwards."""
    for before in (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE):
        for mode in (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE):
            for active in (0, 1):
                state = State(paused=before)
                dangerous = before == PAUSE_MODE_IN_PLACE and mode in (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_ABORT)
                if dangerous and active:
                    with pytest.raises(RlctlError) as refused:
                        state.pause(mode, active=active)
                    assert refused.value.reason is Reason.PAUSE_MODE_CONFLICT
                else:
                    sent = state.pause(mode, active=active)
                    assert not (before == PAUSE_MODE_IN_PLACE and sent == "abort")
                    assert dangerous or sent == {PAUSE_MODE_RETRACT: "retract", PAUSE_MODE_IN_PLACE: "in_place"}.get(
                        mode, "abort"
                    )


def test_what_a_release_that_failed_has_frozen_is_not_aborted_either() -> None:
    with pytest.raises(RlctlError) as refused:
        State(holding=True).pause(PAUSE_MODE_ABORT, active=1)
    assert refused.value.reason is Reason.PAUSE_MODE_CONFLICT
    assert State(holding=True, released={MEMORY_TAG_KV_CACHE}).pause(PAUSE_MODE_ABORT, active=1) == "abort", "held back"


@pytest.mark.parametrize("mode", [PAUSE_MODE_DRAIN, 77])
def test_modes_that_it_does_not_have_are_skipped(mode: int) -> None:
    with pytest.raises(RlctlError) as refused:
        State().pause(mode, active=0)  # type: ignore[arg-type]
    assert (refused.value.reason, refused.value.outcome) == (Reason.UNSUPPORTED, OUTCOME_SKIPPED)


def test_one_of_a_pair_ends_what_is_active_in_every_mode_that_it_has() -> None:
    state = State(paired=True)
    for mode in (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT):
        assert state.pause(mode, active=1) == "abort"
    with pytest.raises(RlctlError) as refused:
        state.pause(PAUSE_MODE_IN_PLACE, active=1)
    assert (refused.value.reason, refused.value.outcome) == (Reason.UNSUPPORTED, OUTCOME_SKIPPED)


def test_nothing_is_resumed_that_was_not_released() -> None:
    state = State(released={MEMORY_TAG_KV_CACHE})
    assert state.resume([], KNOWN) == {MEMORY_TAG_KV_CACHE}
    assert state.resume([MEMORY_TAG_WEIGHTS], KNOWN) == frozenset()
    assert state.release([], KNOWN) == {MEMORY_TAG_WEIGHTS}
    for act in (state.release, state.resume):
        with pytest.raises(RlctlError) as refused:
            act([MEMORY_TAG_KV_CACHE, MEMORY_TAG_CUDA_GRAPH], KNOWN)
        assert refused.value.field == "tags[1]"


def test_generation_does_not_go_on_without_memory_or_inside_an_update() -> None:
    with pytest.raises(RlctlError) as refused:
        State(released={MEMORY_TAG_WEIGHTS}).refuse_continue(updating=False)
    assert refused.value.reason is Reason.MEMORY_RELEASED
    with pytest.raises(RlctlError) as refused:
        State().refuse_continue(updating=True)
    assert refused.value.reason is Reason.ILLEGAL_STATE
    State().refuse_continue(updating=False)


@pytest.mark.parametrize(
    ("outcome", "told_after", "released"),
    [
        (OUTCOME_REJECTED, ["/continue_generation"], set()),
        (OUTCOME_UNKNOWN, [], {MEMORY_TAG_KV_CACHE}),
    ],
)
async def test_a_release_that_failed_holds_nothing_back_unless_it_may_have_been_done(
    outcome: Outcome.ValueType, told_after: list[str], released: set[Any]
) -> None:
    """What may be released is taken again before anything goes on; what is not goes on at once."""
    told: list[str] = []

    class Server:
        async def tell(self, path: str, body: dict[str, Any], *, call: Call) -> Answer:
            told.append(path)
            return Answer(200, "")

        async def must(self, path: str, body: dict[str, Any], *, call: Call) -> None:
            told.append(path)
            if path == "/release_memory_occupation":
                raise Reason.LINK_LOST.error("it broke", outcome=outcome)

    server: Any = Server()
    state, call = State(), Call("c", math.inf)
    with pytest.raises(RlctlError):
        await memory.release(server, None, state, [MEMORY_TAG_KV_CACHE], KNOWN, call, active=0, keeps_weights=False)
    assert told[told.index("/release_memory_occupation") + 1 :] == told_after
    assert (state.released, state.stopped) == (released, bool(released))
    if released:
        await memory.resume(server, None, state, [], KNOWN, call, keeps_weights=False)
        assert told[-2:] == ["/resume_memory_occupation", "/continue_generation"]


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("/flush_cache", Reason.MEMORY_NOT_RELEASABLE),
        ("/release_memory_occupation", Reason.ENGINE_FAILED),
    ],
)
async def test_a_refused_release_is_unknown_while_the_server_remains_paused(fails: str, reason: Reason) -> None:
    """A stage that was READY would send requests to it."""
    stuck = True

    class Server:
        async def tell(self, path: str, body: dict[str, Any], *, call: Call) -> Answer:
            return Answer(400, "requests are running") if path == fails else Answer(200, "")

        async def must(self, path: str, body: dict[str, Any], *, call: Call) -> None:
            if path == fails or (stuck and path == "/continue_generation"):
                raise Reason.ENGINE_FAILED.error(f"SGLang refused {path}")

    server: Any = Server()
    state, call = State(), Call("c", 0.0)
    with pytest.raises(RlctlError) as failed:
        await memory.release(server, None, state, [], KNOWN, call, active=0, keeps_weights=False)
    assert (failed.value.reason, failed.value.outcome) == (reason, OUTCOME_UNKNOWN)
    assert failed.value.message.endswith("; the server remains paused: SGLang refused /continue_generation")
    assert state.stopped
    stuck = False
    await memory.resume(server, None, state, [], KNOWN, call, keeps_weights=False)
    assert not state.stopped


async def test_a_release_names_the_cause_of_a_flush_that_failed() -> None:
    class Server:
        async def tell(self, path: str, body: dict[str, Any], *, call: Call) -> Answer:
            raise Reason.LINK_LOST.error("it broke", outcome=OUTCOME_UNKNOWN)

        async def must(self, path: str, body: dict[str, Any], *, call: Call) -> None: ...

    server: Any = Server()
    state = State()
    with pytest.raises(RlctlError) as failed:
        await memory.release(server, None, state, [], KNOWN, Call("c", 0.0), active=0, keeps_weights=False)
    assert (failed.value.reason, failed.value.outcome) == (Reason.LINK_LOST, OUTCOME_REJECTED)
    assert (failed.value.message, state.stopped) == ("it broke", False)


async def test_a_release_that_failed_does_not_end_the_pause_that_an_earlier_release_needs() -> None:
    sent: list[str] = []

    class Server:
        async def tell(self, path: str, body: dict[str, Any], *, call: Call) -> Answer:
            sent.append(path)
            return Answer(400, "requests are running")

    server: Any = Server()
    state = State(holding=True, released={MEMORY_TAG_KV_CACHE})
    call = Call("c", 0.0)
    with pytest.raises(RlctlError):
        await memory.release(server, None, state, [MEMORY_TAG_WEIGHTS], KNOWN, call, active=0, keeps_weights=False)
    assert sent == ["/flush_cache"]
    assert state.holding


async def test_a_resume_of_memory_keeps_the_pause_of_an_update() -> None:
    sent: list[str] = []

    class Server:
        async def must(self, path: str, body: dict[str, Any], *, call: Call) -> None:
            sent.append(path)

    server: Any = Server()
    state, call = State(holding=True, released={MEMORY_TAG_KV_CACHE}), Call("c", math.inf)
    pause = memory.own_pause(server, state)
    await pause.begin(call)
    await memory.resume(server, None, state, [], KNOWN, call, keeps_weights=False)
    assert (sent, state.stopped) == (["/resume_memory_occupation"], True)
    await pause.end(call)
    assert (sent[-1], state.stopped) == ("/continue_generation", False)


async def test_memory_is_confirmed_once_every_rank_has_released_or_resumed_it() -> None:
    """SGLang answers once rank 0 has."""
    sent: list[str] = []
    lost = Reason.LINK_LOST.error("a rank has failed")

    class Server:
        async def tell(self, path: str, body: dict[str, Any], *, call: Call) -> Answer:
            sent.append(path)
            return Answer(200, "")

        async def must(self, path: str, body: dict[str, Any], *, call: Call) -> None:
            sent.append(path)

    class Ranks:
        def __init__(self, failure: RlctlError | None = None) -> None:
            self._failure = failure

        async def caught_up(self, call: Call) -> None:
            sent.append("ranks")
            if self._failure is not None:
                raise self._failure

    server: Any = Server()
    failing: Any = Ranks(lost)
    ranks: Any = Ranks()
    state, call = State(), Call("c", math.inf)
    with pytest.raises(RlctlError) as failed:
        await memory.release(server, failing, state, [MEMORY_TAG_KV_CACHE], KNOWN, call, active=0, keeps_weights=False)
    assert (failed.value.reason, failed.value.outcome) == (Reason.LINK_LOST, OUTCOME_UNKNOWN)
    assert sent[-2:] == ["/release_memory_occupation", "ranks"]
    assert (state.released, state.stopped) == ({MEMORY_TAG_KV_CACHE}, True)
    for step in ("/resume_memory_occupation", "ranks"):  # the second resume has nothing to send, but asks again
        with pytest.raises(RlctlError) as failed:
            await memory.resume(server, failing, state, [], KNOWN, call, keeps_weights=False)
        assert failed.value.outcome == OUTCOME_UNKNOWN
        assert sent[-2:] == [step, "ranks"]
        assert (state.released, state.stopped) == (set(), True)
    await memory.resume(server, ranks, state, [], KNOWN, call, keeps_weights=False)
    assert sent[-2:] == ["ranks", "/continue_generation"]
    assert not state.stopped
