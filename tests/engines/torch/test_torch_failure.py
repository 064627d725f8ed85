"""When a rank is lost, hangs or breaks: everybody is told, in time, and nothing is taken on any more."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import rlctl_torch.step_loop
import torch
from rlctl_torch import TorchEngine
from rlctl_torch.steps.collectives import Broken, Council
from rlctl_torch.steps.ordered_commands import ANSWER_S
from torch_models import prompt_of
from torch_stage import Follower, Stage, until

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import SETUP, Call, EngineConfig
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, PAUSE_MODE_DRAIN
from rlctl.v1.control_pb2 import Attach
from rlctl.v1.verbs_pb2 import (
    ContinueGenerationRequest,
    FlushCacheRequest,
    GetLoadsRequest,
    PauseGenerationRequest,
    PrepareUpdateRequest,
)
from rlctl.weights.receiver import Receiver

PROMPT = prompt_of(9)


@pytest.fixture
def mortal() -> Iterator[Follower]:
    """A follower process of the test's own."""
    process = Follower()
    yield process
    process.close()


async def failed(stage: Stage, within: float = 3.0) -> RlctlError:
    """The failure that the engine reports in time."""
    assert await asyncio.to_thread(stage.failed.wait, within), "the engine has noticed nothing"
    (error,) = stage.failures
    return error


async def check_useless(stage: Stage, reason: Reason) -> None:
    """Every command is rejected at once, and so is every request."""
    loop = asyncio.get_running_loop()
    for request in (PauseGenerationRequest(), GetLoadsRequest()):
        method = "pause_generation" if isinstance(request, PauseGenerationRequest) else "get_loads"
        with pytest.raises(RlctlError) as caught:
            await getattr(stage.engine, method)(request, Call("late", loop.time() + 30))
        assert (caught.value.reason, caught.value.outcome) == (reason, OUTCOME_REJECTED)
    with pytest.raises(RlctlError) as caught:
        await stage.generate(PROMPT, max_new_tokens=1)
    assert caught.value.reason is reason
    with pytest.raises(RlctlError):
        await stage.engine.order("late")
    started = time.monotonic()
    await stage.engine.stop()
    assert time.monotonic() - started < 2.0


async def test_a_follower_killed_while_idle_is_noticed(checkpoints, mortal: Follower) -> None:
    stage = Stage(checkpoints(), mortal)
    await stage.start()
    mortal.process.kill()
    assert (await failed(stage)).reason is Reason.RANK_LOST
    await check_useless(stage, Reason.RANK_LOST)


async def test_a_follower_killed_under_requests_and_commands_ends_them_all(checkpoints, mortal: Follower) -> None:
    stage = Stage(checkpoints(), mortal)
    await stage.start()
    requests = [
        asyncio.create_task(stage.generate(prompt_of(3, n), max_new_tokens=240, ignore_eos=True)) for n in range(80)
    ]
    await until(lambda: stage.engine._rank.scheduler.loads(0).generated_tokens > 100)
    loop = asyncio.get_running_loop()
    call = Call("drain", loop.time() + 30)
    drain = asyncio.create_task(stage.engine.pause_generation(PauseGenerationRequest(mode=PAUSE_MODE_DRAIN), call))
    await asyncio.sleep(0)
    ordered = asyncio.create_task(stage.engine.order("drain"))
    killed = time.monotonic()
    mortal.process.kill()
    assert (await failed(stage)).reason is Reason.RANK_LOST
    results = await asyncio.gather(*requests, drain, ordered, return_exceptions=True)
    assert time.monotonic() - killed < 3.0
    assert {result.reason for result in results} == {Reason.RANK_LOST}
    await check_useless(stage, Reason.RANK_LOST)


