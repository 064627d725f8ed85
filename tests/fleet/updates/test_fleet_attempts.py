"""A target that is lost costs an attempt, whenever it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from journal_faults import full_disk
from updating import (
    abort,
    begin,
    commit,
    digest,
    fault,
    join,
    refusal,
    restart,
    retry,
    unreachable,
    version_of,
    weights,
    write,
)
from waiting import eventually

from rlctl.command_stream import commander
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.coordinator.fleet import stage_links
from rlctl.engine import Call
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.trainer.lead import _worth_retrying
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_PARTIAL
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse

_WRITE = "UpdateWeightsFromDistributed"


@pytest.mark.parametrize(
    ("lost_in", "pause"),
    [
        ("pause_generation", common.PAUSE_MODE_RETRACT),
        ("prepare_update", common.PAUSE_MODE_UNSPECIFIED),
        ("update_weights_from_distributed", common.PAUSE_MODE_UNSPECIFIED),
    ],
)
async def test_the_others_start_over_without_a_target_that_is_lost(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, lost_in: str, pause: common.PauseMode.ValueType
) -> None:
    # How much longer than its lease the lost one may serve, as far as the coordinator knows: it is waited for.
    monkeypatch.setattr(stage_links, "DRIFT_S", 0.1)
    monkeypatch.setattr(commander, "PING_EVERY_S", 0.02)  # leases run from the pongs
    async with make_fleet(a=1, b=1, c=2, lease_s=0.3) as fleet, AsyncExitStack() as away:

        async def lose(engine: FakeEngine, name: str, call: Call) -> None:
            if name == lost_in and engine.config.tp_size == 2:
                fake_engine.FAULTS.clear()
                await away.enter_async_context(unreachable(fleet, "c"))

        fake_engine.FAULTS[fleet.specs[0].model_path, 1] = lose
        plan = await begin(fleet, retries=1, options=v.UpdateOptions(quorum=2, pause=pause))
        await join(fleet, plan)
        failed = await write(fleet, plan, "w1")
        outcomes = {result.slot: result.outcome for result in failed.stage_results}
        assert outcomes["c"] in (common.OUTCOME_UNKNOWN, common.OUTCOME_NOT_SENT), outcomes
        if lost_in.startswith("update"):
            # What another source writes meanwhile has failed in the same way: its trainer may try again.
            assert (await write(fleet, plan, "late")).error.reason == "GROUP_FAILED"
        plan = await retry(fleet, plan)
        assert list(plan.lost) == ["c"]
        await join(fleet, plan)
        assert (await write(fleet, plan, "w2")).state == OPERATION_STATE_OK
        assert all(fleet.stage(slot).report.paused for slot in "ab")
        assert (await commit(fleet, plan, digest("w2"))).state == OPERATION_STATE_PARTIAL
        assert version_of(fleet) == ("step-1", 2)
        assert [fleet.stages[slot]._engine.weights for slot in "ab"] == ["w2", "w2"]
        assert [fleet.stage(slot).routable for slot in "ab"] == [True, True]


async def publish_without_b(fleet: InProcessFleet, plan: BeginWeightUpdateResponse) -> None:
    plan = await retry(fleet, plan)
    assert list(plan.lost) == ["b"]
    await join(fleet, plan)
    assert (await write(fleet, plan, "w2")).state == OPERATION_STATE_OK
    assert (await commit(fleet, plan, digest("w2"))).state == OPERATION_STATE_PARTIAL
    assert fleet.stage("a").routable


@pytest.mark.parametrize("pause", [common.PAUSE_MODE_RETRACT, common.PAUSE_MODE_UNSPECIFIED])
async def test_a_target_that_loses_a_rank_before_the_write_costs_an_attempt(
    make_fleet: Callable[..., Any], pause: common.PauseMode.ValueType
) -> None:
    """A prepare that the stage refuses after the loss does not hide that the outcome of its pause is not known."""
    lost_in = "pause_generation" if pause else "prepare_update"
    async with make_fleet(a=1, b=2) as fleet:
        follower = fleet.workers.pop(("b", 1))

        async def lose(engine: FakeEngine, name: str, call: Call) -> None:
            if name == lost_in and engine.config.tp_size == 2:
                fake_engine.FAULTS.clear()
                stopping.append(asyncio.create_task(follower.stop()))
                await asyncio.sleep(30)

        stopping: list[asyncio.Task[None]] = []
        fake_engine.FAULTS[fleet.specs[0].model_path, 1] = lose
        plan = await begin(fleet, retries=1, options=v.UpdateOptions(quorum=1, pause=pause))
        await join(fleet, plan)
        failed = await write(fleet, plan, "w1")
        outcomes = {result.slot: result.outcome for result in failed.stage_results}
        assert outcomes["b"] == common.OUTCOME_UNKNOWN, failed
        await publish_without_b(fleet, plan)
        await asyncio.gather(*stopping)


@pytest.mark.parametrize(
    "error",
    [
        Reason.LINK_LOST.error("the connection to the server broke", outcome=common.OUTCOME_UNKNOWN),
        Reason.UNREACHABLE.error("the server cannot be reached"),
    ],
    ids=["broken", "refused"],
)
@pytest.mark.parametrize(
    ("lost_in", "pause"),
    [
        ("pause_generation", common.PAUSE_MODE_RETRACT),
        ("prepare_update", common.PAUSE_MODE_UNSPECIFIED),
        ("update_weights_from_distributed", common.PAUSE_MODE_UNSPECIFIED),
    ],
)
async def test_a_target_whose_server_has_ended_costs_an_attempt_before_its_stage_notices(
    make_fleet: Callable[..., Any], lost_in: str, pause: common.PauseMode.ValueType, error: RlctlError
) -> None:
    async with make_fleet(a=1, b=2) as fleet:

        async def lose(engine: FakeEngine, name: str, call: Call) -> None:
            if name == lost_in and engine.config.tp_size == 2:
                raise error

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = lose
        plan = await begin(fleet, retries=1, options=v.UpdateOptions(quorum=1, pause=pause))
        await join(fleet, plan)
        failed = await write(fleet, plan, "w1")
        [told] = [result for result in failed.stage_results if result.slot == "b"]
        assert (told.outcome, told.error.reason) == (error.outcome, error.reason.name)
        assert _worth_retrying(OperationFailed(failed))
        await publish_without_b(fleet, plan)


async def test_a_target_that_has_lost_a_rank_since_the_begin_costs_an_attempt(make_fleet: Callable[..., Any]) -> None:
    async with make_fleet(a=1, b=2) as fleet:
        options = v.UpdateOptions(quorum=1, pause=common.PAUSE_MODE_RETRACT)
        plan = await begin(fleet, retries=1, options=options)
        await join(fleet, plan)
        await fleet.workers.pop(("b", 1)).stop()
        await eventually(lambda: fleet.server.coordinator.roster.slots["b"].dead_ranks() == [1])
        failed = await write(fleet, plan, "w1")
        [refused] = [result for result in failed.stage_results if result.slot == "b"]
        assert (refused.outcome, refused.error.reason) == (common.OUTCOME_REJECTED, "RANK_LOST")
        assert _worth_retrying(OperationFailed(failed))
        await publish_without_b(fleet, plan)


@pytest.mark.parametrize("lost_in", ["prepare_update", "update_weights_from_distributed"])
async def test_a_target_that_nobody_can_do_without_may_come_back(make_fleet: Callable[..., Any], lost_in: str) -> None:
    async with make_fleet(a=1, b=2) as fleet, AsyncExitStack() as away:

        async def lose(engine: FakeEngine, name: str, call: Call) -> None:
            if name == lost_in and engine.config.tp_size == 2:
                fake_engine.FAULTS.clear()
                await away.enter_async_context(unreachable(fleet, "b"))

        fake_engine.FAULTS[fleet.specs[0].model_path, 1] = lose
        plan = await begin(fleet, retries=1)
        await join(fleet, plan)
        assert (await write(fleet, plan, "w1")).state != OPERATION_STATE_OK
        retried = asyncio.ensure_future(retry(fleet, plan))
        await away.aclose()
        plan = await retried
        assert list(plan.lost) == []
        await join(fleet, plan)
        assert (await write(fleet, plan, "w2")).state == OPERATION_STATE_OK
        assert (await commit(fleet, plan, digest("w2"))).state == OPERATION_STATE_OK
        assert weights(fleet) == ["w2"] * 3
        assert all(fleet.stage(slot).routable for slot in "ab")


async def test_a_write_of_the_attempt_before_does_not_spoil_the_next_one(make_fleet: Callable[..., Any]) -> None:
    """It waited for its turn while the other attempt was planned."""
    async with make_fleet(a=1, b=1) as fleet:
        writing, failing = asyncio.Event(), asyncio.Event()

        async def fail(_: FakeEngine, name: str, __: Call) -> None:
            if name == "update_weights_from_distributed":
                fake_engine.FAULTS.clear()
                writing.set()
                await failing.wait()
                raise Reason.GROUP_FAILED.error("a source is gone")

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = fail
        plan = await begin(fleet, retries=1)
        await join(fleet, plan)
        first = asyncio.ensure_future(write(fleet, plan, "w1"))
        await writing.wait()
        retrying = asyncio.ensure_future(retry(fleet, plan))
        opened = fleet.server.coordinator.updates.get(plan.update_id)
        await eventually(opened.planning.locked)
        late = asyncio.ensure_future(write(fleet, plan, "late"))
        await eventually(lambda: len(fleet.server.coordinator.operations.newest_first(_WRITE, 0)) == 2)
        failing.set()
        await first
        plan = await retrying
        assert (await late).error.message.endswith("before attempt 2")
        await join(fleet, plan)
        assert (await write(fleet, plan, "w2")).state == OPERATION_STATE_OK
        assert (await commit(fleet, plan, digest("w2"))).state == OPERATION_STATE_OK


async def test_another_attempt_is_planned_once_as_often_as_was_asked_for_and_with_enough_targets(
    make_fleet: Callable[..., Any],
) -> None:
    async with make_fleet(a=1, b=2) as fleet:
        plan = await begin(fleet, retries=2)
        await join(fleet, plan)
        fault(fleet, 1, 2, "update_weights_from_distributed", Reason.GROUP_FAILED.error("broken"))
        assert (await write(fleet, plan, "w1")).state != OPERATION_STATE_OK
        fake_engine.FAULTS.clear()
        error = await refusal(retry(fleet, plan, 2))
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "failed_attempt")
        again = await retry(fleet, plan)
        assert (again.attempt, list(again.lost)) == (2, [])
        assert [group.group_name for group in again.groups] != [group.group_name for group in plan.groups]
        assert await retry(fleet, plan) == again, "another source has asked for it"
        last = await retry(fleet, again)
        assert last.attempt == 3
        assert (await refusal(retry(fleet, last))).reason is Reason.RETRIES_EXHAUSTED
        await join(fleet, last)
        assert (await write(fleet, last, "w2")).state == OPERATION_STATE_OK
        assert (await commit(fleet, last, digest("w2"))).state == OPERATION_STATE_OK

        plan = await begin(fleet, version="step-2", retries=1)
        await restart(fleet, "b")
        await fleet.until(lambda stages: len(stages) == 2)
        error = await refusal(retry(fleet, plan))
        assert error.reason is Reason.QUORUM_NOT_MET
        assert "gone: b" in error.message


async def test_what_targets_answered_counts_for_the_repeat_of_an_attempt_that_was_not_recorded(
    make_fleet: Callable[..., Any],
) -> None:
    async with make_fleet(a=1, b=2) as fleet:
        plan = await begin(fleet, retries=1, options=v.UpdateOptions(quorum=1, pause=common.PAUSE_MODE_RETRACT))
        await join(fleet, plan)
        unknown = Reason.ENGINE_FAILED.error("it says nothing", outcome=common.OUTCOME_UNKNOWN)
        fault(fleet, 1, 2, "update_weights_from_distributed", unknown)
        assert (await write(fleet, plan, "w1")).state != OPERATION_STATE_OK
        fake_engine.FAULTS.clear()
        async with full_disk(fleet, "model"):
            assert (await refusal(retry(fleet, plan))).reason is Reason.JOURNAL_FAILED
        assert (await write(fleet, plan, "w1")).error.reason == Reason.GROUP_FAILED.name
        assert list((await retry(fleet, plan)).lost) == ["b"]


async def test_a_retry_that_waits_while_the_update_ends_is_refused(make_fleet: Callable[..., Any]) -> None:
    async with make_fleet(a=1, b=1, heal=False) as fleet:
        coordinator = fleet.server.coordinator
        plan = await begin(fleet, retries=1, options=v.UpdateOptions(quorum=1))
        await join(fleet, plan)
        async with unreachable(fleet, "b"):
            async with coordinator.roster.publishing:
                waiting = asyncio.ensure_future(retry(fleet, plan))
                update = coordinator.updates.get(plan.update_id)
                await eventually(lambda: update.record.plan.attempt == 2)
                ended = await abort(fleet, plan)
                assert ended.error.reason == "CANCELLED"
            assert (await refusal(waiting)).reason is Reason.CANCELLED
        assert list(coordinator._journal.read("update")) == []
        assert [result.slot for result in coordinator.operations.get(plan.update_id).operation.stage_results] == []


async def test_an_attempt_that_could_not_be_recorded_is_planned_by_a_repeat(make_fleet: Callable[..., Any]) -> None:
    async with make_fleet(a=1, b=1, c=1, heal=False, lease_s=2.0) as fleet:
        options = v.UpdateOptions(quorum=2, pause=common.PAUSE_MODE_RETRACT)
        plan = await begin(fleet, retries=1, options=options)
        await join(fleet, plan)
        async with unreachable(fleet, "c"):
            async with full_disk(fleet, "model"):
                assert (await refusal(retry(fleet, plan))).reason is Reason.JOURNAL_FAILED
            again = await retry(fleet, plan)
            assert (again.attempt, list(again.lost)) == (2, ["c"])
            assert [target.slot for target in again.targets] == ["a", "b"]
            assert fleet.server.coordinator.roster.slots["c"].record.HasField("quarantine")
            await join(fleet, again)
            await write(fleet, again, "w1")
            operation = await commit(fleet, again, digest("w1"))
        assert operation.state == OPERATION_STATE_PARTIAL
        assert [result.slot for result in operation.stage_results] == ["a", "b", "c"]
