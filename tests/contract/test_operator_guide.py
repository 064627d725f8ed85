"""docs/guides/operator.md has a row for every state, outcome and reason of the contract, and no row for others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from rlctl.cli.app.exit_codes import of_operation
from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import Outcome, StageState
from rlctl.v1.results_pb2 import OPERATION_STATE_RUNNING, Operation, OperationState

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "operator.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", GUIDE, flags=re.DOTALL | re.MULTILINE))


def rows(section: str) -> list[list[str]]:
    """The cells of the rows that begin with the name of a value."""
    found = re.findall(r"^\| ([A-Z_]+ \|.*) \|$", SECTIONS[section], flags=re.MULTILINE)
    return [[cell.strip() for cell in row.split(" |")] for row in found]


@pytest.mark.parametrize(
    ("section", "enum", "prefix"),
    [
        ("States of a stage", StageState, "STAGE_STATE_"),
        ("States of an operation", OperationState, "OPERATION_STATE_"),
        ("Outcomes of a target", Outcome, "OUTCOME_"),
    ],
    ids=["stage", "operation", "outcome"],
)
def test_every_value_has_a_row_in_the_order_of_the_contract(section: str, enum: EnumTypeWrapper, prefix: str) -> None:
    values = [name.removeprefix(prefix) for name, number in enum.items() if number]
    assert [row[0] for row in rows(section)] == values


def test_every_reason_has_one_row() -> None:
    assert sorted(row[0] for row in rows("Reasons")) == sorted(Reason.__members__)


def test_every_row_says_what_is_seen_and_what_to_do() -> None:
    for section in ("States of a stage", "States of an operation", "Outcomes of a target", "Reasons"):
        for name, *_, seen, action in rows(section):
            assert seen, name
            assert action, name


def test_the_exit_codes_of_operations_are_those_of_the_command_line() -> None:
    for name, code, *_ in rows("States of an operation"):
        state = OperationState.Value(f"OPERATION_STATE_{name}")
        if state != OPERATION_STATE_RUNNING:
            assert code == str(int(of_operation(Operation(state=state)))), name


def test_every_failure_of_the_guide_is_played_through() -> None:
    weeks = (Path(__file__).parents[1] / "processes").glob("test_week_of_*.py")
    played = "".join(week.read_text() for week in weeks)
    failures = re.findall(r"^\| ([^|]+?) \|", SECTIONS["Failures and their marks"], flags=re.MULTILINE)
    assert failures[0] == "failure"
    assert set(failures[1:]) == set(re.findall(r'Row\("([^"]+)"\)', played))
