"""Looking at a fleet, and the operator's flags: status, get, describe, enable, wait, cancel, explain."""

from __future__ import annotations

import os
import pwd
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import Cli, LiveFleet

from rlctl.cli.render import values
from rlctl.cli.render.stages import stage_view, stages_table, why_not
from rlctl.contract.errors import Reason
from rlctl.sdk.blocking import connect
from rlctl.v1.common_pb2 import (
    STAGE_STATE_DIRTY,
    STAGE_STATE_FAILED,
    STAGE_STATE_PAUSED,
    STAGE_STATE_READY,
    STAGE_STATE_STALE,
    STAGE_STATE_UNREACHABLE,
)
from rlctl.v1.fleet_pb2 import EngineFailure, RankStatus, Stage, StageReport
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest


def begin_update(endpoint: str) -> str:
    """Open an update as a trainer would; returns its id."""
    with connect(endpoint) as fleet:
        request = BeginWeightUpdateRequest(model="actor", version="v2")
        opened = fleet.loop.call(fleet.aio.connection.call("BeginWeightUpdate", request, 10.0))
        return str(opened.update_id)


def words(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_status_shows_models_and_stages(rlctl: LiveFleet) -> None:
    ran = rlctl("status")
    assert ran.code == 0
    assert ran.err == ""
    title, models, actor, _, stages, a, b = ran.out.splitlines()
    assert title == f"Fleet at {rlctl.endpoint}, epoch 1"
    assert models.split()[:3] == ["MODEL", "VERSION", "SEQ"]
    assert actor.split()[:3] == ["actor", "initial", "1"]
    assert stages.split()[:4] == ["SLOT", "MODEL", "STATE", "ROUTABLE"]
    assert a.split()[:7] == ["a", "actor", "READY", "yes", "initial", "1", "1/1"]
    assert b.split()[:7] == ["b", "actor", "READY", "yes", "initial", "1", "2/2"]


def test_digests_are_whole_where_nobody_looks_with_and_without_colours(rlctl: LiveFleet) -> None:
    plain, coloured = rlctl("get", "models").out, rlctl("get", "models", "--color", "always").out
    (digest,) = re.findall("[0-9a-f]{64}", plain)
    assert digest in coloured


def test_status_as_json_is_the_fleet(rlctl: LiveFleet) -> None:
    fleet = rlctl("-o", "json", "status").data
    assert [stage["registration"]["slot"] for stage in fleet["stages"]] == ["a", "b"]
    assert [stage["routable"] for stage in fleet["stages"]] == [True, True]
    assert "quarantine" not in fleet["stages"][0]
    assert fleet["models"][0]["latest"] == {"label": "initial", "sequence": "1", "trainer_incarnation": "0"}


def test_lists_are_arrays_lines_or_names(rlctl: LiveFleet) -> None:
    assert [stage["registration"]["slot"] for stage in rlctl("get", "stages", "-o", "json").data] == ["a", "b"]
    assert len(rlctl("get", "stages", "-o", "jsonl").out.splitlines()) == 2
    assert rlctl("get", "stages", "-o", "name").out == "a\nb\n"
    assert rlctl("get", "models", "-o", "name").out == "actor\n"
    assert rlctl("get", "operations", "-o", "json").data == []
    assert rlctl("get", "models", "--model", "nope").code == 2


def test_operations_are_listed_newest_first_and_filtered(rlctl: LiveFleet) -> None:
    assert rlctl("pause").code == 0
    assert rlctl("continue").code == 0
    rows = words(rlctl("get", "operations").out)[1:]
    assert [row[1:4] for row in rows] == [["ContinueGeneration", "OK", "2/2"], ["PauseGeneration", "OK", "2/2"]]
    for verb in ("PauseGeneration", "pausegeneration"):
        assert [row[1] for row in words(rlctl("operations", "--verb", verb).out)[1:]] == ["PauseGeneration"]
    refused = rlctl("operations", "--verb", "nope")
    assert refused.code == 2
    assert "'nope' is no verb; there are: PauseGeneration, ContinueGeneration, " in refused.err
    assert rlctl("operations", "--verb", "WeightUpdate").code == 0
    assert len(rlctl("get", "operations", "--limit", "1", "-o", "name").out.splitlines()) == 1
    assert rlctl("get", "operations", "--state", "failed", "-o", "name").out == ""


def test_an_operation_is_shown_as_its_verb_showed_it(rlctl: LiveFleet) -> None:
    paused = rlctl("pause")
    (operation_id,) = rlctl("get", "operations", "-o", "name").out.split()
    shown = rlctl("get", "operation", operation_id)
    assert shown.code == 0
    assert shown.out == paused.out
    described = rlctl("describe", "operation", operation_id).out
    assert "Verb:       PauseGeneration" in described
    assert "Targets:    a, b" in described
    assert rlctl("get", "operation", "0190-nope").code == 2


def test_the_end_of_an_id_is_enough_as_lists_show_no_more(rlctl: LiveFleet) -> None:
    rlctl("pause")
    (operation_id,) = rlctl("get", "operations", "-o", "name").out.split()
    for end in (operation_id[-12:], f"…{operation_id[-12:]}"):
        assert rlctl("get", "operation", end, "-o", "name").out == f"{operation_id}\n"
        assert f"Operation:  {operation_id}" in rlctl("describe", "operation", end).out
        assert rlctl("cancel", end).code == 0
    assert rlctl("get", "operation", operation_id[-3:]).code == 2, "too short to be meant"


def test_an_end_that_several_ids_have_is_refused(rlctl: LiveFleet) -> None:
    head, tail = "01a20121-d3de-759e-ac6", "-704327e98266"
    for digit in "12":
        assert rlctl("pause", "--request-id", f"{head}{digit}{tail}").code == 0
    refused = rlctl("get", "operation", tail[1:])
    assert refused.code == 2
    assert f"2 operations end in '{tail[1:]}'" in refused.err


def test_a_stage_is_described_with_ranks_and_capabilities(rlctl: LiveFleet) -> None:
    out = rlctl("describe", "stage", "b").out
    assert "Layout:           TP 2, PP 1, DP 1, EP 1" in out
    assert "Pause modes: abort, retract, in_place, drain" in " ".join(out.split())
    assert words(out.split("Ranks\n")[1])[1][:2] == ["0", "0"]
    assert words(out.split("Ranks\n")[1])[2][:2] == ["1", "1"]
    assert rlctl("describe", "stage", "b", "-o", "json").data["registration"]["layout"]["tp_size"] == 2
    missing = rlctl("describe", "stage", "nope")
    assert missing.code == 2
    assert "there are: a, b" in missing.err


def test_a_model_is_described_with_its_stages(rlctl: LiveFleet) -> None:
    out = rlctl("describe", "model", "actor").out
    assert "Admitted:             initial#1" in out
    assert [row[0] for row in words(out)[-2:]] == ["a", "b"]
    assert rlctl("describe", "model", "nope").code == 2


def test_a_disabled_stage_is_not_routable_and_says_so(rlctl: LiveFleet) -> None:
    dry = rlctl("disable", "a", "--dry-run")
    assert dry.code == 0
    assert "a would be disabled" in dry.err
    assert words(rlctl("get", "stages").out)[1][3] == "yes"
    assert rlctl("disable", "a").code == 0
    assert words(rlctl("get", "stages").out)[1][-1] == "disabled"
    assert rlctl("pause").code == 0
    assert "disabled; paused since" in rlctl("get", "stages").out.splitlines()[1], "it holds when the pause is over"
    assert rlctl("disable", "nope").code == 2
    assert rlctl("enable", "a", "b", "-o", "name").out == "a\nb\n"


def test_a_pause_says_who_asked_for_it_since_when_and_why(rlctl: LiveFleet) -> None:
    assert rlctl("pause", "--slot", "a", "--by", "ops@head", "--reason", "new disks").code == 0
    a, b = rlctl("get", "stages").out.splitlines()[1:]
    assert re.search(r"paused since \d{4}-\S+ by ops@head: new disks", a), a
    assert "paused" not in b
    assert "by ops@head: new disks" in rlctl("describe", "stage", "a").out
    assert rlctl("continue").code == 0
    assert "paused" not in rlctl("get", "stages").out


def test_a_pause_of_one_adapter_is_shown_beside_stages_that_serve(rlctl: LiveFleet, tmp_path: Path) -> None:
    loaded = rlctl("adapters", "load", "--name", "math", "--path", str(tmp_path / "a"), "--version", "m-1")
    assert loaded.code == 0, loaded.err
    wrong = rlctl("pause", "--adapter", "maths", "--mode", "retract")
    assert wrong.code == 2
    assert "math" in wrong.err
    paused = rlctl("pause", "--adapter", "math", "--mode", "retract", "--slot", "a", "--by", "ops", "--reason", "evals")
    assert paused.code == 0, paused.err
    a, b = rlctl("get", "stages").out.splitlines()[1:]
    assert a.split()[2:4] == ["READY", "yes"]
    assert re.search(r"adapter math paused since \d{4}-\S+ by ops: evals", a), a
    assert "paused" not in b
    assert re.search(r"Adapter math: +paused retract since \S+ by ops: evals", rlctl("describe", "stage", "a").out)
    (operation, *_) = rlctl("get", "operations", "-o", "name").out.splitlines()
    assert re.search(r"Adapter: +math", rlctl("describe", "operation", operation).out)
    assert rlctl("continue").code == 0
    assert "adapter math paused" in rlctl("get", "stages").out, "a continue of all requests is about those"
    assert rlctl("continue", "--adapter", "math").code == 0
    assert "paused" not in rlctl("get", "stages").out


def test_a_pause_names_the_user_without_a_users_environment(rlctl: LiveFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert rlctl("pause", "--slot", "a").code == 0
    user = pwd.getpwuid(os.getuid()).pw_name
    assert f" by {user}@" in rlctl("describe", "stage", "a").out


def test_healing_brings_dirty_stages_to_the_published_version(rlctl: LiveFleet) -> None:
    assert "no stage is STALE, DIRTY or quarantined" in rlctl("heal").err
    rlctl("weights", "checksum", "--action", "reset_tensors", "--slot", "a", "-y")
    assert "DIRTY" in rlctl("get", "stages").out
    assert rlctl("heal", "--dry-run").code == 0
    assert "DIRTY" in rlctl("get", "stages").out
    healed = rlctl("heal", "a")
    assert healed.code == 0, healed.err
    assert rlctl("wait", "--for", "routable", "--timeout", "5s").code == 0
    assert rlctl("heal", "nope").code == 2


def test_what_another_coordinator_could_hold_is_taken_over(rlctl: LiveFleet) -> None:
    assert "a would be taken over" in rlctl("take-over", "a", "--dry-run").err
    asked = rlctl("take-over", "a")
    assert asked.code == 2
    assert "Add --yes" in asked.err
    taken = rlctl("take-over", "a", "--yes", "-o", "name")
    assert (taken.code, taken.out) == (0, "a\n")
    assert rlctl("take-over", "nope", "--yes").code == 2


def test_slots_are_admitted_by_an_operator(rlctl: LiveFleet) -> None:
    assert "z would be admitted" in rlctl("admit", "z", "--dry-run").err
    assert "every slot" in rlctl("admit", "z").out, "the fleet has no topology"
    assert rlctl("admit", "../x").code == 2
    assert rlctl("admit", "z", "--no-more").code == 0


def test_min_healthy_is_shown_set_and_kept_to_by_drains(rlctl: LiveFleet) -> None:
    assert rlctl("wait", "--for", "routable").code == 0
    assert words(rlctl("min-healthy").out)[1] == ["actor", "none", "0", "2", "2", "no"]
    dry = rlctl("min-healthy", "2", "--dry-run")
    assert "min_healthy of actor would be 2" in dry.err
    assert rlctl("min-healthy", "200%").code == 2
    assert words(rlctl("min-healthy", "75%").out)[1] == ["actor", "75%", "2", "2", "2", "no"]
    for command in (["drain", "a"], ["drain", "a", "--dry-run"], ["disable", "a"]):
        refused = rlctl(*command)
        assert refused.code == 7
        assert "actor has 2 of 2 stages routable, and would have 1 without a; min_healthy is 75%" in refused.err
        assert "(MIN_HEALTHY)" in refused.err
        assert "--force" in refused.err
    assert rlctl("drain", "a", "--force").code == 0
    assert "75%, below: 1 routable" in rlctl("status").out
    assert "75%, below: 1 routable" in rlctl("describe", "model", "actor").out
    assert words(rlctl("min-healthy").out)[1][-1] == "yes"
    assert rlctl("enable", "a").code == 0
    assert rlctl("min-healthy", "0").code == 0


def test_a_stage_that_is_drained_is_disabled_with_its_reason_and_idle(rlctl: LiveFleet) -> None:
    dry = rlctl("drain", "a", "--dry-run")
    assert (dry.code, "a would be drained" in dry.err) == (0, True)
    assert rlctl("wait", "--for", "routable").code == 0
    with connect(rlctl.endpoint) as fleet:
        events = fleet.generate_stream("1+2=", slot="a", max_new_tokens=20_000)
        next(events)
        late = rlctl("drain", "a", "--for", "a new disk", "--timeout", "1s")
        assert late.code == 6
        assert "a: 1 request runs or waits" in late.err
        assert "The stages stay disabled" in late.err
        assert words(rlctl("get", "stages").out)[1][-4:] == ["disabled:", "a", "new", "disk"]
        events.close()
        done = rlctl("drain", "a", "b", "--for", "a new disk", "-o", "name")
        assert (done.code, done.out) == (0, "a\nb\n")
        assert "Nothing runs on a, b. `rlctl enable a b` lets them serve again." in done.err
        assert "a new disk" in rlctl("describe", "stage", "b").out
    assert rlctl("drain", "nope").code == 2
    assert rlctl("enable", "a", "b").code == 0
    assert "a new disk" not in rlctl("describe", "stage", "b").out


def test_an_earlier_version_is_published_again_from_its_checkpoint_or_not_at_all(
    rlctl: LiveFleet, tmp_path: Path
) -> None:
    assert "has had no earlier version" in rlctl("rollback", "--yes").err
    for label in ("two", "three"):
        directory = tmp_path / "a" / label  # below a directory that the engines may read
        directory.mkdir()
        (directory / "weights.txt").write_text(label)
        update = ["weights", "update", "--model", "actor", "--model-path", str(directory), "--weight-version", label]
        assert rlctl(*update).code == 0
    listed = rlctl("versions", "-o", "json").data
    assert [(v["version"]["label"], v["version"]["sequence"]) for v in listed] == [
        ("three", "3"), ("two", "2"), ("initial", "1"),
    ]  # fmt: skip
    assert listed[1]["checkpoint"] == str(tmp_path / "a" / "two")
    rows = rlctl("versions").out.splitlines()[1:]
    assert [row.split()[4] for row in rows] == ["yes", "no", "no"]
    dry = rlctl("rollback", "--dry-run")
    assert dry.code == 0
    assert rlctl("versions", "-o", "name").out == "three\ntwo\ninitial\n"
    done = rlctl("rollback", "--yes", "-o", "json")
    assert done.code == 0, done.err
    assert (done.data["weight_version"]["label"], done.data["weight_version"]["sequence"]) == ("two", "4")
    assert set(rlctl.held()) == {"two"}
    assert rlctl("rollback", "#3", "--yes").code == 0
    assert set(rlctl.held()) == {"three"}
    wrong = rlctl("rollback", "two#3", "--yes")
    assert (wrong.code, "no earlier version 'two#3'" in wrong.err) == (2, True)
    assert "two#4" in wrong.err
    # Its files were written anew: what they hold is not that version.
    (tmp_path / "a" / "two" / "weights.txt").write_text("another")
    spoilt = rlctl("rollback", "two", "--yes")
    assert spoilt.code != 0
    assert rlctl("versions", "-o", "name").out.splitlines()[0] == "three"


def test_waiting_ends_when_every_enabled_stage_is_routable(rlctl: LiveFleet) -> None:
    rlctl("pause", "--slot", "a")
    with connect(rlctl.endpoint) as fleet:
        resume = threading.Timer(0.2, fleet.continue_generation, kwargs={"slots": ["a"]})
        resume.start()
        ran = rlctl("wait", "--for", "routable", "--timeout", "20s")
        resume.join()
    assert ran.code == 0
    assert [row[3] for row in words(ran.out)[1:]] == ["yes", "yes"]


def test_waiting_too_long_says_what_is_missing(rlctl: LiveFleet, cli: Cli) -> None:
    rlctl("pause", "--slot", "a")
    ran = rlctl("wait", "--for", "routable", "--timeout", "2s")
    assert ran.code == 6
    assert "a is not routable (PAUSED)" in ran.err
    assert rlctl("wait", "--for", "routable", "--slot", "b", "--timeout", "20s").code == 0
    rlctl("disable", "a")
    assert rlctl("wait", "--for", "routable", "--timeout", "20s").code == 0
    assert rlctl("wait", "--for", "happiness").code == 2
    assert cli("wait", "--for", "routable", "--timeout", "300ms", "--endpoint", "127.0.0.1:1").code == 5


def test_waiting_for_a_version_ends_when_it_is_served(rlctl: LiveFleet, checkpoint: Callable[[str], str]) -> None:
    assert rlctl("wait", "--for", "version=initial", "--timeout", "5s").code == 0
    early = rlctl("wait", "--for", "version=v2", "--timeout", "2s")
    assert early.code == 6
    assert "actor is at version initial, not v2" in early.err
    update = ["weights", "update", "--model", "actor", "--model-path", checkpoint("two"), "--weight-version", "v2"]
    assert rlctl(*update).code == 0
    assert rlctl("wait", "--for", "version=v2", "--model", "actor", "--timeout", "5s").code == 0


def test_an_open_update_is_seen_and_can_be_aborted(rlctl: LiveFleet) -> None:
    assert rlctl("weights", "abort").code == 2
    update_id = begin_update(rlctl.endpoint)
    assert update_id in rlctl("get", "models").out
    blocked = rlctl("weights", "update", "--model", "actor", "--model-path", "/m")
    assert blocked.code == 7
    assert "`rlctl weights abort`" in blocked.err
    ran = rlctl("weights", "abort", "--reason", "test", "-o", "json")
    assert ran.code == 0
    assert ran.data["operation_id"] == update_id
    assert "test" in ran.data["error"]["message"]
    assert update_id not in rlctl("get", "models").out


def test_an_operation_can_be_cancelled(rlctl: LiveFleet) -> None:
    update_id = begin_update(rlctl.endpoint)
    ran = rlctl("cancel", update_id, "-o", "json")
    assert ran.code == 0
    assert ran.data["operation_id"] == update_id
    assert ran.data["state"] != "OPERATION_STATE_RUNNING"
    assert rlctl("cancel", "0190-nope").code == 2


def test_an_empty_fleet_says_so(make_fleet: Callable) -> None:
    with make_fleet() as rlctl:
        assert "no stage is registered" in rlctl("status").out
        assert rlctl("pause").code == 7


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("PauseGenerationRequest.mode", "Treatment of waiting and running requests."),
        ("rlctl.v1.PauseGenerationRequest.mode", "PAUSE_MODE_RETRACT"),
        ("UpdateWeightsFromDiskRequest.options.pause", "UpdateOptions.pause"),
        ("StageState", "STAGE_STATE_DIRTY"),
        ("StageState.STAGE_STATE_DIRTY", "Only a full update or a heal clears the state"),
        ("pausegeneration", "(PauseGenerationRequest) returns (Operation)"),
        ("WatchFleet", "returns (stream FleetEvent)"),
        ("Generate", "RolloutService.Generate"),
        ("CoordinatorService", "Administers a fleet."),
        ("CoordinatorService", "(PauseGenerationRequest) returns (Operation)"),
        ("StageService", "(stream ControlRequest) returns (stream ControlResponse)"),
        ("STALE", "The weights are not at an admitted version"),
        ("retract", "PauseMode.PAUSE_MODE_RETRACT  = 2"),
        ("NO_ROUTABLE_STAGE", "`rlctl status` says why."),
        ("unhealable", "reason  FAILED_PRECONDITION  (rlctl.PreconditionFailed)"),
        ("ErrorDetail.metadata", "map<string, string>"),
        ("Target.slots", "repeated string"),
    ],
)
def test_the_contract_is_explained_in_its_own_words(cli: Cli, name: str, said: str) -> None:
    ran = cli("explain", name)
    assert ran.code == 0, ran.err
    assert said in ran.out


