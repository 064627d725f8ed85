"""Pausing in its four modes, continuing, flushing: what each does to requests, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from rlctl_torch.steps.ordered_commands import ANSWER_S
from torch_models import greedy, prompt_of
from torch_stage import Stage, merge, until

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    PAUSE_MODE_UNSPECIFIED,
)
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, FINISH_TYPE_LENGTH, GenerateResponse
from rlctl.v1.verbs_pb2 import (
    ContinueGenerationRequest,
    FlushCacheRequest,
    GetLoadsRequest,
    Loads,
    PauseGenerationRequest,
)

PROMPTS = [prompt_of(5, n) for n in range(4)]
COUNT = 20


def pause(mode: int) -> PauseGenerationRequest:
    return PauseGenerationRequest(mode=mode)


async def loads(stage: Stage) -> Loads:
    answer: Loads = (await stage(GetLoadsRequest()))[0]
    return answer


class Running:
    """Requests that are somewhere in the middle, and stay there until steps are allowed."""

    def __init__(self, stage: Stage, gate) -> None:
        self.stage = stage
        self.gate = gate
        self.tasks: list[asyncio.Task[GenerateResponse]] = []

    async def start(self, **fields: object) -> None:
        """Submit the requests such that they start at the same step."""
        await self.stage(pause(PAUSE_MODE_RETRACT))
        self.tasks += [
            asyncio.create_task(
                self.stage.generate(prompt, temperature=0, ignore_eos=True, **{"max_new_tokens": COUNT, **fields})
            )
            for prompt in PROMPTS
        ]
        await until(lambda: len(self.stage.engine._rank.scheduler.active) == len(PROMPTS))
        await self.stage(ContinueGenerationRequest())

    async def steps(self, count: int) -> None:
        """Take so many steps; the one after them is then held back."""
        target = self.gate.steps + count
        self.gate.allow(count)
        await until(lambda: self.gate.steps >= target and self.gate.held)

    async def carry_out(self, request: Message) -> None:
        """Carry a verb out between two steps: it is queued while the step under way is held back."""
        task = asyncio.create_task(self.stage(request))
        await until(lambda: self.stage.engine._commands.waiting)
        self.gate.allow(1)
        await task

    async def queue(self, request: Message, within: float = 30.0) -> asyncio.Task[object]:
        """Order a verb, and let the step end that is held back, so that its turn comes."""
        task = asyncio.create_task(self.stage(request, within=within))
        await until(lambda: self.stage.engine._commands.waiting)
        await self.steps(1)
        return task

    async def check_undisturbed(self) -> None:
        for prompt, task in zip(PROMPTS, self.tasks, strict=False):
            sample = (await task).samples[0]
            assert list(sample.output_ids) == greedy(self.stage.config.model_path, prompt, COUNT)
            assert sample.finish_reason.type == FINISH_TYPE_LENGTH


@pytest.fixture
async def running(stage: Stage, gate) -> AsyncIterator[Running]:
    running = Running(stage, gate)
    yield running
    gate.open()
    await stage(ContinueGenerationRequest())
    await asyncio.gather(*running.tasks, return_exceptions=True)


@asynccontextmanager
async def refused(reason: Reason) -> AsyncIterator[RlctlError]:
    with pytest.raises(RlctlError) as caught:
        yield caught  # type: ignore[misc]
    assert caught.value.reason is reason


async def test_abort_returns_running_and_waiting_requests_with_what_they_have(running: Running) -> None:
    await running.start(n=20)
    await running.steps(5)
    await running.carry_out(pause(PAUSE_MODE_UNSPECIFIED))
    lengths = []
    for prompt, task in zip(PROMPTS, running.tasks, strict=True):
        for sample in (await task).samples:
            assert sample.finish_reason.type == FINISH_TYPE_ABORT
            assert list(sample.output_ids) == greedy(running.stage.config.model_path, prompt, len(sample.output_ids))
            lengths.append(len(sample.output_ids))
    # 80 samples, 64 of which run.
    assert sorted(set(lengths)) == [0, 6]
    assert lengths.count(6) == 64
    assert (await loads(running.stage)).used_tokens == 0


async def test_retract_sends_back_and_the_outputs_are_those_of_an_undisturbed_run(running: Running) -> None:
    await running.start()
    await running.steps(7)
    await running.carry_out(pause(PAUSE_MODE_RETRACT))
    state = await loads(running.stage)
    assert (state.running, state.waiting, state.used_tokens) == (0, 4, 0)
    await running.stage(ContinueGenerationRequest())
    running.gate.open()
    await running.check_undisturbed()
    assert [(await task).samples[0].retractions for task in running.tasks] == [1, 1, 1, 1]


async def test_in_place_freezes_and_the_outputs_are_those_of_an_undisturbed_run(running: Running) -> None:
    await running.start()
    await running.steps(7)
    await running.carry_out(pause(PAUSE_MODE_IN_PLACE))
    state = await loads(running.stage)
    assert (state.running, state.waiting) == (4, 0)
    assert state.used_tokens >= 4 * (5 + 7)
    steps = running.gate.steps
    await running.stage(ContinueGenerationRequest())
    running.gate.open()
    await running.check_undisturbed()
    assert running.gate.steps == steps + COUNT - 8
    assert [(await task).samples[0].retractions for task in running.tasks] == [0, 0, 0, 0]


async def test_drain_finishes_what_runs_and_starts_nothing(running: Running) -> None:
    await running.start(max_new_tokens=6)
    await running.steps(2)
    drained = await running.queue(pause(PAUSE_MODE_DRAIN))
    late = asyncio.create_task(running.stage.tokens(PROMPTS[0], 5))
    running.gate.open()
    await drained
    assert [(await task).samples[0].finish_reason.type for task in running.tasks] == [FINISH_TYPE_LENGTH] * 4
    state = await loads(running.stage)
    assert (state.running, state.waiting) == (0, 1)
    assert not late.done()
    await running.stage(ContinueGenerationRequest())
    assert await late == greedy(running.stage.config.model_path, PROMPTS[0], 5)


async def test_a_drain_that_does_not_end_in_time_changes_nothing(running: Running) -> None:
    await running.start()
    await running.steps(2)
    drain = await running.queue(pause(PAUSE_MODE_DRAIN), within=1.0)
    assert running.stage.engine._rank.draining
    await asyncio.sleep(1.0 - ANSWER_S)
    running.gate.allow(1)
    async with refused(Reason.DEADLINE_EXCEEDED):
        await drain
    assert not running.stage.engine._rank.draining
    running.gate.open()
    await running.check_undisturbed()
    assert len(await running.stage.tokens(PROMPTS[0], 2)) == 2


async def test_a_withdrawn_drain_changes_nothing(running: Running) -> None:
    await running.start()
    await running.steps(2)
    drain = await running.queue(pause(PAUSE_MODE_DRAIN))
    assert running.stage.engine._rank.draining
    (command_id,) = running.stage.engine._commands._queue
    await running.stage.withdraw(command_id)
    async with refused(Reason.CANCELLED):
        await drain
    assert not running.stage.engine._rank.draining
    running.gate.open()
    await running.check_undisturbed()


@pytest.mark.parametrize("mode", [PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE, PAUSE_MODE_DRAIN])
async def test_new_requests_wait_while_paused(stage: Stage, mode: int) -> None:
    await stage(pause(mode))
    await stage(pause(mode))
    task = asyncio.create_task(stage.tokens(PROMPTS[0], 5))
    await until(lambda: bool(stage.engine._rank.scheduler.active))
    # Pausing again confirms: what came meanwhile is not touched.
    await stage(pause(mode))
    assert (await loads(stage)).waiting == 1
    assert not task.done()
    await stage(ContinueGenerationRequest())
    assert await task == greedy(stage.config.model_path, PROMPTS[0], 5)
    await stage(ContinueGenerationRequest())


async def test_what_is_frozen_in_place_may_be_retracted_but_not_ended(running: Running) -> None:
    await running.start()
    await running.steps(3)
    await running.carry_out(pause(PAUSE_MODE_IN_PLACE))
    for mode in (PAUSE_MODE_ABORT, PAUSE_MODE_DRAIN):
        answers = await running.stage.ranks(pause(mode))
        assert [answer.reason for answer in answers] == [Reason.PAUSE_MODE_CONFLICT] * len(answers)
    await running.stage(pause(PAUSE_MODE_RETRACT))
    assert (await loads(running.stage)).used_tokens == 0
    await running.stage(ContinueGenerationRequest())
    running.gate.open()
    await running.check_undisturbed()


async def test_flush_is_refused_while_entries_are_in_use_and_works_after_retract(running: Running) -> None:
    running.gate.open()
    await running.stage(FlushCacheRequest())
    running.gate._open.clear()
    await running.start()
    await running.steps(4)
    flush = await running.queue(FlushCacheRequest())
    async with refused(Reason.ACTIVE_REQUESTS):
        await flush
    await running.carry_out(pause(PAUSE_MODE_IN_PLACE))
    # What is frozen never ends: there is nothing to wait for.
    answers = await running.stage.ranks(FlushCacheRequest(idle_timeout=Duration(seconds=9)))
    assert [answer.reason for answer in answers] == [Reason.ACTIVE_REQUESTS] * len(answers)
    assert answers[0].metadata["count"] == "4"
    held = (await loads(running.stage)).used_tokens
    await running.stage(pause(PAUSE_MODE_RETRACT))
    reports = await running.stage(FlushCacheRequest())
    assert list(reports[0].tiers) == ["kv"]
    assert reports[0].tokens == held
    assert all(report.tokens == 0 for report in reports[1:])
    assert (await running.stage(FlushCacheRequest()))[0].tokens == 0
    await running.stage(ContinueGenerationRequest())
    running.gate.open()
    await running.check_undisturbed()


async def test_flush_waits_for_running_requests_as_long_as_it_is_told(running: Running) -> None:
    await running.start(max_new_tokens=6)
    await running.steps(2)
    flush = await running.queue(FlushCacheRequest(idle_timeout=Duration(seconds=20)))
    assert not flush.done()
    running.gate.open()
    assert (await flush)[0].tokens >= 4 * 10
    assert all(task.result() for task in running.tasks if task.done())


async def test_frozen_requests_can_be_aborted_by_id(running: Running) -> None:
    stage = running.stage
    await running.start()
    await running.steps(3)
    await running.carry_out(pause(PAUSE_MODE_IN_PLACE))
    scheduler = stage.engine._rank.scheduler
    rid = scheduler.active[-1]
    assert scheduler.abort([rid]) == (1, [])
    done, _ = await asyncio.wait(running.tasks, return_when=asyncio.FIRST_COMPLETED)
    (ended,) = done
    assert ended.result().rid == rid
    sample = ended.result().samples[0]
    assert sample.finish_reason.type == FINISH_TYPE_ABORT
    assert list(sample.output_ids) == greedy(stage.config.model_path, PROMPTS[running.tasks.index(ended)], 4)
    assert (await loads(stage)).running == 3


async def test_a_stream_breaks_off_at_a_pause_and_goes_on_after_it(stage: Stage) -> None:
    messages = []
    async for message in stage.stream(PROMPTS[0], temperature=0, ignore_eos=True, max_new_tokens=100):
        messages.append(message)
        if len(messages) in (5, 9):
            await stage(pause(PAUSE_MODE_RETRACT))
            await stage(ContinueGenerationRequest())
    sample = merge(messages).samples[0]
    assert list(sample.output_ids) == greedy(stage.config.model_path, PROMPTS[0], 100)
