"""Verbs against a live fleet: what is printed, what is sent, how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import pytest
import yaml
from cli_helpers import Cli, LiveFleet

from rlctl.cli.app import connection
from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.ports import new_uuid7
from rlctl.testing.fake_engine import FAULTS, FakeEngine
from rlctl.v1.common_pb2 import STAGE_STATE_PAUSED, STAGE_STATE_READY


def lines(out: str) -> list[list[str]]:
    """A plain table as words."""
    return [line.split() for line in out.splitlines()]


def fail(method: str, reason: Reason) -> Callable[..., object]:
    """A fault that makes one method fail before it does anything."""

    async def fault(engine: FakeEngine, called: str, call: Call) -> None:
        if called == method:
            raise reason.error("made to fail")

    return fault


def silence(method: str) -> Callable[..., object]:
    """A fault that makes one method never answer."""

    async def fault(engine: FakeEngine, called: str, call: Call) -> None:
        if called == method:
            await asyncio.Event().wait()

    return fault


def test_a_verb_prints_a_line_for_each_stage_and_a_summary_on_stderr(rlctl: LiveFleet) -> None:
    ran = rlctl("pause", "--mode", "retract")
    assert ran.code == 0
    header, a, b = lines(ran.out)
    assert header == ["SLOT", "OUTCOME", "STATE", "VERSION", "SEQ", "EVIDENCE", "RANKS", "STEP", "ELAPSED"]
    assert a[:7] == ["a", "APPLIED", "PAUSED", "initial", "1", "RANK", "1/1"]
    assert b[:7] == ["b", "APPLIED", "PAUSED", "initial", "1", "RANK", "2/2"]
    assert ran.err.startswith("PauseGeneration OK: 2 of 2 stages confirmed. (operation ")
    assert rlctl.state("a") == rlctl.state("b") == STAGE_STATE_PAUSED


def test_wide_prints_a_line_for_each_rank(rlctl: LiveFleet) -> None:
    ran = rlctl("pause", "-o", "wide")
    header, *ranks = lines(ran.out)
    assert header[:3] == ["SLOT", "RANK", "OUTCOME"]
    assert [row[:3] for row in ranks] == [["a", "0", "APPLIED"], ["b", "0", "APPLIED"], ["b", "1", "APPLIED"]]


def test_targets_are_the_ones_that_are_named(rlctl: LiveFleet) -> None:
    assert rlctl("pause", "--slot", "b").code == 0
    assert (rlctl.state("a"), rlctl.state("b")) == (STAGE_STATE_READY, STAGE_STATE_PAUSED)
    assert rlctl("pause", "--model", "ref").code == 2
    assert rlctl("pause", "--stage", "vocoder").code == 2


def test_json_is_protojson_with_proto_names_in_proto_order_and_defaults(rlctl: LiveFleet) -> None:
    ran = rlctl("pause", "--slot", "a", "-o", "json")
    operation = ran.data
    assert list(operation)[:4] == ["header", "operation_id", "verb", "state"]
    assert operation["verb"] == "PauseGeneration"
    assert operation["state"] == "OPERATION_STATE_OK"
    assert operation["targets"] == ["a"]
    assert operation["excluded"] == []
    assert operation["replayed"] is False
    assert "error" not in operation
    (stage,) = operation["stage_results"]
    assert stage["outcome"] == "OUTCOME_APPLIED"
    assert stage["weight_version"] == {"label": "initial", "sequence": "1", "trainer_incarnation": "0"}
    assert [rank["coordinates"]["rank"] for rank in stage["rank_results"]] == [0]


def test_every_machine_format_has_the_same_data(rlctl: LiveFleet) -> None:
    request_id = new_uuid7()
    call = ("pause", "--request-id", request_id, "-o")
    printed = {form: rlctl(*call, form).out for form in ("json", "jsonl", "yaml", "name")}
    as_json = json.loads(printed["json"])
    assert len(printed["jsonl"].splitlines()) == 1
    assert json.loads(printed["jsonl"])["stage_results"] == as_json["stage_results"]
    assert yaml.safe_load(printed["yaml"])["stage_results"] == as_json["stage_results"]
    assert printed["name"] == f"{request_id}\n"


def test_a_dry_run_names_the_targets_and_changes_nothing(rlctl: LiveFleet) -> None:
    ran = rlctl("pause", "--dry-run")
    assert ran.code == 0
    assert lines(ran.out) == [["SLOT", "OUTCOME"], ["a", "TARGET"], ["b", "TARGET"]]
    assert "nothing was done" in ran.err
    assert rlctl.state("a") == STAGE_STATE_READY


def test_a_repeat_with_the_same_request_id_is_the_record_of_the_first(rlctl: LiveFleet) -> None:
    request_id = new_uuid7()
    first = rlctl("pause", "--request-id", request_id, "-o", "json")
    assert rlctl("continue").code == 0
    again = rlctl("pause", "--request-id", request_id, "-o", "json")
    assert again.code == 0
    assert again.data["replayed"] is True
    assert again.data["stage_results"] == first.data["stage_results"]
    assert rlctl.state("a") == STAGE_STATE_READY


def test_a_request_id_that_was_used_for_something_else_is_a_conflict(rlctl: LiveFleet) -> None:
    request_id = new_uuid7()
    rlctl("pause", "--request-id", request_id)
    ran = rlctl("continue", "--request-id", request_id)
    assert ran.code == 7
    assert "REQUEST_ID_REUSED" in ran.err


def test_quiet_says_nothing_but_the_data(rlctl: LiveFleet) -> None:
    ran = rlctl("pause", "-q")
    assert ran.err == ""
    assert ran.out


def test_what_the_server_refuses_is_a_usage_error_with_the_field_and_what_to_do(rlctl: LiveFleet) -> None:
    ran = rlctl("pause", "--slot", "nope")
    assert ran.code == 2
    assert ran.out == ""
    assert "no stage fills slot 'nope'; there are: a, b" in ran.err
    assert "header.target.slots[0]" in ran.err
    assert "`rlctl get stages` lists them." in ran.err


def test_errors_are_json_on_stderr_with_json_output(rlctl: LiveFleet) -> None:
    ran = rlctl("-o", "json", "abort")
    assert ran.code == 2
    assert ran.out == ""
    assert ran.error["reason"] == "FIELD_REQUIRED"
    assert ran.error["status"] == "INVALID_ARGUMENT"
    assert ran.error["field"] == "rids"
    assert ran.error["exit_code"] == 2
    usage = rlctl("pause", "--mode", "gently", "-o", "json")
    assert usage.code == 2
    assert usage.error["reason"] == "USAGE"


def test_a_partial_failure_prints_the_outcomes_and_how_to_go_on(make_fleet: Callable) -> None:
    with make_fleet(a=1, b=1) as rlctl:
        FAULTS[rlctl.model_path("b"), 0] = fail("flush_cache", Reason.ENGINE_FAILED)
        ran = rlctl("cache", "flush")
        assert ran.code == 3
        _, a, b = lines(ran.out)
        assert a[:3] == ["a", "APPLIED", "READY"]
        assert b[:2] == ["b", "REJECTED"]
        assert "ENGINE_FAILED: made to fail" in ran.out
        assert "1 of 2 stages did not confirm" in ran.err
        assert f"rlctl --endpoint {rlctl.endpoint} cache flush --slot b" in ran.err
        assert f"rlctl --endpoint {rlctl.endpoint} cache flush --request-id " in ran.err


def test_the_same_failure_as_json_has_the_operation_on_stdout_and_the_error_on_stderr(make_fleet: Callable) -> None:
    with make_fleet(a=1, b=1) as rlctl:
        FAULTS[rlctl.model_path("b"), 0] = fail("flush_cache", Reason.ENGINE_FAILED)
        ran = rlctl("cache", "flush", "-o", "json")
        assert ran.code == ran.error["exit_code"] == 3
        assert ran.data["state"] == "OPERATION_STATE_PARTIAL"
        assert ran.error["operation_id"] == ran.data["operation_id"]
        assert ran.error["unconfirmed"] == ["b"]
        assert ran.error["retry"].endswith(f"--request-id {ran.data['operation_id']}")


def test_a_pause_that_was_taken_back_says_who_refused(make_fleet: Callable) -> None:
    with make_fleet(a=1, b=1) as rlctl:
        FAULTS[rlctl.model_path("b"), 0] = fail("pause_generation", Reason.ENGINE_FAILED)
        ran = rlctl("pause")
        assert ran.code == 1
        _, a, b = lines(ran.out)
        assert a[:3] == ["a", "REJECTED", "READY"]
        assert b[:3] == ["b", "REJECTED", "READY"]
        assert "paused, then continued, because b did not pause" in ran.out
        assert "2 of 2 stages did not confirm; b: made to fail" in ran.err


def test_a_stage_that_does_not_answer_is_unknown(make_fleet: Callable) -> None:
    with make_fleet(a=1, b=1) as rlctl:
        FAULTS[rlctl.model_path("b"), 0] = silence("pause_generation")
        ran = rlctl("pause", "--timeout", "500ms")
        assert ran.code == 4
        assert lines(ran.out)[2][:2] == ["b", "UNKNOWN"]
        FAULTS.clear()


def test_a_precondition_that_does_not_hold_is_a_conflict(rlctl: LiveFleet) -> None:
    assert rlctl("pause").code == 0
    assert rlctl("memory", "release", "--tag", "kv_cache").code == 0
    ran = rlctl("continue")
    assert ran.code == 7
    assert "2 of 2 stages did not confirm" in ran.err
    assert "`rlctl memory resume` first." in ran.err


def test_memory_regions_are_repeatable_options(rlctl: LiveFleet) -> None:
    rlctl("pause")
    ran = rlctl("memory", "release", "--tags", "kv_cache", "--tag", "weights", "--slot", "a", "-o", "json")
    (rank,) = ran.data["stage_results"][0]["rank_results"]
    assert rank["memory"]["released"] == ["MEMORY_TAG_KV_CACHE", "MEMORY_TAG_WEIGHTS"]
    shown = lines(rlctl("memory", "resume", "--slot", "a").out)
    assert shown[0][-2:] == ["RELEASED", "BYTES"]


def test_stages_that_are_stale_afterwards_are_named_with_what_they_need(rlctl: LiveFleet) -> None:
    rlctl("pause")
    assert "STALE" not in rlctl("memory", "release", "--slot", "a").err
    assert "STALE: a. Send weights to the stage: `rlctl heal`" in rlctl("memory", "resume", "--slot", "a").err
    ran = rlctl("continue")
    assert ran.code == 3
    assert "Send weights to the stage: `rlctl heal`" in ran.err
    assert "Read this record again" in ran.err
    assert "Try again" not in ran.err


def test_what_does_not_exist_is_not_worth_another_try(rlctl: LiveFleet) -> None:
    ran = rlctl("weights", "update", "--model", "actor", "--model-path", "/nowhere")
    assert ran.code == 1
    assert "Try again" not in ran.err


def test_an_unreachable_coordinator_is_told_at_once(cli: Cli) -> None:
    ran = cli("pause", "--endpoint", "127.0.0.1:1")
    assert ran.code == 5
    assert "no coordinator answers at 127.0.0.1:1" in ran.err
    assert "Retry safely, it runs at most once: rlctl pause --endpoint 127.0.0.1:1 --request-id " in ran.err
    assert cli("status", "--endpoint", "unix:/nowhere/socket").code == 5
    assert cli("status", "--endpoint", "nonsense").code == 2


def test_a_time_that_is_up_before_anybody_answers_is_no_unreachable_coordinator(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        ran = cli("--endpoint", endpoint, "pause", "--timeout", "100ms")
    assert ran.code == 6
    assert f"no coordinator answered at {endpoint} within 0.1 s  (DEADLINE_EXCEEDED)" in ran.err
    assert "Give a longer --timeout." in ran.err


def test_a_stopped_coordinator_is_not_one_that_has_to_be_started(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        ran = cli("--endpoint", endpoint, "status")
        doctor = cli("--endpoint", endpoint, "doctor", "-o", "json")
    assert ran.code == 5
    assert f"a process listens at {endpoint} and does not answer" in ran.err
    assert "kill -CONT PID" in ran.err
    assert "kill -CONT PID" in next(each["mend"] for each in doctor.data if each["check"] == "coordinator")


def test_a_token_is_asked_for_and_sent(make_fleet: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_fleet(a=1, token="secret") as rlctl:
        refused = rlctl("status")
        assert refused.code == 2
        assert "TOKEN_MISSING" in refused.err
        monkeypatch.setenv("RLCTL_TOKEN", "secret")
        assert rlctl("status").code == 0


def test_weights_are_updated_from_disk(rlctl: LiveFleet, checkpoint: Callable[[str], str]) -> None:
    update = ["weights", "update", "--model", "actor", "--model-path", checkpoint("two"), "--weight-version", "v2"]
    dry = rlctl(*update, "--dry-run")
    assert dry.code == 0, dry.err
    ran = rlctl(*update, "--pause", "retract", "--no-flush-cache")
    assert ran.code == 0, ran.err
    assert [row[:5] for row in lines(ran.out)[1:]] == [[slot, "APPLIED", "READY", "v2", "2"] for slot in "ab"]
    assert "version v2#2; paused " in ran.err
    failed = rlctl("weights", "update", "--model", "actor", "--model-path", "/nowhere")
    assert failed.code == 1
    assert "CHECKPOINT_NOT_FOUND" in failed.err
    assert "--slot" not in failed.err.splitlines()[-1]


def test_checksums_show_the_model_digest_and_every_rank_s(rlctl: LiveFleet) -> None:
    header, *ranks = lines(rlctl("weights", "checksum").out)
    assert header == ["SLOT", "RANK", "OUTCOME", "VERSION", "SEQ", "TENSORS", "MODEL", "DIGEST", "RANK", "DIGEST"]
    assert [row[:2] for row in ranks] == [["a", "0"], ["b", "0"], ["b", "1"]]
    assert len({row[6] for row in ranks}) == 1
    assert all(len(digest) == 64 for row in ranks for digest in row[6:])


def test_a_read_that_changes_something_asks_and_is_recorded(rlctl: LiveFleet) -> None:
    refused = rlctl("weights", "checksum", "--action", "reset_tensors", "--slot", "a")
    assert refused.code == 2
    assert "Add --yes." in refused.err
    assert rlctl("get", "operations", "-o", "name").out == ""
    ran = rlctl("weights", "checksum", "--action", "reset_tensors", "--slot", "a", "--yes")
    assert ran.code == 0
    assert rlctl("get", "operations", "-o", "name").out.strip() in ran.err


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        ("loads", ["RUNNING", "WAITING"]),
        ("model info", ["TYPE", "DTYPE", "PARAMETERS"]),
        ("server info", ["ENGINE", "ENGINE", "VERSION"]),
    ],
)
def test_reads_print_their_data(rlctl: LiveFleet, words: str, columns: list[str]) -> None:
    ran = rlctl(*words.split())
    assert ran.code == 0
    assert ran.err == ""
    header, *rows = lines(ran.out)
    assert header[:5] == ["SLOT", "OUTCOME", "STATE", "VERSION", "SEQ"]
    assert header[5 : 5 + len(columns)] == columns
    assert [row[:3] for row in rows] == [["a", "APPLIED", "READY"], ["b", "APPLIED", "READY"]]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["weights", "update"], "--model-path is empty  (FIELD_REQUIRED [--model-path])"),
        (["weights", "pull", "--source-dir", "/s"], "--local-checkpoint-dir is empty"),
        (["weights", "update", "--model-path", "/m", "--weight-version", "a\nb"], "[--weight-version])"),
    ],
)
def test_what_is_wrong_with_a_request_is_told_by_its_option_before_anybody_is_asked(
    cli: Cli, arguments: list[str], told: str
) -> None:
    ran = cli(*arguments, "--endpoint", "127.0.0.1:1")
    assert ran.code == 2
    assert told in ran.err
    data = cli(*arguments, "--endpoint", "127.0.0.1:1", "-o", "json").error
    assert f"--{data['field'].replace('_', '-')}" in told, "data keeps to the names of the contract"