def test_what_the_contract_does_not_have_is_refused_with_what_is_near(cli: Cli) -> None:
    ran = cli("explain", "StageStatus")
    assert ran.code == 2
    assert "Did you mean: " in ran.err
    assert cli("explain", "PauseGenerationRequest.mode.deeper").code == 2
    assert "Did you mean: Outcome.OUTCOME_DIRTY, StageState.STAGE_STATE_DIRTY?" in cli("explain", "DIRTY").err
    assert cli("explain", "UpdateWeightsFromDiskRequest.options.nope").code == 2


def test_an_explanation_is_data(cli: Cli) -> None:
    explained = cli("explain", "PauseMode", "-o", "json").data
    assert explained["name"] == "PauseMode"
    assert explained["members"][1]["name"] == "PAUSE_MODE_ABORT"
    assert ["NAME", "NUMBER", "MEANING"] in words(cli("explain", "PauseMode").out)
    assert ["NAME", "TYPE", "MEANING"] in words(cli("explain", "Target").out)
    assert cli("explain", "pausemode", "-o", "name").out == "PauseMode\n"


def test_the_version_names_the_contract(cli: Cli) -> None:
    assert set(cli("version", "-o", "json").data) == {"rlctl", "contract", "python"}
    assert cli("--version").out.startswith("rlctl ")


