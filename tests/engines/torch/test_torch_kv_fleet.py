"""What requests meet when weights change under them, through a coordinator, in every pause mode and with every flag.

The tokens after an update are compared with a clean run of the new weights on the same prefix. Only ``in_place``
without a flush keeps KV entries of old weights, and its responses say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch_models import greedy, prompt_of
from torch_stage import generate_request, merge, until

from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport.channel import open_channel
from rlctl.v1.common_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    STAGE_STATE_PAUSED,
)
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, Operation
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, FINISH_TYPE_LENGTH, GenerateResponse
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub
from rlctl.v1.verbs_pb2 import (
    AFTER_UPDATE_STAY_PAUSED,
    ContinueGenerationRequest,
    UpdateOptions,
    UpdateWeightsFromDiskRequest,
)

PROMPT = prompt_of(9)
COUNT = 30
BEFORE = 8
"""Steps that the running request takes before the update is asked for."""


class Under:
    """A stage with one request in the middle and one that waits, whose steps are held back, and its fleet."""

    def __init__(self, fleet: InProcessFleet, gate: Any, stub: RolloutServiceStub) -> None:
        self.fleet = fleet
        self.gate = gate
        self.stub = stub
        self.engine: Any = fleet.stages["a"]._engine
        self.old = fleet.specs[0].model_path

    def request(self, prompt: list[int], count: int = COUNT) -> asyncio.Task[GenerateResponse]:
        """A greedy request, to its end."""

        async def collect() -> GenerateResponse:
            call = self.stub.GenerateStream(
                generate_request(prompt, temperature=0, ignore_eos=True, max_new_tokens=count)
            )
            return merge([message async for message in call])

        return asyncio.create_task(collect())

    async def start(self) -> tuple[asyncio.Task[GenerateResponse], asyncio.Task[GenerateResponse]]:
        """One request that has put out some tokens and one that waits behind it."""
        scheduler = self.engine._rank.scheduler
        running = self.request(PROMPT)
        self.gate.allow(BEFORE)
        await until(lambda: self.gate.steps >= BEFORE and self.gate.held)
        waiting = self.request(prompt_of(7))
        await until(lambda: len(scheduler.active) == 2)
        assert scheduler.running == 1
        return running, waiting

    async def update(self, path: str, **options: Any) -> Operation:
        """Load a checkpoint, letting single steps through where a command of the update waits for one to end."""
        request = UpdateWeightsFromDiskRequest(model_path=path, weight_version="new", options=UpdateOptions(**options))
        updating = asyncio.ensure_future(self.fleet.stub.UpdateWeightsFromDisk(request))
        while not updating.done():
            if self.engine._rank.draining or self.engine._commands.waiting:
                self.gate.let_go()
            await asyncio.sleep(0.001)
        return await updating  # type: ignore[no-any-return]


@pytest.fixture
async def under(checkpoints, tmp_path: Path, gate) -> AsyncIterator[Under]:
    specs = [StageSpec("a", checkpoints(), engine="torch", options={"max_running": "1"})]
    async with InProcessFleet(tmp_path / "journal.db", specs) as fleet:
        channel = open_channel(fleet.stages["a"].rollout_address)
        yield Under(fleet, gate, RolloutServiceStub(channel))
        gate.open()
        await channel.close()


@dataclass(frozen=True)
class Stretch:
    """Output tokens of one version."""

    label: str
    tokens: list[int]
    kv: str


def stretches(response: GenerateResponse) -> list[Stretch]:
    sample = response.samples[0]
    return [
        Stretch(span.version.label, list(sample.output_ids[span.start : span.end]), span.kv_version.label)
        for span in sample.versions
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"pause": PAUSE_MODE_RETRACT},
        {"pause": PAUSE_MODE_RETRACT, "flush_cache": False},
        {"pause": PAUSE_MODE_RETRACT, "after": AFTER_UPDATE_STAY_PAUSED},
        {"pause": PAUSE_MODE_IN_PLACE},
        {"pause": PAUSE_MODE_IN_PLACE, "flush_cache": True, "after": AFTER_UPDATE_STAY_PAUSED},
    ],
    ids=["retract", "retract-no-flush", "retract-stay-paused", "in-place", "in-place-stay-paused"],
)
async def test_requests_go_on_as_if_the_new_weights_had_computed_their_prefix(
    under: Under, checkpoints, options: dict[str, Any]
) -> None:
    new = checkpoints(seed=1)
    running, waiting = await under.start()
    operation = await under.update(new, **options)
    assert operation.state == OPERATION_STATE_OK, operation.error
    if "after" in options:
        assert under.fleet.stage("a").state == STAGE_STATE_PAUSED
        assert not running.done()
        assert not waiting.done()
        await under.fleet.stub.ContinueGeneration(ContinueGenerationRequest())
    under.gate.open()
    old_part, new_part = stretches(await running)
    assert (old_part.label, new_part.label) == ("initial", "new")
    assert BEFORE <= len(old_part.tokens) < COUNT
    assert old_part.tokens == greedy(under.old, PROMPT, len(old_part.tokens))
    assert new_part.tokens == greedy(new, PROMPT + old_part.tokens, COUNT - len(old_part.tokens))
    assert not new_part.kv
    assert (await running).samples[0].retractions == 1
    # One that had no entries is wholly of the new weights, and so is one with the prefix of another.
    assert stretches(await waiting) == [Stretch("new", greedy(new, prompt_of(7), COUNT), "")]
    again = await under.request(PROMPT + old_part.tokens, len(new_part.tokens))
    assert stretches(again) == [Stretch("new", new_part.tokens, "")]
    assert again.samples[0].cached_tokens == 0


async def test_entries_of_old_weights_are_kept_only_when_asked_for_and_the_response_says_so(
    under: Under, checkpoints
) -> None:
    new = checkpoints(seed=1)
    running, waiting = await under.start()
    operation = await under.update(new, pause=PAUSE_MODE_IN_PLACE, flush_cache=False)
    assert operation.state == OPERATION_STATE_OK, operation.error
    under.gate.open()
    old_part, new_part = stretches(await running)
    assert (old_part.label, old_part.kv) == ("initial", "")
    assert (new_part.label, new_part.kv) == ("new", "initial")
    assert (await running).samples[0].retractions == 0
    clean = greedy(new, PROMPT + old_part.tokens, COUNT - len(old_part.tokens))
    assert new_part.tokens != clean, "they were computed from what the old weights left"
    # Nobody else gets these entries.
    assert stretches(await waiting) == [Stretch("new", greedy(new, prompt_of(7), COUNT), "")]
    again = await under.request(PROMPT + old_part.tokens, len(clean))
    assert stretches(again) == [Stretch("new", clean, "")]


@pytest.mark.parametrize(
    "options", [{"pause": PAUSE_MODE_ABORT}, {"abort_all_requests": True}], ids=["abort", "abort-all-requests"]
)
async def test_requests_that_are_aborted_end_with_what_the_old_weights_said(
    under: Under, checkpoints, options: dict[str, Any]
) -> None:
    new = checkpoints(seed=1)
    running, waiting = await under.start()
    operation = await under.update(new, **options)
    assert operation.state == OPERATION_STATE_OK, operation.error
    (part,) = stretches(await running)
    assert part == Stretch("initial", greedy(under.old, PROMPT, len(part.tokens)), "")
    assert (await waiting).samples[0].output_ids == []
    for request in (running, waiting):
        assert (await request).samples[0].finish_reason.type == FINISH_TYPE_ABORT
    under.gate.open()
    assert stretches(await under.request(PROMPT)) == [Stretch("new", greedy(new, PROMPT, COUNT), "")]


async def test_a_drain_lets_running_requests_end_with_the_old_weights(under: Under, checkpoints) -> None:
    new = checkpoints(seed=1)
    running, waiting = await under.start()
    operation = await under.update(new, pause=PAUSE_MODE_DRAIN)
    assert operation.state == OPERATION_STATE_OK, operation.error
    under.gate.open()
    assert stretches(await running) == [Stretch("initial", greedy(under.old, PROMPT, COUNT), "")]
    assert stretches(await waiting) == [Stretch("new", greedy(new, prompt_of(7), COUNT), "")]


async def test_without_a_pause_running_requests_refuse_the_update_and_go_on(under: Under, checkpoints) -> None:
    running, waiting = await under.start()
    operation = await under.update(checkpoints(seed=1))
    assert operation.state == OPERATION_STATE_FAILED
    assert operation.error.reason == "ACTIVE_REQUESTS"
    under.gate.open()
    for request, prompt in ((running, PROMPT), (waiting, prompt_of(7))):
        assert stretches(await request) == [Stretch("initial", greedy(under.old, prompt, COUNT), "")]
        assert (await request).samples[0].finish_reason.type == FINISH_TYPE_LENGTH
    assert under.fleet.stage("a").routable
