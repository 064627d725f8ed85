"""Updates whose targets compare decode with prefill before they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fleet_steps import dirty, engines
from updating import abort, begin, commit, digest, join, refusal, version_of, write

from rlctl.contract.errors import Reason
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.coordinator_pb2 import GetFleetRequest, HealStageRequest
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, Operation

STAGED = {"apply": v.APPLY_MODE_STAGED}


async def update(fleet: InProcessFleet, decode_check: bool | None = None, **fields: object) -> Operation:
    options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT, decode_check=decode_check)
    plan = await begin(fleet, options=options, **fields)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    return await commit(fleet, plan, digest("w1"))


@pytest.mark.parametrize("fields", [{}, STAGED], ids=["in place", "staged"])
async def test_an_update_that_asks_for_the_check_says_that_it_was_made(fleet: InProcessFleet, fields: dict) -> None:
    operation = await update(fleet, decode_check=True, **fields)
    assert operation.state == OPERATION_STATE_OK
    assert [result.verification.decode for result in operation.stage_results] == [True, True]
    assert operation.verification.decode
    (model,) = (await fleet.stub.GetFleet(GetFleetRequest())).models
    assert model.verification.decode


@pytest.mark.parametrize("fields", [{}, STAGED], ids=["in place", "staged"])
async def test_stale_decode_is_not_published_although_the_bytes_are_right(fleet: InProcessFleet, fields: dict) -> None:
    for engine in engines(fleet):
        engine.stale_decode = "w0"
    operation = await update(fleet, decode_check=True, **fields)
    assert operation.state == OPERATION_STATE_FAILED
    for result in operation.stage_results:
        assert result.error.reason == "DECODE_MISMATCH"
        assert "decode and prefill differ by" in result.error.message
        assert result.state == common.STAGE_STATE_DIRTY
        assert not result.HasField("verification")
    assert version_of(fleet) == ("initial", 1)


async def test_one_stage_with_stale_decode_fails_alone(fleet: InProcessFleet) -> None:
    stale = next(engine for engine in engines(fleet) if engine.config.tp_size == 2)
    stale.stale_decode = "w0"
    operation = await update(fleet, decode_check=True)
    assert operation.state == OPERATION_STATE_FAILED
    reasons = {result.slot: result.error.reason for result in operation.stage_results}
    assert reasons["b"] == "DECODE_MISMATCH"
    assert reasons["a"] != "DECODE_MISMATCH"


@pytest.mark.parametrize(("cost_s", "made"), [(0.0, True), (3600.0, False)])
async def test_a_check_that_costs_little_is_made_unasked(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch, cost_s: float, made: bool
) -> None:
    monkeypatch.setattr(FakeEngine, "decode_check_s", cost_s)
    async with make_fleet(a=1, b=2) as fleet:
        operation = await update(fleet)
        assert operation.state == OPERATION_STATE_OK
        assert [result.verification.decode for result in operation.stage_results] == [made, made]
        operation = await update(fleet, decode_check=False)
        assert not operation.verification.decode


async def test_the_check_is_refused_at_begin_where_an_engine_makes_none(make_fleet: Callable) -> None:
    async with make_fleet(options={"opaque": "said"}, a=1) as fleet:
        error = await refusal(begin(fleet, options=v.UpdateOptions(decode_check=True, probe=None)))
        assert (error.reason, error.field) == (Reason.VERIFICATION_UNREACHABLE, "options.decode_check")
        assert "a cannot compute the decode check" in error.message


async def test_the_check_is_refused_without_a_cache_and_not_made_unasked(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "decode_check_s", 0.0)
    async with make_fleet(a=1) as fleet:
        await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_ABORT))
        await fleet.stub.ReleaseMemory(v.ReleaseMemoryRequest(tags=[common.MEMORY_TAG_KV_CACHE]))
        error = await refusal(begin(fleet, options=v.UpdateOptions(decode_check=True)))
        assert (error.reason, error.field) == (Reason.VERIFICATION_UNREACHABLE, "options.decode_check")
        assert "its KV cache is released" in error.message
        plan = await begin(fleet)
        await abort(fleet, plan)
        operation = await update(fleet)
        assert operation.state == OPERATION_STATE_OK
        assert not operation.verification.decode


async def test_decode_is_no_level_of_the_bytes(fleet: InProcessFleet) -> None:
    error = await refusal(begin(fleet, options=v.UpdateOptions(verify=common.VERIFICATION_LEVEL_DECODE)))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "options.verify")
    assert "decode_check" in error.message


@pytest.mark.parametrize(("wanted", "state"), [(None, OPERATION_STATE_OK), (True, OPERATION_STATE_FAILED)])
async def test_a_check_that_could_not_be_made_counts_only_where_it_was_asked_for(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch, wanted: bool | None, state: int
) -> None:
    def busy(engine: FakeEngine) -> v.CheckReport:
        raise Reason.DEADLINE_EXCEEDED.error("other requests kept the server")

    monkeypatch.setattr(FakeEngine, "decode_check_s", 0.0)
    monkeypatch.setattr(FakeEngine, "_decode_report", busy)
    async with make_fleet(a=1) as fleet:
        operation = await update(fleet, wanted)
        assert operation.state == state
        assert not operation.verification.decode
        if wanted:
            assert "decode could not be compared with prefill" in operation.stage_results[0].error.message


async def test_a_staged_update_makes_the_check_unasked_only_if_its_pause_hardly_grows(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "decode_check_s", 0.05)
    async with make_fleet(a=1) as fleet:
        plan = await begin(fleet, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT), **STAGED)
        await join(fleet, plan)
        await write(fleet, plan, "w1")
        await asyncio.sleep(0.6)  # the transfer, beside generation
        assert not (await commit(fleet, plan, digest("w1"))).verification.decode


async def test_a_heal_makes_the_check_that_the_version_has_passed(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], str]
) -> None:
    made: list[str] = []

    def report(engine: FakeEngine) -> v.CheckReport:
        made.append(engine.weights)
        return whole(engine)

    whole = FakeEngine._decode_report
    monkeypatch.setattr(FakeEngine, "_decode_report", report)
    async with make_fleet(a=1) as fleet:
        options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT, decode_check=True)
        request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), weight_version="step-1", options=options)
        assert (await fleet.stub.UpdateWeightsFromDisk(request)).verification.decode
        made.clear()
        await dirty(fleet)
        await fleet.stub.HealStage(HealStageRequest())
        assert len(made) == 1
