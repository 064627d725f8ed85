"""The checker says what the ranks hold: digests as SGLang-Omni computes them, and as the checkpoint has them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from torch_source import digest_of, load, prepare, tensors_of
from torch_stage import Stage

from rlctl.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import (
    CHECK_ACTION_COMPARE,
    CHECK_ACTION_RESET_TENSORS,
    CHECK_ACTION_SNAPSHOT,
    AbortUpdateRequest,
    CheckReport,
    CheckWeightsRequest,
    ContinueGenerationRequest,
)
from rlctl.weights.digest import combine, tensor_digest


@pytest.fixture(autouse=True)
async def as_before(stage: Stage) -> AsyncIterator[None]:
    yield
    await load(stage, stage.config.model_path, abort_all_requests=True)


async def check(stage: Stage, action: int = 0, **fields: object) -> list[CheckReport]:
    return await stage(CheckWeightsRequest(action=action, **fields))


async def test_digests_of_every_rank_and_of_the_model(stage: Stage) -> None:
    path = stage.config.model_path
    tensors = tensors_of(path)
    reports = await check(stage, per_tensor=True)
    module = stage.engine._rank.model.module
    local = {n: tensor_digest(n, t) for n, t in [*module.named_parameters(), *module.named_buffers()]}
    assert {t.name: t.sha256 for t in reports[0].tensors} == local
    assert (reports[0].rank_digest, reports[0].tensor_count) == (combine(local), len(local))
    assert {report.model_digest for report in reports} == {digest_of(path)}
    hashed = {t.name: t for report in reports for t in report.model_tensors}
    assert sum(len(report.model_tensors) for report in reports) == len(tensors), "each is in one share"
    for name, tensor in tensors.items():
        entry = hashed[name]
        assert entry.sha256 == tensor_digest(name, tensor)
        assert (entry.dtype, tuple(entry.shape.dims)) == (str(tensor.dtype), tuple(tensor.shape))
    assert all(report.elapsed.ToNanoseconds() > 0 and not report.inconsistent for report in reports)
    if len(reports) == 2:
        assert reports[0].rank_digest != reports[1].rank_digest


async def test_digests_are_equal_whatever_the_layout(stage: Stage) -> None:
    (report, *_) = await check(stage)
    assert report.model_digest == digest_of(stage.config.model_path)
    assert not report.tensors
    (report, *_) = await check(stage, model_digest=False)
    assert report.model_digest == ""
    (report, *_) = await check(stage, skip_tensors=["mlp", "inv_freq"], per_tensor=True)
    assert not [t.name for t in [*report.tensors, *report.model_tensors] if "mlp" in t.name or "inv_freq" in t.name]


async def test_compare_names_what_has_changed_since_the_snapshot(stage: Stage, checkpoints) -> None:
    await check(stage, CHECK_ACTION_SNAPSHOT)
    for report in await check(stage, CHECK_ACTION_COMPARE):
        assert (report.matched, list(report.changed)) == (report.tensor_count, [])
    await load(stage, checkpoints(seed=1))
    for report in await check(stage, CHECK_ACTION_COMPARE, skip_tensors=["norm"]):
        unchanged = ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
        assert report.matched == len(unchanged)
        assert len(report.changed) == report.tensor_count - len(unchanged)
        assert not report.missing
        assert not report.unexpected
        assert "lm_head.weight" in report.changed


async def test_reset_scrambles_every_tensor_and_only_a_full_update_helps(stage: Stage) -> None:
    await check(stage, CHECK_ACTION_SNAPSHOT)
    for report in await check(stage, CHECK_ACTION_RESET_TENSORS):
        assert report.model_digest != digest_of(stage.config.model_path)
    for report in await check(stage, CHECK_ACTION_COMPARE, skip_tensors=["rotary"]):
        assert report.matched == 0
    with pytest.raises(RlctlError) as caught:
        await stage(ContinueGenerationRequest())
    assert caught.value.reason is Reason.WEIGHTS_DIRTY
    await load(stage, stage.config.model_path)
    for report in await check(stage, CHECK_ACTION_COMPARE):
        assert report.matched == report.tensor_count
    assert len(await stage.tokens([1, 2, 3], 3)) == 3


async def test_reset_is_refused_under_requests_and_inside_an_update(stage: Stage) -> None:
    async for _ in stage.stream([1, 2, 3], max_new_tokens=250, ignore_eos=True):
        with pytest.raises(RlctlError) as caught:
            await check(stage, CHECK_ACTION_RESET_TENSORS)
        assert caught.value.reason is Reason.ACTIVE_REQUESTS
        break
    update = await prepare(stage, abort_all_requests=True)
    with pytest.raises(RlctlError) as caught:
        await check(stage, CHECK_ACTION_RESET_TENSORS)
    assert caught.value.reason is Reason.UPDATE_IN_PROGRESS
    await stage(AbortUpdateRequest(), update=update)


async def test_an_expected_digest_is_compared(stage: Stage) -> None:
    expected = digest_of(stage.config.model_path)
    await check(stage, expected_digest=expected)
    await check(stage, CHECK_ACTION_COMPARE, expected_digest=expected)
    with pytest.raises(RlctlError) as caught:
        await check(stage, expected_digest="0" * 64)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert caught.value.metadata == {"expected": "0" * 64, "found": expected}


async def test_there_must_be_something_to_compare_with(checkpoints) -> None:
    fresh = Stage(checkpoints())
    await fresh.start()
    try:
        with pytest.raises(RlctlError) as caught:
            await check(fresh, CHECK_ACTION_COMPARE)
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "action")
    finally:
        await fresh.stop()


async def test_replicas_that_differ_are_named(checkpoints, follower) -> None:
    stage = Stage(checkpoints(), follower)
    await stage.start()
    try:
        norm = stage.engine._rank.model.module.model.norm.weight
        norm.data[0] += 1
        for report in await check(stage):
            assert list(report.inconsistent) == ["model.norm.weight"]
            assert report.model_digest != digest_of(stage.config.model_path)
    finally:
        await stage.stop()
