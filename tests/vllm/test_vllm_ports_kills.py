"""Fifty updates of two real vLLM servers under load, while server, stage and gateway are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import port_kills
import pytest
from port_load import VLLM

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(2400)]


@pytest.fixture
def kept(vllm: str, tiny: tuple[Any, Path], tmp_path: Path, spawning: dict[str, str]) -> Iterator[port_kills.Kept]:
    checkpoint = port_kills.checkpoint_for_long(tiny[0], tmp_path / "checkpoint")
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **spawning}
    with port_kills.kept_fleet("vllm", checkpoint, tmp_path / "fleet", {}, environment) as kept:
        yield kept


async def test_no_answer_is_stale_or_lost_while_processes_die(kept: port_kills.Kept, tiny: tuple[Any, Path]) -> None:
    await port_kills.run(kept, VLLM, tiny[0], ("abort", "retract", "in_place", "drain"), "vllm")
