"""SendWeights: an engine that another one is healed from goes on generating."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from torch_source import digest_of, prepare, tensors_of
from torch_stage import Stage

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, PAUSE_MODE_RETRACT
from rlctl.v1.verbs_pb2 import (
    AbortUpdateRequest,
    CheckWeightsRequest,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    DestroyWeightsUpdateGroupRequest,
    InitWeightsUpdateGroupRequest,
    PauseGenerationRequest,
    SendWeightsRequest,
    TensorBucket,
    UpdateWeightsFromDistributedRequest,
)
from rlctl.weights.group.process_group import GroupStore
from rlctl.weights.tensor.buckets import Bucket, to_proto
from rlctl.weights.tensor.tensors import TensorMeta

GROUP = "heal"


@pytest.fixture
async def other(checkpoints) -> AsyncIterator[Stage]:
    """An engine of one rank with other weights."""
    stage = Stage(checkpoints(seed=1))
    await stage.start()
    yield stage
    await stage.stop()


@pytest.fixture
async def twin(stage: Stage, checkpoints, follower) -> AsyncIterator[Stage]:
    """An engine of as many ranks as the stage, with other weights."""
    twin = Stage(checkpoints(seed=1), follower if stage.config.tp_size == 2 else None)
    await twin.start()
    yield twin
    await twin.stop()


@pytest.fixture
async def group(stage: Stage, other: Stage) -> AsyncIterator[None]:
    """Rank 0 of the stage, and the other stage."""
    async with joined(stage, other, num_ranks=1):
        yield


@asynccontextmanager
async def joined(stage: Stage, other: Stage, **fields: Any) -> AsyncIterator[None]:
    store = GroupStore()
    host, port = store.local_address
    joins = [
        InitWeightsUpdateGroupRequest(
            master_address=host,
            master_port=port,
            world_size=2,
            rank_offset=offset,
            group_name=GROUP,
            backend="gloo",
            **fields,
        )
        for offset in (0, 1)
    ]
    await asyncio.gather(stage(joins[0]), other(joins[1]))
    yield
    for each in (stage, other):
        await each.ranks(DestroyWeightsUpdateGroupRequest(group_name=GROUP))
    store.close()


def bucket(stage: Stage, *, parts: bool = False) -> TensorBucket:
    metas = [TensorMeta.of(name, tensor) for name, tensor in tensors_of(stage.config.model_path).items()]
    return to_proto(Bucket(0, metas, flattened=False, parts=parts))


async def test_it_generates_while_it_sends(stage: Stage, other: Stage, group: None) -> None:
    buckets = [bucket(stage)]
    sending = asyncio.create_task(stage(SendWeightsRequest(group_name=GROUP, buckets=buckets)))
    # Nobody takes anything in yet, so the first tensor is on its way all the time.
    assert len(await stage.tokens([1, 2, 3], 5)) == 5
    assert not sending.done()
    update = await prepare(other)
    await other(UpdateWeightsFromDistributedRequest(group_name=GROUP, buckets=buckets), update=update)
    reports = await sending
    assert reports[0].tensors == len(buckets[0].names)
    await other(CommitUpdateRequest(), update=update)
    (held,) = await other(CheckWeightsRequest())
    assert held.model_digest == digest_of(stage.config.model_path)


async def test_what_is_sent_is_one_version_or_the_sender_says_so(
    stage: Stage,
    other: Stage,
    group: None,
) -> None:
    sending = asyncio.create_task(stage.ranks(SendWeightsRequest(group_name=GROUP, buckets=[bucket(stage)])))
    assert len(await stage.tokens([1, 2, 3], 5)) == 5
    update = await prepare(stage)
    await stage.ranks(DestroyWeightsUpdateGroupRequest(group_name=GROUP))
    answers = await sending
    assert all(isinstance(answer, RlctlError) for answer in answers)
    assert {answer.outcome for answer in answers} == {OUTCOME_REJECTED}
    assert {answer.reason for answer in answers} <= {Reason.UPDATE_IN_PROGRESS, Reason.GROUP_FAILED}
    await stage(AbortUpdateRequest(), update=update)
    assert len(await stage.tokens([1, 2, 3], 2)) == 2


@pytest.mark.parametrize("paused", [False, True], ids=["beside-the-steps", "at-rest"])
async def test_a_receiver_that_leaves_costs_the_sender_nothing(
    stage: Stage, other: Stage, group: None, paused: bool
) -> None:
    if paused:
        await stage(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    sending = asyncio.create_task(stage.ranks(SendWeightsRequest(group_name=GROUP, buckets=[bucket(stage)])))
    await asyncio.sleep(0.2)  # nobody takes anything in, so the first tensor is on its way
    await other.ranks(DestroyWeightsUpdateGroupRequest(group_name=GROUP))
    assert {(answer.reason, answer.outcome) for answer in await sending} == {(Reason.GROUP_FAILED, OUTCOME_REJECTED)}
    for held in await stage(CheckWeightsRequest()):
        assert held.model_digest == digest_of(stage.config.model_path)
    if paused:
        await stage(ContinueGenerationRequest())
    assert len(await stage.tokens([1, 2, 3], 2)) == 2
    for held in await stage(CheckWeightsRequest()):
        assert held.model_digest == digest_of(stage.config.model_path), "beside the steps too"


async def test_ranks_that_hold_the_same_parts_send_them_to_each_other(stage: Stage, twin: Stage) -> None:
    buckets = [bucket(stage, parts=True)]
    async with joined(stage, twin, paired=True):
        sending = asyncio.create_task(stage(SendWeightsRequest(group_name=GROUP, buckets=buckets)))
        assert len(await stage.tokens([1, 2, 3], 5)) == 5
        update = await prepare(twin)
        reports = await twin(UpdateWeightsFromDistributedRequest(group_name=GROUP, buckets=buckets), update=update)
        assert [report.tensors for report in await sending] == [len(buckets[0].names)] * len(reports)
    total = sum(tensor.nbytes for tensor in tensors_of(stage.config.model_path).values())
    assert all((report.bytes_received == total) == (len(reports) == 1) for report in reports), "just their parts"
    await twin(CommitUpdateRequest(), update=update)
    for held in await twin(CheckWeightsRequest()):
        assert held.model_digest == digest_of(stage.config.model_path)


async def test_stages_say_whether_their_ranks_hold_the_same_parts(stage: Stage, checkpoints) -> None:
    others = Stage(checkpoints(seed=1)), Stage(checkpoints("qwen3", seed=1))
    said = [(await each.start()).layout.shards_sha256 for each in others]
    for each in others:
        await each.stop()
    mine = stage.info.layout.shards_sha256
    assert (mine == said[0]) == (stage.config.tp_size == 1)
    assert said[1] not in (mine, said[0])
