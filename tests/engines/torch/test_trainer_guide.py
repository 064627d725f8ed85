"""The code of docs/guides/trainer.md runs, block after block, against torch engines."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.demo import tiny as demo_tiny
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1.common_pb2 import STAGE_STATE_READY, VERIFICATION_LEVEL_EXPECTED, VERIFICATION_LEVEL_PROBE

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "trainer.md"


@pytest.fixture
async def fleets(tiny: tuple[Any, Path], tmp_path: Path) -> AsyncIterator[list[InProcessFleet]]:
    """Two stages of the demo's model, and a fleet with one stage of a mixture of experts."""
    shutil.copytree(tiny[1], tmp_path / "tiny")
    demo_tiny.save(demo_tiny.make_experts(seed=0), tmp_path / "moe")
    specs = [StageSpec(slot, str(tmp_path / "tiny"), engine="torch") for slot in ("a", "b")]
    experts = [StageSpec("a", str(tmp_path / "moe"), engine="torch")]
    async with InProcessFleet(tmp_path / "one.db", specs) as one, InProcessFleet(tmp_path / "two.db", experts) as two:
        yield [one, two]


def sections() -> dict[str, list[tuple[int, str]]]:
    """Return the snippets of each section that has some, with their lines. The section "" starts the program."""
    text = GUIDE.read_text()
    snippets: dict[str, list[tuple[int, str]]] = {}
    for block in re.finditer(r"```python\n(.*?)```", text, flags=re.DOTALL):
        headings = re.findall(r"^## (.*)$", text[: block.start()], flags=re.MULTILINE)
        line = text[: block.start()].count("\n") + 1
        snippets.setdefault(headings[-1] if headings else "", []).append((line, block[1]))
    return snippets


async def run(line: int, code: str, names: dict[str, Any], fleets: list[InProcessFleet], tmp_path: Path) -> None:
    """Run a snippet with the fleets and directories of the test."""
    code = code.replace('"/tmp/', f'"{tmp_path}/')
    for port, fleet in zip((5080, 5081), fleets, strict=True):
        code = code.replace(f"127.0.0.1:{port}", fleet.server.address)
    await asyncio.to_thread(exec, compile("\n" * line + code, str(GUIDE), "exec"), names)


@pytest.mark.timeout(240)
async def test_the_snippets_of_the_guide_run(fleets: list[InProcessFleet], tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for snippets in sections().values():
        for line, code in snippets:
            await run(line, code, names, fleets, tmp_path)
    assert names["versions"], "tokens with their versions"
    assert (names["held"], names["computed"]) == (VERIFICATION_LEVEL_EXPECTED, VERIFICATION_LEVEL_PROBE)
    assert names["result"].version.label == "step-10"
    assert not names["result"].left_out
    stages = [stage for fleet in fleets for stage in fleet.server.coordinator.roster.fleet().stages]
    assert {stage.state for stage in stages} == {STAGE_STATE_READY}


@pytest.mark.timeout(240)
async def test_each_section_runs_after_the_first_snippet_alone(fleets: list[InProcessFleet], tmp_path: Path) -> None:
    start, *others = sections().values()
    assert len(others) == 9
    for snippets in others:
        names: dict[str, Any] = {}
        for line, code in [*start, *snippets]:
            await run(line, code, names, fleets, tmp_path)
        for name in ("publisher", "fleet"):  # the section on failures has closed them
            await asyncio.to_thread(names[name].close)
