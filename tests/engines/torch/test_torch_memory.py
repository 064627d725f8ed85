"""Memory regions are really given back, come back usable, and nothing runs without them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from rlctl_torch.model.model import Model
from rlctl_torch.steps.background import Beside
from torch_models import greedy, prompt_of
from torch_source import digest_of, load
from torch_stage import Stage

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_CUDA_GRAPH,
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_REJECTED,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
)
from rlctl.v1.verbs_pb2 import (
    CheckWeightsRequest,
    ContinueGenerationRequest,
    FlushCacheRequest,
    GetServerInfoRequest,
    PauseGenerationRequest,
    PrepareUpdateRequest,
    ReleaseMemoryRequest,
    ResumeMemoryRequest,
)

PROMPT = prompt_of(9)
KV, WEIGHTS = MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS
GROWTH = 5 << 20
"""Bytes by which this process, with rank 0, may grow meanwhile for other reasons."""


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def wide(request: pytest.FixtureRequest, checkpoints) -> Iterator[Stage]:
    """70 MB of weights, and a KV cache of 60,000 tokens: far more than what a process allocates besides."""
    follower = request.getfixturevalue("follower") if request.param == 2 else None
    stage = Stage(checkpoints("wide", dtype="float32"), follower, max_total_tokens=60_000)
    asyncio.run(stage.start())
    yield stage
    asyncio.run(stage.stop())


@pytest.fixture(autouse=True)
async def as_before(wide: Stage) -> AsyncIterator[None]:
    yield
    await wide(ResumeMemoryRequest())
    await load(wide, wide.config.model_path, abort_all_requests=True)
    await wide(ContinueGenerationRequest())


async def resident(stage: Stage) -> list[int]:
    """Bytes of resident memory of each rank's process, without files: a forked process maps libraries at their use."""
    memory = [psutil.Process(info.pid).memory_info() for info in await stage(GetServerInfoRequest())]
    return [each.rss - each.shared for each in memory]


async def refusal(stage: Stage, request) -> RlctlError:
    answers = await stage.ranks(request)
    assert all(isinstance(answer, RlctlError) for answer in answers), answers
    assert len({answer.reason for answer in answers}) == 1
    return answers[0]


@pytest.mark.parametrize("tags", [[], [WEIGHTS]], ids=["all", "weights"])
async def test_weights_that_are_kept_come_back_as_they_were(wide: Stage, tags: list[int]) -> None:
    expected = await wide.tokens(PROMPT, 5)
    digests = [report.model_digest for report in await wide(CheckWeightsRequest())]
    await wide(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    for _ in range(2):
        for report in await wide(ReleaseMemoryRequest(tags=tags, keep_weights=True)):
            assert list(report.kept) == [WEIGHTS]
        assert (await refusal(wide, CheckWeightsRequest())).reason is Reason.MEMORY_RELEASED
    for report in await wide(ResumeMemoryRequest()):
        assert not report.kept
    assert [report.model_digest for report in await wide(CheckWeightsRequest())] == digests
    await wide(ContinueGenerationRequest())
    assert await wide.tokens(PROMPT, 5) == expected


async def test_weights_that_cannot_be_kept_are_not_released(wide: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await wide.tokens(PROMPT, 5)
    await wide(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))

    def full(_: Model) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Model, "keep", full)
    request = ReleaseMemoryRequest(keep_weights=True)
    assert {answer.reason for answer in await wide.ranks(request)} == {Reason.MEMORY_FULL}
    await wide(ContinueGenerationRequest())
    assert await wide.tokens(PROMPT, 5) == expected


@pytest.mark.parametrize(("owner", "step"), [(Beside, "end"), (Model, "keep")], ids=["wedged", "full"])
async def test_a_release_that_fails_frees_nothing_and_no_later_resume_restores_its_copy(
    wide: Stage, monkeypatch: pytest.MonkeyPatch, owner: type, step: str
) -> None:
    """The step fails at rank 0 only: another rank may have made its copy."""
    expected = await wide.tokens(PROMPT, 5)
    await wide(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))

    def fail(*_: object) -> None:
        raise Reason.ENGINE_WEDGED.error("as the test wants it")

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, fail)
        answers = await wide.ranks(ReleaseMemoryRequest(keep_weights=True))
        assert getattr(answers[0], "reason", None) is Reason.ENGINE_WEDGED
    assert [list(report.released) for report in await wide(ReleaseMemoryRequest(tags=[KV]))] == [[KV]] * len(answers)
    for report in await wide(ReleaseMemoryRequest(tags=[WEIGHTS])):
        assert not report.kept
    await wide(ResumeMemoryRequest())
    assert (await refusal(wide, ContinueGenerationRequest())).reason is Reason.WEIGHTS_STALE, "the weights are lost"
    await load(wide, wide.config.model_path, abort_all_requests=True)
    await wide(ContinueGenerationRequest())
    assert await wide.tokens(PROMPT, 5) == expected


