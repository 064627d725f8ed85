"""Other projects' clients, unmodified, against real SGLang servers through gateway and data ports.

The module comes after test_sglang_fleet.py, which expects the servers at their first version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import client_runs
import pytest
from port_load import at_engines

from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.blocking import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture
async def url(two: LaunchedFleet, tiny: tuple[Any, Path]) -> AsyncIterator[str]:
    async with client_runs.gateway(two.address, "slime", str(tiny[1])) as url:
        yield url


@pytest.fixture
async def updated(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    """The servers have a version that rlctl has set."""
    await asyncio.to_thread(fleet.update_weights_from_disk, str(tiny[1]), version="clients")


async def test_openais_client(url: str, fleet: Fleet) -> None:
    await client_runs.openai_chats(url)
    await client_runs.openai_leaves(url, lambda: sum(at_engines(fleet).values()))


async def test_slimes_partial_rollouts(url: str, updated: None) -> None:
    await client_runs.slime_rolls_out(url)


async def test_miless_sessions(url: str) -> None:
    await client_runs.miles_session(url)


async def test_verls_adapters(url: str, sglang: str, tiny: tuple[Any, Path]) -> None:
    await client_runs.verl_generates(url, sglang, tiny[1])
