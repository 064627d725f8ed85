"""``rlctl generate``."""

from __future__ import annotations

import json
from collections.abc import Callable

from cli_helpers import Cli, LiveFleet


def test_the_text_is_all_there_is_on_stdout(rlctl: LiveFleet) -> None:
    ran = rlctl("generate", "hello", "--max-new-tokens", "4")
    assert ran.code == 0
    assert ran.out == "0 1 2 3 \n"
    assert "initial#1, 4 tokens, length]" in ran.err


def test_several_prompts_go_to_the_routable_stages_in_turn(rlctl: LiveFleet) -> None:
    ran = rlctl("generate", "one", "two", "--input-ids", "1,2,3", "--max-new-tokens", "2")
    heads = [line for line in ran.out.splitlines() if line.startswith("---")]
    assert [head.split(":")[0] for head in heads] == [f"--- prompt {number}, sample 0" for number in range(3)]
    assert {head.split(": ")[1].split(",")[0] for head in heads} == {"a", "b"}


def test_json_is_the_response_or_an_array_of_them(rlctl: LiveFleet) -> None:
    one = rlctl("generate", "x", "--max-new-tokens", "2", "--rid", "mine", "-o", "json").data
    assert one["rid"] == "mine"
    assert one["samples"][0]["output_ids"] == [0, 1]
    assert one["samples"][0]["finish_reason"]["type"] == "FINISH_TYPE_LENGTH"
    two = rlctl("generate", "x", "y", "--max-new-tokens", "1", "-o", "json").data
    assert [len(response["samples"]) for response in two] == [1, 1]
    assert len(rlctl("generate", "x", "y", "--max-new-tokens", "1", "-o", "name").out.splitlines()) == 2


def test_a_stream_prints_what_is_new_as_it_comes(rlctl: LiveFleet) -> None:
    ran = rlctl("generate", "x", "--max-new-tokens", "3", "--stream")
    assert ran.out == "0 1 2 \n"
    assert "initial#1, 3 tokens, length]" in ran.err
    streamed = rlctl("generate", "x", "--max-new-tokens", "3", "--stream", "-o", "jsonl").out
    parts = [json.loads(line) for line in streamed.splitlines()]
    assert [part["samples"][0]["output_ids"] for part in parts] == [[0], [1], [2], []]


def test_an_answer_without_tokens_names_the_version_of_its_stage(rlctl: LiveFleet) -> None:
    for arguments in ((), ("--stream",)):
        ran = rlctl("generate", "x", "--max-new-tokens", "0", *arguments)
        assert "initial#1, 0 tokens, length]" in ran.err


def test_fields_of_the_engines_own_are_passed_on_and_what_it_says_comes_back(rlctl: LiveFleet) -> None:
    given = (
        "--engine-field",
        "top=[1, 2]",
        "--engine-field",
        "name=plain",
        "--engine-field",
        "regex=a=b",
        "--engine-meta",
    )
    (sample,) = rlctl("generate", "x", "--max-new-tokens", "1", *given, "-o", "json").data["samples"]
    assert sample["engine_meta"]["fields"] == {"top": [1, 2], "name": "plain", "regex": "a=b"}
    (sample,) = rlctl("generate", "x", "--max-new-tokens", "1", "-o", "json").data["samples"]
    assert "engine_meta" not in sample


def test_wide_has_a_line_for_each_sample(rlctl: LiveFleet) -> None:
    header, row = rlctl("generate", "x", "--max-new-tokens", "1", "-o", "wide").out.splitlines()
    assert header.split()[:4] == ["RID", "SLOT", "SAMPLE", "VERSION"]
    assert row.split()[2:4] == ["0", "initial#1"]


def test_what_makes_no_sense_is_a_usage_error(cli: Cli) -> None:
    assert cli("generate").code == 2
    assert cli("generate", "a", "b", "--stream").code == 2
    assert cli("generate", "--input-ids", "1,x").code == 2
    assert cli("generate", "a", "--temperature", "hot").code == 2
    assert cli("generate", "a", "--engine-field", "alone").code == 2


def test_a_dry_run_sends_nothing(cli: Cli) -> None:
    ran = cli("generate", "a", "--dry-run", "--temperature", "0", "--stop", "x", "--stop", "y")
    assert ran.code == 0
    assert 'temperature: 0 stop: "x" stop: "y"' in ran.err


def test_without_a_routable_stage_it_says_what_it_waits_for_and_ends_when_the_time_is_up(make_fleet: Callable) -> None:
    with make_fleet(a=1, b=1) as rlctl:
        rlctl("pause", "--slot", "a")
        rlctl("disable", "b")
        ran = rlctl("generate", "x", "--timeout", "1.5s")
        assert ran.code == 6
        waiting, error, advice = ran.err.splitlines()
        assert waiting == "waiting for a routable stage: a PAUSED, b disabled (rlctl continue, rlctl enable)"
        assert "no stage took the request within 1.5 s: a PAUSED, b disabled  (NO_ROUTABLE_STAGE)" in error
        assert "`rlctl status` says why." in advice


def test_a_model_that_nobody_serves_is_refused_at_once(rlctl: LiveFleet) -> None:
    for arguments in ([], ["--stream"]):
        ran = rlctl("generate", "x", "--model", "nope", *arguments)
        assert ran.code == 2
        assert "MODEL_NOT_FOUND" in ran.err
