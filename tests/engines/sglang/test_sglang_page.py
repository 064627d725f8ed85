"""docs/sglang.md: what it says is refused is refused by the plug-in, and what the plug-in refuses with is on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rlctl_sglang.options import parse_options
from rlctl_sglang.server.process import _arguments

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig
from rlctl.v1 import verbs_pb2

ROOT = Path(__file__).parents[3]
ELSEWHERE = {"FIELD_REQUIRED", "FIELD_CONFLICT", "UPDATE_FENCED", "UPDATE_IN_PROGRESS", "GROUP_EXISTS", "RID_IN_USE"}
"""Refusals that do not come from what SGLang is like."""


def table(head: str = "| asked for |") -> list[list[str]]:
    page = (ROOT / "docs" / "sglang.md").read_text()
    rows = page[page.index(head) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def reasons(text: str) -> set[str]:
    return {word for word in re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b|\bUNSUPPORTED\b", text) if word in Reason.__members__}


def test_every_refusal_on_the_page_is_one_of_the_plugins() -> None:
    raised = set()
    for path in (ROOT / "engines").glob("rlctl_s*/**/*.py"):  # the plug-in, and what it shares with others
        raised |= set(re.findall(r"Reason\.([A-Z_]+)", path.read_text()))
    raised |= {"CHECKPOINT_NOT_FOUND", "PATH_NOT_ALLOWED", "SEGMENT_EXPIRED", "SEGMENT_NOT_FOUND", "GROUP_NOT_FOUND"}
    # The last ones are of rlctl.weights.
    named = set().union(*(reasons(row[2]) for row in table()))
    assert len(table()) > 20
    assert all(len(row) == 3 for row in table())
    assert named <= raised
    state = (ROOT / "engines" / "rlctl_sglang" / "state.py").read_text() + (
        ROOT / "engines" / "rlctl_sglang" / "requests" / "bodies.py"
    ).read_text()
    refused = set(re.findall(r"Reason\.([A-Z_]+)", state)) - ELSEWHERE - {"MEMORY_RELEASED", "ILLEGAL_STATE"}
    assert refused <= named, "the page lacks a row"


def test_what_becomes_of_sglangs_fields_and_flags() -> None:
    """As the page says, row by row."""
    bodies = (ROOT / "engines" / "rlctl_sglang" / "engine.py").read_text()
    loads = bodies[bodies.index("async def _load_by_server") :]
    kinds = set()
    for name, kind, how in table("| name | what becomes of it |"):
        name = name.strip("`")
        kinds.add(kind)
        if kind == "passed on":
            assert f'"{name}": request.' in loads
        elif kind == "argument":
            options = parse_options({name: "true"})
            assert f"--{name.replace('_', '-')}" in _arguments(EngineConfig("m"), options, None)
        elif kind == "each node's own":
            with pytest.raises(RlctlError) as refused:
                parse_options({name: "1"})
            assert (refused.value.reason, refused.value.field) == (Reason.FIELD_INVALID, f"options.{name}")
        else:
            assert f'"{name}": request.' not in bodies, "it is never left to SGLang"
        assert how
    assert kinds == {"passed on", "done by rlctl", "not taken", "argument", "each node's own"}
    keeps = verbs_pb2.UpdateWeightsFromDiskRequest.DESCRIPTOR.fields_by_name
    assert {"is_async", "token_step", "weight_version"} <= set(keeps.keys())
    assert "manifest" not in keeps
