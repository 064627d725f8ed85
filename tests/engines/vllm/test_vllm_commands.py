"""Commands to vLLM that fail at a rank: their outcome, and the state of vLLM afterwards."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
from rlctl_servers.server.http import Answer
from rlctl_vllm.server import memory
from rlctl_vllm.state import State
from rlctl_vllm.updates.in_step import InStepControl

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    Outcome,
)

PAUSE = f"/pause?{memory.MODES[PAUSE_MODE_RETRACT]}"
FREEZE = f"/pause?{memory.MODES[PAUSE_MODE_IN_PLACE]}"


class VLLM:
    """A server of two ranks. Like vLLM's executor, it raises the first failure and leaves later answers unread."""

    product, url = "vLLM", "http://vllm"

    def __init__(self, **failing: set[int]) -> None:
        """``failing``: the ranks at which calls of a path fail, by the path's first word."""
        self.failing = failing
        self.called: list[str] = []
        self.unread: list[deque[Any]] = [deque(), deque()]
        self.words: list[Any] = [None, None]

    async def call(self, path: str, body: dict[str, Any] | None = None, **_: Any) -> Answer:
        self.called.append(path)
        for rank in range(2):
            self.unread[rank].append(self.done(rank, path, body or {}))
        results = []
        for rank in range(2):
            results.append(self.unread[rank].popleft())
            if isinstance(results[-1], Exception):
                return Answer(500, {"error": str(results[-1])})
        return Answer(200, {"results": results})

    def done(self, rank: int, path: str, body: dict[str, Any]) -> Any:
        if rank in self.failing.get(path.strip("/").partition("?")[0], ()):
            return RuntimeError(f"rank {rank} fails")
        if body.get("method") == "__setattr__":
            self.words[rank] = body["args"][1]
        return self.words[rank] if body.get("method") == "__getattribute__" else None


def control_of(server: VLLM) -> tuple[InStepControl, list[RlctlError]]:
    lost: list[RlctlError] = []
    control = InStepControl(server, lost.append)  # type: ignore[arg-type]
    control.ranks = 2
    return control, lost


def soon() -> Call:
    return Call("c", asyncio.get_running_loop().time() + 5)


@pytest.mark.parametrize(("ranks", "is_lost"), [({0}, True), ({0, 1}, True), ({1}, False)])
async def test_a_server_with_ranks_out_of_step_is_lost(ranks: set[int], is_lost: bool) -> None:
    server = VLLM(load=ranks)
    control, lost = control_of(server)
    with pytest.raises(RlctlError) as failed:
        await control.must("/load", {}, call=soon())
    assert bool(lost) is is_lost
    assert failed.value.outcome == (OUTCOME_UNKNOWN if is_lost else OUTCOME_REJECTED)
    assert "fails" in failed.value.message


async def test_ranks_that_cannot_be_asked_hide_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """UNREACHABLE would say that the failed command was not sent."""
    server = VLLM(load={1})
    control, lost = control_of(server)

    async def unreachable(*_: object, **__: object) -> None:
        raise Reason.UNREACHABLE.error("no file descriptor")

    monkeypatch.setattr("rlctl_vllm.updates.in_step.in_step", unreachable)
    with pytest.raises(RlctlError) as failed:
        await control.must("/load", {}, call=soon())
    assert (failed.value.reason, failed.value.outcome) == (Reason.ENGINE_FAILED, OUTCOME_UNKNOWN)
    assert len(lost) == 1


@pytest.mark.parametrize(
    ("was_stopped", "restored", "outcome"), [(False, "/resume", OUTCOME_REJECTED), (True, FREEZE, OUTCOME_UNKNOWN)]
)
async def test_a_failed_pause_restores_the_former_state(
    was_stopped: bool, restored: str, outcome: Outcome.ValueType
) -> None:
    """The pause that would freeze the requests again fails as well, so it is not known whether they are frozen."""
    server = VLLM(pause={1})
    control, _ = control_of(server)
    with pytest.raises(RlctlError) as failed:
        await memory.pause(control, PAUSE_MODE_RETRACT, soon(), was_stopped=was_stopped)
    assert [path for path in server.called if path != "/collective_rpc"] == [PAUSE, restored]
    assert failed.value.outcome == outcome


async def test_a_failed_own_pause_lets_vllm_generate() -> None:
    server, state = VLLM(pause={1}), State()
    control, _ = control_of(server)
    with pytest.raises(RlctlError):
        await memory.own_pause(control, state).hold(soon())
    assert [path for path in server.called if path != "/collective_rpc"] == [FREEZE, "/resume"]
    assert not state.stopped


async def test_a_server_that_has_released_some_memory_is_lost() -> None:
    """vLLM is not asleep for itself, so a wake-up would do nothing, and requests would compute with freed memory."""
    server, state = VLLM(sleep={1}), State(paused=PAUSE_MODE_RETRACT)
    control, lost = control_of(server)
    regions = (MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS)
    with pytest.raises(RlctlError) as failed:
        await memory.release(control, state, [], regions, 0, soon())
    assert (failed.value.reason, failed.value.outcome) == (Reason.ENGINE_FAILED, OUTCOME_UNKNOWN)
    assert [error.reason for error in lost] == [Reason.ENGINE_FAILED]
    assert "/resume" not in server.called
