"""Rollouts through a fleet of fake engines, whose tokens are numbers that go on from the last one of the prompt."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from updating import restart, unreachable
from waiting import eventually

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.rollout import dispatch
from rlctl.rollout.continuation import begin
from rlctl.rollout.rollout import Place
from rlctl.rollout.sample import RolloutFailed, RolloutSample
from rlctl.sdk import aio
from rlctl.sdk.aio import AsyncFleet
from rlctl.stage.serving_state import Serving
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as r
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.fleet_pb2 import FLEET_EVENT_KIND_SNAPSHOT, Model, Stage
from rlctl.v1.results_pb2 import OPERATION_STATE_OK

LONG = 400


@pytest.fixture
async def client(fleet: InProcessFleet) -> AsyncIterator[AsyncFleet]:
    async with await aio.connect(fleet.server.address) as client:
        yield client


def engine(fleet: InProcessFleet, slot: str) -> Any:
    return fleet.stages[slot]._engine


def running(fleet: InProcessFleet) -> int:
    return sum(len(engine(fleet, slot)._running) for slot in fleet.stages)


async def begun(fleet: InProcessFleet, count: int = 1) -> None:
    """Samples run, and the caller has some of their tokens."""
    await eventually(lambda: running(fleet) >= count)
    await asyncio.sleep(0.05)


async def new_weights(fleet: InProcessFleet, path: str) -> None:
    """A whole update that cuts what runs."""
    options = v.UpdateOptions(pause=common.PAUSE_MODE_ABORT)
    operation = await fleet.stub.UpdateWeightsFromDisk(v.UpdateWeightsFromDiskRequest(model_path=path, options=options))
    assert operation.state == OPERATION_STATE_OK, operation.error


def all_routable(stages: Sequence[Stage]) -> bool:
    return all(stage.routable for stage in stages)


def sequences(sample: RolloutSample) -> list[int]:
    return [version.sequence for version in sample.versions if version is not None]


async def test_samples_of_a_prompt_come_with_tokens_logprobs_and_versions(client: AsyncFleet) -> None:
    groups = await client.rollout("actor").generate_batch([[5], [50]], n=3, max_new_tokens=4)
    assert [[sample.output_ids for sample in group] for group in groups] == [
        [[6, 7, 8, 9]] * 3,
        [[51, 52, 53, 54]] * 3,
    ]
    samples = [sample for group in groups for sample in group]
    assert [s.index for s in samples] == [0, 1, 2, 0, 1, 2]
    assert [len({s.group for s in group}) for group in (*groups, samples)] == [1, 1, 2]
    assert all(s.finished and s.finish == "length" and s.staleness == 0 for s in samples)
    assert all(s.logprobs == [-1.0] * 4 and sequences(s) == [1] * 4 for s in samples)
    assert len({s.session_id for s in samples}) == 6
    assert Counter(part.slot for s in samples for part in s.parts) == {"a": 3, "b": 3}


async def test_a_sample_that_an_update_cuts_goes_on_under_the_new_version(
    client: AsyncFleet, fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    rollout = client.rollout("actor")
    generating = asyncio.create_task(rollout.generate("x", n=4, max_new_tokens=LONG))
    await begun(fleet, 4)
    await new_weights(fleet, checkpoint("two"))
    for sample in await generating:
        assert sample.output_ids == list(range(LONG)), "nothing twice, nothing lost"
        assert len(sample.logprobs) == LONG
        found = sequences(sample)
        assert found == sorted(found)
        assert (found[0], found[-1], len(found)) == (1, 2, LONG)
        assert sample.finish == "length"
        assert (sample.latest, sample.staleness) == (2, 1)
    assert rollout.latest == 2


async def test_a_sample_that_is_cut_is_returned_on_request_and_taken_up_again(
    client: AsyncFleet, fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    rollout = client.rollout("actor", resume="return")
    generating = asyncio.create_task(rollout.generate([9], n=2, max_new_tokens=LONG))
    await begun(fleet, 2)
    await new_weights(fleet, checkpoint("two"))
    cut = await generating
    for sample in cut:
        assert not sample.finished
        assert (sample.finish, sample.error) == ("abort", None)
        assert 0 < len(sample.output_ids) < LONG
        assert set(sequences(sample)) == {1}
    whole = await rollout.resume(cut, min_version=2)
    for before, after in zip(cut, whole, strict=True):
        assert after.output_ids == list(range(10, 10 + LONG))
        assert sequences(after) == [1] * len(before.output_ids) + [2] * (LONG - len(before.output_ids))
    assert await rollout.resume(whole) == whole, "a finished one stays what it is"


async def test_the_long_tail_is_stopped_and_resumed_later(client: AsyncFleet, fleet: InProcessFleet) -> None:
    rollout = client.rollout("actor")
    short: list[Any] = [[1], [2]]
    finished, rest = await rollout.generate_until(2, [*short, [3], [4]], max_new_tokens=100)
    assert (len(finished) >= 2, len(finished) + len(rest)) == (True, 4)
    assert not running(fleet), "what was stopped has ended at its engine"
    # One at a time: the second runs when the first has finished, the others have not begun.
    narrow = client.rollout("actor", max_inflight_samples=1)
    finished, rest = await narrow.generate_until(1, [[1], [2], [3], [4]], max_new_tokens=100)
    assert [sample.output_ids for sample in finished] == [list(range(2, 102))]
    assert [len(sample.output_ids) for sample in rest][1:] == [0, 0]
    again, none = await rollout.generate_until(len(rest), rest)
    assert not none
    assert [sample.output_ids for sample in again] == [list(range(i, i + 100)) for i in (3, 4, 5)]
    with pytest.raises(RlctlError, match="from 1 to 1") as caught:
        await rollout.generate_until(2, [[1]])
    assert caught.value.field == "count"


async def test_no_more_samples_are_in_flight_than_was_said(client: AsyncFleet, fleet: InProcessFleet) -> None:
    rollout = client.rollout("actor", max_inflight_samples=3)
    most = 0
    generating = asyncio.create_task(rollout.generate_batch([[0]] * 4, n=3, max_new_tokens=20))
    while not generating.done():
        most = max(most, running(fleet))
        await asyncio.sleep(0.001)
    assert sum(len(group) for group in await generating) == 12
    assert most == 3
    await client.pause_generation()
    waiting = asyncio.create_task(rollout.generate([0], n=3, timeout_s=30))
    await asyncio.sleep(0.05)
    with pytest.raises(RlctlError, match=r"max_inflight_samples=3 within 0\.2 s") as caught:
        await rollout.generate([0], timeout_s=0.2)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await client.continue_generation()
    assert await rollout.generate([0], max_new_tokens=1), "what was cancelled holds no place"


async def test_a_wait_for_a_place_is_called_so_though_no_version_is_known(
    client: AsyncFleet, fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    rollout = client.rollout("", max_inflight_samples=1)
    holding = asyncio.create_task(rollout.generate([0], max_new_tokens=LONG * 10))
    await begun(fleet)
    fleet.specs.append(StageSpec("critic", checkpoint("early"), model="critic"))
    await fleet.start_stage(fleet.specs[-1])
    await eventually(lambda: not rollout.latest)  # of several models, none is meant
    with pytest.raises(RlctlError, match=r"there was no place among max_inflight_samples=1 within 0\.2 s"):
        await rollout.generate([0], timeout_s=0.2)
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)


async def test_a_view_that_comes_after_the_deadline_is_named_as_the_cause(
    client: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = client.rollout("actor")
    view = rollout._lines.view
    reported = view.reported

    async def late() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await reported()

    monkeypatch.setattr(view, "reported", late)
    with pytest.raises(RlctlError, match=r"the coordinator sent no view of the fleet within 0\.2 s") as caught:
        await rollout.generate([0], timeout_s=0.2)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED


async def test_samples_of_a_stage_that_dies_go_on_elsewhere(client: AsyncFleet, fleet: InProcessFleet) -> None:
    rollout = client.rollout("actor")
    generating = asyncio.create_task(rollout.generate("x", n=6, max_new_tokens=LONG))
    await begun(fleet, 6)
    dying = fleet.stages["a"]
    await dying._rollout_loop.acall(dying._rollout._server.stop(0))
    samples = await generating
    assert all(sample.output_ids == list(range(LONG)) for sample in samples)
    assert Counter(tuple(part.slot for part in sample.parts) for sample in samples) == {("a", "b"): 3, ("b",): 3}
    moved = next(sample for sample in samples if len(sample.parts) == 2)
    assert moved.parts[1].start > 0


async def test_a_stage_that_is_gone_and_says_nothing_is_not_waited_for(
    client: AsyncFleet, fleet: InProcessFleet
) -> None:
    engine(fleet, "a")._pace = 60.0  # it stands still, its connection does not break
    rollout = client.rollout("actor")
    generating = asyncio.create_task(rollout.generate([0], n=2, max_new_tokens=5))
    await eventually(lambda: running(fleet) and engine(fleet, "a")._running)
    async with unreachable(fleet, "a"), asyncio.timeout(10):
        samples = await generating
    assert all(sample.output_ids == [1, 2, 3, 4, 5] for sample in samples)
    assert {part.slot for sample in samples for part in sample.parts[-1:]} == {"b"}


async def test_a_sample_that_fails_everywhere_ends_with_what_it_has(
    client: AsyncFleet, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    async def break_down(request: r.GenerateRequest) -> AsyncIterator[r.GenerateResponse]:
        tried.append(request)
        last = request.input_ids.ids[-1]
        sample = r.Sample(output_ids=[last + 1], completion_tokens=1)
        sample.output_logprobs.add(token_id=last + 1, logprob=-1.0)
        yield r.GenerateResponse(samples=[sample])
        raise Reason.ENGINE_FAILED.error("this prompt breaks it")

    for slot in "ab":
        monkeypatch.setattr(engine(fleet, slot), "generate", break_down)
    with pytest.raises(RolloutFailed, match="1 of 1 samples were cut: this prompt breaks it") as caught:
        await client.rollout("actor", retries=2).generate([0], max_new_tokens=9)
    assert len(tried) == 3
    assert caught.value.reason is Reason.ENGINE_FAILED
    (sample,) = caught.value.samples
    assert sample.output_ids == [1, 2, 3]
    assert sample.staleness is None, "the engine never said at which version"
    (kept,) = await client.rollout("actor", retries=0, resume="return").generate([0], max_new_tokens=9)
    assert kept.error is not None
    assert (kept.output_ids, kept.error.reason) == ([1], Reason.ENGINE_FAILED)


async def test_a_sample_that_fails_where_it_was_preferred_goes_elsewhere(
    client: AsyncFleet, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: r.GenerateRequest) -> AsyncIterator[r.GenerateResponse]:
        raise Reason.ENGINE_FAILED.error("it is broken")
        yield

    monkeypatch.setattr(engine(fleet, "a"), "generate", broken)
    request = r.GenerateRequest(text="x", sampling_params=r.SamplingParams(max_new_tokens=2))
    sample = await client.rollout("actor").complete(begin(request), place=Place("a", only=False))
    assert sample.finished
    assert [part.slot for part in sample.parts] == ["b"]


async def test_requests_wait_out_a_pause_within_their_deadline_and_make_no_storm(
    client: AsyncFleet, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = client.rollout("actor")
    await rollout.generate([0], max_new_tokens=1)
    asked = Counter[str]()
    refuse = Serving.refuse

    def counted(serving: Serving, *args: Any, **fields: Any) -> None:
        asked[serving.slot] += 1
        refuse(serving, *args, **fields)

    monkeypatch.setattr(Serving, "refuse", counted)
    await client.pause_generation()
    waiting = [asyncio.create_task(rollout.generate([0], max_new_tokens=2)) for _ in range(100)]
    with pytest.raises(RlctlError, match="a PAUSED, b PAUSED") as caught:
        await rollout.generate([0], timeout_s=0.5)
    assert caught.value.reason is Reason.NO_ROUTABLE_STAGE
    during = asked.total()
    await client.continue_generation()
    done = await asyncio.gather(*waiting)
    assert all(sample.output_ids == [1, 2] for (sample,) in done)
    assert during <= 4
    assert asked.total() - during <= 150


async def test_a_wait_that_takes_long_is_a_warning_which_every_script_shows(
    client: AsyncFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for all requests that wait, after it was told for those who look at the log."""
    monkeypatch.setattr(dispatch, "TELL_S", 0.02)
    monkeypatch.setattr(dispatch, "WARN_S", 0.2)
    caplog.set_level(logging.INFO, dispatch.log.name)
    await client.pause_generation()
    rollout = client.rollout("actor")
    ended = await asyncio.gather(*(rollout.generate([0], timeout_s=0.6) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(error, RlctlError) for error in ended)
    said = "waiting for a routable stage: a PAUSED, b PAUSED"
    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == dispatch.log.name]
    assert told == [("INFO", said), ("WARNING", said)]