def test_a_dirty_stage_has_what_clears_it_beside_it_where_no_cause_is_known() -> None:
    """After the coordinator was started anew, say, that no stage is quarantined by."""
    dirty = Stage(state=STAGE_STATE_DIRTY, not_routable="DIRTY: its weights are a mixture", enabled=True)
    assert why_not(dirty) == "its weights are a mixture"
    dirty.quarantine.CopyFrom(Reason.GROUP_FAILED.error("it broke").detail())
    assert why_not(dirty) == "GROUP_FAILED: it broke"
    assert why_not(Stage(state=STAGE_STATE_PAUSED, not_routable="PAUSED", enabled=True)) == ""
    # Without a heal source, a wait for the heal would never end.
    dirty.not_routable, dirty.unhealable = "DIRTY: it broke, UNHEALABLE: no source", True
    assert why_not(dirty) == "GROUP_FAILED: it broke; UNHEALABLE: no source"
    stale = Stage(state=STAGE_STATE_STALE, not_routable="STALE, UNHEALABLE: no source", enabled=True)
    assert why_not(stale) == "UNHEALABLE: no source"


def test_a_lost_rank_is_shown_before_an_older_quarantine() -> None:
    lost = Stage(state=STAGE_STATE_FAILED, not_routable="FAILED: rank 1: its process is gone", enabled=True)
    lost.quarantine.CopyFrom(Reason.GROUP_FAILED.error("a broadcast broke").detail())
    assert why_not(lost) == "rank 1: its process is gone"


