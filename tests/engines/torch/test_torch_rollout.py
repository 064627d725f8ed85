"""Samples of real models that are cut and go on: what they come to is what uninterrupted runs of the weights give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from torch_models import greedy, prompt_of
from torch_stage import until

from rlctl.rollout.sample import RolloutSample
from rlctl.sdk import aio
from rlctl.sdk.aio import AsyncFleet
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1.common_pb2 import PAUSE_MODE_ABORT
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.verbs_pb2 import UpdateOptions, UpdateWeightsFromDiskRequest

PROMPT = prompt_of(9)
COUNT = 30
BEFORE = 8
"""Steps that the engines take before the cut."""

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": COUNT}


@pytest.fixture
async def fleet(checkpoints, tmp_path: Path) -> AsyncIterator[InProcessFleet]:
    specs = [StageSpec(slot, checkpoints(), engine="torch") for slot in ("a", "b")]  # the gate holds one at a time
    async with InProcessFleet(tmp_path / "journal.db", specs) as fleet:
        yield fleet


@pytest.fixture
async def client(fleet: InProcessFleet) -> AsyncIterator[AsyncFleet]:
    async with await aio.connect(fleet.server.address) as client:
        yield client


async def cut(gate: Any, fleet: InProcessFleet, command: Any) -> Any:
    """Carry out a command in the middle of what is generated, letting a step through where it waits for one to end."""
    gate.allow(BEFORE)
    await until(lambda: gate.steps >= BEFORE and gate.held)
    await asyncio.sleep(0.05)  # what they said is on its way
    working = asyncio.ensure_future(command)
    while not working.done():
        waits = any(stage._engine._commands.waiting for stage in fleet.stages.values())  # type: ignore[attr-defined]
        if waits:
            gate.let_go()
        await asyncio.sleep(0.001)
    return await working


def sequences(sample: RolloutSample) -> list[int]:
    return [version.sequence for version in sample.versions if version is not None]


async def test_a_continued_sample_is_the_one_of_an_uninterrupted_run(
    client: AsyncFleet, fleet: InProcessFleet, gate: Any
) -> None:
    rollout = client.rollout("actor", resume="return")
    generating = asyncio.create_task(rollout.generate(PROMPT, **GREEDY))
    await cut(gate, fleet, client.pause_generation("abort"))
    (part,) = await generating
    assert 0 < len(part.output_ids) < COUNT
    assert (part.finished, part.finish) == (False, "abort")
    gate.open()
    await client.continue_generation()
    (whole,) = await rollout.resume([part])
    (clean,) = await rollout.generate(PROMPT, **GREEDY)
    assert whole.output_ids == clean.output_ids == greedy(fleet.specs[0].model_path, PROMPT, COUNT)
    assert whole.logprobs == pytest.approx(clean.logprobs, abs=1e-5)
    assert sequences(whole) == [1] * COUNT
    assert (whole.finish, whole.staleness) == ("length", 0)


async def test_tokens_right_after_an_update_are_those_of_the_new_weights_and_say_so(
    client: AsyncFleet, fleet: InProcessFleet, gate: Any, checkpoints: Any
) -> None:
    old, new = fleet.specs[0].model_path, checkpoints(seed=1)
    rollout = client.rollout("actor")
    generating = asyncio.create_task(rollout.generate(PROMPT, **GREEDY))
    options = UpdateOptions(pause=PAUSE_MODE_ABORT)
    request = UpdateWeightsFromDiskRequest(model_path=new, weight_version="new", options=options)
    operation = await cut(gate, fleet, fleet.stub.UpdateWeightsFromDisk(request))
    assert operation.state == OPERATION_STATE_OK
    gate.open()
    for sample in await generating:
        versions = sequences(sample)
        before = versions.count(1)
        assert versions == [1] * before + [2] * (COUNT - before)
        assert 0 < before < COUNT
        assert sample.output_ids[:before] == greedy(old, PROMPT, COUNT)[:before]
        prefix = [*PROMPT, *sample.output_ids[:before]]
        assert sample.output_ids[before:] == greedy(new, prefix, COUNT - before)
        assert sample.staleness == 1