async def test_a_rank_0_that_breaks_fails_the_engine_on_every_rank(
    checkpoints, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(checkpoints(), follower)
    await stage.start()

    def broken(*args: object, **kwargs: object) -> torch.Tensor:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(rlctl_torch.step_loop, "run", broken)
    with pytest.raises(RlctlError) as caught:
        await stage.generate(PROMPT, max_new_tokens=3)
    assert caught.value.reason is Reason.ENGINE_FAILED
    assert "a defect" in caught.value.message
    assert (await failed(stage)).outcome == OUTCOME_UNKNOWN
    number, error = -1, Reason.INTERNAL.error()
    while number != stage.number:  # what earlier engines of this process reported may still lie there
        number, error = await asyncio.to_thread(follower.failures.get, timeout=3)
    assert error.reason is Reason.RANK_LOST
    await check_useless(stage, Reason.ENGINE_FAILED)


async def test_a_command_that_comes_late_to_a_follower_is_waited_for(checkpoints, follower: Follower) -> None:
    stage = Stage(checkpoints(), follower)
    await stage.start()
    try:
        loop = asyncio.get_running_loop()
        call = Call("late", loop.time() + 30)
        local = asyncio.create_task(stage.engine.flush_cache(FlushCacheRequest(), call))
        await asyncio.sleep(0)
        step = await stage.engine.order("late")
        assert (await local).tiers == ["kv"]
        body = FlushCacheRequest().SerializeToString()
        theirs = follower.ask("verb", stage.number, "FlushCache", body, "late", 30.0, "")[1]
        assert (await asyncio.wrap_future(theirs))[0] == step == call.step
        assert len(await stage.tokens(PROMPT, 3)) == 3
    finally:
        await stage.stop()


async def test_a_command_that_never_comes_to_a_follower_fails_the_engine(checkpoints, mortal: Follower) -> None:
    mortal.ask("set_attribute", "rlctl_torch.steps.ordered_commands", "ARRIVAL_S", 0.5)
    stage = Stage(checkpoints(), mortal)
    await stage.start()
    loop = asyncio.get_running_loop()
    local = asyncio.create_task(stage.engine.flush_cache(FlushCacheRequest(), Call("lonely", loop.time() + 30)))
    await asyncio.sleep(0)
    await stage.engine.order("lonely")
    await local
    number, error = await asyncio.to_thread(mortal.failures.get, timeout=3)
    assert (number, error.reason) == (stage.number, Reason.ENGINE_FAILED)
    assert "lonely" in error.message
    assert (await failed(stage)).reason is Reason.RANK_LOST
    await stage.engine.stop()


async def test_a_withdrawn_command_is_carried_out_nowhere(stage: Stage) -> None:
    loop = asyncio.get_running_loop()
    accepted = loop.create_future()
    call = Call("gone", loop.time() + 30, accept=lambda: accepted.set_result(None))
    task = asyncio.create_task(stage.engine.pause_generation(PauseGenerationRequest(), call))
    await accepted
    await stage.engine.withdraw("gone")
    await stage.engine.withdraw("gone")
    with pytest.raises(RlctlError) as caught:
        await task
    assert (caught.value.reason, caught.value.outcome) == (Reason.CANCELLED, OUTCOME_REJECTED)
    with pytest.raises(RlctlError) as caught:
        await stage.engine.order("gone")
    assert caught.value.reason is Reason.CANCELLED
    assert len(await stage.tokens(PROMPT, 3)) == 3


async def test_a_cancelled_method_withdraws_its_command(stage: Stage) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(stage.engine.pause_generation(PauseGenerationRequest(), Call("c", loop.time() + 30)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    with pytest.raises(RlctlError):
        await stage.engine.order("c")
    assert len(await stage.tokens(PROMPT, 3)) == 3


async def test_expired_commands_are_not_started(stage: Stage) -> None:
    answers = await stage.ranks(PauseGenerationRequest(), within=ANSWER_S / 2)
    assert [answer.reason for answer in answers] == [Reason.DEADLINE_EXCEEDED] * len(answers)
    assert len(await stage.tokens(PROMPT, 3)) == 3


async def test_a_check_that_breaks_in_a_way_that_nobody_foresaw_is_a_refusal(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr(Receiver, "begin", breaks)
    answers = await stage.ranks(PrepareUpdateRequest(), update="u")
    assert [(answer.reason, answer.outcome) for answer in answers] == [(Reason.ENGINE_FAILED, OUTCOME_REJECTED)] * len(
        answers
    )
    assert not stage.failures
    assert len(await stage.tokens(PROMPT, 3)) == 3


async def test_a_command_id_is_registered_once(stage1: Stage) -> None:
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(stage1.engine.flush_cache(FlushCacheRequest(), Call("twice", loop.time() + 30)))
    await asyncio.sleep(0)
    with pytest.raises(RlctlError) as caught:
        await stage1.engine.flush_cache(FlushCacheRequest(), Call("twice", loop.time() + 30))
    assert caught.value.reason is Reason.REQUEST_ID_REUSED
    await stage1.engine.order("twice")
    await first


@pytest.mark.parametrize("size", [1, 2])
async def test_stopping_ends_requests_with_an_error_and_commands_too(
    checkpoints, follower: Follower, size: int
) -> None:
    stage = Stage(checkpoints(), follower if size == 2 else None)
    await stage.start()
    request = asyncio.create_task(stage.generate(PROMPT, max_new_tokens=240, ignore_eos=True))
    loop = asyncio.get_running_loop()
    command = asyncio.create_task(stage.engine.flush_cache(FlushCacheRequest(), Call("c", loop.time() + 30)))
    await asyncio.sleep(0)
    started = time.monotonic()
    await stage.stop()
    assert time.monotonic() - started < 2.0
    for task in (request, command):
        with pytest.raises(RlctlError) as caught:
            await task
        assert caught.value.reason is Reason.STAGE_NOT_SERVING
    assert not stage.failures, "it was stopped on purpose"
    await stage.engine.stop()


async def test_a_follower_stops_and_its_process_ends_though_rank_0_goes_on(checkpoints, mortal: Follower) -> None:
    stage = Stage(checkpoints(), mortal)
    await stage.start()
    await asyncio.wrap_future(mortal.ask("stop", stage.number)[1])
    mortal.ask("leave")
    await asyncio.to_thread(mortal.process.join, 10)
    assert mortal.process.exitcode == 0
    assert (await failed(stage)).reason is Reason.RANK_LOST
    await stage.engine.stop()


def test_ranks_that_are_apart_do_not_wait_for_an_agreement() -> None:
    def lose() -> None:
        raise Broken(Reason.RANK_LOST.error("the connection broke"))

    with pytest.raises(Broken):
        Council(0, 1).agree(lose)


async def test_what_keeps_one_rank_from_starting_is_told_by_all(checkpoints, follower: Follower) -> None:
    stage = Stage(checkpoints(), follower)
    with pytest.raises(RlctlError) as caught:
        await stage.start(model_path="/not/mounted/here")
    assert caught.value.reason is Reason.CHECKPOINT_NOT_FOUND
    assert "rank 1" in caught.value.message
    with pytest.raises(RlctlError) as caught:
        await stage(ContinueGenerationRequest())
    assert caught.value.reason is Reason.CHECKPOINT_NOT_FOUND
    reported = [follower.failures.get_nowait() for _ in range(follower.failures.qsize())]
    assert stage.number not in [number for number, _ in reported], "a start that fails is answered, not reported"


async def test_nothing_is_done_before_the_start(checkpoints) -> None:
    stage = Stage(checkpoints())
    loop = asyncio.get_running_loop()
    with pytest.raises(RlctlError) as caught:
        await stage.engine.pause_generation(PauseGenerationRequest(), Call("c", loop.time() + 30))
    assert caught.value.reason is Reason.ILLEGAL_STATE
    await stage.engine.interrupt("update")
    await stage.engine.stop()


@pytest.mark.parametrize("setup", [{}, {"rendezvous": "x"}])
async def test_a_setup_without_a_rendezvous_is_refused_before_the_start(checkpoints, setup: dict[str, str]) -> None:
    engine = TorchEngine(EngineConfig(checkpoints(), 1, 2), print)
    for _ in range(2):
        with pytest.raises(RlctlError) as refused:
            await engine.start(Attach(engine_setup=setup).engine_setup)
        assert (refused.value.reason, refused.value.field) == (Reason.FIELD_INVALID, SETUP)
    await engine.stop()


async def test_an_engine_that_is_stopped_while_it_starts_says_so(checkpoints) -> None:
    # Its follower never comes.
    engine = TorchEngine(EngineConfig(checkpoints(), 0, 2), print)
    starting = asyncio.create_task(engine.start(engine.setup()))
    await asyncio.sleep(0)
    started = time.monotonic()
    await engine.stop()
    assert time.monotonic() - started < 2.0
    with pytest.raises(RlctlError) as caught:
        await starting
    assert caught.value.reason is Reason.STAGE_NOT_SERVING


async def test_a_follower_that_hangs_inside_a_step_costs_a_timeout(
    checkpoints, mortal: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl_torch.steps.collectives._COMPUTE_TIMEOUT", timedelta(seconds=1))
    stage = Stage(checkpoints(), mortal)
    await stage.start()
    os.kill(mortal.process.pid, signal.SIGSTOP)
    with pytest.raises(RlctlError) as caught:
        await stage.generate(PROMPT, max_new_tokens=3)
    assert caught.value.reason is Reason.RANK_LOST
    await failed(stage)
    await check_useless(stage, Reason.RANK_LOST)
