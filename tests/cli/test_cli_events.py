"""``rlctl events``: what is on record, and what changes, over a restart of the coordinator too."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from cli_helpers import Cli, LiveFleet

from rlctl.cli.app.settings import Settings
from rlctl.cli.commands import events
from rlctl.cli.render.events import Changes, Event, show_event
from rlctl.contract.errors import Reason
from rlctl.sdk.blocking import connect
from rlctl.v1.common_pb2 import STAGE_STATE_PAUSED, STAGE_STATE_READY, STAGE_STATE_RETIRED, ErrorDetail, WeightVersion
from rlctl.v1.fleet_pb2 import (
    FLEET_EVENT_KIND_CHANGED,
    FLEET_EVENT_KIND_SNAPSHOT,
    FleetEvent,
    Model,
    Stage,
    StageRegistration,
)
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_FAILED,
    OPERATION_STATE_OK,
    OPERATION_STATE_RUNNING,
    Operation,
    OperationState,
)


def stage(slot: str, state: int, **facts: object) -> Stage:
    return Stage(
        registration=StageRegistration(slot=slot, model="actor"),
        state=state,
        routable=state == STAGE_STATE_READY,
        enabled=True,
        incarnation=1,
        **facts,
    )


def told(
    *stages: Stage, kind: int = FLEET_EVENT_KIND_CHANGED, epoch: int = 1, models: tuple[Model, ...] = ()
) -> FleetEvent:
    event = FleetEvent(kind=kind)
    event.fleet.header.fleet_epoch = epoch
    event.fleet.stages.extend(stages)
    event.fleet.models.extend(models)
    return event


def lines(changes: Iterator[Event]) -> list[tuple[str, str, str, str, str]]:
    return [(event.kind, event.name, event.change, event.before, event.after) for event in changes]


@pytest.fixture
def changes() -> Changes:
    """A fleet that was seen with stages a and b, model actor at v1."""
    seen = Changes("fleet:1")
    model = Model(name="actor", latest=WeightVersion(label="v1", sequence=1))
    snapshot = told(
        stage("a", STAGE_STATE_READY), stage("b", STAGE_STATE_READY), kind=FLEET_EVENT_KIND_SNAPSHOT, models=(model,)
    )
    assert lines(seen.of_fleet(snapshot)) == []
    return seen


def test_a_change_of_state_is_one_line_with_its_reason(changes: Changes) -> None:
    paused = stage("a", STAGE_STATE_PAUSED, not_routable="PAUSED", quarantine=ErrorDetail(reason="LINK_LOST"))
    state, quarantine = changes.of_fleet(told(paused))
    assert (state.change, state.before, state.after) == ("state", "READY", "PAUSED")
    assert "LINK_LOST" in state.detail
    assert (quarantine.change, quarantine.after) == ("quarantine", "LINK_LOST")
    assert lines(changes.of_fleet(told(paused))) == []


def test_stages_join_restart_and_leave(changes: Changes) -> None:
    joined = changes.of_fleet(told(stage("c", STAGE_STATE_READY)))
    assert lines(joined) == [("stage", "c", "state", "", "READY")]
    restarted = stage("c", STAGE_STATE_READY)
    restarted.incarnation = 2
    assert lines(changes.of_fleet(told(restarted))) == [("stage", "c", "incarnation", "1", "2")]
    restarted.state = STAGE_STATE_RETIRED
    assert ("stage", "c", "state", "READY", "RETIRED") in lines(changes.of_fleet(told(restarted)))


def test_a_version_and_an_update_of_a_model_are_lines(changes: Changes) -> None:
    begun = Model(name="actor", latest=WeightVersion(label="v1", sequence=1), update_id="u", update_owner="trainer")
    (opened,) = changes.of_fleet(told(models=(begun,)))
    assert (opened.change, opened.after, opened.detail) == ("update", "u", "by trainer")
    published = Model(name="actor", latest=WeightVersion(label="v2", sequence=2))
    assert lines(changes.of_fleet(told(models=(published,)))) == [
        ("model", "actor", "version", "v1#1", "v2#2"),
        ("model", "actor", "update", "u", ""),
    ]


def test_what_happened_while_the_coordinator_was_away_is_told_at_the_next_snapshot(changes: Changes) -> None:
    lost = changes.of_loss(Reason.UNREACHABLE.error("no coordinator answers"))
    assert (lost.kind, lost.name, lost.after) == ("coordinator", "fleet:1", "UNREACHABLE")
    again = told(stage("a", STAGE_STATE_PAUSED), kind=FLEET_EVENT_KIND_SNAPSHOT, epoch=2)
    assert lines(changes.of_fleet(again)) == [
        ("coordinator", "fleet:1", "epoch", "1", "2"),
        ("stage", "b", "state", "READY", "RETIRED"),
        ("stage", "a", "state", "READY", "PAUSED"),
    ]


def operation(number: int, state: OperationState.ValueType) -> Operation:
    made = Operation(operation_id=f"o{number}", verb="FlushCache", state=state, targets=["a"])
    made.create_time.FromSeconds(1000 + number)
    made.done_time.FromSeconds(1001 + number)
    return made


def test_each_operation_begins_once_and_ends_once(changes: Changes) -> None:
    def told_of(*operations: Operation) -> list[tuple[str, str]]:
        return [(event.name, event.after) for event in changes.of_operations(operations)]

    running, ok = OPERATION_STATE_RUNNING, OPERATION_STATE_OK
    assert told_of(operation(2, running), operation(1, ok)) == []
    assert told_of(operation(3, running), operation(2, ok), operation(1, ok)) == [("o2", "OK"), ("o3", "RUNNING")]
    assert changes.unlisted([operation(4, ok)]) == ["o3"]
    assert told_of(operation(4, ok), operation(3, OPERATION_STATE_FAILED)) == [
        ("o3", "FAILED"),
        ("o4", "RUNNING"),
        ("o4", "OK"),
    ]
    assert told_of(operation(4, ok), operation(3, OPERATION_STATE_FAILED)) == []
    assert changes.may_be_cut([operation(5, ok), operation(6, ok)])
    assert not changes.may_be_cut([operation(6, ok), operation(4, ok)])
    named = operation(7, ok)
    named.caller.principal = "trainer"
    assert [event.detail for event in changes.of_operations([named, operation(4, ok)])] == [
        "1 stage, by trainer",
        "0/1 confirmed, took 1.0s, by trainer",
    ]
    by_a_clock_set_back = operation(-500, ok)
    assert told_of(by_a_clock_set_back, named) == [("o-500", "RUNNING"), ("o-500", "OK")]
    assert told_of() == []
    assert told_of(by_a_clock_set_back, named) == [], "an empty list forgets nothing"


def test_the_latest_operations_are_lines_oldest_first(rlctl: LiveFleet) -> None:
    assert rlctl("pause").code == rlctl("continue").code == 0
    plain = rlctl("events").out.splitlines()
    assert [line.split()[3] for line in plain] == ["PauseGeneration", "ContinueGeneration"]
    assert "2/2 confirmed" in plain[0]
    (last,) = rlctl("events", "--limit", "1", "-o", "jsonl").out.splitlines()
    assert json.loads(last)["change"] == "ContinueGeneration"
    assert rlctl("events", "-o", "yaml").code == 2
    assert rlctl("events", "--limit", "0").out == ""


class EndedError(Exception):
    """The last event that a test waits for has come."""


def test_events_are_followed_over_a_restart_of_the_coordinator(
    rlctl: LiveFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, seen = rlctl.endpoint, []

    def shown(settings: Settings, event: Event) -> None:
        show_event(settings, event)
        seen.append(event)
        if (event.change, event.after) == ("ContinueGeneration", "OK") and has("epoch", "2"):
            raise EndedError

    def has(change: str, after: str) -> bool:
        return any((event.change, event.after) == (change, after) for event in seen)

    def work() -> None:
        with connect(address) as fleet:
            while not has("state", "PAUSED"):
                fleet.pause_generation(slots=["a"])
                time.sleep(0.05)
                if not has("state", "PAUSED"):
                    fleet.continue_generation(slots=["a"])
            fleet.pause_generation(slots=["a"])
        rlctl.loop.call(rlctl.fleet.server.stop())
        _until(lambda: has("state", "UNREACHABLE"))
        rlctl.loop.call(rlctl.fleet.start_coordinator(address))
        with connect(address) as fleet:
            linked = (STAGE_STATE_READY, STAGE_STATE_PAUSED)
            _until(lambda: all(stage.state in linked for stage in fleet.status().stages) and has("epoch", "2"))
            fleet.continue_generation(slots=["a"])

    monkeypatch.setattr(events, "show_event", shown)
    monkeypatch.setattr(events, "LOOK_S", 0.1)
    working = threading.Thread(target=work)
    working.start()
    with pytest.raises(EndedError):
        rlctl("events", "--follow", "--timeout", "60s", "--limit", "0")
    working.join()
    told = [(event.kind, event.change, event.before, event.after) for event in seen]
    expected = [
        ("stage", "state", "READY", "PAUSED"),
        ("coordinator", "state", "", "UNREACHABLE"),
        ("coordinator", "epoch", "1", "2"),
        ("stage", "state", "PAUSED", "READY"),
    ]
    lost = told.index(expected[1])
    assert expected[0] in told[:lost]
    assert [each for each in told[lost:] if each in expected[1:]] == expected[1:]
    assert ("operation", "PauseGeneration", "", "OK") in told[:lost]


def test_what_happens_between_the_printed_list_and_the_first_look_is_shown(
    rlctl: LiveFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def shown(_settings: Settings, event: Event) -> None:
        seen.append((event.change, event.after))
        if len(seen) == 1:
            with connect(rlctl.endpoint) as fleet:
                fleet.flush_cache()
        if (event.change, event.after) == ("FlushCache", "OK"):
            raise EndedError

    assert rlctl("pause").code == rlctl("continue").code == 0
    monkeypatch.setattr(events, "show_event", shown)
    monkeypatch.setattr(events, "LOOK_S", 0.1)
    with pytest.raises(EndedError):
        rlctl("events", "--follow", "--timeout", "5s", "--limit", "1")
    assert seen == [("ContinueGeneration", "OK"), ("FlushCache", "RUNNING"), ("FlushCache", "OK")]


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_a_coordinator_there_is_nothing_to_follow(cli: Cli) -> None:
    assert cli("--endpoint", "127.0.0.1:1", "events", "-f").code == 5
