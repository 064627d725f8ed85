"""The coordinator's log says what an operator looks for: outcomes, refusals, damage, restarts."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
from updating import begin, commit, digest, join, refusal, write
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import coordinator_pb2 as c
from rlctl.v1 import verbs_pb2 as v


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlctl.coordinator")


async def test_an_update_with_its_version_and_time(fleet: InProcessFleet, caplog: pytest.LogCaptureFixture) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    await commit(fleet, plan, digest("w1"))
    line = rf"WeightUpdate {plan.update_id} of actor: OK in \d+\.\d\d s, 2 of 2 targets, step-1#2"
    assert re.search(line, caplog.text)


async def test_an_operation_that_failed_and_the_stages_that_it_left_dirty(
    fleet: InProcessFleet, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "flush_cache":
            raise Reason.ENGINE_FAILED.error("no\n  flush")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = fail
    await fleet.stub.FlushCache(v.FlushCacheRequest())
    (record,) = [record for record in caplog.records if record.message.startswith("FlushCache")]
    assert record.levelno == logging.WARNING
    assert re.search(r": FAILED in \d+\.\d\d s, 0 of 2 targets: \w+: .*no flush", record.message), record.message
    await fleet.stub.CheckWeights(v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS))
    await eventually(lambda: "a was READY, and is DIRTY" in caplog.text)


async def test_what_is_refused_and_again_only_once(fleet: InProcessFleet, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        await refusal(fleet.stub.HealStage(c.HealStageRequest(slots=["nobody"])))
    assert caplog.text.count("HealStage is refused: STAGE_NOT_FOUND") == 1


async def test_an_engine_that_is_started_again_and_a_rank_that_is_gone(
    make_fleet: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_fleet(a=1, b=1) as fleet:
        fleet.stages["b"]._engine.fail(Reason.ENGINE_FAILED.error("out of memory"))
        await eventually(lambda: "b: rank 0 is gone: out of memory" in caplog.text)
        await fleet.stages.pop("a").stop()
        await fleet.start_stage(fleet.specs[0])
        await eventually(lambda: f"a: incarnation 2 at {fleet.stages['a'].address}" in caplog.text)
