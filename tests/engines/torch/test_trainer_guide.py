"""The code of docs/guides/trainer.md runs, block after block, against torch engines."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1.common_pb2 import STAGE_STATE_READY, VERIFICATION_LEVEL_EXPECTED, VERIFICATION_LEVEL_PROBE

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "trainer.md"


@pytest.fixture
async def fleets(tiny: tuple[Any, Path], checkpoints, tmp_path: Path) -> AsyncIterator[list[InProcessFleet]]:
    """Two stages of the demo's model, and a fleet with one stage of a mixture of experts."""
    shutil.copytree(tiny[1], tmp_path / "tiny")
    shutil.copytree(checkpoints("mixtral"), tmp_path / "moe")
    specs = [StageSpec(slot, str(tmp_path / "tiny"), engine="torch") for slot in ("a", "b")]
    experts = [StageSpec("a", str(tmp_path / "moe"), engine="torch")]
    async with InProcessFleet(tmp_path / "one.db", specs) as one, InProcessFleet(tmp_path / "two.db", experts) as two:
        yield [one, two]


@pytest.mark.timeout(240)
async def test_the_snippets_of_the_guide_run(fleets: list[InProcessFleet], tmp_path: Path) -> None:
    text = GUIDE.read_text()
    names: dict[str, Any] = {}
    for block in re.finditer(r"```python\n(.*?)```", text, flags=re.DOTALL):
        line = text[: block.start()].count("\n") + 1
        code = block[1].replace('"/tmp/', f'"{tmp_path}/')
        for port, fleet in zip((5080, 5081), fleets, strict=True):
            code = code.replace(f"127.0.0.1:{port}", fleet.server.address)
        await asyncio.to_thread(exec, compile("\n" * line + code, str(GUIDE), "exec"), names)
    assert names["versions"], "tokens with their versions"
    assert (names["held"], names["computed"]) == (VERIFICATION_LEVEL_EXPECTED, VERIFICATION_LEVEL_PROBE)
    assert names["result"].version.label == "step-10"
    assert not names["result"].left_out
    stages = [stage for fleet in fleets for stage in fleet.server.coordinator.roster.fleet().stages]
    assert {stage.state for stage in stages} == {STAGE_STATE_READY}
