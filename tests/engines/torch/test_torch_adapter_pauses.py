"""Pauses of one adapter: its requests are treated as the mode says, all others get the tokens that they would get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from torch_adapters import load_adapter, make_adapter, merge_adapter
from torch_models import greedy, prompt_of
from torch_stage import Stage, until

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_KV_CACHE,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
)
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, FINISH_TYPE_LENGTH
from rlctl.v1.verbs_pb2 import (
    UPDATE_KIND_ADAPTER,
    AbortUpdateRequest,
    Adapter,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    FlushCacheRequest,
    LoadAdapterRequest,
    PauseGenerationRequest,
    PrepareUpdateRequest,
    ReleaseMemoryRequest,
    ResumeMemoryRequest,
    SealUpdateRequest,
    UnloadAdapterRequest,
)

PROMPT = prompt_of(9)
COUNT = 10
LONG = 150

Made = tuple[str, str]
"""(adapter's directory, checkpoint with it merged)."""


@pytest.fixture(scope="module")
def made(checkpoints: Callable[..., str]) -> Callable[[int], Made]:
    """Makes adapters of the Llama beside it, each once; files beside the checkpoint may be read."""
    base = checkpoints("llama")
    found: dict[int, Made] = {}

    def make(seed: int) -> Made:
        if seed not in found:
            beside = Path(base).parent
            adapter = make_adapter(beside / f"paused-{seed}", base, seed=seed)
            found[seed] = adapter, merge_adapter(beside / f"paused-merged-{seed}", base, adapter)
        return found[seed]

    return make


@pytest.fixture
async def loaded(stage: Stage, made: Callable[[int], Made]) -> AsyncIterator[Stage]:
    """The stage with adapters math and code; every test ends with none paused, and none loaded."""
    for seed, name in enumerate(("math", "code"), start=1):
        await load_adapter(stage, name, made(seed)[0])
    yield stage
    rank = stage.engine._rank
    if rank.update is not None:
        await stage(AbortUpdateRequest(), update=rank.update.update_id)
    for name in list(rank.adapters.loaded):
        await stage(ContinueGenerationRequest(adapter=name))
        await stage(UnloadAdapterRequest(name=name, abort_requests=True))
    await stage(ContinueGenerationRequest())


def pausing(mode: int, adapter: str = "math") -> PauseGenerationRequest:
    return PauseGenerationRequest(mode=mode, adapter=adapter)  # type: ignore[arg-type]


def generating(stage: Stage, adapter: str, length: int = LONG) -> AsyncIterator[Any]:
    return stage.stream(PROMPT, adapter=adapter, temperature=0, ignore_eos=True, max_new_tokens=length)


async def refused(stage: Stage, request: object) -> Reason:
    answers = await stage.ranks(request)
    assert all(isinstance(answer, RlctlError) for answer in answers), answers
    return answers[0].reason


@pytest.mark.parametrize("mode", [PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE])
async def test_what_it_holds_goes_on_after_its_continue_and_others_in_between(
    loaded: Stage, made: Callable[[int], Made], mode: int
) -> None:
    stage, scheduler = loaded, loaded.engine._rank.scheduler
    stream = generating(stage, "math")
    parts = [await anext(stream)]
    await stage(pausing(mode))
    late = asyncio.create_task(stage.tokens(PROMPT, COUNT, adapter="math"))
    held = len(scheduler._requests[next(iter(scheduler._requests))][0].tokens)
    assert await stage.tokens(PROMPT, COUNT) == greedy(stage.config.model_path, PROMPT, COUNT)
    assert await stage.tokens(PROMPT, COUNT, adapter="code") == greedy(made(2)[1], PROMPT, COUNT)
    await until(lambda: len(scheduler.using("math")) == 2)
    assert len(scheduler._requests[scheduler.using("math")[0]][0].tokens) == held, "nothing was computed with it"
    assert scheduler.frozen() == (mode == PAUSE_MODE_IN_PLACE)
    assert not late.done()
    await stage(ContinueGenerationRequest(adapter="math"))
    parts += [part async for part in stream]
    tokens = [token for part in parts for sample in part.samples for token in sample.output_ids]
    assert tokens == greedy(made(1)[1], PROMPT, LONG)
    assert await late == greedy(made(1)[1], PROMPT, COUNT)


async def test_it_ends_what_runs_or_waits_for_it(loaded: Stage, made: Callable[[int], Made]) -> None:
    for mode, ends in ((PAUSE_MODE_ABORT, FINISH_TYPE_ABORT), (PAUSE_MODE_DRAIN, FINISH_TYPE_LENGTH)):
        stream, beside = generating(loaded, "math", 60), asyncio.create_task(loaded.tokens(PROMPT, 60))
        parts = [await anext(stream)]
        _, rest = await asyncio.gather(loaded(pausing(mode)), _all_of(stream))
        assert (parts + rest)[-1].samples[0].finish_reason.type == ends
        late = asyncio.create_task(loaded.tokens(PROMPT, COUNT, adapter="math"))
        assert await beside == greedy(loaded.config.model_path, PROMPT, 60)
        assert await loaded.tokens(PROMPT, COUNT, adapter="code") == greedy(made(2)[1], PROMPT, COUNT)
        assert not late.done()
        await loaded(ContinueGenerationRequest(adapter="math"))
        assert await late == greedy(made(1)[1], PROMPT, COUNT)


async def _all_of(stream: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in stream]


async def test_a_drain_that_is_given_up_leaves_the_adapter_running(loaded: Stage, made: Callable[[int], Made]) -> None:
    stream = generating(loaded, "math", 4000)
    await anext(stream)
    answers = await loaded.ranks(pausing(PAUSE_MODE_DRAIN), within=0.5)
    assert {answer.reason for answer in answers} <= {Reason.DEADLINE_EXCEEDED, Reason.CANCELLED}
    assert await loaded.tokens(PROMPT, COUNT, adapter="math") == greedy(made(1)[1], PROMPT, COUNT)
    await anext(stream)
    await stream.aclose()


@pytest.mark.parametrize("ends", [CommitUpdateRequest, AbortUpdateRequest])
async def test_an_update_of_the_adapter_leaves_it_paused(
    loaded: Stage, made: Callable[[int], Made], ends: type
) -> None:
    stream = generating(loaded, "math")
    parts = [await anext(stream)]
    await loaded(pausing(PAUSE_MODE_IN_PLACE))
    opening = PrepareUpdateRequest(kind=UPDATE_KIND_ADAPTER, adapter=Adapter(name="math", version="two"))
    await loaded(opening, update="u")  # no mode is needed: its requests are stopped already
    await loaded(LoadAdapterRequest(name="math", path=made(3)[0], version="two"), update="u")
    await loaded(SealUpdateRequest(), update="u")
    await loaded(ends(), update="u")
    late = asyncio.create_task(loaded.tokens(PROMPT, COUNT, adapter="math"))
    assert await loaded.tokens(PROMPT, COUNT) == greedy(loaded.config.model_path, PROMPT, COUNT)
    assert not late.done()
    await loaded(ContinueGenerationRequest(adapter="math"))
    after = made(3 if ends is CommitUpdateRequest else 1)[1]
    assert await late == greedy(after, PROMPT, COUNT)
    parts += [part async for part in stream]
    tokens = [token for part in parts for sample in part.samples for token in sample.output_ids]
    assert len(tokens) == LONG
    if ends is AbortUpdateRequest:
        assert tokens == greedy(after, PROMPT, LONG)


async def test_a_pause_of_all_requests_and_one_of_an_adapter_go_beside_each_other(
    loaded: Stage, made: Callable[[int], Made]
) -> None:
    stream = generating(loaded, "math")
    await anext(stream)
    await loaded(pausing(PAUSE_MODE_IN_PLACE))
    assert await refused(loaded, pausing(PAUSE_MODE_DRAIN, "")) is Reason.PAUSE_MODE_CONFLICT, "it would never end"
    for mode in (PAUSE_MODE_ABORT, PAUSE_MODE_DRAIN):
        assert await refused(loaded, pausing(mode)) is Reason.PAUSE_MODE_CONFLICT
    assert await refused(loaded, FlushCacheRequest()) is Reason.ACTIVE_REQUESTS
    await loaded(pausing(PAUSE_MODE_RETRACT, ""))
    await loaded(FlushCacheRequest())
    await loaded(ContinueGenerationRequest())
    assert await loaded.tokens(PROMPT, COUNT) == greedy(loaded.config.model_path, PROMPT, COUNT)
    assert loaded.engine._rank.scheduler.using("math"), "it stays paused"
    await loaded(ReleaseMemoryRequest(tags=[MEMORY_TAG_KV_CACHE]))
    await loaded(ContinueGenerationRequest(adapter="math"))
    assert await refused(loaded, ContinueGenerationRequest()) is Reason.MEMORY_RELEASED
    await loaded(ResumeMemoryRequest(tags=[MEMORY_TAG_KV_CACHE]))
    assert [t for part in await _all_of(stream) for t in part.samples[0].output_ids][-1] == greedy(
        made(1)[1], PROMPT, LONG
    )[-1]


async def test_frozen_requests_give_their_room_to_others(
    checkpoints: Callable[..., str], made: Callable[[int], Made]
) -> None:
    stage = Stage(checkpoints("llama"), max_total_tokens=120, max_running=2)
    await stage.start()
    try:
        await load_adapter(stage, "math", made(1)[0])
        streams = [generating(stage, "math", 60) for _ in range(2)]
        parts = [[await anext(stream)] for stream in streams]
        await stage(pausing(PAUSE_MODE_IN_PLACE))
        assert stage.engine._rank.scheduler.frozen() == 2, "both rows are taken"
        assert await stage.tokens(PROMPT, 100) == greedy(stage.config.model_path, PROMPT, 100)
        await stage(ContinueGenerationRequest(adapter="math"))
        for stream, first in zip(streams, parts, strict=True):
            rest = await _all_of(stream)
            tokens = [token for part in first + rest for token in part.samples[0].output_ids]
            assert tokens == greedy(made(1)[1], PROMPT, 60)
    finally:
        await stage.stop()