async def test_a_least_version_is_waited_for(
    client: AsyncFleet, fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    rollout = client.rollout("actor", admission="any")
    with pytest.raises(RlctlError, match="a at version 1 of 2, b at version 1 of 2"):
        await rollout.generate([0], min_version=2, timeout_s=0.2)
    waiting = asyncio.create_task(rollout.generate([0], min_version=2, max_new_tokens=2))
    await asyncio.sleep(0.05)
    await new_weights(fleet, checkpoint("two"))
    assert [sequences(sample) for sample in await waiting] == [[2, 2]]


async def test_a_session_stays_at_one_stage_and_may_end(client: AsyncFleet) -> None:
    rollout = client.rollout("actor", policy="consistent_hashing")
    turns = [await rollout.generate([0], session_id="talk", max_new_tokens=1) for _ in range(6)]
    assert len({sample.parts[0].slot for (sample,) in turns}) == 1
    sessions = rollout._router._policy.sessions  # type: ignore[attr-defined]
    assert sum(sessions.count.values()) == 1
    await rollout.generate([0], n=5, max_new_tokens=1)
    assert sum(sessions.count.values()) == 1, "a session that was made for a sample ends with it"
    await rollout.finish_session("talk")
    assert sum(sessions.count.values()) == 0


async def test_a_restarted_stage_takes_samples_again(client: AsyncFleet, fleet: InProcessFleet) -> None:
    rollout = client.rollout("actor")
    await rollout.generate([0], n=2, max_new_tokens=1)
    await restart(fleet, "a")
    await fleet.until(all_routable)
    await eventually(lambda: all(stage.routable for stage in rollout._lines.view.stages))
    samples = await rollout.generate([0], n=4, max_new_tokens=1)
    assert Counter(sample.parts[0].slot for sample in samples) == {"a": 2, "b": 2}
    assert {(part.slot, part.incarnation) for s in samples for part in s.parts} == {("a", 2), ("b", 1)}


async def test_whether_a_stage_is_well_is_never_asked_by_generating(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that would hang at every request joins, keeps its lease, is updated and reports its loads."""
    asked: list[r.GenerateRequest] = []

    async def hang(_engine: FakeEngine, request: r.GenerateRequest) -> AsyncIterator[r.GenerateResponse]:
        asked.append(request)
        await asyncio.Event().wait()
        yield r.GenerateResponse()

    monkeypatch.setattr(FakeEngine, "generate", hang)
    async with make_fleet(a=1, lease_s=3.5) as fleet, await aio.connect(fleet.server.address) as client:
        await fleet.until(all_routable)
        leased_until = asyncio.get_running_loop().time() + 4.0
        while asyncio.get_running_loop().time() < leased_until:
            for request in (v.GetLoadsRequest(), v.GetServerInfoRequest(), v.GetModelInfoRequest()):
                assert (await client.call(request)).state == OPERATION_STATE_OK
        await client.pause_generation()
        await client.continue_generation()
        await fleet.until(all_routable)
        assert not asked
        generating = asyncio.create_task(client.generate([0], max_new_tokens=1))
        await eventually(lambda: asked)
        generating.cancel()


async def test_samples_that_can_be_gone_through_once_are_not_lost(client: AsyncFleet) -> None:
    rollout = client.rollout("actor")
    assert [len(group) for group in await rollout.generate_batch(([i] for i in range(3)), n=2, max_new_tokens=1)] == (
        [2] * 3
    )
    narrow = client.rollout("actor", max_inflight_samples=1)
    _, rest = await narrow.generate_until(1, ([i] for i in range(3)), max_new_tokens=50)
    assert rest
    resumed = await rollout.resume(sample for sample in rest)
    assert [len(sample.output_ids) for sample in resumed] == [50] * len(rest)
    finished, none = await rollout.generate_until(len(rest), iter(rest))
    assert (len(finished), none) == (len(rest), [])


async def test_a_finished_sample_does_not_go_on_beyond_its_end(
    client: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = FakeEngine.generate

    async def stopping(engine: FakeEngine, request: r.GenerateRequest) -> AsyncIterator[r.GenerateResponse]:
        async with aclosing(generate(engine, request)) as parts:
            async for part in parts:
                for sample in part.samples:
                    if 7 in sample.output_ids:
                        sample.finish_reason.type = r.FINISH_TYPE_STOP
                yield part
                if any(sample.finish_reason.type for sample in part.samples):
                    return

    monkeypatch.setattr(FakeEngine, "generate", stopping)
    rollout = client.rollout("actor")
    (ended,) = await rollout.generate([5], max_new_tokens=50)
    assert (ended.finish, ended.output_ids) == ("stop", [6, 7])
    finished, rest = await rollout.generate_until(2, [ended, [5]], max_new_tokens=50)
    assert ([sample.output_ids for sample in finished], rest) == ([[6, 7]] * 2, [])
    assert finished[0] == ended
    assert await rollout.generate_until(1, [ended]) == ([ended], [])
    assert await rollout.generate_until(1, [ended, ended]) == ([ended, ended], [])


async def test_a_sample_that_cannot_go_on_is_refused_where_cut_ones_are_returned(
    client: AsyncFleet, fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    """Whoever resumes until all have finished would do so for ever."""
    rollout = client.rollout("actor", resume="return")
    # Far more tokens than come before the update, also on a busy machine.
    generating = asyncio.create_task(rollout.generate([0], presence_penalty=1.0, max_new_tokens=100 * LONG))
    await begun(fleet)
    await new_weights(fleet, checkpoint("two"))
    (cut,) = await generating
    assert (bool(cut.output_ids), cut.finish) == (True, "abort")
    for again in (rollout.resume([cut]), rollout.generate_until(1, [cut])):
        with pytest.raises(RlctlError) as caught:
            await again
        assert (caught.value.reason, caught.value.field) == (
            Reason.UNSUPPORTED,
            "sampling_params.presence_penalty",
        )


async def test_a_sample_that_cannot_go_on_names_what_cut_it(
    client: AsyncFleet, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(request: r.GenerateRequest) -> AsyncIterator[r.GenerateResponse]:
        yield r.GenerateResponse(samples=[r.Sample(output_ids=[7], text="7", completion_tokens=1)])
        raise Reason.ENGINE_FAILED.error("the server is gone")

    for slot in fleet.stages:
        monkeypatch.setattr(engine(fleet, slot), "generate", generate)
    rollout = client.rollout("actor", resume="return")
    [penalised] = await rollout.generate([5], frequency_penalty=0.5)
    [untokenised] = await rollout.generate("5")
    for sample in (penalised, untokenised):
        assert sample.output_ids == [7]
        assert sample.error is not None
        assert (sample.error.reason, sample.error.message) == (Reason.ENGINE_FAILED, "the server is gone")


async def test_a_version_that_a_stage_serves_is_known_though_the_news_of_it_are_late(
    client: AsyncFleet, fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample is fresher than the latest version, nor does one that spans two seem to be of one age."""
    rollout = client.rollout("actor")
    (before,) = await rollout.generate([0], max_new_tokens=2)
    monkeypatch.setattr(client._lines.view, "_take", lambda _event: None)
    await new_weights(fleet, checkpoint("two"))
    (after,) = await rollout.generate([0], max_new_tokens=2)
    assert (sequences(before), sequences(after), rollout.latest) == ([1, 1], [2, 2], 1)
    assert (after.latest, after.staleness, after.staleness_at(rollout.latest)) == (2, 0, 0)
    cut = dataclasses.replace(before, whole=r.Sample.FromString(before.whole.SerializeToString()))
    cut.whole.finish_reason.type = r.FINISH_TYPE_ABORT
    cut.whole.output_ids.extend([3])
    cut.whole.versions.add(version=after.whole.versions[0].version, start=2, end=3)
    assert (cut.staleness_at(rollout.latest), cut.staleness_at(3)) == (1, 2)


async def test_the_latest_version_is_never_gone_while_news_are_taken_in(client: AsyncFleet) -> None:
    """Blocking code looks at it from its own thread, when it likes."""
    rollout = client.rollout("actor")
    await rollout.generate([0], max_new_tokens=1)
    seen = []

    class News:
        kind = FLEET_EVENT_KIND_SNAPSHOT
        revision = 9

        @property
        def fleet(self) -> News:
            seen.append((rollout.latest, len(client._lines.view.stages)))
            return self

        @property
        def models(self) -> list[Model]:
            seen.append((rollout.latest, len(client._lines.view.stages)))
            return models

        stages = client._lines.view.stages

    models = client._lines.view.models
    client._lines.view._take(News())  # type: ignore[arg-type]
    assert set(seen) == {(1, 2)}
    assert (rollout.latest, len(client._lines.view.stages)) == (1, 2)


async def test_the_only_model_need_not_be_named_and_is_bounded_all_the_same(
    client: AsyncFleet, fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = client.rollout("")
    (sample,) = await rollout.generate([0], max_new_tokens=2)
    assert (sample.latest, sample.staleness, rollout.latest) == (1, 0, 1)
    await new_weights(fleet, checkpoint("two"))
    await eventually(lambda: rollout.latest == 2)
    floors = []
    refuse = Serving.refuse

    def noted(serving: Serving, *args: Any, **fields: Any) -> None:
        floors.append(fields["min_version_seq"])
        refuse(serving, *args, **fields)

    monkeypatch.setattr(Serving, "refuse", noted)
    for admission in ("latest", rlctl.max_staleness(0), rlctl.max_staleness(1), "any"):
        await client.rollout("", admission=admission).generate([0], max_new_tokens=1)
    assert floors == [2, 2, 1, 0]


async def test_what_is_wrong_is_refused_at_once_and_by_name(client: AsyncFleet) -> None:
    for settings, field in (
        ({"policy": "random"}, "policy"),
        ({"admission": "newest"}, "admission"),
        ({"resume": "never"}, "resume"),
        ({"max_inflight_samples": 0}, "max_inflight_samples"),
        ({"retries": -1}, "retries"),
        ({"max_cuts": -1}, "max_cuts"),
        ({"policy": "consistent_hashing", "session_idle_s": 0}, "session_idle_s"),
    ):
        with pytest.raises(RlctlError) as caught:
            client.rollout("actor", **settings)
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, field)
    rollout = client.rollout("actor")
    for asking, reason, field in (
        ({"n": 0}, Reason.FIELD_INVALID, "sampling_params.n"),
        ({"temprature": 1.0}, Reason.FIELD_INVALID, "sampling_params.temprature"),
        ({"presence_penalty": 1.0}, Reason.UNSUPPORTED, "sampling_params.presence_penalty"),
        ({"adapter": "nobody's"}, Reason.ADAPTER_NOT_FOUND, "adapter"),
    ):
        with pytest.raises(RlctlError) as caught:
            await rollout.generate([0], **asking)
        assert (caught.value.reason, caught.value.field) == (reason, field)
    with pytest.raises(RlctlError) as caught:
        await client.rollout("nope").generate([0])
    assert caught.value.reason is Reason.MODEL_NOT_FOUND
    assert await client.rollout("actor", resume="return").generate([0], presence_penalty=1.0, max_new_tokens=1)


async def test_a_request_that_is_refused_costs_the_others_nothing(
    client: AsyncFleet, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def short(
        generate: Callable[..., AsyncIterator[r.GenerateResponse]], request: r.GenerateRequest
    ) -> AsyncIterator[r.GenerateResponse]:
        if request.input_ids.ids[0] == 7:
            raise Reason.PROMPT_TOO_LONG.error("it is too long", field="input_ids")
        async for response in generate(request):
            yield response

    for slot in "ab":
        monkeypatch.setattr(engine(fleet, slot), "generate", partial(short, engine(fleet, slot).generate))
    rollout = client.rollout("actor")
    with pytest.raises(RolloutFailed, match="1 of 2 samples were cut: it is too long") as caught:
        await rollout.generate_batch([[1], [7]], max_new_tokens=3)
    assert [sample.output_ids for sample in caught.value.samples] == [[2, 3, 4], []]
    assert [sample.error is not None for sample in caught.value.samples] == [False, True]
    with pytest.raises(RolloutFailed) as until:
        await rollout.generate_until(2, [[1], [2], [7]], max_new_tokens=LONG)
    assert until.value.reason is Reason.PROMPT_TOO_LONG
    assert len(until.value.samples) == 3
    assert not running(fleet)


async def test_a_sample_that_waits_for_a_stage_is_stopped_too(client: AsyncFleet, fleet: InProcessFleet) -> None:
    rollout = client.rollout("actor", max_inflight_samples=1)

    def named(rid: str) -> RolloutSample:
        params = r.SamplingParams(max_new_tokens=5)
        return begin(r.GenerateRequest(model="actor", text="x", rid=rid, sampling_params=params))

    await client.pause_generation()
    waiting = [asyncio.create_task(rollout.complete(named(rid))) for rid in ("for a stage", "for a place")]
    await client._lines.view.reported()
    await asyncio.sleep(0.05)
    assert await rollout.stop(["for a stage", "for a place"]) == ["for a stage", "for a place"]
    assert await rollout.stop(["for a stage"]) == ["for a stage"], "it may be said twice"
    async with asyncio.timeout(5):
        samples = await asyncio.gather(*waiting)
    assert [(sample.finish, sample.output_ids, sample.error) for sample in samples] == [("abort", [], None)] * 2
    await client.continue_generation()
    assert (await rollout.complete(named("for a stage"))).finished, "its place and its name are free again"


async def test_a_stop_at_the_moment_that_a_stage_is_found_is_not_lost(
    client: AsyncFleet, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, view = client.rollout("actor"), client._lines.view
    await client.pause_generation()
    await view.reported()
    await eventually(lambda: not any(stage.routable for stage in view.stages))
    sampling = r.SamplingParams(max_new_tokens=10**6)
    sample = begin(r.GenerateRequest(text="x", rid="sample", sampling_params=sampling))
    going = asyncio.create_task(rollout.complete(sample))

    async def forwarded() -> object:
        with rollout.forwarding(rid="forwarded") as forwarding:
            return await forwarding.attempt()

    forwarding = asyncio.create_task(forwarded())
    await eventually(lambda: [each._waiting is not None for each in rollout._named.values()] == [True, True])
    take, stops = view._take, []

    def take_and_stop(event: Any) -> None:
        take(event)
        if not stops and any(stage.routable for stage in view.stages):
            stops.extend(each.stop() for each in rollout._named.values())

    monkeypatch.setattr(view, "_take", take_and_stop)
    await client.continue_generation()
    async with asyncio.timeout(5):
        assert (await going).finish == "abort"
        assert await forwarding is None
    assert stops == [None, None], "no stage had them"
    assert rollout.placed == 0
    assert running(fleet) == 0


async def test_a_stop_that_overtakes_its_request_ends_it_too(
    client: AsyncFleet, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = client.rollout("actor")
    await rollout.generate("x", max_new_tokens=1)
    for slot in fleet.stages:
        generate = engine(fleet, slot).generate

        async def late(request: r.GenerateRequest, generate: Any = generate) -> AsyncIterator[r.GenerateResponse]:
            await asyncio.sleep(0.1)
            async for part in generate(request):
                yield part

        monkeypatch.setattr(engine(fleet, slot), "generate", late)
    sampling = r.SamplingParams(max_new_tokens=10**6)
    sample = begin(r.GenerateRequest(rid="mine", text="x", sampling_params=sampling))
    going = asyncio.create_task(rollout.complete(sample))
    await eventually(lambda: "mine" in rollout._named and rollout._named["mine"].running is not None)
    assert await rollout.stop(["mine"]) == ["mine"]
    assert (await asyncio.wait_for(going, 5)).finish == "abort"
    assert running(fleet) == 0


async def test_a_caller_that_leaves_leaves_nothing_running(client: AsyncFleet, fleet: InProcessFleet) -> None:
    rollout = client.rollout("actor")
    generating = asyncio.create_task(rollout.generate([0], n=6, max_new_tokens=10**6))
    await begun(fleet, 6)
    generating.cancel()
    await asyncio.gather(generating, return_exceptions=True)
    await eventually(lambda: not running(fleet))
    assert rollout._router.load.total() == 0


async def test_the_code_of_the_page_runs(fleet: InProcessFleet) -> None:
    page = (Path(__file__).parents[3] / "docs" / "rollout.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    program = compile(code.replace("127.0.0.1:5080", fleet.server.address), "docs/rollout.md", "exec")
    await asyncio.to_thread(exec, program, names)
    assert len(names["finished"]) >= 4


async def test_blocking_code_has_the_same(fleet: InProcessFleet) -> None:
    def trainer() -> tuple[list[RolloutSample], list[RolloutSample]]:
        with rlctl.connect(fleet.server.address) as client:
            rollout = client.rollout("actor", admission=rlctl.max_staleness(1))
            assert rollout.generate([0], max_new_tokens=2)[0].output_ids == [1, 2]
            assert rollout.latest == 1
            assert len(rollout.generate_batch([[0], [1]], n=2, max_new_tokens=1)) == 2
            finished, rest = rollout.generate_until(1, [[0], [1]], max_new_tokens=50)
            rollout.finish_session("nobody's")
            return finished, rollout.resume(rest)

    finished, resumed = await asyncio.to_thread(trainer)
    assert len(finished) + len(resumed) == 2
    assert all(len(sample.output_ids) == 50 for sample in (*finished, *resumed))
