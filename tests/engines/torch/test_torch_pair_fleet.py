"""Fleets with prefill and decode engines: a client sees a model that generates, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from torch_models import greedy, prompt_of, reference_logprobs
from torch_stage import until
from updating import unreachable

from rlctl.contract.errors import Reason, RlctlError
from rlctl.rollout.sample import RolloutSample
from rlctl.sdk import aio
from rlctl.sdk.aio import AsyncFleet
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1.common_pb2 import PAUSE_MODE_ABORT, PAUSE_MODE_IN_PLACE, PAUSE_MODE_RETRACT, PauseMode
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.verbs_pb2 import (
    ContinueGenerationRequest,
    PauseGenerationRequest,
    UpdateOptions,
    UpdateWeightsFromDiskRequest,
)

TOLERANCE = 1e-4
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def spec(slot: str, path: str, kind: str, tp_size: int = 1) -> StageSpec:
    options = {"disaggregation_mode": kind}
    return StageSpec(slot, path, tp_size, engine="torch", options=options, worker_type=kind)


@pytest.fixture
async def fleet(checkpoints, tmp_path: Path) -> AsyncIterator[InProcessFleet]:
    path = checkpoints()
    specs = [
        spec("p0", path, "prefill"),
        spec("p1", path, "prefill"),
        spec("d0", path, "decode", 2),
        spec("d1", path, "decode"),
    ]
    async with InProcessFleet(tmp_path / "journal.db", specs) as fleet:
        yield fleet


@pytest.fixture
async def client(fleet: InProcessFleet) -> AsyncIterator[AsyncFleet]:
    async with await aio.connect(fleet.server.address) as client:
        yield client


def scheduler(fleet: InProcessFleet, slot: str) -> Any:
    return fleet.stages[slot]._engine._rank.scheduler  # type: ignore[attr-defined]


async def nothing_left(fleet: InProcessFleet) -> None:
    """No engine holds anything of any request, in its cache or in shared memory."""
    await until(
        lambda: all(
            scheduler(fleet, slot).idle
            and not scheduler(fleet, slot)._slots.used
            and not fleet.stages[slot]._engine._rank.handovers._lent  # type: ignore[attr-defined]
            for slot in fleet.stages
        )
    )


def sequences(sample: RolloutSample) -> list[int]:
    return [version.sequence for version in sample.versions if version is not None]


async def update(fleet: InProcessFleet, path: str, mode: PauseMode.ValueType) -> None:
    options = UpdateOptions(pause=mode)
    operation = await fleet.stub.UpdateWeightsFromDisk(UpdateWeightsFromDiskRequest(model_path=path, options=options))
    assert operation.state == OPERATION_STATE_OK, operation.error


async def test_every_way_to_generate_goes_to_a_pair(client: AsyncFleet, fleet: InProcessFleet) -> None:
    path = fleet.specs[0].model_path
    prompts = [prompt_of(length) for length in (12, 5, 30, 1)]
    groups = await client.rollout("actor").generate_batch(prompts, n=2, max_new_tokens=5, **GREEDY)
    for prompt, group in zip(prompts, groups, strict=True):
        output = greedy(path, prompt, 5)
        rows = reference_logprobs(path, prompt + output)
        for sample in group:
            assert sample.output_ids == output
            expected = [float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(output)]
            assert max(abs(a - b) for a, b in zip(sample.logprobs, expected, strict=True)) < TOLERANCE
            assert sequences(sample) == [1] * 5
    parts = {part.slot for group in groups for sample in group for part in sample.parts}
    assert parts == {"d0", "d1"}
    response = await client.generate(prompts[0], n=2, max_new_tokens=5, logprob_start_len=0, **GREEDY)
    assert [list(sample.output_ids) for sample in response.samples] == [greedy(path, prompts[0], 5)] * 2
    assert [entry.token_id for entry in response.input_logprobs] == prompts[0]
    streamed = [part async for part in client.generate_stream(prompts[1], max_new_tokens=5, **GREEDY)]
    assert [token for part in streamed for token in part.samples[0].output_ids] == greedy(path, prompts[1], 5)
    for slot in ("p1", "d0"):  # who names one of a pair gets a pair with it
        answer = await client.generate(prompts[0], max_new_tokens=2, slot=slot, **GREEDY)
        assert answer.slot == "d0" if slot == "d0" else answer.slot in ("d0", "d1")
    await nothing_left(fleet)


@pytest.mark.parametrize(
    "mode", [PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE], ids=["abort", "retract", "in_place"]
)
async def test_an_update_in_the_middle_of_pairs_leaves_no_stale_token(
    client: AsyncFleet, fleet: InProcessFleet, checkpoints, mode: PauseMode.ValueType
) -> None:
    """Whatever waits, is on its way, or is generated then: tokens are those of the version that they say."""
    old, new = fleet.specs[0].model_path, checkpoints("llama", seed=5)
    rollout = client.rollout("actor")
    prompts = [prompt_of(20, seed) for seed in range(12)]
    first = asyncio.create_task(rollout.generate_batch(prompts, max_new_tokens=24, **GREEDY))
    await until(lambda: scheduler(fleet, "d1")._generated > 20)
    late = asyncio.create_task(rollout.generate_batch(prompts, max_new_tokens=3, **GREEDY))
    await update(fleet, new, mode)
    after = await rollout.generate_batch(prompts[:4], max_new_tokens=6, **GREEDY)
    for prompt, [sample] in zip(prompts[:4], after, strict=True):
        assert (sample.output_ids, set(sequences(sample))) == (greedy(new, prompt, 6), {2})
    for prompt, [sample] in zip(prompts * 2, [*await first, *await late], strict=True):
        versions = sequences(sample)
        assert versions == sorted(versions)
        tokens = prompt + sample.output_ids
        for index, sequence in enumerate(versions):
            rows = reference_logprobs(old if sequence == 1 else new, tokens[: len(prompt) + index + 1])
            token = tokens[len(prompt) + index]
            assert int(rows[-2].argmax()) == token, (index, sequence)
            assert abs(sample.logprobs[index] - float(rows[-2, token])) < TOLERANCE
    await nothing_left(fleet)


async def test_entries_that_lie_ready_while_their_version_ends_are_computed_anew(
    client: AsyncFleet, fleet: InProcessFleet, checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = True
    for slot in ("d0", "d1"):
        take = scheduler(fleet, slot).move
        monkeypatch.setattr(
            scheduler(fleet, slot), "move", lambda *, admit, take=take: None if held else take(admit=admit)
        )
    new, prompt = checkpoints("llama", seed=5), prompt_of(20)
    generating = asyncio.create_task(client.rollout("actor").generate(prompt, max_new_tokens=6, **GREEDY))
    decoding = [scheduler(fleet, slot) for slot in ("d0", "d1")]
    await until(lambda: any(sample.comes for each in decoding for sample in [*each._waiting, *each._running]))
    await update(fleet, new, PAUSE_MODE_IN_PLACE)
    held = False
    [sample] = await generating
    assert (sample.output_ids, sequences(sample)) == (greedy(new, prompt, 6), [2] * 6)
    await nothing_left(fleet)


@pytest.mark.parametrize("half", ["p0", "d0"])
async def test_a_half_that_is_paused_makes_requests_wait_or_go_elsewhere(
    client: AsyncFleet, fleet: InProcessFleet, half: str
) -> None:
    async def send(request: Any) -> None:
        request.header.target.slots.append(half)
        verb = type(request).__name__.removesuffix("Request")
        operation = await getattr(fleet.stub, verb)(request)
        assert operation.state == OPERATION_STATE_OK

    path, rollout = fleet.specs[0].model_path, client.rollout("actor")
    prompts = [prompt_of(10, seed) for seed in range(8)]
    running = asyncio.create_task(rollout.generate_batch(prompts, max_new_tokens=30, **GREEDY))
    await until(lambda: scheduler(fleet, "d0")._generated > 3)
    await send(PauseGenerationRequest(mode=PAUSE_MODE_ABORT))
    later = await rollout.generate(prompts[0], max_new_tokens=4, **GREEDY)
    assert half not in {part.slot for part in later[0].parts}
    # One that got in between the engine's pause and its stage's waits there.
    await send(ContinueGenerationRequest())
    samples = [sample for [sample] in await running]
    assert [sample.output_ids for sample in samples] == [greedy(path, prompt, 30) for prompt in prompts]
    await nothing_left(fleet)


@pytest.mark.parametrize("half", ["p", "d"])
async def test_a_half_that_is_gone_is_not_asked(client: AsyncFleet, fleet: InProcessFleet, half: str) -> None:
    path, rollout = fleet.specs[0].model_path, client.rollout("actor")
    prompts = [prompt_of(10, seed) for seed in range(6)]
    running = asyncio.create_task(rollout.generate_batch(prompts, max_new_tokens=40, **GREEDY))
    await until(lambda: scheduler(fleet, "d1")._generated > 3)
    await fleet.stages.pop(f"{half}0").stop()
    samples = [sample for [sample] in await running]
    assert [sample.output_ids for sample in samples] == [greedy(path, prompt, 40) for prompt in prompts]
    await nothing_left(fleet)
    await fleet.stages.pop(f"{half}1").stop()
    with pytest.raises(RlctlError) as caught:
        await rollout.generate(prompts[0], max_new_tokens=2, timeout_s=0.5)
    assert caught.value.reason is Reason.NO_ROUTABLE_STAGE
    if half == "p":
        assert "d0, d1 without a prefill stage that fits (none may be asked)" in caught.value.message
    else:
        assert "within 0.5 s" in caught.value.message


async def test_a_prefill_stage_that_is_gone_and_says_nothing_is_not_waited_for(
    client: AsyncFleet, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler(fleet, "p0"), "move", lambda *, admit: None)  # its connections do not break
    path, rollout = fleet.specs[0].model_path, client.rollout("actor")
    prompts = [prompt_of(10, seed) for seed in range(4)]
    generating = asyncio.create_task(rollout.generate_batch(prompts, max_new_tokens=6, **GREEDY))
    await until(lambda: not scheduler(fleet, "p0").idle)
    async with unreachable(fleet, "p0"), asyncio.timeout(20):
        samples = [sample for [sample] in await generating]
    assert [sample.output_ids for sample in samples] == [greedy(path, prompt, 6) for prompt in prompts]
