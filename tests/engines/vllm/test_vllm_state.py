"""What vLLM may be told when, and how its settings are read; without vLLM."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from rlctl_servers.updates.checkpoints import Checkpoints
from rlctl_servers.updates.updates import Updates
from rlctl_servers.updates.version_labels import WRITING, Stamps
from rlctl_vllm.engine import VLLMEngine
from rlctl_vllm.options import parse_options
from rlctl_vllm.server import memory
from rlctl_vllm.server.facts import loads
from rlctl_vllm.state import MODES, TAGS, State

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call, EngineConfig, brings_ranks, engine_class
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    PAUSE_MODE_UNSPECIFIED,
    Outcome,
    PauseMode,
    WorkerCoordinates,
)
from rlctl.v1.verbs_pb2 import (
    CommitUpdateRequest,
    ContinueGenerationRequest,
    PrepareUpdateRequest,
    UpdateWeightsFromDistributedRequest,
)


def test_it_is_installed_and_brings_its_ranks() -> None:
    assert engine_class("vllm") is VLLMEngine
    assert brings_ranks("vllm")


def test_modes() -> None:
    assert State().pause(PAUSE_MODE_UNSPECIFIED) == PAUSE_MODE_ABORT
    assert len(set(MODES.values())) == 4
    with pytest.raises(RlctlError) as refused:
        State().pause(99)  # type: ignore[arg-type]
    assert refused.value.reason is Reason.UNSUPPORTED


def test_a_state_of_its_own_for_pauses_and_memory() -> None:
    state = State()
    assert not state.stopped
    state.holding = True
    assert state.stopped
    state = State(paused=PAUSE_MODE_IN_PLACE, released={MEMORY_TAG_KV_CACHE})
    assert state.stopped
    with pytest.raises(RlctlError) as refused:
        state.refuse_continue(updating=False)
    assert refused.value.reason is Reason.MEMORY_RELEASED
    state.released.clear()
    with pytest.raises(RlctlError) as refused:
        state.refuse_continue(updating=True)
    assert refused.value.reason is Reason.ILLEGAL_STATE


def test_memory_goes_from_the_kv_cache_on() -> None:
    state = State()
    assert state.release((), TAGS) == TAGS.keys()
    assert state.release([MEMORY_TAG_KV_CACHE], TAGS) == {MEMORY_TAG_KV_CACHE}
    for released in (set(), {MEMORY_TAG_KV_CACHE}):
        with pytest.raises(RlctlError) as refused:
            State(released=released).release([MEMORY_TAG_WEIGHTS], TAGS)
        assert refused.value.field == "tags"
    state.released = set(TAGS)
    assert state.release((), TAGS) == frozenset()
    assert state.resume([MEMORY_TAG_WEIGHTS], TAGS) == {MEMORY_TAG_WEIGHTS}
    assert State().resume((), TAGS) == frozenset()


@pytest.mark.parametrize(
    ("given", "reason", "field"),
    [
        ({"uds": "/tmp/x"}, Reason.FIELD_CONFLICT, "options.uds"),
        ({"worker_extension_cls": "a.B"}, Reason.FIELD_CONFLICT, "options.worker_extension_cls"),
        ({"--x": "1"}, Reason.FIELD_INVALID, "options.--x"),
        ({"url": "vllm:80"}, Reason.FIELD_INVALID, "options.url"),
        ({"url": "http://h", "max_model_len": "5"}, Reason.FIELD_CONFLICT, "options.max_model_len"),
        ({"api_key_file": "/x"}, Reason.FIELD_CONFLICT, "options.api_key_file"),
        ({"start_s": "soon"}, Reason.FIELD_INVALID, "options.start_s"),
    ],
)
def test_settings_that_are_refused(given: dict[str, str], reason: Reason, field: str) -> None:
    with pytest.raises(RlctlError) as refused:
        parse_options(given)
    assert (refused.value.reason, refused.value.field) == (reason, field)


def test_loads_are_summed_over_engines() -> None:
    text = "\n".join(
        [
            "# HELP vllm:num_requests_running x",
            'vllm:num_requests_running{engine="0"} 2.0',
            'vllm:num_requests_running{engine="1"} 1.0',
            'vllm:num_requests_waiting{engine="0"} 4.0',
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4.0',
            'vllm:generation_tokens_total{engine="0"} 70.0',
        ]
    )
    told = loads(text)
    assert (told.running, told.waiting, told.generated_tokens) == (3, 4, 70)


@pytest.mark.parametrize(
    ("outcome", "goes_on"),
    [(OUTCOME_REJECTED, True), (OUTCOME_UNKNOWN, False)],
)
async def test_what_may_be_asleep_does_not_go_on(outcome: Outcome.ValueType, *, goes_on: bool) -> None:
    told: list[str] = []

    class Server:
        async def must(self, path: str, body: dict[str, Any], *, call: Call, **_: Any) -> None:
            told.append(path)
            if path.startswith("/sleep"):
                raise Reason.LINK_LOST.error("it broke", outcome=outcome)

    server: Any = Server()
    state, call = State(), Call("c", math.inf)
    with pytest.raises(RlctlError):
        await memory.release(server, state, [], TAGS, 0, call)
    assert (told[-1] == "/resume", state.stopped) == (goes_on, not goes_on)
    if not goes_on:
        await memory.resume(server, state, [], TAGS, call)
        assert told[-1].startswith("/wake_up")
        assert not state.stopped


@pytest.mark.parametrize(("active", "reason"), [(1, Reason.MEMORY_NOT_RELEASABLE), (0, Reason.ENGINE_FAILED)])
async def test_a_refused_release_is_unknown_while_the_server_remains_paused(active: int, reason: Reason) -> None:
    """A stage that was READY would send requests to it."""
    stuck = True

    class Server:
        async def must(self, path: str, body: dict[str, Any], *, call: Call, **_: Any) -> None:
            if path.startswith("/release") or (stuck and path == "/resume"):
                raise Reason.ENGINE_FAILED.error(f"vLLM refused {path}")

    server: Any = Server()
    state, call = State(), Call("c", math.inf)
    with pytest.raises(RlctlError) as failed:
        await memory.release(server, state, [MEMORY_TAG_KV_CACHE], TAGS, active, call)
    assert (failed.value.reason, failed.value.outcome) == (reason, OUTCOME_UNKNOWN)
    assert failed.value.message.endswith("; the server remains paused: vLLM refused /resume")
    assert state.stopped
    stuck = False
    await memory.resume(server, state, [], TAGS, call)
    assert not state.stopped


async def test_a_refused_prepare_is_unknown_while_the_server_remains_paused() -> None:
    class Server:
        async def must(self, path: str, body: dict[str, Any], *, call: Call, **_: Any) -> None:
            if path == "/resume":
                raise Reason.ENGINE_FAILED.error("vLLM refused /resume")

        async def each(self, verb: str, *_: Any) -> list[Any]:
            raise Reason.ILLEGAL_STATE.error("no")

    server: Any = Server()
    nothing: Any = None
    state, call = State(), Call("c", math.inf, update_id="u")
    updates = Updates("vLLM", server, nothing, server, (), memory.own_pause(server, state))
    with pytest.raises(RlctlError) as failed:
        await updates.prepare(PrepareUpdateRequest(), call)
    assert (failed.value.reason, failed.value.outcome) == (Reason.ILLEGAL_STATE, OUTCOME_UNKNOWN)
    assert (state.stopped, state.updating) == (True, False)


@pytest.mark.parametrize("verb", ["abort", "resume"])
async def test_a_pause_of_the_plug_in_s_own_that_may_have_come_about_is_taken_back(verb: str) -> None:
    """Whoever has not paused anything does not continue it."""
    told: list[str] = []

    class Server:
        async def must(self, path: str, body: dict[str, Any], *, call: Call, **_: Any) -> None:
            told.append(path)
            if path.startswith("/pause"):
                raise Reason.LINK_LOST.error("it broke", outcome=OUTCOME_UNKNOWN)

    server: Any = Server()
    nothing: Any = None
    state, call = State(), Call("c", math.inf, update_id="u")
    updates = Updates("vLLM", server, nothing, None, (), memory.own_pause(server, state))
    begin, undo = {
        "abort": (lambda: updates.prepare(PrepareUpdateRequest(), call), lambda: updates.abort(call)),
        "resume": (
            lambda: memory.release(server, state, [], TAGS, 0, call),
            lambda: memory.resume(server, state, [], TAGS, call),
        ),
    }[verb]
    with pytest.raises(RlctlError):
        await begin()
    assert state.stopped
    await undo()
    assert told[-1] == "/resume"
    assert not state.stopped


async def test_a_continue_ends_a_pause_of_the_plug_in_s_own(tiny: tuple[Any, Path]) -> None:
    """Otherwise the next update would take a running server for a paused one."""
    sent: list[str] = []

    class Server:
        async def must(self, path: str, body: dict[str, Any], *, call: Call, **_: Any) -> None:
            sent.append(path)

    engine: Any = VLLMEngine(EngineConfig(str(tiny[1])), lambda _: None)
    engine._control, engine._updates, engine._requests = Server(), SimpleNamespace(in_place=False), Mock()
    engine._adapters = Mock()
    engine._check = lambda _: None
    engine._state = State(holding=True)
    await engine.continue_generation(ContinueGenerationRequest(), Call("c", math.inf))
    assert sent == ["/resume"]
    assert not engine._state.stopped


async def test_the_label_of_a_commit_is_known_even_if_the_pause_could_not_be_ended(tiny: tuple[Any, Path]) -> None:
    """Otherwise a later update that writes nothing would give vLLM its former label back, for other weights."""
    labels: list[str] = []

    class Server:
        async def must(self, path: str, body: dict[str, Any], **_: Any) -> None:
            assert path == "/update_weight_version"
            labels.append(body["new_version"])

        async def each(self, verb: str, request: Any, reply: Any, call: Call) -> list[Any]:
            return [reply()]

        async def begin(self, call: Call) -> None: ...

        async def end(self, call: Call, cause: RlctlError | None = None) -> None:
            if labels == [WRITING, "new@2"]:
                raise Reason.UNREACHABLE.error("it is gone")

    engine: Any = VLLMEngine(EngineConfig(str(tiny[1])), lambda _: None)
    server: Any = Server()
    engine._stamps = Stamps("old@1")
    ranks, checkpoints = [WorkerCoordinates()], Checkpoints("vLLM", str(tiny[1]), ())
    engine._updates = updates = Updates(
        "vLLM", server, checkpoints, server, ranks, server, label=lambda: str(engine._stamps.label)
    )
    call = Call("c", math.inf, update_id="u")
    await updates.prepare(PrepareUpdateRequest(), call)
    await updates.from_distributed(UpdateWeightsFromDistributedRequest(), call)
    with pytest.raises(RlctlError) as failed:
        await engine._commit(CommitUpdateRequest(), "new@2", call)
    assert failed.value.outcome == OUTCOME_UNKNOWN
    await updates.prepare(PrepareUpdateRequest(), call)
    await updates.marking.mark(call)
    await updates.abort(call)
    assert labels == [WRITING, "new@2", WRITING, "new@2"]


@pytest.mark.parametrize(
    ("paused", "again"),
    [
        (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_IN_PLACE),
        (PAUSE_MODE_IN_PLACE, PAUSE_MODE_IN_PLACE),
        (PAUSE_MODE_RETRACT, PAUSE_MODE_RETRACT),
        (PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT),  # requests that started in between are not ended
        (PAUSE_MODE_DRAIN, PAUSE_MODE_RETRACT),  # and not waited for
    ],
)
async def test_a_resume_of_memory_keeps_the_pause_of_an_update(
    paused: PauseMode.ValueType, again: PauseMode.ValueType
) -> None:
    """vLLM goes on when it wakes up."""
    sent: list[str] = []

    class Server:
        async def must(self, path: str, body: dict[str, Any], *, call: Call, **_: Any) -> None:
            sent.append(path)

    server: Any = Server()
    state = State(paused=paused, holding=not paused, released={MEMORY_TAG_KV_CACHE})
    call = Call("c", math.inf)
    pause = memory.own_pause(server, state)
    await pause.begin(call)
    await memory.resume(server, state, [], TAGS, call)
    assert sent[-1] == f"/pause?{MODES[again]}"
    assert state.stopped
    await pause.end(call)
    assert (sent[-1] == "/resume", state.stopped) == (not paused, bool(paused))