@pytest.mark.parametrize("tag", [KV, WEIGHTS], ids=["kv_cache", "weights"])
async def test_a_region_is_given_back_and_comes_back(wide: Stage, tag: int) -> None:
    expected = greedy(wide.config.model_path, PROMPT, 5)
    assert await wide.tokens(PROMPT, 5) == expected
    before = await resident(wide)
    released = await wide(ReleaseMemoryRequest(tags=[tag]))
    after = await resident(wide)
    for rank, (report, was, now) in enumerate(zip(released, before, after, strict=True)):
        assert list(report.released) == [tag]
        assert report.bytes > (30 if wide.config.tp_size == 1 else 15) << 20
        own_growth = GROWTH if rank == 0 else 0
        assert was - now > 0.9 * report.bytes - own_growth
    assert (await wide(ReleaseMemoryRequest(tags=[tag])))[0].bytes == 0, "released already"
    waiting = asyncio.create_task(wide.tokens(PROMPT, 5))
    error = await refusal(wide, ContinueGenerationRequest())
    assert error.reason is Reason.MEMORY_RELEASED
    resumed = await wide(ResumeMemoryRequest(tags=[tag]))
    assert [(r.bytes, list(r.released)) for r in resumed] == [(r.bytes, []) for r in released]
    assert (await wide(ResumeMemoryRequest(tags=[tag])))[0].bytes == 0, "not released any more"
    if tag == WEIGHTS:
        assert not waiting.done()
        await load(wide, wide.config.model_path, abort_all_requests=True)
        assert await waiting == []
        waiting = asyncio.create_task(wide.tokens(PROMPT, 5))
    assert await waiting == expected


async def test_lost_weights_serve_nothing_until_a_full_update(wide: Stage) -> None:
    await wide(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    (report, *_) = await wide(ReleaseMemoryRequest())
    assert list(report.released) == [KV, WEIGHTS]
    assert (await refusal(wide, CheckWeightsRequest())).reason is Reason.MEMORY_RELEASED
    answers = await wide.ranks(PrepareUpdateRequest(), update="u")
    assert [answer.reason for answer in answers] == [Reason.MEMORY_RELEASED] * len(answers)
    await wide(FlushCacheRequest())
    await wide(ResumeMemoryRequest(tags=[WEIGHTS]))
    (check, *_) = await wide(CheckWeightsRequest())
    assert check.model_digest != digest_of(wide.config.model_path)
    await wide(ResumeMemoryRequest(tags=[KV]))
    assert (await refusal(wide, ContinueGenerationRequest())).reason is Reason.WEIGHTS_STALE
    await load(wide, wide.config.model_path)
    await wide(ContinueGenerationRequest())
    assert await wide.tokens(PROMPT, 5) == greedy(wide.config.model_path, PROMPT, 5)


async def test_weights_can_be_updated_while_the_kv_cache_is_released(wide: Stage) -> None:
    """The order of a co-located trainer: release all, resume weights, update, resume the cache, continue."""
    await wide(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    await wide(ReleaseMemoryRequest())
    await wide(ResumeMemoryRequest(tags=[WEIGHTS]))
    await load(wide, wide.config.model_path)
    assert (await refusal(wide, ContinueGenerationRequest())).reason is Reason.MEMORY_RELEASED
    await wide(ResumeMemoryRequest())
    await wide(ContinueGenerationRequest())
    assert await wide.tokens(PROMPT, 5) == greedy(wide.config.model_path, PROMPT, 5)


async def test_nothing_is_released_under_requests_that_hold_entries(wide: Stage) -> None:
    async for _ in wide.stream(PROMPT, temperature=0, ignore_eos=True, max_new_tokens=20):
        if not wide.engine._rank.paused:
            await wide(PauseGenerationRequest(mode=PAUSE_MODE_IN_PLACE))
            for tags in ([], [KV], [WEIGHTS]):
                error = await refusal(wide, ReleaseMemoryRequest(tags=tags))
                assert (error.reason, error.metadata) == (Reason.MEMORY_NOT_RELEASABLE, {"count": "1"})
            await wide(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
            await wide(ReleaseMemoryRequest(tags=[KV]))
            await wide(ResumeMemoryRequest(tags=[KV]))
            break


@pytest.mark.parametrize("tag", [KV, WEIGHTS], ids=["kv_cache", "weights"])
async def test_a_resume_that_finds_no_memory_is_refused_by_all_ranks_and_the_engine_lives(
    wide: Stage, monkeypatch: pytest.MonkeyPatch, tag: int
) -> None:
    """A co-located trainer may still hold it."""
    expected = greedy(wide.config.model_path, PROMPT, 5)
    await wide(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    await wide(ReleaseMemoryRequest())
    before = await resident(wide)
    counts = itertools.count()

    def few(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **options: Any) -> torch.Tensor:
            if next(counts) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return real(*args, **options)

        return allocate

    with monkeypatch.context() as patch:
        if tag == KV:
            patch.setattr(torch, "zeros", few(torch.zeros))
        else:
            patch.setattr(torch.Tensor, "new_zeros", few(torch.Tensor.new_zeros))
        error = await refusal(wide, ResumeMemoryRequest())
    assert (error.reason, error.outcome) == (Reason.MEMORY_FULL, OUTCOME_REJECTED)
    assert "2.00 GiB" in error.message
    assert not wide.failures
    for was, now in zip(before, await resident(wide), strict=True):
        assert now - was < 10 << 20, "nothing of what was refused is kept"
    error = await refusal(wide, ContinueGenerationRequest())
    assert error.reason is Reason.MEMORY_RELEASED
    assert [list(report.released) for report in await wide(ResumeMemoryRequest())] == [[]] * wide.config.tp_size
    await load(wide, wide.config.model_path)
    await wide(ContinueGenerationRequest())
    assert await wide.tokens(PROMPT, 5) == expected


async def test_regions_that_the_engine_does_not_have_are_refused(wide: Stage) -> None:
    for request in (ReleaseMemoryRequest, ResumeMemoryRequest):
        error = await refusal(wide, request(tags=[KV, MEMORY_TAG_CUDA_GRAPH]))
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "tags[1]")
