"""What ``rlctl up`` refuses before it starts anything, and what it would start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import Cli

from rlctl.cli.supervisor import set_journal_aside


@pytest.fixture
def up(checkpoint: Callable[[str], str]) -> list[str]:
    return ["up", "--hf-checkpoint", checkpoint("one"), "--engine", "fake", "--listen", "127.0.0.1:0"]


def test_ranks_must_be_divisible_by_those_of_an_engine(cli: Cli, up: list[str]) -> None:
    ran = cli(*up, "--rollout-num-gpus", "5", "--rollout-num-gpus-per-engine", "2")
    assert ran.code == 2
    assert "5 is not divisible by num_gpus_per_engine 2: 2 engines leave 1 over" in ran.err
    ran = cli(*up, "--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2")
    assert "1 engine leaves 1 over" in ran.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--hf-checkpoint", "/nowhere"], "/nowhere"),
        (["--rollout-num-gpus", "0"], "0 is not in the range"),
        (["--option", "pace"], "'pace' is not NAME=VALUE"),
        (["--listen", "5080"], "--listen: '5080' is not HOST:PORT"),
        (["--listen", "0.0.0.0:0"], "say --insecure"),
    ],
)
def test_bad_arguments_are_usage_errors(cli: Cli, up: list[str], arguments: list[str], complaint: str) -> None:
    ran = cli(*up, *arguments)
    assert ran.code == 2
    assert complaint in ran.err


def test_a_dry_run_says_what_would_be_started(cli: Cli, up: list[str], tmp_path: Path) -> None:
    plan = cli(*up, "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2", "--dry-run", "-o", "json").data
    assert [engine["slot"] for engine in plan["engines"]] == ["actor-0", "actor-1"]
    assert {engine["tp_size"] for engine in plan["engines"]} == {2}
    assert not (tmp_path / "state").exists()
    shown = cli(*up, "--model", "ref", "--dry-run", "--option", "pace=0.1")
    assert "ref-0" in shown.out
    assert "pace=0.1" in shown.out
    assert "Nothing was done." in shown.err


def test_taking_down_what_is_not_up_fails_with_a_clear_message(cli: Cli) -> None:
    ran = cli("down", "--name", "lab")
    assert ran.code == 2, "a name that does not exist"
    assert "no fleet 'lab' is up on this machine" in ran.err
    assert cli("down", "-o", "json").error["exit_code"] == 2


def test_the_journal_of_an_earlier_fleet_is_kept_aside(tmp_path: Path) -> None:
    (tmp_path / "journal.previous.db-wal").write_text("older still")
    (tmp_path / "journal.db").write_text("old")
    set_journal_aside(tmp_path)
    assert (tmp_path / "journal.previous.db").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["journal.previous.db"]
    set_journal_aside(tmp_path)
    assert (tmp_path / "journal.previous.db").read_text() == "old"
