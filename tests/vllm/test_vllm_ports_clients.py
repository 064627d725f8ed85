"""Other projects' clients, unmodified, against a real vLLM server through gateway and data port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import client_runs
import pytest
from port_load import at_engines
from vllm_file import ENVIRONMENT

from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def launched(vllm: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedFleet]:
    """A fleet of one server without adapters: with adapters on a CPU, rlctl refuses log probabilities of a prompt."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(client_runs.TEMPLATE)
    options = {"allowed_roots": str(tmp_path_factory.getbasetemp()), "chat_template": str(template)}
    spec = EngineSpec("actor-0", str(tiny[1]), engine="vllm", options=options, environment=ENVIRONMENT)
    with LaunchedFleet([spec], directory=tmp_path_factory.mktemp("fleet")) as launched:
        yield launched


@pytest.fixture(scope="module")
def fleet(launched: LaunchedFleet) -> Iterator[Fleet]:
    with launched.connect() as fleet:
        yield fleet


@pytest.fixture
async def url(launched: LaunchedFleet, tiny: tuple[Any, Path]) -> AsyncIterator[str]:
    async with client_runs.gateway(launched.address, "vllm", str(tiny[1])) as url:
        yield url


async def test_openais_client(url: str, fleet: Fleet) -> None:
    await client_runs.openai_chats(url)
    await client_runs.openai_leaves(url, lambda: sum(at_engines(fleet).values()))


async def test_skyrls_client_generates(url: str) -> None:
    await client_runs.skyrl_generates(url)


async def test_skyrls_client_updates(url: str, launched: LaunchedFleet, tiny: tuple[Any, Path]) -> None:
    await client_runs.skyrl_updates(url, launched.address, tiny[1])


async def test_trls_client_generates(url: str) -> None:
    await client_runs.trl_generates(url, world_size=1)
