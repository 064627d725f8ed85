"""docs/sglang.md: what it says is refused is refused by the plug-in, and what the plug-in refuses with is on it."""

from __future__ import annotations

import re
from pathlib import Path

from rlctl.errors import Reason

ROOT = Path(__file__).parents[3]
ELSEWHERE = {"FIELD_REQUIRED", "FIELD_CONFLICT", "UPDATE_FENCED", "UPDATE_IN_PROGRESS", "GROUP_EXISTS", "RID_IN_USE"}
"""Refusals that do not come from what SGLang is like."""


def table() -> list[list[str]]:
    page = (ROOT / "docs" / "sglang.md").read_text()
    rows = page[page.index("| asked for |") :].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def reasons(text: str) -> set[str]:
    return {word for word in re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b|\bUNSUPPORTED\b", text) if word in Reason.__members__}


def test_every_refusal_on_the_page_is_one_of_the_plugins() -> None:
    raised = set()
    for path in (ROOT / "engines" / "rlctl_sglang").glob("*.py"):
        raised |= set(re.findall(r"Reason\.([A-Z_]+)", path.read_text()))
    raised |= {"CHECKPOINT_NOT_FOUND", "PATH_NOT_ALLOWED"}  # of rlctl.weights
    named = set().union(*(reasons(row[2]) for row in table()))
    assert len(table()) > 20
    assert all(len(row) == 3 for row in table())
    assert named <= raised
    state = (ROOT / "engines" / "rlctl_sglang" / "state.py").read_text() + (
        ROOT / "engines" / "rlctl_sglang" / "requests.py"
    ).read_text()
    refused = set(re.findall(r"Reason\.([A-Z_]+)", state)) - ELSEWHERE - {"MEMORY_RELEASED", "ILLEGAL_STATE"}
    assert refused <= named, "the page lacks a row"