def test_a_dirty_stage_says_in_how_long_it_is_healed() -> None:
    dirty = Stage(state=STAGE_STATE_DIRTY, not_routable="DIRTY: its weights are a mixture", enabled=True)
    dirty.heal_time.FromSeconds(int(time.time()) + 43)
    assert re.fullmatch(
        r"its weights are a mixture; healed in 4[0-3]\.\ds unless an update comes first", why_not(dirty)
    )
    dirty.heal_time.FromSeconds(1)
    assert "healed in 0ms" in why_not(dirty), "a clock that is ahead of the coordinator's"


def test_what_has_become_of_an_engine_is_shown_with_its_last_lines() -> None:
    why = "crash loop, 8 failures in a row: no memory"
    stage = Stage(state=STAGE_STATE_FAILED, not_routable=f"FAILED: {why}", enabled=True)
    stage.quarantine.CopyFrom(Reason.RANK_LOST.error("rank 0: no memory").detail())
    stage.engine_failure.MergeFrom(EngineFailure(reason="no memory", failures=8, log=["loading", "Killed"]))
    stage.engine_failure.retry_time.FromSeconds(int(time.time()) + 60)
    assert why_not(stage) == why
    about, log, *_ = stage_view(stage).tables(False)
    shown = {line[0].rstrip(":"): line[1] for line in about.rows}
    assert (shown["State"], shown["Why not"], shown["Failures in a row"]) == ("FAILED", why, "8")
    assert shown["Starts again"] == values.moment(stage.engine_failure.retry_time)
    assert log.rows == [("loading",), ("Killed",)]
    assert shown["Serving lease"] == "no"
    stage.engine_failure.retry_time.FromSeconds(int(time.time()) - 60)
    shown = {line[0].rstrip(":"): line[1] for line in stage_view(stage).tables(False)[0].rows}
    assert shown["Starts again"] == f"starting since {values.moment(stage.engine_failure.retry_time)}"
    stage.engine_failure.given_up = True
    stage.report.ranks.add(alive=True)
    shown = {line[0].rstrip(":"): line[1] for line in stage_view(stage).tables(False)[0].rows}
    assert shown["Starts again"] == (
        f"no, the engine has failed too often; `rlctl restart {stage.registration.slot}` starts it"
    )
    headers, (row,) = stages_table([stage], wide=False).shown()
    assert row[headers.index("RANKS")] == "0/1", "its report is from before"
    assert [line[-2] for table in stage_view(stage).tables(False) if table.title == "Ranks" for line in table.rows] == [
        "no"
    ]
    stage.state, stage.report.lease_held = STAGE_STATE_UNREACHABLE, True
    shown = {line[0].rstrip(":"): line[1] for line in stage_view(stage).tables(False)[0].rows}
    assert shown["Serving lease"] == "not known: the lease has not run out yet"


def test_what_the_ranks_of_an_unreachable_stage_are_is_not_known() -> None:
    stage = Stage(state=STAGE_STATE_READY, report=StageReport(ranks=[RankStatus(alive=True)] * 2))
    for state, shown, alive in ((STAGE_STATE_READY, "2/2", "yes"), (STAGE_STATE_UNREACHABLE, "?/2", "?")):
        stage.state = state
        headers, (row,) = stages_table([stage], wide=False).shown()
        assert row[headers.index("RANKS")] == shown
        _, ranks, *_ = stage_view(stage).tables(False)
        assert [line[-2] for line in ranks.rows] == [alive] * 2
